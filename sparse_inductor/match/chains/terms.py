"""Emits parts of a chain as graph nodes: steps, operands, and transformed weights and biases."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ...epilogue.steps import Step
from ...graph.emit import Emitter
from ...graph.fakes import fake
from .epilogue_chain import Term

Pair = tuple[fx.Node, fx.Node | None]  # a weight [V, D] and its bias [V]


def raised(e: Emitter, t: fx.Node, ndim: int) -> fx.Node:
    """A tensor with leading axes of size 1 added, as in broadcasting."""
    while len(fake(t).shape) < ndim:
        t = e.method("unsqueeze", t, 0)
    return t


def widened(e: Emitter, t: fx.Node) -> fx.Node:
    """A tensor in the precision of the computation: fp32 for 16-bit, integer and boolean tensors."""
    return e.cast(t, torch.promote_types(fake(t).dtype, torch.float32))


def _of_both(pair: Pair, change: Callable[[fx.Node], fx.Node]) -> Pair:
    weight, bias = pair
    return change(weight), None if bias is None else change(bias)


def scaled(e: Emitter, pair: Pair, factor: float) -> Pair:
    """Weight and bias times a constant."""
    return _of_both(pair, lambda t: e.call(operator.mul, t, factor))


def selected(e: Emitter, pair: Pair, columns: slice | list[int] | fx.Node) -> Pair:
    """Weight and bias restricted to the selected entries of V."""
    if isinstance(columns, fx.Node):
        return _of_both(pair, lambda t: e.method("index_select", t, 0, columns))
    return _of_both(pair, lambda t: e.call(operator.getitem, t, columns))


def prepared(e: Emitter, t: fx.Node, prepare: str | float | None) -> fx.Node:
    """An operand after its term's `prepare`; see `epilogue_chain.Term`."""
    if prepare is None or prepare == 1:
        return t
    if prepare == "not":
        return e.call(torch.logical_not, t)
    return (
        e.call(torch.reciprocal, t) if prepare == "reciprocal" else e.call(operator.mul, t, prepare)
    )


def combined(e: Emitter, t: fx.Node, term: Term, operand: fx.Node) -> fx.Node:
    """A tensor after a term is applied to it; the operand is already prepared."""
    if term.fn == "where":
        return e.call(torch.where, e.method("bool", operand), t, term.const[0])
    return e.call(getattr(operator, term.fn), t, operand)


# step -> its comparison with the first constant, and whether the last constant is filled in where the comparison holds
# (True) or where it does not (False)
_CHOICES: dict[str, tuple[Callable[..., Any], bool]] = {
    "cap": (operator.ge, True),
    "gate_above": (operator.le, True),
    "fill_below": (operator.lt, True),
    "gate_at_least": (operator.lt, True),
    "fill_above": (operator.gt, True),
    "above": (operator.gt, False),
    "at_least": (operator.ge, False),
}


def applied(e: Emitter, t: fx.Node, step: Step) -> fx.Node:
    """A step, which must carry all of its numbers as constants, applied to a tensor."""
    if step.fn in _CHOICES:
        compare, fills = _CHOICES[step.fn]
        condition, filled = e.call(compare, t, step.consts[0]), step.consts[-1]
        return e.call(torch.where, condition, *((filled, t) if fills else (t, filled)))
    if step.fn in ("maximum", "minimum"):
        return e.call(getattr(torch, step.fn), t, e.call(torch.full_like, t, *step.consts))
    if step.fn == "elu":
        alpha, scale = step.consts
        return e.call(operator.mul, e.call(F.elu, t, alpha), scale)
    where = operator if step.fn in ("add", "mul") else torch if hasattr(torch, step.fn) else F
    return e.call(getattr(where, step.fn), t, *step.consts)
