"""The top k of a collection that may be unchanged at the next call: `sparse_scores_topk`, or a search in an index.

Dispatcher operators:

    sparse_scores_topk_cached     the k best

`held` is a bit mask of the tensors that the program keeps between calls: 1 for ids, 2 for values, 4 for rows and 8 for
offsets. Results are those of `sparse_scores_topk` until an index has been built (`_collections`). From then on they are
those of a `SparseIndex`, whose sums are in fp64 and rounded to fp32.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ._arguments import FLOATS
from ._collections import collection_of
from ._dispatch import call_below_autograd, define, functions, register
from .sparse_scores import DOCS, LOOKUP, by_gradient_topk, fake_topk, shared

_lib = define(
    f"sparse_scores_topk_cached(Tensor query, {DOCS}, SymInt num_docs, SymInt k, ScalarType? out_dtype=None,"
    f" {LOOKUP}, int held=3) -> (Tensor, Tensor)",
)


class _Site:
    """The operator at one call site, where calls differ only in the addresses and contents of tensors. A call with
    documents at the same addresses as before reuses the search of the previous call without a lookup."""

    def __init__(self) -> None:
        # The collection, the addresses of its tensors, and the search in its index. The references are weak, so that
        # collection and index are freed with the documents.
        self._last: tuple[Any, list[int], Any] = _none, [], _none

    def __call__(
        self, query, ids, values, rows, offsets, num_docs, k, out_dtype=None, lookup="", held=3
    ):
        documents = ids, values, rows, offsets
        addresses = [t.data_ptr() for t in documents if t is not None]
        known, before, kept = self._last
        collection, search = known(), kept()
        if search is None or addresses != before:
            N = ids.shape[0] if num_docs == -1 else num_docs
            dtype = out_dtype or torch.promote_types(query.dtype, values.dtype)
            collection = search = None
            if 0 < k <= N and query.dim() in (1, 2) and query.numel() and query.dtype in FLOATS:
                collection = collection_of(query, documents, held, N, k, dtype, lookup)
            if collection is not None:
                search = collection.search(query, k)
            if search is not None:
                self._last = weakref.ref(collection), addresses, weakref.ref(search)

        def written():
            args = query, *documents, num_docs, k, out_dtype, lookup
            op = torch.ops.sparse_inductor.sparse_scores_topk
            return call_below_autograd(op, functions["sparse_scores_topk"], args)

        if collection is None or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return written()
        return collection.topk(query, documents, k, search, written)


def _none() -> None: ...


def _topk(*args, **named):
    return _Site()(*args, **named)


_autograd = by_gradient_topk("sparse_scores_topk_cached", _topk)
register(
    _lib, "sparse_scores_topk_cached", _topk, fake_topk, shared, _autograd, composed=True, site=_Site
)  # fmt: skip
