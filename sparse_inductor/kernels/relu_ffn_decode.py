"""The ReLU feed-forward block for a few tokens, where reading the weights is all the work.

One token: a kernel reads the gate weights, and at once the up weights of those neurons that turn out active; a second
one reads the active columns of the down weights where they lie, without a transposed copy. A few tokens: the up weights
are read only for neurons that are active in any token; of the down weights all are, as sixteen tokens leave few columns
that nobody needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .epilogue import encode, evaluate

__all__ = ["applies", "forward"]

# Tokens that still share one pass over the weights: the narrow side of a 16-bit tensor-core product.
TOKENS = 32


def applies(x: torch.Tensor, b: Any) -> bool:
    """Whether these kernels take the call."""
    unit = b.gate.stride(1) == 1 and (b.up is None or b.up.stride(1) == 1)
    return len(x) <= (TOKENS if b.up is not None else 1) and unit


def forward(x: torch.Tensor, b: Any, y: torch.Tensor) -> torch.Tensor:
    """Fill and return y [M, D]."""
    return _one(x, b, y) if len(x) == 1 else _few(x, b, y)


@triton.jit
def _gate_up_kernel(
    x, gate, gate_bias, up, up_bias, out,
    N, K, stride_g, stride_u, CUT,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program makes h of BN neurons of one token: reads BN gate rows, and the up rows of those that are active."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < N
    row = tl.where(in_n, n, 0).to(tl.int64)
    k0 = tl.arange(0, WIDTH)
    g = tl.zeros([BN], tl.float32)
    for k in range(0, K, WIDTH):
        kk = k + k0
        v = tl.load(x + kk, mask=kk < K, other=0.0).to(tl.float32)
        w = tl.load(
            gate + row[:, None] * stride_g + kk[None, :],
            mask=in_n[:, None] & (kk < K)[None, :],
            other=0.0,
        )
        g += tl.sum(w.to(tl.float32) * v[None, :], 1)
    if HAS_GATE_BIAS:
        g += tl.load(gate_bias + row, mask=in_n, other=0.0).to(tl.float32)
    g = g.to(out.dtype.element_ty).to(
        tl.float32
    )  # the linear's own rounding, which decides at the cut
    active = in_n & ~(g <= CUT)
    h = evaluate(g, F_STEPS)
    if GATED and tl.max(active.to(tl.int32), 0) > 0:
        u = tl.zeros([BN], tl.float32)
        for k in range(0, K, WIDTH):
            kk = k + k0
            v = tl.load(x + kk, mask=kk < K, other=0.0).to(tl.float32)
            w = tl.load(
                up + row[:, None] * stride_u + kk[None, :],
                mask=active[:, None] & (kk < K)[None, :],
                other=0.0,
            )
            u += tl.sum(w.to(tl.float32) * v[None, :], 1)
        if HAS_UP_BIAS:
            u += tl.load(up_bias + row, mask=active, other=0.0).to(tl.float32)
        h = h * evaluate(u, G_STEPS)
    tl.store(out + n, tl.where(active, h, 0.0).to(out.dtype.element_ty), mask=in_n)


@triton.jit
def _down_kernel(
    hidden, down, bias, out, N, D, stride_d, stride_n,
    HAS_BIAS: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program makes BD outputs of one token: reads h, and BD weights of every neuron where h is not zero."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < D
    row = tl.where(in_d, d, 0).to(tl.int64)
    total = tl.zeros([BD, BLOCK], tl.float32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        h = tl.load(hidden + n, mask=n < N, other=0.0).to(tl.float32)
        w = tl.load(
            down + row[:, None] * stride_d + n[None, :].to(tl.int64) * stride_n,
            mask=in_d[:, None] & (h != 0.0)[None, :],
            other=0.0,
        )
        total += w.to(tl.float32) * h[None, :]
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
    tl.store(out + d, y.to(out.dtype.element_ty), mask=in_d)


def _one(x: torch.Tensor, b: Any, y: torch.Tensor) -> torch.Tensor:
    N, K = b.gate.shape
    D = b.down.shape[0]
    h = x.new_empty(1, N)
    up = b.gate if b.up is None else b.up
    small = not x.is_cuda
    width = 32 if small else min(2048, triton.next_power_of_2(K))
    # A neuron and a warp: small programs, so that one that waits for its up rows holds up no others (8.1 us at
    # K = 2 048, N = 5 632; four neurons and four warps 10.5).
    bn = 1
    _gate_up_kernel[(triton.cdiv(N, bn),)](
        x, b.gate, b.gate_bias, up, b.up_bias, h,
        N, K, b.gate.stride(0), up.stride(0), b.cut,
        F_STEPS=encode(b.f), G_STEPS=encode(b.g), GATED=b.up is not None,
        HAS_GATE_BIAS=b.gate_bias is not None, HAS_UP_BIAS=b.up_bias is not None,
        BN=bn, WIDTH=width, num_warps=1,
    )  # fmt: skip
    # Four outputs a program: 512 programs at D = 2 048, four a multiprocessor.
    bd = 4
    _down_kernel[(triton.cdiv(D, bd),)](
        h, b.down, b.down_bias, y, N, D, b.down.stride(0), b.down.stride(1),
        HAS_BIAS=b.down_bias is not None, BD=bd, BLOCK=64 if small else 1024, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit
def _up_kernel(
    x, gate, up, up_bias, M, N, K, stride_x, stride_u, CUT,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """gate [M, N] -> h, in place, for BN neurons: reads the up rows of those active in any token."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < N
    m = tl.arange(0, BM)
    in_m = m < M
    at = gate + m[None, :] * N + n[:, None]
    g = tl.load(at, mask=in_n[:, None] & in_m[None, :], other=0.0).to(tl.float32)
    active = in_n[:, None] & in_m[None, :] & ~(g <= CUT)
    any_of_them = tl.max(active.to(tl.int32), 1) > 0
    row = tl.where(any_of_them, n, 0).to(tl.int64)
    u = tl.zeros([BN, BM], tl.float32)
    if tl.max(any_of_them.to(tl.int32), 0) > 0:
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            k = k0 + tl.arange(0, BK)
            w = tl.load(
                up + row[:, None] * stride_u + k[None, :],
                mask=any_of_them[:, None] & (k < K)[None, :],
                other=0.0,
            )
            v = tl.load(
                x + m[None, :] * stride_x + k[:, None],
                mask=in_m[None, :] & (k < K)[:, None],
                other=0.0,
            )
            u = tl.dot(w, v, u, input_precision=PRECISION)
        if HAS_UP_BIAS:
            u += tl.load(up_bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    h = tl.where(active, evaluate(g, F_STEPS) * evaluate(u, G_STEPS), 0.0)
    tl.store(at, h.to(gate.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


@triton.jit
def _down_tokens_kernel(
    hidden, down, out, M, N, D, stride_d, stride_n, PART,
    PRECISION: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """out[part, :, BD columns] = hidden [M, PART neurons] @ down[BD rows, PART neurons]^T, fp32."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < D
    row = tl.where(in_d, d, 0).to(tl.int64)
    m = tl.arange(0, BM)
    near = tl.where(m < M, m, 0)
    acc = tl.zeros([BD, BM], tl.float32)
    start = tl.program_id(1) * PART
    end = tl.minimum(start + PART, N)
    for k0 in tl.range(start, end, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        w_at = down + row[:, None] * stride_d + k[None, :] * stride_n
        h_at = hidden + near[None, :] * N + k[:, None]
        if EVEN:
            w, h = tl.load(w_at), tl.load(h_at)
        else:
            w = tl.load(w_at, mask=(k < end)[None, :], other=0.0)
            h = tl.load(h_at, mask=(k < end)[:, None], other=0.0)
        acc = tl.dot(w, h, acc, input_precision=PRECISION)
    at = out + (tl.program_id(1) * M + m)[None, :] * D + d[:, None]
    tl.store(at, acc, mask=in_d[:, None] & (m < M)[None, :])


@triton.jit
def _add_parts_kernel(
    parts, bias, out, M, D, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[m] = the sum of its parts + bias, in order."""
    m = tl.program_id(1)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for p in tl.static_range(PARTS):
        y += tl.load(parts + (p * M + m) * D + d, mask=d < D, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + m * D + d, y.to(out.dtype.element_ty), mask=d < D)


def _few(x: torch.Tensor, b: Any, y: torch.Tensor) -> torch.Tensor:
    M, K = x.shape
    N, D = b.gate.shape[0], b.down.shape[0]
    h = F.linear(x, b.gate, b.gate_bias)
    small = not x.is_cuda
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    common = {"PRECISION": "tf32" if tf32 else "ieee", "BM": 16 if M <= 16 else 32, "num_warps": 4}
    # 32 neurons a program: 176 programs at N = 5 632.
    bn, bk = 32, 32 if small else 256 if x.element_size() == 2 else 128
    _up_kernel[(triton.cdiv(N, bn),)](
        x, h, b.up, b.up_bias, M, N, K, x.stride(0), b.up.stride(0), b.cut,
        F_STEPS=encode(b.f), G_STEPS=encode(b.g), HAS_UP_BIAS=b.up_bias is not None,
        BN=bn, BK=bk, STAGES=1 if small else 3, **common,
    )  # fmt: skip
    # 16 outputs and a quarter of the neurons a program: 512 programs at D = 2 048, whose weights in flight hide the
    # latency of memory (the library's kernel for this long sum takes half as long again).
    parts = 4
    part = triton.cdiv(triton.cdiv(N, parts), bk) * bk
    sums = torch.empty(parts, M, D, dtype=torch.float32, device=x.device)
    _down_tokens_kernel[(triton.cdiv(D, 16), parts)](
        h, b.down, sums, M, N, D, b.down.stride(0), b.down.stride(1), part,
        BD=16, BK=bk, STAGES=1 if small else 3, EVEN=N % bk == 0, **common,
    )  # fmt: skip
    _add_parts_kernel[(triton.cdiv(D, 512), M)](
        sums,
        b.down_bias,
        y,
        M,
        D,
        PARTS=parts,
        HAS_BIAS=b.down_bias is not None,
        BLOCK=512,
        num_warps=2,
    )
    return y
