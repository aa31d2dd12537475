"""Sparse dot-product scoring, and the search of an index."""
