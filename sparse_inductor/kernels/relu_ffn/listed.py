"""Overflow rows of a feed-forward block, computed by dense tile products over a list of rows.

Only the device knows the length of the list. Every kernel is launched with a grid that fills the GPU, reads the length,
and returns at once if there is nothing to do. Therefore a row may be packed in one replay of a CUDA graph and listed in
the next. If all M rows are listed, they are processed in order and the list is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched, sm_count
from ..common.pdl import pdl_options, wait_for_previous
from ..common.tile_order import tile_at
from ..common.tiles import sizes_of
from .dots import slopes
from .packing import inactive, overflow_rows

# Maximum programs that share the sum of one tile of `product` (split-K) if few rows are listed. The sum has N terms,
# and one program per tile would take as long as a full wave of tiles.
SPLITS = tl.constexpr(16)


class Listed(NamedTuple):
    """A selection of M rows: the first `length[0]` of `rows` [M]. arrived: one counter per program, initially 0, of
    the finished parts of a split tile."""

    rows: torch.Tensor
    length: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def of(count: torch.Tensor, cap: int) -> Listed:
        """Return the overflow rows, which have count > cap."""
        rows, length = overflow_rows(count, cap)
        return Listed(rows, length, length[1:])


def _tile_of(t: torch.Tensor, kernel: str = "relu_ffn") -> dict[str, Any]:
    """Return tile sizes BM x BN x BK, warps, stages and precision of the products."""
    if not t.is_cuda:
        return {"BM": 16, "BN": 32, "BK": 16, "num_warps": 4, "num_stages": 1, "PRECISION": "ieee"}
    full = t.dtype == torch.float32
    fast = full and torch.backends.cuda.matmul.allow_tf32
    found = sizes_of(kernel, t.device, 0, *(["fp32"] if full else []))
    return {**found, "PRECISION": "tf32" if fast else "ieee"}


def programs_of(t: torch.Tensor) -> int:
    """Return the number of programs that fills the GPU: one per SM."""
    return sm_count(t.device) if t.is_cuda else 3


def _strides(weight: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if weight is None else (weight.stride(0), weight.stride(1))


@triton.jit
def tile_rows(rows, n_rows, M, i):
    """Return the rows at positions i of a list; row 0 past its end."""
    listed = tl.load(rows + i, mask=i < tl.where(n_rows < M, n_rows, 0), other=0)
    return tl.where(n_rows < M, listed, tl.where(i < M, i, 0)).to(tl.int64)


@triton.jit
def _tile_of_list(
    t, tiles_m, tiles_n, rows, n_rows, M, N, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Return (rows, mask of listed rows, columns, mask of columns below N) of tile t."""
    pm, pn = tile_at(t, tiles_m, tiles_n)
    i = pm * BM + tl.arange(0, BM)
    n = pn * BN + tl.arange(0, BN)
    return tile_rows(rows, n_rows, M, i), i < n_rows, n, n < N


