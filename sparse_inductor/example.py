"""Programs for the examples of a pattern: a function of some layers and of inputs, always the same ones.

A pattern's file ends in them: what is rewritten, and what is declined and why, as people write it. Tests and
documentation are built from these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .pattern import Example

__all__ = ["Layers", "examples_of"]

Program = Callable[..., Any]


class Layers(nn.Module):
    """A module whose forward is a function of its inputs and, behind them, its layers."""

    def __init__(self, forward: Program, **layers: nn.Module):
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._forward(*inputs, *self.children())


def examples_of(
    make: Callable[[Program, bool], tuple[Program, tuple[Any, ...]]],
) -> Callable[..., tuple[Example, ...]]:
    """What makes an `Example` of each function that it is given, under its keyword: of training or not, and with the
    reason why it is declined, if it is.

    make(function, training): what is compiled, and its arguments; numbers are drawn with the same seed each time.
    """

    def example(name: str, function: Program, training: bool, reason: str) -> Example:
        def build() -> tuple[Program, tuple[Any, ...]]:
            torch.manual_seed(0)
            return make(function, training)

        return Example(name, build, training, reason)

    def examples(
        training: bool = False, reason: str = "", **functions: Program
    ) -> tuple[Example, ...]:
        return tuple(example(n, function, training, reason) for n, function in functions.items())

    return examples
