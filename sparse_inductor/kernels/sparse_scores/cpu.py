"""What searching a `SparseIndex` on a CPU does in C++: a quarter of the time of ATen's operations, with the same bits.

The source is compiled once a machine, by the C++ compiler that torch.compile needs, in a thread of its own: whoever
searches meanwhile, or where there is no compiler, is served by ATen (`sparse_inductor.ops.index_search`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path

import torch
from torch import Tensor

from ...threads import workers
from ..common.native import compiled

__all__ = ["best_keys", "checksum", "ready"]

log = logging.getLogger("sparse_inductor")

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off")

_PART = 1 << 19  # words that a thread adds up at a time: 4 MiB

_library: ctypes.CDLL | None = None


def ready(wait: bool = False) -> bool:
    """Whether `best_keys` can be called; the first question has it compiled. wait: answer when that has ended."""
    compiling = _begin()
    if wait:
        compiling.join()
    return _library is not None


@functools.cache
def _begin() -> threading.Thread:
    thread = threading.Thread(target=_load, name="sparse_index_compile", daemon=True)
    thread.start()
    return thread


def best_keys(
    postings: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    barred: Tensor | None,
    documents: int,
    first: int,
    k: int,
) -> Tensor:
    """int64 keys (`sparse_inductor.aten.top`) of the k best documents of a segment, in no order.

    postings: offsets int64 [V + 1], docs int32, weights fp32. query: fp32 [V], finite. barred: bool [documents], or
    None. first: the id of the segment's first document.
    """
    assert _library is not None
    offsets, docs, weights = postings
    keys = torch.empty(k, dtype=torch.int64, device="cpu")
    pointers = [t.data_ptr() for t in (offsets, docs, weights, query)]
    marks = 0 if barred is None else barred.data_ptr()
    count = _library.sparse_index_search(
        *pointers, query.numel(), documents, marks, first, k, keys.data_ptr()
    )
    return keys[:count]


def checksum(t: Tensor, keys: Tensor) -> tuple[int, int]:
    """The sums of a tensor's bytes, whose elements lie without gaps; see `sparse_scores.checksum`."""
    assert _library is not None
    add, data, key = _library.sparse_index_checksum, t.data_ptr(), keys.data_ptr()
    bytes_, words = t.numel() * t.element_size(), keys.shape[1]
    tiles, step = -(-bytes_ // (8 * words)), max(1, _PART // words)

    def sums(first: int) -> tuple[int, int]:
        both = (ctypes.c_uint64 * 2)()
        add(data, bytes_, first, min(first + step, tiles), key, words, both)
        return both[0], both[1]

    parts = range(0, tiles, step)
    found = list((workers().map if len(parts) > 1 else map)(sums, parts))
    return sum(one for one, _ in found) % 2**64, sum(two for _, two in found) % 2**64


def _load() -> None:
    global _library
    try:
        library = compiled(SOURCE, *FLAGS, depends_on=_processor())
    except Exception as error:  # no compiler, no folder to write to: ATen serves
        log.debug("the search of a SparseIndex is not compiled: %s", error, exc_info=True)
        return
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    search = library.sparse_index_search
    search.argtypes = [*[pointer] * 4, number, number, pointer, number, number, pointer]
    search.restype = number
    add = library.sparse_index_checksum
    add.argtypes = [pointer, number, number, number, pointer, number, pointer]
    add.restype = None
    _library = library


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be that of many machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
