"""Sparse scoring as public repositories write it, and its near misses.

The programs follow the operations of the named source; no code is copied. They have 30 documents, 20 terms, 3 queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.sparse_scores.registry import INFER, TRAIN, function, program

N, V, Q, K, T = 30, 20, 3, 5, 8


def _matrix() -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.rand(N, V, generator=g) * (torch.rand(N, V, generator=g) < 0.3)


def queries() -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.rand(Q, V, generator=g) * (torch.rand(Q, V, generator=g) < 0.6)


def one_query() -> tuple[Tensor]:
    return (queries()[0],)


def batch() -> tuple[Tensor]:
    return (queries(),)


def padded_terms() -> tuple[Tensor, Tensor]:
    top = queries().topk(T, dim=1)
    return top.indices, top.values


class Index(nn.Module):
    """A matrix as posting lists (indptr, docs, vals), rows (terms, dvals, row) and padded rows (ids, weights)."""

    def __init__(self, score: Callable[..., Any]):
        super().__init__()
        dense = _matrix()
        by_row, by_term = dense.to_sparse_csr(), dense.t().contiguous().to_sparse_csr()
        padded = dense.topk(int((dense > 0).sum(1).max()), dim=1)
        postings = dense.t().topk(int((dense > 0).sum(0).max()), dim=1)
        buffers = {
            "indptr": by_term.crow_indices(),
            "docs": by_term.col_indices(),
            "vals": by_term.values(),
            "terms": by_row.col_indices(),
            "dvals": by_row.values(),
            "row": torch.repeat_interleave(torch.arange(N), by_row.crow_indices().diff()),
            "ids": padded.indices,
            "weights": padded.values,
            "dense": dense,
            "pdocs": F.pad(postings.indices, (0, 1), value=N),
            "pvals": F.pad(postings.values, (0, 1)),
        }
        for name, t in buffers.items():
            self.register_buffer(name, t.detach().clone())
        self.longest = int(by_term.crow_indices().diff().max())
        self.starts = by_term.crow_indices().tolist()
        self.score = score

    def forward(self, *inputs: Tensor) -> Any:
        return self.score(self, *inputs)


def case(inputs: Callable[[], tuple], **fields: Any) -> Callable[[Callable], Callable]:
    """Register `score(index, *inputs)`."""
    return function(lambda score: (Index(score), inputs()), modes=INFER, **fields)


def _lists(s: Index, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions [Q, T, P] in the terms' posting lists, and a mask of those that exist."""
    start, length = s.indptr[ids], s.indptr[ids + 1] - s.indptr[ids]
    at = torch.arange(s.longest, device=ids.device)
    positions = (start.unsqueeze(-1) + at).clamp(max=s.docs.numel() - 1)
    return positions, at < length.unsqueeze(-1)


@case(padded_terms)
def padded_scatter_add_end_to_end(s, ids, w):
    """GPUSparse batched scatter-add; BM25S padded scorer"""
    positions, real = _lists(s, ids)
    real = real & (w.unsqueeze(-1) > 0)
    parts = torch.where(real, s.vals[positions] * w.unsqueeze(-1), 0.0)
    key = s.docs[positions] + torch.arange(ids.size(0), device=ids.device).view(-1, 1, 1) * N
    acc = torch.zeros(ids.size(0) * N).scatter_add_(0, key.reshape(-1), parts.reshape(-1))
    return acc.view(ids.size(0), N).topk(K, dim=1)


@case(batch)
def lsr_cross_dot(s, q):
    """thongnt99/lsr utils/sparse_rep.py (cross_dot)"""
    picked = q.gather(1, s.ids.view(1, -1).expand(q.size(0), -1)).view(q.size(0), N, -1)
    return s.weights.unsqueeze(-2).bmm(picked.permute(1, 2, 0)).squeeze(1)


@case(batch)
def padded_rows_einsum_ellipsis(s, q):
    """einsum with an ellipsis for whatever comes first"""
    return torch.einsum("...nl,nl->...n", q[..., s.ids], s.weights)


@case(one_query)
def candidates_again(s, q):
    """two-step SPLADE: candidates of one query are scored again"""
    some = torch.tensor([3, 7, 1, 20, 11])
    return (q[s.ids[some]] * s.weights[some]).sum(-1).topk(3)


@case(lambda: ((queries() * 10).to(torch.int32),))
def counted_terms(s, q):
    return (q[:, s.ids].float() * s.weights).sum(-1).topk(K)


@case(one_query, dynamic=True)
def index_add_dynamic(s, q):
    return torch.zeros(N).index_add_(0, s.row, q[s.terms] * s.dvals).topk(K)


@case(one_query, precision=torch.float16)
def half_values(s, q):
    values = s.dvals.half().to(q.dtype)
    return torch.zeros(N).index_add_(0, s.row, q[s.terms] * values).topk(K)


