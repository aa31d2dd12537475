"""Masked mean pooling as one operator, and the pattern that inserts it."""
