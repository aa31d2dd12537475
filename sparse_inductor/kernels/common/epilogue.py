"""Step programs inside a Triton kernel: the value of a program, and its slope by forward mode.

`encode` turns a program of `sparse_inductor.epilogue.steps` into a constexpr, and the jitted functions walk it at
compile time, so a kernel contains only the code of its own steps:

    STEPS = encode(parse("row_where(0, -inf) | relu | log1p"))     # host
    rows, strides = row_arguments(operands)                         # host, operands [B, S]
    y = evaluate_rows(y, rows, strides, b, s, s < S, STEPS)         # kernel, fp32

`steps.dual` is the specification. Arithmetic is fp32. Functions that Triton has only as fast approximations (exp) or
not at all (log1p, expm1, tanh, atan, asinh, pow) are implemented here with a relative error of about 1e-6. They do not
use libdevice, so that the interpreter runs the same formulas as the GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sparse_inductor import compat
from sparse_inductor.epilogue.steps import Step

_CLAMP_HAS_SLOPE: tl.constexpr = tl.constexpr(compat.clamp_has_a_slope_at_its_bounds())


def _float32(c: float) -> float:
    """Round `c` to fp32: a constexpr that fp32 cannot hold would make the kernel compute in fp64."""
    try:
        return struct.unpack("f", struct.pack("f", c))[0]
    except OverflowError:
        return float("inf") if c > 0 else float("-inf")


def encode(program: Sequence[Step]) -> tuple[str | int | float, ...]:
    """Encode a program as a hashable constexpr: for each step its name, its row operand or -1, and two constants.

    The tuple is flat because Triton cannot index a tuple of tuples that contains strings.
    """
    items: list[str | int | float] = []
    for s in program:
        c0, c1 = [*map(_float32, s.consts), 0.0, 0.0][:2]
        items += [s.fn, -1 if s.row is None else s.row, c0, c1]
    return tuple(items)


def row_arguments(
    rows: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...] | None, tuple[int, ...] | None]:
    """Return row operands [B, S], of any real or bool dtype and any strides, as kernel arguments: tensors, strides."""
    if not rows:
        return None, None
    tensors = tuple(r.view(torch.uint8) if r.dtype == torch.bool else r for r in rows)
    return tensors, tuple(stride for r in rows for stride in r.stride())


@triton.jit
def _exp(x):
    """e**x. tl.exp multiplies by log2(e) first, which costs |x| ulps; here x = n ln 2 + r is exact to fp32."""
    # e**x is 0 and inf at the bounds; NaN stays NaN.
    c = tl.where(x < -104.0, -104.0, tl.where(x > 104.0, 104.0, x))
    n = tl.floor(c * 1.4426950408889634 + 0.5)
    # ln 2 in two parts: n times the first one is exact.
    r = (c - n * 0.693359375) + n * 2.12194440e-4
    half = tl.floor(n * 0.5)  # 2**n as two factors: 2**128 overflows, although e**x may not
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def _log1p(x):
    u = 1.0 + x
    # log(u) / (u - 1) varies slowly, so the rounding of 1 + x cancels (Kahan).
    corrected = tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(u == 1.0, x, tl.where(x > 1e8, tl.log(u), corrected))


@triton.jit
def _expm1(x):
    u = _exp(x)
    small = tl.abs(x) < 0.5
    safe = tl.where(small & (u != 1.0), u, 2.0)
    corrected = (safe - 1.0) * (x / tl.log(safe))  # as in _log1p
    return tl.where(u == 1.0, x, tl.where(small, corrected, u - 1.0))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + _exp(-x))


@triton.jit
def _tanh(x):
    e = _expm1(-2.0 * tl.abs(x))
    t = -e / (2.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def _atan(x):
    a = tl.abs(x)
    high = a > 2.414213562373095  # tan(3 pi / 8)
    mid = (a > 0.4142135623730950) & (a <= 2.414213562373095)  # tan(pi / 8)
    base = tl.where(high, 1.5707963267948966, tl.where(mid, 0.7853981633974483, 0.0))
    t = tl.where(mid, (a - 1.0) / (a + 1.0), a)
    t = tl.where(high, -1.0 / a, t)
    z = t * t
    # Cephes atanf: minimax on [0, tan(pi / 8)]
    p = 8.05374449538e-2 * z - 1.38776856032e-1
    p = (p * z + 1.99777106478e-1) * z - 3.33329491539e-1
    y = base + (p * z * t + t)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def _asinh(x):
    a = tl.abs(x)
    s = a * a
    y = _log1p(a + s / (1.0 + tl.sqrt_rn(1.0 + s)))
    y = tl.where(a > 1e6, tl.log(a) + 0.6931471805599453, y)  # ln 2a; a * a would overflow
    return tl.where(x < 0.0, -y, y)


@triton.jit
def _pow(x, P: tl.constexpr):
    if P == 0.5:
        return tl.sqrt_rn(x)
    elif P == P // 1 and P >= -8.0 and P <= 8.0:  # a product is exact to a few ulps
        y = tl.full(x.shape, 1.0, tl.float32)
        for i in tl.static_range(8):
            if i < P or i < -P:
                y = y * x
        return y if P >= 0.0 else 1.0 / y
    elif P == P // 1:  # integer exponent: also defined for x < 0
        y = _exp(P * tl.log(tl.abs(x)))
        return tl.where(x < 0.0, -y, y) if P % 2.0 == 1.0 else y
    else:
        return _exp(P * tl.log(x))


@triton.jit
def _value(x, STEPS: tl.constexpr, AT: tl.constexpr):
    """Apply one scalar step. Comparisons are written so that NaN takes the same branch as in PyTorch."""
    FN: tl.constexpr = STEPS[AT]
    C0: tl.constexpr = STEPS[AT + 2]
    C1: tl.constexpr = STEPS[AT + 3]
    if FN == "add":
        return x + C0
    elif FN == "mul":
        return x * C0
    elif FN == "clamp_min" or FN == "maximum":
        return tl.where(x < C0, C0, x)
    elif FN == "clamp_max" or FN == "minimum" or FN == "cap":
        return tl.where(x > C0, C0, x)
    elif FN == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif FN == "threshold" or FN == "gate_above":
        return tl.where(x <= C0, C1, x)
    elif FN == "fill_below" or FN == "gate_at_least":
        return tl.where(x < C0, C1, x)
    elif FN == "fill_above":
        return tl.where(x > C0, C1, x)
    elif FN == "above":
        return tl.where(x > C0, x, C1)
    elif FN == "at_least":
        return tl.where(x >= C0, x, C1)
    elif FN == "leaky_relu":
        return tl.where(x > 0.0, x, x * C0)
    elif FN == "elu":
        return C1 * tl.where(x > 0.0, x, C0 * _expm1(x))
    elif FN == "softplus":
        return tl.where(x * C0 > C1, x, _log1p(_exp(x * C0)) / C0)
    elif FN == "log":
        return tl.log(x)
    elif FN == "log1p":
        return _log1p(x)
    elif FN == "log2":
        return tl.log2(x)
    elif FN == "log10":
        return tl.log(x) * 0.4342944819032518
    elif FN == "exp":
        return _exp(x)
    elif FN == "expm1":
        return _expm1(x)
    elif FN == "sqrt":
        return tl.sqrt_rn(x)
    elif FN == "square":
        return x * x
    elif FN == "pow":
        return _pow(x, C0)
    elif FN == "tanh":
        return _tanh(x)
    elif FN == "sigmoid":
        return _sigmoid(x)
    elif FN == "logsigmoid":
        return tl.where(x < 0.0, x, 0.0) - _log1p(_exp(-tl.abs(x)))
    elif FN == "softsign":
        return x / (1.0 + tl.abs(x))
    elif FN == "atan":
        return _atan(x)
    elif FN == "asinh":
        return _asinh(x)
    elif FN == "erf":
        return tl.erf(x)
    else:
        tl.static_assert(False, "unknown step " + FN)


@triton.jit
def _slope(x, y, STEPS: tl.constexpr, AT: tl.constexpr):
    """Return dy/dx of one scalar step other than `add`, `mul` and the select steps, which `dual_rows` handles."""
    FN: tl.constexpr = STEPS[AT]
    C0: tl.constexpr = STEPS[AT + 2]
    C1: tl.constexpr = STEPS[AT + 3]
    if FN == "leaky_relu":
        return tl.where(x > 0.0, 1.0, C0)
    elif FN == "elu":
        return C1 * tl.where(x <= 0.0, C0 * _exp(x), 1.0)
    elif FN == "softplus":
        return tl.where(x * C0 > C1, 1.0, _sigmoid(x * C0))
    elif FN == "log":
        return 1.0 / x
    elif FN == "log1p":
        return 1.0 / (1.0 + x)
    elif FN == "log2":
        return 1.0 / (x * 0.6931471805599453)
    elif FN == "log10":
        return 1.0 / (x * 2.302585092994046)
    elif FN == "exp":
        return y
    elif FN == "expm1":
        return y + 1.0
    elif FN == "sqrt":
        return 0.5 / y
    elif FN == "square":
        return 2.0 * x
    elif FN == "pow":
        return C0 * _pow(x, C0 - 1.0 if C0 != 0.0 else 0.0)  # not 0 * inf at x = 0
    elif FN == "tanh":
        return 1.0 - y * y
    elif FN == "sigmoid":
        return y * (1.0 - y)
    elif FN == "logsigmoid":
        return _sigmoid(-x)
    elif FN == "softsign":
        u = 1.0 + tl.abs(x)
        return 1.0 / (u * u)
    elif FN == "atan":
        return 1.0 / (1.0 + x * x)
    elif FN == "asinh":
        return 1.0 / tl.sqrt_rn(1.0 + x * x)
    elif FN == "erf":
        return 1.1283791670955126 * _exp(-x * x)  # 2 / sqrt(pi)
    else:
        tl.static_assert(False, "no slope for step " + FN)


@triton.jit
def row_operand(rows, strides, b, s, mask, ROW: tl.constexpr):
    """Load row operand number ROW at (b, s) as fp32; 0 where `mask` is false."""
    at = b.to(tl.int64) * strides[2 * ROW] + s.to(tl.int64) * strides[2 * ROW + 1]
    return tl.load(rows[ROW] + at, mask=mask, other=0).to(tl.float32)


@triton.jit
def evaluate_rows(y, rows, strides, b, s, mask, STEPS: tl.constexpr):
    """Apply all steps in order to an fp32 tensor `y` of any shape.

    rows, strides: the results of `row_arguments`. b, s and `mask` must broadcast to `y`: for a [BV, BS] tile, b is a
    scalar and s is [1, BS]; for N gathered entries, both are [N]. Each row step loads its operand in the shape of b and
    s, before it is broadcast to `y`.
    """
    for i in tl.static_range(0, len(STEPS), 4):
        if STEPS[i + 1] < 0:
            y = _value(y, STEPS, i)
        else:
            r = row_operand(rows, strides, b, s, mask, STEPS[i + 1])
            if STEPS[i] == "row_add":
                y = y + r
            elif STEPS[i] == "row_mul":
                y = y * r
            else:
                y = tl.where(r != 0.0, y, STEPS[i + 2])
    return y


@triton.jit
def dual_rows(y, rows, strides, b, s, mask, STEPS: tl.constexpr):
    """Return (value, slope) of the program at `y`. Operands: see `evaluate_rows`.

    The slope is exactly 0 wherever any step is flat, regardless of later steps: sqrt(relu(x)) has slope 0 at x <= 0,
    although the slope of sqrt at 0 is infinite.
    """
    flat = (y == 0.0) & (y != 0.0)  # all false, without tl.full, which has no layout in Gluon
    slope = tl.where(flat, 0.0, 1.0)
    for i in tl.static_range(0, len(STEPS), 4):
        x = y
        if STEPS[i + 1] < 0:
            y = _value(x, STEPS, i)
            if STEPS[i] == "mul":
                slope = slope * STEPS[i + 2]
            elif STEPS[i] == "clamp_min":
                flat = flat | ~((x >= STEPS[i + 2]) if _CLAMP_HAS_SLOPE else (x > STEPS[i + 2]))
            elif STEPS[i] == "clamp_max":
                flat = flat | ~((x <= STEPS[i + 2]) if _CLAMP_HAS_SLOPE else (x < STEPS[i + 2]))
            elif STEPS[i] == "fill_below":
                flat = flat | (x < STEPS[i + 2])
            elif STEPS[i] == "fill_above":
                flat = flat | (x > STEPS[i + 2])
            elif STEPS[i] == "maximum":
                flat = flat | (x < STEPS[i + 2])
                slope = tl.where(x == STEPS[i + 2], 0.5 * slope, slope)
            elif STEPS[i] == "minimum":
                flat = flat | (x > STEPS[i + 2])
                slope = tl.where(x == STEPS[i + 2], 0.5 * slope, slope)
            elif STEPS[i] == "gate_above":
                slope = slope * tl.where(x > STEPS[i + 2], 1.0, 0.0)
            elif STEPS[i] == "gate_at_least":
                slope = slope * tl.where(x >= STEPS[i + 2], 1.0, 0.0)
            elif STEPS[i] == "above":
                flat = flat | ~(x > STEPS[i + 2])
            elif STEPS[i] == "at_least":
                flat = flat | ~(x >= STEPS[i + 2])
            elif STEPS[i] == "cap":
                flat = flat | ~(x < STEPS[i + 2])
            elif STEPS[i] == "relu":
                flat = flat | (x <= 0.0)
            elif STEPS[i] == "threshold":
                flat = flat | (x <= STEPS[i + 2])
            elif STEPS[i] != "add":
                slope = slope * _slope(x, y, STEPS, i)
        else:
            r = row_operand(rows, strides, b, s, mask, STEPS[i + 1])
            if STEPS[i] == "row_add":
                y = x + r
            elif STEPS[i] == "row_mul":
                y = x * r
                slope = slope * r
            else:
                y = tl.where(r != 0.0, x, STEPS[i + 2])
                flat = flat | (r == 0.0)
    return y, tl.where(flat, 0.0, slope)


@triton.jit
def evaluate(y, STEPS: tl.constexpr):
    """`evaluate_rows` for a program of scalar steps."""
    return evaluate_rows(y, None, None, 0, 0, None, STEPS)


@triton.jit
def dual(y, STEPS: tl.constexpr):
    """`dual_rows` for a program of scalar steps."""
    return dual_rows(y, None, None, 0, 0, None, STEPS)
