"""Search of a `SparseIndex` on a CPU in C++: a quarter of the time of ATen's operations, with bitwise equal results.

The source is compiled once per machine, by the C++ compiler that torch.compile needs, in a background thread. Until it
is compiled, or without a compiler, ATen computes the search (`sparse_inductor.ops.index_search`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...threads import workers
from ..common.native import compiled, is_compiled

log = logging.getLogger("sparse_inductor")

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off")

# The ids of allowed documents are listed if at most one document in _FEW is allowed.
_FEW = 4
_PART = 1 << 19  # words per task of a checksum: 4 MiB

_library: ctypes.CDLL | None = None


def ready(wait: bool = False, worth_compiling: bool = True) -> bool:
    """Whether `Segments` can be searched. The first call with worth_compiling starts the compilation; any call loads a
    library that was compiled earlier. wait: wait until this has ended."""
    if _library is None and (worth_compiling or _compiled_before()):
        compiling = _begin()
        if wait:
            compiling.join()
    return _library is not None


@functools.cache
def _compiled_before() -> bool:
    return is_compiled(SOURCE, *FLAGS, depends_on=_processor())


@functools.cache
def _begin() -> threading.Thread:
    thread = threading.Thread(target=_load, name="sparse_index_compile", daemon=True)
    thread.start()
    return thread


class Segments:
    """Segments of documents as the C++ functions read them.

    postings: three tensors per segment, offsets int64 [V + 1], docs int32, weights fp32. counts: documents per segment.
    barred: bool, the documents of all segments that must not be in a result.
    """

    def __init__(self, postings: Sequence[Tensor], counts: Sequence[int], barred: Tensor) -> None:
        self.first = [0, *itertools.accumulate(counts)]  # the id of each segment's first document
        addresses = [t.data_ptr() for t in postings]
        lists = [
            number for i, n in enumerate(counts) for number in (n, *addresses[3 * i : 3 * i + 3])
        ]
        self._lists = torch.tensor(lists, dtype=torch.int64, device="cpu")
        N = barred.numel()
        live = N - np.count_nonzero(barred.numpy())  # takes a tenth of ATen's time
        allowed = None
        if live * _FEW <= N:
            assert _library is not None
            allowed = torch.empty(live, dtype=torch.int64, device="cpu")
            _library.sparse_index_unmarked(barred.data_ptr(), N, allowed.data_ptr())
        self._held = postings, None if live == N else barred, allowed

    def search(self, queries: Tensor, segments: range, keys: Tensor, finite: Tensor) -> None:
        """Search some segments for queries fp32 [b, V].

        Writes the keys [b, k] (`sparse_inductor.aten.top`) of the k best documents, in descending order, padded with
        the least int64, and finite [b], bool. A query that is not finite has no results.
        """
        assert _library is not None
        first = self.first[segments.start]
        _, barred, allowed = self._held
        _library.sparse_index_search(
            self._lists.data_ptr() + 32 * segments.start, len(segments),
            queries.data_ptr(), *queries.shape, first,
            0 if barred is None else barred.data_ptr() + first,
            0 if allowed is None else allowed.data_ptr(), 0 if allowed is None else allowed.numel(),
            keys.shape[1], keys.data_ptr(), keys.stride(0), finite.data_ptr(),
        )  # fmt: skip


def checksum(t: Tensor, keys: Tensor) -> tuple[int, int]:
    """The two sums of a dense tensor's bytes; see `sparse_scores.checksum`."""
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
    except Exception as error:  # without a compiler or a writable folder, ATen is used
        log.debug("the search of a SparseIndex is not compiled: %s", error, exc_info=True)
        return
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    search = library.sparse_index_search
    search.argtypes = [
        pointer, number, pointer, number, number, number, pointer, pointer, number, number, pointer, number, pointer,
    ]  # fmt: skip
    search.restype = None
    unmarked = library.sparse_index_unmarked
    unmarked.argtypes, unmarked.restype = [pointer, number, pointer], None
    add = library.sparse_index_checksum
    add.argtypes = [pointer, number, number, number, pointer, number, pointer]
    add.restype = None
    _library = library


def _processor() -> str:
    """The processor's flags, on which `-march=native` depends: machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
