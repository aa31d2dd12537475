"""An exact top-k index over sparse documents (GPUSparse, sections 3 and 4, made exact and bitwise repeatable)."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import sparse_inductor.ops  # noqa: F401  (defines the operators)

from . import storage
from .segment import CAPACITY, WEIGHTS, Postings, Segment
from .sources import Rows, is_single, query_matrix, rows_of

__all__ = ["SparseIndex"]

_KIND = "sparse_inductor.SparseIndex"
_VERSION = 1


class SparseIndex(nn.Module):
    """A collection of sparse documents that can be scored and searched exactly, on a CPU or a GPU.

        index = SparseIndex.build(documents, num_terms=30522)    # scipy or torch sparse [N, V], or an iterable
        scores, ids = index.search(queries, k=1000)              # [B, k] each
        index.save("collection.index"); index = SparseIndex.load("collection.index", device="cuda")

    A score is the inner product in fp64, rounded to fp32. The best come first, equal scores by lowest document id;
    the bits are the same on every run. Documents keep their number for life: `append` gives the next ones, `delete`
    takes documents out of every result without renumbering the others. Every live document has a score: one that
    shares no term with the query scores 0.

    The module has no parameters. It moves with `.to(device)`, and `search` and `scores` may stand in a compiled
    program.
    """

    def __init__(self, num_terms: int, weights: str = "float32") -> None:
        """An empty index of `num_terms` terms; `weights` is "float32", "float16" or "int8" (see `weight_error`)."""
        super().__init__()
        if not isinstance(num_terms, int) or num_terms < 1:
            raise ValueError(f"num_terms must be a positive int, got {num_terms!r}")
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {sorted(WEIGHTS)}, got {weights!r}")
        self.num_terms = num_terms
        self.weights = weights
        self._segments: list[Segment] = []
        self._postings: list[Tensor] = []
        self._counts: list[int] = []
        self.register_buffer("_deleted", torch.zeros(0, dtype=torch.bool), persistent=False)
        self._deleted: Tensor

    # Building

    @classmethod
    def build(
        cls,
        documents: Any,
        *,
        num_terms: int | None = None,
        weights: str = "float32",
        device: torch.device | str | None = None,
        progress: bool = False,
    ) -> SparseIndex:
        """Index a collection.

        Args:
            documents: a matrix [N, V] (scipy sparse, torch CSR or COO, or dense), or an iterable of such matrices or of
                documents, each a pair (term ids, weights) or a mapping {term id: weight}. An iterable is read once and
                never held as a whole: memory grows with the index alone. Terms named twice in a document add up.
            num_terms: V; known from a matrix, needed for documents given one by one.
            weights: "float32", "float16" or "int8": how weights are kept.
            device: where the index is to live; default the device of a torch matrix, else the CPU.
            progress: show how far it has come.

        Raises:
            ValueError: term ids outside [0, V), weights that are NaN or infinite, with the document's number.
            TypeError: something that is no collection.
        """
        batches = rows_of(documents, num_terms)
        if num_terms is None:
            shape = getattr(documents, "shape", None)
            if shape is None or len(shape) != 2:
                raise ValueError("num_terms is needed where documents is not one matrix [N, V]")
            num_terms = int(shape[1])
        index = cls(num_terms, weights)
        if device is None and isinstance(documents, Tensor):
            device = documents.device
        index._deleted = index._deleted.to(device or "cpu")
        index._extend(batches, progress)
        return index

    def append(self, documents: Any, *, progress: bool = False) -> range:
        """Add documents, given as to `build`; returns their ids. Only the last segment is made anew.

        Raises what `build` raises; the index is then as it was.
        """
        before = len(self)
        self._extend(rows_of(documents, self.num_terms, before), progress)
        return range(before, len(self))

    def delete(self, ids: Iterable[int] | Tensor) -> int:
        """Take documents out of all results; returns how many were there. Their memory is given back by `vacuum`.

        Raises IndexError for an id that was never given.
        """
        ids = torch.as_tensor(
            ids if isinstance(ids, Tensor) else list(ids), dtype=torch.int64
        ).reshape(-1)
        bad = (ids < 0) | (ids >= len(self))
        if bool(bad.any()):
            raise IndexError(
                f"there is no document {int(ids[bad][0])}: ids are 0 to {len(self) - 1}"
            )
        deleted = self._deleted.clone()  # a running search keeps what it began with
        before = int(deleted.sum())
        deleted[ids.to(deleted.device)] = True
        self._deleted = deleted
        return int(deleted.sum()) - before

    def vacuum(self) -> None:
        """Forget the postings of deleted documents."""
        segments, first = [], 0
        for s in self._segments:
            gone = self._deleted[first : first + s.count]
            first += s.count
            segments.append(_without(s, gone) if bool(gone.any()) else s)
        self._adopt(segments)

    def _extend(self, batches: Iterator[Rows], progress: bool) -> None:
        segments = list(self._segments)
        device = self._deleted.device
        pending: list[Rows] = []
        waiting = 0
        if segments and segments[-1].count < CAPACITY:
            if self.weights == "int8" and segments[-1].nnz:
                pass  # its weights were rounded on a scale of their own: rounding them again would add an error
            else:
                last = segments.pop()
                pending, waiting = [last.rows()], last.count
        kept_error = max((s.error for s in self._segments), default=0.0)
        with _Progress(progress) as shown:
            for rows in batches:
                pending.append(
                    Rows(*(t.to(device) for t in (rows.offsets, rows.terms, rows.weights)))
                )
                waiting += rows.count
                shown.add(rows.count)
                while waiting >= CAPACITY:
                    joined = Rows.join(pending)
                    segments.append(self._segment(joined.part(0, CAPACITY), kept_error))
                    waiting = joined.count - CAPACITY
                    pending = [joined.part(CAPACITY, joined.count)] if waiting else []
        if waiting:
            segments.append(self._segment(Rows.join(pending), kept_error))
        self._adopt(segments)

    def _segment(self, rows: Rows, kept_error: float) -> Segment:
        made = Segment.of(rows, self.num_terms, self.weights)
        if self.weights == "float16":  # what had been rounded before is exact now
            made = dataclasses.replace(made, error=max(made.error, kept_error))
        return made

    def _adopt(self, segments: list[Segment]) -> None:
        """Make these the index, with what searching needs for the new ones among them."""
        known = {id(s): p for s, p in zip(self._segments, self._by_segment())}
        postings: list[Tensor] = []
        if self._deleted.is_cuda:
            segments, postings = self._packed(segments)
        else:
            for s in segments:
                postings += known.get(id(s)) or _tensors(s.postings(self.num_terms))
        count = sum(s.count for s in segments)
        more = count - self._deleted.numel()
        deleted = (
            torch.cat((self._deleted, self._deleted.new_zeros(more))) if more else self._deleted
        )
        self._segments, self._postings = segments, postings
        self._counts = [s.count for s in segments]
        self._deleted = deleted

    def _packed(self, segments: list[Segment]) -> tuple[list[Segment], list[Tensor]]:
        """The GPU's tensors, and the segments as views of the rows in them."""
        from ..kernels import sparse_scores_search as kernel

        kept = 0
        while (
            kept < min(len(segments), len(self._segments))
            and segments[kept] is self._segments[kept]
        ):
            kept += 1
        postings = kernel.pack(segments, self.num_terms, kept, self._postings)
        terms, weights = postings[-3:-1]
        views, at = [], 0
        for s in segments:
            part = slice(at, at + s.nnz)
            views.append(dataclasses.replace(s, terms=terms[part], weights=weights[part]))
            at += s.nnz
        return views, postings

    def _by_segment(self) -> list[list[Tensor]]:
        if self._deleted.is_cuda:
            return []
        return [self._postings[3 * i : 3 * i + 3] for i in range(len(self._segments))]

    def _apply(self, fn: Any, recurse: bool = True) -> SparseIndex:
        """`.to(device)`; a change of dtype is no business of an index."""
        before = self._deleted.device
        super()._apply(fn, recurse)
        if self._deleted.device != before:
            moved = [s.to(self._deleted.device) for s in self._segments]
            self._segments = []
            self._adopt(moved)
        return self

    # Asking

    def __len__(self) -> int:
        """Documents ever added; ids are below this."""
        return self._deleted.numel()

    @property
    def num_live(self) -> int:
        """Documents that have not been deleted."""
        return len(self) - int(self._deleted.sum())

    @property
    def num_postings(self) -> int:
        """Non-zero weights kept."""
        return sum(s.nnz for s in self._segments)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the rows ("forward"), and of what searching adds ("postings")."""
        lists = self._postings
        if self._deleted.is_cuda:  # these hold the rows, too
            from ..kernels.sparse_scores_search import LISTS

            lists = lists[:LISTS]
        return {
            "forward": sum(s.nbytes for s in self._segments),
            "postings": sum(t.numel() * t.element_size() for t in lists),
        }

    @property
    def device(self) -> torch.device:
        """Where the index lives."""
        return self._deleted.device

    @property
    def weight_error(self) -> float:
        """The largest distance of a kept weight from the one given: 0 for float32.

        Scores are exact for the weights as kept. Against the weights as given, the score of a query is off by at most
        weight_error * sum |query weights|.
        """
        return max((s.error for s in self._segments), default=0.0)

    def search(self, queries: Any, k: int) -> tuple[Tensor, Tensor]:
        """The k best documents of every query.

        Args:
            queries: dense [B, V] or [V], a torch or scipy sparse matrix [B, V], or a pair (term ids, weights) of
                tensors [B, T] or [T], where ids outside [0, V) count nothing and terms named twice add up. Read as
                fp32.
            k: how many; more than there are live documents is allowed.

        Returns:
            scores fp32 and document ids int64, [B, k] or [k], in descending order, equal scores by lowest id. Where
            there are fewer than k live documents the rest is -inf and -1. A query with a NaN or infinite weight has
            scores NaN and ids -1. No gradient.

        Raises:
            ValueError, TypeError: k < 0, and queries of another shape or type.
        """
        if not isinstance(k, int) or isinstance(k, bool) or k < 0:
            raise ValueError(f"k must be an int of at least 0, got {k!r}")
        q = query_matrix(queries, self.num_terms, self.device).detach()
        scores, ids = torch.ops.sparse_inductor.index_search(
            q, self._postings, self._counts, self._deleted, k
        )
        return (scores[0], ids[0]) if is_single(queries) else (scores, ids)

    def scores(self, queries: Any) -> Tensor:
        """The scores of all documents, fp32 [B, N] or [N]; -inf for deleted ones. Differentiable in the queries.

        Takes queries as `search` does.
        """
        q = query_matrix(queries, self.num_terms, self.device)
        parts = [
            torch.ops.sparse_inductor.sparse_scores(
                q.double(), s.term_ids(), s.values(), None, s.offsets, s.count, torch.float32
            )
            for s in self._segments
        ]
        found = torch.cat(parts, 1) if parts else q.new_zeros(q.shape[0], 0)
        found = found.masked_fill(self._deleted, float("-inf"))
        return found[0] if is_single(queries) else found

    def forward(self, queries: Any, k: int) -> tuple[Tensor, Tensor]:
        """`search`."""
        return self.search(queries, k)

    def extra_repr(self) -> str:
        return (
            f"documents={len(self)}, num_terms={self.num_terms}, postings={self.num_postings}, "
            f"weights={self.weights!r}, device={self.device}"
        )

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a safetensors file with checksums, which appears only when it is complete."""
        tensors = {"deleted": self._deleted}
        for i, s in enumerate(self._segments):
            tensors.update(
                {f"{i}.offsets": s.offsets, f"{i}.terms": s.terms, f"{i}.weights": s.weights}
            )
        facts = {
            "num_terms": self.num_terms,
            "weights": self.weights,
            "segments": [[s.scale, s.signed, s.error] for s in self._segments],
        }
        storage.write(path, tensors, _KIND, _VERSION, facts)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        verify: bool = True,
    ) -> SparseIndex:
        """Read an index; on a CPU its rows stay memory-mapped. `verify=False` skips the checksums of the data.

        Raises FileNotFoundError, and IndexFileError (a ValueError) for a foreign, truncated, damaged or newer file.
        """
        tensors, facts = storage.read(path, _KIND, _VERSION, verify)
        index = cls(facts["num_terms"], facts["weights"])
        segments = [
            Segment(
                tensors[f"{i}.offsets"], tensors[f"{i}.terms"], tensors[f"{i}.weights"], *facts_of
            )
            for i, facts_of in enumerate(facts["segments"])
        ]
        where = torch.device(device)
        index._deleted = tensors["deleted"].clone().to(where)
        index._adopt([s.to(where) for s in segments])
        return index