@triton.jit
def _add_dot(
    acc, a, row, in_m, stride_am, b, n, in_n, stride_bn, stride_bk, K,
    EVEN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return acc + A[row, :K] @ B[n, :K]^T, masked by in_m and in_n. EVEN: K is a multiple of BK."""
    a_ptr = a + row[:, None] * stride_am
    b_ptr = b + n.to(tl.int64)[None, :] * stride_bn
    in_m, in_n = in_m[:, None], in_n[None, :]
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a_at, b_at = a_ptr + k[None, :], b_ptr + k[:, None] * stride_bk
        if EVEN:
            v, w = tl.load(a_at, mask=in_m, other=0.0), tl.load(b_at, mask=in_n, other=0.0)
        else:
            v = tl.load(a_at, mask=in_m & (k < K)[None, :], other=0.0)
            w = tl.load(b_at, mask=in_n & (k < K)[:, None], other=0.0)
        acc = tl.dot(v, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _projection(
    x, row, in_m, stride_x, weight, bias, n, in_n, stride_n, stride_k, K: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return x[row] @ weight[n]^T + bias[n], rounded to the dtype of x and converted to fp32. weight: [N, K]."""
    acc = tl.zeros([row.shape[0], n.shape[0]], tl.float32)
    acc = _add_dot(
        acc,
        x,
        row,
        in_m,
        stride_x,
        weight,
        n,
        in_n,
        stride_n,
        stride_k,
        K,
        K % BK == 0,
        BK,
        PRECISION,
    )
    if bias is not None:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    return acc.to(x.dtype.element_ty).to(tl.float32)


@relaunched
@triton.jit
def _hidden_kernel(
    x, up, bias, gate, thresholds, rows, length, M, N, stride_x, stride_un, stride_uk, THRESHOLD, K: tl.constexpr,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gate[row] = f(gate[row]) * g(x[row] @ up^T + bias), in place, for the listed rows. gate: [M, N], contiguous."""
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    tiles_m, tiles_n = tl.cdiv(n_rows, BM), tl.cdiv(N, BN)
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, in_m, n, in_n = _tile_of_list(t, tiles_m, tiles_n, rows, n_rows, M, N, BM, BN)
        if up is not None:
            u = _projection(
                x, row, in_m, stride_x, up, bias, n, in_n, stride_un, stride_uk, K, BK, PRECISION
            )
        # Computed after the product, because the pointers of a tile take more registers than its accumulator.
        at = gate + row[:, None] * N + n[None, :]
        mask = in_m[:, None] & in_n[None, :]
        g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        h = evaluate(g, F_STEPS)
        if up is not None:
            h = h * evaluate(u, G_STEPS)
        off = inactive(g, n[None, :], in_n[None, :], THRESHOLD, thresholds)
        tl.store(at, tl.where(off, 0.0, h).to(gate.dtype.element_ty), mask=mask)


def hidden(
    x: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor,
    listed: Listed,
    f: Program,
    g: Program,
    threshold: float,
    thresholds: torch.Tensor | None,
) -> None:
    """Overwrite the listed rows of the gate projection [M, N] with h."""
    _hidden_kernel[(programs_of(x),)](
        x, up, bias, gate, thresholds, listed.rows, listed.length,
        *gate.shape, x.stride(0), *_strides(up), threshold, x.shape[1],
        F_STEPS=encode(f), G_STEPS=encode(g), **pdl_options(x), **_tile_of(x, "relu_ffn/projections"),
    )  # fmt: skip


@relaunched
@triton.jit
def _gradients_kernel(
    x, dy, gate, gate_bias, up, up_bias, down, d_stats, weight, thresholds, d_gate, d_up, hidden, rows, length,
    M, N, stride_x, stride_y, stride_gn, stride_gk, stride_un, stride_uk, stride_dn, stride_dd, stride_s, THRESHOLD,
    K: tl.constexpr, D: tl.constexpr, F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write d_gate, d_up and hidden [M, N] of the listed rows from both projections, which are recomputed.

    down: [D, N], any strides.
    """
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    tiles_m, tiles_n = tl.cdiv(n_rows, BM), tl.cdiv(N, BN)
    dtype = hidden.dtype.element_ty
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, in_m, n, in_n = _tile_of_list(t, tiles_m, tiles_n, rows, n_rows, M, N, BM, BN)
        g = _projection(
            x, row, in_m, stride_x, gate, gate_bias, n, in_n, stride_gn, stride_gk, K, BK, PRECISION
        )
        u = g
        if up is not None:
            u = _projection(
                x, row, in_m, stride_x, up, up_bias, n, in_n, stride_un, stride_uk, K, BK, PRECISION
            )
        dh = _add_dot(
            tl.zeros([BM, BN], tl.float32), dy, row, in_m, stride_y, down, n, in_n, stride_dn, stride_dd, D,
            D % BK == 0, BK, PRECISION,
        ).to(dtype).to(tl.float32)  # fmt: skip
        da_extra = tl.zeros([BM, 1], tl.float32)
        dh_extra = da_extra
        if d_stats is not None:
            da_extra = tl.load(d_stats + row)[:, None]
            dh_extra = tl.load(d_stats + 2 * stride_s + row)[:, None]
        if weight is not None:
            w = tl.load(weight + n, mask=in_n, other=0.0).to(tl.float32)
            dh += tl.load(d_stats + 4 * stride_s + row)[:, None] * w[None, :]
        dg, du, h = slopes(g, u, dh, da_extra, dh_extra, F_STEPS, G_STEPS, up is not None)
        off = inactive(g, n[None, :], in_n[None, :], THRESHOLD, thresholds)
        at = row[:, None] * N + n[None, :]
        mask = in_m[:, None] & in_n[None, :]
        tl.store(d_gate + at, tl.where(off, 0.0, dg).to(dtype), mask=mask)
        if up is not None:
            tl.store(d_up + at, tl.where(off, 0.0, du).to(dtype), mask=mask)
        tl.store(hidden + at, tl.where(off, 0.0, h).to(dtype), mask=mask)


def gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    gate: tuple[torch.Tensor, torch.Tensor | None],
    up: tuple[torch.Tensor, torch.Tensor | None] | None,
    down: torch.Tensor,
    d_stats: torch.Tensor | None,
    weight: torch.Tensor | None,
    listed: Listed,
    f: Program,
    g: Program,
    threshold: float,
    thresholds: torch.Tensor | None,
    into: Sequence[torch.Tensor | None],
) -> None:
    """Write d gate, d up and h of the listed rows `into` contiguous [M, N] each.

    gate, up: weight [N, K], any strides, and bias. down: [D, N], any strides.
    """
    d_gate, d_up, h = into
    assert h is not None
    up_weight, up_bias = up or (None, None)
    _gradients_kernel[(programs_of(x),)](
        x, dy, *gate, up_weight, up_bias, down, d_stats, weight, thresholds, d_gate, d_up, h,
        listed.rows, listed.length, *h.shape, x.stride(0), dy.stride(0), *_strides(gate[0]), *_strides(up_weight),
        down.stride(1), down.stride(0), 0 if d_stats is None else d_stats.stride(0), threshold,
        x.shape[1], dy.shape[1], F_STEPS=encode(f), G_STEPS=encode(g), **pdl_options(x),
        **_tile_of(x, "relu_ffn/projections"),
    )  # fmt: skip


@triton.jit
def _sum_of_parts(acc, parts, arrived, unit, splits, BM: tl.constexpr, BN: tl.constexpr):
    """Store acc, one part of a split tile. Return (sum, whether this program is the last to arrive); only in the last
    program is it the sum of all parts, added in a fixed order."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(parts + unit * (BM * BN) + at, acc)
    tl.debug_barrier()  # all threads have stored
    last = tl.atomic_add(arrived + unit // splits, 1) == splits - 1
    tl.debug_barrier()
    if last:
        tl.store(arrived + unit // splits, 0)
        acc = tl.zeros([BM, BN], tl.float32)
        first = unit // splits * splits
        for s in range(splits):
            acc += tl.load(parts + (first + s) * (BM * BN) + at, cache_modifier=".cg")
    return acc, last


@relaunched
@triton.jit
def _product_kernel(
    a, b, c, d, bias, out, rows, length, parts, arrived,
    M, N, stride_a, stride_bn, stride_bk, stride_dn, stride_dk, stride_o,
    K: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = a[row] @ b^T (+ c[row] @ d^T) + bias for the listed rows. With ADD, add to out[row] instead.

    If there are fewer tiles than programs, several programs split a tile's sum, and the last one to arrive adds the
    parts.
    """
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    tiles_m, tiles_n = tl.cdiv(n_rows, BM), tl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    splits = tl.minimum(SPLITS, tl.maximum(1, tl.num_programs(0) // tl.maximum(tiles, 1)))
    depth = tl.cdiv(tl.cdiv(K, splits), BK) * BK
    for unit in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        k0 = unit % splits * depth
        k = tl.minimum(depth, K - k0)
        row, in_m, n, in_n = _tile_of_list(
            unit // splits, tiles_m, tiles_n, rows, n_rows, M, N, BM, BN
        )
        acc = tl.zeros([BM, BN], tl.float32)
        acc = _add_dot(
            acc, a + k0, row, in_m, stride_a, b + k0 * stride_bk, n, in_n, stride_bn, stride_bk, k,
            K % BK == 0, BK, PRECISION,
        )  # fmt: skip
        if c is not None:
            acc = _add_dot(
                acc, c + k0, row, in_m, stride_a, d + k0 * stride_dk, n, in_n, stride_dn, stride_dk, k,
                K % BK == 0, BK, PRECISION,
            )  # fmt: skip
        last = splits > 0
        if splits > 1:
            acc, last = _sum_of_parts(acc, parts, arrived, unit, splits, BM, BN)
        if last:
            if bias is not None:
                acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
            at = out + row[:, None] * stride_o + n[None, :]
            mask = in_m[:, None] & in_n[None, :]
            if ADD:
                acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    listed: Listed,
    *,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    add: bool = False,
) -> None:
    """out[row] = a[row] @ b^T (+ second[0][row] @ second[1]^T) + bias for the listed rows. With `add`, add to
    out[row] instead.

    a: [M, K], unit stride along K; second[0] has the same strides. b: [N, K], any strides. out: [M, N].
    """
    tile, programs = _tile_of(a), programs_of(a)
    c, d = second or (None, b)
    parts = a.new_empty(programs * tile["BM"] * tile["BN"], dtype=torch.float32)
    _product_kernel[(programs,)](
        a, b, c, d, bias, out, listed.rows, listed.length, parts, listed.arrived,
        *out.shape, a.stride(0), *b.stride(), *d.stride(), out.stride(0), a.shape[1],
        ADD=add, **pdl_options(a), **tile,
    )  # fmt: skip


@triton.jit
def _add_sums(
    a, x, out, bias_out, scale, rows, n_rows, M, N, K, stride_a, stride_x, stride_on, stride_ok,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of one sum of `_sums_kernel`, and its part of the sums of columns."""
    tiles_m, tiles_n = tl.cdiv(N, BM), tl.cdiv(K, BN)
    programs = tl.num_programs(0)
    for t in range(tl.program_id(0), tiles_m * tiles_n, programs):
        pm, pn = tile_at(t, tiles_m, tiles_n)
        n = pm * BM + tl.arange(0, BM)
        k = pn * BN + tl.arange(0, BN)
        acc = tl.zeros([BM, BN], tl.float32)
        for i0 in range(0, n_rows, BK):
            i = i0 + tl.arange(0, BK)
            row = tile_rows(rows, n_rows, M, i)[:, None]
            there = (i < n_rows)[:, None]
            w = tl.load(a + row * stride_a + n[None, :], mask=there & (n < N)[None, :], other=0.0)
            v = tl.load(x + row * stride_x + k[None, :], mask=there & (k < K)[None, :], other=0.0)
            acc = tl.dot(w.T, v, acc, input_precision=PRECISION)
        at = out + n[:, None].to(tl.int64) * stride_on + k[None, :].to(tl.int64) * stride_ok
        mask = (n < N)[:, None] & (k < K)[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
    if bias_out is not None:
        # Not in the loop above, which would wait for these sums. The programs with the fewest tiles begin.
        for pm in range(programs - 1 - tl.program_id(0), tiles_m, programs):
            n = pm * BM + tl.arange(0, BM)
            total = tl.load(bias_out + n, mask=n < N, other=0.0).to(tl.float32)
            for i0 in range(0, n_rows, BK):
                i = i0 + tl.arange(0, BK)
                row = tile_rows(rows, n_rows, M, i)[:, None]
                there = (i < n_rows)[:, None]
                w = tl.load(
                    a + row * stride_a + n[None, :], mask=there & (n < N)[None, :], other=0.0
                )
                w = w.to(tl.float32)
                if scale is not None:
                    w *= tl.load(scale + row, mask=there, other=0.0)
                total += tl.sum(w, 0)
            tl.store(bias_out + n, total.to(bias_out.dtype.element_ty), mask=n < N)


@relaunched
@triton.jit
def _sums_kernel(
    a0, x0, out0, bias0, scale0, K0, stride_x0, stride_on0, stride_ok0,
    a1, x1, out1, bias1, scale1, K1, stride_x1, stride_on1, stride_ok1,
    a2, x2, out2, bias2, scale2, K2, stride_x2, stride_on2, stride_ok2,
    rows, length, M, N, stride_a, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to three sums over the listed rows: out[n, k] += sum of a[row, n] * x[row, k] and, unless it is None,
    bias_out[n] += sum of a[row, n], times scale[row] unless scale is None."""
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    if n_rows == 0:
        return
    _add_sums(
        a0, x0, out0, bias0, scale0, rows, n_rows, M, N, K0, stride_a, stride_x0, stride_on0, stride_ok0,
        BM, BN, BK, PRECISION,
    )  # fmt: skip
    if a1 is not None:
        _add_sums(
            a1, x1, out1, bias1, scale1, rows, n_rows, M, N, K1, stride_a, stride_x1, stride_on1, stride_ok1,
            BM, BN, BK, PRECISION,
        )  # fmt: skip
    if a2 is not None:
        _add_sums(
            a2, x2, out2, bias2, scale2, rows, n_rows, M, N, K2, stride_a, stride_x2, stride_on2, stride_ok2,
            BM, BN, BK, PRECISION,
        )  # fmt: skip


class Sum(NamedTuple):
    """out [N, K], any strides, += a^T @ x over the listed rows of a [M, N] and x [M, K]; bias [N], unless it is None,
    += the sum of a over these rows, each times scale[row] unless `scale` [M] is None."""

    a: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None = None


def add_sums(sums: Sequence[Sum], listed: Listed) -> None:
    """Compute one to three sums over the same rows; their `a` have equal strides."""
    operands: list[Any] = []
    for s in sums:
        operands += [*s, s.x.shape[1], s.x.stride(0), *s.out.stride()]
    operands += [None, None, None, None, None, 1, 1, 1, 1] * (3 - len(sums))
    a = sums[0].a
    _sums_kernel[(programs_of(a),)](
        *operands,
        listed.rows,
        listed.length,
        *a.shape,
        a.stride(0),
        **pdl_options(a),
        **_tile_of(a),
    )
