"""Entmax in chunked ATen, exact for every input: the CPU path, and what fp64 takes on a GPU.

With z the scores of a row, m their maximum and c = alpha - 1 (Peters et al. 2019, Eq. 10)

    p_i = [c z_i - tau]_+^(1/c) = y [1 - c (m - z_i) / y^c]_+^(1/c),     tau = c m - y^c

where y is the largest probability, the root of F(y) = sum_i p_i - 1 in [1/n, 1]. F rises with slope 1 or more, for
alpha <= 2 it is convex: Newton's iteration from any upper bound of y then descends to the root and nowhere else.
The bound it starts from is the y of a few entries of the row, maxima of 32 classes of columns: fewer entries than
the row has leave each a larger share. For alpha > 2 slopes are infinite where an entry enters the support, so a
bracket guards the iteration and it runs in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["backward", "compute_dtype", "forward"]

# Entries of a chunk: what the passes over it touch, two buffers in fp32, is about a core's share of the outer caches.
_CPU_CHUNK = 1 << 18
# On a GPU a chunk only bounds the workspace: two buffers of 512 MiB in fp64.
_GPU_CHUNK = 1 << 26
# Column classes whose maxima give the first bound; rows of fewer than four times as many start from y = 1.
_CLASSES = 32
# A Newton step this small relative to y is below what fp32 (fp64) tells apart.
_EPS = {torch.float32: 2.0**-22, torch.float64: 2.0**-50}
# Steps of the unguarded iteration; 4 to 8 are what rows of any kind were seen to need, the guarded one takes the rest.
_FAST_STEPS = 16
# Steps of the guarded iteration: every second one at least halves the bracket, whose resolution is 2^-52.
_GUARDED_STEPS = 120

Alpha: TypeAlias = float | Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any input is, else fp32: half precisions are widened."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def chunk_size(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def forward(x: Tensor, alpha: Alpha, dim: int) -> Tensor:
    """Probabilities along `dim`, in the dtype and layout of x; alpha a float or [.., 1 at dim, ..]."""
    out = torch.empty_like(x)
    dt = compute_dtype(x)
    rows = [x.movedim(dim, -1), out.movedim(dim, -1)]
    if isinstance(alpha, Tensor):
        rows.append(alpha.movedim(dim, -1).to(dt))
    for x_, out_, *alpha_ in _chunks(rows, chunk_size(x.device)):
        z = torch.empty(x_.shape, dtype=dt, device=x.device).copy_(x_)
        solve_(z, alpha_[0] if alpha_ else alpha)
        out_.copy_(z)
    return out


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
            rest.pop().copy_(score_gradient_(g.clone() if g is grad_ else g, u))
    if d_alpha is not None and isinstance(alpha, Tensor):
        d_alpha = d_alpha.movedim(-1, dim).sum_to_size(alpha.shape).to(alpha.dtype)
    return dx, d_alpha


def slopes(p: Tensor, alpha: Alpha) -> Tensor:
    """u_i = p_i^(2 - alpha) on the support, 0 outside: the Jacobian is diag(u) - u u^T / sum u."""
    if isinstance(alpha, float) and alpha == 1.5:
        return p.sqrt()
    if isinstance(alpha, float) and alpha == 2.0:
        return p.sign()  # and NaN for NaN
    return torch.where(p == 0, 0.0, p.pow(2 - alpha))


def score_gradient_(g: Tensor, u: Tensor) -> Tensor:
    """u (g - sum(u g) / sum u), written over g; rows of zeros get zeros."""
    total = u.sum(-1, keepdim=True)
    mean = torch.linalg.vecdot(u, g).unsqueeze(-1).div_(total.masked_fill_(total == 0, 1))
    return g.sub_(mean).mul_(u)


def alpha_gradient(g: Tensor, p: Tensor, u: Tensor, alpha: Alpha) -> Tensor:
    """sum_i g_i dp_i / dalpha, [..., 1]."""
    total = u.sum(-1, keepdim=True)
    gap = g - torch.linalg.vecdot(u, g).unsqueeze(-1).div_(total.masked_fill_(total == 0, 1))
    # dp/dalpha sums to 0 over a row, so g may be shifted by anything: by its mean under u the terms in u cancel.
    by_entropy = torch.linalg.vecdot(gap, torch.xlogy(p, p)).unsqueeze(-1)
    by_mass = torch.linalg.vecdot(gap, p).unsqueeze(-1)
    c = alpha - 1
    return by_mass / c**2 - by_entropy / c


def solve_(z: Tensor, alpha: Alpha) -> Tensor:
    """Turns scores z [..., n] into probabilities, in place; returns y [..., 1], the largest of each row.

    z is contiguous; y has `y_dtype`. A row of -inf becomes zeros (y = 1), one with NaN or +inf becomes NaN.
    """
    classes = _class_maxima(z)
    peak = z.amax(-1, keepdim=True) if classes is None else classes.amax(-1, keepdim=True)
    peak.masked_fill_(peak == -torch.inf, 0)
    z.sub_(peak)
    if classes is not None:
        classes.sub_(peak)
    shared = _shared(alpha)
    if shared in (1.5, 2.0) and not _capturing(z):
        y = None
        if classes is not None:
            y, _ = _newton(classes.mul_(shared - 1), shared)
        y, done = _newton(z.mul_(shared - 1), shared, y)
        if not done:
            return _guarded_(z.div_(shared - 1), shared, y)
        u = z.add_(y if shared == 2 else y.sqrt()).relu_()
        _normalise_(u.square_() if shared == 1.5 else u)
        return y
    return _guarded_(z, alpha if shared is None else shared)


def recall_(z: Tensor, y: Tensor, alpha: Alpha) -> None:
    """What `solve_` made of these scores, from the y that it returned (unrounded where `y_dtype` says fp64)."""
    peak = z.amax(-1, keepdim=True)
    peak.masked_fill_(peak == -torch.inf, 0)
    z.sub_(peak)
    shared = _shared(alpha)
    if shared in (1.5, 2.0):
        y = y.to(z.dtype)
        p = z.mul_(shared - 1).add_(y if shared == 2 else y.sqrt()).relu_()
        if shared == 1.5:
            p.square_()
    else:
        a = alpha if shared is None else shared
        y = y.to(y_dtype(z.dtype, a))
        c = a - 1
        p = _log_ratio(z.to(y.dtype) * c, y, c).mul_(1 / c).exp_()
    _normalise_(p)
    if p is not z:
        z.copy_(p)


def y_dtype(dt: torch.dtype, alpha: Alpha) -> torch.dtype:
    """What holds y: above 2 slopes are infinite where an entry enters the support, and fp32 costs half the digits."""
    return torch.float64 if isinstance(alpha, Tensor) or alpha > 2 else dt


def _shared(alpha: Alpha) -> float | None:
    """The one alpha of all rows, where that can be known without waiting for a device."""
    if not isinstance(alpha, Tensor):
        return alpha
    if alpha.is_cpu and alpha.numel():
        first = alpha.flatten()[0]
        if bool((alpha == first).all()):
            return float(first)
    return None


def _class_maxima(z: Tensor) -> Tensor | None:
    """[..., 32] maxima of distinct columns that together are all columns; None for short rows."""
    n = z.shape[-1]
    if n < 4 * _CLASSES:
        return None
    whole = n - n % _CLASSES
    classes = z[..., :whole].unflatten(-1, (-1, _CLASSES)).amax(-2)
    if whole < n:
        tail = classes[..., : n - whole]
        torch.maximum(tail, z[..., whole:], out=tail)
    return classes


def _newton(s: Tensor, alpha: float, y: Tensor | None = None) -> tuple[Tensor, bool]:
    """Largest probability [..., 1] of shifted and scaled scores s = c (z - m), alpha 1.5 or 2, from the bound y.

    The second value says whether every row converged.
    """
    eps = _EPS[s.dtype]
    if y is None:
        y = torch.ones(s.shape[:-1] + (1,), dtype=s.dtype, device=s.device)
    u = torch.empty_like(s)
    for _ in range(_FAST_STEPS):
        root = y if alpha == 2 else y.sqrt()
        torch.add(s, root, out=u).relu_()
        if alpha == 2:
            # F = sum u - 1, F' = |support|
            step = (u.sum(-1, keepdim=True) - 1) / torch.linalg.vector_norm(u, 0, -1, True)
        else:
            # F = sum u^2 - 1, F' = sum u / sqrt(y)
            excess = torch.linalg.vector_norm(u, 2, -1, True).square_().sub_(1)
            step = excess.mul_(root).div_(u.sum(-1, keepdim=True))
        moved = step > eps * y
        y = torch.where(moved, y - step, y)
        if not bool(moved.any()):
            return y, True
    return y, False


def _guarded_(z: Tensor, alpha: Alpha, y: Tensor | None = None) -> Tensor:
    """`solve_` of shifted scores z - m for any alpha: Newton's iteration from y inside a bracket."""
    wide = z.to(y_dtype(z.dtype, alpha))
    a = alpha.to(wide.dtype) if isinstance(alpha, Tensor) else alpha
    c = a - 1
    p = 1 / c
    n = z.shape[-1]
    eps = _EPS[wide.dtype]
    gap = wide * c  # -c (m - z)
    hi = torch.ones(z.shape[:-1] + (1,), dtype=wide.dtype, device=z.device)
    lo = torch.full_like(hi, 1 / n)
    y = hi.clone() if y is None else y
    last = before_last = torch.full_like(hi, torch.inf)
    for _ in range(_GUARDED_STEPS):
        log_r = _log_ratio(gap, y, c)
        s = (log_r * p).exp_().sum(-1, keepdim=True)
        slope = (log_r * (p - 1)).masked_fill_(log_r == -torch.inf, -torch.inf).exp_()
        excess = y * s - 1
        step = excess / slope.sum(-1, keepdim=True)
        hi = torch.where(excess >= 0, y, hi)
        lo = torch.where(excess <= 0, y, lo)
        # Where slopes may be infinite a short step says nothing.
        far = torch.where(
            torch.as_tensor(a <= 2, device=z.device), step.abs() > eps * y, excess.abs() > eps
        )
        open_ = far & (hi - lo > eps * hi)
        if not _capturing(z) and not bool(open_.any()):
            break
        # A step out of the bracket, or not half of the one before the last, is a bisection instead.
        guess = y - step
        sound = (guess > lo) & (guess < hi) & (step.abs() <= 0.5 * before_last)
        guess = torch.where(sound, guess, 0.5 * (lo + hi))
        last, before_last = (guess - y).abs(), last
        y = torch.where(open_, guess, y)
    _log_ratio(gap, y, c, out=gap).mul_(p).exp_()
    _normalise_(gap)
    z.copy_(gap)
    return y


def _log_ratio(gap: Tensor, y: Tensor, c: Alpha, out: Tensor | None = None) -> Tensor:
    """log [1 - c (m - z) / y^c]_+: accurate where alpha is near 1 and c (m - z) vanishes beside 1."""
    scale = (y.log() * -c).exp_()
    ratio = torch.mul(gap, scale, out=out) if out is not None else gap * scale
    return ratio.clamp_min_(-1).log1p_()


def _capturing(t: Tensor) -> bool:
    """While a CUDA graph is captured nothing can be asked: every step of the guarded iteration is taken."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _normalise_(p: Tensor) -> None:
    """Rows to sum 1, which they miss by the rounding of y only."""
    total = p.sum(-1, keepdim=True)
    p.div_(total.masked_fill_(total == 0, 1))


def _chunks(tensors: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Pieces of at most `limit` entries, rows (the last dimension) kept whole; sizes of 1 are broadcast."""
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