def _tensors(p: Postings) -> list[Tensor]:
    return [p.offsets, p.docs, p.weights]


def _without(s: Segment, gone: Tensor) -> Segment:
    """The segment with the rows of deleted documents empty."""
    lengths = s.offsets.diff()
    kept = torch.repeat_interleave(~gone, lengths, output_size=s.nnz)
    offsets = torch.zeros_like(s.offsets)
    torch.cumsum(lengths.masked_fill(gone, 0), 0, out=offsets[1:])
    return Segment(offsets, s.terms[kept], s.weights[kept], s.scale, s.signed, s.error)


class _Progress:
    """Documents read so far: tqdm where it is installed, else a line now and then."""

    def __init__(self, wanted: bool) -> None:
        self._bar: Any = None
        self._wanted = wanted
        self._seen = self._said = 0

    def __enter__(self) -> _Progress:
        if self._wanted:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                pass
            else:
                self._bar = tqdm(unit=" documents", unit_scale=True)
        return self

    def add(self, documents: int) -> None:
        self._seen += documents
        if self._bar is not None:
            self._bar.update(documents)
        elif self._wanted and self._seen - self._said >= CAPACITY:
            self._said = self._seen
            print(f"{self._seen:,} documents", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._wanted:
            print(f"{self._seen:,} documents indexed", file=sys.stderr, flush=True)
