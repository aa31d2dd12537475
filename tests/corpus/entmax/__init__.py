"""Spellings of entmax attention and of the row transformation that the recogniser's author wrote
down before the recogniser, and near misses.

`rewrite` means that a user of this library would be disappointed without the rewrite, and that it
is exact. `no_rewrite` is another function, or somebody else reads what would no longer exist.
"""
