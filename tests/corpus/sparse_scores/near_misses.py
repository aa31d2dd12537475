"""Programs that look like sparse scoring and are not, or that an operator may not take over."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.sparse_scores.registry import BOTH, INFER, TRAIN, B, L, N, V, program, scoring


@scoring("no_rewrite", "largest contribution is no sum", batch=False, at=".amax(-1)")
def best_term(c, q):
    return (q[c.ids] * c.values).amax(-1)


@scoring("maybe", "exact where the ids were stored [L, N]; here they are not, and nothing says so")
def summed_over_documents(c, q):
    """scores of positions, summed over documents"""
    return (q[:, c.ids] * c.values).sum(1)


@scoring(
    "no_rewrite", "does not start at zero", batch=False, at="torch.linspace(0, 1, N).index_add("
)
def prior_accumulated_into(c, q):
    """document priors as the accumulator"""
    return torch.linspace(0, 1, N).index_add(0, c.rows, q[c.cols] * c.vals)


@scoring("no_rewrite", "clamp of the products", batch=False, at=".clamp(max=0.5)")
def saturated_products(c, q):
    """clamped contributions"""
    return (q[c.ids] * c.values).clamp(max=0.5).sum(-1)


@scoring("no_rewrite", "also returned", batch=False, at="contributions =")
def contributions_returned(c, q):
    """explanations beside the scores"""
    contributions = q[c.ids] * c.values
    return contributions.sum(-1), contributions


@scoring("no_rewrite", "only sums are inner products", batch=False, at='reduce="amax"')
def scatter_max(c, q):
    return torch.zeros(N).scatter_reduce(0, c.rows, q[c.cols] * c.vals, reduce="amax")


@scoring("no_rewrite", "no query takes part", batch=False)
def document_lengths(c, q):
    """a histogram of the rows"""
    return torch.zeros(N).index_add(0, c.rows, c.vals) + q.sum()


@scoring("no_rewrite", "start at 1.0", batch=False, at="torch.segment_reduce(")
def segments_with_a_start(c, q):
    products = q[c.cols] * c.vals
    return torch.segment_reduce(products, "sum", lengths=c.lengths, initial=1.0, unsafe=True)


@scoring("no_rewrite", "'mean', not added up", batch=False, at="torch.segment_reduce(")
def mean_contribution(c, q):
    return torch.segment_reduce(q[c.cols] * c.vals, "mean", lengths=c.lengths, unsafe=True)


class LearntDocuments(nn.Module):
    """Documents with trained weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.Parameter(torch.rand(N, L))
        self.register_buffer("ids", torch.randint(0, V, (N, L)))

    def forward(self, q):
        return (q[self.ids] * self.values).sum(-1)


@program("no_rewrite", "weights are learnt", TRAIN, at="self.values")
def learnt_documents():
    """doc2query-like tuning"""
    return LearntDocuments(), (torch.rand(V, requires_grad=True),)


