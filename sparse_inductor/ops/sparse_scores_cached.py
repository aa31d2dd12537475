"""The best of a collection that may be the same at the next call: `sparse_scores_topk`, or a search in an index of it.

Dispatcher operators:

    sparse_scores_topk_cached     the k best

`held` says which of ids, values, rows and offsets are tensors that the program keeps, in bits of 1, 2, 4 and 8. Results
are those of `sparse_scores_topk` until there is an index (`_collections`), and then those of a `SparseIndex`: sums in
fp64, rounded to fp32.
"""

from __future__ import annotations

import functools

import torch

from ._arguments import FLOATS
from ._collections import collection_of
from ._dispatch import call_below_autograd, define, functions, register
from .sparse_scores import DOCS, LOOKUP, autograd_topk, fake_topk, shared

_lib = define(
    f"sparse_scores_topk_cached(Tensor query, {DOCS}, SymInt num_docs, SymInt k, ScalarType? out_dtype=None,"
    f" {LOOKUP}, int held=3) -> (Tensor, Tensor)",
)


def _topk(query, ids, values, rows, offsets, num_docs, k, out_dtype=None, lookup="", held=3):
    N = ids.shape[0] if num_docs == -1 else num_docs
    dtype = out_dtype or torch.promote_types(query.dtype, values.dtype)
    documents = ids, values, rows, offsets

    def written():
        args = query, *documents, num_docs, k, out_dtype, lookup
        op = torch.ops.sparse_inductor.sparse_scores_topk
        return call_below_autograd(op, functions["sparse_scores_topk"], args)

    if not (0 < k <= N and query.dim() in (1, 2) and query.numel() and query.dtype in FLOATS):
        return written()
    collection = collection_of(query, documents, held, N, k, dtype, lookup)
    if collection is None:
        return written()
    return collection.topk(query, documents, k, written)


register(
    _lib,
    "sparse_scores_topk_cached",
    _topk,
    fake_topk,
    shared,
    functools.partial(autograd_topk, "sparse_scores_topk_cached"),
    composed=True,
)
