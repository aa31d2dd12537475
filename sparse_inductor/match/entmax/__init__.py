"""Entmax of rows, and attention by it."""
