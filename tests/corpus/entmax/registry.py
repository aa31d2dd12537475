"""Decorators that register a spelling of entmax, and the small tensors that all of them use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus.case import BOTH as BOTH
from corpus.case import INFER as INFER
from corpus.case import TRAIN as TRAIN
from corpus.case import Group, of

entmax = pytest.importorskip("entmax")

B, H, L, D = 2, 4, 7, 8
E = H * D
SCALE = 1 / math.sqrt(D)
GROUP = Group("entmax", pattern="entmax_attention")
program, function = GROUP.program, GROUP.function


def attention(
    *how: Any,
    inputs: Callable[[], tuple] | None = None,
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `attend(q, k, v, mask)`; `inputs` replaces the default arguments `qkv() + (keep(),)`."""

    return function(
        lambda attend: (attend, (inputs() if inputs else (*qkv(), keep()))),
        *how,
        **fields,
    )


def scored(*how: Any, **fields: Any) -> Callable[[Callable], Callable]:
    """Register attention given `change(scores, mask)` alone, which returns new scores or writes to its argument."""

    def wrap(change: Callable) -> Callable:
        def attend(q, k, v, mask):
            scores = q @ k.mT * SCALE
            changed = change(scores, mask)
            return entmax.entmax15(scores if changed is None else changed, dim=-1) @ v

        return attend

    return of(attention(*how, **fields), wrap)


def rows(
    *how: Any,
    shape: tuple[int, ...] = (3, 5, 11),
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `transform(x)`, which returns probabilities, for the pattern `entmax`."""
    return attention(
        *how,
        inputs=lambda: (normal(shape, seed=3, scale=2.0),),
        pattern="entmax",
        **fields,
    )


def normal(
    shape: Iterable[int], seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).requires_grad_()


def qkv(
    heads: int = H, kv_heads: int | None = None, keys: int = L, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, D]; the scores vary enough that entmax gives zeros."""
    kv_heads = kv_heads or heads
    return (
        normal((B, heads, L, D), 1, 1.5, dtype),
        normal((B, kv_heads, keys, D), 2, 1.5, dtype),
        normal((B, kv_heads, keys, D), 4, 1.0, dtype),
    )


def hidden() -> Tensor:
    """[B, L, E]"""
    return normal((B, L, E), 5)


def keep(keys: int = L) -> Tensor:
    """Return a mask [B, Lk] that is True at tokens; every row keeps some."""
    return torch.arange(keys)[None, :] < torch.tensor([keys, keys - 3])[:, None]
