"""Kernels of the ReLU feed-forward block for rows that are not sparse: tile products over a list of rows.

How long the list is, only the device knows: every kernel is launched with a grid that fills the GPU, reads the length, and
returns at once where there is nothing to do. So rows may change sides from replay to replay of a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sparse_inductor.epilogue.steps import Program

from .epilogue import encode, evaluate
from .relu_ffn_rows import slopes

__all__ = ["add_products", "hidden", "precision", "product", "row_stats", "slopes_in_place"]


def _tile(t: torch.Tensor) -> dict[str, int]:
    """BM rows x BN columns, BK deep, and how to run it."""
    if not t.is_cuda:
        return {"BM": 16, "BN": 32, "BK": 16, "num_warps": 4, "num_stages": 1}
    if t.dtype == torch.float32:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    # 128 x 256 has the fewest operand bytes a flop of what fits the registers of 8 warps; three stages of it are 147 KB.
    return {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}


def _programs(t: torch.Tensor) -> int:
    if not t.is_cuda:
        return 3
    return torch.cuda.get_device_properties(t.device).multi_processor_count


def _boxes(t: torch.Tensor, rows: int, columns: int) -> torch.Tensor | TensorDescriptor:
    """A matrix for the bulk copy engine, in boxes of rows x columns, where the GPU has one and the strides allow it."""
    aligned = (
        t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
    )
    able = (
        t.is_cuda and torch.cuda.get_device_capability(t.device)[0] >= 9 and t.element_size() == 2
    )
    return TensorDescriptor.from_tensor(t, [rows, columns]) if able and aligned else t


def _launches(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tile: dict[str, int]
) -> list[tuple]:
    """(mode, a, b, out) of each launch of a product of listed rows."""
    BM, BN, BK = tile["BM"], tile["BN"], tile["BK"]
    boxes = _boxes(a, BM, BK), _boxes(b, BN, BK), _boxes(out, BM, BN)
    if all(isinstance(t, TensorDescriptor) for t in boxes):
        return [(WHOLE.value, *boxes), (PART.value, a, b, out)]
    return [(ANY.value, a, b, out)]


def precision(t: torch.Tensor) -> str:
    fast = t.is_cuda and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if fast and t.dtype == torch.float32 else "ieee"


@triton.jit
def _tile_at(t, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles share their column tiles in turn, so that both operands stay in L2."""
    group = t // (GROUP * tiles_n)
    r = t % (GROUP * tiles_n)
    size = tl.minimum(GROUP, tiles_m - group * GROUP)
    return group * GROUP + r % size, r // size


# How a kernel of listed rows is run: as it is; or as two launches, of which the device lets one do the work.
ANY = tl.constexpr(0)
WHOLE = tl.constexpr(1)  # only where every row is listed, in order: through the bulk copy engine
PART = tl.constexpr(2)  # only where some are not


@triton.jit
def _rows_to_do(length, M, MODE: tl.constexpr):
    n = tl.load(length)
    if MODE == WHOLE:
        n = tl.where(n == M, n, 0)
    elif MODE == PART:
        n = tl.where(n == M, 0, n)
    return n


