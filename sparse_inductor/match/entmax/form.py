"""The shape of a written-out entmax: a clamp of scores less a threshold a row, raised to a power, perhaps normalised.

node = [factor * (source - shifts) - tau]_+ ** power  (/ its sum)

Of tau no more is known here than that it is one number a row: it may be added, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import fx

from ...graph.no_match import NoMatch, remembered
from ...graph.scalars import RECTIFIER_STEPS, constant_factor, scalar_steps
from ...graph.values import drowns
from ...graph.view import GraphView, same_size
from ...graph.vocabulary import COMPARISONS, COPIES, SPREADS

ENDS = frozenset(
    "clamp clamp_min relu threshold maximum where pow square mul div normalize".split()
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What the scores may be: `reader` sees `source`, which is multiplied by `factor`, and `gaps` times by
    alpha - 1 where alpha is a tensor."""

    source: fx.Node
    reader: fx.Node
    factor: float
    gaps: int


@dataclasses.dataclass(frozen=True)
class Form:
    """power: 1 / (alpha - 1); or alpha, a tensor that the power is computed from like this."""

    clamp: fx.Node
    candidates: tuple[Candidate, ...]
    dim: int
    power: float | None
    alpha: fx.Node | None


def ends_here(view: GraphView, node: fx.Node) -> bool:
    """Whether a clamp, power or quotient is the last step of something with a threshold, not one in its middle."""
    found = form(view, node)
    if found is None:
        return False
    for user in node.users:
        call = view.call(user)
        if call is None:
            continue
        if call.name in ("pow", "square", "div", "normalize") and form(view, user) is not None:
            return False
        if call.name == "mul" and call["input"] is call["other"]:
            return False
        if call.name == "sum" and set(node.users) <= {user, found.clamp, node}:
            return False
    return any(view.readers(node))


@remembered
def form(view: GraphView, node: fx.Node) -> Form | None:
    """The form of `node`, if it has one."""
    call = view.call(node)
    if call is not None and call.name in ("div", "normalize"):
        inner = _normalised(view, node, call)
        if inner is None:
            return None
        node, call = inner, view.call(inner)
    power: float | None = 1.0
    alpha: fx.Node | None = None
    clamped = _clamped(view, node)
    if clamped is None and call is not None and call.name in ("pow", "square", "mul"):
        if call.name == "pow":
            exponent = call["other"]
            power = view.const(exponent, node)
            alpha = None if power is not None else _alpha_of_power(view, exponent)
            if power is None and alpha is None:
                return None
        elif call.name == "mul" and call["input"] is not call["other"]:
            return None
        else:
            power = 2.0
        seen = view.value(call["input"], node) if isinstance(call["input"], fx.Node) else None
        if seen is None:
            return None
        node = seen
        clamped = _clamped(view, node)
    if clamped is None:
        return None
    difference, reader, factor = clamped, node, 1.0
    while True:
        seen = view.value(difference, reader)
        if seen is None or not view.is_tensor(seen):
            return None
        difference, call = seen, view.call(seen)
        step = constant_factor(view, difference)
        if step is None:
            break
        reader, difference, factor = difference, step[0], factor * step[1]
    if call is None or call.name not in ("sub", "add") or call.get("alpha", 1) not in (1, -1):
        return None
    a, tau = call["input"], call["other"]
    if not (view.is_tensor(a) and view.is_tensor(tau)):
        return None
    dim = row_axis(view, a, tau)
    if dim is None and call.name == "add" and call.get("alpha", 1) == 1:
        a, tau = tau, a
        dim = row_axis(view, a, tau)
    if dim is None:
        return None
    candidates = tuple(_scores(view, a, difference, factor, dim, alpha))
    return Form(node, candidates, dim, power, alpha)


def _alpha_of_power(view: GraphView, exponent: Any) -> fx.Node | None:
    """alpha of 1 / (alpha - 1)"""
    call = view.call(exponent)
    if call is None:
        return None
    gap: Any = None
    if call.name == "div" and view.const(call["input"], exponent) == 1:
        gap = call["other"]
    elif call.name == "reciprocal" or (
        call.name == "pow" and view.const(call["other"], exponent) == -1
    ):
        gap = call["input"]
    return _alpha_of_gap(view, gap)


def _alpha_of_gap(view: GraphView, gap: Any) -> fx.Node | None:
    """alpha of alpha - 1"""
    call = view.call(gap)
    if call is None or call.name not in ("sub", "add") or not view.is_tensor(call["input"]):
        return None
    one = view.const(call["other"], gap)
    if one != (1 if call.name == "sub" else -1) or call.get("alpha", 1) != 1:
        return None
    return view.value(call["input"], gap)


