"""Sparse dot products of queries with a collection of sparse documents, and their top k (GPUSparse, section 4).

    scores[b, n] = sum over the entries p of document n of values[p] * query[b, ids[p]]

Dispatcher operators:

    sparse_scores             all scores
    sparse_scores_topk        the k best, without materializing the [B, N] scores
    sparse_scores_backward    the gradient of the query

`sparse_scores_postings` computes the same sums from posting lists of the query's terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor

from ..aten import sparse_scores as aten
from ..aten.top import best_of
from ..layers import launches
from ._arguments import FLOATS, INTEGERS, known, same
from ._dispatch import autocast_off, by_gradient, define, first_order, register
from ._sharding import Rule, dims

DOCS = "Tensor ids, Tensor values, Tensor? rows, Tensor? offsets"
# The PyTorch functions whose errors for ids, and for rows or offsets, out of range are reproduced on a CPU
# (`aten.documents`). Without any, id V is padding.
LOOKUP = "str lookup=''"
_lib = define(
    f"sparse_scores(Tensor query, {DOCS}, SymInt num_docs, ScalarType? out_dtype=None, {LOOKUP}) -> Tensor",
    f"sparse_scores_topk(Tensor query, {DOCS}, SymInt num_docs, SymInt k, ScalarType? out_dtype=None,"
    f" {LOOKUP}) -> (Tensor, Tensor)",
    f"sparse_scores_backward(Tensor grad, {DOCS}, SymInt num_docs, SymInt num_terms, ScalarType dtype,"
    f" {LOOKUP}) -> Tensor",
)


# fmt: off
@overload
def sparse_scores(
    query: Tensor, ids: Tensor, values: Tensor, *, rows: Tensor | None = None, offsets: Tensor | None = None,
    num_docs: int | None = None, k: None = None, out_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def sparse_scores(
    query: Tensor, ids: Tensor, values: Tensor, *, rows: Tensor | None = None, offsets: Tensor | None = None,
    num_docs: int | None = None, k: int, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
# fmt: on
def sparse_scores(
    query: Tensor,
    ids: Tensor,
    values: Tensor,
    *,
    rows: Tensor | None = None,
    offsets: Tensor | None = None,
    num_docs: int | None = None,
    k: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Inner products of queries with sparse documents: all of them, or the k largest per query.

    Args:
        query: term weights [V] or [B, V]; fp32, fp16, bf16 or fp64. The only operand with a gradient.
        ids: int32 or int64 term ids in [-V, V]: [N, L] for padded documents, else [nnz]. Id V is padding and
            contributes nothing; negative ids count from the end.
        values: document weights in the shape of `ids`, any of the float dtypes.
        rows: [nnz], the document of every entry, in any order. Requires `num_docs`.
        offsets: [N + 1]; the entries of document n are offsets[n] to offsets[n + 1]. They may skip entries at either
            end, as offsets of a range of a larger collection do.
        num_docs: N; derived from `ids` or `offsets` if `rows` is not given.
        k: return only the k largest scores per query, without writing the scores of all documents.
        out_dtype: dtype of the scores; default the promoted dtype of query and values. Sums are in fp32 (fp64 for fp64
            inputs).

    Returns:
        scores [N] or [B, N]; with `k`, (values, int64 document ids), both [k] or [B, k], in descending order, equal
        scores by lowest id, NaN first. Documents without entries score 0. Results are bitwise the same on every run.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
        IndexError: on a CPU, ids, rows or offsets out of range.
    """
    if rows is not None and num_docs is None:
        raise ValueError("rows need num_docs: documents at the end may have no entries")
    if num_docs is None:
        num_docs = ids.shape[0] if offsets is None else offsets.shape[0] - 1
    if out_dtype is None:
        out_dtype = torch.promote_types(query.dtype, values.dtype)
    elif out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be one of {FLOATS}, got {out_dtype}")
    ops = torch.ops.sparse_inductor
    if k is None:
        return ops.sparse_scores(query, ids, values, rows, offsets, num_docs, out_dtype)
    return ops.sparse_scores_topk(query, ids, values, rows, offsets, num_docs, k, out_dtype)


