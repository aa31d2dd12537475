"""Decorators that register a feed-forward block, and the small tensors that all of them use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from corpus.case import BOTH as BOTH
from corpus.case import INFER as INFER
from corpus.case import TRAIN as TRAIN
from corpus.case import Group, of

B, S, K, N = 2, 5, 8, 48
GROUP = Group("relu_ffn", pattern="relu_ffn", dense=B * S * N)
program, function = GROUP.program, GROUP.function


def block(
    *how: Any,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (B, S, K),
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `forward(x, m)`, where m holds the linears gate, up and down."""

    return function(
        lambda forward: (Block(forward, bias, dtype), (tokens(dtype, shape),)),
        *how,
        **fields,
    )


def gate(*how: Any, **fields: Any) -> Callable[[Callable], Callable]:
    """Register a gated block given `act(g)`, its gate's activation, alone."""
    return of(block(*how, **fields), lambda act: lambda x, m: m.down(act(m.gate(x)) * m.up(x)))


class Block(nn.Module):
    """A module with gate and up projections [N, K] and a down projection [K, N]; its forward is an argument."""

    def __init__(self, forward: Callable, bias: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(31)
        self.gate = nn.Linear(K, N, bias=bias, dtype=dtype)
        self.up = nn.Linear(K, N, bias=bias, dtype=dtype)
        self.down = nn.Linear(N, K, bias=bias, dtype=dtype)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.3)
        self.norm = nn.LayerNorm(K, dtype=dtype)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(x, self)


def tokens(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (B, S, K)) -> Tensor:
    generator = torch.Generator().manual_seed(32)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def weight(*shape: int, seed: int = 33) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / 3).requires_grad_()


formula = GROUP.formulas(
    x=tokens,
    g=lambda: weight(K, N),
    w=lambda: weight(K, N),
    u=lambda: weight(K, N, seed=35),
    d=lambda: weight(N, K, seed=36),
    b=lambda: weight(N, seed=35),
    c=lambda: weight(K, seed=37),
)
"""Register a function of tokens x, weights g, u (or w) [K, N] and d [N, K], biases b [N] and c [K]."""
