"""The ReLU feed-forward block for a few tokens, which is limited by reading the weights.

One token: the first kernel reads the gate weights and then the up weights of the active neurons. The second kernel
reads the active columns of the down weights in place, without a transposed copy; it is decode.cu if dtype and alignment
of the weights allow it. A few tokens: the up weights are read only for neurons that are active for any token. All down
weights are read, because sixteen tokens leave few columns unused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.arch import capability
from ..common.cuda import CudaKernel
from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched
from ..common.pdl import pdl_options, wait_for_previous
from ..common.tma import tma_addressable

# Gate and up projections of one token: (neurons, warps) per program. Programs are small, so that waiting for up rows
# does not delay other neurons (8.1 us at K = 2 048, N = 5 632; four neurons and four warps take 10.5).
ONE_UP = (1, 4)
# Down projection of one token: (outputs, groups of neurons in flight, warps) per program. Outputs are few, so that many
# programs load at the same time: a token of 28 layers takes 1.47 ms, with 16 outputs 1.57 ms (H200).
ONE_DOWN = (8, 128, 8)
# Maximum number of listed groups with an active neuron; each costs a sector of memory per output.
MOST_LISTED = 256
# Neurons per group: 16 bytes of a row of the down weights.
GROUP = 8
# Down projection of one token by decode.cu: (outputs, warps) per block. It saves 0.9 us if 1 % of 5 632 neurons are
# active, and 3.9 us if half of them are (H200).
ONE_DOWN_WORDS = (4, 16)
words_kernel = CudaKernel(Path(__file__).with_suffix(".cu"), "down_projection", __name__)
# Projections of a few tokens: (neurons per program, depth, warps, stages); down projection: (outputs per program,
# depth, parts of the sum, warps, stages).
FEW_UP = (64, 128, 4, 4)
FEW_DOWN = (16, 256, 4, 1, 3)
# Maximum tokens of one pass over the weights: the narrow side of a 16-bit tensor-core product.
TOKENS = 32


def applies(x: torch.Tensor, b: Any) -> bool:
    """Whether these kernels compute the call.

    Several tokens in fp32 are left to cuBLAS, because tensor cores would round the factors.
    """
    if b.gate.stride(1) != 1 or (b.up is not None and b.up.stride(1) != 1):
        return False
    several = b.down.stride(1) == 1 and (x.element_size() == 2 or not x.is_cuda)
    return len(x) <= (TOKENS if several else 1)


def forward(
    x: torch.Tensor, b: Any, y: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Write y [M, D], plus `residual` [M, D], and return it."""
    if len(x) == 1:
        return _one(x, b, y, residual)
    _few(x, b, y)
    return y if residual is None else y.add_(residual)


