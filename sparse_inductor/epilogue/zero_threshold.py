"""Where an activation is zero: the zero threshold of a scalar program.

relu(x), relu(x)**2, relu(x - 1), threshold(x, 0.1, 0): each is exactly 0 up to some x, its zero threshold.
Elements at or below the zero threshold need not be computed, stored or multiplied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from .functions import SCALAR
from .ranges import BOUNDED_BELOW
from .steps import ROW, Step, value_at

# The smallest normal fp32. A kernel that flushes denormals still distinguishes it from 0.
_TINY = 2.0**-126


def zero_threshold(program: Sequence[Step]) -> float | None:
    """Return a number t such that the program and its slope are 0 for every x <= t; None if there is none.

    It is the largest such t up to rounding. Where steps before the rectifier shift or scale x, it errs on the small
    side, so that all x with a nonzero result are above it. A NaN is above every threshold.
    """
    found = None
    # Functions that map a bound of each step's result to a bound of its input. The last step's is applied first.
    before: list[Callable[[float], float | None]] = []
    exact = True
    for at, step in enumerate(program):
        if step.fn in ROW or not all(map(math.isfinite, step.consts)):
            break
        if step.fn in _BEFORE:
            before.append(functools.partial(_BEFORE[step.fn], *step.consts))
            exact = exact and step.fn not in ("mul", "add", "sigmoid")
        elif (constant_to := SCALAR[step.fn].constant_to) is not None:
            bound, value = constant_to(*step.consts)
            if value_at(program[at + 1 :], value) == 0.0:
                t: float | None = bound
                for undo in reversed(before):
                    t = None if t is None else undo(t)
                if t is None:
                    break
                if step.fn in BOUNDED_BELOW or not exact:
                    t -= max(abs(t) * 2.0**-20, _TINY)
                found = t if found is None else max(found, t)
            elif found is None:
                return None
        else:
            break
    return found


def _sign(t: float) -> float | None:
    """Return the bound of the input for a bound t of the result, of a step that rises and is 0 at 0; None if t is not
    0."""
    return 0.0 if t == 0 else None


# step -> (its constants, a bound of its result) -> the bound of x, if it is exact
_BEFORE: dict[str, Callable[..., float | None]] = {
    "mul": lambda c, t: t / c if c > 0 else None,
    "add": lambda c, t: t - c,
    "clamp_max": lambda c, t: t if t < c else None,
    **dict.fromkeys("cap minimum".split(), lambda c, t: t if t < c else None),
    "fill_above": lambda c, v, t: t if t < min(c, v) else None,
    "elu": lambda alpha, scale, t: _sign(t) if alpha > 0 and scale > 0 else None,
    "sigmoid": lambda t: 0.0 if t == 0.5 else None,
    **{name: _sign for name, function in SCALAR.items() if function.keeps_sign},
}