@triton.jit
def _dot_tile(
    acc, a, m0, a_rows, in_m, stride_am, stride_ak, b, n0, cols, in_n, stride_bn, stride_bk, K,
    MODE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + A[a_rows] @ B[cols]^T, the sum over K. With WHOLE, a and b are descriptors of boxes from rows m0 and n0 on."""
    if MODE == WHOLE:
        for k in range(0, K, BK):
            acc = tl.dot(a.load([m0, k]), b.load([n0, k]).T, acc)
    else:
        a_ptr = a + a_rows[:, None] * stride_am
        b_ptr = b + cols[None, :] * stride_bn
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            v = tl.load(
                a_ptr + k[None, :] * stride_ak, mask=in_m[:, None] & (k < K)[None, :], other=0.0
            )
            w = tl.load(
                b_ptr + k[:, None] * stride_bk, mask=in_n[None, :] & (k < K)[:, None], other=0.0
            )
            acc = tl.dot(v, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _hidden_kernel(
    x, up, bias, gate, rows, length,
    M, N, K, stride_xm, stride_xk, stride_un, stride_uk, CUT, MODE: tl.constexpr,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gate[row] = f(gate[row]) * g(x[row] up^T + bias), in place, for the listed rows. gate: [M, N], contiguous."""
    n_rows = _rows_to_do(length, M, MODE)
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(n_rows, BM)
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
        i = pm * BM + tl.arange(0, BM)
        in_m = i < n_rows
        row = tl.load(rows + i, mask=in_m, other=0).to(tl.int64)
        n = pn * BN + tl.arange(0, BN)
        in_n = n < N
        col = tl.where(in_n, n, 0).to(tl.int64)
        if GATED:
            u = tl.zeros([BM, BN], tl.float32)
            u = _dot_tile(
                u, x, pm * BM, row, in_m, stride_xm, stride_xk,
                up, pn * BN, col, in_n, stride_un, stride_uk, K, MODE, BK, PRECISION
            )  # fmt: skip
            if HAS_BIAS:
                u += tl.load(bias + col, mask=in_n, other=0.0).to(tl.float32)[None, :]
        # After the product: pointers to a whole tile take more registers than its accumulator.
        if MODE == WHOLE:
            g = gate.load([pm * BM, pn * BN]).to(tl.float32)
        else:
            at = gate + row[:, None] * N + col[None, :]
            mask = in_m[:, None] & in_n[None, :]
            g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        h = evaluate(g, F_STEPS)
        if GATED:
            h = h * evaluate(u, G_STEPS)
        h = tl.where(g <= CUT, 0.0, h)
        if MODE == WHOLE:
            gate.store([pm * BM, pn * BN], h.to(gate.dtype))
        else:
            tl.store(at, h.to(gate.dtype.element_ty), mask=mask)


def hidden(
    x: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor,
    rows: torch.Tensor,
    length: torch.Tensor,
    f: Program,
    g: Program,
    cut: float,
) -> None:
    """Make h of the listed rows in the place of their gate projection, a row of `gate` [M, N]."""
    table = x if up is None else up
    tile = _tile(x)
    for mode, a, b, out in _launches(x, table, gate, tile):
        _hidden_kernel[(_programs(x),)](
            a, b, bias, out, rows, length,
            *gate.shape, x.shape[1], *x.stride(), *table.stride(), cut, mode,
            F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, HAS_BIAS=bias is not None,
            PRECISION=precision(x), **tile,
        )  # fmt: skip


@triton.jit
def _row_stats_kernel(hidden, stats, rows, length, N, stride_s, BLOCK: tl.constexpr):
    """The sum of |h| and the number of non-zeros of listed rows, from h [M, N]."""
    n_rows = tl.load(length)
    for i in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.load(rows + i).to(tl.int64)
        size = tl.zeros([BLOCK], tl.float32)
        nonzero = tl.zeros([BLOCK], tl.float32)
        for n0 in range(0, N, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            h = tl.load(hidden + row * N + n, mask=n < N, other=0.0).to(tl.float32)
            size += tl.abs(h)
            nonzero += (h != 0.0).to(tl.float32)
        tl.store(stats + 2 * stride_s + row, tl.sum(size, 0))
        tl.store(stats + 3 * stride_s + row, tl.sum(nonzero, 0))


def row_stats(
    hidden: torch.Tensor, stats: torch.Tensor, rows: torch.Tensor, length: torch.Tensor
) -> None:
    """Fill stats[2:] [4, M] of listed rows from `hidden` [M, N], contiguous."""
    _row_stats_kernel[(8 * _programs(hidden),)](
        hidden, stats, rows, length, hidden.shape[1], stats.stride(0),
        BLOCK=1024 if hidden.is_cuda else 32,
    )  # fmt: skip


@triton.jit
def _product_kernel(
    a, b, c, d, bias, out, rows, length,
    M, N, K, stride_am, stride_ak, stride_bn, stride_bk, stride_cm, stride_ck, stride_dn, stride_dk, stride_om,
    MODE: tl.constexpr, A_LISTED: tl.constexpr, OUT_LISTED: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = A B^T (+ C D^T) + bias, entry i of the list being row rows[i] of what is LISTED and row i of what is not."""
    n_rows = _rows_to_do(length, M, MODE)
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(n_rows, BM)
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
        i = pm * BM + tl.arange(0, BM)
        in_m = i < n_rows
        row = tl.load(rows + i, mask=in_m, other=0).to(tl.int64)
        near = tl.where(in_m, i, 0).to(tl.int64)
        n = pn * BN + tl.arange(0, BN)
        in_n = n < N
        col = tl.where(in_n, n, 0).to(tl.int64)
        source = row if A_LISTED else near
        acc = tl.zeros([BM, BN], tl.float32)
        acc = _dot_tile(
            acc, a, pm * BM, source, in_m, stride_am, stride_ak,
            b, pn * BN, col, in_n, stride_bn, stride_bk, K, MODE, BK, PRECISION
        )  # fmt: skip
        if TWO:
            acc = _dot_tile(
                acc, c, pm * BM, source, in_m, stride_cm, stride_ck,
                d, pn * BN, col, in_n, stride_dn, stride_dk, K, MODE, BK, PRECISION
            )  # fmt: skip
        if HAS_BIAS:
            acc += tl.load(bias + col, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if MODE == WHOLE:
            out.store([pm * BM, pn * BN], acc.to(out.dtype))
        else:
            target = row if OUT_LISTED else near
            at = out + target[:, None] * stride_om + col[None, :]
            tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    length: torch.Tensor,
    *,
    a_listed: bool,
    out_listed: bool,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out = a @ b^T (+ second[0] @ second[1]^T) + bias for listed rows. b: [N, K], any strides; see the kernel."""
    tile = _tile(a)
    c, d = second or (a, b)
    first, then = _launches(a, b, out, tile), _launches(c, d, out, tile)
    if len(first) != len(then):  # one of the two products cannot go through the bulk copy engine
        first, then = [(ANY.value, a, b, out)], [(ANY.value, c, d, out)]
    for (mode, p, q, to), (_, r, s, _) in zip(first, then):
        _product_kernel[(_programs(a),)](
            p, q, r, s, bias, to, rows, length,
            a.shape[0], b.shape[0], b.shape[1], *a.stride(), *b.stride(), *c.stride(), *d.stride(), out.stride(0),
            mode, A_LISTED=a_listed, OUT_LISTED=out_listed,
            TWO=second is not None, HAS_BIAS=bias is not None, PRECISION=precision(a), **tile,
        )  # fmt: skip


@triton.jit
def _slopes_kernel(
    gate, up, dh, d_stats, rows, length,
    N, stride_s, CUT,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(gate, up, dh) -> (d gate, d up, h), in place, [M, N]; entry i of the list is row i."""
    n_rows = tl.load(length)
    blocks = tl.cdiv(N, BLOCK)
    for t in range(tl.program_id(0), n_rows * blocks, tl.num_programs(0)):
        i = (t // blocks).to(tl.int64)
        n = (t % blocks) * BLOCK + tl.arange(0, BLOCK)
        at = i * N + n
        mask = n < N
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32) if GATED else g
        gradient = tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        da_extra = tl.full([], 0.0, tl.float32)
        dh_extra = tl.full([], 0.0, tl.float32)
        if STATS:
            row = tl.load(rows + i).to(tl.int64)
            da_extra = tl.load(d_stats + row)
            dh_extra = tl.load(d_stats + 2 * stride_s + row)
        dg, du, h = slopes(g, u, gradient, da_extra, dh_extra, F_STEPS, G_STEPS, GATED)
        off = g <= CUT
        tl.store(gate + at, tl.where(off, 0.0, dg).to(gate.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(up + at, tl.where(off, 0.0, du).to(up.dtype.element_ty), mask=mask)
        tl.store(dh + at, tl.where(off, 0.0, h).to(dh.dtype.element_ty), mask=mask)


def slopes_in_place(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dh: torch.Tensor,
    d_stats: torch.Tensor | None,
    rows: torch.Tensor,
    length: torch.Tensor,
    f: Program,
    g: Program,
    cut: float,
) -> None:
    """(gate, up, dh) [M, N] of listed rows to (d gate, d up, h), in place."""
    _slopes_kernel[(8 * _programs(gate),)](
        gate, up, dh, d_stats, rows, length,
        gate.shape[1], 0 if d_stats is None else d_stats.stride(0), cut,
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, STATS=d_stats is not None,
        BLOCK=1024 if gate.is_cuda else 32,
    )  # fmt: skip


@triton.jit
def _add_products_kernel(
    a, x, out, bias_out, rows, length,
    N, K, stride_xm, stride_xk, stride_on, stride_ok,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[n, k] += sum over entries i of a[i, n] * x[rows[i], k]; bias_out[n] += sum of a[i, n]. fp32 sums."""
    n_rows = tl.load(length)
    if n_rows == 0:
        return
    tiles_n = tl.cdiv(K, BN)
    tiles_m = tl.cdiv(N, BM)
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
        n = pm * BM + tl.arange(0, BM)
        k = pn * BN + tl.arange(0, BN)
        in_n, in_k = n < N, k < K
        acc = tl.zeros([BM, BN], tl.float32)
        total = tl.zeros([BM], tl.float32)
        for i0 in range(0, n_rows, BK):
            i = i0 + tl.arange(0, BK)
            in_i = i < n_rows
            row = tl.load(rows + i, mask=in_i, other=0).to(tl.int64)
            w = tl.load(
                a + i[None, :].to(tl.int64) * N + n[:, None],
                mask=in_i[None, :] & in_n[:, None],
                other=0.0,
            )
            v = tl.load(
                x + row[:, None] * stride_xm + k[None, :] * stride_xk,
                mask=in_i[:, None] & in_k[None, :],
                other=0.0,
            )
            acc = tl.dot(w, v, acc, input_precision=PRECISION)
            if HAS_BIAS:
                total += tl.sum(w.to(tl.float32), 1)
        at = out + n[:, None].to(tl.int64) * stride_on + k[None, :] * stride_ok
        mask = in_n[:, None] & in_k[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            if pn == 0:
                total += tl.load(bias_out + n, mask=in_n, other=0.0).to(tl.float32)
                tl.store(bias_out + n, total.to(bias_out.dtype.element_ty), mask=in_n)


def add_products(
    a: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    bias_out: torch.Tensor | None,
    rows: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """out [N, K] += a^T x[listed rows], a [M, N]; bias_out [N] += the sum of a over rows."""
    _add_products_kernel[(_programs(a),)](
        a, x, out, bias_out, rows, length,
        a.shape[1], x.shape[1], *x.stride(), *out.stride(),
        HAS_BIAS=bias_out is not None, PRECISION=precision(a), **_tile(a),
    )  # fmt: skip
