"""What an index holds at one time: immutable, so that whoever has it searches one consistent collection."""

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

# A segment is merged with the one before it where that is no larger than this many times its size. Documents that come
# one at a time are then in a number of segments that grows with the logarithm of their number, and each is merged that
# often.
_RATIO = 4

# Postings of the largest segment that comes of it: they are merged in some 15 ms, for which one append waits. A search
# of segments of so many takes up to a third longer than one of full segments.
_MERGED = 1 << 20


@dataclasses.dataclass(frozen=True)
class Contents:
    """Segments of documents, and what searching them needs.

    postings: three tensors a segment on a CPU, see `segment.Postings`; on a GPU see `kernels.sparse_scores_search`.
    deleted: bool [N], the documents that are in no result. Every method returns new contents.
    """

    num_terms: int
    device: torch.device
    segments: tuple[Segment, ...]
    postings: tuple[Tensor, ...]
    deleted: Tensor

    @staticmethod
    def empty(num_terms: int, device: torch.device) -> Contents:
        """No documents."""
        deleted = torch.zeros(0, dtype=torch.bool, device=device)
        return Contents(num_terms, deleted.device, (), (), deleted)

    @staticmethod
    def of(num_terms: int, segments: Iterable[Segment], deleted: Tensor) -> Contents:
        """These segments, on the device that they are on."""
        empty = Contents.empty(num_terms, deleted.device)
        return dataclasses.replace(empty._with(segments), deleted=deleted)

    def __deepcopy__(self, memo: dict[int, object]) -> Contents:
        """Itself: nothing changes it."""
        return self

    @property
    def counts(self) -> list[int]:
        """Documents of each segment."""
        return [s.count for s in self.segments]

    @property
    def count(self) -> int:
        """Documents ever added."""
        return self.deleted.numel()

    def appended(self, new: Sequence[Segment]) -> Contents:
        """With the documents of further segments."""
        if not new:
            return self
        deleted = _longer(self.deleted, sum(s.count for s in new))
        merged = _merged(self.segments, new, full=self.device.type == "cuda")
        return dataclasses.replace(self._with(merged), deleted=deleted)

    def marked(self, ids: Tensor) -> Contents:
        """With documents deleted."""
        deleted = self.deleted.clone()
        deleted[ids.to(deleted.device)] = True
        return dataclasses.replace(self, deleted=deleted)

    def vacuumed(self) -> Contents:
        """Without the postings of deleted documents."""
        gone = self.deleted.split(self.counts)
        return self._with(
            [s.without(g) if bool(g.any()) else s for s, g in zip(self.segments, gone)]
        )

    def compacted(self) -> Contents:
        """Without the deleted documents, which renumbers the others."""
        left = (~self.deleted).split(self.counts)
        kept = [s.taken(there.nonzero().squeeze(1)) for s, there in zip(self.segments, left)]
        joined = _merged((), [s for s in kept if s.count], full=True)
        return Contents.empty(self.num_terms, self.device).appended(joined)

    def to(self, device: torch.device) -> Contents:
        """The same on another device."""
        segments = [s.to(device) for s in self.segments]
        merged = _merged((), segments, full=True) if device.type == "cuda" else segments
        return Contents.of(self.num_terms, merged, self.deleted.to(device))

    def _with(self, segments: Iterable[Segment]) -> Contents:
        """These segments, with the postings of those that are here already."""
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
        """The GPU's tensors, and the segments as views of the rows in them."""
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
    """With as many documents more, which are not deleted. Memory behind marks is theirs alone and holds zeros, which
    nothing overwrites, so that longer marks mostly are a longer view: a copy would be one for each appended document,
    by all threads of ATen."""
    count = deleted.numel() + more
    if deleted.untyped_storage().nbytes() < count:
        room = deleted.new_zeros(2 * count)
        room[: deleted.numel()] = deleted
        deleted = room
    return deleted.as_strided((count,), (1,), 0)


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """What is kept is made under the same modes, whatever those of the caller are: tensors of inference mode, say,
    could not be written to or searched with a gradient outside it."""
    with torch.inference_mode(False), torch.no_grad(), autocast_off("cpu"), autocast_off("cuda"):
        yield


def segments_of(
    batches: Iterator[Rows],
    num_terms: int,
    precision: str,
    device: torch.device,
    last: Segment | None,
) -> list[Segment]:
    """Full segments of a stream of rows, and one of the rest. last: the segment behind which they will come."""
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
    """Old and new segments, each new one merged with those before it that it outweighs (`full`: with all that fit, for
    a GPU, which searches few segments faster and makes one piece of their rows anyway)."""
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
