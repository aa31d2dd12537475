"""Steps: the elementwise program between a matmul and the reduction that ends it.

A program is a tuple of `Step`. The matcher writes it, the range table proves things about it, and the
operators execute it: one representation for all three. Its text form is what an operator's `steps` argument
holds and what a reader of a graph sees:

    "mul(0.125) | row_where(0, -inf) | relu | log1p"

A scalar step maps the running value y to fn(y, *constants). A row step combines y with a per-row operand
r[i] of shape [..., S] (one number a token, broadcast over the columns):

    row_add(i)         y + r[i]
    row_mul(i)         y * r[i]
    row_where(i, c)    y where r[i] != 0, else the constant c
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from .. import compat

__all__ = [
    "DROPS_NAN", "PLAIN", "POSITIVE", "REALS", "ROW", "SCALAR", "Interval", "Program", "Step", "apply", "dual",
    "dual_parts", "guarded", "parse", "render", "run", "scalar_steps", "simplified",
]  # fmt: skip

_INF = math.inf
_LN2, _LN10 = math.log(2.0), math.log(10.0)
_SQRT_PI = math.sqrt(math.pi)
Unary = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A closed interval of the extended reals."""

    lo: float
    hi: float

    def within(self, other: Interval) -> bool:
        return other.lo <= self.lo and self.hi <= other.hi

    def __str__(self) -> str:
        return f"[{self.lo:g}, {self.hi:g}]"


REALS, POSITIVE = Interval(-_INF, _INF), Interval(0.0, _INF)


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One scalar function, of `x` and `arity` constants `c`; `y` is its result.

    value(x, *c) and slope(x, y, *c) are PyTorch's. flat(x, *c): where no gradient passes, whatever follows, as in
    PyTorch's backwards that select.
    rises: the domain on which it is non-decreasing, and what it is of a Python float there, infinity included. None: on
    none, or on one that depends on the constants (`ranges._piece`).
    keeps_sign: whether it is 0 at 0, and above 0 exactly where x is.
    """

    arity: int
    value: Unary
    slope: Unary | None = None
    flat: Unary | None = None
    rises: tuple[Interval, Callable[..., float]] | None = None
    keeps_sign: bool = False


def guarded(f: Callable[[float], float]) -> Callable[[float], float]:
    """Python's math raises where IEEE arithmetic overflows."""

    def g(x: float) -> float:
        try:
            return f(x)
        except OverflowError:
            return _INF

    return g


def _log(base: float | None) -> Callable[[float], float]:
    def f(x: float) -> float:
        if x == 0:
            return -_INF
        return _INF if x == _INF else (math.log(x) if base is None else math.log(x, base))

    return f


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _softplus(x: float, beta: float) -> float:
    return x if x * beta > 30 else math.log1p(math.exp(x * beta)) / beta


_MAX = REALS, lambda x, c: max(x, c)
_MIN = REALS, lambda x, c: min(x, c)


def _one(x: torch.Tensor, y: torch.Tensor, *_: float) -> torch.Tensor:
    return torch.ones_like(x)


def _halved(x: torch.Tensor, y: torch.Tensor, c: float) -> torch.Tensor:
    return torch.where(x == c, 0.5, torch.ones_like(x))


def _at_or(beyond: Unary, x: torch.Tensor, c: float) -> torch.Tensor:
    """Where `clamp` has a slope: beyond its bound, and at it up to torch 2.13."""
    inside = beyond(x, c)
    return inside | (x == c) if compat.clamp_has_a_slope_at_its_bounds() else inside


