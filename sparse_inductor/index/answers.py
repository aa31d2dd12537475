"""Search and scoring: the best documents of queries, and the scores of documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import compat
from ..threads import apart
from .contents import Contents
from .documents import as_float, as_tensor, candidate_ids, marked
from .queries import Queries, queries_of

if TYPE_CHECKING:
    from .segment import Segment
    from .sparse_index import SparseIndex


@apart
def search(
    index: SparseIndex, queries: Any, k: int, allow: Any, deny: Any
) -> tuple[Tensor, Tensor]:
    """See `SparseIndex.search`."""
    given, ops = queries_of(queries, index.num_terms, index.device), torch.ops.sparse_inductor
    if compat.exporting():
        q = given.dense(index.device).detach()
        postings, counts, barred = index.operands(allow, deny)
        scores, ids = ops.index_search(q, list(postings), counts, barred, k)
    elif torch.compiler.is_compiling():
        q = given.dense(index.device).detach()
        scores, ids = ops.index_search_live(q, index._handle, k, as_tensor(allow), as_tensor(deny))
    else:
        postings, counts, barred = index.operands(allow, deny)
        scores, ids = in_blocks(
            given, barred, lambda q, own: ops.index_search(q, postings, counts, own, k)
        )
    return (scores[0], ids[0]) if given.single else (scores, ids)


def in_blocks(
    given: Queries, barred: Tensor, search: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the results of all queries. `search` is called with one block of queries at a time, fp32 [b, V], and the
    documents barred for them, bool [N] or [b, N]."""
    if barred.dim() == 2 and len(barred) != given.count:
        raise IndexError(f"a mask has {len(barred)} rows for {given.count} queries")
    found, first = [], 0
    for q in given.blocks(barred.device):
        own = barred if barred.dim() == 1 else barred[first : first + len(q)]
        first += len(q)
        found.append(search(q.detach(), own))
    if len(found) == 1:
        return found[0]
    scores, ids = map(torch.cat, zip(*found))
    return scores, ids


def barred_in(contents: Contents, allow: Any, deny: Any) -> Tensor:
    """Return a mask, bool [N] or [B, N], of the documents that are excluded from results."""
    barred = contents.deleted
    if allow is not None:
        barred = marked(allow, barred, "allow") <= barred  # barred or not allowed, in one operation
    if deny is not None:
        barred = barred | marked(deny, barred, "deny")
    return barred


def page(scores: Tensor, ids: Tensor, first: int, min_score: float | None) -> tuple[Tensor, Tensor]:
    """Return the results from `first` on, with those below `min_score` replaced by -inf and -1."""
    if not (isinstance(first, int) and first == 0):
        scores, ids = scores[..., first:], ids[..., first:]
    if min_score is not None:
        if isinstance(min_score, float) or not torch.compiler.is_compiling():
            min_score = as_float(min_score, "min_score")
        low = scores < min_score  # false for the NaN scores of a query that is not finite
        scores, ids = scores.masked_fill(low, float("-inf")), ids.masked_fill(low, -1)
    return scores, ids


def all_scores(contents: Contents, q: Tensor) -> Tensor:
    """Return scores fp32 [B, N] of queries fp64 [B, V]; -inf for deleted documents."""
    parts = [_segment_scores(s, q) for s in contents.segments]
    found = torch.cat(parts, 1) if parts else q.new_zeros(q.shape[0], 0, dtype=torch.float32)
    return found.masked_fill(contents.deleted, float("-inf"))


def candidate_scores(contents: Contents, q: Tensor, documents: Any, single: bool) -> Tensor:
    """Return scores fp32 [B, M] of documents [M], or of documents [B, M] with a row for each query."""
    ids = candidate_ids(documents, contents.count).to(contents.device)
    if ids.dim() == 1:
        return _scores_of(contents, q, ids)
    if single or len(ids) != len(q):
        raise ValueError(f"documents of shape {tuple(ids.shape)} do not match {len(q)} queries")
    if not len(q):
        return q.new_zeros(ids.shape, dtype=torch.float32)
    return torch.cat([_scores_of(contents, q[b : b + 1], ids[b]) for b in range(len(q))])


def _segment_scores(s: Segment, q: Tensor) -> Tensor:
    return torch.ops.sparse_inductor.sparse_scores(
        q, s.term_ids(), s.values(), None, s.offsets, s.count, torch.float32
    )


def _scores_of(contents: Contents, q: Tensor, ids: Tensor) -> Tensor:
    found = q.new_zeros(len(q), len(ids), dtype=torch.float32)
    first = 0
    for whole in contents.segments:
        here = ((ids >= first) & (ids < first + whole.count)).nonzero().squeeze(1)
        if here.numel():
            found = found.index_copy(1, here, _segment_scores(whole.taken(ids[here] - first), q))
        first += whole.count
    gone = ids < 0
    if contents.count:
        gone = gone | contents.deleted[ids.clamp(min=0)]
    return found.masked_fill(gone, float("-inf"))
