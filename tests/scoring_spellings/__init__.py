"""Spellings of sparse scoring that the recogniser's authors had not seen, and near misses.

`rewrite` means that a user of this library would be disappointed without the rewrite and that it is
exact: scores[b, n] = sum over the terms of document n of value * query[b, term].
"""

from scoring_spellings import accumulations, documents, indexing, more, near_misses, postings
from scoring_spellings.registry import CASES

__all__ = ["CASES", "accumulations", "documents", "indexing", "more", "near_misses", "postings"]
