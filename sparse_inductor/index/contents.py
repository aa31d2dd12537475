"""Immutable snapshots of the contents of an index. A search that holds one sees a consistent collection."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from sparse_inductor.ops._dispatch import autocast_off

from . import segment
from .segment import Segment
from .sources import Rows

# A new segment is merged with the previous one if that has at most _RATIO times as many documents. If documents are
# added one at a time, the number of segments, and how often each document is merged, then grow logarithmically.
_RATIO = 4

# The most postings of a merged segment. Merging so many takes about 15 ms, for which one append waits. Searching
# segments of this size takes up to a third longer than searching full segments.
_MERGED = 1 << 20


@dataclasses.dataclass(frozen=True)
class Contents:
    """Segments of documents, and the structures for searching them. Every method returns new contents.

    postings: on a CPU three tensors per segment, see `segment.Postings`; on a GPU see `kernels.sparse_scores.search`.
    deleted: bool [N], the documents that are excluded from results.
    """

    num_terms: int
    device: torch.device
    segments: tuple[Segment, ...]
    postings: tuple[Tensor, ...]
    deleted: Tensor

    @staticmethod
    def empty(num_terms: int, device: torch.device) -> Contents:
        """Return contents without documents."""
        deleted = torch.zeros(0, dtype=torch.bool, device=device)
        return Contents(num_terms, deleted.device, (), (), deleted)

    @staticmethod
    def of(num_terms: int, segments: Iterable[Segment], deleted: Tensor) -> Contents:
        """Return contents of these segments, on the device of `deleted`."""
        empty = Contents.empty(num_terms, deleted.device)
        return dataclasses.replace(empty._with(segments), deleted=deleted)

    def __deepcopy__(self, memo: dict[int, object]) -> Contents:
        """Return `self`, which is immutable."""
        return self

    @property
    def counts(self) -> list[int]:
        """The number of documents of each segment."""
        return [s.count for s in self.segments]

    @property
    def count(self) -> int:
        """The number of documents ever added."""
        return self.deleted.numel()

    def appended(self, new: Sequence[Segment]) -> Contents:
        """Return contents with the documents of further segments."""
        if not new:
            return self
        deleted = _longer(self.deleted, sum(s.count for s in new))
        merged = _merged(self.segments, new, full=self.device.type == "cuda")
        return dataclasses.replace(self._with(merged), deleted=deleted)

    def marked(self, ids: Tensor) -> Contents:
        """Return contents with these documents marked as deleted."""
        deleted = self.deleted.clone()
        deleted[ids.to(deleted.device)] = True
        return dataclasses.replace(self, deleted=deleted)

    def vacuumed(self) -> Contents:
        """Return contents without the postings of deleted documents."""
        gone = self.deleted.split(self.counts)
        return self._with(
            [s.without(g) if bool(g.any()) else s for s, g in zip(self.segments, gone)]
        )

    def compacted(self) -> Contents:
        """Return contents without the deleted documents; the others are renumbered."""
        left = (~self.deleted).split(self.counts)
        kept = [s.taken(there.nonzero().squeeze(1)) for s, there in zip(self.segments, left)]
        joined = _merged((), [s for s in kept if s.count], full=True)
        return Contents.empty(self.num_terms, self.device).appended(joined)

    def to(self, device: torch.device) -> Contents:
        """Return the same contents on another device."""
        segments = [s.to(device) for s in self.segments]
        merged = _merged((), segments, full=True) if device.type == "cuda" else segments
        return Contents.of(self.num_terms, merged, self.deleted.to(device))

    def _with(self, segments: Iterable[Segment]) -> Contents:
        """Return contents of these segments. Postings of segments that are already present are reused."""
        if self.device.type == "cuda":
            return self._packed(tuple(segments))
        known = {id(s): self.postings[3 * i : 3 * i + 3] for i, s in enumerate(self.segments)}
        done: list[Segment] = []
        postings: list[Tensor] = []
        for s in segments:
            done.append(s)
            if id(s) in known:
                postings += known[id(s)]
            else:
                made = s.postings(self.num_terms)
                postings += (made.offsets, made.docs, made.weights)
        return dataclasses.replace(self, segments=tuple(done), postings=tuple(postings))

    def _packed(self, segments: tuple[Segment, ...]) -> Contents:
        """Return contents with the packed tensors of the GPU. The segments become views of the rows in them."""
        from ..kernels.sparse_scores import search as kernel

        kept = 0
        while (
            kept < min(len(segments), len(self.segments)) and segments[kept] is self.segments[kept]
        ):
            kept += 1
        postings = kernel.pack(segments, self.num_terms, kept, self.postings)
        terms, weights = postings[-3:-1]
        views, at = [], 0
        for s in segments:
            part = slice(at, at + s.nnz)
            views.append(dataclasses.replace(s, terms=terms[part], weights=weights[part]))
            at += s.nnz
        return dataclasses.replace(self, segments=tuple(views), postings=tuple(postings))


def _longer(deleted: Tensor, more: int) -> Tensor:
    """Return the marks with `more` further documents, not deleted. The memory after the marks is reserved for them and
    always holds zeros, so that longer marks are usually a longer view of the same memory. Otherwise each appended
    document would copy all marks, with all ATen threads."""
    count = deleted.numel() + more
    if deleted.untyped_storage().nbytes() < count:
        room = deleted.new_zeros(2 * count)
        room[: deleted.numel()] = deleted
        deleted = room
    return deleted.as_strided((count,), (1,), 0)


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Create the tensors of an index independently of the caller's modes. For example, tensors that were created in
    inference mode could not be modified, or searched with a gradient, outside it."""
    with torch.inference_mode(False), torch.no_grad(), autocast_off("cpu"), autocast_off("cuda"):
        yield


def segments_of(
    batches: Iterator[Rows],
    num_terms: int,
    precision: str,
    device: torch.device,
    last: Segment | None,
) -> list[Segment]:
    """Split a stream of rows into full segments and one with the remainder. last: the segment that precedes them."""
    made: list[Segment] = []
    pending: list[Rows] = []
    waiting = 0

    def take(rows: Rows) -> None:
        made.append(Segment.of(rows, num_terms, precision, beside=made[-1] if made else last))

    for rows in batches:
        pending.append(rows.to(device))
        waiting += rows.count
        while waiting >= segment.CAPACITY:
            joined = Rows.join(pending)
            take(joined.part(0, segment.CAPACITY))
            waiting = joined.count - segment.CAPACITY
            pending = [joined.part(segment.CAPACITY, joined.count)] if waiting else []
    if waiting:
        take(Rows.join(pending))
    return made


def _merged(old: Sequence[Segment], new: Sequence[Segment], full: bool) -> list[Segment]:
    """Return old and new segments. Each new one is merged with preceding ones that are not much larger (see `_RATIO`),
    or, if `full`, with all that fit: a GPU searches few segments faster and concatenates their rows anyway."""
    done = list(old)
    for s in new:
        group, count, nnz = [s], s.count, s.nnz
        while (
            done
            and done[-1].count + count <= segment.CAPACITY
            and (full or (done[-1].count <= _RATIO * count and done[-1].nnz + nnz <= _MERGED))
            and done[-1].joins(s)
        ):
            group.append(done.pop())
            count, nnz = count + group[-1].count, nnz + group[-1].nnz
        done.append(Segment.join(group[::-1]))
    return done
