"""The threshold of alpha-entmax: powers, bounds, and the search step that all attention kernels share.

With x the scaled scores (alpha - 1) z of a row minus a reference close to their maximum, and
beta = 1 / (alpha - 1),

    f(d) = sum_j max(x_j - d, 0)^beta = 1

has one root d = tau - reference, in [-1, 0] if the reference is the maximum. Near the reference
the fp32 grid is fine; tau itself has few significant bits if scores are large.

Steps are taken on h = f^(1/beta), the beta-norm of the clipped scores: it is linear in d if all
entries are equal, and convex for beta >= 1, so that a Newton step ends at or before the root.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Values of beta for which a closed form is faster than exp2(beta * log2(u)): alpha = 2, 1.5, 4/3, 1.25.
CLOSED_FORMS = (1, 2, 3, 4)
GENERAL = 0
# Like GENERAL, with the GPU's approximations of log2 and exp2: two instructions of the special function units
# instead of 30. The relative error of a power p is |ln p| 2^-22, below the resolution of 16-bit operands.
# Subnormal fp32 numbers are flushed to 0.
HARDWARE = -1
# Like HARDWARE, for beta > 1: u == 0 needs no special case, since exp2(-inf) is 0.
HARDWARE_OVER_1 = tl.constexpr(-2)
# Error of a sum of thousands of HARDWARE powers.
NOISE = tl.constexpr(4e-6)
LN2 = tl.constexpr(0.6931471805599453)
# Ratio of the error of a cubic step to the error of a Newton step.
CUBIC = tl.constexpr(1 / 64)

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
SPREAD_NAN = tl.constexpr(tl.PropagateNan.ALL)


def exponent_kind(alpha: float | None, general: int = GENERAL) -> int:
    """Return beta = 1 / (alpha - 1) if it is one of `CLOSED_FORMS`, else `general` (also if alpha is None)."""
    if alpha is None:
        return general
    beta = 1 / (alpha - 1)
    kind = round(beta)
    return kind if kind in CLOSED_FORMS and abs(beta - kind) < 1e-9 * kind else general


@triton.jit
def clip(x, d):
    """Return u = max(x - d, 0); NaN propagates."""
    return tl.maximum(x - d, 0.0, propagate_nan=SPREAD_NAN)


@triton.jit
def clip_to_one(x, d, WIDEN: tl.constexpr):
    """Same as `clip` for x <= 0 and d >= -1, in one instruction on a GPU, which returns 0 for NaN.

    The attention output is NaN nevertheless: the reference of a row with NaN is NaN, so that all of its entries are 0
    and the output is 0 / 0.
    """
    if WIDEN:
        return clip(x, d)
    else:
        return tl.inline_asm_elementwise(
            "sub.sat.f32 $0, $1, $2;", "=f,f,f", [x, d], dtype=tl.float32, is_pure=True, pack=1
        )


# Computes u^exponent from (exponent, log2(u), u), 0 if u is at most the lowest normal number. The selection is part of
# the assembly to keep its predicates short-lived. Otherwise they would be packed, 32 at a time, into registers.
POWER = tl.constexpr(
    "{ .reg .pred p; mul.f32 $0, $1, $2; ex2.approx.ftz.f32 $0, $0;"
    " setp.le.f32 p, $3, 0f00800000; selp.f32 $0, 0f00000000, $0, p; }"
)


@triton.jit
def _log2(u, KIND: tl.constexpr):
    if KIND == -1 or KIND == HARDWARE_OVER_1:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(u)


@triton.jit
def log_power(u, beta, KIND: tl.constexpr):
    """Return the natural logarithm of u^beta; finite at u == 0, so that its product with u^beta is 0 there."""
    return tl.maximum(_log2(u, KIND), -1000.0) * LN2 * beta


@triton.jit
def log_entries(x, d, KIND: tl.constexpr):
    """Return (u, u log2 u) of u = max(x - d, 0), 0 at u == 0; NaN propagates."""
    if KIND == -1:
        # Clipped to the lowest normal number, which has a finite logarithm and for which `powers` returns 0.
        u = tl.maximum(x - d, 1.1754943508222875e-38, propagate_nan=SPREAD_NAN)
        return u, u * _log2(u, KIND)
    else:
        u = clip(x, d)
        return u, u * tl.maximum(_log2(u, KIND), -1000.0)


@triton.jit
def powers(u, beta, KIND: tl.constexpr):
    """Return (u^beta, u^(beta - 1)) of u >= 0, both 0 at u == 0."""
    if KIND == 1:
        g = tl.where(u == 0.0, 0.0, 1.0)
        w = u
    elif KIND == 2:
        g = u
        w = u * u
    elif KIND == 3:
        g = u * u
        w = g * u
    elif KIND == 4:
        g = u * u * u
        w = g * u
    elif KIND == -1:
        g = tl.inline_asm_elementwise(
            POWER,
            "=&f,f,f,f",
            [beta - 1.0, _log2(u, KIND), u],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        w = g * u
    elif KIND == HARDWARE_OVER_1:
        g = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [(beta - 1.0) * _log2(u, KIND)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        w = g * u
    else:
        g = tl.where(u == 0.0, 0.0, tl.exp2((beta - 1.0) * _log2(u, KIND)))
        w = g * u
    return w, g


@triton.jit
def cubic_power(beta, width):
    """Return (c1, c2, c3) such that c1 u + c2 u^2 + c3 u^3 approximates u^beta for u in [0, width], beta in 1.5 to 3.5.

    The cubic interpolates u^beta at three points, which are denser where a row has most entries. The error of the sum
    is at most 0.006 for beta 1.6 to 2.5 and supports of 150 to 2,000 (0.04 at 3.3).
    """
    y1 = tl.exp2((beta - 1.0) * -3.321928094887362)  # 0.1
    y2 = tl.exp2((beta - 1.0) * -1.5145731728297582)  # 0.35
    y3 = tl.exp2((beta - 1.0) * -0.32192809488736235)  # 0.8
    slope = (y2 - y1) / 0.25
    bend = ((y3 - y2) / 0.45 - slope) / 0.7
    scale = tl.exp2((beta - 1.0) * tl.log2(width))
    c1 = (y1 - 0.1 * slope + 0.035 * bend) * scale
    c2 = (slope - 0.45 * bend) * scale / width
    return c1, c2, bend * scale / (width * width)


@triton.jit
def root(f, beta, KIND: tl.constexpr):
    """Return f^(1 / beta), f >= 0."""
    if KIND == 1:
        h = f
    elif KIND == 2:
        h = tl.sqrt(f)
    elif KIND == 4:
        h = tl.sqrt(tl.sqrt(f))
    else:
        h = tl.where(f == 0.0, 0.0, tl.exp2(tl.log2(f) / beta))
    return h


@triton.jit
def compensated(total, lost, term):
    """Return (total + term, correction) by Kahan summation. Without it, 64k equal terms would drift by 1e-5."""
    term = term - lost
    grown = total + term
    return grown, (grown - total) - term


@triton.jit
def class_bound(top, beta, KIND: tl.constexpr, STEPS: tl.constexpr):
    """Return a lower bound [R] of the root from distinct entries top [R, C] of each row.

    f over a part of the row is at most f over the row, so its root is a lower bound. 1e-6 is subtracted for
    rounding, and the bound is at least -1. For beta < 1, u^beta >= u (u <= 1), so that the root for beta = 1
    (sparsemax) is a lower bound.
    """
    d = tl.full([top.shape[0]], -1.0, tl.float32)
    for _ in tl.static_range(STEPS):
        u = tl.maximum(top - d[:, None], 0.0)
        if KIND <= 0:
            w, g = powers(u, tl.maximum(beta, 1.0)[:, None], KIND)
            f = tl.sum(w, 1)
            h = root(f, tl.maximum(beta, 1.0), KIND)
        else:
            w, g = powers(u, beta, KIND)
            f = tl.sum(w, 1)
            h = root(f, beta, KIND)
        ahead = (h - 1.0) * f / (h * tl.sum(g, 1))
        d = tl.where(ahead > 0.0, d + ahead, d)
    return tl.maximum(d - 1e-6, -1.0)


@triton.jit
def bound_step(top, bound, factor, beta, KIND: tl.constexpr, STEPS: tl.constexpr):
    """Raise the lower bounds [R, L] with the class maxima top, four tensors [R, L].

    Like `class_bound`, but in units of raw scores q . k: x = factor * score. The target is slightly over 1, so that
    rounding cannot move a bound past the root.
    """
    t0, t1, t2, t3 = top
    power = tl.maximum(beta, 1.0) if KIND <= 0 else beta
    for _ in tl.static_range(STEPS):
        w0, g0 = powers(tl.maximum(t0 - bound, 0.0) * factor, power, KIND)
        w1, g1 = powers(tl.maximum(t1 - bound, 0.0) * factor, power, KIND)
        w2, g2 = powers(tl.maximum(t2 - bound, 0.0) * factor, power, KIND)
        w3, g3 = powers(tl.maximum(t3 - bound, 0.0) * factor, power, KIND)
        f = tl.sum(w0 + w1 + w2 + w3, 1)[:, None]
        g = tl.sum(g0 + g1 + g2 + g3, 1)[:, None]
        h = root(f, power, KIND)
        ahead = (h - 1.00001) * f / (h * g * factor)
        bound = tl.where(ahead > 0.0, bound + ahead, bound)
    return bound


@triton.jit
def bracket(lo, entries, beta):
    """Return the arguments (d, lo, hi, old) of the first `step` of a search, from lower bounds lo [R] and the largest
    number of scores in a row."""
    # A row of n equal scores has its root at -n^(-1/beta). The root of any other row is below.
    hi = -tl.exp2(-tl.log2(entries) / beta) + 1e-6
    d = tl.minimum(lo, hi)
    zero = tl.zeros_like(d)
    return d, lo, hi, (d, zero + POS_INF, zero)


@triton.jit
def newton(d, f, g, beta, KIND: tl.constexpr):
    """Return d after one Newton step on h, from f = sum u^beta and g = sum u^(beta - 1) at d. A step of 1e-3 or more is
    not taken."""
    h = root(f, beta, KIND)
    moved = d + (h - 1.0) * f / (h * g)
    return tl.where(tl.abs(moved - d) < 1e-3, moved, d)


@triton.jit
def step(d, f, g, lo, hi, old, bend, turn, beta, KIND: tl.constexpr):
    """Compute the next d [R] from f = sum u^beta and g = sum u^(beta - 1) at d, and estimate its error.

    lo and hi bracket the root; old = (d, h, slope of d over h) of the previous evaluation. The next d comes
    from the cubic through both evaluations (inverse Hermite, order 2.7) if it is inside the bracket, else
    from a Newton step, else it is the middle. Every fourth turn does not use the cubic, so that the search cannot
    cycle. bend: an upper bound of h'' for the first evaluation, about beta times the number of scores in a row.

    Returns (d, rest, lo, hi, old). rest estimates |h - 1| at the new d from the curvature between the
    evaluations, which overestimates when d comes from below. rest is 0 if fp32 has no better d, and NaN in a
    row with NaN.
    """
    d0, h0, s0 = old
    h = root(f, beta, KIND)
    slope = -f / (h * g)
    lo = tl.where(f >= 1.0, tl.maximum(lo, d), lo)
    hi = tl.where(f <= 1.0, tl.minimum(hi, d), hi)
    straight = d + (1.0 - h) * slope
    gap = h0 - h
    at = (1.0 - h) / gap
    left = 1.0 - at
    cubic = (
        d
        + gap * slope * at * left * left
        + (d0 - d) * at * at * (3.0 - 2.0 * at)
        - s0 * gap * at * at * left
    )
    use = (tl.abs(gap) > 1e-5) & (tl.abs(at) < 1.0) & (cubic > lo) & (cubic < hi)
    use = use & (turn % 4 != 3)
    guess = tl.where(use, cubic, straight)
    middle = 0.5 * (lo + hi)
    inside = (guess >= lo) & (guess <= hi)
    guess = tl.where(inside, guess, middle)
    guess = tl.where(f == 1.0, d, guess)
    bend = tl.where(h0 < POS_INF, tl.abs((1.0 / slope - 1.0 / s0) / (d - d0)), bend)
    moved = guess - d
    rest = 0.5 * bend * moved * moved
    rest = tl.where(use, rest * CUBIC, rest)
    rest = tl.where(inside, rest, 1.0)
    if KIND <= 0:
        # For beta < 1, h has a corner with an infinite slope wherever an entry enters the support. The curvature gives
        # no estimate then, so the estimate is |h - 1| at the old d.
        seen = tl.abs(h - 1.0) - NOISE if KIND == -1 else tl.abs(h - 1.0)
        rest = tl.where(beta < 1.0, seen, rest)
    # The limit of fp32: there is no number between the bounds, or the step changes only the last bit of d.
    closed = (middle <= lo) | (middle >= hi)
    guess = tl.where(closed, hi, guess)
    settled = closed | (tl.abs(moved) <= 1.2e-7 * tl.abs(d))
    rest = tl.where(settled, 0.0, tl.where(h == h, rest, h))
    return guess, rest, lo, hi, (d, h, slope)