def _normalised(view: GraphView, node: fx.Node, call: Any) -> fx.Node | None:
    """P of P / P.sum(dim, keepdim=True), whatever guards the quotient."""
    if call.name == "normalize":
        return view.value(call["input"], node) if call.get("p", 2.0) == 1 else None
    p, total = call["input"], call["other"]
    if not (view.is_tensor(p) and view.is_tensor(total)) or call.get("rounding_mode") is not None:
        return None
    for _ in range(5):
        inner = view.call(total)
        if inner is None:
            return None
        if inner.name == "sum":
            same = inner["input"] is p or view.same_value(p, inner["input"])
            return view.value(p, node) if same else None
        if inner.name not in (
            "unsqueeze", "clamp", "clamp_min", "add", "maximum", "getitem", "expand", "expand_as",
        ):  # fmt: skip
            return None
        total = inner["input"]
    return None


def _clamped(view: GraphView, node: fx.Node) -> fx.Node | None:
    """x of max(x, 0)."""
    call = view.call(node)
    if call is None:
        return None

    def zero(x: Any) -> bool:
        return view.const(x, node) == 0

    with contextlib.suppress(NoMatch):
        if (steps := scalar_steps(view, node, call)) is not None:
            return call["input"] if len(steps) == 1 and steps[0] in RECTIFIER_STEPS else None
    match call.name:
        case "maximum":
            for x, other in call.both_ways:
                if zero(other) and isinstance(x, fx.Node):
                    return x
        case "where" if zero(call["other"]) and _says_positive(
            view, call["condition"], call["input"]
        ):
            return call["input"]
        case "mul":
            for x, gate in call.both_ways:
                if isinstance(x, fx.Node) and _says_positive(view, gate, x):
                    return x
    return None


def _says_positive(view: GraphView, gate: Any, x: Any) -> bool:
    """Whether a mask is x > 0 (or >=), or a > b where x is a - b."""
    gate, _ = view.behind(gate, {"cast"})
    call = view.call(gate)
    if call is None or call.name not in COMPARISONS or not view.is_tensor(x):
        return False
    large, small, _ = call.ordered()
    if view.const(small, gate) == 0:
        return view.same_value(large, x)
    difference = view.call(x)
    return (
        difference is not None
        and difference.name == "sub"
        and difference.get("alpha", 1) == 1
        and view.same_value(difference["input"], large)
        and view.same_value(*(view.behind(t, SPREADS)[0] for t in (difference["other"], small)))
    )


def row_axis(view: GraphView, a: fx.Node, tau: fx.Node) -> int | None:
    """The one axis along which `tau` has a single value and the scores have not."""
    x, t = view.shape(a), view.shape(view.behind(tau, SPREADS)[0])
    t = (1,) * (len(x) - len(t)) + t
    if len(t) != len(x):
        return None
    single = [i for i in range(len(x)) if same_size(t[i], 1) and not same_size(x[i], 1)]
    rest = all(same_size(x[i], t[i]) for i in range(len(x)) if i not in single)
    return single[0] if len(single) == 1 and rest else None


def _scores(
    view: GraphView,
    a: fx.Node,
    reader: fx.Node,
    factor: float,
    dim: int,
    alpha: fx.Node | None,
) -> Iterator[Candidate]:
    """What the scores may be, nearest first: each less a value a row and times factors is `a`."""
    seen = view.value(a, reader)
    gaps = 0
    while seen is not None and view.is_tensor(seen):
        a = seen
        yield Candidate(a, reader, factor, gaps)
        call = view.call(a)
        if call is None:
            return
        if call.name in ("mul", "div"):
            step = constant_factor(view, a)
            if step is not None:
                reader, seen, factor = a, view.value(step[0], a), factor * step[1]
                continue
            x = _times_gap(view, call, alpha)
            if x is None:
                return
            reader, seen, gaps = a, view.value(x, a), gaps + 1
        elif (shifted := _shift(view, a, dim)) is not None:
            reader, seen = a, view.value(shifted, a)
        elif call.name in COPIES:
            reader, seen = a, view.value(call["input"], a)
        else:
            return


def _times_gap(view: GraphView, call: Any, alpha: fx.Node | None) -> fx.Node | None:
    """x of x * (alpha - 1)"""
    if alpha is None or call.name != "mul":
        return None
    for x, gap in call.both_ways:
        found = _alpha_of_gap(view, gap)
        if found is not None and view.same_value(found, alpha) and isinstance(x, fx.Node):
            return x
    return None


def _shift(view: GraphView, node: fx.Node, dim: int) -> fx.Node | None:
    """x of x - s, x + s where s is a number or has one value a row."""
    call = view.call(node)
    if call is None or call.name not in ("sub", "add") or not view.is_tensor(call["input"]):
        return None
    shift = call["other"]
    number = view.const(shift, node)
    if number is not None:
        return None if drowns(number, view.dtype(node)) else call["input"]
    uniform = view.is_tensor(shift) and row_axis(view, call["input"], shift) == dim
    return call["input"] if uniform else None


def unshifted(view: GraphView, source: fx.Node, reader: fx.Node, dim: int) -> list[Candidate]:
    """`source`, and what it was before a value a row was subtracted: entmax does not see the difference."""
    found = [Candidate(source, reader, 1.0, 0)]
    while (seen := view.value(found[-1].source, found[-1].reader)) is not None:
        x = _shift(view, seen, dim)
        if x is None:
            break
        found.append(Candidate(x, seen, 1.0, 0))
    return found
