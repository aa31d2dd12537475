"""Sparse dot-product scoring, and the selection of the best documents."""
