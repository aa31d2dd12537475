"""Entmax of rows, and attention with entmax in place of softmax."""
