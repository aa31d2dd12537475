"""Attention probabilities, from where they weigh the values up to the entmax that makes them.

Between the two a program may change the layout, do what changes no value, and drop once more what the scores' mask
dropped already: `p.masked_fill(mask, 0)`, which alters rows without a key only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .axes import VIEWS, Axis, Placed, above, flat, placed
from .contraction import Operand
from .entmax import Transform, transform
from .graph import GraphView
from .masks import conjuncts, zero_or_one
from .names import Call
from .shapes import Decline

__all__ = ["IDENTITY", "Probabilities", "check_again", "read_probabilities"]

IDENTITY = frozenset("contiguous clone alias lift_fresh positive cast".split())
_REACH = 12
_NEVER = -1e9  # no score is as low: a key that got this has no probability beside any that did not


@dataclasses.dataclass
class Probabilities:
    """The entmax that an operand is, and what lies between.

    axes: those of the entmax's result. nodes: what lies between, the operand's node first. again: masks that drop
    probabilities, which the scores' own have to be.
    """

    found: Transform
    axes: list[Axis]
    nodes: list[fx.Node]
    again: list[Placed]


def read_probabilities(view: GraphView, p: Operand, axes: list[Axis]) -> Probabilities | None:
    """The entmax that an operand is, through what does not change its values; None if it is none. Raises Decline."""
    node: fx.Node | None = p.node
    nodes: list[fx.Node] = []
    again: list[Placed] = []
    for _ in range(_REACH):
        if node is None or not view.is_tensor(node):
            return None
        found = transform(view, node)
        if found is not None:
            return Probabilities(found, axes, nodes, again)
        call = view.call(node)
        if call is None:
            return None
        x = _un_changed(view, call)
        if x is None and (dropped := _dropped(view, node, call)) is not None:
            x, mask, negate = dropped
            if negate and _is_nan_of(view, mask, x):
                nodes.append(mask)
            elif (seen := view.value(mask, node)) is not None:
                where = tuple(placed(view, seen, axes, node))
                again.append(Placed(seen, node, where, negate=negate))
            else:
                x = None
        if not view.is_tensor(x):
            if _entmax_above(view, node) is not None:
                raise Decline(_changed(call.name), node)
            return None
        if call.name in VIEWS:
            try:
                axes = above(view, node, call, axes)
            except Decline:
                if _entmax_above(view, node) is None:
                    return None
                raise
        nodes.append(node)
        node = view.value(x, node)
    return None


def check_again(
    view: GraphView, p: Probabilities, masks: Sequence[Placed], fill: float | None, extra: bool
) -> None:
    """Raise Decline unless the masks of `again` drop just the keys that the scores' masks drop.

    Then they change rows without a key only, to zeros, which is what the operator gives for a fill of -inf. extra:
    the scores are masked in yet another way.
    """
    one = [part for mask in masks for part in conjuncts(view, mask)]
    two = [part for mask in p.again for part in conjuncts(view, mask)]
    alike = all(any(_same(view, a, b) for b in two) for a in one) and all(
        any(_same(view, a, b) for a in one) for b in two
    )
    lowest = torch.finfo(view.dtype(p.found.source)).min
    if extra or not alike or fill is None or not (fill <= _NEVER or fill == lowest):
        reader = p.again[0].reader
        raise Decline(_changed(view.name_of(reader) or "an operation"), reader)


def _same(view: GraphView, a: Placed, b: Placed) -> bool:
    def where(mask: Placed) -> list[Axis]:
        axes = [flat(axis) for axis in mask.axes]
        while axes and not axes[0]:
            axes.pop(0)
        return axes

    alike = view.same_value(a.node, b.node) or view.same_value(b.node, a.node)
    return alike and a.negate == b.negate and where(a) == where(b)


def _un_changed(view: GraphView, call: Call) -> Any:
    """The input of an operation that keeps every value; None where it is none."""
    quiet = (
        call.name in IDENTITY
        or call.name in VIEWS
        or (call.name == "dropout" and not (call.get("training", True) and call.get("p", 0.5)))
        or (call.name == "detach" and not torch.is_grad_enabled())
        or (call.name == "nan_to_num" and view.const(call.get("nan", 0.0)) == 0)
    )
    return call.get("input") if quiet else None


def _is_nan_of(view: GraphView, mask: fx.Node, x: Any) -> bool:
    """Whether a mask is isnan(x): the operator gives no NaN where rows have no keys."""
    call = view.call(mask)
    return call is not None and call.name == "isnan" and view.same_value(call["input"], x)


def _dropped(view: GraphView, node: fx.Node, call: Call) -> tuple[Any, fx.Node, bool] | None:
    """(probabilities, mask, whether it says what to drop) where an operation puts 0 in the place of some."""
    x, mask, negate = None, None, False
    if call.name == "masked_fill" and view.const(call["value"], node) == 0:
        x, mask, negate = call["input"], call["mask"], True
    elif call.name == "where" and view.const(call["other"], node) == 0:
        x, mask = call["input"], call["condition"]
    elif call.name == "where" and view.const(call["input"], node) == 0:
        x, mask, negate = call["other"], call["condition"], True
    elif call.name == "mul":
        for a, b in ((call["input"], call["other"]), (call["other"], call["input"])):
            if not (view.is_tensor(a) and isinstance(b, fx.Node) and view.is_tensor(b)):
                continue
            binary = (b, True) if view.dtype(b) == torch.bool else zero_or_one(view, b)
            if binary is not None:
                x, mask, negate = a, binary[0], not binary[1]
                break
    if mask is None or not view.is_tensor(mask) or view.dtype(mask) != torch.bool:
        return None
    return x, mask, negate


def _changed(name: str) -> str:
    if name == "dropout":
        return "dropout is active between the probabilities and the values"
    return f"{name} changes the probabilities before they weigh the values"


def _entmax_above(view: GraphView, node: fx.Node, reach: int = 6) -> fx.Node | None:
    """An entmax that a few operations turn into `node`; no product is crossed, but for one with heads."""
    queue = [node]
    seen: set[fx.Node] = set()
    while queue and len(seen) < reach:
        node = queue.pop(0)
        if node in seen or not view.is_tensor(node):
            continue
        seen.add(node)
        try:
            if transform(view, node) is not None:
                return node
        except Decline:
            return None
        call = view.call(node)
        if call is not None and call.name not in ("linear", "matmul", "bmm", "addmm", "baddbmm"):
            queue += node.all_input_nodes
    return None
