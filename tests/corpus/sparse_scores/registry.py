"""Decorators that register a spelling of sparse scoring, and the small collection that all of them score."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from corpus.case import BOTH as BOTH
from corpus.case import INFER as INFER
from corpus.case import TRAIN as TRAIN
from corpus.case import Expectation, Group

B, N, V, L, K = 3, 23, 41, 6, 5
GROUP = Group("sparse_scores", pattern="sparse_scores")
program, function = GROUP.program, GROUP.function


class Collection(nn.Module):
    """A module that has one collection in every usual layout; its forward calls `score(self, *inputs)`.

    - ids, values, mask [N, L]: padded documents of 0 to L terms.
    - rows, cols, vals [nnz]: the same as coordinates; offsets [N + 1], lengths [N]: its rows.
    - docs, post [V, P]: padded posting lists.
    """

    def __init__(self, score: Callable[..., Any], index: torch.dtype, dtype: torch.dtype):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        lengths = torch.randint(0, L + 1, (N,), generator=g)
        mask = torch.arange(L)[None, :] < lengths[:, None]
        ids = torch.stack([torch.randperm(V, generator=g)[:L] for _ in range(N)]) * mask
        values = torch.rand(N, L, generator=g) * mask
        rows, _ = mask.nonzero(as_tuple=True)
        cols, vals = ids[mask], values[mask]
        widest = int(torch.bincount(cols, minlength=V).max())
        docs, post = torch.zeros(V, widest, dtype=torch.long), torch.zeros(V, widest)
        for term in range(V):
            here = cols == term
            docs[term, : int(here.sum())] = rows[here]
            post[term, : int(here.sum())] = vals[here]
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        integers = {"ids": ids, "rows": rows, "cols": cols, "docs": docs}
        for name, t in integers.items():
            self.register_buffer(name, t.to(index))
        for name, t in {"values": values, "vals": vals, "post": post}.items():
            self.register_buffer(name, t.to(dtype))
        self.register_buffer("mask", mask)
        self.register_buffer("offsets", offsets)
        self.register_buffer("lengths", lengths)
        self.score = score

    def forward(self, *inputs: Tensor) -> Any:
        return self.score(self, *inputs)


def scoring(
    expect: Expectation = "rewrite",
    why: str = "",
    modes: Iterable[bool] = INFER,
    *,
    batch: bool = True,
    terms: bool = False,
    groups: bool = False,
    index: torch.dtype = torch.int64,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `score(collection, query)`, or with `terms` `score(collection, terms, weights)`.

    query [B, V] (or [V], with `groups` [2, B, V]); terms, weights [B, 4] (or [4]).
    """

    def make(score: Callable) -> tuple:
        inputs = query_terms(batch, dtype) if terms else (query(batch, dtype),)
        if groups:
            inputs = (torch.stack((inputs[0], inputs[0].flip(0))).detach().requires_grad_(),)
        return Collection(score, index, dtype), inputs

    return function(make, expect, why, modes, **fields)


def query(batch: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(4)
    shape = (B, V) if batch else (V,)
    q = torch.rand(shape, generator=g) * (torch.rand(shape, generator=g) < 0.6)
    return q.to(dtype).requires_grad_()


def query_terms(batch: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    terms = torch.stack([torch.randperm(V, generator=g)[:4] for _ in range(B)])
    weights = torch.rand(B, 4, generator=g).to(dtype)
    return (terms, weights) if batch else (terms[0], weights[0])
