"""Padded documents: gather the query's weights, multiply, sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from corpus.case import each
from corpus.sparse_scores.registry import BOTH, K, N, V, scoring


@scoring(batch=False, modes=BOTH)
def one_query_indexed(c, q):
    return (q[c.ids] * c.values).sum(-1)


each(
    scoring(modes=BOTH),
    batch_indexed_with_ellipsis=lambda c, q: torch.sum(q[..., c.ids] * c.values, dim=2),
    einsum_of_one=lambda c, q: torch.einsum("bnl->nb", q[:, c.ids] * c.values),
)


each(
    scoring(batch=False),
    one_query_take_then_dot=lambda c, q: torch.einsum("nl,nl->n", torch.take(q, c.ids), c.values),
    masked_sum=lambda c, q: (q[c.ids] * c.values * c.mask).sum(dim=-1),
    vecdot=lambda c, q: torch.linalg.vecdot(q[c.ids], c.values, dim=-1),
)


@scoring()
def index_select_and_view(c, q):
    """index_select wants one dimension"""
    gathered = q.index_select(1, c.ids.reshape(-1)).view(q.shape[0], N, -1)
    return gathered.mul(c.values.unsqueeze(0)).sum(dim=-1)


@scoring()
def einsum_over_batch(c, q):
    """einsum with the values first, and top-k"""
    return torch.einsum("nl,bnl->bn", c.values, q[:, c.ids]).topk(K)


@scoring(batch=False)
def gather_from_expanded_query(c, q):
    """gather wants equal ranks"""
    return (q.unsqueeze(0).expand(N, V).gather(1, c.ids) * c.values).sum(1)


@scoring()
def batch_gather_expanded(c, q):
    """gather along the vocabulary, documents flattened"""
    flat = c.ids.flatten().unsqueeze(0).expand(q.size(0), -1)
    weights = torch.gather(q, 1, flat).reshape(q.size(0), *c.ids.shape)
    return (weights * c.values[None]).sum(-1)


@scoring()
def embedding_of_the_transposed_query(c, q):
    return (F.embedding(c.ids, q.t()) * c.values.unsqueeze(-1)).sum(1).t()


@scoring()
def products_filled_with_zero(c, q):
    return (q[:, c.ids] * c.values).masked_fill(~c.mask, 0.0).sum(-1)


@scoring(batch=False)
def products_selected(c, q):
    products = c.values * q[c.ids]
    return torch.where(c.mask, products, torch.zeros_like(products)).sum(-1)


@scoring(batch=False)
def row_times_column(c, q):
    return torch.bmm(q[c.ids].unsqueeze(1), c.values.unsqueeze(2)).squeeze(2).squeeze(1)


@scoring(batch=False, index=torch.int32)
def int32_ids_cast(c, q):
    """ids are kept as int32 and cast for indexing; top-k values and ids as one result"""
    values, found = (q[c.ids.long()] * c.values).sum(-1).topk(K)
    return values, found


@scoring(dtype=torch.float16, precision=torch.float16)
def half_values_float_scores(c, q):
    return (q.float()[:, c.ids] * c.values.float()).sum(-1)


@scoring(batch=False)
def query_with_a_slot_for_padding(c, q):
    """padding ids point one past the vocabulary"""
    ids = torch.where(c.mask, c.ids, V)
    return (F.pad(q, (0, 1))[ids] * c.values).sum(-1)


@scoring()
def log_saturation_of_the_query(c, q):
    """a function of the gathered weight alone; best document only"""
    return (torch.log1p(q[:, c.ids]) * c.values).sum(-1).max(dim=-1)


@scoring()
def sorted_and_cut(c, q):
    scores = (q[:, c.ids] * c.values).sum(-1)
    best, order = scores.sort(dim=-1, descending=True)
    return best[:, :K], order[:, :K]


@scoring(modes=BOTH)
def einsum_of_four(c, q):
    """impact, idf and length norm in one call"""
    idf = torch.linspace(0.1, 2.0, V, device=q.device)
    norms = torch.linspace(0.5, 1.0, N, device=q.device)
    return torch.einsum("bnl,nl,n,nl->bn", q[:, c.ids], c.values, norms, idf[c.ids])


@scoring(modes=BOTH)
def einsum_with_norms_of_documents(c, q):
    """one number a document, spread over its terms by an einsum that only multiplies"""
    norms = torch.linspace(0.5, 1.0, N, device=q.device)
    return torch.einsum("bnl,n->bnl", q[:, c.ids] * c.values, norms).sum(-1)


@scoring("no_rewrite", "differ from query to query", modes=BOTH, at="torch.einsum(")
def einsum_that_multiplies_by_query(c, q):
    """one number a query, spread over its contributions"""
    return torch.einsum("bnl,b->bnl", q[:, c.ids] * c.values, q[:, 0]).sum(-1)


@scoring(modes=BOTH)
def documents_first_and_viewed(c, q):
    """the scores of all queries in one row, documents first"""
    return torch.einsum("bnl,nl->nb", q[:, c.ids], c.values).view(-1)


@scoring()
def best_documents_first_and_viewed(c, q):
    """the best of each column, end to end"""
    best = torch.einsum("bnl,nl->nb", q[:, c.ids], c.values).topk(K, dim=0)
    return best.values.view(-1), best.indices.view(-1)


@scoring(modes=BOTH, groups=True)
def groups_of_queries(c, q):
    """queries of a group, for each text"""
    return (q[..., c.ids] * c.values).sum(-1)


@scoring(modes=BOTH, groups=True)
def groups_of_queries_by_einsum(c, q):
    """abnl,nl->abn, functions and a mask on the way"""
    return torch.einsum("abnl,nl->abn", q[:, :, c.ids].relu().masked_fill(~c.mask, 0.0), c.values)


@scoring(groups=True, dynamic=True)
def groups_of_queries_of_any_size(c, q):
    """keepdim, then the best of each"""
    return (q[:, :, c.ids] * c.values).sum(3, keepdim=True).squeeze(3).topk(K)


@scoring(groups=True)
def groups_of_queries_and_the_best(c, q):
    """the scores are not written"""
    return torch.sum(c.values * q[..., c.ids], -1).max(-1)


@scoring(groups=True, modes=BOTH)
def groups_that_change_places(c, q):
    """queries on two axes, scores with the second one first"""
    return torch.einsum("abnl,nl->ban", q[..., c.ids], c.values)


@scoring(groups=True)
def best_of_groups_that_change_places(c, q):
    return torch.einsum("abnl,nl->ban", q[..., c.ids], c.values).topk(K)


@scoring(modes=BOTH)
def terms_before_documents(c, q):
    """documents stored by row, products in the order of a column"""
    return (q[:, c.ids].transpose(1, 2) * c.values.t()).sum(1)


@scoring(modes=BOTH)
def queries_and_documents_on_one_axis(c, q):
    """a sum over rows of all queries, split up afterwards"""
    return (q[:, c.ids] * c.values).flatten(0, 1).sum(-1).view(len(q), -1)


@scoring(groups=True, modes=BOTH)
def one_of_several_groups(c, q):
    return (q[1, :, c.ids] * c.values).sum(-1)
