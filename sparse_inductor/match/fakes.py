"""Fake values of nodes and their sizes; nothing here adds a guard."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["fake", "is_contiguous", "same_size", "static_size"]


def fake(node: Any) -> Any:
    """The fake value of a node (tensor, tuple, SymInt ...), or None."""
    if not isinstance(node, fx.Node):
        return None
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal on every run."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a is b or bool(statically_known_true(a == b))


def is_contiguous(value: Any) -> bool:
    """Whether a tensor's elements lie in the order of its axes on every run."""
    step: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not (same_size(size, 1) or same_size(stride, step)):
            return False
        step = step * size
    return True


def static_size(size: Any) -> int | None:
    """The number a size is on every run, or None."""
    return size if isinstance(size, int) else size.node.maybe_as_int()
