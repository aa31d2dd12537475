"""Decorators that register a SPLADE head, and the small tensors that all of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from corpus.case import BOTH as BOTH
from corpus.case import INFER as INFER
from corpus.case import TRAIN as TRAIN
from corpus.case import Group, of

B, S, D, V = 3, 7, 12, 37
GROUP = Group("splade_head", dense=B * S * V)
program, function = GROUP.program, GROUP.function


def head(
    *how: Any,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    mask_dtype: torch.dtype = torch.int64,
    lengths: tuple[int, ...] = (7, 4, 2),
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `pool(logits, mask)` after a linear layer to the vocabulary."""

    return function(
        lambda pool: (Head(pool, bias, dtype), (hidden(dtype), mask(mask_dtype, lengths))),
        *how,
        **fields,
    )


def pooled(*how: Any, **fields: Any) -> Callable[[Callable], Callable]:
    """Register a head given `reduce(weights)` alone; the weights are activated and masked."""
    return of(
        head(*how, **fields),
        lambda reduce: lambda logits, mask: reduce(tokens(logits) * mask.unsqueeze(-1)),
    )


def masked(*how: Any, **fields: Any) -> Callable[[Callable], Callable]:
    """Register a head given `change(weights, mask)` alone, which masks the activations."""
    return of(
        head(*how, **fields),
        lambda change: lambda logits, mask: change(tokens(logits), mask).max(dim=1).values,
    )


def activated(*how: Any, **fields: Any) -> Callable[[Callable], Callable]:
    """Register a head given `activate(logits)` alone."""
    return of(
        head(*how, **fields),
        lambda activate: lambda logits, mask: (activate(logits) * mask.unsqueeze(-1)).amax(dim=1),
    )


class Vocabulary(nn.Module):
    """The base class of most encoders below: a linear layer to the vocabulary."""

    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(11)
        self.decoder = nn.Linear(D, V, bias=bias, dtype=dtype)


class Head(Vocabulary):
    def __init__(self, pool: Callable, bias: bool, dtype: torch.dtype):
        super().__init__(bias, dtype)
        self.pool = pool

    def forward(self, h: Tensor, mask: Tensor) -> Any:
        return self.pool(self.decoder(h), mask)


def tokens(logits: Tensor) -> Tensor:
    """Return log(1 + relu(x)), the activation of spellings that vary another part."""
    return torch.log1p(torch.relu(logits))


def hidden(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (B, S, D)) -> Tensor:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def weight(rows: int = V, columns: int = D, seed: int = 13) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) / 2).requires_grad_()


def bias(rows: int = V) -> Tensor:
    return torch.linspace(-1.0, 1.0, rows).requires_grad_()


def mask(dtype: torch.dtype = torch.int64, lengths: tuple[int, ...] = (7, 4, 2)) -> Tensor:
    return (torch.arange(S)[None, :] < torch.tensor(lengths)[:, None]).to(dtype)


def ids() -> Tensor:
    """Return token ids: 1 at the first position, 0 (padding) where `mask` is 0."""
    generator = torch.Generator().manual_seed(14)
    words = torch.randint(5, V, (B, S), generator=generator)
    words[:, 0] = 1
    return words * mask()


formula = GROUP.formulas(h=hidden, mask=mask, w=weight, b=bias)
"""Register a function whose parameters are some of h, mask, w, b and the names in `inputs`."""


def encoder(
    *how: Any,
    inputs: Iterable[Callable[[], Any]] = (hidden, mask),
    parts: Mapping[str, Callable[[], Any]] = {},
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `forward(self, *inputs)` of a model with a linear layer to the vocabulary, `self.decoder`.

    `parts` makes further attributes of the model.
    """

    def make(forward: Callable) -> tuple:
        model = type("Model", (Vocabulary,), {"forward": forward})(bias, dtype)
        for name, make in parts.items():
            setattr(model, name, make())
        return model, tuple(make() for make in inputs)

    return function(make, *how, **fields)
