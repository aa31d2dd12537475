"""Programs for the examples of a pattern: functions that all get the same inputs and layers.

A pattern's file ends with its examples, written as users write such programs: those that are rewritten, and those that
are declined, with the reason. Tests and documentation are built from them.
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
    """A module that calls a function with its inputs followed by its layers."""

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
    """Return a function that makes an `Example` of each of its keyword arguments, named after the keyword. Its other
    arguments: whether the examples are for training, and the reason why they are declined, if they are.

    make(function, training): returns the function to compile and its arguments. It runs with the same random seed each
    time.
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
