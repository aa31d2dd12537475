"""An exact top-k index over sparse documents; see `SparseIndex`."""

from .sharded import ShardedIndex
from .sparse_index import SparseIndex
from .storage import IndexFileError

__all__ = ["IndexFileError", "ShardedIndex", "SparseIndex"]
