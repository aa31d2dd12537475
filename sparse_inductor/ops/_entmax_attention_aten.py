"""Entmax attention in chunked ATen: the CPU path, and the path for calls that the kernels do not support.

A chunk holds the scores of some heads and some queries, so the [B, H, Lq, Lk] scores are never materialized. The
queries of all heads that share keys are the rows of one product, so grouped queries do not repeat keys. The forward
saves only the largest probability of each query. From it the backward gets the probabilities of a chunk directly after
recomputing its scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..aten import compute_dtype
from . import _entmax_aten as rows


@dataclasses.dataclass(frozen=True)
class Terms:
    """The operands that turn products of queries and keys into scores, and scores into probabilities."""

    bias: Tensor | None
    mask: Tensor | None
    alpha: Tensor | float
    query_lengths: Tensor | None
    key_lengths: Tensor | None
    scale: float
    fill: float
    causal: bool
    added: bool


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk of sequences b, key heads h and queries i. keys: the number of keys, from the first one."""

    b: slice
    h: slice
    i: slice
    keys: int

    def take(self, t: Tensor) -> Tensor:
        """The chunk's part of [B or 1, Hkv or 1, G, Lq or 1, ...]."""
        b, h, i = (
            slice(None) if n == 1 else s
            for n, s in zip((t.shape[0], t.shape[1], t.shape[3]), (self.b, self.h, self.i))
        )
        return t[b, h, :, i]


def saved_dtype(q: Tensor, k: Tensor, v: Tensor, t: Terms) -> torch.dtype:
    return rows.y_dtype(compute_dtype(q, k, v, t.bias), t.alpha)


def forward(
    q: Tensor, k: Tensor, v: Tensor, t: Terms, undefined: str = ""
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Lq, Dv] in the dtype of q, y [B, H, Lq]: the largest probability of each row)."""
    dt = compute_dtype(q, k, v, t.bias)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    y = q.new_ones(q.shape[:3], dtype=saved_dtype(q, k, v, t))
    groups = k.shape[1]
    q_, out_, y_ = (_grouped(x, groups) for x in (q, out, y.unsqueeze(-1)))
    terms = _grouped_terms(t, groups, dt)
    for c, kf, vf in _chunks(q, k, v, dt, t):
        z, _ = _scores(_queries(q_, c, dt, t), kf, c, terms, q.shape[2], k.shape[2])
        c.take(y_).copy_(rows.solve_(z, _alpha(terms, c), undefined))
        c.take(out_).copy_(_product(z, vf))
    alone = q.shape[2] - k.shape[2]  # the number of queries that keep no key if causal
    if undefined and alone > 0 and t.causal and t.fill == -torch.inf:
        if undefined.startswith("refused") and q.is_cpu and q.numel():
            rows.refuse("a query has no keys")
        out[:, :, :alone], y[:, :, :alone] = torch.nan, torch.nan
    return out, y


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor | None, t: Terms, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of q, k, v, bias and alpha, each in its input's dtype, or None. y: from `forward`, or None to solve the
    probabilities again."""
    dt = compute_dtype(q, k, v, t.bias)
    inputs = (q, k, v, t.bias, t.alpha if isinstance(t.alpha, Tensor) else None)
    grads = [
        torch.zeros_like(x, dtype=dt, memory_format=torch.contiguous_format)
        if n and x is not None
        else None
        for x, n in zip(inputs, needs)
    ]
    dq, dk, dv, d_bias, d_alpha = grads
    groups = k.shape[1]
    q_, grad_ = _grouped(q, groups), _grouped(grad, groups)
    y_ = None if y is None else _grouped(y.unsqueeze(-1), groups)
    dq_, d_bias_, d_alpha_ = (
        None if x is None else _grouped(x, groups) for x in (dq, d_bias, d_alpha)
    )
    terms = _grouped_terms(t, groups, dt)
    need_scores = any(x is not None for x in (dq, dk, d_bias))
    for c, kf, vf in _chunks(q, k, v, dt, t):
        qf, g = _queries(q_, c, dt, t), _queries(grad_, c, dt, t)
        p, dropped = _scores(qf, kf, c, terms, q.shape[2], k.shape[2])
        alpha = _alpha(terms, c)
        if y_ is None:
            rows.solve_(p, alpha)
        else:
            rows.recall_(p, c.take(y_), alpha)
        if dv is not None:
            dv[c.b, c.h, : c.keys] += _transposed_product(p, g)
        if not need_scores and d_alpha_ is None:
            continue
        gp = _product(g, vf.mT)
        u = rows.slopes(p, alpha)
        if d_alpha_ is not None:
            part = c.take(d_alpha_)
            part += rows.alpha_gradient(gp, p, u, alpha).to(dt).sum_to_size(part.shape)
        if not need_scores:
            continue
        ds = rows.score_gradient_(gp, u, alpha)
        if dropped is not None and not t.added:
            ds.masked_fill_(dropped, 0)
        if d_bias_ is not None:
            part = c.take(d_bias_)[..., : c.keys]
            part += ds.sum_to_size(part.shape)
        if dq_ is not None:
            c.take(dq_).copy_(_product(ds, kf).mul_(t.scale))
        if dk is not None:
            dk[c.b, c.h, : c.keys] += _transposed_product(ds, qf).mul_(t.scale)
    return [None if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, inputs)]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, H or 1, ...] to [B, Hkv or 1, H / Hkv or 1, ...], a view."""
    return x.unsqueeze(1) if x.shape[1] == 1 else x.unflatten(1, (groups, -1))


def _grouped_terms(t: Terms, groups: int, dt: torch.dtype) -> Terms:
    return dataclasses.replace(
        t,
        bias=None if t.bias is None else _grouped(t.bias, groups),
        mask=None if t.mask is None else _grouped(t.mask, groups),
        alpha=_grouped(t.alpha.to(dt), groups) if isinstance(t.alpha, Tensor) else t.alpha,
    )


def _alpha(t: Terms, c: _Chunk) -> Tensor | float:
    return c.take(t.alpha) if isinstance(t.alpha, Tensor) else t.alpha


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, dt: torch.dtype, t: Terms
) -> Iterator[tuple[_Chunk, Tensor, Tensor]]:
    """Yields chunks with their keys [b * h, keys, D] and values [b * h, keys, Dv] in the dtype of the arithmetic."""
    B, H, Lq, _ = q.shape
    Hkv, Lk = k.shape[1:3]
    if q.shape[:3].numel() == 0 or v.shape[-1] == 0 or Lk == 0:
        return
    limit = max(1, rows.chunk_size(q.device) // (H // Hkv * Lk))  # queries of one key head
    heads = max(1, min(Hkv, limit // Lq))
    sequences = max(1, min(B, limit // (Lq * Hkv)))
    ends = t.causal and t.fill == -torch.inf
    for b in range(0, B, sequences):
        bs = slice(b, min(b + sequences, B))
        for h in range(0, Hkv, heads):
            hs = slice(h, min(h + heads, Hkv))
            kf, vf = (
                _without_padding(x[bs, hs].to(dt), t.key_lengths, bs).flatten(0, 1) for x in (k, v)
            )
            for i in range(0, Lq, limit):
                last = min(i + limit, Lq)
                # Keys after the diagonal of the last query are dropped for every query of the chunk.
                keys = max(0, min(Lk, last + Lk - Lq)) if ends else Lk
                if keys:
                    yield _Chunk(bs, hs, slice(i, last), keys), kf[:, :keys], vf[:, :keys]


def _queries(x: Tensor, c: _Chunk, dt: torch.dtype, t: Terms) -> Tensor:
    """The chunk's part [b, h, G, i, D] of queries or of their gradients."""
    return _without_padding(c.take(x).to(dt), t.query_lengths, c.b, c.i.start)


