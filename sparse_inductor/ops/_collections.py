"""Indexes of document collections that programs hold as tensors, built for collections that do not change.

If the version counters of a collection's tensors stay the same for several calls in a row, the tensors are copied and
an index is built from the copy (`SparseIndex`; in the background for a large collection). From then on a search reads
the documents only to compute a checksum, which proves that the index is valid: a write through `.data`, NumPy, DLPack
or a kernel does not change a version counter. If the checksum differs, both the search's result and the index are
dropped, and the next index needs twice as many unchanged calls in a row.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..notices import bytes_text, count_text
from ..policy import unrest
from ..policy.break_even import look_up
from ..threads import in_a_forked_child
from ._checked_index import CheckedIndex, Documents, Found, Search

log = logging.getLogger("sparse_inductor")

MEMORY_VARIABLE = "SPARSE_INDUCTOR_INDEX_MEMORY"
"""The memory limit in bytes for all indexes on a device together, as in "2G"; 0 disables indexes. Default: a quarter of
the free memory."""

PATIENCE = 8
"""The number of calls in a row with unchanged documents after which an index is built."""
ON_THE_SPOT = 1 << 18
"""The largest number of entries for which the call that triggers an index builds it synchronously."""


def collection_of(
    query: Tensor,
    documents: Documents,
    held: int,
    num_docs: int,
    k: int,
    out_dtype: torch.dtype,
    lookup: str,
) -> Collection | None:
    """The collection of a call's documents (ids, values, rows, offsets), registered at the first call; None if no index
    supports the call, or if none would be faster.

    held: a bit mask of the document tensors that the program may keep for the next call. Only their version counters
    are compared; changes of the others are found by the checksum.
    """
    ids, values = documents[:2]
    if out_dtype != torch.float32 or values.dtype == torch.float64:
        return None
    queries = query.shape[0] if query.dim() == 2 else 1
    if not _pays(query.device, queries, num_docs, ids.numel(), k):
        return None
    storages = [t.untyped_storage() for t in _held(documents, held)]
    key = (
        query.device, query.shape[-1], num_docs, lookup, held, *map(id, storages),
        *(None if t is None else (t.storage_offset(), t.shape, t.stride(), t.dtype) for t in documents),
    )  # fmt: skip
    found = _known.get(key)
    if found is not None:
        return found
    if memory_limit() == 0 or not storages:
        return None
    if not all(t is None or _is_dense(t) for t in documents):
        return None
    found = Collection(documents, held, num_docs, query.shape[-1], lookup)
    found.unrest.changed += 1
    with _lock:
        _known[key] = found
    for storage in storages:  # free the index together with the documents
        weakref.finalize(storage, _drop, key, weakref.ref(found)).atexit = False
    return found


@functools.lru_cache(1024)
def _pays(device: torch.device, queries: int, documents: int, entries: int, k: int) -> bool:
    """Whether a checksum and a search are faster than scoring."""
    sizes = {"queries": queries, "documents": documents, "entries": entries, "best": k}
    return look_up("sparse_scores", device, **sizes, constant=True).below > 0


def collections() -> list[Collection]:
    """The live collections, oldest first."""
    with _lock:
        return list(_known.values())


def forget() -> None:
    """Drop all collections and their indexes."""
    with _lock:
        _known.clear()
        unrest.known.clear()
    _pays.cache_clear()


def memory_limit() -> int | None:
    """The value of MEMORY_VARIABLE in bytes, or None if it is not set."""
    text = os.environ.get(MEMORY_VARIABLE, "").strip().upper().removesuffix("B").removesuffix("I")
    if not text:
        return None
    unit = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1], 0)
    try:
        return int(float(text[:-1] if unit else text) * (1 << unit))
    except ValueError:
        log.warning("%s takes bytes as in 500M or 2G, got %r", MEMORY_VARIABLE, text)
        return 0


class Collection:
    """The documents of a sequence of calls, and their index if one has been built."""

    def __init__(
        self, documents: Documents, held: int, num_docs: int, num_terms: int, lookup: str
    ) -> None:
        self.num_docs, self.num_terms, self.lookup = num_docs, num_terms, lookup
        self.device = documents[0].device
        self.searches = self.changes = 0
        self._shape, self._held = documents[0].shape, held
        self._versions = self._versions_of(documents)
        self._calls, self._patience = 0, PATIENCE
        self.unrest = self._find_unrest()
        self._built: CheckedIndex | None = None
        self._building = False
        self._why = ""  # if not empty, the reason why no index will be built
        self._lock = threading.Lock()

    def _versions_of(self, documents: Documents) -> tuple[int, ...]:
        return tuple(0 if t.is_inference() else t._version for t in _held(documents, self._held))

    def _find_unrest(self) -> unrest.Unrest:
        """The `Unrest` of documents of this shape. It is looked up when documents change; a search only increments its
        counter."""
        return unrest.unrest_of(self.device, self.num_terms, self._shape)

    @property
    def nbytes(self) -> int:
        """The size of the index in bytes."""
        return 0 if self._built is None else self._built.nbytes

    @property
    def note(self) -> str:
        """The reason why documents are scored rather than searched; empty if they are searched."""
        if self._built is not None:
            return ""
        return (
            self._why or f"an index is built after {self._patience} calls with the same documents"
        )

    def __str__(self) -> str:
        what = f"{self.num_docs:,} documents on {self.device}"
        if self._built is not None:
            what += f", an index of {bytes_text(self.nbytes)}"
        if self.changes:
            what += f", {count_text(self.changes, 'change')}"
        note = self.note
        return f"{what}: " + (
            f"scored, for {note}" if note else f"searched {self.searches:,} times"
        )

    def as_dict(self) -> dict[str, Any]:
        """The entry of the report, for JSON."""
        return {
            "documents": self.num_docs, "device": str(self.device), "bytes": self.nbytes,
            "searches": self.searches, "changes": self.changes, "note": self.note,
        }  # fmt: skip

    def search(self, query: Tensor, k: int) -> Search | None:
        """The search of the k best for queries with this one's shape, strides and dtype; None without an index."""
        built = self._built
        return None if built is None else built.search(query, k)

    def topk(
        self,
        query: Tensor,
        documents: Documents,
        k: int,
        search: Search | None,
        written: Callable[[], Found],
    ) -> Found:
        """The k best documents: by a search if the index is valid for these documents, else by calling `written`, which
        computes the operator as written."""
        if search is None:
            self._count(query, documents, k)
            return written()
        try:
            found, same = search(query, documents)
        except Exception as error:
            self._refuse(f"searching its index failed: {type(error).__name__}: {error}")
            return written()
        if not same:
            self._changed(self._versions_of(documents))
        if found is None:
            return written()
        self.searches += 1
        self.unrest.searches += 1
        return found

    def _changed(self, versions: tuple[int, ...]) -> None:
        with self._lock:
            if self._built is not None:
                self.changes += 1
                self._patience *= 2
            self._built, self._calls, self._versions, self._why = None, 0, versions, ""
            self.unrest = self._find_unrest()
            self.unrest.changed += 1

    def _count(self, query: Tensor, documents: Documents, k: int) -> None:
        """Count a call without an index, and build one after enough calls in a row with the same versions."""
        versions = self._versions_of(documents)
        if versions != self._versions:
            self._changed(versions)
            return
        with self._lock:
            self._calls += 1
            if self._calls < self._patience or self._building or self._why:
                return
            self._building = True
        beside = documents[0].numel() > ON_THE_SPOT
        beside = beside and not torch.are_deterministic_algorithms_enabled()
        try:
            args = *_copied(query, documents), k, versions, beside
            if beside:
                threading.Thread(target=self._build, args=args, name="sparse_index_build").start()
            else:
                self._build(*args)
        except RuntimeError as error:  # no memory for a copy, no thread
            self._refuse(f"no index can be built: {error}")
        except BaseException:  # interrupted: a later call tries again
            self._building = False
            raise

    def _build(
        self,
        query: Tensor,
        documents: Documents,
        ready: torch.cuda.Event | None,
        k: int,
        versions: tuple[int, ...],
        beside: bool,
    ) -> None:
        """Build the index. beside: this runs in a background thread, while the program may capture CUDA graphs."""
        try:
            if beside and self.device.type == "cuda" and not compat.works_beside_captures():
                raise RuntimeError("this driver allows none beside the capture of a CUDA graph")
            _check_memory(documents, self)
            built = CheckedIndex(query, documents, ready, k, self.num_docs, self.lookup)
        except Exception as error:
            self._refuse(f"no index can be built: {error}")
            return
        with self._lock:
            self._building = False
            if self._versions == versions:
                self._built = built
                log.info("sparse_scores: %s", self)

    def _refuse(self, why: str) -> None:
        log.debug("%s", why, exc_info=True)
        with self._lock:
            self._built, self._building, self._why = None, False, why


