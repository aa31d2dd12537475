"""Lowers a program and its row operands to the form that a fused kernel runs.

A position (b, s) has one of three classes, decided exactly from the values of its row operands:

    kept      every row step leaves it alone (multiplied by 1, added 0, selected), up to a shift of the logit
              that comes before any other step;
    dropped   its final value does not depend on the logits (multiplied by 0, masked to a constant, added -inf);
    other     anything else, such as a real-valued weight after the activation.

If the scalar program is non-decreasing, a sequence without `other` positions takes the fast path: the maximum runs over
raw (shifted) logits of kept positions, and the whole scalar program runs once on the result. The dropped positions
contribute one number for each sequence. All other sequences take the general path, element by element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .functions import DROPS_NAN
from .ranges import hoistable_suffix, prove, shared_bounds
from .steps import ROW, Program, Step, apply, parse, scalar_steps


class Plan(NamedTuple):
    """The decisions that depend on the program alone.

    scalar: the scalar steps, run after the maximum on the fast path.
    inner, outer: the general path's split; inner runs per element before the maximum, outer after it.
    hoists: whether the fast path is sound (the scalar steps are non-decreasing, and do not overflow where a factor of a
        token may be 0).
    exhaustive: whether the fast path covers every value of the row operands.
    drops_nan: whether the program maps a NaN to a number, which is then that of the smallest logits.
    bounds: the steps with a lower bound that several positions may share (`shared_bounds`). If there are any, the
        general path runs all steps before the maximum.
    """

    program: Program
    scalar: Program
    inner: Program
    outer: Program
    hoists: bool
    exhaustive: bool
    drops_nan: bool = False
    bounds: tuple[Step, ...] = ()


@functools.lru_cache(maxsize=1024)
def plan(steps: str, every_position: bool = False) -> Plan:
    """Parse and split a program. `every_position` requests the general path with nothing hoisted. Exact
    first-occurrence argmax positions need it, because a plateau such as relu's zeros has many maxima.

    Raises ValueError for a program that does not parse.
    """
    program = parse(steps)
    scalar = scalar_steps(program)
    hoists = not every_position and prove(scalar).direction == 1
    exhaustive, seen_scalar, overflows = True, False, False
    for step in program:
        # 0 times infinity is NaN, which only the general path detects.
        hoists = hoists and not (step.fn == "row_mul" and overflows)
        overflows |= step.fn in ("exp", "expm1")
        if step.fn == "row_mul" or (step.fn == "row_add" and seen_scalar):
            exhaustive = False
        seen_scalar |= step.fn not in ROW
    bounds = tuple(shared_bounds(program)[0])
    split = len(program) if every_position or bounds else hoistable_suffix(program)
    inner, outer = program[:split], program[split:]
    drops_nan = any(step.fn in DROPS_NAN for step in program)
    return Plan(program, scalar, inner, outer, hoists, hoists and exhaustive, drops_nan, bounds)


class Lowered(NamedTuple):
    """A plan together with the classification of the positions by their row operands.

    add [B, S] fp32 or None: -inf where dropped, else the shift of the logits (0 in a sequence that takes the
        general path, where `inner` applies it).
    fill [B] fp32 or None: the largest value that dropped positions contribute, -inf where there are none.
    per_element [B] bool or None: sequences that need the general path; None: none do (or all do, if not hoists).
    """

    plan: Plan
    add: torch.Tensor | None
    fill: torch.Tensor | None
    per_element: torch.Tensor | None


def lower(
    p: Plan,
    rows: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
    finite: torch.Tensor | None = None,
) -> Lowered:
    """Classify every position, in a few passes over [B, S]. rows: [B, S] each, any real or bool dtype.

    finite [B, S]: False where a position's logits are not finite. Multiplying those by 0 gives NaN, not 0, so they
    are not dropped by `row_mul`; None: all are finite.
    """
    if not p.hoists or not rows:
        return Lowered(p, None, None, None)
    zero = torch.zeros_like(rows[0], dtype=dtype)
    shift, value = zero, zero
    dropped = torch.zeros_like(zero, dtype=torch.bool)
    other = dropped
    seen_scalar = False
    for step in p.program:
        if step.row is None:
            value, seen_scalar = apply(step, value), True
            continue
        r = rows[step.row].to(dtype)
        if step.fn == "row_where":
            value = torch.where(r == 0, step.consts[0], value)
            dropped = dropped | (r == 0)
        elif step.fn == "row_mul":
            value = torch.where(dropped, value * r, 0.0)
            dropped = dropped | ((r == 0) if finite is None else (r == 0) & finite)
            other = other | (r != 1)
        else:
            gone = r == float("-inf")
            value = torch.where(gone, r, value + r)
            dropped = dropped | gone
            if seen_scalar:
                other = other | (r != 0)
            else:
                shift = shift + r
    fill = torch.where(dropped, value, float("-inf")).amax(-1)
    if p.exhaustive:
        per_element = None
    else:
        per_element = (other & ~dropped).any(-1)
        shift = torch.where(per_element[:, None], 0.0, shift)
    return Lowered(p, torch.where(dropped, float("-inf"), shift), fill, per_element)
