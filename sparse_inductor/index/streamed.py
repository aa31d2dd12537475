"""Search on a GPU of documents in host memory, one part at a time."""

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

_ALIGNED = 512  # alignment in bytes of each tensor in a part


class StreamedIndex:
    """A search on a GPU of an index in host memory that does not fit into GPU memory.

        index = SparseIndex.build(documents)            # on the CPU, or SparseIndex.load
        streamed = StreamedIndex(index, "cuda")
        scores, ids = streamed.search(queries, k=1000)  # the bits of index.search, on the GPU

    The documents are divided into parts in the format that a GPU searches, in pinned host memory: about 10 bytes per
    posting (7 if weights are "int8"), in addition to the index itself. A search copies one part after the other to one
    of two GPU buffers while it searches the other. All queries of a call share the copies, so a large batch costs
    little more than one query. The first search builds the parts; later searches rebuild only the parts that changed.
    Appends, deletes and files are those of the index. A search sees one consistent set of documents. The object is
    thread-safe; its searches wait for each other.
    """

    def __init__(
        self,
        index: SparseIndex,
        device: torch.device | str = "cuda",
        *,
        part_documents: int = 1 << 20,
    ) -> None:
        """Search `index`, which must be on the CPU. The GPU holds two parts of `part_documents` documents, or a few
        more, each. Building a part temporarily takes several times the memory of one.

        Raises ValueError if the index is on another device or `part_documents` < 1.
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
        """The device of searches and results."""
        return self._buffers.device

    def __len__(self) -> int:
        """The number of documents ever added."""
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """The size of the parts in pinned memory, in bytes."""
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
        """Same as `SparseIndex.search`, with results on the GPU. Not supported in a compiled program."""
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
        """Return the parts of all documents. A part is reused if its group of segments is unchanged."""
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
    """A group of segments, and the tensors that `index_search` takes for them in one buffer.

    segments: kept alive, because `_parts_of` identifies them by `id`. blob: uint8, the buffer. layout: dtype, shape and
    first byte in `blob` of each tensor.
    """

    segments: Sequence[Segment]
    counts: list[int]
    blob: Tensor
    layout: list[tuple[torch.dtype, torch.Size, int]]

    @staticmethod
    def of(segments: Sequence[Segment], num_terms: int, device: torch.device) -> _Part:
        """Build a part. The tensors are computed on the device."""
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
        """Return the tensors as views of `memory`, which is `blob` or a copy of it."""
        return [
            memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for dtype, shape, at in self.layout
        ]


class _Buffers:
    """Two GPU buffers to which parts are copied alternately, on a separate stream. On a CPU no streams are used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held = [torch.zeros(0, dtype=torch.uint8, device=device)] * 2
        if device.type == "cuda":
            self._copying = torch.cuda.Stream(device)
            self._copied, self._read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def each(self, parts: Iterable[_Part]) -> Iterator[tuple[_Part, list[Tensor]]]:
        """Yield each part with its tensors on the device, which are valid until the next but one is requested."""
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
