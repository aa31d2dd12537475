"""An exact top-k index over sparse documents; see `SparseIndex`."""

from .ciff import read_ciff, write_ciff
from .impacts import Imported, read_impacts, write_impacts
from .named import NamedIndex
from .sharded import ShardedIndex
from .sparse_index import SparseIndex
from .storage import IndexFileError
from .streamed import StreamedIndex

__all__ = [
    "Imported",
    "IndexFileError",
    "NamedIndex",
    "ShardedIndex",
    "SparseIndex",
    "StreamedIndex",
    "read_ciff",
    "read_impacts",
    "write_ciff",
    "write_impacts",
]
