"""The table of scalar functions, from which the elementwise programs of operators are built.

`SCALAR` holds the steps: arithmetic that the operators execute. `FUNCTIONS` holds PyTorch's functions of one tensor
and constants, each as a program of steps in text form (`steps.parse`). To add an activation that consists of known
steps, add a row to `FUNCTIONS`. Any other activation also needs a row in `SCALAR` and a branch in
`kernels/common/epilogue.py`, which computes the same in Triton. `tests/test_epilogue.py` and
`tests/kernels/test_epilogue_kernels.py` compare each row of both tables with PyTorch.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from .. import compat

_INF = math.inf
_LN2, _LN10 = math.log(2.0), math.log(10.0)
_SQRT_PI = math.sqrt(math.pi)
Unary = Callable[..., torch.Tensor]


class Interval(NamedTuple):
    """A closed interval of the extended reals."""

    lo: float
    hi: float

    def within(self, other: Interval) -> bool:
        return other.lo <= self.lo and self.hi <= other.hi

    def __str__(self) -> str:
        return f"[{self.lo:g}, {self.hi:g}]"


REALS, POSITIVE = Interval(-_INF, _INF), Interval(0.0, _INF)


class Scalar(NamedTuple):
    """One scalar function, of `x` and `arity` constants `c`; `y` is its result.

    value(x, *c) and slope(x, y, *c) are equal to PyTorch's. flat(x, *c): a mask of the elements where no gradient
    passes, whatever steps follow, as in those backward functions of PyTorch that select.
    rises: the domain on which it is non-decreasing, and the function itself for Python floats there, infinity included.
    None if there is no such domain, or if the domain depends on the constants (`ranges._piece`).
    keeps_sign: whether it is 0 at 0, and above 0 exactly where x is.
    constant_to(*c): (b, v) if it has the value v for every x <= b (x < b for steps in `ranges.BOUNDED_BELOW`).
    """

    arity: int
    value: Unary
    slope: Unary | None = None
    flat: Unary | None = None
    rises: tuple[Interval, Callable[..., float]] | None = None
    keeps_sign: bool = False
    constant_to: Callable[..., tuple[float, float]] | None = None


def guarded(f: Callable[[float], float]) -> Callable[[float], float]:
    """Return a function that gives inf where f overflows, as IEEE arithmetic does. Python's math raises instead."""

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


def _own(c: float) -> tuple[float, float]:
    return c, c


def _given(t: float, v: float) -> tuple[float, float]:
    return t, v


def _at_or(beyond: Unary, x: torch.Tensor, c: float) -> torch.Tensor:
    """Return a mask of the elements where `clamp` has a slope: beyond its bound, and up to torch 2.13 also at it."""
    inside = beyond(x, c)
    return inside | (x == c) if compat.clamp_has_a_slope_at_its_bounds() else inside


