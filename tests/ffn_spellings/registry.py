"""How a spelling is registered, and the small tensors that all of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from corpus.case import Case, Expectation

B, S, K, N = 2, 5, 8, 48
CASES: list[Case] = []

BOTH, INFER, TRAIN = (False, True), (False,), (True,)


def program(
    expect: Expectation = "rewrite", why: str = "", modes: Iterable[bool] = BOTH, **fields: Any
) -> Callable[[Callable[[], tuple]], Callable[[], tuple]]:
    """Register a builder, `build() -> (callable, inputs)`, in inference, training or both.

    The docstring says who writes a block like this.
    """

    def register(build: Callable[[], tuple]) -> Callable[[], tuple]:
        for training in modes:
            CASES.append(
                Case(
                    f"{build.__name__}__{'train' if training else 'infer'}",
                    (build.__doc__ or "").strip(),
                    build,
                    expect,
                    why,
                    training,
                    **fields,
                )
            )
        return build

    return register


def block(
    expect: Expectation = "rewrite",
    why: str = "",
    modes: Iterable[bool] = BOTH,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (B, S, K),
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `forward(x, m)`, where m holds the linears gate, up and down."""

    def register(forward: Callable[[Tensor, Any], Any]) -> Callable:
        def build() -> tuple:
            return Block(forward, bias, dtype), (tokens(dtype, shape),)

        build.__name__, build.__doc__ = forward.__name__, forward.__doc__
        program(expect, why, modes, **fields)(build)
        return forward

    return register


class Block(nn.Module):
    """Gate and up projections [N, K], the down projection [K, N], and a forward given from outside."""

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
