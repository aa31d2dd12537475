"""Recognition that belongs to one family or a few: chains of steps, feed-forward blocks, entmax, scoring."""