def _copied(query: Tensor, documents: Documents) -> tuple[Tensor, Documents, Any]:
    """Copies of the query and the documents, and, on a GPU, an event recorded after the copies."""
    copies = tuple(None if t is None else t.detach().clone() for t in documents)
    query = query.detach().clone()
    ready = None
    if query.is_cuda:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(query.device))
    return query, copies, ready  # type: ignore[return-value]


def _check_memory(documents: Documents, of: Collection) -> None:
    """Raises MemoryError if an index of these documents would exceed the memory limit."""
    entries, device = documents[0].numel(), documents[0].device
    # Rows and postings take 16 bytes per entry. Each chunk of documents (on a GPU) or segment (on a CPU) has tables of
    # one number per term.
    tables = 4 * (-(-of.num_docs >> 13) if device.type == "cuda" else 2 * -(-of.num_docs >> 17))
    wanted = 16 * entries + tables * of.num_terms
    limit = memory_limit()
    taken = sum(c.nbytes for c in collections() if c.device == device)
    if limit is None:
        limit = (_free(device) + taken) // 4
    if wanted + taken > limit:
        raise MemoryError(
            f"it would take about {wanted >> 20:,} MiB, more than the limit of {limit >> 20:,} MiB leaves"
            f" ({MEMORY_VARIABLE})"
        )


def _free(device: torch.device) -> int:
    """The number of free bytes on a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:
            return next(
                int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return 4 << 30


def _is_dense(t: Tensor) -> bool:
    """Whether a tensor is contiguous up to a permutation of its dimensions: no gaps and no overlap."""
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    return t.is_contiguous() or t.permute(order).is_contiguous()


def _held(documents: Documents, held: int) -> list[Tensor]:
    return [t for i, t in enumerate(documents) if t is not None and held >> i & 1]


def _drop(key: Hashable, collection: weakref.ref[Collection]) -> None:
    with _lock:
        if key in _known and _known[key] is collection():
            del _known[key]


_lock = threading.RLock()  # reentrant: a finalizer may run while this thread holds it
_known: dict[Hashable, Collection] = {}


@in_a_forked_child
def _in_child() -> None:
    """Reset the state in a forked process, which has none of the builder threads and cannot use the GPU."""
    global _lock
    _lock = threading.RLock()
    _known.clear()
