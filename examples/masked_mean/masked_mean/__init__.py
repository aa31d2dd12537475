"""Masked mean pooling as one operator, and the pattern that puts it in."""
