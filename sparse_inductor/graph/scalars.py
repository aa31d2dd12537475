"""A call of a scalar function as a program of steps. The table of functions is in `epilogue.functions`."""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx

from .. import compat
from ..epilogue.functions import FUNCTIONS
from ..epilogue.steps import Step, parse
from .names import Call
from .no_match import NoMatch
from .view import GraphView
from .vocabulary import COMPARISONS

Scaled = tuple[Any, float]  # an operand and its constant factor

# Rectifiers. A power above 1 of the result of any of them has the gradient 0 at 0.
RECTIFIER_STEPS = (
    Step("relu"),
    Step("threshold", (0.0, 0.0)),
    Step("gate_above", (0.0, 0.0)),
    Step("clamp_min", (0.0,)),
    Step("maximum", (0.0,)),
)


# A function that is constant below some number contains at least one of these calls. Examples are x + |x| and
# -min(-x, 0).
RECTIFIERS = COMPARISONS | frozenset(
    (
        *"clamp clamp_min clamp_max maximum minimum abs".split(),
        *(name for name, function in FUNCTIONS.items() if function.may_level_off),
    )
)


def scalar_steps(view: GraphView, node: fx.Node, call: Call) -> tuple[Step, ...] | None:
    """Return the steps that a call applies to its input, or None. Raises NoMatch where an argument is not constant."""

    def const(key: str, default: Any = None) -> float:
        return number(view, node, call, key, default)

    def bound(by_number: str, by_tensor: str, key: str) -> Step:
        # From torch 2.14 on, a bound that is a tensor receives half of the gradient where the input equals it.
        halved = view.is_tensor(call[key]) and not compat.clamp_has_a_slope_at_its_bounds()
        return Step(by_tensor if halved else by_number, (const(key),))

    if call.name in ("clamp", "clamp_min", "clamp_max"):
        bounds = (("clamp_min", "maximum", "min"), ("clamp_max", "minimum", "max"))
        return tuple(bound(*one) for one in bounds if call.get(one[-1]) is not None)
    function = FUNCTIONS.get(call.name)
    if function is None:
        return None
    try:
        return parse(function.steps(*itertools.starmap(const, function.defaults.items())))
    except ValueError as e:
        raise NoMatch(str(e), node) from None


def constant_factor(view: GraphView, node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (x, c) if a node is x * c, c * x, x / (1 / c) or -x, with a constant c; None for anything else."""
    call = view.call(node)
    if call.name == "neg" and view.is_tensor(call["input"]):
        return call["input"], -1.0
    if call.name not in ("mul", "div"):
        return None
    for x, other in call.both_ways[: 1 if call.name == "div" else 2]:
        c = view.const(other, node)
        if c is not None and view.is_tensor(x) and (c or call.name == "mul"):
            return x, c if call.name == "mul" else 1 / c
    return None


def sums(view: GraphView, node: Any) -> tuple[tuple[Scaled, Scaled], ...]:
    """Return both readings ((x, p), (y, q)) of a node that is p * x + q * y, a sum or difference with a constant alpha;
    an empty tuple for other nodes."""
    call = view.call(node)
    alpha = view.const(call.get("alpha", 1), node)
    if call.name not in ("add", "sub", "rsub") or alpha is None:
        return ()
    x, y = call.both_ways[call.name == "rsub"]
    first, second = (x, 1.0), (y, alpha if call.name == "add" else -alpha)
    return (first, second), (second, first)


def number(view: GraphView, node: fx.Node, call: Call, key: str, default: Any = None) -> float:
    """Return a constant argument of the call. Raises NoMatch if the argument is not constant."""
    value = view.const(call.get(key, default), node)
    if value is None:
        raise NoMatch(f"{call.name} has a {key} that is not a constant", node)
    return value
