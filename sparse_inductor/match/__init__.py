"""Matchers that one family of patterns or a few of them use: chains of steps, feed-forward blocks, entmax, scoring."""
