"""Search of a `SparseIndex` as one operator, so that a compiled program can contain it.

    index_search(query [B, V], postings, counts, barred, k) -> (scores [B, k], ids [B, k])
    index_search_live(query [B, V], index, k, allow, deny)

`barred` [N], or [B, N] with a row for each query, marks documents that are excluded from the results.
`postings` holds three tensors per segment on a CPU: offsets [V + 1], docs, weights. For the layout on a GPU see
`sparse_inductor.kernels.sparse_scores.search`.

`index_search_live` searches the contents of an index at the time of the call. A compiled program refers to the index by
a tensor from `enrol`, so it needs no recompilation when documents are added or removed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..aten.top import keys_of, keys_with_ids, scores_and_ids
from ..threads import apart, workers
from ._dispatch import define, register_on_gpu

if TYPE_CHECKING:
    from ..kernels.sparse_scores.cpu import Segments

_lib = define(
    "index_search(Tensor query, Tensor[] postings, int[] counts, Tensor barred, SymInt k) -> (Tensor, Tensor)",
)
# The contents of an index are no operands: two calls with the same operands may differ, no call may be folded into a
# constant, and a CUDA graph would keep reading the contents from the time of its capture.
_lib.define(
    "index_search_live(Tensor query, Tensor index, SymInt k, Tensor? allow=None, Tensor? deny=None) "
    "-> (Tensor, Tensor)",
    tags=(
        torch.Tag.pt2_compliant_tag,
        torch.Tag.nondeterministic_seeded,
        torch.Tag.cudagraph_unsafe,
    ),
)

_SAMPLE = 8192  # scores in the sample that estimates the k-th score: a fortieth of the time of a full selection


_APART = 1 << 14  # the smallest number of documents for which handing work to threads pays off
# The C++ search is compiled at once for a collection of at least _COMPILED documents, and for any collection after the
# queries of the process have scored _SCORED documents, which takes ATen about a second.
_COMPILED, _SCORED = 1 << 11, 1 << 20
_JOBS = 4  # jobs per thread: more balance the load better, but each job starts without a bound on the k-th score
_NONE = -(1 << 63)  # the key of a NaN

_scored = 0  # documents scored by all queries of this process; approximate, since threads update it without a lock

_Search = Callable[[Tensor, Sequence[Tensor], Sequence[int], Tensor, int], tuple[Tensor, Tensor]]


def _with_own_marks(search: _Search) -> _Search:
    """Make `search` accept `barred` [B, N], with a row for each query, by searching one query after the other."""

    def each(
        query: Tensor, postings: Sequence[Tensor], counts: Sequence[int], barred: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        barred = barred.contiguous()  # a mask may be transposed
        if barred.dim() == 1:
            return search(query, postings, counts, barred, k)
        if len(barred) != len(query):
            raise IndexError(f"a mask has {len(barred)} rows for {len(query)} queries")
        scores, ids = _fake(query, (), (), None, k)
        for b in range(len(query)):
            found = search(query[b : b + 1], postings, counts, barred[b], k)
            scores[b], ids[b] = found[0][0], found[1][0]
        return scores, ids

    return each


@apart
@_with_own_marks
def _search_cpu(
    query: Tensor, postings: Sequence[Tensor], counts: Sequence[int], barred: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Scores are fp64 sums in the order of the term ids, rounded to fp32, so they do not depend on threads or on the
    other queries of a call."""
    from ..kernels.sparse_scores import cpu as native

    global _scored
    query = query.float().contiguous()
    documents = sum(counts)
    _scored += len(query) * documents
    worth = documents >= _COMPILED or _scored >= _SCORED
    threads = torch.get_num_threads() if documents >= _APART else 1
    if documents and native.ready(worth_compiling=worth):
        best, finite = _by_compiled(native.Segments(postings, counts, barred), query, k, threads)
    else:
        best, finite = _by_aten(query, postings, counts, barred, k, threads)
    scores, ids = scores_and_ids(best)
    live = scores > float("-inf")
    scores, ids = scores.where(live, float("-inf")), ids.where(live, -1)
    return scores.masked_fill_(~finite.unsqueeze(1), float("nan")), ids


