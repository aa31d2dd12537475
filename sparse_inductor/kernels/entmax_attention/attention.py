"""Entmax attention on a GPU: the supported operands, forward and backward.

    p = argmax over the simplex of p . z + H_alpha(p),  out = p v,
    z = scale * q k^T (+ bias), or `fill` for dropped keys

Method: "AdaSplash: Adaptive Sparse Flash Attention" (Goncalves et al., 2025) computes p block by
block from a bisected threshold; here the threshold is solved to fp32 accuracy.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import layers
from . import few, lists, short
from .backward import bias_gradient, keys_blocks, rows_blocks
from .blocks import forward_blocks
from .problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Head dimensions. Tensor cores multiply at a depth of 16; above MAX_WIDTH, two operand tiles do not fit shared memory.
MIN_WIDTH, MAX_WIDTH = 16, 256


def applies(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    alpha_value: float = 1.5,
    **_: Any,
) -> bool:
    """Whether the kernels support these operands: one 16-bit dtype or fp32, head dimensions 16 to 256."""
    return (
        q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and MIN_WIDTH <= q.shape[3] <= MAX_WIDTH
        and MIN_WIDTH <= v.shape[3] <= MAX_WIDTH
        and k.shape[2] > 0
    )


def saved_like(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Return empty tensors for `forward` to save. Their shapes and dtypes do not depend on the values of tensors.

    (reference, shift) fp32 [B, H, Lq], with tau = reference + shift; if lists are used (`lists.applies`), also
    entries int64 [B, H, Lq, SLOTS], starts and counts int32 [B, H, Lq], fallback int32 [B, H, Lq],
    earlier int32 [B, H, blocks + 1] and key_counts int32 [B, Hkv, Lk], which portable kernels
    neither fill nor read.
    """
    B, H, Lq, _d = q.shape
    saved = [q.new_empty((B, H, Lq), dtype=torch.float32) for _ in range(2)]
    if not few.applies(q, k) and lists.applies(q, k, v, scale):
        rows = lists.block_rows(q)
        saved.append(q.new_empty((B, H, Lq, lists.SLOTS), dtype=torch.int64))
        saved += [q.new_empty((B, H, Lq), dtype=torch.int32) for _ in range(3)]
        for shape in ((B, H, (Lq + rows - 1) // rows + 1), (B, k.shape[1], k.shape[2])):
            saved.append(q.new_empty(shape, dtype=torch.int32))
    return tuple(saved)


def _lists(saved: tuple[torch.Tensor, ...]) -> lists.Lists | None:
    """Return the lists among the saved tensors, None if the kernels of the current layer do not use lists."""
    native = len(saved) > 2 and layers.current() == layers.Layer.NATIVE
    return lists.Lists(*saved[2:]) if native else None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    training: bool,
    **terms: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return out [B, H, Lq, Dv] in q's dtype, contiguous, and the tensors that `backward` needs.

    q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], any strides; head h reads key head
    h // (H // Hkv). bias (float) and mask (bool, True = keep) are 4-D and broadcast over size-1
    dimensions, as is alpha [B, H, Lq, 1]. Rows with scores of -inf only, and rows at and beyond
    query_lengths, give zeros. There is no host synchronisation, and memory is linear in length. The only atomics
    are integer counts, which do not depend on the order.
    """
    problem = Problem.of(q, k, v, **terms)
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device, dtype=q.dtype)
    saved = saved_like(q, k, v, **terms)
    if out.numel():
        with torch.cuda.device_of(q):
            reference, shift = saved[:2]
            listed = _lists(saved)
            if listed is None and short.applies(problem):
                short.forward_short(problem, out, reference, shift, training)
            elif few.applies(q, k):
                few.forward_few(problem, out, reference, shift)
            else:
                if listed is not None:
                    lists.forward_lists(problem, out, reference, shift, listed, training)
                fallback = lists.fallback_rows(q, listed)
                forward_blocks(problem, out, reference, shift, fallback, training)
    return out, saved if training else ()


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    *,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    needs: tuple[bool, bool, bool, bool, bool],
    **terms: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of (q, k, v, bias, alpha), None for those not needed; bitwise repeatable.

    grad [B, H, Lq, Dv], any strides; out and saved are the results of `forward`, called with the same keywords.
    """
    problem = Problem.of(q, k, v, bias=bias, alpha=alpha, **terms)
    if not out.numel():
        inputs = (q, k, v, bias, alpha)
        return tuple(
            x.new_zeros(x.shape) if need and x is not None else None
            for x, need in zip(inputs, needs)
        )
    reference, shift = saved[:2]
    listed = _lists(saved)
    rest = lists.fallback_rows(q, listed)
    out = out.contiguous()
    dq, dk, dv = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v))
    delta = torch.empty_like(shift)
    by_row = torch.empty_like(shift) if needs[4] and alpha is not None else None
    dbias = dalpha = None
    with torch.cuda.device_of(q):
        rows_blocks(problem, grad, out, reference, shift, rest, dq, delta, by_row)
        if needs[1] or needs[2]:
            keys_blocks(problem, grad, reference, shift, delta, rest, dk, dv)
        if listed is not None:
            filed = lists.rows_backward(problem, grad, listed, dq, delta, by_row)
            if needs[1] or needs[2]:
                lists.add_keys_from_lists(problem, grad, listed, filed, delta, dk, dv)
        if needs[3] and bias is not None:
            dbias = bias_gradient(problem, bias, grad, reference, shift, delta)
    if by_row is not None and alpha is not None:
        dalpha = by_row[..., None].sum_to_size(alpha.shape).to(alpha.dtype)
    return (
        dq if needs[0] else None,
        dk if needs[1] else None,
        dv if needs[2] else None,
        dbias,
        dalpha,
    )