def check(query, ids, values, rows, offsets, num_docs, k=None) -> None:
    """Raises the errors that `sparse_scores` documents."""
    if query.dim() not in (1, 2):
        raise ValueError(f"query must be [V] or [B, V], got shape {tuple(query.shape)}")
    if rows is not None and offsets is not None:
        raise ValueError("pass either rows or offsets, not both")
    plain = rows is None and offsets is None
    if ids.dim() != (2 if plain else 1):
        layout = "[N, L] without rows or offsets" if plain else "[nnz] with rows or offsets"
        raise ValueError(f"ids must be {layout}, got shape {tuple(ids.shape)}")
    pairs = [("values", values, ids.shape)]
    if rows is not None:
        pairs.append(("rows", rows, ids.shape))
    if offsets is not None:
        pairs.append(("offsets", offsets, (num_docs + 1,)))
    for name, t, shape in pairs:
        if not same(t.shape, shape):
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)}")
    if plain and known(num_docs, ids.shape[0]) and num_docs not in (-1, ids.shape[0]):
        raise ValueError(f"num_docs is {num_docs}, but ids have {ids.shape[0]} rows")
    if known(num_docs) and num_docs < (-1 if plain else 0):
        raise ValueError(f"num_docs must not be negative, got {num_docs}")
    for name, t, accepted in (
        ("query", query, FLOATS),
        ("values", values, FLOATS),
        ("ids", ids, INTEGERS),
        ("rows", rows, INTEGERS),
        ("offsets", offsets, INTEGERS),
    ):
        if t is not None and t.dtype not in accepted:
            raise TypeError(f"{name} must be one of {accepted}, got {t.dtype}")
        if t is not None and t.device != query.device:
            raise ValueError(f"{name} is on {t.device}, query on {query.device}")
    if k is not None:
        check_k(k, ids.shape[0] if num_docs == -1 else num_docs)


def check_k(k, num_docs) -> None:
    """Raises ValueError unless there are at least k documents."""
    if known(k, num_docs) and not 0 <= k <= num_docs:
        raise ValueError(f"k must be between 0 and the number of documents, {num_docs}; got {k}")


def _blocks(
    query, ids, values, rows, offsets, num_docs, out_dtype, lookup=""
) -> Iterator[tuple[int, Tensor]]:
    if launches(query):
        from ..kernels.sparse_scores import documents as kernel

        yield from kernel.blocks(query, ids, values, rows, offsets, num_docs, out_dtype)
        return
    docs = aten.documents(ids, values, rows, offsets, num_docs, query.shape[1], lookup)
    for first, scores in aten.blocks(query, docs):
        yield first, scores.to(out_dtype)


def _prepare(query, ids, num_docs, values, out_dtype):
    num_docs = ids.shape[0] if num_docs == -1 else num_docs
    out_dtype = out_dtype or torch.promote_types(query.dtype, values.dtype)
    return (query if query.dim() == 2 else query.unsqueeze(0)), num_docs, out_dtype


def _scores(query, ids, values, rows, offsets, num_docs, out_dtype=None, lookup=""):
    check(query, ids, values, rows, offsets, num_docs)
    q, N, dtype = _prepare(query, ids, num_docs, values, out_dtype)
    lead = query.shape[:-1]
    out = None
    if N and len(q):
        with autocast_off(q.device.type):
            for first, scores in _blocks(q, ids, values, rows, offsets, N, dtype, lookup):
                if scores.shape[1] == N and scores.stride() == (N, 1):
                    return scores.view(*lead, N)
                if out is None:
                    out = scores.new_empty(len(q), N)
                out[:, first : first + scores.shape[1]] = scores
    return q.new_empty(*lead, N, dtype=dtype) if out is None else out.view(*lead, N)


def _topk(query, ids, values, rows, offsets, num_docs, k, out_dtype=None, lookup=""):
    check(query, ids, values, rows, offsets, num_docs, k)
    q, N, dtype = _prepare(query, ids, num_docs, values, out_dtype)
    lead = query.shape[:-1]
    with autocast_off(q.device.type):
        if k and q.shape[0] and launches(q) and dtype != torch.float64:
            from ..kernels.sparse_scores import best as kernel

            found, best = kernel.search(q, ids, values, rows, offsets, N, k, dtype)
            return found.view(*lead, k), best.view(*lead, k)
        parts = _blocks(q, ids, values, rows, offsets, N, dtype, lookup) if k and q.shape[0] else ()
        return best_scores(parts, q, k, dtype, lead)


def best_scores(parts, like: Tensor, k: int, dtype: torch.dtype, lead) -> tuple[Tensor, Tensor]:
    """(values, ids) [*lead, k] of the k best over parts of scores. like: a tensor with one row per query."""
    if not k or not like.shape[0]:
        empty = torch.empty(*lead, k, device=like.device, dtype=dtype)
        return empty, torch.empty_like(empty, dtype=torch.int64)
    found, ids = best_of(parts, k)
    return found.to(dtype).view(*lead, k), ids.view(*lead, k)


def _backward(grad, ids, values, rows, offsets, num_docs, num_terms, dtype, lookup=""):
    g = grad if grad.dim() == 2 else grad.unsqueeze(0)
    N = ids.shape[0] if num_docs == -1 else num_docs
    with autocast_off(grad.device.type):
        docs = aten.documents(ids, values, rows, offsets, N, num_terms, lookup)
        posts = aten.transposed(docs, num_terms)
        out = torch.empty(g.shape[0], num_terms, device=g.device, dtype=dtype)
        if out.numel():
            parts = _blocks(g, posts.terms, posts.values, None, posts.offsets, num_terms, dtype)
            for first, part in parts:
                out[:, first : first + part.shape[1]] = part
    return out.view(*grad.shape[:-1], num_terms)


