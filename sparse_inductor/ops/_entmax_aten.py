"""Entmax in chunked ATen, exact for every input: the CPU path, and the path for fp64 on a GPU.

With the scores z of a row, their maximum m and c = alpha - 1 (Peters et al. 2019, Eq. 10)

    p_i = [c z_i - tau]_+^(1/c) = y [1 - c (m - z_i) / y^c]_+^(1/c),     tau = c m - y^c

where y is the largest probability, the root of F(y) = sum_i p_i - 1 in [1/n, 1]. F rises with a slope of at least 1,
and for alpha <= 2 it is convex, so Newton's iteration from any upper bound of y descends to the root. The initial bound
is the solution y for a subset of the row, the maxima of 32 classes of columns: with fewer entries each gets a larger
share, so this y is an upper bound. For alpha > 2 slopes are infinite where an entry enters the support, so a bracket
guards the iteration and it runs in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..aten import compute_dtype

# Entries of a chunk: its two fp32 buffers take about a core's share of the outer caches.
_CPU_CHUNK = 1 << 18
# On a GPU the chunk size only bounds the workspace: two buffers of 512 MiB in fp64.
_GPU_CHUNK = 1 << 26
# The largest number of columns for which sums over rows on a CPU are faster in column-major order: 1.9 times as fast at
# 8 columns, 1.3 at 16, no gain at 32.
_NARROW = 16
# The number of column classes; their maxima give the initial bound. Rows with fewer than four columns per class start
# from y = 1.
_CLASSES = 32
# A Newton step this small relative to y is below the resolution of fp32 (fp64).
_EPS = {torch.float32: 2.0**-22, torch.float64: 2.0**-50}
# exp2 takes a quarter of the time of exp, so exponents are scaled by log2(e).
_LOG2_E = 1.4426950408889634
# Maximum steps of the unguarded iteration. All rows observed needed 3 to 8; rows that need more use the guarded one.
_FAST_STEPS = 16
# Maximum steps of the guarded iteration: every second one at least halves the bracket, which has a resolution of 2^-52.
_GUARDED_STEPS = 120

Alpha: TypeAlias = float | Tensor


def chunk_size(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def forward(x: Tensor, alpha: Alpha, dim: int, undefined: str = "") -> Tensor:
    """Probabilities along `dim`, in the dtype and layout of x; alpha a float or [.., 1 at dim, ..]."""
    out = torch.empty_like(x)
    dt = compute_dtype(x)
    rows = [x.movedim(dim, -1), out.movedim(dim, -1)]
    if isinstance(alpha, Tensor):
        rows.append(alpha.movedim(dim, -1).to(dt))
    for x_, out_, *alpha_ in _chunks(rows, chunk_size(x.device)):
        z = _scores(x_, dt)
        solve_(z, alpha_[0] if alpha_ else alpha, undefined)
        out_.copy_(z)
    return out


def _scores(x: Tensor, dt: torch.dtype) -> Tensor:
    """A copy of x to be solved in place. Narrow rows on a CPU are column-major, so that sums over rows vectorize over
    many rows."""
    if x.is_cpu and x.shape[-1] <= _NARROW:
        columns = x.movedim(-1, 0).to(dt, memory_format=torch.contiguous_format, copy=True)
        return columns.movedim(0, -1)
    return torch.empty(x.shape, dtype=dt, device=x.device).copy_(x)


def backward(
    grad: Tensor, y: Tensor, alpha: Alpha, dim: int, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and alpha from the probabilities y alone (Correia et al. 2019, Prop. 1 and 2)."""
    dt = compute_dtype(y)
    dx = torch.empty_like(y) if needs[0] else None
    rows = [grad.movedim(dim, -1), y.movedim(dim, -1)]
    if dx is not None:
        rows.append(dx.movedim(dim, -1))
    d_alpha = None
    if isinstance(alpha, Tensor):
        if needs[1]:
            d_alpha = torch.zeros(y.movedim(dim, -1).shape[:-1] + (1,), dtype=dt, device=y.device)
            rows.append(d_alpha)
        rows.append(alpha.movedim(dim, -1).to(dt))
    for grad_, y_, *rest in _chunks(rows, chunk_size(y.device)):
        a = rest.pop() if isinstance(alpha, Tensor) else alpha
        g, p = grad_.to(dt), y_.to(dt)
        u = slopes(p, a)
        if d_alpha is not None:
            rest.pop().copy_(alpha_gradient(g, p, u, a))
        if dx is not None:
            rest.pop().copy_(score_gradient_(g.clone() if g is grad_ else g, u, a))
    if d_alpha is not None and isinstance(alpha, Tensor):
        d_alpha = d_alpha.movedim(-1, dim).sum_to_size(alpha.shape).to(alpha.dtype)
    return dx, d_alpha


