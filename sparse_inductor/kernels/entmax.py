"""Entmax over rows and its gradient (Peters et al. 2019, Eq. 10; Correia et al. 2019, Prop. 1 and 2).

With m the maximum of a row z and c = alpha - 1,

    p_i = y r_i^(1/c),    r_i = [1 - c (m - z_i) y^-c]_+,    y the largest probability, so that sum_i p_i = 1

y is found by Newton's iteration on what is in registers, starting from the y of the maxima of classes of columns: an
upper bound, as every class adds to the sum, and for alpha <= 2 the iteration descends from there to the root and
nowhere else. It ends where a step is below the resolution of fp32; what rounding y leaves is divided out.

A row of up to 32 768 columns is read once. Longer ones are read once for the maxima, once an iteration (one to
three) and once for the output; the programs that run together leave their rows in the L2 cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["applies", "backward", "forward"]

# Newton steps below this, relative to y, end the iteration: four roundings of fp32.
FINE = tl.constexpr(2.0**-22)
# Class maxima only give a bound, which every iterate is.
COARSE = tl.constexpr(2.0**-5)
# Three or four steps are usual; a bracket halves at least every second one, so this ends any row.
STEPS = tl.constexpr(64)
# Of a `POWER`: the exponent is not a small integer; or it is the row's, and looked at.
_ANY = 0
_BY_ROW = -1

# The most columns of a row that registers hold: 32 of them a thread at 1 024 threads.
_RESIDENT = 32768


@triton.jit
def _log1p(x, w, inverse):
    """log(1 + x) from w = 1 + x rounded and 1 / w: the logarithm of w, and what the rounding took from it."""
    return tl.log(w) + (x - (w - 1.0)) * inverse


@triton.jit
def _terms(d, e, p, POWER: tl.constexpr):
    """r^p and r^(p - 1) with r = [1 + d e]_+, d <= 0; NaN stays NaN."""
    if POWER == 0:
        x = d * e
        w = 1.0 + x
        inside = ~(w <= 0)
        w = tl.where(inside, w, 1.0)
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


@triton.jit
def _partial(d, e, p, POWER: tl.constexpr):
    """Sums over J of r^p, r^(p-1) and, where it is of use, the support's size: [M, T, 2, 2], or [M, T, 2]."""
    top, slope = _terms(d, e, p, POWER)
    s, s1 = tl.sum(top, 1), tl.sum(slope, 1)
    if POWER == 2:
        k = tl.sum(tl.where(slope > 0, 1.0, 0.0), 1)
        return tl.join(tl.join(s, s1), tl.join(k, k))
    else:
        return tl.join(s, s1)


@triton.jit
def _total(part, POWER: tl.constexpr):
    """The sums of `_partial` over T, [M, 1, 1] each: one reduction across the program for all of them."""
    part = tl.sum(part, 1)
    if POWER == 2:
        part, ks = tl.split(part)
        k, _same = tl.split(ks)
        s, s1 = tl.split(part)
    else:
        s, s1 = tl.split(part)
        k = s1
    return s[:, None, None], s1[:, None, None], k[:, None, None]


@triton.jit
def _next(y, s, s1, k, lo, hi, last, before, c, p, fine, POWER: tl.constexpr):
    """One step from y, where the sums are s, s1 and k: the next y, whether it differs, the bracket, step lengths."""
    excess = y * s - 1.0
    if POWER == 1:
        # The exact root if the support stays what it is, and never below the root if it does not.
        guess = y - excess / s1
        moved = y - guess > y * fine
    else:
        hi = tl.where(excess >= 0, y, hi)
        lo = tl.where(excess <= 0, y, lo)
        if POWER == 2:
            # The exact root if the support stays: sum (t r - delta)^2 = 1 over the k entries, t = sqrt(y).
            t = tl.sqrt(y)
            s1 *= t
            t -= excess / (s1 + tl.sqrt(tl.maximum(s1 * s1 - k * excess, 0.0)))
            guess = t * t
            guarded = excess == excess
            moved = tl.abs(guess - y) > y * fine
        else:
            # Newton's step for t = y^c, -tau, and the p-norm of [t r]: straight where all scores are alike.
            log_norm = tl.log(y * s) * c
            small = log_norm * (1.0 - log_norm * (0.5 - log_norm * 0.16666667))
            away = tl.where(tl.abs(log_norm) < 0.01, small, 1.0 - tl.exp(-log_norm)) * (s / s1)
            left = 1.0 - away
            guess = y * tl.exp(_log1p(-away, left, 1.0 / left) * p)
            # Above alpha 2 slopes may be infinite where an entry enters: a short step says nothing there.
            guarded = c > 1
            guess = tl.where(guarded, y - excess / s1, guess)
            moved = tl.where(guarded, tl.abs(excess) > fine, y - guess > y * fine)
        moved = moved & ((hi - lo > hi * fine) | ~guarded)
        # A step out of the bracket, or not half of the one before the last, is a bisection instead.
        sound = (guess > lo) & (guess < hi) & (tl.abs(guess - y) <= 0.5 * before)
        guess = tl.where(guarded & ~sound, 0.5 * (lo + hi), guess)
        before = last
        last = tl.abs(guess - y)
    return tl.where(moved, guess, y), moved, lo, hi, last, before