class _SparseScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, ids, values, rows, offsets, num_docs, out_dtype=None, lookup=""):
        _check_no_gradient(ctx.needs_input_grad[2])
        found = torch.ops.sparse_inductor.sparse_scores(
            query, ids, values, rows, offsets, num_docs, out_dtype, lookup
        )
        ctx.save_for_backward(ids, values, rows, offsets)
        ctx.sizes = num_docs, query.shape[-1], query.dtype, lookup
        return found

    @staticmethod
    @first_order("sparse_scores", linear=True)
    def backward(ctx, grad):
        grad = torch.ops.sparse_inductor.sparse_scores_backward(
            grad, *ctx.saved_tensors, *ctx.sizes
        )
        return grad, *(None for _ in range(7))


def _check_no_gradient(wanted: bool) -> None:
    if wanted:
        raise ValueError(
            "values must not require a gradient: sparse_scores has one for the query only"
        )


class _SparseTop(torch.autograd.Function):
    """The scores of the k best documents. Only these documents contribute to the gradient of the query."""

    @staticmethod
    def forward(
        ctx, name, query, ids, values, rows, offsets, num_docs, k, out_dtype=None, lookup="", *more
    ):
        _check_no_gradient(ctx.needs_input_grad[3])
        found, best = getattr(torch.ops.sparse_inductor, name)(
            query, ids, values, rows, offsets, num_docs, k, out_dtype, lookup, *more
        )
        ctx.save_for_backward(best, ids, values, rows, offsets)
        ctx.sizes = num_docs, query.shape[-1], query.dtype, lookup
        ctx.more = len(more)
        ctx.mark_non_differentiable(best)
        return found, best

    @staticmethod
    @first_order("sparse_scores_topk", linear=True)
    def backward(ctx, grad, _):
        best, ids, *rest = ctx.saved_tensors
        num_docs, num_terms, dtype, lookup = ctx.sizes
        N = ids.shape[0] if num_docs == -1 else num_docs
        full = grad.new_zeros(*grad.shape[:-1], N).scatter(-1, best, grad)
        grad = torch.ops.sparse_inductor.sparse_scores_backward(
            full, ids, *rest, num_docs, num_terms, dtype, lookup
        )
        return None, grad, *(None for _ in range(8 + ctx.more))


def by_gradient_topk(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The Autograd kernel of an operator that finds the k best."""
    return by_gradient(name, fn, functools.partial(_SparseTop.apply, name), (0, 2))


def _fake_scores(query, ids, values, rows, offsets, num_docs, out_dtype=None, lookup=""):
    check(query, ids, values, rows, offsets, num_docs)
    N = ids.shape[0] if known(num_docs) and num_docs == -1 else num_docs
    dtype = out_dtype or torch.promote_types(query.dtype, values.dtype)
    return query.new_empty(*query.shape[:-1], N, dtype=dtype)


def fake_topk(query, ids, values, rows, offsets, num_docs, k, out_dtype=None, lookup="", *more):
    check(query, ids, values, rows, offsets, num_docs, k)
    dtype = out_dtype or torch.promote_types(query.dtype, values.dtype)
    found = query.new_empty(*query.shape[:-1], k, dtype=dtype)
    return found, torch.empty_like(found, dtype=torch.int64)


def _fake_backward(grad, ids, values, rows, offsets, num_docs, num_terms, dtype, lookup=""):
    return grad.new_empty(*grad.shape[:-1], num_terms, dtype=dtype)


# Can be sharded over the queries; every process has all documents.


def shared(query, ids, values, rows, offsets, *_) -> Rule:
    lead = "B." if query.dim() == 2 else "."
    documents = (ids, values, rows, offsets)
    inputs = (
        dims(query, lead),
        *(dims(t, "." * t.dim()) if t is not None else None for t in documents),
    )
    scores = ("B", "") if query.dim() == 2 else ("",)
    return Rule(inputs, (scores,), ("B",))


_autograd = by_gradient("sparse_scores", _scores, _SparseScores.apply, (0, 2))
register(_lib, "sparse_scores", _scores, _fake_scores, shared, _autograd)
_autograd_topk = by_gradient_topk("sparse_scores_topk", _topk)
register(_lib, "sparse_scores_topk", _topk, fake_topk, shared, _autograd_topk)
# The gradient of the scores is sharded as the scores are.
register(_lib, "sparse_scores_backward", _backward, _fake_backward, shared)
