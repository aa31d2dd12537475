"""Entmax over rows and its gradient (Peters et al. 2019, Eq. 10; Correia et al. 2019, Prop. 1 and 2).

With m the maximum of a row z and c = alpha - 1,

    p_i = y r_i^(1/c),    r_i = [1 - c (m - z_i) y^-c]_+,    y the largest probability, so that sum_i p_i = 1

y is found by Newton's iteration on the row in registers. The columns are divided into classes, and the iteration starts
from the solution y for the maxima of these classes. This is an upper bound, since the full row has further terms. For
alpha <= 2 the iteration descends from it to the root monotonically. It ends when a step is below the resolution of
fp32; dividing by the sum removes the rounding error of y.

A row of up to 32 768 columns is read once. A longer row is read once for the maxima, once per iteration (one to three)
and once for the output; the rows of programs that run at the same time stay in the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import Launcher, launch

# The relative Newton step that ends the iteration: four units of fp32 rounding.
FINE = tl.constexpr(2.0**-22)
# The same for class maxima. It can be coarse, because every iterate is an upper bound.
COARSE = tl.constexpr(2.0**-5)
# The maximum number of steps. Three or four are usual; at least every second step halves the bracket, so 64 suffice.
STEPS = tl.constexpr(64)

# POWER is 1 / (alpha - 1) if this is a small integer, else one of the following.
_ANY = 0  # any exponent, to the accuracy of fp32
_MILD = -1  # an exponent up to 8, on a GPU: the approximate logarithm, 2^-22 off, changes the power by at most 2^-19
_BY_ROW = -2  # alpha differs between rows; each tile uses 2, 1, _MILD or _ANY, whichever is valid for all its rows
MILD_SCALE = tl.constexpr(0.125)

# The largest number of columns held in registers: 64 per thread with 512 threads.
_RESIDENT = 32768


@triton.jit
def _log1p(x, w, inverse):
    """log(1 + x) from w = 1 + x, rounded, and 1 / w: the logarithm of w plus a correction for its rounding."""
    return tl.log(w) + (x - (w - 1.0)) * inverse


@triton.jit
def _log2(x, EXACT: tl.constexpr):
    """log2 in fp32 accuracy if EXACT, else by the GPU's approximate instruction, with an error of 2^-22: absolute near
    1, relative elsewhere."""
    if EXACT:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _terms(d, e, p, POWER: tl.constexpr):
    """r^p and r^(p - 1) with r = [1 + d e]_+, d <= 0; NaN stays NaN."""
    if POWER <= 0:
        x = d * e
        w = 1.0 + x
        inside = ~(w <= 0)
        w = tl.where(inside, w, 1.0)
        if POWER == -1:
            top = tl.where(inside, tl.exp2(_log2(w, False) * p), 0.0)
            inverse = tl.rsqrt(w)
            return top, top * inverse * inverse
        else:
            inverse = 1.0 / w
            top = tl.where(inside, tl.exp(_log1p(x, w, inverse) * p), 0.0)
            return top, top * inverse
    else:
        r = tl.maximum(1.0 + d * e, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if POWER == 1:
            return r, tl.where(r > 0, 1.0, 0.0)
        slope = r
        for _ in tl.static_range(POWER - 2):
            slope *= r
        return slope * r, slope


@triton.jit
def _scale(y, c, POWER: tl.constexpr):
    """y^-c with c = 1 / p."""
    if POWER == 1:
        return 1.0 / y
    elif POWER == 2:
        return tl.rsqrt(y)
    else:
        return tl.exp(tl.log(y) * -c)


# Tiles are [M, J, T], M rows by J * T columns, or [T, J, M] if neighbouring rows are adjacent in memory. The last
# dimension is distributed over lanes. J is reduced first; AXIS is the dimension of T after this reduction, 1 or 0.


@triton.jit
def _spread(row, AXIS: tl.constexpr):
    """[M] to [M, 1, 1] or [1, 1, M]."""
    return row[:, None, None] if AXIS == 1 else row[None, None, :]


@triton.jit
def _partial(d, e, p, POWER: tl.constexpr):
    """Sums over J of r^p, r^(p - 1) and, for POWER 2, the support's size: [.., 2], or [.., 2, 2]."""
    top, slope = _terms(d, e, p, POWER)
    if POWER != 1 and (d.shape[1] == 1 or d.shape[2] < 128):
        # In these tiles the first addition adds a value from another lane; in other tiles a thread adds its own entries
        # first. Lanes of the same row must get bitwise equal sums, or their iterations diverge. But a product that is
        # contracted with this addition (FMA) is rounded in one lane and not in the other. So each product is first
        # contracted with a zero that the compiler cannot prove to be zero, which rounds it once in both lanes.
        zero = 0.0 * e
        top += zero
        if POWER != 2:
            slope += zero
    s, s1 = tl.sum(top, 1), tl.sum(slope, 1)
    if POWER == 2:
        k = tl.sum(tl.where(slope > 0, 1.0, 0.0), 1)
        return tl.join(tl.join(s, s1), tl.join(k, k))
    else:
        return tl.join(s, s1)