def _without_padding(x: Tensor, lengths: Tensor | None, b: slice, first: int = 0) -> Tensor:
    """[b, ..., L, D] with zeros from each sequence's length on, since padding may hold inf or NaN and 0 times these is
    NaN."""
    if lengths is None:
        return x
    positions = torch.arange(first, first + x.shape[-2], device=x.device).unsqueeze(-1)
    padding = positions >= lengths[b].view(-1, *(1,) * (x.dim() - 1))
    return x.masked_fill(padding, 0)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """[b, h, G, i, n] by [b * h, n, m] to [b, h, G, i, m]."""
    rows_ = x.flatten(0, 1).flatten(1, 2)
    return torch.bmm(rows_, y).view(*x.shape[:-1], y.shape[-1])


def _transposed_product(x: Tensor, y: Tensor) -> Tensor:
    """[b, h, G, i, n] and [b, h, G, i, m] to [b, h, n, m], summed over queries and the group."""
    x_, y_ = (t.flatten(0, 1).flatten(1, 2) for t in (x, y))
    return torch.bmm(x_.mT, y_).view(*x.shape[:2], x.shape[-1], y.shape[-1])


def _scores(
    q: Tensor, k: Tensor, c: _Chunk, t: Terms, Lq: int, Lk: int
) -> tuple[Tensor, Tensor | None]:
    """(scores [b, h, G, i, keys]; a mask of scores that do not depend on q, k and bias, or None if all depend)."""
    z = _product(q * t.scale, k.mT)
    if t.bias is not None:
        z += c.take(t.bias)[..., : c.keys]
    dropped = None
    if t.mask is not None:
        dropped = ~c.take(t.mask)[..., : c.keys]
        z.masked_fill_(dropped, t.fill)
    rows_ = torch.arange(c.i.start, c.i.stop, device=z.device).unsqueeze(-1)
    columns = torch.arange(c.keys, device=z.device)
    if t.causal:
        future = columns > rows_ + (Lk - Lq)
        z.masked_fill_(future, t.fill)
        dropped = future if dropped is None else dropped | future
    if t.key_lengths is not None:
        z.masked_fill_(columns >= t.key_lengths[c.b].view(-1, 1, 1, 1, 1), -torch.inf)
    if t.query_lengths is not None:
        z.masked_fill_(rows_ >= t.query_lengths[c.b].view(-1, 1, 1, 1, 1), -torch.inf)
    return z, dropped
