"""Documents in host memory that are searched on a GPU, a part at a time."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from sparse_inductor.ops._merge import keys, merged

from . import answers
from .contents import Contents, own_settings
from .documents import as_count
from .queries import queries_of
from .segment import Segment
from .sparse_index import SparseIndex

_ALIGNED = 512  # bytes to which each tensor begins in a part


class StreamedIndex:
    """Searches an index in host memory on a GPU that it does not fit.

        index = SparseIndex.build(documents)            # on the CPU, or SparseIndex.load
        streamed = StreamedIndex(index, "cuda")
        scores, ids = streamed.search(queries, k=1000)  # the bits of index.search, on the GPU

    The documents are put into parts, each as a GPU searches it, in pinned memory of the host: about 10 bytes a posting
    (7 where weights are "int8"), beside the index itself. A search copies part after part to one of two buffers of the
    GPU while it searches the other; all queries of a call share the copies, so that large batches cost little more than
    one query. The first search makes the parts, and the next ones those that changed. Appends, deletes and files are
    those of the index; a search sees the documents of one moment. Threads may use it at once: their searches wait for
    each other.
    """

    def __init__(
        self,
        index: SparseIndex,
        device: torch.device | str = "cuda",
        *,
        part_documents: int = 1 << 20,
    ) -> None:
        """`index` lives on the CPU. The GPU holds two parts of `part_documents` documents, or a few more, each; what
        making one takes for a moment is several times that.

        Raises ValueError for an index that lives elsewhere, and for `part_documents` < 1.
        """
        if index.device.type != "cpu":
            raise ValueError(f"the index must live on the CPU, not on {index.device}")
        if as_count(part_documents, "part_documents") < 1:
            raise ValueError("part_documents must be at least 1")
        self.index = index
        self.part_documents = part_documents
        self._buffers = _Buffers(torch.zeros(0, device=device).device)
        self._parts: dict[tuple[int, ...], _Part] = {}
        self._searching = threading.Lock()

    @property
    def device(self) -> torch.device:
        """Where searches run."""
        return self._buffers.device

    def __len__(self) -> int:
        """Documents ever added."""
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory that the parts take."""
        return sum(p.blob.numel() for p in self._parts.values())

    def search(
        self,
        queries: Any,
        k: SupportsIndex,
        *,
        allow: Any = None,
        deny: Any = None,
        offset: SupportsIndex = 0,
        min_score: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`SparseIndex.search`, with results on the GPU. Not within a compiled program."""
        first = as_count(offset, "offset")
        most = as_count(k, "k") + first
        contents = self.index._contents
        given = queries_of(queries, self.index.num_terms, self.device)
        barred = answers.barred_in(contents, allow, deny).to(self.device)
        with self._searching:
            parts = self._parts_of(contents)
            scores, ids = answers.in_blocks(
                given, barred, lambda q, own: self._search(q, own, parts, most)
            )
        if given.single:
            scores, ids = scores[0], ids[0]
        return answers.page(scores, ids, first, min_score)

    def _search(
        self, q: Tensor, barred: Tensor, parts: Sequence[_Part], k: int
    ) -> tuple[Tensor, Tensor]:
        best, at = None, 0
        op = torch.ops.sparse_inductor.index_search
        for part, postings in self._buffers.each(parts):
            count = sum(part.counts)
            own = barred[..., at : at + count].contiguous()
            scores, ids = op(q, postings, part.counts, own, k)
            found = keys(scores, ids, at)
            best = found if best is None else torch.cat((best, found), 1).topk(k).values
            at += count
        if best is None:
            return op(q, [], [], barred, k)
        return merged(best[None], scores)

    def _parts_of(self, contents: Contents) -> list[_Part]:
        """Parts of all documents; of segments that were in one before, those that are there."""
        groups: list[list[Segment]] = [[]]
        for s in contents.segments:
            if sum(g.count for g in groups[-1]) >= self.part_documents:
                groups.append([])
            groups[-1].append(s)
        wanted = {tuple(map(id, g)): g for g in groups if g}
        self._parts = {name: part for name, part in self._parts.items() if name in wanted}
        with own_settings():
            for name, group in wanted.items():
                if name not in self._parts:
                    self._parts[name] = _Part.of(group, contents.num_terms, self.device)
        return [self._parts[name] for name in wanted]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Some segments, kept so that their ids stay theirs, and what `index_search` takes of them as one piece of memory:
    dtype, shape and first byte of each tensor in `blob`, uint8."""

    segments: Sequence[Segment]
    counts: list[int]
    blob: Tensor
    layout: list[tuple[torch.dtype, torch.Size, int]]

    @staticmethod
    def of(segments: Sequence[Segment], num_terms: int, device: torch.device) -> _Part:
        """Made on the device."""
        none = torch.zeros(sum(s.count for s in segments), dtype=torch.bool, device=device)
        made = Contents.of(num_terms, [s.to(device) for s in segments], none)
        layout, end = [], 0
        for t in made.postings:
            layout.append((t.dtype, t.shape, end))
            end += -(-t.numel() * t.element_size() // _ALIGNED) * _ALIGNED
        blob = torch.zeros(
            end + _ALIGNED, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
        )
        part = _Part(segments, made.counts, blob, layout)
        for t, place in zip(made.postings, part.views(blob)):
            place.copy_(t)
        return part

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in a copy of `blob`."""
        return [
            memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for dtype, shape, at in self.layout
        ]


class _Buffers:
    """Two pieces of a GPU's memory into which parts are copied in turn, by a stream of its own. On a CPU the same
    without streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held = [torch.zeros(0, dtype=torch.uint8, device=device)] * 2
        if device.type == "cuda":
            self._copying = torch.cuda.Stream(device)
            self._copied, self._read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def each(self, parts: Iterable[_Part]) -> Iterator[tuple[_Part, list[Tensor]]]:
        """Each part with its tensors on the device, which are there until the next but one is asked for."""
        parts = list(parts)
        size = max((p.blob.numel() for p in parts), default=0)
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        if self._held[0].numel() < size:
            if on_gpu:
                torch.cuda.synchronize(self.device)
            self._held = []
            self._held = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in "ab"]
            if stream is not None:
                self._copying.wait_stream(stream)
        for number, part in enumerate(parts):
            slot = number % 2
            memory = self._held[slot][: part.blob.numel()]
            if stream is None:
                memory.copy_(part.blob)
                yield part, part.views(memory)
                continue
            self._copying.wait_event(self._read[slot])
            with torch.cuda.stream(self._copying):
                memory.copy_(part.blob, non_blocking=True)
                self._copied[slot].record(self._copying)
            stream.wait_event(self._copied[slot])
            try:
                yield part, part.views(memory)
            finally:
                self._read[slot].record(stream)