@triton.jit
def _total(part, POWER: tl.constexpr, AXIS: tl.constexpr):
    """The sums of `_partial` over T, each in the shape of `_spread`, by one reduction across the program for all."""
    part = tl.sum(part, AXIS)
    if POWER == 2:
        part, ks = tl.split(part)
        k, _same = tl.split(ks)
        s, s1 = tl.split(part)
    else:
        s, s1 = tl.split(part)
        k = s1
    return _spread(s, AXIS), _spread(s1, AXIS), _spread(k, AXIS)


@triton.jit
def _next(y, s, s1, k, lo, hi, last, before, c, p, fine, POWER: tl.constexpr):
    """One step from y with sums s, s1 and k: (next y, whether it differs, lo, hi, last step, step before the last)."""
    excess = y * s - 1.0
    if POWER == 1:
        # The exact root if the support does not change; otherwise at or above the root.
        guess = y - excess / s1
        moved = y - guess > y * fine
    else:
        hi = tl.where(excess >= 0, y, hi)
        lo = tl.where(excess <= 0, y, lo)
        if POWER == 2:
            # The exact root if the support does not change: sum (t r - delta)^2 = 1 over the k entries, t = sqrt(y).
            t = tl.sqrt(y)
            s1 *= t
            t -= excess / (s1 + tl.sqrt(tl.maximum(s1 * s1 - k * excess, 0.0)))
            guess = t * t
            guarded = excess == excess
            moved = tl.abs(guess - y) > y * fine
        else:
            # Newton's step for t = y^c = -tau on the p-norm of [t r], which is linear if all scores are equal.
            log_norm = tl.log(y * s) * c
            small = log_norm * (1.0 - log_norm * (0.5 - log_norm * 0.16666667))
            away = tl.where(tl.abs(log_norm) < 0.01, small, 1.0 - tl.exp(-log_norm)) * (s / s1)
            left = 1.0 - away
            guess = y * tl.exp(_log1p(-away, left, 1.0 / left) * p)
            # For alpha > 2 the slope may be infinite where an entry enters the support, so a short step does not imply
            # convergence.
            guarded = c > 1
            guess = tl.where(guarded, y - excess / s1, guess)
            moved = tl.where(guarded, tl.abs(excess) > fine, y - guess > y * fine)
        moved = moved & ((hi - lo > hi * fine) | ~guarded)
        # A step out of the bracket, or longer than half of the step before the last, is replaced by a bisection.
        sound = (guess > lo) & (guess < hi) & (tl.abs(guess - y) <= 0.5 * before)
        guess = tl.where(guarded & ~sound, 0.5 * (lo + hi), guess)
        before = last
        last = tl.abs(guess - y)
    return tl.where(moved, guess, y), moved, lo, hi, last, before


@triton.jit
def _solve(d, y, floor, c, p, fine, POWER: tl.constexpr, AXIS: tl.constexpr):
    """(y, sum of r^p at y) of each row for scores d = c (z - m). y: a start at or above the root."""
    lo, hi = floor + 0.0 * y, 1.0 + 0.0 * y
    last, before = hi, hi
    s = 0.0 * y
    steps = 0
    go = 1
    while go > 0:
        s, s1, k = _total(_partial(d, _scale(y, c, POWER), p, POWER), POWER, AXIS)
        following, moved, lo, hi, last, before = _next(
            y, s, s1, k, lo, hi, last, before, c, p, fine, POWER
        )
        steps += 1
        go = tl.where(steps < STEPS, tl.max(tl.ravel(moved.to(tl.int32)), 0), 0)
        # The last step is not taken, so that s belongs to y.
        y = tl.where(go > 0, following, y)
    return y, s