def slopes(p: Tensor, alpha: Alpha) -> Tensor:
    """u_i = p_i^(2 - alpha) on the support, 0 outside: the Jacobian is diag(u) - u u^T / sum u."""
    if isinstance(alpha, float) and alpha == 1.5:
        return p.sqrt()
    if isinstance(alpha, float) and alpha == 2.0:
        return p.sign().add_(p, alpha=0.0)  # NaN for NaN, whose sign is 0
    return torch.where(p == 0, 0.0, p.pow(2 - alpha))


def score_gradient_(g: Tensor, u: Tensor, alpha: Alpha) -> Tensor:
    """u (g - sum(u g) / sum u), written over g; rows of zeros get zeros."""
    # Sparsemax selects: entries with probability 0 take no part in the gradient, even in a row with NaN.
    dropped = u == 0 if not isinstance(alpha, Tensor) and alpha == 2.0 else None
    if dropped is not None:
        g.masked_fill_(dropped, 0)
    total = u.sum(-1, keepdim=True)
    mean = torch.linalg.vecdot(u, g).unsqueeze(-1).div_(total.masked_fill_(total == 0, 1))
    g.sub_(mean).mul_(u)
    return g if dropped is None else g.masked_fill_(dropped, 0)


def alpha_gradient(g: Tensor, p: Tensor, u: Tensor, alpha: Alpha) -> Tensor:
    """sum_i g_i dp_i / dalpha, [..., 1]."""
    total = u.sum(-1, keepdim=True)
    gap = g - torch.linalg.vecdot(u, g).unsqueeze(-1).div_(total.masked_fill_(total == 0, 1))
    # dp/dalpha sums to 0 over a row, so g may be shifted by any constant; with its mean under u the terms in u cancel.
    by_entropy = torch.linalg.vecdot(gap, torch.xlogy(p, p)).unsqueeze(-1)
    by_mass = torch.linalg.vecdot(gap, p).unsqueeze(-1)
    c = alpha - 1
    return by_mass / c**2 - by_entropy / c


def refuse(what: str) -> None:
    """Raises the error of PyTorch for a threshold lookup in a row where no score exceeds its threshold."""
    raise RuntimeError(f"index -1 is out of bounds: {what}")


def check_not_empty(size: int, undefined: str) -> None:
    """Raises the error of PyTorch for a row without scores, if the operator replaces a program (`undefined` is set)."""
    if undefined and size == 0:
        raise IndexError("max(): Expected reduction dim to have non-zero size: a row has no scores")


def _has_no_threshold(peak: Tensor, alpha: Alpha, undefined: str) -> Tensor:
    """Mask of the rows for which the replaced program finds no threshold. peak: their largest scores [..., 1]."""
    if not undefined.endswith("absorbed"):
        return ~peak.isfinite()
    top = peak * (alpha - 1)
    return (top - 1 == top) | ~top.isfinite()


def solve_(z: Tensor, alpha: Alpha, undefined: str = "") -> Tensor:
    """Turns scores z [..., n] into probabilities, in place; returns y [..., 1], the largest probability of each row.

    z is dense; y has `y_dtype`. A row of -inf becomes zeros (y = 1), a row with NaN or +inf becomes NaN, unless
    `undefined` (`ops.entmax`) says otherwise.
    """
    classes = _class_maxima(z)
    peak = z.amax(-1, keepdim=True) if classes is None else classes.amax(-1, keepdim=True)
    none = None
    if undefined.startswith("nan"):
        none = _has_no_threshold(peak, alpha, undefined)
        peak.masked_fill_(none, torch.nan)
    elif undefined and z.is_cpu and bool(_has_no_threshold(peak, alpha, undefined).any()):
        refuse("no score of a row exceeds its threshold")
    peak.masked_fill_(peak == -torch.inf, 0)
    z.sub_(peak)
    if classes is not None:
        classes.sub_(peak)
    y = _solved_(z, alpha, classes)
    return y if none is None else y.masked_fill_(none, torch.nan)


