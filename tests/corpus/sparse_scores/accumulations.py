"""Coordinates, rows and postings: products accumulated into scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from corpus.sparse_scores.registry import BOTH, B, K, N, V, scoring


@scoring(batch=False, modes=BOTH)
def index_add_functional(c, q):
    return q.new_zeros(N).index_add(0, c.rows, c.vals * q[c.cols])


@scoring(modes=BOTH)
def index_add_in_place_over_batch(c, q):
    scores = torch.zeros(q.shape[0], N, dtype=q.dtype, device=q.device)
    scores.index_add_(1, c.rows, q[:, c.cols] * c.vals)
    return scores.topk(K, dim=1)


@scoring()
def index_add_documents_first(c, q):
    contributions = q.T[c.cols] * c.vals[:, None]
    return torch.zeros(N, q.size(0)).index_add_(0, c.rows, contributions).T


@scoring(batch=False)
def put_accumulate(c, q):
    scores = q.new_zeros(N)
    return scores.put_(c.rows, c.vals * q.index_select(0, c.cols), accumulate=True)


@scoring(batch=False)
def index_put_accumulate(c, q):
    scores = torch.zeros(N)
    scores.index_put_((c.rows,), c.vals * q.index_select(0, c.cols), accumulate=True)
    return torch.topk(scores, k=K)


@scoring()
def scatter_add_with_expanded_rows(c, q):
    """scatter_add wants the index in full"""
    contributions = q[:, c.cols] * c.vals.unsqueeze(0)
    rows = c.rows.unsqueeze(0).expand_as(contributions)
    return torch.zeros(q.size(0), N).scatter_add(1, rows, contributions)


@scoring(batch=False, index=torch.int32)
def scatter_add_in_place_int32(c, q):
    """int32 coordinates, cast where torch asks for int64"""
    scores = torch.zeros_like(c.lengths, dtype=q.dtype)
    scores.scatter_add_(0, c.rows.long(), q[c.cols] * c.vals)
    return scores


@scoring(batch=False)
def scatter_reduce_sum(c, q):
    return torch.zeros(N).scatter_reduce(0, c.rows, c.vals * q[c.cols], reduce="sum")


@scoring("maybe", "the size of a bincount is data: the graph breaks there by default", batch=False)
def weighted_bincount(c, q):
    return torch.bincount(c.rows, weights=q[c.cols] * c.vals, minlength=N)[:N].float()


@scoring(batch=False)
def segments_by_length(c, q):
    return torch.segment_reduce(q[c.cols] * c.vals, "sum", lengths=c.lengths)


@scoring()
def segments_by_offset_documents_first(c, q):
    products = q.t()[c.cols] * c.vals.unsqueeze(1)
    return torch.segment_reduce(products, "sum", offsets=c.offsets, axis=0).t().topk(K)


@scoring(batch=False, modes=BOTH)
def bag_of_one_query(c, q):
    """embedding_bag, the query as a table one wide"""
    bags = F.embedding_bag(
        c.cols, q.unsqueeze(1), c.offsets[:-1], mode="sum", per_sample_weights=c.vals
    )
    return bags.squeeze(1)


@scoring()
def bag_of_a_batch(c, q):
    """embedding_bag, the transposed queries as the table"""
    bags = F.embedding_bag(
        c.cols, q.t().contiguous(), c.offsets, mode="sum", per_sample_weights=c.vals,
        include_last_offset=True,
    )  # fmt: skip
    return bags.t().topk(K).indices


@scoring()
def bag_of_padded_documents(c, q):
    return F.embedding_bag(c.ids, q.t(), mode="sum", per_sample_weights=c.values).t()


@scoring(batch=False, terms=True)
def postings_of_one_query(c, terms, weights):
    """posting lists of the query's terms, scattered"""
    docs, impacts = c.docs[terms], c.post[terms] * weights.unsqueeze(-1)
    return torch.zeros(N).scatter_add(0, docs.flatten(), impacts.flatten()).topk(K)


@scoring(terms=True)
def query_made_dense_first(c, terms, weights):
    """a sparse query is scattered into the vocabulary, then documents gather from it"""
    q = torch.zeros(terms.size(0), V).scatter_add(1, terms, weights)
    return (q[:, c.ids] * c.values).sum(-1)


@scoring()
def differences_of_padded_prefix_sums(s, q):
    """a batch of queries: the running sums along the entries, from zero"""
    sums = F.pad((q[:, s.cols] * s.vals).cumsum(-1), (1, 0))
    return (sums[:, s.offsets[1:]] - sums[:, s.offsets[:-1]]).topk(K)


@scoring()
def differences_of_prefix_sums_by_column(s, q):
    """one query a column"""
    sums = (q.t()[s.cols] * s.vals[:, None]).cumsum(0)
    sums = torch.cat([torch.zeros(1, q.size(0)), sums])
    return (sums[s.offsets[1:]] - sums[s.offsets[:-1]]).t()


