"""Rows with few entries: exact top-k, sums over entries, products with sparse matrices."""