def _solved_(z: Tensor, alpha: Alpha, classes: Tensor | None) -> Tensor:
    """`solve_` for scores minus their maximum. classes: the class maxima of these scores, or None."""
    shared = _shared(alpha)
    if shared is not None:
        alpha = shared
    power = _power(alpha)
    if power is None or _capturing(z):
        return _general_(z, alpha, classes)
    c = 1 / power
    t = torch.ones_like(z[..., :1])
    if classes is not None:
        t, _ = _newton(classes.mul_(c), power, t)
    t, done = _newton(z.mul_(c), power, t)
    if not done:
        return _general_(z.mul_(power), alpha, None)
    _normalise_(_raise_(z.add_(t).relu_(), power))
    return t**power


def recall_(z: Tensor, y: Tensor, alpha: Alpha) -> None:
    """Recompute the probabilities of `solve_` from the same scores and the y it returned, which must not be rounded if
    its `y_dtype` is fp64."""
    peak = z.amax(-1, keepdim=True)
    peak.masked_fill_(peak == -torch.inf, 0)
    z.sub_(peak.masked_fill_(y.isnan(), torch.nan))
    shared = _shared(alpha)
    a = alpha if shared is None else shared
    power = _power(a)
    if power is not None:
        p = _raise_(z.mul_(1 / power).add_(y.to(z.dtype).pow(1 / power)).relu_(), power)
    else:
        y = y.to(y_dtype(z.dtype, a))
        p = _power_of_one_and(_less_one(z.to(y.dtype) * (a - 1), y, a - 1), 1 / (a - 1))
    _normalise_(p)
    if p is not z:
        z.copy_(p)


def y_dtype(dt: torch.dtype, alpha: Alpha) -> torch.dtype:
    """The dtype of y: fp64 for alpha > 2, where slopes are infinite at the edge of the support and fp32 would lose half
    of the digits."""
    return torch.float64 if isinstance(alpha, Tensor) or alpha > 2 else dt


def _shared(alpha: Alpha) -> float | None:
    """The common alpha of all rows, or None if they differ or if finding out would wait for a device."""
    if not isinstance(alpha, Tensor):
        return alpha
    if alpha.is_cpu and alpha.numel():
        first = alpha.flatten()[0]
        if bool((alpha == first).all()):
            return float(first)
    return None


def _class_maxima(z: Tensor) -> Tensor | None:
    """[..., 32] maxima over a partition of the columns into classes; None for short rows."""
    n = z.shape[-1]
    if n < 4 * _CLASSES:
        return None
    whole = n - n % _CLASSES
    classes = z[..., :whole].unflatten(-1, (-1, _CLASSES)).amax(-2)
    if whole < n:
        tail = classes[..., : n - whole]
        torch.maximum(tail, z[..., whole:], out=tail)
    return classes


def _power(alpha: Alpha) -> int | None:
    """1 / (alpha - 1) if it is an integer up to 8, else None. Products for such powers are more accurate and cheaper
    than logarithms."""
    if isinstance(alpha, Tensor):
        return None
    power = 1 / (alpha - 1)
    return round(power) if 1 <= power < 8.5 and abs(power - round(power)) < 1e-9 else None


def _raise_(u: Tensor, power: int) -> Tensor:
    return u if power == 1 else u.square_() if power == 2 else u.pow_(power)


def _newton(s: Tensor, power: int, t: Tensor) -> tuple[Tensor, bool]:
    """t = y^(1 / power) [..., 1] of shifted and scaled scores s = c (z - m), from an upper bound t.

    Newton's iteration on the p-norm of [s + t]_+, which is convex as its p-th power is, and linear if all scores are
    equal. The second value says whether every row converged.
    """
    eps = _EPS[s.dtype] / power
    u = torch.empty_like(s)
    for _ in range(_FAST_STEPS):
        torch.add(s, t, out=u).relu_()
        if power == 1:
            step = (u.sum(-1, keepdim=True) - 1) / u.sign().sum(-1, keepdim=True)
        else:
            if power == 2:
                slope = u.sum(-1, keepdim=True)
                norm = (
                    torch.linalg.vector_norm(u, 2, -1, True)
                    if u.stride(-1) == 1
                    else u.square_().sum(-1, keepdim=True).sqrt_()
                )
            else:
                lower = u.pow(power - 1)
                slope = lower.sum(-1, keepdim=True)
                norm = lower.mul_(u).sum(-1, keepdim=True).pow_(1 / power)
            step = (norm - 1) * norm.pow(power - 1) / slope
        moved = step > eps * t
        t = torch.where(moved, t - step, t)
        if not bool(moved.any()):
            return t, True
    return t, False