@scoring(modes=BOTH, rewrites=B)
def into_each_row_of_a_buffer(c, q):
    """a loop over the queries, every one into its row of zeros"""
    scores = torch.zeros(B, N)
    for i in range(B):
        scores[i].index_add_(0, c.rows, q[i][c.cols] * c.vals)
    return scores.topk(K)


@scoring()
def into_a_part_that_holds_something(c, q):
    """boosts that are in the buffer stay, and are read again later"""
    scores = torch.zeros(B, N + 2)
    part = scores[:, :N]
    part[:, 0] = 0.25
    part.index_add_(1, c.rows, q[:, c.cols] * c.vals)
    part *= 2
    return scores, part.topk(K).values


@scoring("no_rewrite", "does not start at zero", at="scores[0].index_add_(")
def into_a_row_of_ones(c, q):
    """smoothed scores"""
    scores = torch.ones(B, N)
    scores[0].index_add_(0, c.rows, q[0][c.cols] * c.vals)
    return scores


@scoring(batch=False, modes=BOTH)
def diff_of_some_documents(c, q):
    """all documents but the first: the sums begin where it ends"""
    sums = F.pad((q[c.cols] * c.vals).cumsum(0), (1, 0))
    return sums[c.offsets[1:]].diff()


@scoring(batch=False)
def neighbours_among_looked_up_sums(c, q):
    """the computation of diff(), written by hand"""
    ends = F.pad((q[c.cols] * c.vals).cumsum(0), (1, 0))[c.offsets]
    return (ends[1:] - ends[:-1]).topk(K)


@scoring()
def prefix_sums_behind_an_assigned_zero(c, q):
    """zeros, of which all but the first are assigned"""
    sums = torch.zeros(q.size(0), c.cols.numel() + 1)
    sums[:, 1:] = (q[:, c.cols] * c.vals).cumsum(1)
    return (sums[:, c.offsets[1:]] - sums[:, c.offsets[:-1]]).topk(K)


@scoring("maybe", "the first sum is no zero")
def prefix_sums_behind_something_else(c, q):
    """a base that the first document's score lacks"""
    sums = torch.zeros(q.size(0), c.cols.numel() + 1)
    sums[:, 0] = 0.5
    sums[:, 1:] = (q[:, c.cols] * c.vals).cumsum(1)
    return sums[:, c.offsets].diff(dim=1)


@scoring(modes=BOTH)
def accumulator_moved_to_the_device(c, q):
    """zeros(...).to(q.device): the same tensor where it is there already"""
    contributions = q[:, c.cols] * c.vals
    return torch.zeros(q.shape[0], N).to(q.device).index_add_(1, c.rows, contributions)


@scoring()
def accumulator_shaped_by_query(c, q):
    scores = torch.zeros(B * N).view(B, N)
    scores.index_add_(1, c.rows, q[:, c.cols] * c.vals)
    return torch.topk(scores, K)


@scoring("no_rewrite", "a view of something else", at="scores.index_add_(")
def accumulator_read_flat(c, q):
    """one memory under two shapes"""
    flat = torch.zeros(B * N)
    scores = flat.view(B, N)
    scores.index_add_(1, c.rows, q[:, c.cols] * c.vals)
    return scores, flat.max()


@scoring(modes=(True,))
def hard_negatives(c, q):
    """a search without gradients within a training step"""
    with torch.no_grad():
        found = (q[:, c.ids] * c.values).sum(-1).topk(K).indices
    return q.gather(1, found).sum()


@scoring("no_rewrite", "under no_grad", modes=(True,), at="q[:, c.ids] * c.values")
def scores_without_gradients(c, q):
    """top-k behind the region"""
    with torch.no_grad():
        scores = (q[:, c.ids] * c.values).sum(-1)
    return scores.topk(K).values.sum() + q.sum()


@scoring(batch=False)
def scatter_with_reduce(c, q):
    return torch.zeros(N).scatter(0, c.rows, q[c.cols] * c.vals, reduce="add")


@scoring()
def rows_repeated(c, q):
    contributions = q.index_select(-1, c.cols) * c.vals
    return q.new_zeros(q.shape[0], N).scatter_add_(-1, c.rows.repeat(q.shape[0], 1), contributions)


@scoring()
def accumulator_of_the_querys_type(c, q):
    """zeros(...).type_as(q), and the original zeros are read afterwards"""
    zeros = torch.zeros(q.shape[0], N)
    scores = zeros.type_as(q)
    scores.scatter_add_(1, c.rows.expand(q.shape[0], -1), q[:, c.cols] * c.vals)
    return scores.topk(K), zeros.sum(-1)
