"""Sparse dot products of queries with documents that are stored as posting lists, and their top k.

    scores[b, docs[p]] += values[p] * weights[b, ...]       for the positions p of the lists of query b

Dispatcher operators:

    sparse_scores_postings         all scores
    sparse_scores_postings_topk    the k best
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..aten import compute_dtype
from ..aten import sparse_scores as aten
from ._arguments import FLOATS, IMPACTS, INTEGERS, fits
from ._dispatch import define, register
from ._sharding import Rule, dims
from .sparse_scores import best_scores, check_k

_POSTINGS = "Tensor positions, Tensor weights, Tensor? mask, Tensor docs, Tensor values"
_lib = define(
    f"sparse_scores_postings({_POSTINGS}, SymInt num_docs, ScalarType? out_dtype=None) -> Tensor",
    f"sparse_scores_postings_topk({_POSTINGS}, SymInt num_docs, SymInt k, ScalarType? out_dtype=None)"
    " -> (Tensor, Tensor)",
)


def _check_postings(positions, weights, mask, docs, values, num_docs, k=None) -> None:
    shape = (*positions.shape, *docs.shape[1:])
    if positions.dim() < 2 or docs.dim() < 1:
        raise ValueError(
            f"positions must be [B, ...], docs [R, ...]; got {tuple(positions.shape)}, {tuple(docs.shape)}"
        )
    for name, t, want in (
        ("values", values, docs.shape),
        ("weights", weights, shape),
        ("mask", mask, shape),
    ):
        if t is None:
            continue
        if t.dim() != len(want) or not fits(t.shape, want):
            raise ValueError(f"{name} must have shape {tuple(want)}, got {tuple(t.shape)}")
    for name, t, accepted in (
        ("positions", positions, INTEGERS),
        ("docs", docs, INTEGERS),
        ("weights", weights, FLOATS),
        ("values", values, (*FLOATS, *IMPACTS)),
    ):
        if t.dtype not in accepted:
            raise TypeError(f"{name} must be one of {accepted}, got {t.dtype}")
    if k is not None:
        check_k(k, num_docs)


def _posting_rows(positions, weights, mask, docs, values, num_docs, out_dtype) -> Iterator[Tensor]:
    """Yields scores [n, N] of some queries at a time.

    Every document's products are summed in the order of the lists, on a GPU by a stable sort and a segmented sum, so
    results are bitwise the same on every device and run.
    """
    dtype = compute_dtype(weights, values)
    B = positions.shape[0]
    lists = positions[0].numel() * docs[0].numel() if B and docs.shape[0] else 0
    step = max(1, aten.BLOCK // max(lists, num_docs, 1))
    for first in range(0, B, step):
        here = positions[first : first + step]
        rows = docs[here].flatten(1).long()
        rows = torch.where(rows < 0, rows + num_docs, rows)  # negative ids count from the end
        parts = values[here].to(dtype) * weights[first : first + step].to(dtype)
        if mask is not None:
            parts = parts.masked_fill(~mask[first : first + step].bool(), 0.0)
        parts = parts.flatten(1)
        out = parts.new_zeros(rows.shape[0], num_docs)
        if out.is_cuda:  # atomics would add in an undefined order
            rows, order = torch.sort(rows, dim=1, stable=True)
            parts = parts.gather(1, order)
            edges = torch.arange(num_docs + 1, device=rows.device).expand(rows.shape[0], -1)
            ends = torch.searchsorted(rows, edges.contiguous())
            base = torch.arange(rows.shape[0], device=rows.device)[:, None] * rows.shape[1]
            starts = torch.cat(((ends[:, :-1] + base).flatten(), ends[-1:, -1] + base[-1:, 0]))
            out = torch.segment_reduce(parts.flatten(), "sum", offsets=starts).view_as(out)
        else:
            out.scatter_add_(1, rows, parts)
        yield out.to(out_dtype)


def _postings(positions, weights, mask, docs, values, num_docs, out_dtype=None):
    _check_postings(positions, weights, mask, docs, values, num_docs)
    out_dtype = out_dtype or torch.promote_types(weights.dtype, values.dtype)
    rows = list(_posting_rows(positions, weights, mask, docs, values, num_docs, out_dtype))
    return torch.cat(rows) if rows else weights.new_empty(0, num_docs, dtype=out_dtype)


def _postings_topk(positions, weights, mask, docs, values, num_docs, k, out_dtype=None):
    _check_postings(positions, weights, mask, docs, values, num_docs, k)
    out_dtype = out_dtype or torch.promote_types(weights.dtype, values.dtype)
    found = [
        best_scores([(0, r)], r, k, out_dtype, r.shape[:1])
        for r in _posting_rows(positions, weights, mask, docs, values, num_docs, out_dtype)
    ]
    if not found:
        return best_scores([], weights[:0], k, out_dtype, (0,))
    return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])


def _fake_postings(positions, weights, mask, docs, values, num_docs, out_dtype=None):
    _check_postings(positions, weights, mask, docs, values, num_docs)
    dtype = out_dtype or torch.promote_types(weights.dtype, values.dtype)
    return weights.new_empty(positions.shape[0], num_docs, dtype=dtype)


def _fake_postings_topk(positions, weights, mask, docs, values, num_docs, k, out_dtype=None):
    _check_postings(positions, weights, mask, docs, values, num_docs, k)
    dtype = out_dtype or torch.promote_types(weights.dtype, values.dtype)
    found = weights.new_empty(positions.shape[0], k, dtype=dtype)
    return found, torch.empty_like(found, dtype=torch.int64)


# Can be sharded over the queries; every process has all documents.


def _shared_postings(positions, weights, mask, docs, values, *_) -> Rule:
    queries = (positions, weights, mask)
    inputs = (
        *(None if t is None else dims(t, "B" + "." * (t.dim() - 1)) for t in queries),
        *(dims(t, "." * t.dim()) for t in (docs, values)),
    )
    return Rule(inputs, (("B", ""),), ("B",))


register(_lib, "sparse_scores_postings", _postings, _fake_postings, _shared_postings)
register(_lib, "sparse_scores_postings_topk", _postings_topk, _fake_postings_topk, _shared_postings)
