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
    # documents stored by row, products in the order of a column
    terms_before_documents=lambda c, q: (q[:, c.ids].transpose(1, 2) * c.values.t()).sum(1),
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


each(
    scoring(),
    # einsum with the values first, and top-k
    einsum_over_batch=lambda c, q: torch.einsum("nl,bnl->bn", c.values, q[:, c.ids]).topk(K),
    vecdot_of_queries=lambda c, q: torch.linalg.vecdot(
        c.values[..., None], q.t()[c.ids], dim=1
    ).t(),
)


@scoring(batch=False)
def gather_from_expanded_query(c, q):
    """gather wants equal ranks"""
    return (q.unsqueeze(0).expand(N, V).gather(1, c.ids) * c.values).sum(1)


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
    """one number per document, multiplied to all of its terms by an einsum without a sum"""
    norms = torch.linspace(0.5, 1.0, N, device=q.device)
    return torch.einsum("bnl,n->bnl", q[:, c.ids] * c.values, norms).sum(-1)


@scoring("no_rewrite", "differ from query to query", modes=BOTH, at="torch.einsum(")
def einsum_that_multiplies_by_query(c, q):
    """one number per query, multiplied to all of its contributions"""
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


each(
    scoring(modes=BOTH, groups=True),
    # queries of a group, for each text
    groups_of_queries=lambda c, q: (q[..., c.ids] * c.values).sum(-1),
)


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


each(
    scoring(groups=True, modes=BOTH),
    # queries on two axes, scores with the second one first
    groups_that_change_places=lambda c, q: torch.einsum("abnl,nl->ban", q[..., c.ids], c.values),
    one_of_several_groups=lambda c, q: (q[1, :, c.ids] * c.values).sum(-1),
)


@scoring(modes=BOTH)
def queries_and_documents_on_one_axis(c, q):
    """a sum over rows of all queries, split up afterwards"""
    return (q[:, c.ids] * c.values).flatten(0, 1).sum(-1).view(len(q), -1)


@scoring()
def gather_in_three_axes(c, q):
    wide = q.unsqueeze(1).expand(-1, N, -1)
    picked = wide.gather(2, c.ids.unsqueeze(0).expand(q.size(0), -1, -1))
    return torch.sum(picked * c.values.unsqueeze(0), dim=-1).topk(K).values


@scoring()
def take_along_dim(c, q):
    """take_along_dim broadcasts by itself"""
    return (torch.take_along_dim(q[:, None, :], c.ids[None], dim=2) * c.values).sum(2)


@scoring(batch=False)
def multiplied_in_place(c, q):
    picked = q[c.ids]
    picked.mul_(c.values)
    return picked.sum(-1)


@scoring()
def einsum_of_an_embedding(c, q):
    """letters in another order, documents first"""
    return torch.einsum("nlb,nl->bn", F.embedding(c.ids, q.t().contiguous()), c.values)


@scoring(batch=False)
def eight_bit_weights(c, q):
    """integer impacts with one scale"""
    impacts = (c.values * 255).round().to(torch.uint8)
    return (q[c.ids] * impacts).sum(-1) * (1 / 255)


@scoring()
def binary_documents(c, q):
    """bag of words: documents have a mask and no weights"""
    return (q[:, c.ids] * c.mask).sum(-1).topk(K, sorted=False)[0].sort(-1)[0]


each(
    scoring(note="the scores are not written"),
    ranked_ids=lambda c, q: (
        (q[:, c.ids] * c.values).sum(-1).argsort(dim=-1, descending=True)[:, :K]
    ),
    best_ids=lambda c, q: (q[:, c.ids] * c.values).sum(-1).argmax(-1, keepdim=True),
)


each(
    scoring(batch=False, note="the scores are not written"),
    best_document=lambda c, q: (q[c.ids] * c.values).sum(-1).argmax(),
)


@scoring(note="padded documents")
def best_pair_of_query_and_document(c, q):
    """argmax without an axis returns a position among all scores"""
    return (q[:, c.ids] * c.values).sum(-1).argmax()


@scoring()
def normalised_by_length(c, q):
    """scores over norms, then top-k: the scores are needed"""
    norms = c.values.norm(dim=-1).clamp(min=1e-6)
    return ((q[:, c.ids] * c.values).sum(-1) / norms).topk(K)


@scoring(precision=torch.bfloat16, autocast=torch.bfloat16)
def einsum_under_autocast(c, q):
    return torch.einsum("bnl,nl->bn", q[:, c.ids], c.values)


@scoring(dtype=torch.bfloat16, precision=torch.bfloat16)
def bfloat16_documents(c, q):
    return (q[:, c.ids] * c.values).sum(-1)


@scoring(batch=False)
def divided_before_multiplied(c, q):
    """norms divide, constants too, the weights come last"""
    norms = c.values.norm(dim=-1, keepdim=True).clamp(min=0.1)
    return (q[c.ids] / 2 / norms * c.values).sum(-1)


@scoring()
def two_factors_of_eight_bits(c, q):
    """impact times field boost, both integers that would overflow together"""
    impacts = (c.values * 255).to(torch.uint8)
    boosts = (c.mask * 200).to(torch.uint8)
    return (q[:, c.ids] * impacts * boosts).sum(-1).topk(K)


@scoring(dtype=torch.float16, precision=torch.float16, batch=False)
def two_factors_of_sixteen_bits(c, q):
    """weights whose product has no place in half precision"""
    return (q[c.ids].float() * (c.values * 1e-2) * (c.values * 1e-2) * 1e4).sum(-1)


@scoring(groups=True)
def best_of_groups_that_change_places(c, q):
    return torch.einsum("abnl,nl->ban", q[..., c.ids], c.values).topk(K)
