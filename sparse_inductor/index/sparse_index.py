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

    A score is the inner product in fp64, rounded to fp32. Results are in descending order of score, equal scores in
    ascending order of document id, and bitwise the same on every run. A document keeps its id for life: `append`
    assigns the next ids, and `delete` removes documents from every result without renumbering the others. Every live
    document has a score: one that shares no term with the query scores 0.

    The index copies its inputs, so that later changes to a tensor or an array do not affect it. It is thread-safe: a
    search, a save or a copy sees either all of an `append` or a `delete`, or nothing of it. Writers wait for each
    other.

    The module has no parameters. It moves with `.to(device)`. `search` and `scores` may be called in a compiled
    program. A compiled `search` does not recompile when documents are added or deleted; an exported program keeps the
    documents that were present at export.
    """

    def __init__(self, num_terms: int, weights: str = "float32") -> None:
        """Create an empty index of `num_terms` terms; `weights` is "float32", "float16" or "int8" (see
        `weight_error`)."""
        super().__init__()
        self.num_terms, self.weights = checked_kind(num_terms, weights)
        self._contents = Contents.empty(num_terms, torch.device("cpu"))
        self._open()

    def _open(self) -> None:
        """Create the lock and the handle, which belong to this object and not to its copies."""
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
                documents, each a pair (term ids, weights) or a mapping {term id: weight}. An iterable is read once, in
                batches, so that memory grows with the index alone. The weights of a term that occurs more than once
                in a document are added.
            num_terms: V; inferred from a matrix, required for documents given one by one.
            weights: the precision in which weights are stored: "float32", "float16" or "int8".
            device: the device of the index; defaults to the device of a torch matrix, else the CPU.
            progress: show progress.

        Raises:
            ValueError: a term id is outside [0, V), or a weight is NaN or infinite. The message names the document.
            TypeError: `documents` is not a collection.
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
        """Add documents, in any form that `build` takes, and return their ids. Adding a few documents is cheap,
        because only small segments are merged.

        `replacing` names documents to delete in the same step, in any form that `delete` takes: every search finds
        either the old documents or the new ones.

        Raises the errors of `build` and `delete`; the index is then unchanged.
        """
        return self._publish(self._prepare(documents, len(self), progress), replacing)

    def _prepare(self, documents: Any, first: int, progress: bool = False) -> list[Segment]:
        """Convert documents to segments, which `_publish` adds; messages number documents from `first`."""
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
        """Remove documents from all results and return how many of them were live. `vacuum` frees their memory.

        Args:
            ids: document ids, or a boolean mask of all documents.

        Raises:
            IndexError: an id was never assigned, or the length of a mask is not the number of documents.
            TypeError: the ids are not integers.
        """
        with self._writing, own_settings():
            before = self._contents
            after = before.marked(document_ids(ids, before.count))
            self._contents = after
            return int(after.deleted.sum()) - int(before.deleted.sum())

    @apart
    def vacuum(self) -> None:
        """Free the postings of deleted documents."""
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
        """Implement `.to(device)`. A change of dtype has no effect on an index."""
        super()._apply(fn, recurse)
        with self._writing, own_settings():
            device = fn(torch.zeros(0, dtype=torch.bool, device=self.device)).device
            if device != self.device:
                self._contents = self._contents.to(device)
        return self

    # Searching

    def __len__(self) -> int:
        """The number of documents ever added; all ids are below it."""
        return self._contents.count

    @property
    @apart
    def num_live(self) -> int:
        """The number of documents that have not been deleted."""
        deleted = self._contents.deleted
        return deleted.numel() - int(deleted.sum())

    @property
    def num_postings(self) -> int:
        """The number of stored non-zero weights."""
        return sum(s.nnz for s in self._contents.segments)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the rows ("forward"), and of the structures that searching needs in addition ("postings")."""
        contents = self._contents
        lists = contents.postings
        if contents.device.type == "cuda":  # the packed tensors include the rows
            from ..kernels.sparse_scores.search import LISTS

            lists = lists[:LISTS]
        return {
            "forward": sum(s.nbytes for s in contents.segments),
            "postings": sum(t.numel() * t.element_size() for t in lists),
        }

    @property
    def device(self) -> torch.device:
        """The device of the index."""
        return self._contents.device

    @property
    def weight_error(self) -> float:
        """The largest difference between a stored weight and the given weight: 0 for float32.

        Scores are exact for the stored weights. They differ from the scores of the given weights by at most
        weight_error * sum |query weights|.
        """
        return max((s.error for s in self._contents.segments), default=0.0)

    def operands(
        self, allow: Any = None, deny: Any = None
    ) -> tuple[Sequence[Tensor], Sequence[int], Tensor]:
        """Return the operands `postings`, `counts` and `barred` of the operator `index_search`, from one snapshot of
        the index."""
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
        """Return the k best documents of every query, optionally restricted by filters.

        Args:
            queries: a dense or sparse tensor, an array or a scipy matrix [B, V] or [V]; a pair (term ids, weights)
                [B, T] or [T]; a mapping {term id: weight}; or a list of rows [V], pairs and mappings. Term ids outside
                [0, V) are ignored, and the weights of a repeated term id are added. Weights are converted to fp32.
                For sparse queries, memory grows with the number of entries.
            k: the number of results per query; it may exceed the number of live documents.
            allow, deny: restrict results to, or exclude from them, these documents: ids for all queries, or a boolean
                mask, [N] for all queries or [B, N] with a row for each. A mask may be shorter than the index;
                documents beyond its end are not marked.
            offset: the number of best results to skip, for paging. Costs as much as a search for `offset + k`.
            min_score: the lowest score that is returned.

        Returns:
            scores fp32 and document ids int64, [B, k] or [k], in descending order of score, equal scores in ascending
            order of id. If fewer than k documents qualify, the remaining places hold -inf and -1. A query with a NaN
            or infinite weight has scores NaN and ids -1. No gradient.

        Raises:
            ValueError, TypeError: k or offset is negative, or queries, ids or masks have a wrong shape or type.
            IndexError: an id was never assigned, or a mask is longer than the index or does not match the queries.
        """
        first = as_count(offset, "offset")
        found = answers.search(self, queries, as_count(k, "k") + first, allow, deny)
        return answers.page(*found, first, min_score)

    @apart
    def scores(self, queries: Any, documents: Any = None) -> Tensor:
        """Return the scores of all documents, or of given candidates. Differentiable with respect to the queries.

        Args:
            queries: see `search`.
            documents: ids of candidates, [M] for all queries or [B, M] with a row for each. Only these documents are
                read. An id of -1, the padding of `search` results, scores -inf. Not supported in a compiled program.

        Returns:
            fp32 [B, N] or [N], with candidates [B, M] or [M]; -inf for deleted documents.

        Raises:
            ValueError, TypeError: queries are invalid, see `search`; documents are not integers or have a wrong shape.
            IndexError: an id was never assigned.
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
        """Same as `search`."""
        return self.search(queries, k)

    def extra_repr(self) -> str:
        return (
            f"documents={len(self)}, num_terms={self.num_terms}, postings={self.num_postings}, "
            f"weights={self.weights!r}, device={self.device}"
        )

    # Files

    def save(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Write the index to a safetensors file with checksums, which appears only when it is complete.

        As with `open(path, "w")`, a symbolic link is followed, an existing file keeps its mode, and the mode of a new
        file follows the umask. A save that fails or is killed leaves the old file unchanged; the next save removes the
        temporary file of a killed one. `progress` shows progress.
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
        the check that the data form a valid index. `progress` shows progress.

        The file is opened once: if another process replaces it during the load, either the old or the new index is
        read as a whole.

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


# A forked child replaces the locks of these indexes, because a thread that held one does not exist in the child.
_opened: weakref.WeakSet[SparseIndex] = weakref.WeakSet()


@in_a_forked_child
def _in_child() -> None:
    for index in _opened:
        index._writing = threading.RLock()