@relaunched
@triton.jit
def _gate_up_kernel(
    x, gate, gate_bias, up, up_bias, out,
    N, K, stride_g, stride_u, THRESHOLD,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program computes h of BN neurons of one token: it reads BN gate rows, and the up rows of the active neurons.

    PDL: the kernel starts before the preceding one has ended. All loads follow the wait, because the preceding kernel
    may write the weights.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < N
    row = tl.where(in_n, n, 0).to(tl.int64)
    k0 = tl.arange(0, WIDTH)
    g = tl.zeros([BN], tl.float32)
    wait_for_previous(PDL)
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
    # Round as the linear does: the rounded number is compared with the threshold.
    g = g.to(out.dtype.element_ty).to(tl.float32)
    active = in_n & ~(g <= tl.full([], THRESHOLD, tl.float32))
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


@relaunched
@triton.jit
def _down_kernel(
    hidden, down, bias, residual, out, lists, N, D, stride_d, stride_n, stride_r,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BD: tl.constexpr, FLIGHT: tl.constexpr, MOST: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes BD outputs of one token, bias and residual included: it reads h, and the weights of neurons
    with a non-zero h.

    It lists the groups of GROUP neurons with a non-zero h in its row of lists [programs, MOST] and then reads their
    weights; if there are more than MOST, it reads all neurons instead. PDL: as in `_gate_up_kernel`.
    """
    wait_for_previous(PDL)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < D
    row = tl.where(in_d, d, 0).to(tl.int64)
    each = tl.arange(0, GROUP)
    group = tl.arange(0, GROUPS)
    n = group[:, None] * GROUP + each[None, :]
    h = tl.load(hidden + n, mask=n < N, other=0.0)
    some = tl.max((h != 0.0).to(tl.int32), 1)
    at = tl.cumsum(some, 0) - some
    listed = tl.sum(some, 0)
    own = lists + tl.program_id(0) * MOST
    tl.store(own + at, group, mask=(some != 0) & (at < MOST))
    if listed <= MOST:
        tl.debug_barrier()  # other threads' entries are read below
        r = tl.arange(0, FLIGHT)
        few = tl.zeros([BD, FLIGHT], tl.float32)
        for e in range(0, listed, FLIGHT):
            found = (e + r < listed)[:, None]
            k = tl.load(own + e + r, mask=e + r < listed, other=0)[:, None] * GROUP + each[None, :]
            v = tl.load(hidden + k, mask=found & (k < N), other=0.0).to(tl.float32)
            w = tl.load(
                down + row[:, None, None] * stride_d + k[None, :, :].to(tl.int64) * stride_n,
                mask=in_d[:, None, None] & (found & (k < N))[None, :, :],
                other=0.0,
            )
            # An inactive neuron adds nothing, even if its weight is inf or NaN.
            part = tl.where((v != 0.0)[None, :, :], w.to(tl.float32) * v[None, :, :], 0.0)
            few += tl.sum(part, 2)
        y = tl.sum(few, 1)
    else:
        total = tl.zeros([BD, BLOCK], tl.float32)
        for n0 in range(0, N, BLOCK):
            k = n0 + tl.arange(0, BLOCK)
            v = tl.load(hidden + k, mask=k < N, other=0.0).to(tl.float32)
            w = tl.load(
                down + row[:, None] * stride_d + k[None, :].to(tl.int64) * stride_n,
                mask=in_d[:, None] & (k < N)[None, :],
                other=0.0,
            )
            total += tl.where((v != 0.0)[None, :], w.to(tl.float32) * v[None, :], 0.0)
        y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y = y.to(out.dtype.element_ty).to(tl.float32)  # round as the linear does
        y += tl.load(residual + d * stride_r, mask=in_d, other=0.0).to(tl.float32)
    tl.store(out + d, y.to(out.dtype.element_ty), mask=in_d)


def _one(x: torch.Tensor, b: Any, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    N, K = b.gate.shape
    h = x.new_empty(1, N)
    up = b.gate if b.up is None else b.up
    small = not x.is_cuda
    width = 32 if small else min(2048, triton.next_power_of_2(K))
    bn, warps = (1, 1) if small else ONE_UP
    _gate_up_kernel[(triton.cdiv(N, bn),)](
        x, b.gate, b.gate_bias, up, b.up_bias, h,
        N, K, b.gate.stride(0), up.stride(0), b.zero_threshold,
        F_STEPS=encode(b.f), G_STEPS=encode(b.g), GATED=b.up is not None,
        HAS_GATE_BIAS=b.gate_bias is not None, HAS_UP_BIAS=b.up_bias is not None,
        BN=bn, WIDTH=width, **pdl_options(x), num_warps=warps,
    )  # fmt: skip
    down_projection(h, b.down, b.down_bias, residual, y)
    return y


def by_words(h: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether decode.cu computes the down projection: 16-bit weights [D, N] with rows of whole 16-byte groups."""
    return (
        h.is_cuda
        and h.element_size() == 2
        and capability(h.device)[0] >= 9
        and tma_addressable(down)
        and down.shape[1] % GROUP == 0
    )


def down_projection(
    h: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Write y [1, D] = h [1, N] @ down^T + bias + residual."""
    D, N = down.shape
    extras = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    stride_r = 1 if residual is None else residual.stride(1)
    if by_words(h, down):
        outputs, warps = ONE_DOWN_WORDS
        groups = N // GROUP
        word = min(32, triton.cdiv(groups, 2 * warps))
        words_kernel.launch(
            (triton.cdiv(D, outputs),), h, down, bias, residual, y, groups, word, D, down.stride(0), stride_r,
            OUTPUTS=outputs, IS_BF16=h.dtype == torch.bfloat16, **extras, PDL=pdl_options(h)["PDL"],
            num_warps=warps,
        )  # fmt: skip
        return
    small = not h.is_cuda
    bd, flight, warps = ONE_DOWN
    programs = triton.cdiv(D, bd)
    most = 8 if small else MOST_LISTED
    group = GROUP if down.stride(1) == 1 else 1
    _down_kernel[(programs,)](
        h, down, bias, residual, y,
        torch.empty(programs * most, dtype=torch.int32, device=h.device),
        N, D, down.stride(0), down.stride(1), stride_r,
        **extras, BD=bd, FLIGHT=4 if small else flight, MOST=most,
        GROUP=group, GROUPS=triton.next_power_of_2(triton.cdiv(N, group)), BLOCK=64 if small else 512,
        **pdl_options(h), num_warps=warps,
    )  # fmt: skip


@triton.jit
def _rows_by_tokens(
    table, row, in_row, stride_w, x, token, stride_x, start, end,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return table[row] @ x[token]^T over columns start to end, [BN, BM]; rows outside in_row are not read."""
    total = tl.zeros([BN, BM], tl.float32)
    for k0 in tl.range(start, end, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        w_at = table + row[:, None] * stride_w + k[None, :]
        v_at = x + token[None, :] * stride_x + k[:, None]
        if EVEN:
            w = tl.load(w_at, mask=in_row[:, None], other=0.0)
            v = tl.load(v_at)
        else:
            w = tl.load(w_at, mask=in_row[:, None] & (k < end)[None, :], other=0.0)
            v = tl.load(v_at, mask=(k < end)[:, None], other=0.0)
        total = tl.dot(w, v, total, input_precision=PRECISION)
    return total


@relaunched
@triton.jit
def _projections_kernel(
    x, gate, gate_bias, up, up_bias, out, arrived, M, N, K, stride_x, stride_g, stride_u, THRESHOLD,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """A program computes h [M, N] for BN neurons: it reads their gate rows, and the up rows of neurons that are
    active for any token.

    The first program clears `arrived` [TILES], the counters of the next kernel.
    """
    if tl.program_id(0) == 0:
        tl.store(arrived + tl.arange(0, TILES), tl.zeros([TILES], tl.int32))
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < N
    row = tl.where(in_n, n, 0).to(tl.int64)
    m = tl.arange(0, BM)
    in_m = m < M
    g = _rows_by_tokens(
        gate, row, in_n, stride_g, x, tl.where(in_m, m, 0), stride_x, 0, K,
        BN, BM, BK, STAGES, EVEN, PRECISION
    )  # fmt: skip
    if HAS_GATE_BIAS:
        g += tl.load(gate_bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    # Round as the linear does: the rounded number is compared with the threshold.
    g = g.to(out.dtype.element_ty).to(tl.float32)
    active = in_n[:, None] & in_m[None, :] & ~(g <= tl.full([], THRESHOLD, tl.float32))
    h = evaluate(g, F_STEPS)
    if GATED:
        any_of_them = tl.max(active.to(tl.int32), 1) > 0
        u = tl.zeros([BN, BM], tl.float32)
        if tl.max(any_of_them.to(tl.int32), 0) > 0:
            u = _rows_by_tokens(
                up, row, any_of_them, stride_u, x, tl.where(in_m, m, 0), stride_x, 0, K,
                BN, BM, BK, STAGES, EVEN, PRECISION
            )  # fmt: skip
            if HAS_UP_BIAS:
                u += tl.load(up_bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        h = h * evaluate(u, G_STEPS)
    at = out + m[None, :] * N + n[:, None]
    tl.store(
        at, tl.where(active, h, 0.0).to(out.dtype.element_ty), mask=in_n[:, None] & in_m[None, :]
    )


@relaunched
@triton.jit
def _down_tokens_kernel(
    hidden, down, bias, parts, arrived, out, M, N, D, stride_d, DEPTH,
    PRECISION: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[:, BD columns] = hidden [M, N] @ down[BD rows]^T + bias, by PARTS programs of DEPTH neurons each.

    parts [tiles of columns, PARTS, BD, BM]: partial sums, which the last program to arrive adds in order.
    """
    tile = tl.program_id(0)
    d = tile * BD + tl.arange(0, BD)
    in_d = d < D
    row = tl.where(in_d, d, 0).to(tl.int64)
    m = tl.arange(0, BM)
    start = tl.program_id(1) * DEPTH
    acc = _rows_by_tokens(
        down, row, in_d, stride_d, hidden, tl.where(m < M, m, 0), N,
        start, tl.minimum(start + DEPTH, N), BD, BM, BK, STAGES, EVEN, PRECISION
    )  # fmt: skip
    at = tl.arange(0, BD)[:, None] * BM + m[None, :]
    own = parts + tile * (PARTS * BD * BM)
    tl.store(own + tl.program_id(1) * (BD * BM) + at, acc)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(arrived + tile, 1) == PARTS - 1:
        tl.debug_barrier()
        acc = tl.zeros([BD, BM], tl.float32)
        for p in tl.static_range(PARTS):
            acc += tl.load(own + p * (BD * BM) + at, cache_modifier=".cg")
        if HAS_BIAS:
            acc += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)[:, None]
        to = out + m[None, :] * D + d[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=in_d[:, None] & (m < M)[None, :])


def _few(x: torch.Tensor, b: Any, y: torch.Tensor) -> torch.Tensor:
    M, K = x.shape
    N, D = b.gate.shape[0], b.down.shape[0]
    h = x.new_empty(M, N)
    up = b.gate if b.up is None else b.up
    small = not x.is_cuda
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    bm = 16 if M <= 16 else 32
    common = {"PRECISION": "tf32" if tf32 else "ieee", "BM": bm}
    bn, bk, warps, stages = FEW_UP
    bd, dk, parts, down_warps, down_stages = FEW_DOWN
    if small:
        bk, dk, stages, down_stages = 32, 32, 1, 1
    elif x.element_size() == 4:
        bk, dk = bk // 2, dk // 2
    tiles = triton.cdiv(D, bd)
    arrived = torch.empty(triton.next_power_of_2(tiles), dtype=torch.int32, device=x.device)
    _projections_kernel[(triton.cdiv(N, bn),)](
        x, b.gate, b.gate_bias, up, b.up_bias, h, arrived,
        M, N, K, x.stride(0), b.gate.stride(0), up.stride(0), b.zero_threshold,
        F_STEPS=encode(b.f), G_STEPS=encode(b.g), GATED=b.up is not None,
        HAS_GATE_BIAS=b.gate_bias is not None, HAS_UP_BIAS=b.up_bias is not None,
        BN=bn, BK=bk, STAGES=stages, EVEN=K % bk == 0, TILES=len(arrived), **common, num_warps=warps,
    )  # fmt: skip
    depth = triton.cdiv(triton.cdiv(N, parts), dk) * dk
    sums = torch.empty(tiles * parts * bd * bm, dtype=torch.float32, device=x.device)
    _down_tokens_kernel[(tiles, parts)](
        h, b.down, b.down_bias, sums, arrived, y,
        M, N, D, b.down.stride(0), depth,
        BD=bd, BK=dk, STAGES=down_stages, EVEN=N % dk == 0, PARTS=parts,
        HAS_BIAS=b.down_bias is not None, **common, num_warps=down_warps,
    )  # fmt: skip
    return y
