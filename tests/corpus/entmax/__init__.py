"""Spellings of entmax attention and of entmax over rows, written before their recogniser, and near misses.

`rewrite` means that a user would expect the rewrite and that it is exact. `no_rewrite` means that the program computes
another function, or that it uses an intermediate result that a rewrite would remove.
"""
