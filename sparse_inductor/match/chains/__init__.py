"""What stands between a linear and a reduction: heads and feed-forward blocks are read by it."""
