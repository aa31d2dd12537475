"""Indexing with more than ids: row indices, single queries, assignments, and tensors that are cleared when created."""

from __future__ import annotations

import torch

from corpus.case import each, of
from corpus.sparse_scores.registry import BOTH, TRAIN, B, K, N, scoring


@scoring(modes=BOTH)
def every_row_with_the_same_ids(c, q):
    """numpy's habit: both coordinates, broadcast"""
    return (q[torch.arange(B)[:, None, None], c.ids] * c.values).sum(-1)


@scoring()
def expanded_coordinates(c, q):
    """both coordinates in full, of the gather and of the accumulation"""
    who = torch.arange(q.size(0)).view(-1, 1).expand(-1, c.cols.numel())
    scores = torch.zeros(q.size(0), N)
    parts = q[who, c.cols.expand_as(who)] * c.vals
    return scores.index_put_((who, c.rows.expand_as(who)), parts, accumulate=True).topk(K)


each(
    of(
        scoring("no_rewrite", "the rows of the queries are in another order"),
        lambda rows: lambda c, q: (q[rows(B)[:, None, None], c.ids] * c.values).sum(-1),
    ),
    rows_reversed=lambda n: torch.arange(n).flip(0),
    rows_listed=lambda n: torch.arange(n)[[1, 2, 0]],
    rows_shifted=lambda n: torch.arange(1, n + 1) % n,
)


@scoring("no_rewrite", "the first rows of the queries come twice")
def rows_repeated_as_a_column(c, q):
    """arange(2)[:, None].repeat(2, 1) has as many rows as queries, but selects other queries"""
    twice = torch.cat([q, q[:1]])
    picked = twice[torch.arange(2)[:, None].repeat(2, c.cols.numel()), c.cols] * c.vals
    return torch.zeros(4, N).index_add(1, c.rows, picked)


@scoring(modes=BOTH, rewrites=B)
def query_by_number(c, q):
    return torch.stack([(q[i, c.ids] * c.values).sum(-1) for i in range(B)])


@scoring()
def some_queries(c, q):
    return (q[1:, c.ids] * c.values).sum(-1).topk(K)


@scoring(modes=BOTH)
def assigned_where_padded(c, q):
    products = q[:, c.ids] * c.values
    products[:, ~c.mask] = 0
    return products.sum(-1)


@scoring("no_rewrite", "part of the contributions", at="products[:, c.lengths < 2] = 0")
def assigned_by_document(c, q):
    products = q[:, c.ids] * c.values
    products[:, c.lengths < 2] = 0
    return products.sum(-1)


@scoring(modes=BOTH)
def einsum_that_only_multiplies(c, q):
    """the sum is a separate call"""
    return torch.einsum("bnl,nl->bnl", q[:, c.ids], c.values).sum(-1)


@scoring(modes=BOTH)
def emptied_in_the_same_line(c, q):
    return q.new_empty(B, N).zero_().index_add_(1, c.rows, q[:, c.cols] * c.vals)


@scoring()
def emptied_under_two_names(c, q):
    """the result of fill_ is written to, and the tensor it was called on is read"""
    scores = torch.empty(B, N)
    cleared = scores.fill_(0.0)
    cleared.index_add_(1, c.rows, q[:, c.cols] * c.vals)
    return scores.topk(K)


@scoring("no_rewrite", "changed after they were looked up", terms=True, at=".clamp(max=N - 1)")
def clamped_postings(c, terms, weights):
    """padding is clamped into range after it was looked up"""
    docs = c.docs[terms].clamp(max=N - 1).flatten(1)
    return torch.zeros(B, N).scatter_add(1, docs, (c.post[terms] * weights[..., None]).flatten(1))


# One query with a batch axis: the operator still computes the top-k.

each(
    of(
        scoring(note="the scores are not written"),
        lambda top: lambda c, q: top((q[:1, c.ids] * c.values).sum(-1)),
    ),
    single_query_squeezed=lambda scores: scores.squeeze(0).topk(K),
    single_query_first=lambda scores: scores[0].topk(K),
    single_query_selected=lambda scores: scores.select(0, 0).topk(K),
    single_query_flat=lambda scores: scores.view(-1).topk(K),
    single_query_cast_to_its_dtype=lambda scores: scores[0].float().topk(K),
    single_query_widened=lambda scores: scores[0].double().topk(K),
    single_query_best=lambda scores: scores[0].max(0),
    single_query_documents_first=lambda scores: scores.t()[:, 0].topk(K),
)


@scoring(modes=TRAIN, note="padded documents")
def single_query_in_training(c, q):
    """the scores are needed for the gradient"""
    return (q[:1, c.ids] * c.values).sum(-1)[0].topk(K).values


@scoring()
def permuted_documents(c, q):
    """a reordered part of the documents is not a view, so the returned ids are positions in it"""
    order = torch.arange(N).flip(0)
    return (q[:, c.ids] * c.values).sum(-1)[:, order].topk(K)
