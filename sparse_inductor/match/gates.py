"""Values kept where one that they were computed from is above a number: where(z > 0, log1p(z), 0).

Such a choice is a threshold further up: f(z) where z > t, else c, is f of (z where z > t, else k) if f(k) = c.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from ..epilogue.ranges import prove
from ..epilogue.steps import Step, run
from .comparisons import compared
from .declines import Decline
from .graph import GraphView
from .spine import Element, Spine
from .vocabulary import COPIES

__all__ = ["conditions", "gated"]

# What is kept where both hold, and (with `negate`) what is replaced where one does.
_BOTH = {False: "and_", True: "or_"}
_COPIES = COPIES | {"cast", "detach"}


def conditions(
    view: GraphView, x: Any, node: fx.Node, negate: bool
) -> tuple[list[Any], tuple[fx.Node, ...]]:
    """The conditions that have all to hold where `node` reads `x` (with `negate`: of which none may), and the nodes
    that combine them."""
    below, copies = view.behind(x, _COPIES)
    call = view.call(below)
    if call is None or call.inplace or call.name != _BOTH[negate]:
        return [x], ()
    sides = call["input"], call["other"]
    parts: list[Any] = []
    nodes = [*copies, below]
    for side in sides:
        whole = view.is_tensor(side) and view.dtype(side) == torch.bool
        if not whole or view.value(side, below) is not side:
            return [x], ()
        if not view.effects.unchanged(side, below, node):
            return [x], ()  # the operator would read it later than it is read here
        found, more = conditions(view, side, node, negate)
        parts += found
        nodes += more
    return parts, tuple(nodes)


def gated(
    view: GraphView,
    node: fx.Node,
    spine: Spine,
    condition: Any,
    negate: bool,
    c: float,
    total: bool = False,
) -> Spine | None:
    """The spine of `node`, which is what `spine` ends in where `condition` says so of a value on it, else `c`.

    None where `condition` compares no value on the spine with a number; raises Decline where it does and is no
    threshold. total: whether what follows that value has to be a number for every number, as in a product with 0.
    """
    elements = spine.elements
    after: tuple[Step, ...] = ()
    for i in range(len(elements), -1, -1):
        below = elements[i - 1].node if i else spine.linears[0].node
        found = compared(view, node, condition, below, negate)
        if found is not None:
            if not found.above:
                raise Decline("keeps the small values and replaces the large ones", node)
            k = next((k for k in (0.0, found.at, c) if _at(after, k) == c), None)
            if k is None:
                raise Decline(
                    f"fills in {c:g}, which the values that it keeps do not start from", node
                )
            if total and prove(after).direction != 1:
                raise Decline("multiplies by 0 what may be no number", node)
            if view.learns(below) and (step := _without_slope(after)) is not None:
                raise Decline(f"{step} has no gradient where its result is not kept", node)
            step = dataclasses.replace(found, factor=total).step(k)
            assert step is not None
            nodes = (*(n for e in elements[i:] for n in (*e.extra, e.node)), *found.nodes)
            # One element: what is compared later is compared with values before this threshold.
            whole = Element(node, (step, *after), extra=nodes)
            return Spine(spine.linears, (*elements[:i], whole))
        terms = elements[i - 1].terms if i else ()
        steps = tuple(t for t in terms if isinstance(t, Step))
        if not i or elements[i - 1].shape_op is not None or len(steps) != len(terms):
            return None
        after = (*steps, *after)
    return None


def _without_slope(steps: tuple[Step, ...]) -> Step | None:
    """The first step that gives NaN for an interval of numbers, with a slope that is NaN, too."""
    return next((s for s in steps if s.fn == "sqrt" or (s.fn == "pow" and s.consts[0] % 1)), None)


def _at(steps: tuple[Step, ...], x: float) -> float:
    if not math.isfinite(x):
        return math.nan
    return run(steps, torch.tensor(x, dtype=torch.float64)).item()
