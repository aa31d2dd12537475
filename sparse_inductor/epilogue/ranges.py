"""Intervals and monotonicity of scalar steps, which decide whether a step may be moved past a maximum.

max_s f(x_s) = f(max_s x_s) holds exactly when f is non-decreasing on the values that reach it (rounding to
nearest is itself non-decreasing, so it holds in floating point too). Every step's function here is monotone on a
stated piece of its domain, so its range is the image of the interval's end points.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import compat
from .functions import POSITIVE, REALS, SCALAR, Interval, guarded
from .steps import ROW, Program, Step, scalar_steps

_INF = math.inf
_TINY = 2.0**-24  # a function that is undefined at 0 counts as undefined up to here


# The condition under which a step keeps x, instead of its second constant.
_JUMPS: dict[str, Callable[[float, float], bool]] = {
    **dict.fromkeys(("threshold", "above", "gate_above"), operator.gt),
    **dict.fromkeys(("fill_below", "at_least", "gate_at_least"), operator.ge),
}


def _piece(step: Step, x: Interval) -> tuple[int, Interval, Callable[[float], float]] | None:
    """Return (direction, domain, function) of a scalar step on `x`, or None where it is not monotone there."""
    fn, c = step.fn, step.consts
    if any(math.isnan(v) for v in c):
        return None
    if fn == "mul":
        k = c[0]
        if math.isinf(k) or (k == 0 and x.lo == -_INF):
            return None  # -inf, e.g. from a logarithm, times 0 is NaN
        return (1 if k >= 0 else -1), REALS, lambda v: 0.0 if k == 0 else v * k
    if fn == "add" and math.isinf(c[0]):
        return None
    if fn == "square" and x.hi <= 0:
        return -1, Interval(-_INF, 0.0), guarded(lambda v: v * v)
    if fn == "pow":
        p = c[0]
        if p == 0:
            return 1, REALS, lambda v: 1.0
        if p > 0 and p == int(p) and int(p) % 2 == 1:
            return 1, REALS, lambda v: math.copysign(guarded(lambda u: u**p)(abs(v)), v)
        if p > 0:
            return 1, POSITIVE, guarded(lambda v: v**p)
        # 1 / -0.0 is -inf, so the domain excludes 0.
        return -1, Interval(math.ulp(0.0), _INF), guarded(lambda v: v**p)
    if fn in _JUMPS:  # jumps from v to t at t, so v may not exceed t
        t, v = c
        return (1, REALS, lambda s: s if _JUMPS[fn](s, t) else v) if v <= t else None
    if fn == "fill_above":
        t, v = c
        return (1, REALS, lambda s: v if s > t else s) if v >= t else None
    if fn == "leaky_relu":
        if c[0] < 0 or (c[0] == 0 and x.lo == -_INF):
            return None
        return 1, REALS, lambda v: v if v > 0 else v * c[0]
    if fn == "elu":
        a, s = c
        rises = a >= 0 and s >= 0
        return (1, REALS, lambda v: s * (v if v > 0 else a * math.expm1(v))) if rises else None
    if fn == "softplus" and (c[0] <= 0 or c[1] < 15):
        return None  # it drops by log1p(exp(-threshold)) / beta where it turns linear, under half an ulp from 15 on
    rising = SCALAR[fn].rises
    if rising is None:
        return None
    domain, f = rising
    return 1, domain, lambda v: f(v, *c)


class Proof(NamedTuple):
    """The proved properties of a scalar program on an interval.

    direction: 1 non-decreasing, -1 non-increasing, 0 not proved. `failed` is the first step that is not monotone
    on, or not defined on, the interval that reaches it (`reaching`).
    """

    direction: int
    range: Interval
    failed: Step | None = None
    reaching: Interval = REALS

    def why(self) -> str:
        if self.failed is not None:
            return f"{self.failed} is not monotone on {self.reaching}"
        return "it decreases" if self.direction < 0 else "it is non-decreasing"


def prove(program: Sequence[Step], x: Interval = REALS) -> Proof:
    """Prove monotonicity and range of the composition of the scalar steps of `program` on `x`. Skips row steps."""
    direction = 1
    for step in program:
        if step.fn in ROW:
            continue
        piece = _piece(step, x)
        if piece is None or not x.within(piece[1]):
            return Proof(0, REALS, step, x)
        sign, _, f = piece
        ends = f(x.lo), f(x.hi)
        if any(math.isnan(e) for e in ends):
            return Proof(0, REALS, step, x)
        x = Interval(min(ends), max(ends))
        direction *= sign
    return Proof(direction, x)


# Steps that are constant up to, or from, their first constant.
BOUNDED_BELOW = frozenset("clamp_min maximum fill_below at_least gate_at_least".split())
_BOUNDED_ABOVE = frozenset("clamp_max minimum fill_above".split())


def shared_bounds(program: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Return the steps with a lower bound, and those with an upper bound, that have a slope at the bound although they
    are constant beyond it.

    If a maximum has the value of such a bound, a position at the bound, which has a slope, ties with positions beyond
    it, which have none.
    """
    lower: list[Step] = []
    upper: list[Step] = []
    for at, step in enumerate(program):
        if step.fn in BOUNDED_BELOW | _BOUNDED_ABOVE:
            clamps = step.fn.startswith("clamp")
            sloped = not clamps or compat.clamp_has_a_slope_at_its_bounds()
            if sloped and step.consts[0] == step.consts[-1]:
                rises = prove(scalar_steps(program[:at])).direction == 1
                (lower if (step.fn in BOUNDED_BELOW) == rises else upper).append(step)
    return lower, upper


def undefined(program: Sequence[Step]) -> Step | None:
    """Return the first step that may give infinity or NaN for a finite number; None where there is none."""
    for at, step in enumerate(program):
        least = _defined_from(step)
        if least is not None and prove(program[:at]).range.lo < least:
            return step
    return None


def _defined_from(step: Step) -> float | None:
    """Return the least number for which a step gives a finite number; None if it does for all finite numbers."""
    if step.fn in ("log", "log2", "log10"):
        return _TINY
    if step.fn == "pow":
        exponent = step.consts[0]
        return _TINY if exponent < 0 else None if exponent == int(exponent) else 0.0
    return {"log1p": -1.0 + _TINY, "sqrt": 0.0}.get(step.fn)


def steep(program: Sequence[Step]) -> Step | None:
    """Return the first step that may have an infinite slope for a finite number; None where there is none.

    Also None if an earlier step is flat on small numbers up to its bound, because then no gradient passes there.
    """
    x = torch.tensor(-1e30, dtype=torch.float64)
    for at, step in enumerate(program):
        if step.fn in ROW:
            continue
        least = _defined_from(step)
        if least == 0.0 and (step.fn == "sqrt" or step.consts[0] < 1):
            least = _TINY
        if least is not None and prove(program[:at]).range.lo < least:
            return step
        function = SCALAR[step.fn]
        bound = torch.full_like(x, step.consts[0]) if step.consts else torch.zeros_like(x)
        if function.flat is not None and function.flat(torch.stack([x, bound]), *step.consts).all():
            return None
        x = function.value(x, *step.consts)
    return None


def hoistable_suffix(program: Program) -> int:
    """Return the index of the first step of the longest row-free suffix that is non-decreasing on all reals."""
    start = len(program)
    best = start
    while start > 0 and program[start - 1].fn not in ROW:
        start -= 1
        if prove(program[start:]).direction == 1:
            best = start
    return best
