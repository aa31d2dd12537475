"""More spellings, written once the corpus was known: loops, reused buffers, quantised weights, selections."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from corpus.sparse_scores.registry import B, K, N, scoring


@scoring()
def batch_index_put(c, q):
    scores = torch.zeros(q.size(0), N)
    who = torch.arange(q.size(0)).unsqueeze(1)
    scores.index_put_((who, c.rows.unsqueeze(0)), q[:, c.cols] * c.vals, accumulate=True)
    return scores


@scoring()
def gather_in_three_axes(c, q):
    wide = q.unsqueeze(1).expand(-1, N, -1)
    picked = wide.gather(2, c.ids.unsqueeze(0).expand(q.size(0), -1, -1))
    return torch.sum(picked * c.values.unsqueeze(0), dim=-1).topk(K).values


@scoring()
def take_along_dim(c, q):
    """take_along_dim broadcasts by itself"""
    return (torch.take_along_dim(q[:, None, :], c.ids[None], dim=2) * c.values).sum(2)


@scoring(rewrites=B)
def query_by_query(c, q):
    return torch.stack([(q[i][c.ids] * c.values).sum(-1) for i in range(B)])


@scoring(rewrites=3)
def document_blocks(c, q):
    """blocks of documents against memory peaks"""
    parts = [(q[:, c.ids[i : i + 10]] * c.values[i : i + 10]).sum(-1) for i in range(0, N, 10)]
    return torch.cat(parts, dim=1).topk(K)


@scoring(batch=False)
def multiplied_in_place(c, q):
    picked = q[c.ids]
    picked.mul_(c.values)
    return picked.sum(-1)


@scoring(batch=False)
def matrix_times_vector_a_document(c, q):
    """matmul of [N, 1, L] with [N, L, 1], squeezed away"""
    return torch.matmul(c.values[:, None, :], q[c.ids][:, :, None]).squeeze()


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
    """bag of words: a mask is all there is"""
    return (q[:, c.ids] * c.mask).sum(-1).topk(K, sorted=False)[0].sort(-1)[0]


@scoring(batch=False)
def scaled_index_add(c, q):
    return torch.zeros(N).index_add_(0, c.rows, q[c.cols] * c.vals, alpha=0.5)


@scoring(batch=False)
def scatter_with_reduce(c, q):
    return torch.zeros(N).scatter(0, c.rows, q[c.cols] * c.vals, reduce="add")


@scoring()
def rows_repeated(c, q):
    contributions = q.index_select(-1, c.cols) * c.vals
    return q.new_zeros(q.shape[0], N).scatter_add_(-1, c.rows.repeat(q.shape[0], 1), contributions)


@scoring(batch=False)
def empty_then_zero(c, q):
    """empty, zero_, index_add_ as statements"""
    scores = torch.empty(N)
    scores.zero_()
    scores.index_add_(0, c.rows, c.vals * q[c.cols])
    best = scores.topk(K)
    return best.indices, best.values


@scoring(batch=False)
def best_document(c, q):
    return (q[c.ids] * c.values).sum(-1).argmax()


@scoring()
def ranked_ids(c, q):
    return (q[:, c.ids] * c.values).sum(-1).argsort(dim=-1, descending=True)[:, :K]


@scoring()
def normalised_by_length(c, q):
    """scores over norms, then top-k: the scores are needed"""
    norms = c.values.norm(dim=-1).clamp(min=1e-6)
    return ((q[:, c.ids] * c.values).sum(-1) / norms).topk(K)


@scoring()
def filtered_then_topk(c, q):
    """a filter between the scores and the top-k"""
    scores = torch.einsum("bnl,nl->bn", q[:, c.ids], c.values)
    return scores.masked_fill(c.lengths == 0, float("-inf")).topk(K)


@scoring(precision=torch.bfloat16, autocast=torch.bfloat16)
def einsum_under_autocast(c, q):
    return torch.einsum("bnl,nl->bn", q[:, c.ids], c.values)


@scoring(modes=(True,))
def distillation(c, q):
    """the best scores feed a loss"""
    return (q[:, c.ids] * c.values).sum(-1).topk(K).values.log_softmax(-1)


@scoring(dtype=torch.bfloat16, precision=torch.bfloat16)
def bfloat16_documents(c, q):
    return (q[:, c.ids] * c.values).sum(-1)


@scoring(terms=True, index=torch.int32)
def postings_end_to_end(c, terms, weights):
    """accumulators of all queries end to end"""
    b = terms.size(0)
    key = c.docs[terms].long() + (torch.arange(b, device=terms.device) * N)[:, None, None]
    impacts = c.post[terms] * weights[..., None]
    flat = torch.zeros(b * N, device=terms.device).index_add_(0, key.flatten(), impacts.flatten())
    return flat.reshape(b, N).topk(K)


@scoring(terms=True, batch=False)
def postings_by_index_put(c, terms, weights):
    scores = torch.zeros(N)
    impacts = c.post.index_select(0, terms) * weights.unsqueeze(1)
    return scores.index_put_((c.docs.index_select(0, terms),), impacts, accumulate=True)


@scoring("no_rewrite", "also read by gt", at="(picked > 0)")
def gathered_weights_reused(c, q):
    """matched terms are counted beside the scores"""
    picked = q[:, c.ids]
    return (picked * c.values).sum(-1), (picked > 0).sum(-1)


@scoring("no_rewrite", "does not start at zero", batch=False, at="(c.lengths * 0.1).index_add_(")
def into_the_callers_buffer(c, q):
    """a running total"""
    return (c.lengths * 0.1).index_add_(0, c.rows, q[c.cols] * c.vals)


@scoring("no_rewrite", "differ from query to query", at="scatter_add(1, rows")
def rows_of_each_query(c, q):
    """every query has candidates of its own"""
    rows = torch.stack([c.rows.roll(i) for i in range(B)])
    return torch.zeros(B, N).scatter_add(1, rows, q[:, c.cols] * c.vals)


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


@scoring(
    "maybe", "no gradient goes through the scores, and must not with an operator", modes=(True,)
)
def scored_without_gradients(c, q):
    """hard negatives are mined under no_grad inside a training step"""
    with torch.no_grad():
        best = (q[:, c.ids] * c.values).sum(-1).topk(K).indices
    return (q.unsqueeze(1) * torch.ones_like(best, dtype=q.dtype).unsqueeze(-1)).sum(-1)