class LearntQuery(LearntDocuments):
    """A trained query, too."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.rand(V))

    def forward(self, scale):
        return super().forward(self.query) * scale


@program("no_rewrite", "weights are learnt", TRAIN, at="self.values")
def learnt_documents_and_query():
    return LearntQuery(), (torch.rand(()),)


@program("no_rewrite", "rows of features", TRAIN, at="torch.einsum(")
def columns_of_a_parameter():
    """a memory of which the largest scores choose columns, weighted by these scores"""
    torch.manual_seed(1)
    keys, memory = torch.nn.Linear(16, 10), torch.nn.Linear(40, 8)

    def recall(x):
        values, indices = keys(x).topk(4)
        return torch.einsum("dbk,bk->bd", memory.weight[:, indices + 3], values)

    return recall, (torch.rand(6, 16),)


@program("no_rewrite", "rows of features", INFER, at="x[edges[0]] * w[:, None]")
def message_passing():
    """a graph convolution"""
    torch.manual_seed(1)
    edges, w = torch.randint(0, N, (2, 60)), torch.rand(60)

    def convolve(x):
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * w[:, None])

    return convolve, (torch.rand(N, 8),)


@program("no_rewrite", "nothing has a weight", INFER)
def messages_added_to_the_nodes():
    """a graph isomorphism network"""
    torch.manual_seed(1)
    edges = torch.randint(0, N, (2, 60))
    return lambda x: x.index_add(0, edges[1], x[edges[0]]), (torch.rand(N, 8),)


@program("no_rewrite", "rows of features", INFER, at="(outputs[slots]")
def expert_combine():
    """mixture of experts"""
    torch.manual_seed(2)
    slots = torch.randint(0, 30, (N, 2))

    def combine(outputs, gates):
        return (outputs[slots] * gates.unsqueeze(-1)).sum(1)

    return combine, (torch.rand(30, 8), torch.rand(N, 2).softmax(-1))


@scoring("no_rewrite", "does not start at zero", batch=False, at="scores.index_add_(")
def query_changed_between(c, q):
    """the accumulator is written to before it is read"""
    scores = torch.zeros(N)
    scores[0] = 1.0
    return scores.index_add_(0, c.rows, q[c.cols] * c.vals)


@program("no_rewrite", "batch of queries is empty", INFER, at=".sum(-1)")
def no_queries():
    """the last batch of a loop over chunks"""

    def score(q, ids, values):
        ids = ids.expand(q.size(0), -1, -1)
        return (q[:, None].expand(-1, N, -1).gather(2, ids) * values).sum(-1)

    return score, (torch.rand(0, V), torch.randint(0, V, (1, N, L)), torch.rand(N, L))


@scoring("no_rewrite", "torch.func (vmap)", at="torch.vmap(")
def query_by_query_through_vmap(c, q):
    """functorch instead of a batch axis"""
    return torch.vmap(lambda one: (one[c.ids] * c.values).sum(-1))(q)


@scoring("no_rewrite", "documents of its own", at="q.gather(")
def candidates_of_each_query(c, q):
    """what a first stage found is scored again"""
    found = torch.arange(B)[:, None] + torch.arange(4)
    ids, values = c.ids[found], c.values[found]
    return (q.gather(1, ids.flatten(1)).view_as(values) * values).sum(-1)


@program("no_rewrite", "dense vectors", TRAIN, at="vectors[candidates]")
def candidates_ranked_again():
    """constant document vectors, a query weighted by a constant"""
    torch.manual_seed(4)
    weights, vectors = torch.rand(V), torch.rand(N, V)

    def rank(q, candidates):
        return (vectors[candidates] * (q * weights)[:, None, :]).sum(-1)

    return rank, (torch.rand(3, V, requires_grad=True), torch.randint(0, N, (3, 6)))


@program("no_rewrite", "products of vectors that are both looked up", BOTH)
def ends_of_edges():
    """a graph autoencoder's decoder"""

    def decode(x, src, dst):
        pairs = (x[src] * x[dst]).sum(-1)
        return pairs + torch.einsum("ed,ed->e", x.tanh()[src], x[dst])

    ends = torch.arange(12) % 5, torch.arange(12) % 7
    return decode, (torch.rand(7, V, requires_grad=True), *ends)


@program("no_rewrite", "the norm of an embedding", INFER)
def norm_of_an_embedding():
    """Gemma's first norm"""
    torch.manual_seed(5)
    table = nn.Embedding(V, 8)

    def normed(ids):
        h = table(ids) * 4.0
        return h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6).type_as(h)

    return normed, (torch.randint(0, V, (2, 5)),)


@program("no_rewrite", "the average of some embeddings", INFER)
def average_of_embeddings():
    """a sentence encoder of words"""
    torch.manual_seed(6)
    table = nn.Embedding(V, 8)

    def average(ids, mask):
        return (table(ids) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)

    return average, (torch.randint(0, V, (2, 5)), torch.ones(2, 5))


@scoring(
    "no_rewrite", "differ from query to query", groups=True, at="(q[..., c.ids] * torch.stack("
)
def weights_of_each_group(c, q):
    """queries [A, B, V], weights [A, 1, N, L]"""
    return (q[..., c.ids] * torch.stack((c.values, c.values * 2))[:, None]).sum(-1)


@scoring("no_rewrite", "the queries of a group are added up", groups=True)
def groups_added_up(c, q):
    return (q[..., c.ids] * c.values).sum((1, 3))


@scoring("maybe", "each product is added as often as the indices name its place")
def products_that_the_index_repeats(c, q):
    """one product per query, which the index repeats for four positions"""
    who = torch.arange(B)[:, None].expand(B, 4)
    products, rows = q[:, c.cols[:1]] * c.vals[:1], torch.zeros(B, 1).long()
    return torch.zeros(B, N).index_put((who, rows), products, accumulate=True)


@scoring("no_rewrite", "differ from query to query", at="picked = picked * picked")
def powers_of_the_weights(c, q):
    """squares of squares, with a million paths back to the query"""
    picked = q[:, c.ids]
    for _ in range(20):
        picked = picked * picked
    return picked.sum(-1)


