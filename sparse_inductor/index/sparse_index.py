"""An exact top-k index over sparse documents (GPUSparse, sections 3 and 4, made exact and bitwise repeatable)."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn

from sparse_inductor.ops.index_search import enrol
from sparse_inductor.threads import apart, in_a_forked_child

from . import answers, files
from .contents import Contents, own_settings, segments_of
from .documents import as_count, document_ids
from .progress import Progress
from .queries import queries_of
from .segment import Segment, checked_kind
from .sources import Rows, collection_of


class SparseIndex(nn.Module):
    """A collection of sparse documents that can be scored and searched exactly, on a CPU or a GPU.

        index = SparseIndex.build(documents, num_terms=30522)    # scipy or torch sparse [N, V], or an iterable
        scores, ids = index.search(queries, k=1000)              # [B, k] each
        index.save("collection.index"); index = SparseIndex.load("collection.index", device="cuda")

    A score is the inner product in fp64, rounded to fp32. The best come first, equal scores by lowest document id;
    the bits are the same on every run. Documents keep their number for life: `append` gives the next ones, `delete`
    takes documents out of every result without renumbering the others. Every live document has a score: one that
    shares no term with the query scores 0.

    The index keeps what it was given: it copies, and whoever changes a tensor or an array afterwards changes nothing
    here. Threads may use it at once. A search, a save, a copy sees the documents of one moment: all of an `append` or a
    `delete`, or nothing of it; writers wait for each other.

    The module has no parameters. It moves with `.to(device)`. `search` and `scores` may stand in a compiled program;
    a compiled `search` is not compiled again when documents come or go, an exported one keeps those it was exported
    with.
    """

    def __init__(self, num_terms: int, weights: str = "float32") -> None:
        """An empty index of `num_terms` terms; `weights` is "float32", "float16" or "int8" (see `weight_error`)."""
        super().__init__()
        self.num_terms, self.weights = checked_kind(num_terms, weights)
        self._contents = Contents.empty(num_terms, torch.device("cpu"))
        self._open()

    def _open(self) -> None:
        """What belongs to this object and not to a copy of it."""
        self._writing = threading.RLock()
        self._handle = enrol(self)
        _opened.add(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_writing", "_handle"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._open()

    # Building

    @classmethod
    @apart
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
        if num_terms is not None:
            num_terms, _ = checked_kind(num_terms, weights)
        with own_settings():
            num_terms, batches = collection_of(documents, num_terms)
            index = cls(num_terms, weights)
            if device is None:
                device = documents.device if isinstance(documents, Tensor) else "cpu"
            index._contents = Contents.empty(num_terms, torch.device(device))
            index._publish(index._segments_of(batches, progress))
        return index

    @apart
    def append(self, documents: Any, *, replacing: Any = None, progress: bool = False) -> range:
        """Add documents, given as to `build`; returns their ids. Costs little for a few: small segments are merged as
        documents come.

        `replacing` names documents, as `delete` takes them, that go at the same moment: every search finds either the
        old or the new ones.

        Raises what `build` and `delete` raise; the index is then as it was.
        """
        return self._publish(self._prepare(documents, len(self), progress), replacing)

    def _prepare(self, documents: Any, first: int, progress: bool = False) -> list[Segment]:
        """Documents as segments, for `_publish` to add; `first` numbers them in messages."""
        with own_settings():
            _, batches = collection_of(documents, self.num_terms, first)
            return self._segments_of(batches, progress)

    def _publish(self, segments: Sequence[Segment], replacing: Any = None) -> range:
        with self._writing, own_settings():
            first, after = len(self), self._contents.appended(segments)
            if replacing is not None:
                after = after.marked(document_ids(replacing, first))
            self._contents = after
            return range(first, len(self))

    @apart
    def delete(self, ids: Iterable[int] | Tensor | np.ndarray) -> int:
        """Take documents out of all results; returns how many were there. Their memory is given back by `vacuum`.

        Args:
            ids: document ids, or a boolean mask of all documents.

        Raises:
            IndexError: an id that was never given, or a mask of another length.
            TypeError: ids that are no integers.
        """
        with self._writing, own_settings():
            before = self._contents
            after = before.marked(document_ids(ids, before.count))
            self._contents = after
            return int(after.deleted.sum()) - int(before.deleted.sum())

    @apart
    def vacuum(self) -> None:
        """Forget the postings of deleted documents."""
        with self._writing, own_settings():
            self._contents = self._contents.vacuumed()

    def _segments_of(self, batches: Iterator[Rows], progress: bool) -> list[Segment]:
        contents = self._contents
        with Progress(progress) as shown:
            last = contents.segments[-1] if contents.segments else None
            return segments_of(
                shown.each(batches), self.num_terms, self.weights, contents.device, last
            )

    def _apply(self, fn: Any, recurse: bool = True) -> SparseIndex:
        """`.to(device)`; a change of dtype is no business of an index."""
        super()._apply(fn, recurse)
        with self._writing, own_settings():
            device = fn(torch.zeros(0, dtype=torch.bool, device=self.device)).device
            if device != self.device:
                self._contents = self._contents.to(device)
        return self

    # Asking

    def __len__(self) -> int:
        """Documents ever added; ids are below this."""
        return self._contents.count

    @property
    @apart
    def num_live(self) -> int:
        """Documents that have not been deleted."""
        deleted = self._contents.deleted
        return deleted.numel() - int(deleted.sum())

    @property
    def num_postings(self) -> int:
        """Non-zero weights kept."""
        return sum(s.nnz for s in self._contents.segments)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the rows ("forward"), and of what searching adds ("postings")."""
        contents = self._contents
        lists = contents.postings
        if contents.device.type == "cuda":  # these hold the rows, too
            from ..kernels.sparse_scores.search import LISTS

            lists = lists[:LISTS]
        return {
            "forward": sum(s.nbytes for s in contents.segments),
            "postings": sum(t.numel() * t.element_size() for t in lists),
        }

    @property
    def device(self) -> torch.device:
        """Where the index lives."""
        return self._contents.device

    @property
    def weight_error(self) -> float:
        """The largest distance of a kept weight from the one given: 0 for float32.

        Scores are exact for the weights as kept. Against the weights as given, the score of a query is off by at most
        weight_error * sum |query weights|.
        """
        return max((s.error for s in self._contents.segments), default=0.0)

    def operands(
        self, allow: Any = None, deny: Any = None
    ) -> tuple[Sequence[Tensor], Sequence[int], Tensor]:
        """What the operator `index_search` takes of the index, of one moment."""
        contents = self._contents
        return contents.postings, contents.counts, answers.barred_in(contents, allow, deny)

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
        """The k best documents of every query, or of those that a filter leaves.

        Args:
            queries: a dense or sparse tensor, an array or a scipy matrix [B, V] or [V]; a pair (term ids, weights)
                [B, T] or [T]; a mapping {term id: weight}; or a list of rows [V], pairs and mappings. Where terms are
                named, ids outside [0, V) count nothing and terms named twice add up. Read as fp32. Memory grows with
                the entries of sparse queries.
            k: how many; more than there are live documents is allowed.
            allow, deny: the documents that alone may be found, and those that may not: ids for all queries, or a
                boolean mask, [N] for all or [B, N] with a row for each. Documents that came after a mask was made,
                which is then shorter, are not marked in it.
            offset: how many of the best are passed over, for a page of results: the k after them. Costs what a search
                for `offset + k` costs.
            min_score: the lowest score that is a result.

        Returns:
            scores fp32 and document ids int64, [B, k] or [k], in descending order, equal scores by lowest id. Where
            there are fewer than k such documents the rest is -inf and -1. A query with a NaN or infinite weight has
            scores NaN and ids -1. No gradient.

        Raises:
            ValueError, TypeError: k or offset < 0, and queries, ids or masks of another shape or type.
            IndexError: an id that was never given, a mask of more documents than there are or of other queries.
        """
        first = as_count(offset, "offset")
        found = answers.search(self, queries, as_count(k, "k") + first, allow, deny)
        return answers.page(*found, first, min_score)

    @apart
    def scores(self, queries: Any, documents: Any = None) -> Tensor:
        """The scores of all documents, or of those that are given. Differentiable in the queries.

        Args:
            queries: as `search` takes them.
            documents: ids of candidates, [M] for all queries or [B, M] with a row for each, which alone are read. -1,
                with which `search` fills up its results, scores -inf. Not within a compiled program.

        Returns:
            fp32 [B, N] or [N], with candidates [B, M] or [M]; -inf for deleted documents.

        Raises:
            ValueError, TypeError: queries as in `search`; documents that are no integers or of another shape.
            IndexError: an id that was never given.
        """
        contents = self._contents
        given = queries_of(queries, self.num_terms, contents.device, differentiable=True)
        q = given.dense(contents.device).double()
        if documents is None:
            found = answers.all_scores(contents, q)
        else:
            found = answers.candidate_scores(contents, q, documents, given.single)
        return found[0] if given.single else found

    def forward(self, queries: Any, k: int) -> tuple[Tensor, Tensor]:
        """`search`."""
        return self.search(queries, k)

    def extra_repr(self) -> str:
        return (
            f"documents={len(self)}, num_terms={self.num_terms}, postings={self.num_postings}, "
            f"weights={self.weights!r}, device={self.device}"
        )

    # Files

    def save(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Write the index to a safetensors file with checksums, which appears only when it is complete.

        As with `open(path, "w")`: a symbolic link is followed, an old file's mode is kept, a new file's is what the
        umask leaves. A save that fails or is killed leaves the old file; what a killed one wrote is removed by the next
        save. `progress` shows how far it has come.
        """
        files.pending(path, self._contents, self.weights, progress).commit()

    @classmethod
    @apart
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        verify: bool = True,
        progress: bool = False,
    ) -> SparseIndex:
        """Read an index; on a CPU its rows stay memory-mapped. `verify=False` skips the checksums of the data, but not
        that it makes an index. `progress` shows how far it has come.

        The file is opened once: of a file that is saved over meanwhile the old or the new index is read.

        Raises FileNotFoundError, and IndexFileError (a ValueError) for a foreign, truncated, damaged or newer file.
        """
        with own_settings():
            found, weights, _ = files.contents(path, torch.device(device), verify, progress)
        return cls._of(found, weights)

    @classmethod
    def _of(cls, contents: Contents, weights: str) -> SparseIndex:
        index = cls(contents.num_terms, weights)
        index._contents = contents
        return index


# Indexes whose locks a forked child makes anew: the thread that held one there does not exist.
_opened: weakref.WeakSet[SparseIndex] = weakref.WeakSet()


@in_a_forked_child
def _in_child() -> None:
    for index in _opened:
        index._writing = threading.RLock()
