"""Functions of one number with constants beside it, as the steps they are."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from .. import compat
from ..epilogue.steps import PLAIN, Step
from .names import Call
from .no_match import NoMatch
from .view import GraphView

__all__ = ["RECTIFIERS", "number", "scalar_steps"]

# A power above 1 of any of them has the gradient 0 at 0.
RECTIFIERS = (
    Step("relu"),
    Step("threshold", (0.0, 0.0)),
    Step("gate_above", (0.0, 0.0)),
    Step("clamp_min", (0.0,)),
    Step("maximum", (0.0,)),
)

# Functions without arguments that are one step, or a fixed sequence of steps.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
_FIXED: dict[str, tuple[Step, ...]] = {
    **{name: (Step(name),) for name in PLAIN},
    "neg": (Step("mul", (-1.0,)),),
    "reciprocal": (Step("pow", (-1.0,)),),
    "rsqrt": (Step("pow", (-0.5,)),),
    "exp2": (Step("mul", (math.log(2.0),)), Step("exp")),
    "relu6": (Step("relu"), Step("cap", (6.0,))),
    "selu": (Step("elu", (_SELU_ALPHA, _SELU_SCALE)),),
    "hardsigmoid": (
        Step("add", (3.0,)),
        Step("relu"),
        Step("cap", (6.0,)),
        Step("mul", (1 / 6,)),
    ),
}


def scalar_steps(view: GraphView, node: fx.Node, call: Call) -> tuple[Step, ...] | None:
    """The steps that a call applies to its input, or None. Raises NoMatch where an argument is not a constant."""

    def const(key: str, default: Any = None) -> float:
        return number(view, node, call, key, default)

    def bound(by_number: str, by_tensor: str, key: str) -> Step:
        # From torch 2.14 on, a bound that is a tensor has half of the gradient where the input is equal to it.
        halved = view.is_tensor(call[key]) and not compat.clamp_has_a_slope_at_its_bounds()
        return Step(by_tensor if halved else by_number, (const(key),))

    match call.name:
        case "leaky_relu":
            slope = const("negative_slope", 0.01)
            return (Step("leaky_relu", (slope,)) if slope else Step("relu"),)
        case "elu":
            if const("input_scale", 1.0) != 1:
                raise NoMatch("elu with an input scale", node)
            alpha, scale = const("alpha", 1.0), const("scale", 1.0)
            return (Step("relu") if (alpha, scale) == (0, 1) else Step("elu", (alpha, scale)),)
        case "celu":
            a = const("alpha", 1.0)
            if a <= 0:
                raise NoMatch(f"celu with alpha {a}", node)
            return Step("mul", (1 / a,)), Step("elu", (1.0, a))
        case "softplus":
            return (Step("softplus", (const("beta", 1), const("threshold", 20))),)
        case "threshold":
            return (Step("threshold", (const("threshold"), const("value"))),)
        case "clamp":
            low = () if call.get("min") is None else (bound("clamp_min", "maximum", "min"),)
            high = () if call.get("max") is None else (bound("clamp_max", "minimum", "max"),)
            return *low, *high
        case "clamp_min":
            return (bound("clamp_min", "maximum", "min"),)
        case "clamp_max":
            return (bound("clamp_max", "minimum", "max"),)
        case "hardtanh":
            least = const("min_val", -1.0)
            floor = Step("threshold", (least, least)) if least else Step("relu")
            return floor, Step("cap", (const("max_val", 1.0),))
    return _FIXED.get(call.name)


def number(view: GraphView, node: fx.Node, call: Call, key: str, default: Any = None) -> float:
    """A constant argument of the call. Raises NoMatch for any other."""
    value = view.const(call.get(key, default), node)
    if value is None:
        raise NoMatch(f"{call.name} has a {key} that is not a constant", node)
    return value
