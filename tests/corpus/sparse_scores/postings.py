"""Posting lists: term by term, addressed by pairs of indices, quantised, weighted by BM25."""

from __future__ import annotations

import functools

import torch

from corpus.sparse_scores.registry import TRAIN, B, Collection, K, N, program, query_terms, scoring


@scoring(terms=True, dynamic=True)
def one_term_after_the_other(c, terms, weights):
    """a loop over the positions of terms, with a new accumulator per term, for any number of queries"""
    scores = torch.zeros(terms.size(0), N)
    for t in range(terms.size(1)):
        lists = c.post[terms[:, t]]
        lists = torch.where(lists > 0.1, lists, 0.0) if t == 1 else lists * weights[:, t, None]
        scores = scores.scatter_add(1, c.docs[terms[:, t]], lists)
    return scores


@scoring("no_rewrite", "also read by amax", terms=True, at="first.amax(1)")
def terms_after_a_look_at_the_scores(c, terms, weights):
    """a bound that is taken after the first term, from an accumulator out of place"""
    first = torch.zeros(B, N).scatter_add(1, c.docs[terms[:, 0]], c.post[terms[:, 0]])
    both = first.scatter_add(1, c.docs[terms[:, 1]], c.post[terms[:, 1]])
    return both, first.amax(1)


@scoring("maybe", "scores of the first term are halved, then come the second's", terms=True)
def terms_with_a_decay(c, terms, weights):
    """after the decay, the accumulator is not a sum over lists"""
    scores = torch.zeros(B, N)
    for t in range(2):
        scores.mul_(0.5).scatter_add_(1, c.docs[terms[:, t]], c.post[terms[:, t]])
    return scores


@scoring(terms=True, dynamic=True)
def addressed_by_query_and_document(c, terms, weights):
    """index_put_ with two indices"""
    scores = torch.zeros(terms.size(0), N)
    queries = torch.arange(terms.size(0))[:, None, None]
    impacts = c.post[terms] * weights[..., None]
    scores.index_put_((queries, c.docs[terms]), impacts, accumulate=True)
    return scores.topk(K)


@scoring("maybe", "another query's accumulator", terms=True)
def addressed_by_another_query(c, terms, weights):
    """the queries in the order of their last one"""
    queries = torch.arange(B).flip(0)[:, None, None]
    impacts = c.post[terms] * weights[..., None]
    return torch.zeros(B, N).index_put((queries, c.docs[terms]), impacts, accumulate=True)


@scoring(terms=True)
def impacts_of_eight_bits(c, terms, weights):
    """quantised lists, scaled after they were looked up"""
    post = (c.post * 255).to(torch.uint8)
    impacts = post[terms].float() * (1 / 255) * weights[..., None]
    return torch.zeros(B, N).scatter_add(1, c.docs[terms].flatten(1), impacts.flatten(1))


@scoring(terms=True)
def weighed_by_bm25(c, terms, weights):
    """term frequencies, saturated by the length of each document, which is looked up by the lists"""
    docs, tf = c.docs[terms], c.post[terms]
    length = c.lengths[docs] / c.lengths.float().mean()
    impacts = weights[..., None] * (tf * 2.2) / (tf + 1.2 * (0.25 + 0.75 * length))
    return torch.zeros(B, N).scatter_add_(1, docs.view(B, -1), impacts.view(B, -1)).topk(K)


@scoring(terms=True, batch=False)
def fields_of_a_document(c, terms, weights):
    """title and body into one accumulator, each with a factor of its own"""
    scores = torch.zeros(N)
    for boost, field in ((0.7, slice(0, 2)), (0.3, slice(2, 4))):
        impacts = c.post[terms[field]] * weights[field, None]
        scores.index_add_(0, c.docs[terms[field]].flatten(), impacts.flatten(), alpha=boost)
    return scores.topk(K)


@scoring("maybe", "the lists of one term have an axis of one element", terms=True, batch=False)
def lists_of_a_number(c, terms, weights):
    """index_select by an index of no axes"""
    scores = torch.zeros(N)
    for t in range(2):
        impacts = c.post.index_select(0, terms[t])[0] * weights[t]
        scores.index_add_(0, c.docs.index_select(0, terms[t])[0], impacts)
    return scores


@scoring("no_rewrite", "also read by clamp", terms=True, at="docs.clamp_(")
def lists_that_are_clamped_in_place(c, terms, weights):
    """documents beyond the sixth share its scores"""
    docs = c.docs[terms]
    docs.clamp_(max=5)
    impacts = c.post[terms] * weights[..., None]
    return torch.zeros(B, N).scatter_add_(1, docs.view(B, -1), impacts.view(B, -1))


@scoring("no_rewrite", "'amax': only sums", terms=True, at=".scatter_reduce(1, docs")
def best_list_of_a_document(c, terms, weights):
    """scatter_reduce(amax) of lists"""
    impacts = c.post[terms] * weights[..., None]
    docs = c.docs[terms].flatten(1)
    return torch.zeros(B, N).scatter_reduce(1, docs, impacts.flatten(1), "amax")


@scoring(terms=True, batch=False)
def lists_padded_with_minus_one(c, terms, weights):
    """an index of -1 counts from the end, where 0 is added"""
    docs = torch.where(c.post > 0, c.docs, -1)
    scores = torch.zeros(N)
    scores.index_put_((docs[terms],), c.post[terms] * weights[:, None], accumulate=True)
    return scores.topk(K)


no_gradient = functools.partial(
    program, "no_rewrite", "no gradient for the weights", TRAIN, at="torch.zeros(B, N).scatter_add("
)


@no_gradient()
def trained_on_lists():
    """the weights of a query's terms come from a model that is trained"""

    def score(c, terms, weights):
        impacts = c.post[terms] * weights[..., None]
        return torch.zeros(B, N).scatter_add(1, c.docs[terms].flatten(1), impacts.flatten(1))

    terms, weights = query_terms()
    return Collection(score, torch.int64, torch.float32), (terms, weights.requires_grad_())


@no_gradient()
def trained_on_lists_end_to_end():
    """the same with all lists in one array"""

    def score(c, terms, weights):
        at = terms[..., None] * c.docs.size(1) + torch.arange(c.docs.size(1))
        impacts = c.post.flatten()[at] * weights[..., None]
        docs = c.docs.flatten()[at].flatten(1)
        return torch.zeros(B, N).scatter_add(1, docs, impacts.flatten(1))

    terms, weights = query_terms()
    return Collection(score, torch.int64, torch.float32), (terms, weights.requires_grad_())
