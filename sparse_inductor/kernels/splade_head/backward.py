"""Backward of the SPLADE head: two sums of gathered rows, in a fixed order.

The forward saves, for each sequence b and vocabulary entry v, the position winner[b, v] of the largest logit and that
logit, peak[b, v]. Only that logit has a gradient, g[b, v] = grad[b, v] * program'(peak[b, v]), where `program` consists
of the steps before and after the maximum with the winner's row operands:

    grad_hidden[b, winner[b, v], :] += g[b, v] * weight[v, :]
    grad_weight[v, :]               += g[b, v] * hidden[b, winner[b, v], :]
    grad_bias[v]                    += g[b, v]

An entry is active if g is not 0 and there is a winner. One program computes an output row as the sum over a list of
active entries, in list order. There are no float atomics, so results are bitwise reproducible. The lists are

    by vocabulary entry   a list for each v, in order of b: a running count per column (`_list_by_entry`)
    by position           a list for each b, in order of (winner, v): a stable counting sort in three kernels.
                          `_sort_tiles` sorts tiles of the vocabulary, `_place_tiles` computes the destination of
                          each tile's run of a position, `_merge_tiles` moves the entries there. A vocabulary of
                          one tile needs only the first kernel

A list has room for all entries, so that sizes do not depend on data. This avoids host synchronisation and supports CUDA
graphs. Memory is bounded by processing v, or b, in slabs (`_SCRATCH_BYTES`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program
from sparse_inductor.kernels.common.epilogue import dual, dual_rows, encode, row_arguments
from sparse_inductor.kernels.common.launch import relaunched

# Scratch for one slab's lists (8 bytes an entry) and sort keys (4 bytes), in addition to 2 bytes an entry of [B, V].
_SCRATCH_BYTES = 40 << 20
# Vocabulary entries per tile. At V = 30 522 and B = 320, tiles of twice the size take 0.26 ms longer to sort if all
# entries are active, and 0.04 ms less if 2 % are. 8 warps hold 4 keys a thread.
_TILE = 1024
_SORT_WARPS = 8
# Sequences and vocabulary entries per step of `_list_by_entry`. 32 entries are whole sectors of every operand. More
# sequences would take more registers, so that fewer programs would run at a time and hide each other's latency.
_LIST = {"BB": 32, "BV": 32, "num_warps": 4}
# Register limit per thread of `_list_by_entry`, sufficient for the steps after the maximum. The steps before the
# maximum, which few sequences have, should not reduce the number of programs per SM (4).
_LIST_REGISTERS = 128
# 256 columns are one 16-byte bf16 load per thread of one warp. Programs of the same column block run at the same time,
# and at D = 768 their third of the weight stays in L2. 8 rows in flight hide the latency of L2. A row with few entries
# takes less time than starting a program, so each program has 4 rows; with 8 rows there are too few programs to
# balance. Rows in flight replace software pipelining and take fewer registers.
_ROW = {"ROWS": 4, "R": 8, "BD": 256, "num_warps": 1, "num_stages": 1}
# A position with at least this number of entries is hot: one warp would take longer for it than the rest of the GPU for
# all other positions.
_HOT = 512
# 128 rows of 128 bytes in flight per program, and 12 programs per hot position at D = 768.
_HOT_ROW = {"R": 128, "BD": 64, "num_warps": 4, "num_stages": 1}


@triton.jit
def _winner_and_gain(
    b, v, mask, some, grad, grad_stride_b, grad_stride_v, winner, peak, per_element, rows, row_strides, V,
    STEPS: tl.constexpr, FAST: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Return winner (int32) and gradient g (fp32) of entries (b, v), any shape; inactive entries get g = 0.

    g = grad * STEPS'(peak), with the row operands of (b, winner). If MIXED, g = grad * FAST'(peak) for sequences
    without per_element[b]; some: whether per_element is set for any of these b.
    """
    at = b.to(tl.int64) * V + v
    s = tl.load(winner + at, mask=mask, other=-1).to(tl.int32)
    alive = mask & (s >= 0)
    upstream = tl.load(
        grad + b.to(tl.int64) * grad_stride_b + v.to(tl.int64) * grad_stride_v,
        mask=alive,
        other=0.0,
    ).to(tl.float32)
    z = tl.load(peak + at, mask=alive, other=0.0)
    if MIXED:
        _, slope = dual(z, FAST)
        if some:
            general = tl.load(per_element + (b + v * 0), mask=alive, other=0) != 0
            _, other = dual_rows(z, rows, row_strides, b, s, general, STEPS)
            slope = tl.where(general, other, slope)
    else:
        _, slope = dual_rows(z, rows, row_strides, b, s, alive, STEPS)
    return s, tl.where(alive, upstream * slope, 0.0)


