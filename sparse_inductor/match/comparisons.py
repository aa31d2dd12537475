"""A condition that compares a value with a number: relu, threshold and clamp as people write them with a mask."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from .graph import GraphView, label
from .shapes import Decline

__all__ = ["COMPARISONS", "Edge", "edge"]

COMPARISONS = frozenset({"gt", "ge", "lt", "le"})
_COPIES = frozenset({"detach", "contiguous", "clone", "alias"})


@dataclasses.dataclass(frozen=True)
class Edge:
    """A condition that holds on one side of the number `at`: above it, or below. nodes: what makes the condition."""

    at: float
    above: bool
    nodes: tuple[fx.Node, ...]


def edge(view: GraphView, node: fx.Node, condition: Any, x: Any) -> Edge | None:
    """How `condition` compares the very value that `node` reads of `x` with a constant; None where it does not.

    A tie is decided as `threshold` does, so >= and <= pass only where the other branch equals `at` anyway: callers
    check that, or lose one value of measure zero that has no gradient either way. Raises Decline for a comparison
    with anything but a constant.
    """
    nodes: list[fx.Node] = []
    flip = False
    call = view.call(condition)
    while call is not None and call.name in ("cast", "invert", "logical_not", "contiguous"):
        nodes.append(condition)
        flip ^= call.name in ("invert", "logical_not")
        condition = call["input"]
        call = view.call(condition)
    if call is None or call.name not in COMPARISONS or not isinstance(x, fx.Node):
        return None
    nodes.append(condition)
    sides = call["input"], call["other"]
    mine = view.value(x, node)
    for operand, other, less in (
        (*sides, call.name in ("lt", "le")),
        (*sides[::-1], call.name in ("gt", "ge")),
    ):
        if not view.is_tensor(operand):
            continue
        theirs = view.value(operand, condition)
        if mine is None or theirs is None or not _same(view, mine, theirs):
            continue
        at = view.const(other, node)
        if at is None:
            what = label(other) if isinstance(other, fx.Node) else "it"
            raise Decline(f"the threshold ({what}) is a tensor, not a number", node)
        return Edge(at, not (less ^ flip), tuple(nodes))
    return None


def _same(view: GraphView, a: fx.Node, b: fx.Node) -> bool:
    """The same value up to detach and copies."""
    return view.same_value(a, b) or view.same_value(_original(view, a), _original(view, b))


def _original(view: GraphView, node: fx.Node) -> fx.Node:
    """What a copy is a copy of."""
    while (call := view.call(node)) is not None and call.name in _COPIES:
        seen = view.value(call["input"], node)
        if seen is None:
            break
        node = seen
    return node