SCALAR: dict[str, Scalar] = {
    "add": Scalar(1, lambda x, c: x + c, _one, rises=(REALS, lambda x, c: x + c)),
    "mul": Scalar(1, lambda x, c: x * c, lambda x, y, c: torch.full_like(x, c)),
    # clamp: a NaN stays, and has no slope; c has the one that it has in the torch in use.
    "clamp_min": Scalar(1, lambda x, c: x.clamp_min(c), _one, lambda x, c: ~_at_or(torch.gt, x, c), _MAX),
    "clamp_max": Scalar(1, lambda x, c: x.clamp_max(c), _one, lambda x, c: ~_at_or(torch.lt, x, c), _MIN),
    # torch.maximum and torch.minimum: at a tie each operand has half of the gradient.
    "maximum": Scalar(1, lambda x, c: x.clamp_min(c), _halved, lambda x, c: x < c, _MAX),
    "minimum": Scalar(1, lambda x, c: x.clamp_max(c), _halved, lambda x, c: x > c, _MIN),
    # relu6, hardtanh: no slope at c, nor at a NaN
    "cap": Scalar(1, lambda x, c: x.clamp_max(c), _one, lambda x, c: ~(x < c), _MIN),
    "relu": Scalar(0, torch.relu, _one, lambda x: x <= 0, (REALS, lambda x: max(x, 0.0))),
    # v where x <= t (x < t, x > t), else x: a NaN stays
    "threshold": Scalar(2, lambda x, t, v: torch.where(x <= t, v, x), _one, lambda x, t, v: x <= t),
    "fill_below": Scalar(2, lambda x, t, v: torch.where(x < t, v, x), _one, lambda x, t, v: x < t),
    "fill_above": Scalar(2, lambda x, t, v: torch.where(x > t, v, x), _one, lambda x, t, v: x > t),
    # x times [x > t] ([x >= t]): as threshold and fill_below, but for the slope, which is multiplied by 0 there: none
    # at a NaN, and NaN where what follows has one.
    "gate_above": Scalar(
        2, lambda x, t, v: torch.where(x <= t, v, x), lambda x, y, t, v: (x > t).to(x.dtype)
    ),
    "gate_at_least": Scalar(
        2, lambda x, t, v: torch.where(x < t, v, x), lambda x, y, t, v: (x >= t).to(x.dtype)
    ),
    # x where x > t (x >= t), else v: a NaN is replaced
    "above": Scalar(2, lambda x, t, v: torch.where(x > t, x, v), _one, lambda x, t, v: ~(x > t)),
    "at_least": Scalar(
        2, lambda x, t, v: torch.where(x >= t, x, v), _one, lambda x, t, v: ~(x >= t)
    ),
    "leaky_relu": Scalar(
        1,
        lambda x, a: torch.where(x > 0, x, x * a),
        lambda x, y, a: torch.where(x > 0, torch.ones_like(x), a),
    ),
    "elu": Scalar(  # alpha, scale
        2,
        lambda x, a, s: s * torch.where(x > 0, x, a * torch.expm1(x)),
        lambda x, y, a, s: s * torch.where(x > 0, 1.0, a * torch.exp(x)),
    ),
    "softplus": Scalar(  # beta, threshold: linear above threshold / beta
        2,
        lambda x, b, t: F.softplus(x, b, t),
        lambda x, y, b, t: torch.where(x * b > t, 1.0, torch.sigmoid(x * b)),
        rises=(REALS, lambda x, b, t: _softplus(x, b)),
    ),
    "log": Scalar(0, torch.log, lambda x, y: 1 / x, rises=(POSITIVE, _log(None))),
    "log1p": Scalar(
        0, torch.log1p, lambda x, y: 1 / (1 + x),
        rises=(Interval(-1.0, _INF), lambda x: -_INF if x == -1 else math.log1p(x)),
    ),
    "log2": Scalar(0, torch.log2, lambda x, y: 1 / (x * _LN2), rises=(POSITIVE, _log(2.0))),
    "log10": Scalar(0, torch.log10, lambda x, y: 1 / (x * _LN10), rises=(POSITIVE, _log(10.0))),
    "exp": Scalar(0, torch.exp, lambda x, y: y, rises=(REALS, guarded(math.exp))),
    "expm1": Scalar(
        0, torch.expm1, lambda x, y: y + 1, rises=(REALS, guarded(math.expm1)), keeps_sign=True
    ),
    "sqrt": Scalar(0, torch.sqrt, lambda x, y: 0.5 / y, rises=(POSITIVE, math.sqrt)),
    "square": Scalar(
        0, torch.square, lambda x, y: 2 * x, rises=(POSITIVE, guarded(lambda x: x * x))
    ),
    "pow": Scalar(1, lambda x, p: x.pow(p), lambda x, y, p: p * x.pow(p - 1)),
    "tanh": Scalar(
        0, torch.tanh, lambda x, y: 1 - y * y, rises=(REALS, math.tanh), keeps_sign=True
    ),
    "sigmoid": Scalar(0, torch.sigmoid, lambda x, y: y * (1 - y), rises=(REALS, _sigmoid)),
    "logsigmoid": Scalar(
        0, F.logsigmoid, lambda x, y: torch.sigmoid(-x), rises=(REALS, lambda x: -_softplus(-x, 1.0))
    ),
    "softsign": Scalar(  # NaN at infinity, so it does not rise on all reals
        0, F.softsign, lambda x, y: 1 / (1 + x.abs()).square(), keeps_sign=True
    ),
    "atan": Scalar(
        0, torch.atan, lambda x, y: 1 / (1 + x * x), rises=(REALS, math.atan), keeps_sign=True
    ),
    "asinh": Scalar(
        0, torch.asinh, lambda x, y: torch.rsqrt(1 + x * x), rises=(REALS, math.asinh), keeps_sign=True
    ),
    "erf": Scalar(
        0, torch.erf, lambda x, y: 2 / _SQRT_PI * torch.exp(-x * x), rises=(REALS, math.erf),
        keeps_sign=True,
    ),
}  # fmt: skip

# Functions of one number and nothing else; PyTorch has each under the same name.
PLAIN = tuple(name for name, function in SCALAR.items() if not function.arity)

# Steps that replace a NaN by their constant.
DROPS_NAN = frozenset(("above", "at_least"))