@triton.jit
def _flag(flags, b, MIXED: tl.constexpr):
    """Return flags[b] if MIXED, else False."""
    flag = False
    if MIXED:
        flag = tl.load(flags + b) != 0
    return flag


@triton.jit
def _list_block(
    b, v, local, count, grad, grad_stride_b, grad_stride_v, winner, peak, per_element, rows, row_strides,
    B, S, V, v_end, entries, gains, STEPS: tl.constexpr, FAST: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Append the active entries of sequences b [BB, 1] to the lists of v [1, BV]. Returns their new lengths."""
    s, g = _winner_and_gain(
        b, v, (b < B) & (v < v_end), True, grad, grad_stride_b, grad_stride_v, winner, peak,
        per_element, rows, row_strides, V, STEPS, FAST, MIXED,
    )  # fmt: skip
    active = g != 0.0  # NaN is active
    ones = active.to(tl.int32)
    slot = local * B + (count + tl.cumsum(ones, 0) - 1)
    tl.store(entries + slot, b * S + s, mask=active)
    tl.store(gains + slot, g, mask=active)
    return count + tl.sum(ones, 0, keep_dims=True)


@relaunched
@triton.jit
def _list_by_entry(
    grad, grad_stride_b, grad_stride_v, winner, peak, per_element, rows, row_strides,
    B, S, V, v0, v_end, entries, gains, counts,
    STEPS: tl.constexpr, FAST: tl.constexpr, MIXED: tl.constexpr,
    BB: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """List the active (b * S + winner, g) of each v in order of b.

    A program handles BV consecutive v of the slab [v0, v_end) and all b. It reads winner, peak and grad of its columns
    once (2 + 4 + 4 bytes per entry) and writes 8 bytes per active entry, to slots [v - v0, 0..count) of [., B].
    """
    v = v0 + tl.program_id(0) * BV + tl.arange(0, BV)[None, :]
    local = (v - v0).to(tl.int64)
    count = tl.zeros([1, BV], tl.int32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)[:, None]
        if MIXED:
            # The branch contains the whole step. With a smaller branch, both sides would have to move its results.
            each = b0 + tl.arange(0, BB)
            some = tl.max(tl.load(per_element + each, mask=each < B, other=0).to(tl.int32), 0)
            if some != 0:
                count = _list_block(
                    b, v, local, count, grad, grad_stride_b, grad_stride_v, winner, peak, per_element,
                    rows, row_strides, B, S, V, v_end, entries, gains, STEPS, FAST, True,
                )  # fmt: skip
            else:
                count = _list_block(
                    b, v, local, count, grad, grad_stride_b, grad_stride_v, winner, peak, per_element,
                    rows, row_strides, B, S, V, v_end, entries, gains, FAST, FAST, False,
                )  # fmt: skip
        else:
            count = _list_block(
                b, v, local, count, grad, grad_stride_b, grad_stride_v, winner, peak, per_element,
                rows, row_strides, B, S, V, v_end, entries, gains, STEPS, FAST, False,
            )  # fmt: skip
    tl.store(counts + local, count, mask=v < v_end)


@triton.jit
def _first_not_below(keys, n, target, STEPS: tl.constexpr):
    """Return, for each target, the index of the first of n sorted keys that is >= target; n < 2**STEPS."""
    low = tl.zeros_like(target)
    high = low + n
    for _ in range(STEPS):
        mid = (low + high) // 2
        open_ = low < high
        below = tl.load(keys + mid, mask=open_, other=0) < target
        low = tl.where(open_ & below, mid + 1, low)
        high = tl.where(open_ & ~below, mid, high)
    return low


@relaunched
@triton.jit
def _sort_tiles(
    grad, grad_stride_b, grad_stride_v, winner, peak, per_element, rows, row_strides,
    S, V, b0, tiles, keys, starts, entries, gains,
    STEPS: tl.constexpr, FAST: tl.constexpr, MIXED: tl.constexpr,
    T: tl.constexpr, LOG_T: tl.constexpr, FEW: tl.constexpr, BS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Sort the active entries of a tile by (winner, v) and count them by winner.

    A program handles tile t, T consecutive v, of sequence b0 + program // tiles. It reads winner, peak and grad (2 + 4
    + 4 bytes per entry) and writes keys winner << LOG_T | (v - t T) (4 bytes per active entry) and, 4 bytes per
    position, starts[., t, s], the index of the first key of position s; starts[., t, S] is the number of keys. If
    ALONE, which means that there is one tile, it also writes the sequence's list: (v, g), 8 bytes per active entry, to
    slots of [., V].
    """
    tile = tl.program_id(0)
    b = b0 + tile // tiles
    j = tl.arange(0, T)
    v = (tile % tiles) * T + j
    some = _flag(per_element, b, MIXED)
    s, g = _winner_and_gain(
        b + tl.zeros_like(v), v, v < V, some, grad, grad_stride_b, grad_stride_v, winner, peak,
        per_element, rows, row_strides, V, STEPS, FAST, MIXED,
    )  # fmt: skip
    active = g != 0.0
    key = tl.where(active, (s << LOG_T) | j, 0x7FFFFFFF)
    n = tl.sum(active.to(tl.int32), 0)
    mine = keys + tile.to(tl.int64) * T
    if n <= FEW:  # compact first: a bitonic sort takes T log^2 T steps for any number of keys
        tl.store(mine + tl.cumsum(active.to(tl.int32), 0) - 1, key, mask=active)
        tl.debug_barrier()
        i = tl.arange(0, FEW)
        packed = tl.load(mine + i, mask=i < n, other=0x7FFFFFFF)
        tl.debug_barrier()
        tl.store(mine + i, tl.sort(packed), mask=i < n)
    else:
        tl.store(mine + j, tl.sort(key), mask=j < n)
    tl.debug_barrier()
    starts += tile.to(tl.int64) * (S + 1)
    for s0 in range(0, S, BS):
        position = s0 + tl.arange(0, BS)
        first = _first_not_below(mine, n, position << LOG_T, LOG_T + 1)
        tl.store(starts + position, first, mask=position < S)
    tl.store(starts + S, n)
    if ALONE:
        entry = tl.load(mine + j, mask=j < n, other=0) & (T - 1)
        _, gain = _winner_and_gain(
            b + tl.zeros_like(entry), entry, j < n, some, grad, grad_stride_b, grad_stride_v, winner, peak,
            per_element, rows, row_strides, V, STEPS, FAST, MIXED,
        )  # fmt: skip
        slot = tile.to(tl.int64) * V + j
        tl.store(entries + slot, entry, mask=j < n)
        tl.store(gains + slot, gain, mask=j < n)


@relaunched
@triton.jit
def _place_tiles(
    starts, offsets, hot, hot_stride, S, tiles,
    TILES: tl.constexpr, HOT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Convert the tiles' starts of a sequence into destinations in its list.

    A program handles one sequence. starts[t, s] becomes the difference between an entry's index in the list and its
    index in the sorted tile t, for entries with winner s. offsets[s] = start of position s in the list, offsets[S] =
    the length of the list. hot[0] = number of positions with at least HOT entries, hot[1:] = these positions. Reads and
    writes 4 bytes per (tile, position).
    """
    b = tl.program_id(0)
    offsets += b.to(tl.int64) * (S + 1)
    hot += b.to(tl.int64) * hot_stride
    t = tl.arange(0, TILES)[:, None]
    length = tl.zeros([1], tl.int32)  # of the positions before this block
    hots = tl.zeros([1], tl.int32)
    for s0 in range(0, S, BS):
        s = s0 + tl.arange(0, BS)
        at = starts + (b.to(tl.int64) * tiles + t) * (S + 1) + s[None, :]
        mask = (t < tiles) & (s[None, :] < S)
        first = tl.load(at, mask=mask, other=0)
        count = tl.load(at + 1, mask=mask, other=0) - first
        tl.debug_barrier()  # `at + 1` is overwritten below by a neighbouring thread
        total = tl.sum(count, 0)
        begin = length + tl.cumsum(total, 0) - total
        tl.store(at, begin[None, :] + (tl.cumsum(count, 0) - count) - first, mask=mask)
        tl.store(offsets + s, begin, mask=s < S)
        is_hot = (total >= HOT).to(tl.int32)
        tl.store(hot + hots + tl.cumsum(is_hot, 0), s, mask=is_hot != 0)
        hots += tl.sum(is_hot, 0)
        length += tl.sum(total, 0)
    tl.store(offsets + S + tl.arange(0, 1), length)
    tl.store(hot + tl.arange(0, 1), hots)


@relaunched
@triton.jit
def _merge_tiles(
    grad, grad_stride_b, grad_stride_v, winner, peak, per_element, rows, row_strides,
    S, V, b0, tiles, keys, destination, entries, gains,
    STEPS: tl.constexpr, FAST: tl.constexpr, MIXED: tl.constexpr,
    T: tl.constexpr, LOG_T: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Move a tile's sorted entries, with their gradients, to their destinations in the list of the sequence.

    A program handles one tile, as in `_sort_tiles`. For each active entry it reads key and destination (4 + 4 bytes)
    and winner, peak and grad again, and writes (v, g), 8 bytes, to slots of [., V].
    """
    tile = tl.program_id(0)
    local = tile // tiles
    b = b0 + local
    some = _flag(per_element, b, MIXED)
    destination += tile.to(tl.int64) * (S + 1)
    n = tl.load(destination + S)
    for j0 in range(0, n, BE):
        j = j0 + tl.arange(0, BE)
        key = tl.load(keys + tile.to(tl.int64) * T + j, mask=j < n, other=0)
        v = (tile % tiles) * T + (key & (T - 1))
        shift = tl.load(destination + (key >> LOG_T), mask=j < n, other=0)
        _, g = _winner_and_gain(
            b + tl.zeros_like(v), v, j < n, some, grad, grad_stride_b, grad_stride_v, winner, peak,
            per_element, rows, row_strides, V, STEPS, FAST, MIXED,
        )  # fmt: skip
        slot = local.to(tl.int64) * V + shift + j
        tl.store(entries + slot, v, mask=j < n)
        tl.store(gains + slot, g, mask=j < n)


@triton.jit
def _listed_rows(entries, gains, j, n, table, D, d):
    """Return gains[j] * table[entries[j], d], fp32 [j, d]; 0 from slot n on, and 0 if the gain is 0."""
    row = tl.load(entries + j, mask=j < n, other=0)
    g = tl.load(gains + j, mask=j < n, other=0.0)
    at = row[:, None].to(tl.int64) * D + d[None, :]
    x = tl.load(table + at, mask=(g != 0.0)[:, None] & (d[None, :] < D), other=0.0)
    return g[:, None] * x.to(tl.float32)


@triton.jit
def _sum_listed_rows(entries, gains, n, table, D, d, R: tl.constexpr, BD: tl.constexpr):
    """Return the sum of gains[j] * table[entries[j], d] over j < n in order, with R rows in flight."""
    acc = tl.zeros([BD], tl.float32)
    for i in range(0, n, R):
        acc += tl.sum(_listed_rows(entries, gains, i + tl.arange(0, R), n, table, D, d), 0)
    return acc


@relaunched
@triton.jit
def _weight_rows(
    entries, gains, counts, hidden, grad_weight, grad_bias, B, D, v0, v_end,
    NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    ROWS: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight[v] and grad_bias[v] from the list of v.

    A program computes BD columns of ROWS consecutive v, one after the other. It reads 8 bytes and BD elements of
    `hidden` per active entry and writes BD elements per row; the programs of the first columns write grad_bias.
    """
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    for k in range(ROWS):
        local = tl.program_id(0) * ROWS + k
        v = v0 + local
        if v < v_end:
            n = tl.load(counts + local)
            at = local.to(tl.int64) * B
            if NEED_WEIGHT:
                acc = _sum_listed_rows(entries + at, gains + at, n, hidden, D, d, R, BD)
                out = grad_weight + v.to(tl.int64) * D + d
                tl.store(out, acc.to(grad_weight.dtype.element_ty), mask=d < D)
            if NEED_BIAS:  # a constexpr, so not one condition with the next  # noqa: SIM102
                if tl.program_id(1) == 0:
                    total = tl.zeros([BN], tl.float32)
                    for i in range(0, n, BN):
                        j = i + tl.arange(0, BN)
                        total += tl.load(gains + at + j, mask=j < n, other=0.0)
                    tl.store(grad_bias + v, tl.sum(total, 0).to(grad_bias.dtype.element_ty))


@relaunched
@triton.jit
def _hidden_rows(
    entries, gains, offsets, weight, grad_hidden, S, D, V, b0,
    HOT: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute grad_hidden[b, s] from the slots of position s in the list of b, unless there are HOT or more.

    A program computes BD columns of ROWS consecutive positions of one sequence, one after the other. It reads 8 bytes
    and BD elements of `weight` per active entry and writes BD elements per row.
    """
    groups = tl.cdiv(S, ROWS)
    local = tl.program_id(0) // groups
    offsets += local.to(tl.int64) * (S + 1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    for k in range(ROWS):
        s = (tl.program_id(0) % groups) * ROWS + k
        begin = tl.load(offsets + s, mask=s < S, other=0)
        # `other` makes rows past the end count as hot, which skips them, too.
        n = tl.load(offsets + s + 1, mask=s < S, other=HOT) - begin
        if n < HOT:
            at = local.to(tl.int64) * V + begin
            acc = _sum_listed_rows(entries + at, gains + at, n, weight, D, d, R, BD)
            out = grad_hidden + ((b0 + local).to(tl.int64) * S + s) * D + d
            tl.store(out, acc.to(grad_hidden.dtype.element_ty), mask=d < D)


@relaunched
@triton.jit
def _hot_hidden_rows(
    entries, gains, offsets, hot, hot_stride, weight, grad_hidden, S, D, V, b0, programs,
    R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the rows that `_hidden_rows` skips: R partial sums in parallel, then their sum.

    A program computes BD columns of every `programs`-th hot row of one sequence. It reads and writes the same number of
    bytes as `_hidden_rows`.
    """
    local = tl.program_id(0) // programs
    hot += local.to(tl.int64) * hot_stride
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    for rank in range(tl.program_id(0) % programs, tl.load(hot), programs):
        s = tl.load(hot + 1 + rank)
        begin = tl.load(offsets + local.to(tl.int64) * (S + 1) + s)
        n = tl.load(offsets + local.to(tl.int64) * (S + 1) + s + 1) - begin
        at = local.to(tl.int64) * V + begin
        acc = tl.zeros([R, BD], tl.float32)
        for i in range(0, n, R):
            acc += _listed_rows(entries + at, gains + at, i + tl.arange(0, R), n, weight, D, d)
        row = (b0 + local).to(tl.int64) * S + s
        total = tl.sum(acc, 0).to(grad_hidden.dtype.element_ty)
        tl.store(grad_hidden + row * D + d, total, mask=d < D)


class _Shape:
    """Sizes of one call and its tile and slab sizes."""

    def __init__(self, B: int, S: int, D: int, V: int):
        self.B, self.S, self.D, self.V = B, S, D, V
        self.T = min(max(triton.next_power_of_2(V), 128), _TILE)
        self.tiles = triton.cdiv(V, self.T)
        budget = _SCRATCH_BYTES + 2 * B * V
        entry_bytes = 8 * B  # row and gain of every b
        self.slab_v = min(V, max(1, budget // entry_bytes))
        # key, entry and gain of every v; starts of every tile
        sequence_bytes = 12 * self.T * self.tiles + 4 * self.tiles * (S + 1)
        self.slab_b = min(B, max(1, budget // sequence_bytes))


def _slabs(n: int, size: int) -> Sequence[range]:
    """Cut [0, n) into the fewest ranges of at most `size`, of equal length except for the last."""
    count = triton.cdiv(n, size)
    step = triton.cdiv(n, count)
    return [range(i, min(i + step, n)) for i in range(0, n, step)]


def backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    winner: torch.Tensor,
    peak: torch.Tensor,
    outer: Program,
    *,
    inner: Program = (),
    rows: Sequence[torch.Tensor] = (),
    per_element: torch.Tensor | None = None,
    outer_fast: Program | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the SPLADE head with respect to hidden, weight and bias.

    Args:
        grad: [B, V], any float dtype and strides.
        hidden, weight, bias: [B, S, D], [V, D] and [V] or None, as in the forward.
        winner: [B, V] signed integer; the position of the maximum, or -1 if there is no gradient.
        peak: [B, V] fp32; the logit of the maximum.
        outer: scalar steps after the maximum.
        inner: steps on each logit before the maximum.
        rows: the operands of the row steps of `inner`, each [B, S] of any real or bool dtype and strides. They get no
            gradient.
        per_element: [B] bool, the sequences that ran `inner`; None for all. The others ran `outer_fast` (default
            `outer`) after the maximum instead.
        needs: which of the three gradients to compute; the others are returned as None.

    Returns:
        Gradients in the dtypes of hidden, weight and bias, contiguous, summed in fp32 in a fixed order.
    """
    B, S, D = hidden.shape
    V = weight.shape[0]
    if S >= 1 << 20:
        raise ValueError(f"sequences of {S} positions: sort keys hold at most {(1 << 20) - 1}")
    if B * S >= 1 << 31:
        raise ValueError(f"{B} x {S} rows of hidden: list entries hold at most {(1 << 31) - 1}")

    grad_hidden = hidden.new_empty(B, S, D) if needs[0] else None
    grad_weight = weight.new_empty(V, D) if needs[1] else None
    grad_bias = bias.new_empty(V) if needs[2] and bias is not None else None
    if B == 0:
        for g in (grad_weight, grad_bias):
            if g is not None:
                g.zero_()
        return grad_hidden, grad_weight, grad_bias

    hidden, weight = hidden.contiguous(), weight.contiguous()
    winner, peak = winner.contiguous(), peak.contiguous()
    if per_element is not None:
        per_element = per_element.contiguous().view(torch.uint8)
    source = (grad, *grad.stride(), winner, peak, per_element, *row_arguments(rows))
    programs = {
        "STEPS": encode((*inner, *outer)),
        "FAST": encode(outer if outer_fast is None else outer_fast),
        "MIXED": per_element is not None,
    }
    shape = _Shape(B, S, D, V)

    with torch.cuda.device_of(hidden):
        if grad_weight is not None or grad_bias is not None:
            _grad_weight(shape, source, programs, hidden, grad_weight, grad_bias)
        if grad_hidden is not None:
            _grad_hidden(shape, source, programs, weight, grad_hidden)
    return grad_hidden, grad_weight, grad_bias


def _grad_weight(shape, source, programs, hidden, grad_weight, grad_bias):
    B, S, D, V = shape.B, shape.S, shape.D, shape.V
    slots = shape.slab_v * B
    entries = torch.empty(slots, dtype=torch.int32, device=hidden.device)
    gains = torch.empty(slots, dtype=torch.float32, device=hidden.device)
    counts = torch.empty(shape.slab_v, dtype=torch.int32, device=hidden.device)
    for slab in _slabs(V, shape.slab_v):
        _list_by_entry[(triton.cdiv(len(slab), _LIST["BV"]),)](
            *source, B, S, V, slab.start, slab.stop, entries, gains, counts,
            **programs, **_LIST, **({"maxnreg": _LIST_REGISTERS} if hidden.is_cuda else {}),
        )  # fmt: skip
        column_blocks = 1 if grad_weight is None else triton.cdiv(D, _ROW["BD"])
        _weight_rows[(triton.cdiv(len(slab), _ROW["ROWS"]), column_blocks)](
            entries, gains, counts, hidden, grad_weight, grad_bias, B, D, slab.start, slab.stop,
            NEED_WEIGHT=grad_weight is not None, NEED_BIAS=grad_bias is not None,
            BN=128, **_ROW,
        )  # fmt: skip


def _grad_hidden(shape, source, programs, weight, grad_hidden):
    S, D, V, T, tiles = shape.S, shape.D, shape.V, shape.T, shape.tiles
    log_t = T.bit_length() - 1

    def scratch(*size, dtype=torch.int32):
        return torch.empty(size, dtype=dtype, device=weight.device)

    alone = tiles == 1
    keys, starts = scratch(shape.slab_b, tiles, T), scratch(shape.slab_b, tiles, S + 1)
    offsets = starts if alone else scratch(shape.slab_b, S + 1)
    entries, gains = scratch(shape.slab_b, V), scratch(shape.slab_b, V, dtype=torch.float32)
    hot = scratch(shape.slab_b, 1 + V // _HOT)
    # A warp sums the entries of one tile in at most 128 steps, so another launch is not worthwhile.
    hot_programs = 0 if alone else min(V // _HOT, 8)
    tiles_padded = triton.next_power_of_2(tiles)
    for slab in _slabs(shape.B, shape.slab_b):
        grid = (len(slab) * tiles,)
        _sort_tiles[grid](
            *source, S, V, slab.start, tiles, keys, starts, entries, gains, **programs,
            T=T, LOG_T=log_t, FEW=min(T, 256), BS=min(512, max(128, triton.next_power_of_2(S))),
            ALONE=alone, num_warps=_SORT_WARPS,
        )  # fmt: skip
        if not alone:
            _place_tiles[(len(slab),)](
                starts, offsets, hot, hot.stride(0), S, tiles, TILES=tiles_padded, HOT=_HOT,
                BS=max(16, 4096 // tiles_padded),  # 32 numbers a thread of 4 warps
                num_warps=4,
            )  # fmt: skip
            _merge_tiles[grid](
                *source, S, V, slab.start, tiles, keys, starts, entries, gains, **programs,
                T=T, LOG_T=log_t, BE=min(T, 256), num_warps=4,
            )  # fmt: skip
        groups = triton.cdiv(S, _ROW["ROWS"])
        _hidden_rows[(len(slab) * groups, triton.cdiv(D, _ROW["BD"]))](
            entries, gains, offsets, weight, grad_hidden, S, D, V, slab.start,
            HOT=_TILE + 1 if alone else _HOT, **_ROW,
        )  # fmt: skip
        if hot_programs:
            _hot_hidden_rows[(len(slab) * hot_programs, triton.cdiv(D, _HOT_ROW["BD"]))](
                entries, gains, offsets, hot, hot.stride(0), weight, grad_hidden, S, D, V, slab.start,
                hot_programs, **_HOT_ROW,
            )  # fmt: skip