@case(padded_terms)
def postings_of_weight_one(s, ids, w):
    """BM25S: the scores of postings are computed beforehand, and only added up"""
    return torch.zeros(Q, N + 1).scatter_add_(1, s.pdocs[ids].flatten(1), s.pvals[ids].flatten(1))


@case(padded_terms)
def postings_looked_up_flat(s, ids, w):
    """postings looked up for all queries at once"""
    docs = s.pdocs.index_select(0, ids.view(-1)).view(Q, -1)
    parts = s.pvals.index_select(0, ids.view(-1)).view(Q, T, -1) * w.unsqueeze(-1)
    acc = torch.zeros(Q, N + 1).scatter_add_(1, docs, parts.view(Q, -1))
    return acc[:, :N].topk(K, dim=1)


never = functools.partial(case, expect="no_rewrite")


@never(padded_terms, why="rows that belong to no query", at="acc.scatter_add_(")
def postings_and_a_row_to_spare(s, ids, w):
    """a row more than queries"""
    acc = torch.zeros(Q + 1, N + 1)
    return acc.scatter_add_(1, s.pdocs[ids].flatten(1), (s.pvals[ids] * w[..., None]).flatten(1))


@never(lambda: ((queries() * 255).byte(),), why="the products are torch.uint8", at="q[:, s.ids]")
def products_of_eight_bits(s, q):
    return (q[:, s.ids] * (s.weights * 255).byte()).float().sum(-1)


@never(lambda: (torch.arange(0, 40, 2),), why="no document weights", at="index_add_(")
def weights_of_some_edges(s, some):
    """a selection of edges"""
    return torch.zeros(N).index_add_(0, s.row[some], s.dvals[some])


@never(batch, why="a dense product")
def dense_product(s, q):
    return (q @ s.dense.t()).topk(K, dim=1)


@never(lambda: (torch.randn(6, 4),), why="rows of activations")
def activations_combined(s, x):
    tokens = torch.tensor([0, 1, 2, 0, 5, 3])
    return torch.zeros(6, 4).index_add_(0, tokens, x * s.dvals[:6, None])


@case(one_query, expect="maybe", why="no weight times query")
def saturated_inside(s, q):
    """BM25 by the book"""
    parts = s.vals * 2.2 / (s.vals + q[:1].abs() + s.docs)
    return torch.zeros(N).index_add_(0, s.docs, parts).topk(K)


class Biases(nn.Module):
    """The linear part of a factorization machine: one weight per feature, with special entries."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(2)
        self.weight = nn.Embedding(V, 1, **options)
        self.register_buffer("ids", torch.randint(0, V, (N, T), generator=g))

    def forward(self, values: Tensor) -> Tensor:
        return (self.weight(self.ids) * values.unsqueeze(-1)).sum(1)


class Squeezed(Biases):
    """The axis of its single query is dropped before the sum."""

    def forward(self, values: Tensor) -> Tensor:
        return (self.weight(self.ids).squeeze(-1) * values).sum(-1)


def _features() -> tuple[Tensor]:
    return (torch.rand(N, T, generator=torch.Generator().manual_seed(3)),)


@program(modes=INFER)
@program("no_rewrite", "padding_idx keeps the gradient", TRAIN, at="self.weight(self.ids)")
def embedding_with_padding_idx():
    """recsys: linear part of DeepFM, xDeepFM, wide & deep"""
    return Biases(padding_idx=0), _features()


@program("no_rewrite", "divides the gradient", TRAIN, at="self.weight(self.ids)")
def embedding_with_scale_grad_by_freq():
    """recsys: linear part of DeepFM, xDeepFM, wide & deep"""
    return Biases(scale_grad_by_freq=True), _features()


@program()
def linear_part_squeezed():
    """recsys: linear part of DeepFM"""
    return Squeezed(), _features()


class ReusedBuffer(Index):
    """The accumulator is allocated once and kept."""

    def __init__(self, score: Callable[..., Any]):
        super().__init__(score)
        self.register_buffer("scores", torch.ones(N))


def _reused(s: Any, q: Tensor) -> Any:
    s.scores.zero_()
    s.scores.index_add_(0, s.row, q[s.terms] * s.dvals)
    return s.scores.topk(K)


@program("no_rewrite", "the accumulator is the caller's", INFER, at="s.scores.index_add_(")
def accumulator_kept_in_a_buffer():
    """GPU BM25 scorers that allocate their scores once: later readers of the buffer need them in it"""
    return ReusedBuffer(_reused), one_query()


@never(batch, why="rows that belong to no query", at="scatter_add_(1, rows")
def scatter_and_a_row_to_spare(s, q):
    """a row more than queries"""
    rows = s.row.expand(Q, -1)
    return torch.zeros(Q + 1, N).scatter_add_(1, rows, q[:, s.terms] * s.dvals)
