"""An index of a program's documents that is used only where a checksum proves that they are what it was built of.

On a GPU the host launches the search while the documents are read, and waits for the checksum; on a CPU that comes
first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _sparse_scores_aten as aten
from ._csr import csr
from ._dispatch import call_below_autograd
from .index_search import search_cuda

__all__ = ["CheckedIndex", "Documents", "Found"]

TILE = 1024
"""Words of a checksum's tile, for each half of which there are two keys."""

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
        self._slots: list[tuple[Any, torch.cuda.Event]] = []
        self._streams: set[int] = set()
        stream = None if ready is None else torch.cuda.Stream(device)
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(ready)
            self._keys = _keys(device)
            matrix = _matrix(documents, num_docs, query.shape[-1], lookup)
            self._index = SparseIndex.build(matrix, device=device)
            postings, counts, barred = self._index.operands()
            self._operands = list(postings), list(counts), barred
            query = _plain(query)
            self._sums = self._begin(query, documents)()[0]
            if stream is not None:
                self._found(query, k)
                stream.synchronize()
        self.nbytes = sum(self._index.nbytes.values())

    def search(self, query: Tensor, documents: Documents, k: int) -> tuple[Found | None, bool]:
        """The k best, or None for a query with weights that are not finite; and whether the documents are those that
        the index was built of, without which nothing is found."""
        query = _plain(query)
        end = self._begin(query, documents)
        if query.is_cuda:
            self._use_on(torch.cuda.current_stream(query.device))
            # Launched while the GPU reads the documents.
            found: Found | None = self._found(query, k)
            sums, finite = end()
        else:
            sums, finite = end()
            found = self._found(query, k) if finite and sums == self._sums else None
        same = sums == self._sums
        return (found if same and finite else None), same

    def _found(self, query: Tensor, k: int) -> Found:
        op = torch.ops.sparse_inductor.index_search
        return call_below_autograd(op, search_cuda, (query, *self._operands, k))

    def _begin(self, query: Tensor, documents: Documents) -> Callable[[], tuple[list[int], bool]]:
        """Have checksums made; what waits for them says whether the query is finite as well."""
        if query.is_cuda:
            from ..kernels import sparse_scores_checksum as kernel

            try:
                slot, event = self._slots.pop()
            except IndexError:
                slot, event = kernel.Slot.on(query.device), torch.cuda.Event()
            kernel.checksum(slot, documents, query, self._keys)
            event.record()

            def end() -> tuple[list[int], bool]:
                event.synchronize()
                *sums, lost = slot.told.tolist()
                self._slots.append((slot, event))
                return sums, not lost

            return end
        from ..kernels import sparse_scores_cpu as native

        if not native.ready(wait=True):
            raise RuntimeError("there is no C++ compiler for checksums")
        sums = [s for t in documents if t is not None for s in native.checksum(t, self._keys)]
        return lambda: (sums, bool(torch.isfinite(query).all()))

    def _use_on(self, stream: torch.cuda.Stream) -> None:
        """Keep the index's memory until a stream that searches it is done with it."""
        if stream.cuda_stream in self._streams:
            return
        for t in (*self._operands[0], self._operands[2]):
            t.record_stream(stream)
        self._streams.add(stream.cuda_stream)


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
