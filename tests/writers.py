"""Calls that write to a tensor, including those whose writes only documentation or a schema tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint


@torch.compiler.allow_in_graph
def _unknown(t: torch.Tensor) -> torch.Tensor:
    return t.mul_(3.0).sum()


@torch.library.custom_op("writers::doubles", mutates_args=("t",))
def _doubles(t: torch.Tensor) -> None:
    t.mul_(2.0)


class _Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.mul_(2.0).sum()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> None:
        return None


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda t: t[0].mul_(2.0),
    "detach": lambda t: t.detach().add_(1.0),
    "data": lambda t: t.data.mul_(2.0),
    "assignment in NumPy": lambda t: t.numpy().__setitem__(0, 9.0),
    "a method of NumPy": lambda t: t.numpy().fill(0.5),
    "a branch": lambda t: torch.cond(
        t.sum() > -1.0, lambda m: m.mul_(3.0).sum(), lambda m: m.sum(), (t,)
    ),
    "a checkpoint": lambda t: torch.utils.checkpoint.checkpoint(
        lambda m: m.mul_(2.0).sum(), t, use_reentrant=False
    ),
    "an autograd Function": _Writes.apply,
    "a custom operator": _doubles,
    "an operator by its name": lambda t: torch.ops.writers.doubles(t),
    "one of its overloads": lambda t: torch.ops.writers.doubles.default(t),
    "a table that is renormalised": lambda t: F.embedding(
        torch.tensor([0]), t.view(1, -1), max_norm=0.1
    ),
    "an unknown function": _unknown,
    "out=": lambda t: torch.add(t, 1.0, out=t),
    "out= of a pair": lambda t: torch.max(t[..., None] * 2, -1, out=(t, t.long())),
    "a list": lambda t: torch._foreach_mul_([t], 2.0),
    "batch norm": lambda t: F.batch_norm(
        torch.ones(4, t.numel()), t.view(-1), torch.ones(t.numel()), training=True
    ),
    "instance norm, by default": lambda t: F.instance_norm(
        torch.randn(4, t.numel(), 2), t.view(-1), torch.ones(t.numel())
    ),
}


def writer(name: str) -> Callable[[torch.Tensor], Any]:
    """Return the call of that name; skip the test if this version of torch does not let it write."""
    try:
        with torch.no_grad():
            WRITERS[name](torch.ones(3))
    except torch._dynamo.exc.UncapturedHigherOrderOpError:
        pytest.skip("this torch lets nobody write in a branch")
    return WRITERS[name]
