"""Search of a `SparseIndex` as one operator, so that it can stand in a compiled program.

    index_search(query [B, V], postings, counts, barred, k) -> (scores [B, k], ids [B, k])
    index_search_live(query [B, V], index, k, allow, deny)

`barred` [N], or [B, N] with a row for each query, marks the documents that are in no result.
`postings` holds three tensors a segment on a CPU: offsets [V + 1], docs, weights. On a GPU see
`sparse_inductor.kernels.sparse_scores.search`.

The second searches what an index holds when it is called. A compiled program names the index alone, by a tensor that
`enrol` gave it, and so stays as it is while documents come and go.
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
# What an index holds is no operand: two calls may differ, none may become a constant, and a CUDA graph would keep
# reading what the index held when it was captured.
_lib.define(
    "index_search_live(Tensor query, Tensor index, SymInt k, Tensor? allow=None, Tensor? deny=None) "
    "-> (Tensor, Tensor)",
    tags=(
        torch.Tag.pt2_compliant_tag,
        torch.Tag.nondeterministic_seeded,
        torch.Tag.cudagraph_unsafe,
    ),
)

_SAMPLE = 8192  # scores looked at for a first guess of the k-th: a fortieth of the time of a full selection


_APART = 1 << 14  # documents from which a thread's work outweighs handing it over
# Documents of a collection from which C++ is worth compiling at once; and those that all queries of a process have
# scored: ATen has taken a second for them.
_COMPILED, _SCORED = 1 << 11, 1 << 20
_JOBS = 4  # a thread, so that none ends long after the others; each begins without a bound
_NONE = -(1 << 63)  # the key of a NaN

_scored = 0  # documents, by all queries of this process; about: threads may count at the same time

_Search = Callable[[Tensor, Sequence[Tensor], Sequence[int], Tensor, int], tuple[Tensor, Tensor]]


def _with_own_marks(search: _Search) -> _Search:
    """Search one query after the other where each has marks of its own."""

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
    """Scores are fp64 sums in the order of the term ids, rounded to fp32: the same bits whatever runs beside."""
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
    """(keys [B, k] in descending order, whether each query is finite): jobs of several queries over all segments, or,
    where there are few queries, of one over some of them."""
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
    """The same by ATen's operations, query by query and segment by segment."""
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
    """Keys of a set of documents of one segment that holds the k best, by ATen's operations."""
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
    """Keys of a set of documents that holds the k best, chosen by a guessed bound and, failing that, by the k-th.

    first: the id of the segment's first document. places: where in the segment the scored documents are; None: all.
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
    # Twice as many as wanted are expected above the guess; a miss costs one full selection.
    rank = min(sample.numel(), 2 * k // step + 4)
    bound = torch.topk(sample, rank).values[-1]
    chosen = (scores >= bound).nonzero().squeeze(1)
    if not k <= chosen.numel() <= max(8 * k, 1 << 14):
        bound = torch.topk(scores, k).values[-1]
        above, equal = (scores > bound).nonzero().squeeze(1), (scores == bound).nonzero().squeeze(1)
        chosen = torch.cat((above, equal[: k - above.numel()]))  # of equal ones the lowest ids
    return keys_with_ids(scores[chosen], (chosen if places is None else places[chosen]) + first)


@_with_own_marks
def search_cuda(
    query: Tensor, postings: Sequence[Tensor], counts: Sequence[int], barred: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    from ..kernels.sparse_scores import search as kernel

    return kernel.search(query, postings, counts, barred, k)


# Indexes that compiled programs may name, by number.
_enrolled: weakref.WeakValueDictionary[int, Searched] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Searched(Protocol):
    """Something that holds documents, at any time others."""

    def operands(
        self, allow: Tensor | None, deny: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[int], Tensor]:
        """postings, counts and barred, which belong together."""


def enrol(index: Searched) -> Tensor:
    """The tensor by which `index_search_live` knows an index for as long as that lives."""
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
