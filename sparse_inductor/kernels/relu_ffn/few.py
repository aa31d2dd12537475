"""Feed-forward blocks of few rows, computed by dense cuBLAS products with one elementwise kernel between them. No rows
are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched
from .dots import slopes
from .packing import inactive

if TYPE_CHECKING:
    from .forward import Block


@relaunched
@triton.jit
def _hidden_kernel(
    gate,
    up,
    thresholds,
    elements,
    N,
    THRESHOLD,
    F_STEPS: tl.constexpr,
    G_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """gate = f(gate) * g(up), in place, BLOCK elements per program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    g = tl.load(gate + i, mask=mask, other=0.0).to(tl.float32)
    h = evaluate(g, F_STEPS)
    if up is not None:
        h = h * evaluate(tl.load(up + i, mask=mask, other=0.0).to(tl.float32), G_STEPS)
    off = inactive(g, i % N, mask, THRESHOLD, thresholds)
    tl.store(gate + i, tl.where(off, 0.0, h).to(gate.dtype.element_ty), mask=mask)


@relaunched
@triton.jit
def _slopes_kernel(
    gate,
    up,
    dh,
    thresholds,
    elements,
    N,
    THRESHOLD,
    F_STEPS: tl.constexpr,
    G_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(gate, up, dh) = (d gate, d up, h), in place, BLOCK elements per program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    g = tl.load(gate + i, mask=mask, other=0.0).to(tl.float32)
    u = g
    if up is not None:
        u = tl.load(up + i, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(dh + i, mask=mask, other=0.0).to(tl.float32)
    dg, du, h = slopes(g, u, gradient, 0.0, 0.0, F_STEPS, G_STEPS, up is not None)
    off = inactive(g, i % N, mask, THRESHOLD, thresholds)
    tl.store(gate + i, tl.where(off, 0.0, dg).to(gate.dtype.element_ty), mask=mask)
    if up is not None:
        tl.store(up + i, tl.where(off, 0.0, du).to(gate.dtype.element_ty), mask=mask)
    tl.store(dh + i, tl.where(off, 0.0, h).to(gate.dtype.element_ty), mask=mask)


def _launch(kernel, tensors: Sequence[torch.Tensor | None], b: Block) -> None:
    """Launch one of the kernels above on contiguous tensors of the same shape."""
    first = tensors[0]
    assert first is not None
    block = 1024 if first.is_cuda else 64
    kernel[(triton.cdiv(first.numel(), block),)](
        *tensors,
        b.thresholds,
        first.numel(),
        first.shape[1],
        b.zero_threshold,
        F_STEPS=encode(b.f),
        G_STEPS=encode(b.g),
        BLOCK=block,
    )


def _projections(x: torch.Tensor, b: Block) -> tuple[torch.Tensor, torch.Tensor | None]:
    up = None if b.up is None else F.linear(x, b.up, b.up_bias)
    return F.linear(x, b.gate, b.gate_bias), up


def forward(x: torch.Tensor, b: Block) -> torch.Tensor:
    """Return y [M, D] of tokens x [M, K]."""
    h, up = _projections(x, b)
    _launch(_hidden_kernel, (h, up), b)
    return F.linear(h, b.down, b.down_bias)


def backward(
    dy: torch.Tensor, x: torch.Tensor, b: Block, needs: Sequence[bool], column_major: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of x, gate, gate_bias, up, up_bias, down, down_bias, and None for the statistic's weight.
    Gradients that are not needed are None. column_major: which of the gradients of gate, up and down are laid out
    column-major. Recomputes the projections."""
    g, u = _projections(x, b)
    h = torch.mm(dy, b.down)
    _launch(_slopes_kernel, (g, u, h), b)
    dx = None
    if needs[0]:
        dx = g @ b.gate
        if u is not None and b.up is not None:
            dx.addmm_(u, b.up)
    found: list[torch.Tensor | None] = [dx]
    for d, right, (weight, bias), (n_weight, n_bias), by_columns in (
        (g, x, (b.gate, b.gate_bias), needs[1:3], column_major[0]),
        (u, x, (b.up, b.up_bias), needs[3:5], column_major[1]),
        (dy, h, (b.down, b.down_bias), needs[5:7], column_major[2]),
    ):
        d_weight = None
        if n_weight and weight is not None and d is not None:
            d_weight = (right.t() @ d).t() if by_columns else d.t() @ right
        found.append(d_weight)
        found.append(d.sum(0) if n_bias and bias is not None and d is not None else None)
    return [*found, None]