@triton.jit
def _solve(d, y, floor, c, p, fine, POWER: tl.constexpr):
    """(y, sum r^p at that y), [M, 1, 1], for the scores d = c (z - m) [M, J, T], from a y that is not too small."""
    lo, hi = floor + 0.0 * y, 1.0 + 0.0 * y
    last, before = hi, hi
    s = 0.0 * y
    steps = 0
    go = 1
    while go > 0:
        s, s1, k = _total(_partial(d, _scale(y, c, POWER), p, POWER), POWER)
        following, moved, lo, hi, last, before = _next(
            y, s, s1, k, lo, hi, last, before, c, p, fine, POWER
        )
        steps += 1
        go = tl.where(steps < STEPS, tl.max(tl.ravel(moved.to(tl.int32)), 0), 0)
        # s belongs to y: the last step is not taken.
        y = tl.where(go > 0, following, y)
    return y, s


@triton.jit
def _load(x, column, keep, stride):
    return tl.load(x + column * stride, mask=keep, other=-float("inf")).to(tl.float32)


@triton.jit
def _shift(classes):
    """[M, 1, 1] maxima of [M, J, T]; 0 for a row of -inf, which then stays one."""
    peak = tl.max(tl.max(classes, 1), 1)[:, None, None]
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _resident(x, out, column, keep, sxn, son, floor, c, p, POWER: tl.constexpr):
    """Rows that fit the registers: scores are held from the one read on."""
    z = _load(x, column, keep, sxn)
    d = (z - _shift(z)) * c
    y = tl.full([d.shape[0], 1, 1], 1.0, tl.float32)
    if d.shape[1] > 1:
        y, _coarse = _solve(tl.max(d, 1)[:, None, :], y, floor, c, p, COARSE, POWER)
    y, s = _solve(d, y, floor, c, p, FINE, POWER)
    top, _slope = _terms(d, _scale(y, c, POWER), p, POWER)
    top *= 1.0 / tl.where(s == 0, 1.0, s)
    tl.store(out + column * son, top.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _streamed(x, out, column, alive, n, sxn, son, floor, c, p, POWER: tl.constexpr):
    """Rows that do not: read again, from the L2 cache where they fit it, for each of a few iterations."""
    M: tl.constexpr = alive.shape[0]
    T: tl.constexpr = column.shape[2]
    classes = tl.full([M, 1, T], -float("inf"), tl.float32)
    for i in range(0, n, T):
        classes = tl.maximum(classes, _load(x, i + column, alive & (i + column < n), sxn))
    shift = _shift(classes)
    y = tl.full([M, 1, 1], 1.0, tl.float32)
    y, _coarse = _solve((classes - shift) * c, y, floor, c, p, COARSE, POWER)
    lo, hi = floor + 0.0 * y, 1.0 + 0.0 * y
    last, before = hi, hi
    s = 0.0 * y
    steps = 0
    go = 1
    while go > 0:
        e = _scale(y, c, POWER)
        if POWER == 2:
            part = tl.zeros([M, T, 2, 2], tl.float32)
        else:
            part = tl.zeros([M, T, 2], tl.float32)
        for i in range(0, n, T):
            z = _load(x, i + column, alive & (i + column < n), sxn)
            part += _partial((z - shift) * c, e, p, POWER)
        s, s1, k = _total(part, POWER)
        following, moved, lo, hi, last, before = _next(
            y, s, s1, k, lo, hi, last, before, c, p, FINE, POWER
        )
        steps += 1
        go = tl.where(steps < STEPS, tl.max(tl.ravel(moved.to(tl.int32)), 0), 0)
        y = tl.where(go > 0, following, y)
    e = _scale(y, c, POWER)
    inverse = 1.0 / tl.where(s == 0, 1.0, s)
    for i in range(0, n, T):
        keep = alive & (i + column < n)
        top, _slope = _terms((_load(x, i + column, keep, sxn) - shift) * c, e, p, POWER)
        tl.store(out + (i + column) * son, (top * inverse).to(out.dtype.element_ty), mask=keep)


@triton.jit
def _rows(x, out, column, alive, n, sxn, son, c, p, POWER: tl.constexpr, RESIDENT: tl.constexpr):
    if RESIDENT:
        _resident(x, out, column, alive & (column < n), sxn, son, 1.0 / n, c, p, POWER)
    else:
        _streamed(x, out, column, alive, n, sxn, son, 1.0 / n, c, p, POWER)


@triton.jit
def _forward_kernel(
    x, out, scales, n, C, scale,
    sxa, sxc, sxn, soa, soc, son,
    POWER: tl.constexpr, RESIDENT: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, J: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A program owns M rows (a, c0 .. c0 + M) of n columns; it writes them once and reads them once if RESIDENT,
    when n <= J * T. `scale` is alpha - 1, or `scales` [A, C] have it for each row.
    """
    a = (tl.program_id(0) // tl.cdiv(C, M)).to(tl.int64)
    row = (tl.program_id(0) % tl.cdiv(C, M)) * M + tl.arange(0, M)[:, None, None]
    alive = row < C
    column = tl.arange(0, J)[None, :, None] * T + tl.arange(0, T)[None, None, :]
    if WIDE:
        column = column.to(tl.int64)
    x += a * sxa + row.to(tl.int64) * sxc
    out += a * soa + row.to(tl.int64) * soc
    if POWER > 0:
        c: tl.constexpr = 1.0 / POWER
        _rows(x, out, column, alive, n, sxn, son, c, POWER * 1.0, POWER, RESIDENT)
    elif POWER == 0:
        if scales is None:
            c = tl.full([M, 1, 1], scale, tl.float32)
        else:
            c = tl.load(scales + a * C + row, mask=alive, other=1.0)
        _rows(x, out, column, alive, n, sxn, son, c, 1.0 / c, 0, RESIDENT)
    else:  # one row a program: its own alpha picks the cheapest form
        c = tl.load(scales + tl.program_id(0))
        if c == 0.5:
            _rows(x, out, column, alive, n, sxn, son, 0.5, 2.0, 2, RESIDENT)
        elif c == 1.0:
            _rows(x, out, column, alive, n, sxn, son, 1.0, 1.0, 1, RESIDENT)
        else:
            own = tl.full([M, 1, 1], c, tl.float32)
            _rows(x, out, column, alive, n, sxn, son, own, 1.0 / own, 0, RESIDENT)


@triton.jit
def _slopes(y, c, POWER: tl.constexpr):
    """u = y^(2 - alpha) on the support, 0 outside; NaN for NaN."""
    if POWER == 1:
        return tl.where(y > 0, 1.0, y)
    elif POWER == 2:
        return tl.sqrt(y)
    elif POWER == 4:
        return tl.sqrt(y) * tl.sqrt(tl.sqrt(y))
    else:
        return tl.where(y > 0, tl.exp(tl.log(tl.where(y > 0, y, 1.0)) * (1.0 - c)), y)


@triton.jit
def _load_pair(grad, y, column, keep, sgn, syn):
    g = tl.load(grad + column * sgn, mask=keep, other=0.0).to(tl.float32)
    return g, tl.load(y + column * syn, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 1)[:, None, None]


@triton.jit
def _mean(total, weighted):
    return weighted / tl.where(total == 0, 1.0, total)


@triton.jit
def _alpha_terms(g, y):
    """What the row's alpha gradient sums up: sum g y / c^2 - sum g y log y / c, for g less its mean under u."""
    gy = g * y
    return gy, gy * tl.log(tl.where(y > 0, y, 1.0))


@triton.jit
def _backward_kernel(
    grad, y, dx, d_alpha, scales, n, C, scale,
    sga, sgc, sgn, sya, syc, syn, sda, sdc, sdn,
    POWER: tl.constexpr, RESIDENT: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, J: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A program owns the rows of `_forward_kernel`: dx = u (grad - sum(u grad) / sum u), and d_alpha [A, C].

    It reads grad and y once if RESIDENT, else twice, and writes dx once; dx or d_alpha may be None.
    """
    a = (tl.program_id(0) // tl.cdiv(C, M)).to(tl.int64)
    row = (tl.program_id(0) % tl.cdiv(C, M)) * M + tl.arange(0, M)[:, None, None]
    alive = row < C
    column = tl.arange(0, J)[None, :, None] * T + tl.arange(0, T)[None, None, :]
    if WIDE:
        column = column.to(tl.int64)
    grad += a * sga + row.to(tl.int64) * sgc
    y += a * sya + row.to(tl.int64) * syc
    if dx is not None:
        dx += a * sda + row.to(tl.int64) * sdc
    if POWER > 0:
        c: tl.constexpr = 1.0 / POWER
    elif scales is None:
        c = tl.full([M, 1, 1], scale, tl.float32)
    else:
        c = tl.load(scales + a * C + row, mask=alive, other=1.0)
    if RESIDENT:
        keep = alive & (column < n)
        g, p = _load_pair(grad, y, column, keep, sgn, syn)
        u = _slopes(p, c, POWER)
        g -= _mean(_sum(u), _sum(u * g))
        if dx is not None:
            tl.store(dx + column * sdn, (u * g).to(dx.dtype.element_ty), mask=keep)
        if d_alpha is not None:
            mass, entropy = _alpha_terms(g, p)
            mass, entropy = _sum(mass), _sum(entropy)
    else:
        total = tl.zeros([M, J, T], tl.float32)
        weighted, mass, entropy = total, total, total
        for i in range(0, n, J * T):
            g, p = _load_pair(grad, y, i + column, alive & (i + column < n), sgn, syn)
            u = _slopes(p, c, POWER)
            total += u
            weighted += u * g
        mean = _mean(_sum(total), _sum(weighted))
        for i in range(0, n, J * T):
            keep = alive & (i + column < n)
            g, p = _load_pair(grad, y, i + column, keep, sgn, syn)
            g -= mean
            if dx is not None:
                u = _slopes(p, c, POWER)
                tl.store(dx + (i + column) * sdn, (u * g).to(dx.dtype.element_ty), mask=keep)
            if d_alpha is not None:
                m, h = _alpha_terms(g, p)
                mass += m
                entropy += h
        mass, entropy = _sum(mass), _sum(entropy)
    if d_alpha is not None:
        gradient = mass / (c * c) - entropy / c
        tl.store(d_alpha + a * C + row, gradient, mask=alive)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """M rows by J * T columns; the maximum over J is a class, and no thread shares its J with another."""

    M: int
    J: int
    T: int
    warps: int
    resident: bool


def _tile(n: int, C: int, column_stride: int, resident: int) -> _Tile:
    columns = triton.next_power_of_2(n)
    if column_stride == 1 or C == 1:
        if columns <= 1024:
            # Several rows a program: 16 elements a thread of 4 warps.
            rows = min(2048 // columns, triton.next_power_of_2(C)) or 1
            return _Tile(rows, 1, columns, 4, True)
        # One row: 16 elements a thread, 32 where that would take more than 32 warps; 16-byte accesses of fp32.
        warps = min(32, columns // 512)
        width = 128 * warps
        if columns <= resident:
            return _Tile(1, columns // width, width, warps, True)
        return _Tile(1, 1, 4096, 16, False)
    # Neighbouring rows are what is contiguous: enough of them for a 32-byte sector or four.
    rows = min(32, triton.next_power_of_2(C))
    if columns * rows <= resident:
        classes = max(1, columns // 16)
        return _Tile(
            rows, columns // classes, classes, min(16, max(4, columns * rows // 512)), True
        )
    return _Tile(rows, 1, max(1, 4096 // rows), 8, False)


def applies(x: Tensor) -> bool:
    """Whether the kernels take the rows of x: anything on a GPU but fp64 and nothing at all."""
    return x.is_cuda and x.dtype != torch.float64 and x.numel() > 0


def forward(x: Tensor, alpha: float | Tensor, dim: int, *, resident: int = _RESIDENT) -> Tensor:
    """Probabilities along `dim`, in the dtype and layout of x (fp32, fp16 or bf16, any strides); arithmetic is fp32.

    alpha: above 1; a number, or a tensor with the dimensions of x that broadcasts to it and has size 1 at `dim`.
    resident: the most columns held in registers.
    """
    out = torch.empty_like(x)
    rows = _layout([x, out], dim)
    if rows is None:
        out.copy_(forward(x.contiguous(), alpha, dim, resident=resident))
        return out
    A, C, (sx, so), order = rows
    n = x.shape[dim]
    tile = _tile(n, C, sx[2], resident)
    scales, scale, power = _alpha(alpha, x, dim, order, tile)
    with torch.cuda.device_of(x):
        _forward_kernel[(A * triton.cdiv(C, tile.M),)](
            x, out, scales, n, C, scale, *sx, *so,
            POWER=power, RESIDENT=tile.resident, WIDE=_wide(n, sx, so),
            M=tile.M, J=tile.J, T=tile.T, num_warps=tile.warps,
        )  # fmt: skip
    return out


def backward(
    grad: Tensor,
    y: Tensor,
    alpha: float | Tensor,
    dim: int,
    needs: Sequence[bool],
    *,
    resident: int = _RESIDENT,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x, as `needs[0]`, and of a tensor alpha, as `needs[1]`, from the probabilities y."""
    dx = torch.empty_like(y) if needs[0] else None
    rows = _layout([grad, y, y if dx is None else dx], dim)
    if rows is None:
        got, d_alpha = backward(
            grad.contiguous(), y.contiguous(), alpha, dim, needs, resident=resident
        )
        return None if dx is None or got is None else dx.copy_(got), d_alpha
    A, C, (sg, sy, sd), order = rows
    n = y.shape[dim]
    tile = _tile(n, C, sy[2], resident)
    # Two operands are held, so half the columns.
    if tile.resident and tile.M == 1 and 2 * n > resident:
        tile = _tile(resident + 1, C, sy[2], resident)
    scales, scale, power = _alpha(alpha, y, dim, order, None)
    per_row = None
    if needs[1] and isinstance(alpha, Tensor):
        per_row = torch.empty(A * C, device=y.device, dtype=torch.float32)
    with torch.cuda.device_of(y):
        _backward_kernel[(A * triton.cdiv(C, tile.M),)](
            grad, y, dx, per_row, scales, n, C, scale, *sg, *sy, *sd,
            POWER=power, RESIDENT=tile.resident, WIDE=_wide(n, sg, sy, sd),
            M=tile.M, J=tile.J, T=tile.T, num_warps=tile.warps,
        )  # fmt: skip
    if per_row is None or not isinstance(alpha, Tensor):
        return dx, None
    others = [i for i in range(y.dim()) if i != dim % y.dim()]
    sizes = [y.shape[i] for i in order]
    back = per_row.view(sizes).permute([order.index(i) for i in others]).unsqueeze(dim)
    return dx, back.sum_to_size(alpha.shape).to(alpha.dtype)


def _alpha(
    alpha: float | Tensor, x: Tensor, dim: int, order: list[int], tile: _Tile | None
) -> tuple[Tensor | None, float, int]:
    """(alpha - 1 of each row or None, alpha - 1 of all, POWER)."""
    if isinstance(alpha, Tensor):
        rows = list(x.shape)
        rows[dim] = 1
        scales = (alpha - 1).float().expand(rows).squeeze(dim)
        others = [i for i in range(x.dim()) if i != dim % x.dim()]
        scales = scales.permute([others.index(i) for i in order]).contiguous()
        return scales, 0.0, _BY_ROW if tile is not None and tile.M == 1 else _ANY
    power = 1 / (alpha - 1)
    # Products are cheaper than a logarithm and an exponential up to here.
    whole = power == round(power) and power <= 8
    return None, alpha - 1, round(power) if whole else _ANY


def _wide(n: int, *strides: Sequence[int]) -> bool:
    return any(n * s[2] >= 2**31 for s in strides)


def _layout(
    tensors: list[Tensor], dim: int
) -> tuple[int, int, list[tuple[int, int, int]], list[int]] | None:
    """(A, C, strides (a, c, column) of each tensor, the other dimensions in the order of A * C).

    The dimensions but `dim` as two, the inner one the finer; None where the strides do not allow it.
    """
    first = tensors[0]
    dim %= first.dim()
    order = [i for i in range(first.dim()) if i != dim]
    order.sort(key=lambda i: [-t.stride(i) for t in tensors[-1:]])
    groups: list[tuple[int, list[int]]] = []
    for i in order:
        size, strides = first.shape[i], [t.stride(i) for t in tensors]
        if size == 1:
            continue
        if groups and all(o == s * size for o, s in zip(groups[-1][1], strides)):
            groups[-1] = groups[-1][0] * size, strides
        else:
            groups.append((size, strides))
    if len(groups) > 2:
        return None
    zeros = [0] * len(tensors)
    (A, sa), (C, sc) = [(1, zeros)] * (2 - len(groups)) + groups
    return A, C, [(a, c, t.stride(dim)) for a, c, t in zip(sa, sc, tensors)], order