@triton.jit
def _load(x, column, keep, stride):
    return tl.load(x + column * stride, mask=keep, other=-float("inf")).to(tl.float32)


@triton.jit
def _shift(classes, AXIS: tl.constexpr):
    """Each row's maximum; 0 for a row of -inf, whose scores then stay -inf."""
    peak = _spread(tl.max(classes, AXIS), AXIS)
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _resident(x, out, column, keep, sxn, son, floor, c, p, POWER: tl.constexpr, AXIS: tl.constexpr):
    """Rows that fit the registers: scores are read once."""
    z = _load(x, column, keep, sxn)
    classes = tl.max(z, 1)
    shift = _shift(classes, AXIS)
    d = (z - shift) * c
    y = 1.0 + 0.0 * shift
    if d.shape[1] > 1:
        bound = (tl.expand_dims(classes, 1) - shift) * c
        y, _coarse = _solve(bound, y, floor, c, p, COARSE, POWER, AXIS)
    y, s = _solve(d, y, floor, c, p, FINE, POWER, AXIS)
    top, _slope = _terms(d, _scale(y, c, POWER), p, POWER)
    top *= 1.0 / tl.where(s == 0, 1.0, s)
    tl.store(out + column * son, top.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _streamed(
    x, out, column, alive, n, sxn, son, floor, c, p, POWER: tl.constexpr, AXIS: tl.constexpr
):
    """Rows that do not fit the registers: they are read again in each iteration, from the L2 cache if they fit it."""
    J: tl.constexpr = column.shape[1]
    T: tl.constexpr = column.shape[2 * AXIS]
    classes = tl.max(_load(x, column, alive & (column < n), sxn), 1)
    for i in range(J * T, n, J * T):
        z = _load(x, i + column, alive & (i + column < n), sxn)
        classes = tl.maximum(classes, tl.max(z, 1))
    shift = _shift(classes, AXIS)
    y = 1.0 + 0.0 * shift
    bound = (tl.expand_dims(classes, 1) - shift) * c
    y, _coarse = _solve(bound, y, floor, c, p, COARSE, POWER, AXIS)
    lo, hi = floor + 0.0 * y, 1.0 + 0.0 * y
    last, before = hi, hi
    s = 0.0 * y
    steps = 0
    go = 1
    while go > 0:
        e = _scale(y, c, POWER)
        z = _load(x, column, alive & (column < n), sxn)
        part = _partial((z - shift) * c, e, p, POWER)
        for i in range(J * T, n, J * T):
            z = _load(x, i + column, alive & (i + column < n), sxn)
            part += _partial((z - shift) * c, e, p, POWER)
        s, s1, k = _total(part, POWER, AXIS)
        following, moved, lo, hi, last, before = _next(
            y, s, s1, k, lo, hi, last, before, c, p, FINE, POWER
        )
        steps += 1
        go = tl.where(steps < STEPS, tl.max(tl.ravel(moved.to(tl.int32)), 0), 0)
        y = tl.where(go > 0, following, y)
    e = _scale(y, c, POWER)
    inverse = 1.0 / tl.where(s == 0, 1.0, s)
    for i in range(0, n, J * T):
        keep = alive & (i + column < n)
        top, _slope = _terms((_load(x, i + column, keep, sxn) - shift) * c, e, p, POWER)
        tl.store(out + (i + column) * son, (top * inverse).to(out.dtype.element_ty), mask=keep)


@triton.jit
def _rows(
    x, out, column, alive, n, sxn, son, c, p,
    POWER: tl.constexpr, RESIDENT: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    floor = 1.0 / n
    if RESIDENT:
        _resident(x, out, column, alive & (column < n), sxn, son, floor, c, p, POWER, AXIS)
    else:
        _streamed(x, out, column, alive, n, sxn, son, floor, c, p, POWER, AXIS)


@triton.jit
def _place(
    A, C, M: tl.constexpr, J: tl.constexpr, T: tl.constexpr,
    AXIS: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(a, c, column, mask of existing rows) of this program's tile."""
    row = tl.arange(0, M)
    if FLAT:  # C is small, so a tile may span several values of a
        row = _spread(tl.program_id(0).to(tl.int64) * M + row, AXIS)
        a, c = row // C, row % C
        alive = row < A * C
    else:
        a = (tl.program_id(0) // tl.cdiv(C, M)).to(tl.int64)
        row = _spread((tl.program_id(0) % tl.cdiv(C, M)) * M + row, AXIS)
        c = row.to(tl.int64)
        alive = row < C
    j, t = tl.arange(0, J)[None, :, None] * T, tl.arange(0, T)
    column = j + (t[None, None, :] if AXIS == 1 else t[:, None, None])
    if WIDE:
        column = column.to(tl.int64)
    return a, c, column, alive


@triton.jit
def _at(pointer, a, b, stride_a, stride_b, AXIS: tl.constexpr):
    """Pointers to the first columns of rows (a, b)."""
    if AXIS == 0:
        # This hides the pointer's alignment from the compiler, which would otherwise give a thread four neighbouring
        # rows, with four times the state of an iteration. One row per lane is coalesced just as well.
        pointer += tl.program_id(1)
    return pointer + a * stride_a + b * stride_b


@triton.jit(do_not_specialize=["A"])
def _forward_kernel(
    x, out, scales, n, A, C, scale,
    sxa, sxc, sxn, soa, soc, son,
    POWER: tl.constexpr, RESIDENT: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr,
    M: tl.constexpr, J: tl.constexpr, T: tl.constexpr, AXIS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program computes M rows of n columns; if RESIDENT (n <= J * T) it reads them once.

    scale: alpha - 1; scales [A, C]: alpha - 1 of each row, or None. EXACT: _MILD is not available.
    """
    a, b, column, alive = _place(A, C, M, J, T, AXIS, FLAT, WIDE)
    x = _at(x, a, b, sxa, sxc, AXIS)
    out = _at(out, a, b, soa, soc, AXIS)
    if POWER > 0:
        c: tl.constexpr = 1.0 / POWER
        _rows(x, out, column, alive, n, sxn, son, c, POWER * 1.0, POWER, RESIDENT, AXIS)
    elif POWER > -2:
        c = _spread(tl.full([M], scale, tl.float32), AXIS)
        _rows(x, out, column, alive, n, sxn, son, c, 1.0 / c, POWER, RESIDENT, AXIS)
    else:
        # The rows of a tile mostly share an alpha, so the cheapest form that is valid for all of them is used.
        c = tl.load(scales + a * C + b, mask=alive, other=float("inf"))
        least = tl.min(tl.ravel(c), 0)
        most = tl.max(tl.ravel(tl.where(alive, c, -float("inf"))), 0)
        c = tl.where(alive, c, least)
        if (least == 0.5) & (most == 0.5):
            _rows(x, out, column, alive, n, sxn, son, 0.5, 2.0, 2, RESIDENT, AXIS)
        elif (least == 1.0) & (most == 1.0):
            _rows(x, out, column, alive, n, sxn, son, 1.0, 1.0, 1, RESIDENT, AXIS)
        elif (least >= MILD_SCALE) & (not EXACT):
            if not EXACT:
                _rows(x, out, column, alive, n, sxn, son, c, 1.0 / c, -1, RESIDENT, AXIS)
        else:
            _rows(x, out, column, alive, n, sxn, son, c, 1.0 / c, 0, RESIDENT, AXIS)


@triton.jit
def _slopes(y, c, POWER: tl.constexpr, EXACT: tl.constexpr):
    """u = y^(2 - alpha) on the support, 0 outside; NaN for NaN."""
    if POWER == 1:
        return tl.where(y > 0, 1.0, y)
    elif POWER == 2:
        return tl.sqrt(y)
    elif POWER == 4:
        return tl.sqrt(y) * tl.sqrt(tl.sqrt(y))
    else:
        log_y = _log2(tl.where(y > 0, y, 1.0), EXACT)
        return tl.where(y > 0, tl.exp2(log_y * (1.0 - c)), y)


@triton.jit
def _load_pair(grad, y, column, keep, sgn, syn, POWER: tl.constexpr):
    g = tl.load(grad + column * sgn, mask=keep, other=0.0).to(tl.float32)
    p = tl.load(y + column * syn, mask=keep, other=0.0).to(tl.float32)
    if (
        POWER == 1
    ):  # outside of sparsemax's support the slope is zero, also for an infinite gradient
        g = tl.where(p == 0, 0.0, g)
    return g, p


@triton.jit
def _sum(x, AXIS: tl.constexpr):
    return _spread(tl.sum(tl.sum(x, 1), AXIS), AXIS)


@triton.jit
def _mean(total, weighted):
    return weighted / tl.where(total == 0, 1.0, total)


@triton.jit
def _alpha_terms(g, y, EXACT: tl.constexpr):
    """(g y, g y log y), the terms of a row's alpha gradient sum g y / c^2 - sum g y log y / c; g is given minus its
    mean under u."""
    gy = g * y
    return gy, gy * (_log2(tl.where(y > 0, y, 1.0), EXACT) * 0.6931471805599453)


@triton.jit(do_not_specialize=["A"])
def _backward_kernel(
    grad, y, dx, d_alpha, scales, n, A, C, scale,
    sga, sgc, sgn, sya, syc, syn, sda, sdc, sdn,
    POWER: tl.constexpr, RESIDENT: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr,
    M: tl.constexpr, J: tl.constexpr, T: tl.constexpr, AXIS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program computes M rows of n columns of dx = u (grad - sum(u grad) / sum u), and the elements of d_alpha [A, C]
    of these rows.

    It reads grad and y once if RESIDENT, else twice. dx or d_alpha may be None.
    """
    a, b, column, alive = _place(A, C, M, J, T, AXIS, FLAT, WIDE)
    grad = _at(grad, a, b, sga, sgc, AXIS)
    y = _at(y, a, b, sya, syc, AXIS)
    if dx is not None:
        dx = _at(dx, a, b, sda, sdc, AXIS)
    if POWER > 0:
        c: tl.constexpr = 1.0 / POWER
    elif scales is None:
        c = _spread(tl.full([M], scale, tl.float32), AXIS)
    else:
        c = tl.load(scales + a * C + b, mask=alive, other=1.0)
    if RESIDENT:
        keep = alive & (column < n)
        g, p = _load_pair(grad, y, column, keep, sgn, syn, POWER)
        u = _slopes(p, c, POWER, EXACT)
        g -= _mean(_sum(u, AXIS), _sum(u * g, AXIS))
        if dx is not None:
            tl.store(dx + column * sdn, (u * g).to(dx.dtype.element_ty), mask=keep)
        if d_alpha is not None:
            mass, entropy = _alpha_terms(g, p, EXACT)
            mass, entropy = _sum(mass, AXIS), _sum(entropy, AXIS)
    else:
        total = tl.zeros(column.shape, tl.float32) + 0.0 * alive
        weighted, mass, entropy = total, total, total
        for i in range(0, n, J * T):
            keep = alive & (i + column < n)
            g, p = _load_pair(grad, y, i + column, keep, sgn, syn, POWER)
            u = _slopes(p, c, POWER, EXACT)
            total += u
            weighted += u * g
        mean = _mean(_sum(total, AXIS), _sum(weighted, AXIS))
        for i in range(0, n, J * T):
            keep = alive & (i + column < n)
            g, p = _load_pair(grad, y, i + column, keep, sgn, syn, POWER)
            g -= mean
            if dx is not None:
                u = _slopes(p, c, POWER, EXACT)
                tl.store(dx + (i + column) * sdn, (u * g).to(dx.dtype.element_ty), mask=keep)
            if d_alpha is not None:
                m, h = _alpha_terms(g, p, EXACT)
                mass += m
                entropy += h
        mass, entropy = _sum(mass, AXIS), _sum(entropy, AXIS)
    if d_alpha is not None:
        gradient = mass / (c * c) - entropy / c
        tl.store(d_alpha + a * C + b, gradient, mask=alive)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of M rows by J * T columns, with J * M * T / (32 * warps) entries per thread; J columns form a class."""

    M: int
    J: int
    T: int
    warps: int
    axis: int = 1
    flat: bool = False
    resident: bool = True

    def programs(self, A: int, C: int) -> int:
        return triton.cdiv(A * C, self.M) if self.flat else A * triton.cdiv(C, self.M)


def _tile(n: int, C: int, stride: int, itemsize: int, held: int, resident: int) -> _Tile:
    """The tile for rows of n columns that are `stride` apart, with about `held` entries per thread.

    It has as few warps as can hold the row, because barriers cost more than additional entries per thread. A warp reads
    16 bytes per lane, and 128 bytes per row if it has several rows.
    """
    columns = triton.next_power_of_2(n)
    lanes = 16 // itemsize * 32
    if stride > 1 and C < 8 and columns <= 64:
        # Too few neighbouring rows for coalesced loads: each thread has a whole row, and its sectors stay in the cache.
        return _Tile(max(32, 1024 // columns), columns, 1, 1, flat=True)
    if stride > 1:
        # Neighbouring rows are adjacent in memory: a tile has 64 bytes of them.
        rows = min(triton.next_power_of_2(C), 64 // itemsize)
        if columns * rows > min(resident, 16384):
            return _Tile(rows, 16, 16, 8, 0, resident=False)
        warps = max(1, columns * rows // 2048)
        width = min(columns, max(2, 32 // rows) * warps)
        return _Tile(rows, columns // width, width, warps, 0)
    if columns > resident:
        # One program per SM, so that the rows being processed stay in the L2 cache.
        return _Tile(1, max(1, 16384 // (32 * lanes)), 32 * lanes, 32, resident=False)
    if columns >= 16 * held:
        warps = max(1, columns // (32 * held))
        width = min(columns, lanes * warps)
        return _Tile(1, columns // width, width, warps)
    rows = 16 * held // columns
    width = min(columns, lanes // min(rows, 4))
    return _Tile(rows, columns // width, width, 1, flat=True)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A launch without its tensors. order: the dimensions other than `dim` in the order of A * C."""

    grid: tuple[int]
    numbers: tuple[int | float, ...]
    constants: dict[str, int]
    warps: int
    order: list[int]


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    itemsize: int,
    exact: bool,
    alpha: float | None,
    dim: int,
    held: int,
    resident: int,
) -> _Plan | None:
    """The launch for rows of tensors with these strides; None if the strides are not supported.

    alpha: None if each row has its own. held: entries per thread, 32 if a power takes a logarithm.
    """
    layout = _layout(shape, strides, dim)
    if layout is None:
        return None
    A, C, groups, order = layout
    n = shape[dim]
    scale, power = (0.0, _BY_ROW) if alpha is None else (alpha - 1, _power(alpha, exact))
    tile = _tile(n, C, groups[1][2], itemsize, held if power > 0 else 32, resident)
    constants = {
        "POWER": power, "RESIDENT": tile.resident, "WIDE": any(n * g[2] >= 2**31 for g in groups),
        "FLAT": tile.flat, "M": tile.M, "J": tile.J, "T": tile.T, "AXIS": tile.axis, "EXACT": exact,
    }  # fmt: skip
    numbers = (n, A, C, scale, *(stride for group in groups for stride in group))
    return _Plan((tile.programs(A, C),), numbers, constants, tile.warps, order)


def applies(x: Tensor) -> bool:
    """Whether the kernels support x: not fp64, and not empty."""
    return x.dtype != torch.float64 and x.numel() > 0


def forward(
    x: Tensor,
    alpha: float | Tensor,
    dim: int,
    *,
    resident: int = _RESIDENT,
    run: Launcher = launch,
) -> Tensor:
    """Probabilities along `dim`, in the dtype and layout of x (fp32, fp16 or bf16, any strides); arithmetic is fp32.

    alpha: above 1; a number, or a tensor with the dimensions of x that broadcasts to it and has size 1 at `dim`.
    resident: the largest number of columns held in registers. run: launches the kernel.
    """
    out = torch.empty_like(x)
    number = None if isinstance(alpha, Tensor) else alpha
    strides = x.stride(), out.stride()
    plan = _plan(x.shape, strides, x.element_size(), _exact(x), number, dim, 64, resident)
    if plan is None:
        return out.copy_(forward(x.contiguous(), alpha, dim, resident=resident, run=run))
    scales = _scales(alpha, x, dim, plan.order) if isinstance(alpha, Tensor) else None
    args = (x, out, scales, *plan.numbers)
    run(_forward_kernel, plan.grid, args, plan.constants, plan.warps)
    return out


def backward(
    grad: Tensor,
    y: Tensor,
    alpha: float | Tensor,
    dim: int,
    needs: Sequence[bool],
    *,
    resident: int = _RESIDENT,
    run: Launcher = launch,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (if needs[0]) and of a tensor alpha (if needs[1]) from the probabilities y; None if not needed."""
    dx = torch.empty_like(y) if needs[0] else None
    number = None if isinstance(alpha, Tensor) else alpha
    strides = grad.stride(), y.stride(), (y if dx is None else dx).stride()
    # Two operands are held in registers, so each gets half.
    plan = _plan(y.shape, strides, y.element_size(), _exact(y), number, dim, 32, resident // 2)
    if plan is None:
        got, d_alpha = backward(
            grad.contiguous(), y.contiguous(), alpha, dim, needs, resident=resident, run=run
        )
        return None if dx is None or got is None else dx.copy_(got), d_alpha
    scales = per_row = None
    if isinstance(alpha, Tensor):
        scales = _scales(alpha, y, dim, plan.order)
        per_row = torch.empty_like(scales) if needs[1] else None
    args = (grad, y, dx, per_row, scales, *plan.numbers)
    run(_backward_kernel, plan.grid, args, plan.constants, plan.warps)
    if per_row is None or not isinstance(alpha, Tensor):
        return dx, None
    others = [i for i in range(y.dim()) if i != dim % y.dim()]
    back = per_row.permute([plan.order.index(i) for i in others]).unsqueeze(dim)
    return dx, back.sum_to_size(alpha.shape).to(alpha.dtype)


def _scales(alpha: Tensor, x: Tensor, dim: int, order: list[int]) -> Tensor:
    """alpha - 1 of each row, fp32, contiguous, with dimensions in the given order."""
    rows = list(x.shape)
    rows[dim] = 1
    scales = (alpha - 1).float().expand(rows).squeeze(dim)
    others = [i for i in range(x.dim()) if i != dim % x.dim()]
    return scales.permute([others.index(i) for i in order]).contiguous()


def _power(alpha: float, exact: bool) -> int:
    """The POWER for an alpha that is a number."""
    power = 1 / (alpha - 1)
    # Up to a power of 8, products are faster than a logarithm and an exponential.
    if 1 <= power < 8.5 and abs(power - round(power)) < 1e-9:
        return round(power)
    return _MILD if power <= 8 and not exact else _ANY


def _exact(x: Tensor) -> bool:
    """Whether logarithms are computed to fp32's accuracy: only NVIDIA GPUs have the approximate instruction."""
    return not x.is_cuda or torch.version.hip is not None


def _layout(
    shape: tuple[int, ...], strides: Sequence[tuple[int, ...]], dim: int
) -> tuple[int, int, list[tuple[int, int, int]], list[int]] | None:
    """(A, C, strides (a, c, column) of each tensor, the other dimensions in the order of A * C).

    The dimensions other than `dim` are merged into two, A and C, where C has the smaller strides; None if the strides
    do not allow it.
    """
    dim %= len(shape)
    order = [i for i in range(len(shape)) if i != dim]
    order.sort(key=lambda i: -strides[-1][i])
    groups: list[tuple[int, list[int]]] = []
    for i in order:
        size, steps = shape[i], [s[i] for s in strides]
        if size == 1:
            continue
        if groups and all(o == s * size for o, s in zip(groups[-1][1], steps)):
            groups[-1] = groups[-1][0] * size, steps
        else:
            groups.append((size, steps))
    if len(groups) > 2:
        return None
    zeros = [0] * len(strides)
    (A, sa), (C, sc) = [(1, zeros)] * (2 - len(groups)) + groups
    return A, C, [(a, c, s[dim]) for a, c, s in zip(sa, sc, strides)], order
