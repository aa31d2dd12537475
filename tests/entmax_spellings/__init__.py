"""Spellings of entmax attention and of the row transformation that the recogniser's author wrote
down before the recogniser, and near misses.

`rewrite` means that a user of this library would be disappointed without the rewrite, and that it
is exact. `no_rewrite` is another function, or somebody else reads what would no longer exist.
"""

from entmax_spellings import (
    attention,
    hand_written,
    heads,
    masks,
    near_misses,
    repositories,
    rows,
    vendored,
)
from entmax_spellings.registry import CASES

__all__ = [
    "CASES",
    "attention",
    "hand_written",
    "heads",
    "masks",
    "near_misses",
    "repositories",
    "rows",
    "vendored",
]
