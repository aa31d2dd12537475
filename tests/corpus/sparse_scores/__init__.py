"""Spellings of sparse scoring that the recogniser's authors had not seen, and near misses.

`rewrite` means that a user would expect the rewrite and that it is exact:
scores[b, n] = sum over the terms of document n of value * query[b, term].
"""
