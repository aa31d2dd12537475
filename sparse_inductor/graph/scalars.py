"""A call of a scalar function, as a program of steps: `epilogue.functions` has the table."""

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

Scaled = tuple[Any, float]  # an operand and what it is multiplied by

# A power above 1 of any of them has the gradient 0 at 0.
RECTIFIER_STEPS = (
    Step("relu"),
    Step("threshold", (0.0, 0.0)),
    Step("gate_above", (0.0, 0.0)),
    Step("clamp_min", (0.0,)),
    Step("maximum", (0.0,)),
)


# Calls of which one has a part in whatever is constant below some number: x + |x| and -min(-x, 0) are, too.
RECTIFIERS = COMPARISONS | frozenset(
    (
        *"clamp clamp_min clamp_max maximum minimum abs".split(),
        *(name for name, function in FUNCTIONS.items() if function.may_level_off),
    )
)


def scalar_steps(view: GraphView, node: fx.Node, call: Call) -> tuple[Step, ...] | None:
    """The steps that a call applies to its input, or None. Raises NoMatch where an argument is not a constant."""

    def const(key: str, default: Any = None) -> float:
        return number(view, node, call, key, default)

    def bound(by_number: str, by_tensor: str, key: str) -> Step:
        # From torch 2.14 on, a bound that is a tensor has half of the gradient where the input is equal to it.
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
    """(x, c) where a node is x * c, c * x, x / (1 / c) or -x, c a constant; None for anything else."""
    call = view.call(node)
    if call.name == "neg" and view.is_tensor(call["input"]):
        return call["input"], -1.0
    if call.name not in ("mul", "div") or call.get("rounding_mode") is not None:
        return None
    for x, other in call.both_ways[: 1 if call.name == "div" else 2]:
        c = view.const(other, node)
        if c is not None and view.is_tensor(x) and (c or call.name == "mul"):
            return x, c if call.name == "mul" else 1 / c
    return None


def sums(view: GraphView, node: Any) -> tuple[tuple[Scaled, Scaled], ...]:
    """Both ways to read a node that is p * x + q * y, as ((x, p), (y, q)): a sum or difference with a constant alpha;
    none of others."""
    call = view.call(node)
    alpha = view.const(call.get("alpha", 1), node)
    if call.name not in ("add", "sub", "rsub") or alpha is None:
        return ()
    x, y = call.both_ways[call.name == "rsub"]
    first, second = (x, 1.0), (y, alpha if call.name == "add" else -alpha)
    return (first, second), (second, first)


def number(view: GraphView, node: fx.Node, call: Call, key: str, default: Any = None) -> float:
    """A constant argument of the call. Raises NoMatch for any other."""
    value = view.const(call.get(key, default), node)
    if value is None:
        raise NoMatch(f"{call.name} has a {key} that is not a constant", node)
    return value
