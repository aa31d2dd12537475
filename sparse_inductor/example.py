"""Programs for the examples of a pattern: a function of some layers and of inputs, always the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .pattern import Example

__all__ = ["Layers", "example_of"]

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


def example_of(
    make: Callable[[Program, bool], tuple[Program, tuple[Any, ...]]],
) -> Callable[..., Example]:
    """What makes an `Example` of a name, a function, whether it is one of training, and a reason.

    make(function, training): what is compiled, and its arguments; numbers are drawn with the same seed each time.
    """

    def example(name: str, function: Program, training: bool = False, reason: str = "") -> Example:
        def build() -> tuple[Program, tuple[Any, ...]]:
            torch.manual_seed(0)
            return make(function, training)

        return Example(name, build, training, reason)

    return example