@scoring("no_rewrite", "also read by gt", at="(picked > 0)")
def gathered_weights_reused(c, q):
    """matched terms are counted beside the scores"""
    picked = q[:, c.ids]
    return (picked * c.values).sum(-1), (picked > 0).sum(-1)


@scoring("no_rewrite", "differ from query to query", at="scatter_add(1, rows")
def rows_of_each_query(c, q):
    """every query has different candidates"""
    rows = torch.stack([c.rows.roll(i) for i in range(B)])
    return torch.zeros(B, N).scatter_add(1, rows, q[:, c.cols] * c.vals)


@scoring("no_rewrite", "a dot product for every row of a dense matrix")
def bm25_of_a_dense_matrix(c, q):
    """the columns of the query's terms, weighted by idf and divided by a norm of every text"""
    terms, idf, norm = c.cols[:4], c.post[:, 0], 1 + q.sum(-1, keepdim=True)
    return (idf[terms] * q[:, terms] / (q[:, terms] + norm)).sum(1)


@scoring("no_rewrite", "columns of one matrix, weighted alike", modes=TRAIN)
def columns_with_learnt_weights(c, q):
    return (q[:, c.cols[:4]] * q.mean(0)[:4]).sum(-1)


@scoring("no_rewrite", "documents of its own", at="q[rows, c.ids[candidates]]")
def candidates_by_rows_and_columns(c, q):
    """q[arange, ids[candidates]]"""
    candidates = torch.arange(len(q))[:, None] + torch.arange(4)
    rows = torch.arange(len(q))[:, None, None]
    return (q[rows, c.ids[candidates]] * c.values[candidates]).sum(-1)


@scoring("no_rewrite", "differ from query to query", at="torch.einsum(")
def einsum_with_boosts_of_queries(c, q):
    """one of three operands has the batch axis, too"""
    return torch.einsum("bnl,nl,b->bn", q[:, c.ids], c.values, q[:, 0])


class Recommender(nn.Module):
    """A recommender with factors of users and items, and a bias per item."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.users, self.items, self.worth = (
            nn.Embedding(V, 8),
            nn.Embedding(V, 8),
            nn.Embedding(V, 1),
        )
        self.bare = nn.Parameter(torch.rand(V, 8))

    def forward(self, user, item, words):
        ranked = (self.users(user) * (self.items(item) - self.bare[user])).sum(-1)
        ranked = ranked + self.worth(words).sum(1).squeeze(-1)
        rarity = self.worth.weight[words]
        bags = F.embedding_bag(
            words, self.items.weight, per_sample_weights=rarity[..., 0], mode="sum"
        )
        return ranked + (bags * (self.users(words) * rarity).sum(1)).sum(-1)


@program("no_rewrite", "embeddings", BOTH)
def factors_of_a_recommender():
    """looked-up rows of parameters, weighted and not, and sums of looked-up numbers"""
    ids = torch.arange(6)
    return Recommender(), (ids, ids + 3, torch.stack((ids, ids + 5), 1))


@program("no_rewrite", "nothing has a weight", INFER)
def largest_message():
    """a graph network that keeps the largest message of the neighbours"""
    torch.manual_seed(1)
    edges = torch.randint(0, N, (2, 60))
    to = edges[1, :, None].expand(-1, 8)
    return lambda x: x.scatter_reduce(0, to, torch.tanh(x)[edges[0]], "amax"), (torch.rand(N, 8),)


@program("no_rewrite", "one number", TRAIN)
def weighted_loss():
    """the negative log-likelihood with a weight for each class"""
    torch.manual_seed(8)
    classes, weight = torch.arange(6) % 4, torch.rand(4)

    def loss(x, y):
        chosen = x.log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
        return -(chosen * weight[y]).sum() / weight[y].sum()

    return loss, (torch.rand(6, 4, requires_grad=True), classes)


@program("no_rewrite", "an ordinary linear", BOTH)
def columns_through_a_linear():
    """a quantised linear whose inputs are permuted, and ghost gradients of dead neurons"""
    torch.manual_seed(9)
    order, weight, dead = torch.randperm(V), torch.randn(V, 8), torch.tensor([1, 4, 6])
    return (
        lambda x: (x[..., order] @ (weight * 0.5), torch.exp(x[:, dead]) @ weight[dead]),
        (torch.rand(5, V, requires_grad=True),),
    )
