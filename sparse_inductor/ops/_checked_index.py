"""An index of a program's documents that is used only where a checksum proves that they are what it was built of.

On a GPU the host launches the search while the documents are read, and waits for the checksum; on a CPU that comes
first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import compat
from ..aten import sparse_scores as aten
from ..aten.csr import csr
from ._dispatch import call_below_autograd
from .index_search import search_cuda

if TYPE_CHECKING:
    from ..kernels.sparse_scores.checksum import Slot

__all__ = ["CheckedIndex", "Documents", "Found"]

TILE = 1024
"""Words of a checksum's tile, for each half of which there are two keys."""

MOST_SIZES = 64
"""Sizes of queries and k whose launches are kept."""

Documents = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""ids, values, rows and offsets, as `sparse_scores` takes them."""
Found = tuple[Tensor, Tensor]


class CheckedIndex:
    """An index, and the checksums of the documents that it was built of."""

    def __init__(
        self,
        query: Tensor,
        documents: Documents,
        ready: torch.cuda.Event | None,
        k: int,
        num_docs: int,
        lookup: str,
    ) -> None:
        """Waits for `ready`, after which the documents are there; kernels for such queries and k are compiled."""
        from ..index import SparseIndex

        device = documents[0].device
        self._slots: list[Slot] = []
        self._sites: dict[Any, tuple[Any, Any]] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        stream = None if ready is None else torch.cuda.Stream(device)
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(ready)
            matrix = _matrix(documents, num_docs, query.shape[-1], lookup)
            self._keys = _keys(device)
            self._index = SparseIndex.build(matrix, device=device)
            postings, counts, barred = self._index.operands()
            self._operands = list(postings), list(counts), barred
            self._sums: list[int] = []
            query = _plain(query)
            for _ in range(2):  # the second time launches are recorded
                sums, _, _ = self._read(query, documents, k)
            self._sums = sums
            if stream is not None:
                stream.synchronize()
        self.nbytes = sum(self._index.nbytes.values())

    def search(self, query: Tensor, documents: Documents, k: int) -> tuple[Found | None, bool]:
        """The k best, or None for a query with weights that are not finite; and whether the documents are those that
        the index was built of, without which nothing is found."""
        sums, finite, found = self._read(_plain(query), documents, k)
        same = sums == self._sums
        if found is None or not (same and finite):
            return None, same
        return (found if query.dim() == 2 else (found[0][0], found[1][0])), same

    def _read(
        self, query: Tensor, documents: Documents, k: int
    ) -> tuple[list[int], bool, Found | None]:
        """The checksums of documents, whether the query is finite, and what is found if both are as they have to be."""
        if query.is_cuda:
            return self._read_on_gpu(query, documents, k)
        from ..kernels.sparse_scores import cpu as native

        if not native.ready(wait=True):
            raise RuntimeError("there is no C++ compiler for checksums")
        sums = [s for t in documents if t is not None for s in native.checksum(t, self._keys)]
        finite = bool(query.abs().amax() < float("inf"))
        if not finite or sums != self._sums:
            return sums, finite, None
        op = torch.ops.sparse_inductor.index_search
        found: Found = call_below_autograd(op, search_cuda, (query, *self._operands, k))
        return sums, finite, found

    def _read_on_gpu(
        self, query: Tensor, documents: Documents, k: int
    ) -> tuple[list[int], bool, Found]:
        from ..kernels.common.replay import Site
        from ..kernels.sparse_scores import checksum as kernel

        sizes = query.shape, k
        sites = self._sites.get(sizes)
        if sites is None:
            if len(self._sites) >= MOST_SIZES:
                self._sites.clear()
            sites = self._sites[sizes] = Site(kernel.checksum), Site(search_cuda)
        checksum, search = sites
        stream = self._stream(query.device)
        slot = self._slots.pop() if self._slots else kernel.Slot.on(query.device)
        checksum(query, documents, self._keys, slot.totals, slot.result)
        slot.event.record(stream)
        found: Found = search(
            query, *self._operands, k
        )  # launched while the GPU reads the documents
        slot.event.synchronize()
        *sums, lost = slot.result.tolist()
        self._slots.append(slot)
        return sums, not lost, found

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """The current stream; the index's memory is kept until it is done with it."""
        handle = compat.raw_stream(device)
        stream = self._streams.get(handle)
        if stream is None:
            stream = torch.cuda.current_stream(device)
            for t in (*self._operands[0], self._operands[2]):
                t.record_stream(stream)
            self._streams[handle] = stream
        return stream


def _plain(query: Tensor) -> Tensor:
    """[B, V] in fp32."""
    if query.dim() == 2 and query.dtype == torch.float32 and query.is_contiguous():
        return query
    return (query if query.dim() == 2 else query.unsqueeze(0)).detach().float().contiguous()


def _matrix(documents: Documents, N: int, V: int, lookup: str) -> Tensor:
    """The documents as a CSR matrix [N, V], without padding."""
    docs = aten.documents(*documents, N, V, lookup)
    offsets, kept = docs.offsets.long(), docs.terms.long() < V
    if offsets.numel() and bool(((offsets < 0) | (offsets > kept.numel())).any()):
        raise ValueError("offsets lie outside of the entries")
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    return csr(before[offsets], docs.terms[kept].long(), docs.values[kept], (N, V))


def _keys(device: torch.device) -> Tensor:
    """Random keys of the checksums, which no seed of the program's says anything about."""
    drawn = torch.frombuffer(bytearray(os.urandom(16 * TILE)), dtype=torch.int32)
    return drawn.view(2, TILE, 2).to(device)
