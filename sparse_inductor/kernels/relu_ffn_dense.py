"""Kernels of the ReLU feed-forward block for rows that are not sparse: tile products over a list of rows.

How long the list is, only the device knows: every kernel is launched with a grid that fills the GPU, reads the length,
and returns at once where there is nothing to do. So rows may change sides from replay to replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from .boxes import boxes
from .early import early, wait_for_previous
from .epilogue import encode, evaluate
from .launch import relaunched
from .relu_ffn_dots import slopes
from .relu_ffn_packing import ARRIVED, listed_rows, n_listed

__all__ = [
    "PAD",
    "Sum",
    "activate",
    "add_products",
    "copied_product",
    "gather",
    "hidden",
    "precision",
    "product",
    "readable",
    "room_for_copies",
    "row_stats",
    "slopes_in_place",
]


def _tile(t: torch.Tensor) -> dict[str, int]:
    """BM rows x BN columns, BK deep, and how to run it."""
    if not t.is_cuda:
        return {"BM": 16, "BN": 32, "BK": 16, "num_warps": 4, "num_stages": 1}
    if t.dtype == torch.float32:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    # 128 x 256 has the fewest operand bytes a flop of what fits the registers of 8 warps; three stages are 147 KB.
    return {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}


def _narrow(tile: dict[str, int]) -> dict[str, int]:
    """The tile where operands come through pointers, which take registers too."""
    return {**tile, "BN": min(tile["BN"], 128)}


def _programs(t: torch.Tensor) -> int:
    if not t.is_cuda:
        return 3
    return torch.cuda.get_device_properties(t.device).multi_processor_count


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


@triton.jit
def _dot_listed(
    a, a_rows, stride_am, stride_ak, b, cols, stride_bn, stride_bk, K,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A[a_rows] @ B[cols]^T. EVEN: K is a multiple of BK. Rows that are not in it repeat another."""
    acc = tl.zeros([BM, BN], tl.float32)
    a_ptr = a + a_rows[:, None] * stride_am
    b_ptr = b + cols[None, :] * stride_bn
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a_at, b_at = a_ptr + k[None, :] * stride_ak, b_ptr + k[:, None] * stride_bk
        if EVEN:
            v, w = tl.load(a_at), tl.load(b_at)
        else:
            v = tl.load(a_at, mask=(k < K)[None, :], other=0.0)
            w = tl.load(b_at, mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(v, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _hidden_box(
    u, gates, out, m, n, cut, F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr
):
    """out = f(gate) * g(u) of a box of gates at (m, n)."""
    g = gates.load([m, n]).to(tl.float32)
    h = evaluate(g, F_STEPS)
    if GATED:
        h = h * evaluate(u, G_STEPS)
    out.store([m, n], tl.where(g <= cut, 0.0, h).to(out.dtype))


@relaunched
@triton.jit
def _hidden_kernel(
    x, up, gate, x_box, up_box, gate_box, out_box, bias, state, rows, whole,
    M, N, stride_xm, stride_xk, stride_un, stride_uk, CUT, K: tl.constexpr,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BOXES: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gate[row] = f(gate[row]) * g(x[row] up^T + bias), in place, for the listed rows. gate: [M, N], contiguous.

    BOXES: where every row is listed, through the bulk copy engine, BN columns a tile, into out_box, else PART columns.
    SOME: nothing where every row is listed. whole, unless that is None: 1 where every row is listed, else 0.
    """
    wait_for_previous(EARLY)
    n_rows = n_listed(state)
    if SOME and n_rows == M:
        return
    if whole is not None and tl.program_id(0) == 0:
        tl.store(whole, (n_rows == M).to(tl.int32))
    cut = tl.full([], CUT, tl.float32)
    if BOXES and n_rows == M:
        tiles_m = tl.cdiv(M, BM)
        tiles_n = tl.cdiv(N, BN)
        # Flattened, so that the next tile's operands are on their way while a tile ends.
        for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
            pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
            u = tl.zeros([BM, BN], tl.float32)
            if GATED:
                for k in tl.range(0, K, BK):
                    u = tl.dot(x_box.load([pm * BM, k]), up_box.load([pn * BN, k]).T, u)
                if HAS_BIAS:
                    n = pn * BN + tl.arange(0, BN)
                    u += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            # By halves: what is read and written passes through shared memory, beside the operands' stages.
            left, right = tl.split(tl.permute(tl.reshape(u, (BM, 2, BN // 2)), (0, 2, 1)))
            n = pn * BN
            _hidden_box(left, gate_box, out_box, pm * BM, n, cut, F_STEPS, G_STEPS, GATED)
            n += BN // 2
            _hidden_box(right, gate_box, out_box, pm * BM, n, cut, F_STEPS, G_STEPS, GATED)
    else:
        tiles_m = tl.cdiv(n_rows, BM)
        tiles_n = tl.cdiv(N, PART)
        for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
            pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
            i = pm * BM + tl.arange(0, BM)
            in_m = i < n_rows
            row = listed_rows(state, rows, i, M).to(tl.int64)
            n = pn * PART + tl.arange(0, PART)
            in_n = n < N
            col = tl.where(in_n, n, 0).to(tl.int64)
            if GATED:
                u = _dot_listed(
                    x, row, stride_xm, stride_xk, up, col, stride_un, stride_uk, K,
                    K % BK == 0, BM, PART, BK, PRECISION
                )  # fmt: skip
                if HAS_BIAS:
                    u += tl.load(bias + col, mask=in_n, other=0.0).to(tl.float32)[None, :]
            # After the product: pointers to a whole tile take more registers than its accumulator.
            at = gate + row[:, None] * N + col[None, :]
            mask = in_m[:, None] & in_n[None, :]
            g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            h = evaluate(g, F_STEPS)
            if GATED:
                h = h * evaluate(u, G_STEPS)
            tl.store(at, tl.where(g <= cut, 0.0, h).to(gate.dtype.element_ty), mask=mask)


def _listed_tile(t: torch.Tensor, found: list) -> tuple[list, bool, dict[str, int]]:
    """(descriptors or Nones, whether they are descriptors, tile) of a kernel of listed rows."""
    tile = _tile(t)
    able = None not in found
    # Through pointers, which take registers too; and the fewer rows, the more tiles are needed to fill the GPU.
    tile["PART"] = min(tile["BN"], 64)
    if not able:
        tile["BN"] = tile["PART"]
        if t.is_cuda and t.dtype != torch.float32:
            # A few tiles of long sums, which wait for memory: six stages of 24 KB are as much as three of BN columns.
            tile["num_stages"] = 6
    return found if able else [None] * len(found), able, tile


def hidden(
    x: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    f: Program,
    g: Program,
    cut: float,
    some: bool = False,
    out: torch.Tensor | None = None,
    whole: torch.Tensor | None = None,
) -> None:
    """Make h of the listed rows in the place of their gate projection, a row of `gate` [M, N].

    some: nothing where every row is listed. Else h is in `out` there, if that is given, which takes the copy engine,
    and `whole`, one int32, says 1; it says 0 where not every row is listed.
    """
    table = x if up is None else up
    tile = _tile(x)
    to = gate if out is None else out
    shapes = (
        (x, "BM", "BK", 1), (table, "BN", "BK", 1), (gate, "BM", "BN", 2), (to, "BM", "BN", 2),
    )  # fmt: skip
    made = [None if some else boxes(t, tile[i], tile[j] // part) for t, i, j, part in shapes]
    made, able, tile = _listed_tile(x, made)
    _hidden_kernel[(_programs(x),)](
        x, table, gate, *made, bias, *listed, whole,
        *gate.shape, *x.stride(), *table.stride(), cut, x.shape[1],
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, HAS_BIAS=bias is not None,
        BOXES=able, SOME=some, PRECISION=precision(x), **early(x), **tile,
    )  # fmt: skip


@relaunched
@triton.jit
def _activate_kernel(
    gate, up, numbers, CUT,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gate = f(gate) * g(up), in place, BLOCK numbers a program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numbers
    g = tl.load(gate + i, mask=mask, other=0.0).to(tl.float32)
    h = evaluate(g, F_STEPS)
    if GATED:
        h = h * evaluate(tl.load(up + i, mask=mask, other=0.0).to(tl.float32), G_STEPS)
    tl.store(gate + i, tl.where(g <= CUT, 0.0, h).to(gate.dtype.element_ty), mask=mask)


def activate(
    gate: torch.Tensor, up: torch.Tensor | None, f: Program, g: Program, cut: float
) -> torch.Tensor:
    """h in the place of the gate projection, both projections dense and contiguous."""
    block = 1024 if gate.is_cuda else 64
    _activate_kernel[(triton.cdiv(gate.numel(), block),)](
        gate, up, gate.numel(), cut,
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, BLOCK=block,
    )  # fmt: skip
    return gate


@relaunched
@triton.jit
def _row_stats_kernel(hidden, all_hidden, stats, state, rows, M, N, stride_s, BLOCK: tl.constexpr):
    """The sum of |h| and the number of non-zeros of listed rows, from h [M, N]; from all_hidden where all are."""
    n_rows = n_listed(state)
    if n_rows == M:
        hidden = all_hidden
    for i in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.max(listed_rows(state, rows, tl.full([1], i, tl.int32), M), 0).to(tl.int64)
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
    hidden: torch.Tensor,
    stats: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    all_hidden: torch.Tensor,
) -> None:
    """Fill stats[2:] [4, M] of listed rows from `hidden` [M, N], contiguous, or from all_hidden where all are."""
    _row_stats_kernel[(8 * _programs(hidden),)](
        hidden, all_hidden, stats, *listed, *hidden.shape, stats.stride(0),
        BLOCK=1024 if hidden.is_cuda else 32,
    )  # fmt: skip


# Programs that share a tile of `product` by its sum, where few rows are listed: the sum is over N, 5 632 in the
# figures, and a tile alone would take as long as a whole wave of them.
SPLITS = tl.constexpr(16)
# The same for halves of tiles, of which a part is 64 KB and all are read by the last program to arrive; and steps of a
# sum that are worth a part.
SPLITS_BOXES = tl.constexpr(8)
STEPS_BOXES = tl.constexpr(20)
# Stages of 32 KB of a tile of half the columns.
STAGES_HALF = tl.constexpr(5)
# Parts that are asked for at once.
AT_ONCE = tl.constexpr(4)


@triton.jit
def _rest(tiles, steps):
    """(tiles past the last round of all programs, if there are programs for halves of them, else none; programs that
    share the sum of a half, of so many steps)."""
    rest = tiles % tl.num_programs(0)
    splits = tl.num_programs(0) // tl.maximum(2 * rest, 1)
    rest = tl.where(splits > 0, rest, 0)
    return rest, tl.minimum(splits, tl.minimum(SPLITS_BOXES, tl.maximum(steps // STEPS_BOXES, 1)))


@triton.jit
def _is_last(acc, parts, arrived, unit, splits, BM: tl.constexpr, BN: tl.constexpr):
    """Put a tile's part away; whether the others of this tile are there, too."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(parts + unit * (BM * BN) + at, acc)
    tl.debug_barrier()  # all threads' parts are there
    last = tl.atomic_add(arrived + unit // splits, 1) == splits - 1
    tl.debug_barrier()
    return last


@triton.jit
def _all_parts(parts, n0, unit, splits, BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr):
    """The sum of a tile's parts, in order, of PART columns from n0 on."""
    at = tl.arange(0, BM)[:, None] * BN + n0 + tl.arange(0, PART)[None, :]
    first = unit // splits * splits
    total = tl.zeros([BM, PART], tl.float32)
    for i in range(0, splits, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            s = tl.full([1, 1], j, tl.int32) + i
            part = parts + (first + s) * (BM * BN) + at
            total += tl.load(part, mask=s < splits, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _put(total, out, bias, m0, n0, M, N, stride, HAS_BIAS: tl.constexpr):
    """out[m0:, n0:] = total + bias, as far as out [M, N] reaches."""
    i = m0 + tl.arange(0, total.shape[0])
    n = n0 + tl.arange(0, total.shape[1])
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    to = out + i.to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(i < M)[:, None] & (n < N)[None, :])


@relaunched
@triton.jit
def _product_kernel(
    a, all_a, b, out, a_box, b_box, half_box, out_box, bias, state, rows, parts,
    M, N, stride_am, stride_ak, stride_bn, stride_bk, stride_om, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, BOXES: tl.constexpr, EARLY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = a[row] b^T + bias for the listed rows; of all_a, which is a_box, where all are.

    BOXES: where every row is listed, through the bulk copy engine, BN columns a tile, and half of them where all
    programs have no round of whole ones to do any more; else PART columns. If such tiles are fewer than programs,
    several make parts [tile, split, tile's size] of a tile's sum, and the one that arrives last adds them, in order.
    """
    wait_for_previous(EARLY)
    n_rows = n_listed(state)
    tiles_m = tl.cdiv(n_rows, BM)
    if BOXES and n_rows == M:
        tiles_n = tl.cdiv(N, BN)
        tiles = tiles_m * tiles_n
        rest, splits = _rest(tiles, tl.cdiv(K, BK))
        for t in tl.range(tl.program_id(0), tiles - rest, tl.num_programs(0), flatten=True):
            pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
            acc = tl.zeros([BM, BN], tl.float32)
            for k in tl.range(0, K, BK):
                acc = tl.dot(a_box.load([pm * BM, k]), b_box.load([pn * BN, k]).T, acc)
            if HAS_BIAS:
                n = pn * BN + tl.arange(0, BN)
                acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            out_box.store([pm * BM, pn * BN], acc.to(out_box.dtype))
        unit = tl.program_id(0)
        if unit < 2 * rest * splits:
            HALF: tl.constexpr = BN // 2
            half = unit // splits
            pm, pn = _tile_at(tiles - rest + half // 2, tiles_m, tiles_n, 8)
            first = pn * BN + half % 2 * HALF
            depth = tl.cdiv(tl.cdiv(K, splits), BK) * BK
            k0 = unit % splits * depth
            acc = tl.zeros([BM, HALF], tl.float32)
            for k in tl.range(k0, tl.minimum(k0 + depth, K), BK, num_stages=STAGES_HALF):
                acc = tl.dot(a_box.load([pm * BM, k]), half_box.load([first, k]).T, acc)
            if splits == 1:
                _put(acc, out, bias, pm * BM, first, M, N, stride_om, HAS_BIAS)
            elif _is_last(acc, parts, state + ARRIVED, unit, splits, BM, HALF):
                for n0 in tl.static_range(0, HALF, PART):
                    total = _all_parts(parts, n0, unit, splits, BM, HALF, PART)
                    _put(total, out, bias, pm * BM, first + n0, M, N, stride_om, HAS_BIAS)
    else:
        if n_rows == M:
            a = all_a
        tiles_n = tl.cdiv(N, PART)
        tiles = tiles_m * tiles_n
        splits = tl.minimum(SPLITS, tl.maximum(1, tl.num_programs(0) // tl.maximum(tiles, 1)))
        depth = tl.cdiv(tl.cdiv(K, splits), BK) * BK
        for unit in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
            k0 = (unit % splits) * depth
            pm, pn = _tile_at(unit // splits, tiles_m, tiles_n, 8)
            i = pm * BM + tl.arange(0, BM)
            in_m = i < n_rows
            row = listed_rows(state, rows, i, M).to(tl.int64)
            n = pn * PART + tl.arange(0, PART)
            in_n = n < N
            col = tl.where(in_n, n, 0).to(tl.int64)
            acc = _dot_listed(
                a + k0 * stride_ak, row, stride_am, stride_ak,
                b + k0 * stride_bk, col, stride_bn, stride_bk, tl.minimum(depth, K - k0),
                K % BK == 0, BM, PART, BK, PRECISION
            )  # fmt: skip
            last = splits > 0
            if splits > 1:
                last = _is_last(acc, parts, state + ARRIVED, unit, splits, BM, PART)
                if last:
                    acc = _all_parts(parts, 0, unit, splits, BM, PART, PART)
            if last:
                if HAS_BIAS:
                    acc += tl.load(bias + col, mask=in_n, other=0.0).to(tl.float32)[None, :]
                to = out + row[:, None] * stride_om + col[None, :]
                tl.store(to, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    all_a: torch.Tensor | None = None,
) -> None:
    """out[row] = a[row] @ b^T + bias for the listed rows. b: [N, K], any strides.

    all_a: what `a` is where every row is listed, of the same layout.
    """
    tile = _tile(a)
    all_a = a if all_a is None else all_a
    shapes = ((all_a, "BM", "BK", 1), (b, "BN", "BK", 1), (b, "BN", "BK", 2), (out, "BM", "BN", 1))
    found = [boxes(t, tile[i] // part, tile[j]) for t, i, j, part in shapes]
    made, able, tile = _listed_tile(a, found)
    programs = _programs(a)
    parts = torch.empty(programs * tile["BM"] * tile["BN"], dtype=torch.float32, device=a.device)
    _product_kernel[(programs,)](
        a, all_a, b, out, *made, bias, *listed, parts,
        a.shape[0], b.shape[0], *a.stride(), *b.stride(), out.stride(0), b.shape[1],
        HAS_BIAS=bias is not None, BOXES=able, PRECISION=precision(a), **early(a), **tile,
    )  # fmt: skip


# The backward works on copies of the listed rows, one after the other, so that every product of theirs can go through
# the bulk copy engine, which reads the rows themselves where it can and all are listed. PAD rows after the last are
# zeros, for the products that sum over rows.
PAD = tl.constexpr(64)


@relaunched
@triton.jit
def _gather_kernel(
    x, dy, x_out, dy_out, rows, length, M, K, D, stride_x, stride_y,
    SOME: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x_out[i], dy_out[i] = x[rows[i]], dy[rows[i]], and zeros up to a multiple of PAD rows. SOME: unless all M rows
    are listed."""
    n_rows = tl.load(length)
    if SOME and n_rows == M:
        return
    for i in range(tl.program_id(0), tl.cdiv(n_rows, PAD) * PAD, tl.num_programs(0)):
        row = tl.load(rows + i, mask=i < n_rows, other=0).to(tl.int64)
        at = tl.full([], 0, tl.int64) + i
        for k0 in range(0, K, BLOCK):
            k = k0 + tl.arange(0, BLOCK)
            v = tl.load(x + row * stride_x + k, mask=tl.where(i < n_rows, k < K, False), other=0.0)
            tl.store(x_out + at * K + k, v, mask=k < K)
        for d0 in range(0, D, BLOCK):
            d = d0 + tl.arange(0, BLOCK)
            v = tl.load(dy + row * stride_y + d, mask=tl.where(i < n_rows, d < D, False), other=0.0)
            tl.store(dy_out + at * D + d, v, mask=d < D)


def readable(t: torch.Tensor) -> bool:
    """Whether rows of t need not be copied where all of them are listed."""
    return not t.is_cuda or boxes(t, PAD.value, PAD.value) is not None


def room_for_copies(x: torch.Tensor) -> torch.Tensor:
    """Room for `gather` to copy rows of x [M, K] to: PAD more of them."""
    return x.new_empty(len(x) + PAD.value, x.shape[1])


def gather(
    x: torch.Tensor,
    dy: torch.Tensor,
    x_out: torch.Tensor,
    dy_out: torch.Tensor,
    rows: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Copy the listed rows of x [M, K] and dy [M, D] to x_out and dy_out, of `room_for_copies`; nothing where all are
    listed and both are `readable`."""
    some = readable(x) and readable(dy)
    _gather_kernel[(4 * _programs(x),)](
        x, dy, x_out, dy_out, rows, length, *x.shape, dy.shape[1], x.stride(0), dy.stride(0),
        SOME=some, PAD=PAD.value, BLOCK=1024 if x.is_cuda else 32,
    )  # fmt: skip


@triton.jit
def _copied_tile(
    acc, a, m0, b, n0, M, N, K, first, end, stride_a, stride_b,
    BOXES: tl.constexpr, BY_ROW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """acc + A[m0:, first:end] @ B[n0:, first:end]^T, or with BY_ROW @ B[first:end, n0:]."""
    if BOXES:
        for k in tl.range(first, end, BK, num_stages=STAGES):
            if BY_ROW:
                acc = tl.dot(a.load([m0, k]), b.load([k, n0]), acc)
            else:
                acc = tl.dot(a.load([m0, k]), b.load([n0, k]).T, acc)
    else:
        m = (m0 + tl.arange(0, BM)).to(tl.int64)
        n = (n0 + tl.arange(0, BN)).to(tl.int64)
        for k0 in range(first, end, BK):
            k = (k0 + tl.arange(0, BK)).to(tl.int64)
            in_k = k < K
            v = tl.load(
                a + m[:, None] * stride_a + k[None, :],
                mask=(m < M)[:, None] & in_k[None, :],
                other=0.0,
            )
            if BY_ROW:
                at = b + k[:, None] * stride_b + n[None, :]
            else:
                at = b + n[None, :] * stride_b + k[:, None]
            w = tl.load(at, mask=(n < N)[None, :] & in_k[:, None], other=0.0)
            acc = tl.dot(v, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _put_copied(
    acc, out, bias, rows, m0, n0, n_rows, N, stride, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """out[i] = acc + bias for a tile's rows i from m0 on; with SCATTER out[rows[i]]."""
    n = n0 + tl.arange(0, acc.shape[1])
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    i = m0 + tl.arange(0, acc.shape[0])
    row = tl.load(rows + i, mask=i < n_rows, other=0).to(tl.int64) if SCATTER else i.to(tl.int64)
    at = out + row[:, None] * stride + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(i < n_rows)[:, None] & (n < N)[None, :])


@triton.jit
def _copied_tiles(
    a, b, c, d, b_half, d_half, bias, out, rows, parts, arrived, n_rows, N, K, stride_a, stride_b, stride_d, stride_o,
    BOXES: tl.constexpr, BY_ROW: tl.constexpr, TWO: tl.constexpr, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of a program of `_copied_product_kernel`."""
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(n_rows, BM)
    tiles = tiles_m * tiles_n
    rest, splits = 0, 1
    if SPLIT:
        rest, splits = _rest(tiles, tl.cdiv(K, BK) * (2 if TWO else 1))
    for t in range(tl.program_id(0), tiles - rest, tl.num_programs(0)):
        pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
        m0, n0 = pm * BM, pn * BN
        acc = tl.zeros([BM, BN], tl.float32)
        acc = _copied_tile(
            acc, a, m0, b, n0, n_rows, N, K, 0, K, stride_a, stride_b, BOXES, BY_ROW, BM, BN, BK, PRECISION
        )  # fmt: skip
        if TWO:
            acc = _copied_tile(
                acc, c, m0, d, n0, n_rows, N, K, 0, K, stride_a, stride_d, BOXES, BY_ROW, BM, BN, BK, PRECISION
            )  # fmt: skip
        _put_copied(acc, out, bias, rows, m0, n0, n_rows, N, stride_o, SCATTER, HAS_BIAS)
    if SPLIT:
        unit = tl.program_id(0)
        if unit < 2 * rest * splits:
            HALF: tl.constexpr = BN // 2
            half = unit // splits
            pm, pn = _tile_at(tiles - rest + half // 2, tiles_m, tiles_n, 8)
            m0, n0 = pm * BM, pn * BN + half % 2 * HALF
            # Both sums, one behind the other.
            one = tl.cdiv(K, BK) * BK
            depth = tl.cdiv(tl.cdiv(one * (2 if TWO else 1), BK), splits) * BK
            first = unit % splits * depth
            end = first + depth
            acc = tl.zeros([BM, HALF], tl.float32)
            acc = _copied_tile(
                acc, a, m0, b_half, n0, n_rows, N, K, tl.minimum(first, one), tl.minimum(end, one), stride_a,
                stride_b, BOXES, BY_ROW, BM, HALF, BK, PRECISION, STAGES_HALF,
            )  # fmt: skip
            if TWO:
                first, end = tl.maximum(first - one, 0), tl.minimum(tl.maximum(end - one, 0), one)
                acc = _copied_tile(
                    acc, c, m0, d_half, n0, n_rows, N, K, first, end, stride_a, stride_d,
                    BOXES, BY_ROW, BM, HALF, BK, PRECISION, STAGES_HALF,
                )  # fmt: skip
            if splits == 1:
                _put_copied(acc, out, bias, rows, m0, n0, n_rows, N, stride_o, SCATTER, HAS_BIAS)
            elif _is_last(acc, parts, arrived, unit, splits, BM, HALF):
                PART: tl.constexpr = HALF // 2
                for p in tl.static_range(0, HALF, PART):
                    total = _all_parts(parts, p, unit, splits, BM, HALF, PART)
                    _put_copied(
                        total, out, bias, rows, m0, n0 + p, n_rows, N, stride_o, SCATTER, HAS_BIAS
                    )


@relaunched
@triton.jit
def _copied_product_kernel(
    a, all_a, b, c, d, b_half, d_half, bias, out, rows, length, made, parts, arrived,
    M, N, K, stride_a, stride_all, stride_b, stride_d, stride_o,
    SOME: tl.constexpr,
    BOXES: tl.constexpr, BY_ROW: tl.constexpr, TWO: tl.constexpr, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] b^T (+ c[i] d^T) + bias for i < length; with SCATTER into out[rows[i]]; with BY_ROW a[i] b.

    Where all M rows are listed, of all_a instead of a, unless that is None, and nothing if `made`, unless that is None,
    says that it is done, or with SOME. parts, arrived: unless they are None, half tiles past the last round of all
    programs are made in parts, as in `_product_kernel`.
    """
    n_rows = tl.load(length)
    if SOME and n_rows == M:
        return
    if made is not None and n_rows == M and tl.load(made) != 0:
        return
    SPLIT: tl.constexpr = parts is not None
    if all_a is not None and n_rows == M:
        _copied_tiles(
            all_a, b, c, d, b_half, d_half, bias, out, rows, parts, arrived,
            n_rows, N, K, stride_all, stride_b, stride_d, stride_o,
            BOXES, BY_ROW, TWO, SCATTER, HAS_BIAS, SPLIT, BM, BN, BK, PRECISION
        )  # fmt: skip
    else:
        _copied_tiles(
            a, b, c, d, b_half, d_half, bias, out, rows, parts, arrived,
            n_rows, N, K, stride_a, stride_b, stride_d, stride_o,
            BOXES, BY_ROW, TWO, SCATTER, HAS_BIAS, SPLIT, BM, BN, BK, PRECISION
        )  # fmt: skip


def copied_product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    length: torch.Tensor,
    *,
    by_row: bool = False,
    scatter: bool = False,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    made: torch.Tensor | None = None,
    some: bool = False,
    arrived: torch.Tensor | None = None,
) -> None:
    """out[i] (with `scatter` out[rows[i]]) = a[i] @ b^T (+ second[0][i] @ second[1]^T) + bias, i < length.

    a: as `gather` gives it, from rows of `source`. b: [N, K], or with `by_row` [K, N] and not transposed; unit stride
    along rows, as a. made, one int32: where all rows are listed and it is not 0, `out` is there already. some: nothing
    where all rows are listed. arrived: zeros, one for a program, that are counted in.
    """
    tile = _tile(a)
    M = len(out) if source is None else len(source)
    if source is not None and not readable(source):
        source = None
    K, N = a.shape[1], b.shape[1] if by_row else b.shape[0]
    c, d = second or (a, b)
    b_box = (tile["BK"], tile["BN"]) if by_row else (tile["BN"], tile["BK"])
    a_box = tile["BM"], tile["BK"]
    given = [boxes(t, *box) for t, box in zip((a, b, c, d), (a_box, b_box) * 2)]
    half_box = (tile["BK"], tile["BN"] // 2) if by_row else (tile["BN"] // 2, tile["BK"])
    given += [boxes(t, *half_box) if arrived is not None else None for t in (b, d)]
    able = None not in given[:4]
    programs, parts = _programs(a), None
    if not able:
        given, tile, arrived = [a, b, c, d, None, None], _narrow(tile), None
    elif arrived is not None:
        parts = a.new_empty(programs * tile["BM"] * tile["BN"] // 2, dtype=torch.float32)
    given.insert(1, boxes(source, *a_box) if source is not None and able else source)
    _copied_product_kernel[(programs,)](
        *given, bias, out, rows, length, made, parts, None if parts is None else arrived,
        M, N, K, a.stride(0), 0 if source is None else source.stride(0), b.stride(0), d.stride(0), out.stride(0),
        SOME=some, BOXES=able, BY_ROW=by_row, TWO=second is not None, SCATTER=scatter, HAS_BIAS=bias is not None,
        PRECISION=precision(a), **tile,
    )  # fmt: skip


@relaunched
@triton.jit
def _slopes_kernel(
    gate, up, dh, d_stats, rows, length, made,
    M, N, stride_s, CUT, SOME: tl.constexpr,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, STATS: tl.constexpr,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(gate, up, dh) -> (d gate, d up, h), in place, [M, N]; entry i of the list is row i. Zeros in PAD rows more.

    made, unless that is None, becomes 0. SOME: nothing else where all M rows are listed.
    """
    n_rows = tl.load(length)
    if made is not None and tl.program_id(0) == 0:
        tl.store(made, tl.zeros([], tl.int32))
    if SOME and n_rows == M:
        return
    blocks = tl.cdiv(N, BLOCK)
    for t in range(tl.program_id(0), tl.cdiv(n_rows, PAD) * PAD * blocks, tl.num_programs(0)):
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
            row = tl.load(rows + i, mask=i < n_rows, other=0).to(tl.int64)
            da_extra = tl.load(d_stats + row)
            dh_extra = tl.load(d_stats + 2 * stride_s + row)
        dg, du, h = slopes(g, u, gradient, da_extra, dh_extra, F_STEPS, G_STEPS, GATED)
        off = (g <= CUT) | (i >= n_rows)
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
    made: torch.Tensor | None = None,
    some: bool = False,
) -> None:
    """(gate, up, dh) [M, N] of listed rows to (d gate, d up, h), in place. made: one int32 that becomes 0.

    some: nothing else where all of `rows` are listed.
    """
    _slopes_kernel[(8 * _programs(gate),)](
        gate, up, dh, d_stats, rows, length, made,
        len(rows), gate.shape[1], 0 if d_stats is None else d_stats.stride(0), cut, SOME=some,
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, STATS=d_stats is not None,
        PAD=PAD.value, BLOCK=1024 if gate.is_cuda else 32,
    )  # fmt: skip


@triton.jit
def _summed_tiles(
    a, x, out, bias_out, before, n_rows, N, K, stride_a, stride_x, stride_on, stride_ok,
    BOXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of one sum of a program of `_add_products_kernel`, which begin behind so many of others."""
    tiles_n = tl.cdiv(K, BN)
    tiles_m = tl.cdiv(N, BM)
    programs = tl.num_programs(0)
    first = (tl.program_id(0) + programs - before % programs) % programs
    for t in range(first, tiles_m * tiles_n, programs):
        pm, pn = _tile_at(t, tiles_m, tiles_n, 8)
        n = pm * BM + tl.arange(0, BM)
        k = pn * BN + tl.arange(0, BN)
        acc = tl.zeros([BM, BN], tl.float32)
        total = tl.zeros([BM], tl.float32)
        for i0 in range(0, n_rows, BK):
            if BOXES:
                w = a.load([i0, pm * BM])
                v = x.load([i0, pn * BN])
            else:
                i = (i0 + tl.arange(0, BK)).to(tl.int64)
                in_i = (i < n_rows)[:, None]
                w = tl.load(
                    a + i[:, None] * stride_a + n[None, :], mask=in_i & (n < N)[None, :], other=0.0
                )
                v = tl.load(
                    x + i[:, None] * stride_x + k[None, :], mask=in_i & (k < K)[None, :], other=0.0
                )
            acc = tl.dot(w.T, v, acc, input_precision=PRECISION)
            if HAS_BIAS:
                total += tl.sum(w.to(tl.float32), 0)
        at = out + n[:, None].to(tl.int64) * stride_on + k[None, :].to(tl.int64) * stride_ok
        mask = (n < N)[:, None] & (k < K)[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
        if HAS_BIAS and pn == 0:
            total += tl.load(bias_out + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(bias_out + n, total.to(bias_out.dtype.element_ty), mask=n < N)


@triton.jit
def _summed(
    a, x, all_x, out, bias_out, before, n_rows, M, N, K, stride_a, stride_x, stride_all, stride_on, stride_ok,
    BOXES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sum of `_add_products_kernel`; how many tiles are behind it."""
    HAS_BIAS: tl.constexpr = bias_out is not None
    if all_x is not None and n_rows == M:
        _summed_tiles(
            a, all_x, out, bias_out, before, n_rows, N, K, stride_a, stride_all, stride_on, stride_ok,
            BOXES, HAS_BIAS, BM, BN, BK, PRECISION
        )  # fmt: skip
    else:
        _summed_tiles(
            a, x, out, bias_out, before, n_rows, N, K, stride_a, stride_x, stride_on, stride_ok,
            BOXES, HAS_BIAS, BM, BN, BK, PRECISION
        )  # fmt: skip
    return before + tl.cdiv(N, BM) * tl.cdiv(K, BN)


@relaunched
@triton.jit
def _add_products_kernel(
    a0, x0, all0, out0, bias0, a1, x1, all1, out1, bias1, a2, x2, all2, out2, bias2, length,
    M, N, K0, K1, K2, stride_a0, stride_x0, stride_all0, stride_on0, stride_ok0,
    stride_a1, stride_x1, stride_all1, stride_on1, stride_ok1,
    stride_a2, stride_x2, stride_all2, stride_on2, stride_ok2,
    BOXES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each of up to three sums, out[n, k] += sum over i < length of a[i, n] * x[i, k], or where all M rows are listed
    of all_x, unless that is None; bias_out[n] += sum of a[i, n]. Programs go on from one sum's tiles to the next's."""
    n_rows = tl.load(length)
    if n_rows == 0:
        return
    tiles = tl.full([], 0, tl.int32)
    tiles = _summed(
        a0, x0, all0, out0, bias0, tiles, n_rows, M, N, K0, stride_a0, stride_x0, stride_all0, stride_on0, stride_ok0,
        BOXES, BM, BN, BK, PRECISION
    )  # fmt: skip
    if out1 is not None:
        tiles = _summed(
            a1, x1, all1, out1, bias1, tiles, n_rows, M, N, K1,
            stride_a1, stride_x1, stride_all1, stride_on1, stride_ok1,
            BOXES, BM, BN, BK, PRECISION
        )  # fmt: skip
    if out2 is not None:
        _summed(
            a2, x2, all2, out2, bias2, tiles, n_rows, M, N, K2,
            stride_a2, stride_x2, stride_all2, stride_on2, stride_ok2,
            BOXES, BM, BN, BK, PRECISION
        )  # fmt: skip


class Sum(NamedTuple):
    """out [N, K], of any strides, += a^T x over the listed rows, which are the first ones of a [M, N] and x [M, K],
    copies of those of `source`; bias [N], unless that is None, += the sum of a over them."""

    a: torch.Tensor
    x: torch.Tensor
    source: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None


def add_products(sums: Sequence[Sum], length: torch.Tensor) -> None:
    """One to three sums over the same rows, `length` [1] of them."""
    tile = _tile(sums[0].a)
    boxed = [[boxes(s.a, tile["BK"], tile["BM"]), boxes(s.x, tile["BK"], tile["BN"])] for s in sums]
    able = all(None not in pair for pair in boxed)
    if not able:
        tile = _narrow(tile)
    operands: list[Any] = []
    strides: list[int] = []
    widths: list[int] = []
    for s, pair in zip(sums, boxed):
        whole: Any = None
        if readable(s.source):
            whole = boxes(s.source, tile["BK"], tile["BN"]) if able else s.source
        operands += [*(pair if able else (s.a, s.x)), whole, s.out, s.bias]
        strides += [s.a.stride(0), s.x.stride(0), s.source.stride(0), *s.out.stride()]
        widths.append(s.x.shape[1])
    missing = 3 - len(sums)
    _add_products_kernel[(_programs(length),)](
        *operands, *[None] * (5 * missing), length, len(sums[0].source), sums[0].a.shape[1],
        *widths, *[1] * missing, *strides, *[1] * (5 * missing),
        BOXES=able, PRECISION=precision(sums[0].a), **tile,
    )  # fmt: skip