SCALAR: dict[str, Scalar] = {
    "add": Scalar(1, lambda x, c: x + c, _one, rises=(REALS, lambda x, c: x + c)),
    "mul": Scalar(1, lambda x, c: x * c, lambda x, y, c: torch.full_like(x, c)),
    # clamp: a NaN stays and has no slope. The slope at c is that of the installed torch.
    "clamp_min": Scalar(
        1, lambda x, c: x.clamp_min(c), _one, lambda x, c: ~_at_or(torch.gt, x, c), _MAX, constant_to=_own
    ),
    "clamp_max": Scalar(1, lambda x, c: x.clamp_max(c), _one, lambda x, c: ~_at_or(torch.lt, x, c), _MIN),
    # torch.maximum and torch.minimum: at a tie each operand has half of the gradient.
    "maximum": Scalar(1, lambda x, c: x.clamp_min(c), _halved, lambda x, c: x < c, _MAX, constant_to=_own),
    "minimum": Scalar(1, lambda x, c: x.clamp_max(c), _halved, lambda x, c: x > c, _MIN),
    # relu6, hardtanh: no slope at c, nor at a NaN
    "cap": Scalar(1, lambda x, c: x.clamp_max(c), _one, lambda x, c: ~(x < c), _MIN),
    "relu": Scalar(
        0, torch.relu, _one, lambda x: x <= 0, (REALS, lambda x: max(x, 0.0)), constant_to=lambda: (0.0, 0.0)
    ),
    # v where x <= t (x < t, x > t), else x: a NaN stays
    "threshold": Scalar(2, lambda x, t, v: torch.where(x <= t, v, x), _one, lambda x, t, v: x <= t, constant_to=_given),
    "fill_below": Scalar(2, lambda x, t, v: torch.where(x < t, v, x), _one, lambda x, t, v: x < t, constant_to=_given),
    "fill_above": Scalar(2, lambda x, t, v: torch.where(x > t, v, x), _one, lambda x, t, v: x > t),
    # x times [x > t] ([x >= t]): like threshold and fill_below, but the slope is multiplied by 0. It is 0 at a NaN, and
    # NaN where a following step has an infinite or NaN slope.
    "gate_above": Scalar(
        2, lambda x, t, v: torch.where(x <= t, v, x), lambda x, y, t, v: (x > t).to(x.dtype), constant_to=_given
    ),
    "gate_at_least": Scalar(
        2, lambda x, t, v: torch.where(x < t, v, x), lambda x, y, t, v: (x >= t).to(x.dtype), constant_to=_given
    ),
    # x where x > t (x >= t), else v: a NaN is replaced
    "above": Scalar(
        2, lambda x, t, v: torch.where(x > t, x, v), _one, lambda x, t, v: ~(x > t), constant_to=_given
    ),
    "at_least": Scalar(
        2, lambda x, t, v: torch.where(x >= t, x, v), _one, lambda x, t, v: ~(x >= t), constant_to=_given
    ),
    "leaky_relu": Scalar(
        1,
        lambda x, a: torch.where(x > 0, x, x * a),
        lambda x, y, a: torch.where(x > 0, torch.ones_like(x), a),
    ),
    "elu": Scalar(  # alpha, scale
        2,
        lambda x, a, s: s * torch.where(x > 0, x, a * torch.expm1(x)),
        lambda x, y, a, s: s * torch.where(x <= 0, a * torch.exp(x), 1.0),
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

# Steps that replace a NaN by their constant.
DROPS_NAN = frozenset(("above", "at_least"))


@dataclasses.dataclass(frozen=True)
class Function:
    """One of PyTorch's functions of a tensor and constants.

    program: its steps in text form, or a function of its constants that returns them. That function raises ValueError,
        with the reason, for constants with which there is no such program.
    parameters: PyTorch's names of the constants, in order, with their defaults: "beta=1 threshold=20".
    kind: "activation" if a linear layer followed by this function resembles a SPLADE head, "rectifier" if it also
        resembles a feed-forward block with few active neurons. A subgraph that resembles a pattern and is left as
        written is a near miss, and `report()` gives the reason. Nothing else depends on it.
    """

    program: str | Callable[..., str]
    parameters: str = ""
    kind: Literal["activation", "rectifier"] | None = None

    @functools.cached_property
    def defaults(self) -> dict[str, float | None]:
        """The default of each constant by name, or None if it has none."""
        split = (p.partition("=") for p in self.parameters.split())
        return {name: float(ast.literal_eval(value)) if value else None for name, _, value in split}

    @property
    def may_level_off(self) -> bool:
        """Whether it may be constant below some number, at least with some constants."""
        if callable(self.program):
            return True
        steps = (step.partition("(")[0].strip() for step in self.program.split("|"))
        return any(SCALAR[step].constant_to is not None for step in steps)

    def steps(self, *constants: float) -> str:
        """Return its program with these constants, in text form."""
        return self.program if isinstance(self.program, str) else self.program(*constants)


def _elu(alpha: float, scale: float, input_scale: float) -> str:
    if input_scale != 1:
        raise ValueError("elu with an input scale")
    return "relu" if (alpha, scale) == (0, 1) else f"elu({alpha}, {scale})"


def _celu(alpha: float) -> str:
    if alpha <= 0:
        raise ValueError(f"celu with alpha {alpha}")
    return f"mul({1 / alpha}) | elu(1, {alpha})"


FUNCTIONS: dict[str, Function] = {
    # PyTorch has a function of the same name for every step without constants.
    **{name: Function(name) for name, step in SCALAR.items() if not step.arity},
    "relu": Function("relu", kind="rectifier"),
    "relu6": Function("relu | cap(6)", kind="rectifier"),
    "leaky_relu": Function(
        lambda slope: f"leaky_relu({slope})" if slope else "relu",
        "negative_slope=0.01",
        kind="rectifier",
    ),
    "elu": Function(_elu, "alpha=1.0 scale=1.0 input_scale=1.0", kind="activation"),
    "celu": Function(_celu, "alpha=1.0", kind="activation"),
    "selu": Function("elu(1.6732632423543772, 1.0507009873554805)", kind="activation"),
    "softplus": Function(
        lambda beta, threshold: f"softplus({beta}, {threshold})",
        "beta=1 threshold=20",
        kind="activation",
    ),
    "threshold": Function(lambda t, v: f"threshold({t}, {v})", "threshold value", kind="rectifier"),
    "hardtanh": Function(
        lambda low, high: f"{f'threshold({low}, {low})' if low else 'relu'} | cap({high})",
        "min_val=-1.0 max_val=1.0",
        kind="activation",
    ),
    "hardsigmoid": Function(f"add(3) | relu | cap(6) | mul({1 / 6})"),
    "neg": Function("mul(-1)"),
    "reciprocal": Function("pow(-1)"),
    "rsqrt": Function("pow(-0.5)"),
    "exp2": Function(f"mul({_LN2}) | exp"),
}