ROW: dict[str, int] = {"row_add": 0, "row_mul": 0, "row_where": 1}


@dataclasses.dataclass(frozen=True)
class Step:
    """One elementwise step: a name of `SCALAR` or `ROW`, its constants, and for a row step its operand."""

    fn: str
    consts: tuple[float, ...] = ()
    row: int | None = None

    def __post_init__(self) -> None:
        if self.fn in SCALAR:
            arity, takes_row = SCALAR[self.fn].arity, False
        elif self.fn in ROW:
            arity, takes_row = ROW[self.fn], True
        else:
            known = ", ".join([*SCALAR, *ROW])
            raise ValueError(f"unknown step {self.fn!r}; known steps: {known}")
        if len(self.consts) != arity:
            raise ValueError(f"step {self.fn!r} takes {arity} constants, got {self.consts!r}")
        if takes_row != (self.row is not None):
            raise ValueError(f"step {self.fn!r}: row operand index is {self.row!r}")

    def __str__(self) -> str:
        args = ([] if self.row is None else [str(self.row)]) + [repr(float(c)) for c in self.consts]
        return f"{self.fn}({', '.join(args)})" if args else self.fn


Program = tuple[Step, ...]


def render(program: Sequence[Step]) -> str:
    """The text form of a program; `parse` is its inverse."""
    return " | ".join(map(str, program))


def scalar_steps(program: Sequence[Step]) -> Program:
    """A program without its row steps."""
    return tuple(s for s in program if s.fn not in ROW)


_MINUS = Step("mul", (-1.0,))
_MIRRORED = {
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "maximum": "minimum",
    "minimum": "maximum",
}


def simplified(program: Sequence[Step]) -> Program:
    """A program without the signs that turn back what they turned around: -min(-x, 0) is max(x, 0), tie or not."""
    if program[-1:] != (_MINUS,):
        return tuple(program)
    *before, _ = program
    if before[-1:] == [_MINUS]:
        return tuple(before[:-1])
    if len(before) > 1 and before[-2] == _MINUS and before[-1].fn in _MIRRORED:
        *rest, _, bound = before
        return (*rest, Step(_MIRRORED[bound.fn], (0.0 - bound.consts[0],)))
    return tuple(program)


def parse(text: str) -> Program:
    """Read a program's text form. Raises ValueError naming the step that is wrong."""
    steps = []
    for part in filter(None, (p.strip() for p in text.split("|"))):
        name, _, rest = part.partition("(")
        if rest and not rest.endswith(")"):
            raise ValueError(f"step {part!r} has no closing parenthesis")
        args = [a.strip() for a in rest[:-1].split(",")] if rest else []
        try:
            row = int(args.pop(0)) if name in ROW and args else None
            consts = tuple(float(a) for a in args)
        except ValueError as e:
            raise ValueError(f"step {part!r}: {e}") from None
        steps.append(Step(name, consts, row))
    return tuple(steps)


def apply(step: Step, y: torch.Tensor, rows: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """One step on `y` [..., S, V] with row operands [..., S]; `y` may also hold one value a row, [..., S]."""
    if step.row is None:
        return SCALAR[step.fn].value(y, *step.consts)
    r = rows[step.row]
    if y.dim() > r.dim():
        r = r.unsqueeze(-1)
    if step.fn == "row_add":
        return y + r
    if step.fn == "row_mul":
        return y * r
    return torch.where(r != 0, y, step.consts[0])


def run(
    program: Sequence[Step], y: torch.Tensor, rows: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """All steps in order."""
    for step in program:
        y = apply(step, y, rows)
    return y


def dual(
    program: Sequence[Step], y: torch.Tensor, rows: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and derivative with respect to the input, in one forward sweep.

    `rows` are already gathered to the shape of `y`. A step that is flat at its input makes the derivative
    exactly 0 whatever follows, infinite slopes included (sqrt(relu(x)) at x <= 0), as PyTorch's backward does.
    """
    y, slope, flat = dual_parts(program, y, rows)
    return y, torch.where(flat, 0.0, slope)


def dual_parts(
    program: Sequence[Step], y: torch.Tensor, rows: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Value, product of the steps' derivatives, and where a step is flat: no gradient, not even NaN, passes there."""
    slope = torch.ones_like(y)
    flat = torch.zeros_like(y, dtype=torch.bool)
    for step in program:
        x = y
        if step.row is not None:
            r = rows[step.row].to(y.dtype)
            if step.fn == "row_add":
                y = x + r
            elif step.fn == "row_mul":
                y, slope = x * r, slope * r
            else:
                y, flat = torch.where(r != 0, x, step.consts[0]), flat | (r == 0)
            continue
        f = SCALAR[step.fn]
        y = f.value(x, *step.consts)
        if f.flat is not None:
            flat = flat | f.flat(x, *step.consts)
        if f.slope is not None:
            slope = slope * f.slope(x, y, *step.consts)
    return y, slope, flat
