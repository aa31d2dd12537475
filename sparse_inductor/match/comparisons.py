"""A condition that compares a value with a number: relu, threshold and clamp as people write them with a mask."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from ..epilogue.steps import Step
from .declines import Decline
from .graph import GraphView, label
from .vocabulary import COMPARISONS, COPIES, NEGATIONS

__all__ = ["COMPARISONS", "NEGATIONS", "Edge", "compared", "edge", "is_comparison", "unwrapped"]

_COPIES = COPIES | {"detach"}  # a comparison passes no gradient on


@dataclasses.dataclass(frozen=True)
class Edge:
    """A condition that holds on one side of the number `at`, above it or below, and there too where `ties`; for a NaN
    where `nan`. factor: its values, 0 and 1, are multiplied by.

    nodes: what makes the condition.
    """

    at: float
    above: bool
    ties: bool
    nan: bool
    nodes: tuple[fx.Node, ...]
    factor: bool = False

    def step(self, other: float) -> Step | None:
        """x where the condition holds, else a number; None where that is no step."""
        if self.above:
            if self.factor:  # a NaN times 0 or 1 is one, whatever the comparison says of it
                steps = "gate_above", "gate_at_least"
            else:
                steps = ("threshold", "fill_below") if self.nan else ("above", "at_least")
            return Step(steps[self.ties], (self.at, other))
        if not self.nan or self.at != other:
            return None
        return Step("fill_above", (other, other)) if self.ties else Step("cap", (other,))


def edge(
    view: GraphView, node: fx.Node, condition: Any, x: Any, negate: bool = False
) -> Edge | None:
    """How `condition` (with `negate` its contrary) compares the very value that `node` reads of `x` with a constant.

    None where it does not. Raises Decline for a comparison with anything but a constant.
    """
    mine = view.value(x, node) if isinstance(x, fx.Node) else None
    return None if mine is None else compared(view, node, condition, mine, negate)


def compared(
    view: GraphView, node: fx.Node, condition: Any, mine: fx.Node, negate: bool = False
) -> Edge | None:
    """The same, of a value rather than of what is read now."""
    condition, wrapped, negated = unwrapped(view, condition)
    call = view.call(condition)
    if call is None or call.name not in COMPARISONS:
        return None
    negate ^= negated
    nodes = (*wrapped, condition)
    sides = call["input"], call["other"]
    for operand, other, less in (
        (*sides, call.name in ("lt", "le")),
        (*sides[::-1], call.name in ("gt", "ge")),
    ):
        if not view.is_tensor(operand):
            continue
        theirs = view.value(operand, condition)
        if theirs is None:
            continue
        original, copies = _original(view, theirs)
        same = view.same_value(mine, theirs) or view.same_value(_original(view, mine)[0], original)
        if not same:
            continue
        at = view.const(other, node)
        if at is None:
            what = label(other) if isinstance(other, fx.Node) else "it"
            raise Decline(f"the threshold ({what}) is a tensor, not a number", node)
        ties = (call.name in ("ge", "le")) ^ negate
        return Edge(at, not (less ^ negate), ties, negate, (*nodes, *copies))
    return None


def is_comparison(view: GraphView, condition: Any) -> bool:
    """Whether a condition, or its contrary, compares something."""
    call = view.call(unwrapped(view, condition)[0])
    return call is not None and call.name in COMPARISONS


def unwrapped(view: GraphView, condition: Any) -> tuple[Any, list[fx.Node], bool]:
    """A condition without its negations, copies and casts; these, the last one first; whether they negate it."""
    condition, wrapped = view.behind(condition, NEGATIONS | _COPIES | {"cast"})
    return condition, wrapped, sum(view.name_of(n) in NEGATIONS for n in wrapped) % 2 == 1


def _original(view: GraphView, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a copy, detached or not, is a copy of; it and the copies between."""
    copies: list[fx.Node] = []
    while (call := view.call(node)) is not None and call.name in _COPIES:
        seen = view.value(call["input"], node)
        if seen is None:
            break
        copies.append(node)
        node = seen
    return node, copies
