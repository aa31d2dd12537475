"""An index of a program's documents, used only if a checksum proves that the documents have not changed since the index
was built.

On a GPU the host plans and launches the search while the checksum kernel reads the documents, then waits for the
checksum. On a CPU the checksum is computed first.
"""

from __future__ import annotations

import dataclasses
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
    from ..kernels.common.replay import Site

TILE = 1024
"""Words in a tile of the checksum. The keys are [2 sums, TILE, 2 halves of a word]."""

MOST_SIZES = 64
"""The largest number of pairs of a query layout and k for which searches are kept; one more drops all of them."""

Documents = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""ids, values, rows and offsets, as `sparse_scores` takes them."""
Found = tuple[Tensor, Tensor]


class CheckedIndex:
    """An index, and the checksums of its documents at the time of its construction."""

    def __init__(
        self,
        query: Tensor,
        documents: Documents,
        ready: torch.cuda.Event | None,
        k: int,
        num_docs: int,
        lookup: str,
    ) -> None:
        """Build the index once `ready` is reached (the event after the copy of the documents), and compile the kernels
        for queries of this layout and k."""
        from ..index import SparseIndex

        device = documents[0].device
        self._searches: dict[Any, Search] = {}
        stream = None if ready is None else torch.cuda.Stream(device)
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(ready)
            matrix = _matrix(documents, num_docs, query.shape[-1], lookup)
            index = SparseIndex.build(matrix, device=device)
            postings, counts, barred = index.operands()
            self._held = _Held(_keys(device), list(postings), list(counts), barred)
            search = self.search(query, k)
            for _ in range(2):  # the second run records the launches
                sums, _, _ = search.read(_plain(query), documents)
            self._held.sums[:] = sums
            if stream is not None:
                stream.synchronize()
        self.nbytes = sum(index.nbytes.values())

    def search(self, query: Tensor, k: int) -> Search:
        """The search of the k best for queries with this one's shape, strides and dtype."""
        sizes = query.shape, query.stride(), query.dtype, k
        found = self._searches.get(sizes)
        if found is None:
            if len(self._searches) >= MOST_SIZES:
                self._searches.clear()
            found = self._searches[sizes] = Search(self._held, query, k)
        return found


@dataclasses.dataclass(frozen=True)
class _Held:
    """The state that searches of an index share; `sums` are the documents' checksums."""

    keys: Tensor
    postings: list[Tensor]
    counts: list[int]
    barred: Tensor
    sums: list[int] = dataclasses.field(default_factory=list)
    streams: dict[int, torch.cuda.Stream] = dataclasses.field(default_factory=dict)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The current stream. At its first use the index's tensors are recorded on it, so that their memory is not
        reused while a kernel on this stream reads it."""
        handle = compat.raw_stream(device)
        stream = self.streams.get(handle)
        if stream is None:
            stream = torch.cuda.current_stream(device)
            for t in (*self.postings, self.barred):
                t.record_stream(stream)
            self.streams[handle] = stream
        return stream


class Search:
    """A search for queries of one shape, stride and dtype. On a GPU its launches are recorded and replayed."""

    def __init__(self, held: _Held, query: Tensor, k: int) -> None:
        self.k, self._held, self._device = k, held, query.device
        self._as_it_is, self._single = _plain(query) is query, query.dim() == 1
        self._operands = held.postings, held.counts, held.barred, k
        self._idle: list[_Checksum] = []
        self._best: Site | None = None
        if query.is_cuda:
            from ..kernels.common.replay import Site

            self._best = Site(search_cuda, kept=self._operands)

    def __call__(self, query: Tensor, documents: Documents) -> tuple[Found | None, bool]:
        """(the k best, or None if the documents have changed or the query is not finite; whether the documents are
        unchanged)."""
        sums, finite, found = self.read(query if self._as_it_is else _plain(query), documents)
        same = sums == self._held.sums
        if found is None or not (same and finite):
            return None, same
        return ((found[0][0], found[1][0]) if self._single else found), same

    def read(self, query: Tensor, documents: Documents) -> tuple[list[int], bool, Found | None]:
        """(the checksums of the documents, whether the query is finite, the k best). The last is valid only for
        matching checksums and a finite query, and may be None otherwise."""
        if self._best is not None:
            return self._read_on_gpu(self._best, query, documents)
        from ..kernels.sparse_scores import cpu as native

        if not native.ready(wait=True):
            raise RuntimeError("there is no C++ compiler for checksums")
        sums = [s for t in documents if t is not None for s in native.checksum(t, self._held.keys)]
        finite = bool(query.abs().amax() < float("inf"))
        if not finite or sums != self._held.sums:
            return sums, finite, None
        op = torch.ops.sparse_inductor.index_search
        found: Found = call_below_autograd(op, search_cuda, (query, *self._operands))
        return sums, finite, found

    def _read_on_gpu(
        self, best: Site, query: Tensor, documents: Documents
    ) -> tuple[list[int], bool, Found | None]:
        made = self._idle.pop() if self._idle else _Checksum(self._held.keys)
        # The checksum is launched first, so that the host plans the search while the GPU reads the documents.
        made.launch(query, *documents)
        made.event.record(self._held.stream(self._device))
        try:
            found: Found = best(query)
        finally:  # also after an error, since the checksum's buffers may be freed then
            made.event.synchronize()
        *sums, lost = made.result.tolist()
        self._idle.append(made)
        return sums, not lost, found


class _Checksum:
    """The buffers of one checksum in flight, its launch, and the event that follows it."""

    def __init__(self, keys: Tensor) -> None:
        from ..kernels.common.replay import Site
        from ..kernels.sparse_scores.checksum import buffers, checksum

        totals, self.result = buffers(keys.device)
        self.launch = Site(checksum, kept=(totals, self.result, keys))
        self.event = torch.cuda.Event()


def _plain(query: Tensor) -> Tensor:
    """The query as a contiguous fp32 tensor [B, V]."""
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
    """Random keys of the checksums, from the operating system, so they do not depend on the program's seeds."""
    drawn = torch.frombuffer(bytearray(os.urandom(16 * TILE)), dtype=torch.int32)
    return drawn.view(2, TILE, 2).to(device)