def _by_compiled(segments: Segments, query: Tensor, k: int, threads: int) -> tuple[Tensor, Tensor]:
    """(keys [B, k] in descending order, whether each query is finite). A job searches several queries in all segments,
    or, if there are few queries, one query in some segments."""
    B, count = len(query), len(segments.first) - 1
    parts = 1 if threads == 1 else min(count, -(-_JOBS * threads // max(B, 1)))
    runs = [range(i * count // parts, (i + 1) * count // parts) for i in range(parts)]
    together = 1 if parts > 1 else max(1, -(-B // (_JOBS * threads if threads > 1 else 1)))
    keys = torch.empty(B, parts, k, dtype=torch.int64, device="cpu")
    finite = torch.empty(B, dtype=torch.bool, device="cpu")

    def search(job: tuple[int, int]) -> None:
        b, part = job
        rows = slice(b, b + together)
        segments.search(query[rows], runs[part], keys[rows, part], finite[rows])

    jobs = [(b, part) for b in range(0, B, together) for part in range(parts)]
    for _ in (workers().map if len(jobs) > 1 and threads > 1 else map)(search, jobs):
        pass
    return (keys[:, 0] if parts == 1 else torch.topk(keys.flatten(1), k).values), finite


def _by_aten(
    query: Tensor,
    postings: Sequence[Tensor],
    counts: Sequence[int],
    barred: Tensor,
    k: int,
    threads: int,
) -> tuple[Tensor, Tensor]:
    """The same result by ATen operations, one query and one segment at a time."""
    first, marks = [0, *itertools.accumulate(counts)], barred.split([*counts])
    best = torch.full((len(query), k), _NONE, device="cpu")
    finite = query.isfinite().all(1)

    def search(b: int) -> None:
        keys = best[b, :0]
        for s, n in enumerate(counts):
            if n:
                of_segment = postings[3 * s : 3 * s + 3]
                more = _best_of_segment(query[b], of_segment, marks[s], first[s], k)
                keys = torch.cat((keys, more))
                keys = torch.topk(keys, min(k, len(keys))).values
        best[b, : len(keys)] = keys

    rows = finite.nonzero().flatten().tolist() if k else []
    for _ in (workers().map if threads > 1 else map)(search, rows):
        pass
    return best, finite


def _best_of_segment(
    query: Tensor, postings: Sequence[Tensor], barred: Tensor, first: int, k: int
) -> Tensor:
    """Keys of documents of one segment, the k best among them, by ATen operations."""
    offsets, docs, weights = postings
    terms = query.nonzero().squeeze(1)
    edges = torch.stack((offsets[terms], offsets[terms + 1])).tolist()
    sums = torch.zeros(len(barred), dtype=torch.float64, device="cpu")
    for low, high, w in zip(*edges, query[terms].tolist()):
        if high > low:
            sums.index_add_(0, docs[low:high], weights[low:high].double(), alpha=w)
    if not bool(barred.any()):
        return _best_keys(sums.float(), first, k)
    allowed = (~barred).nonzero().squeeze(1)
    return _best_keys(sums[allowed].float(), first, k, allowed)


def _best_keys(scores: Tensor, first: int, k: int, places: Tensor | None = None) -> Tensor:
    """Keys of documents, the k best among them: those above a sampled bound, or, if the sample misses, above the k-th.

    first: the id of the segment's first document. places: positions of the scored documents in the segment; None if
    all documents are scored.
    """
    n = scores.numel()
    if n <= 2 * k:
        return (
            keys_of(scores[None], first)[0]
            if places is None
            else keys_with_ids(scores, places + first)
        )
    step = max(1, n // _SAMPLE)
    sample = scores[::step]
    # About 2k scores are expected to be above this bound; a miss costs one full selection.
    rank = min(sample.numel(), 2 * k // step + 4)
    bound = torch.topk(sample, rank).values[-1]
    chosen = (scores >= bound).nonzero().squeeze(1)
    if not k <= chosen.numel() <= max(8 * k, 1 << 14):
        bound = torch.topk(scores, k).values[-1]
        above, equal = (scores > bound).nonzero().squeeze(1), (scores == bound).nonzero().squeeze(1)
        chosen = torch.cat((above, equal[: k - above.numel()]))  # of equal scores the lowest ids
    return keys_with_ids(scores[chosen], (chosen if places is None else places[chosen]) + first)


@_with_own_marks
def search_cuda(
    query: Tensor, postings: Sequence[Tensor], counts: Sequence[int], barred: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    from ..kernels.sparse_scores import search as kernel

    return kernel.search(query, postings, counts, barred, k)


# Indexes that compiled programs may refer to, by number.
_enrolled: weakref.WeakValueDictionary[int, Searched] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Searched(Protocol):
    """A collection of documents that may change between calls."""

    def operands(
        self, allow: Tensor | None, deny: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[int], Tensor]:
        """A consistent snapshot of postings, counts and barred."""


def enrol(index: Searched) -> Tensor:
    """The tensor by which `index_search_live` refers to an index, valid as long as the index lives."""
    number = next(_numbers)
    _enrolled[number] = index
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def _search_live(
    query: Tensor,
    index: Tensor,
    k: int,
    allow: Tensor | None = None,
    deny: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    named = _enrolled.get(int(index))
    if named is None:
        raise RuntimeError("the index that this program searches no longer exists")
    postings, counts, barred = named.operands(allow, deny)
    return torch.ops.sparse_inductor.index_search(query, postings, counts, barred, k)


def _fake_live(query, index, k, allow=None, deny=None):
    return _fake(query, (), (), None, k)


def _fake(query, postings, counts, barred, k):
    scores = query.new_empty(query.shape[0], k)
    return scores, query.new_empty(query.shape[0], k, dtype=torch.int64)


_lib.impl("index_search", _search_cpu, "CPU")
register_on_gpu(_lib, "index_search", search_cuda)
torch.library.register_fake("sparse_inductor::index_search", _fake, lib=_lib)
_lib.impl("index_search_live", _search_live, "CPU")
_lib.impl("index_search_live", _search_live, "CUDA")
torch.library.register_fake("sparse_inductor::index_search_live", _fake_live, lib=_lib)