def _general_(z: Tensor, alpha: Alpha, classes: Tensor | None) -> Tensor:
    """`solve_` for shifted scores z - m and their class maxima, for any alpha."""
    a = alpha.to(y_dtype(z.dtype, alpha)) if isinstance(alpha, Tensor) else alpha
    y = torch.ones(z.shape[:-1] + (1,), dtype=y_dtype(z.dtype, alpha), device=z.device)
    n = z.shape[-1]
    if classes is not None:
        y = _guarded(classes.to(y.dtype).mul_(a - 1), a, y, n)
    gap = z.to(y.dtype) * (a - 1)
    y = _guarded(gap, a, y, n)
    _normalise_(_power_of_one_and(_less_one(gap, y, a - 1, out=gap), 1 / (a - 1)))
    z.copy_(gap)
    return y


def _guarded(gap: Tensor, a: Alpha, y: Tensor, n: int) -> Tensor:
    """y [..., 1] of gap = -c (m - z), from an upper bound: Newton's iteration inside a bracket.

    For alpha <= 2 this is the iteration of `_newton` in the logarithm of y, for alpha > 2 Newton's iteration on F.
    """
    # `new_full` fills on the device; a copy from the host could not be captured in a CUDA graph.
    c = a - 1 if isinstance(a, Tensor) else y.new_full((), a - 1)
    p = 1 / c
    steep = c > 1
    eps, tiny = _EPS[y.dtype], torch.finfo(y.dtype).tiny
    hi = torch.ones_like(y)
    lo = torch.full_like(y, 1 / n)
    last = before_last = torch.full_like(y, torch.inf)
    for i in range(_GUARDED_STEPS):
        less = _less_one(gap, y, c)
        r = (less + 1).clamp_min_(tiny)
        top = _power_of_one_and(less, p)
        s = top.sum(-1, keepdim=True)
        s1 = top.div_(r).sum(-1, keepdim=True)
        excess = y * s - 1
        hi = torch.where(excess >= 0, y, hi)
        lo = torch.where(excess <= 0, y, lo)
        away = -torch.expm1(-c * (y * s).log()) * s / s1
        guess = torch.where(steep, y - excess / s1, y * (p * torch.log1p(-away)).exp())
        # An iteration from above the root has converged once a step changes sign; after a bisection it may come from
        # below, so the size of the step is compared. If slopes may be infinite, a short step does not imply
        # convergence, so the excess is compared.
        step = y - guess if i < _FAST_STEPS else (y - guess).abs() - 3 * eps * y
        far = torch.where(steep, excess.abs() > eps, step > eps * y)
        open_ = far & (hi - lo > eps * hi)
        if not _capturing(y) and not bool(open_.any()):
            break
        # A step out of the bracket, or longer than half of the step before the last, is replaced by a bisection.
        sound = (guess > lo) & (guess < hi) & ((guess - y).abs() <= 0.5 * before_last)
        if i < _FAST_STEPS:
            sound |= ~steep
        guess = torch.where(sound, guess, 0.5 * (lo + hi))
        last, before_last = (guess - y).abs(), last
        y = torch.where(open_, guess, y)
    return y


def _less_one(gap: Tensor, y: Tensor, c: Alpha, out: Tensor | None = None) -> Tensor:
    """r - 1 for r = [1 - c (m - z) / y^c]_+. For alpha near 1 r is close to 1, and r - 1 keeps more digits."""
    scale = (y.log() * -c).exp_()
    return torch.mul(gap, scale, out=out).clamp_min_(-1)


def _power_of_one_and(less: Tensor, p: Alpha) -> Tensor:
    """(1 + less)^p, written over `less`."""
    return less.log1p_().mul_(p * _LOG2_E).exp2_()


def _capturing(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured. The host cannot read results then, so the guarded iteration takes all its
    steps."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _normalise_(p: Tensor) -> None:
    """Normalise rows to sum 1, which they miss only by the rounding of y."""
    total = p.sum(-1, keepdim=True)
    p.div_(total.masked_fill_(total == 0, 1))


def _chunks(tensors: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Chunks of at most `limit` entries, with whole rows (the last dimension); dimensions of size 1 are broadcast."""
    shape = tensors[0].shape
    if tensors[0].numel() == 0:
        return
    if tensors[0].numel() <= limit or shape[:-1].numel() == 1:
        yield tensors
        return
    dim = max(range(len(shape) - 1), key=lambda i: (shape[i] > 1, -i))
    inner = tensors[0].numel() // shape[dim]
    step = max(1, limit // inner)
    for i in range(0, shape[dim], step):
        part = [
            t if t.shape[dim] == 1 else t.narrow(dim, i, min(step, shape[dim] - i)) for t in tensors
        ]
        yield from _chunks(part, limit)
