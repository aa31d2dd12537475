"""The SPLADE head's forward on Hopper GPUs: a warp-specialised persistent kernel in Gluon.

One warp copies operand tiles into a ring of shared-memory stages with TMA. Two warpgroups multiply 64 different
vocabulary rows each by the same 256 positions. Each warpgroup reduces its accumulator while the other one keeps the
tensor cores busy.

The 256 positions of a tile are 8 granules of 32 consecutive positions, taken in order from a list of all granules with
a kept position. Therefore a tile may end one sequence and begin the next, and padding costs at most 31 positions per
sequence. The last granule of a run of kept positions ends where the run ends. It repeats some positions of the previous
granule, which does not change a maximum, so that no mask is needed. The epilogue of a finished sequence (reduction over
lanes, elementwise program, stores) runs while the tensor cores compute the next tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_inductor.epilogue.steps import Program

from ..common.arch import capability
from ..common.epilogue import encode, evaluate
from ..common.gluon_names import tma_load
from ..common.launch import launch as launch_kernel
from ..common.launch import sm_count
from ..common.tma import tma_addressable
from .positions import ADDED, GRANULE, KEPT, PARTLY, Positions, classify

# Granules per tile: 256 positions, the widest wgmma; each has a byte of a 64-bit word of flags.
GRANULES = gl.constexpr(8)
# Vocabulary rows per warpgroup, the M of a wgmma. 64 x 256 fp32 accumulators take 128 registers a thread.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
# Features per stage: 128 bytes of 16-bit elements, one swizzle row of shared memory.
DEPTH = gl.constexpr(64)
# Stages of 48 KiB each; four fit the 227 KiB of an SM.
STAGES = gl.constexpr(4)
# Flag of a granule, one byte: 0 if all its positions are kept with add == 0; n if only the first n are; otherwise
# MIXED, and `add` decides.
MIXED = gl.constexpr(255)
# Replaces a sequence's shift from slots to positions if its kept positions are not a single run. The positions are then
# read from the list.
HOLES = gl.constexpr(-(2**31))
# Maximum slots, which are entries of the list of granules, per group of sequences. The hidden states of a group (15 MiB
# at D = 768) stay in L2 while the whole weight is read. Longer groups read the weight fewer times and have fewer
# partial tiles.
GROUP_SLOTS = tl.constexpr(320)
# Candidate numbers of groups that are compared.
CHOICES = tl.constexpr(256)

NEG_INF = gl.constexpr(float("-inf"))
NAN_SPREADS = gl.constexpr(tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["B", "S", "parts", "granules", "blocks", "programs"])
def _list_kernel(
    spans, kinds, skip, rows, flags, sequences, groups,
    B, S, parts, granules, blocks, programs,
    HAS_SPANS: tl.constexpr, HAS_SKIP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program lists, in order, the granules of all sequences that contain a kept position, one per slot.

    rows[slot] = b * S + s of a granule's first position, flags[slot] = its flag; 8 padding slots follow.
    sequences[k, 5] = the k-th listed sequence: its first slot, the end of its slots, b, the shift from
    slot * GRANULE + column to a position (or HOLES), and the number of positions that its last granule
    repeats; two sequences without an end follow. A sequence with skip[b] set is not listed. Any other
    sequence without a kept position is listed with its first granule, so that its columns are written.
    groups[0] = the number of groups, groups[1 + 2 * i:] = the first slot and the first sequence of
    group i.

    Reads 16 bytes per part of a sequence, writes 5 bytes per granule and 20 bytes per sequence.
    """
    total = 0
    listed = 0
    for b0 in range(0, B, BLOCK):
        b = b0 + tl.arange(0, BLOCK)
        mine = b < B
        if HAS_SKIP:
            mine = mine & (tl.load(skip + b, mask=mine, other=1) == 0)
        first = tl.full([BLOCK], 0, tl.int32)
        stop = first + S
        count = first + S
        moved = first
        if HAS_SPANS:
            first += 2**30
            stop = first * 0
            count = first * 0
            for part in range(parts):
                span = spans + (b.to(tl.int64) * parts + part) * 4
                first = tl.minimum(first, tl.load(span, mask=mine, other=2**30))
                stop = tl.maximum(stop, tl.load(span + 1, mask=mine, other=0))
                count += tl.load(span + 2, mask=mine, other=0)
                moved = tl.maximum(moved, tl.load(span + 3, mask=mine, other=0))
        run = (count == stop - first) & (count > 0) & (moved == 0)
        short = run & (count < GRANULE)
        number = tl.where(run, (count + GRANULE - 1) // GRANULE, 0)
        # Not a run: list the granules with a kept position.
        for g0 in range(0, granules, WIDE):
            g = g0 + tl.arange(0, WIDE)
            there = (mine & (run == 0))[:, None] & (g < granules)[None, :]
            if HAS_SPANS:  # without spans, a sequence is one run
                at = b.to(tl.int64)[:, None] * granules + g[None, :]
                kind = tl.load(kinds + at, mask=there, other=0)
                number += tl.sum((kind & KEPT).to(tl.int32), 1)
        nothing = (number == 0) & mine
        number = tl.where(nothing, 1, tl.where(mine, number, 0))
        start = total + tl.cumsum(number, 0) - number
        one = mine.to(tl.int32)
        sequence = sequences + (listed + tl.cumsum(one, 0) - one) * 5
        tl.store(sequence, start, mask=mine)
        tl.store(sequence + 1, start + number, mask=mine)
        tl.store(sequence + 2, b, mask=mine)
        tl.store(sequence + 3, tl.where(run, first - start * GRANULE, HOLES), mask=mine)
        tl.store(sequence + 4, tl.where(run & (short == 0), number * GRANULE - count, 0), mask=mine)
        seen = start
        for g0 in range(0, granules, WIDE):
            g = g0 + tl.arange(0, WIDE)
            in_run = (run & mine)[:, None] & (g[None, :] < number[:, None])
            there = (mine & (run == 0))[:, None] & (g < granules)[None, :]
            kind = tl.zeros([BLOCK, WIDE], tl.int32)
            if HAS_SPANS:
                at = b.to(tl.int64)[:, None] * granules + g[None, :]
                kind = tl.load(kinds + at, mask=there, other=0).to(tl.int32)
            kind = tl.where(nothing[:, None] & (g == 0)[None, :], KEPT | PARTLY, kind)
            keep = (in_run | ((kind & KEPT) != 0)).to(tl.int32)
            slot = seen[:, None] + tl.cumsum(keep, 1) - keep
            s = g[None, :] * GRANULE
            highest = tl.where(short, first, stop - GRANULE)
            s = tl.where(in_run, tl.minimum(first[:, None] + s, highest[:, None]), s)
            flag = tl.where(short, count, 0)[:, None] | tl.where((kind & PARTLY) != 0, MIXED, 0)
            tl.store(rows + slot, b[:, None] * S + s, mask=keep != 0)
            tl.store(flags + slot, flag.to(tl.uint8), mask=keep != 0)
            seen += tl.sum(keep, 1)
        total += tl.sum(number, 0)
        listed += tl.sum(one, 0)
    more = tl.arange(0, 16)
    tl.store(rows + total + more, more * 0, mask=more < 8)
    tl.store(flags + total + more, (more * 0).to(tl.uint8))
    field = tl.where(more == 0, total, tl.where(more % 5 == 1, 2**30, 0))
    tl.store(sequences + listed * 5 + more, field, mask=more < 10)
    # Choose the number of groups that minimises the time of the longest program, which has
    # ceil(number * blocks / programs) units. A unit takes the time of its group's tiles; on average, half of the last
    # tile is padding.
    choice = tl.cdiv(total, GROUP_SLOTS) + tl.arange(0, CHOICES)
    units = tl.cdiv(tl.maximum(choice, 1) * blocks, programs).to(tl.float32)
    length = total * 1.0 / (tl.maximum(choice, 1) * GRANULES).to(tl.float32) + 0.5
    count = tl.min(choice, 0) + tl.argmin(units * length, 0).to(tl.int32)
    tl.store(groups, count)
    tl.debug_barrier()  # the slots of the sequences are read back
    for i0 in range(0, count + 1, CHOICES):
        i = i0 + tl.arange(0, CHOICES)
        # Group i begins with the first sequence that begins at or after i / count of all slots.
        aim = (i.to(tl.int64) * total // tl.maximum(count, 1)).to(tl.int32)
        low = i * 0
        high = low + listed
        left = listed
        while left > 0:  # bisection
            middle = (low + high) // 2
            short = tl.load(sequences + middle * 5, mask=low < high, other=2**31 - 1) < aim
            low = tl.where(short & (low < high), middle + 1, low)
            high = tl.where(short, high, middle)
            left = left // 2
        tl.store(groups + 1 + 2 * i, tl.load(sequences + low * 5), mask=i <= count)
        tl.store(groups + 2 + 2 * i, low, mask=i <= count)


@gluon.jit
def _copy_tiles(source, KBLOCKS: gl.constexpr):
    """The producer warp: copies the operands of the tiles of this program's units into the ring, in order.

    A stage has 8 KiB of the weight per consumer and 8 TMA tiles of hidden states, 4 KiB each.
    """
    hidden, weight, h_ring, w_ring, full, empty, rows, groups, blocks = source
    BYTES: gl.constexpr = (ROWS * CONSUMERS + GRANULE * GRANULES) * DEPTH * 2
    n = 0
    for unit in range(gl.program_id(0), gl.load(groups) * blocks, gl.num_programs(0)):
        group = groups + 1 + 2 * (unit // blocks)
        v0 = (unit % blocks) * ROWS * CONSUMERS
        for first in range(gl.load(group), gl.load(group + 2), GRANULES):
            slot = rows + first
            row = (
                gl.load(slot), gl.load(slot + 1), gl.load(slot + 2), gl.load(slot + 3),
                gl.load(slot + 4), gl.load(slot + 5), gl.load(slot + 6), gl.load(slot + 7),
            )  # fmt: skip
            for k in range(KBLOCKS):
                stage = n % STAGES
                filled = full.index(stage)
                mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
                mbarrier.expect(filled, BYTES)
                for c in gl.static_range(CONSUMERS):
                    tile = w_ring.index(stage * CONSUMERS + c)
                    tma_load(weight, [v0 + c * ROWS, k * DEPTH], filled, tile)
                for g in gl.static_range(GRANULES):
                    tile = h_ring.index(stage).slice(g * GRANULE, GRANULE)
                    tma_load(hidden, [row[g], k * DEPTH], filled, tile)
                n += 1


@gluon.jit
def _halves(x):
    """Return the halves [A, B, n] of a tensor [A, B, 2n]."""
    n: gl.constexpr = x.shape[2] // 2
    return x.reshape([x.shape[0], x.shape[1], 2, n]).permute((0, 1, 3, 2)).split()


@gluon.jit
def _granules(acc, PIECE: gl.constexpr):
    """Return the 8 granules of an accumulator, each [64, 4, 8]: row, lane of the row's quad, element of the lane.

    Each thread keeps its 8 elements of each granule, so no data moves.
    """
    x = acc.reshape([ROWS, GRANULES, 4, 4, 2]).permute((0, 3, 1, 2, 4))
    a0, a1 = _halves(x.reshape([ROWS, 4, 8 * GRANULES]))
    b0, b1 = _halves(a0)
    b2, b3 = _halves(a1)
    c0, c1 = _halves(b0)
    c2, c3 = _halves(b1)
    c4, c5 = _halves(b2)
    c6, c7 = _halves(b3)
    return (
        gl.convert_layout(c0, PIECE), gl.convert_layout(c1, PIECE),
        gl.convert_layout(c2, PIECE), gl.convert_layout(c3, PIECE),
        gl.convert_layout(c4, PIECE), gl.convert_layout(c5, PIECE),
        gl.convert_layout(c6, PIECE), gl.convert_layout(c7, PIECE),
    )  # fmt: skip


@gluon.jit
def _max(v, w):
    return gl.maximum(v, w, propagate_nan=NAN_SPREADS)


@gluon.jit
def _first_max(v, i, w, j):
    better = (w > v) | ((w == v) & (j < i))
    return _max(v, w), gl.where(better, j, i)


@gluon.jit
def _keep(best, where, saved, top, piece, slot, WANT_WINNER: gl.constexpr):
    """Fold a granule into each thread's running maximum. Ties keep the first granule; NaN propagates.

    The granule that raised the maximum is kept, and its column is searched once per sequence. This takes two
    instructions per element; carrying the column takes three.
    """
    if WANT_WINNER:
        better = top > best
        where = gl.where(better, slot, where)
        saved = gl.where(better[:, :, None], piece, saved)
    return _max(best, top), where, saved


@gluon.jit
def _sequence(sequences, k):
    """Return (end of slots, b, shift, positions repeated at the end) of the k-th listed sequence.

    These values are loaded when the sequence is written. If they were carried through the loops, Triton 3.6 would use
    their values from before the loops.
    """
    at = sequences + k * 5
    return gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def _positions(best, where, saved, column):
    """Return slot * GRANULE + column of each thread's maximum [64, 4], the first among ties.

    A NaN equals no column and gets the last column of its granule.
    """
    at = gl.where(saved == best[:, :, None], column[None, :, :], GRANULE - 1)
    return where * GRANULE + gl.min(at, 2)


@gluon.jit
def _write_columns(
    best, at, sequences, k, rows, v, in_v, bias, fill, values, winner, peak, S, V,
    OUTER: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_FILL: gl.constexpr, WANT_WINNER: gl.constexpr,
):  # fmt: skip
    """Write columns v [64] of the k-th sequence from each lane's maximum and its position [64, 4]."""
    stop, b, shift, repeats = _sequence(sequences, k)
    if WANT_WINNER:
        top, at = gl.reduce((best, at), 1, _first_max)
    else:
        top = gl.reduce(best, 1, _max)
    none = top == NEG_INF  # no position is kept, regardless of the bias
    if HAS_BIAS:
        top += bias
    y = evaluate(top, OUTER)
    lost = none | (top == NEG_INF)
    if HAS_FILL:
        floor = gl.load(fill + b)
        lost = lost | (floor > y)
        y = gl.where(none, floor, _max(y, floor))
    out = b.to(gl.int64) * V + v
    gl.store(values + out, y.to(values.dtype.element_ty), mask=in_v)
    if WANT_WINNER:
        gl.store(peak + out, top, mask=in_v)
        if shift == HOLES:
            s = gl.load(rows + at // GRANULE, mask=in_v, other=0) - b * S + at % GRANULE
        else:
            s = at + shift
            s = gl.where(at >= (stop - 1) * GRANULE, s - repeats, s)
        # The position of a NaN may be past the end.
        s = gl.where(lost, -1, gl.minimum(s, S - 1))
        gl.store(winner + out, s.to(winner.dtype.element_ty), mask=in_v)


@gluon.jit
def _mask(piece, flag, g, rows, column, add, S, strides, HAS_ADD: gl.constexpr):
    """Return granule g of the tile that begins at rows[0], with -inf at dropped positions."""
    first = ((flag >> (8 * g)) & 0xFF).to(gl.int32)
    if first != 0:
        if HAS_ADD and first == MIXED:
            row = gl.load(rows + g)
            s = row % S + column
            at = (row // S).to(gl.int64) * strides[0] + s.to(gl.int64) * strides[1]
            plus = gl.load(add + at, mask=s < S, other=NEG_INF)[None, :, :]
            # Adding -inf is not sufficient, because NaN + -inf is NaN.
            piece = gl.where(plus == NEG_INF, NEG_INF, piece + plus)
        else:
            piece = gl.where((column < first)[None, :, :], piece, NEG_INF)
    return piece


@gluon.jit
def _mask_tile(p, flag, rows, column, add, S, strides, HAS_ADD: gl.constexpr):
    """Return the granules of a tile, masked according to their flags."""
    return (
        _mask(p[0], flag, 0, rows, column, add, S, strides, HAS_ADD),
        _mask(p[1], flag, 1, rows, column, add, S, strides, HAS_ADD),
        _mask(p[2], flag, 2, rows, column, add, S, strides, HAS_ADD),
        _mask(p[3], flag, 3, rows, column, add, S, strides, HAS_ADD),
        _mask(p[4], flag, 4, rows, column, add, S, strides, HAS_ADD),
        _mask(p[5], flag, 5, rows, column, add, S, strides, HAS_ADD),
        _mask(p[6], flag, 6, rows, column, add, S, strides, HAS_ADD),
        _mask(p[7], flag, 7, rows, column, add, S, strides, HAS_ADD),
    )


@gluon.jit
def _reduce_tiles(
    operands,
    ME: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr, OUTER: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_ADD: gl.constexpr, HAS_FILL: gl.constexpr,
    WANT_WINNER: gl.constexpr,
):  # fmt: skip
    """Consumer ME: computes the logits of its 64 vocabulary rows and reduces them over each sequence's positions.

    For each of two rows a thread holds the running maximum over its columns, the slot of the granule
    with the maximum and that granule's 8 elements; the four lanes of a row are reduced when the
    sequence is written. Up to three sequences that end in a tile are written during the next one.
    """
    (
        h_ring, w_ring, full, empty, bias, add, fill, rows, flags, sequences, groups,
        values, winner, peak, blocks, S, V, strides,
    ) = operands  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, GRANULE * GRANULES, 16]
    )
    # Layout of a granule of the accumulator: a quad of lanes shares a row, a lane has every fourth pair
    # of columns, 8 elements of each of two rows.
    PIECE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[ROWS, 4, 8],
    )
    QUAD: gl.constexpr = gl.SliceLayout(2, PIECE)
    lane = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(0, PIECE)))
    e = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, PIECE)))
    column = (2 * lane)[:, None] + (8 * (e // 2) + e % 2)[None, :]
    n = 0  # stages consumed
    for unit in range(gl.program_id(0), gl.load(groups) * blocks, gl.num_programs(0)):
        group = groups + 1 + 2 * (unit // blocks)
        v = ((unit % blocks) * CONSUMERS + ME) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, QUAD))
        in_v = v < V
        offset = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, QUAD))
        if HAS_BIAS:
            offset = gl.load(bias + v, mask=in_v, other=0.0).to(gl.float32)
        begin = gl.load(group)
        end = gl.load(group + 2)
        k = gl.load(group + 1)
        stop = gl.load(sequences + 5 * k + 1)
        after = gl.load(sequences + 5 * k + 6)  # of the next sequence, loaded ahead
        best = gl.full([ROWS, 4], NEG_INF, gl.float32, QUAD)
        where = gl.full([ROWS, 4], 0, gl.int32, QUAD) + begin
        saved = gl.full([ROWS, 4, 8], 0.0, gl.float32, PIECE)
        # Maxima and positions of the sequences k - done .. k - 1, which have ended and are not written yet.
        done = 0
        best0, best1, best2 = best, best, best
        at0, at1, at2 = where, where, where
        for slot in range(begin, end, GRANULES):
            # The flags of this tile's granules, which may span two words.
            word = flags + slot // GRANULES
            bit = (8 * (slot % GRANULES)).to(gl.int64)
            flag = (gl.load(word) >> bit) | ((gl.load(word + 1) << 1) << (63 - bit))
            acc = gl.zeros([ROWS, GRANULE * GRANULES], gl.float32, MMA)
            # The other warpgroup keeps the tensor cores busy while this one waits at the end of a round.
            for _ in range(0, KBLOCKS, EACH):
                for k_block in gl.static_range(EACH):
                    stage = n % STAGES
                    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                    w = w_ring.index(stage * CONSUMERS + ME)
                    h = h_ring.index(stage).permute((1, 0))
                    if KBLOCKS == EACH:
                        acc = warpgroup_mma(w, h, acc, use_acc=k_block > 0, is_async=True)
                    else:
                        acc = warpgroup_mma(w, h, acc, is_async=True)
                    if k_block == (1 if EACH > 1 else 0):
                        while done > 0:  # while the tensor cores work
                            _write_columns(
                                best0, at0, sequences, k - done, rows, v, in_v, offset, fill,
                                values, winner, peak, S, V, OUTER, HAS_BIAS, HAS_FILL, WANT_WINNER,
                            )  # fmt: skip
                            best0, best1, at0, at1 = best1, best2, at1, at2
                            done -= 1
                    if k_block > 0:
                        acc = warpgroup_mma_wait(1, deps=(acc,))
                        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))
                    n += 1
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))
            p = _granules(acc, PIECE)
            if flag != 0:
                p = _mask_tile(p, flag, rows + slot, column, add, S, strides, HAS_ADD)
            top = (
                gl.reduce(p[0], 2, _max), gl.reduce(p[1], 2, _max),
                gl.reduce(p[2], 2, _max), gl.reduce(p[3], 2, _max),
                gl.reduce(p[4], 2, _max), gl.reduce(p[5], 2, _max),
                gl.reduce(p[6], 2, _max), gl.reduce(p[7], 2, _max),
            )  # fmt: skip
            limit = gl.minimum(slot + GRANULES, end)
            start = slot
            while start < limit:  # for each sequence with granules in this tile
                till = gl.minimum(stop, limit)
                mine = (1 << (till - slot)) - (1 << (start - slot))
                if mine == (1 << GRANULES) - 1:
                    for g in gl.static_range(GRANULES):
                        best, where, saved = _keep(
                            best, where, saved, top[g], p[g], slot + g, WANT_WINNER
                        )
                else:
                    for g in gl.static_range(GRANULES):
                        if (mine & (1 << g)) != 0:
                            best, where, saved = _keep(
                                best, where, saved, top[g], p[g], slot + g, WANT_WINNER
                            )
                if till == stop:
                    if done == 3:
                        _write_columns(
                            best0, at0, sequences, k - 3, rows, v, in_v, offset, fill,
                            values, winner, peak, S, V, OUTER, HAS_BIAS, HAS_FILL, WANT_WINNER,
                        )  # fmt: skip
                        best0, best1, at0, at1 = best1, best2, at1, at2
                        done = 2
                    at = where
                    if WANT_WINNER:
                        at = _positions(best, where, saved, column)
                    if done == 0:
                        best0, at0 = best, at
                    elif done == 1:
                        best1, at1 = best, at
                    else:
                        best2, at2 = best, at
                    done += 1
                    best = gl.full([ROWS, 4], NEG_INF, gl.float32, QUAD)
                    where = gl.full([ROWS, 4], 0, gl.int32, QUAD) + till
                    k += 1
                    stop = after
                    after = gl.load(sequences + 5 * k + 6)
                start = till
        while done > 0:
            _write_columns(
                best0, at0, sequences, k - done, rows, v, in_v, offset, fill,
                values, winner, peak, S, V, OUTER, HAS_BIAS, HAS_FILL, WANT_WINNER,
            )  # fmt: skip
            best0, best1, at0, at1 = best1, best2, at1, at2
            done -= 1


# Sizes that change from batch to batch. Specialising on their divisibility would compile additional kernels, which
# takes seconds for each.
SIZES = ["blocks", "S", "V", "stride_ab", "stride_as"]


@gluon.jit(do_not_specialize=SIZES)
def _peak_kernel(
    hidden, weight, bias, add, fill, rows, flags, sequences, groups, values, winner, peak,
    blocks, S, V, stride_ab, stride_as,
    KBLOCKS: gl.constexpr, EACH: gl.constexpr, OUTER: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_ADD: gl.constexpr, HAS_FILL: gl.constexpr,
    WANT_WINNER: gl.constexpr,
):  # fmt: skip
    """A program computes units of 128 vocabulary rows x a group of sequences, strided over the grid.

    The vocabulary is the fast dimension of the units, so that all programs read the same hidden states
    at about the same time. A unit reads its 128 * D weight elements once per tile and the group's
    hidden states once, both from L2, and writes 128 values (and winners, and peaks) per sequence.
    """
    w_ring = gl.allocate_shared_memory(
        weight.dtype, [STAGES * CONSUMERS, ROWS, DEPTH], weight.layout
    )
    h_ring = gl.allocate_shared_memory(
        hidden.dtype, [STAGES, GRANULE * GRANULES, DEPTH], hidden.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    source = (hidden, weight, h_ring, w_ring, full, empty, rows, groups, blocks)
    operands = (
        h_ring, w_ring, full, empty, bias, add, fill, rows, flags, sequences, groups,
        values, winner, peak, blocks, S, V, (stride_ab, stride_as),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _reduce_tiles,
                (operands, 0, KBLOCKS, EACH, OUTER, HAS_BIAS, HAS_ADD, HAS_FILL, WANT_WINNER),
            ),
            (
                _reduce_tiles,
                (operands, 1, KBLOCKS, EACH, OUTER, HAS_BIAS, HAS_ADD, HAS_FILL, WANT_WINNER),
            ),
            (_copy_tiles, (source, KBLOCKS)),
        ],
        [4, 1],
        # Registers: 2 x 240 for accumulators and running maxima, 24 for the producer; 504 of 512 per lane.
        [240, 24],
    )


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)  # triton.cdiv wraps its arguments in constexpr: 4 us a call


@functools.cache
def _layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    tile = [ROWS.value, DEPTH.value]
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(tile, element)


def applies(hidden: torch.Tensor, weight: torch.Tensor, outer: Program) -> bool:
    """Whether this kernel can run: Hopper, 16-bit operands, sizes that TMA can address."""
    if hidden.device.type != "cuda" or hidden.dtype not in (torch.float16, torch.bfloat16):
        return False
    if any(step.fn == "pow" for step in outer):  # it uses tl.full, which has no layout in Gluon
        return False
    B, S, D = hidden.shape
    return (
        capability(hidden.device)[0] == 9
        and D % 8 == 0
        and B * S < 2**31 - 256  # rows are 32-bit coordinates
        # A transposed weight is copied if it is small; else the portable kernel reads it.
        and (tma_addressable(weight) or weight.nbytes <= 64 * 2**20)
    )


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden [B, S, D] as TMA-addressable rows [B * S, D], copied only if its strides require it."""
    B, S, D = hidden.shape
    batch, token, feature = hidden.stride()
    if B == 1 or S == 1 or batch == S * token:
        row = token if S > 1 else batch if B > 1 else D
        rows = hidden.as_strided((B * S, D), (row, feature))
        if tma_addressable(rows):
            return rows
    return hidden.clone(memory_format=torch.contiguous_format).view(B * S, D)


def launch(
    operands,
    outputs,
    outer: Program,
    skip: torch.Tensor | None = None,
    positions: Positions | None = None,
) -> None:
    """Write outputs (values, winner, peak) from operands (hidden, weight, bias, add, fill).

    Computes the same as `splade_head.forward.forward` without `inner`. Sequences with skip[b] set are not
    written. positions: the result of `classify` for `add`.
    """
    hidden, weight, bias, add, fill = operands
    values, winner, peak = outputs
    B, S, D = hidden.shape
    V = weight.shape[0]
    if not tma_addressable(weight):
        weight = weight.clone(memory_format=torch.contiguous_format)
    if add is not None and positions is None:
        positions = classify(ADDED, (add,), hidden)
    blocks = _cdiv(V, ROWS.value * CONSUMERS.value)
    programs = sm_count(hidden.device)

    def empty(n, dtype):
        return torch.empty(n, device=hidden.device, dtype=dtype)

    slots = B * _cdiv(S, GRANULE.value)
    rows = empty(slots + GRANULES.value, torch.int32)
    flags = empty(_cdiv(slots, GRANULES.value) + 2, torch.int64)
    sequences = empty(5 * (B + 2), torch.int32)
    groups = empty(2 * (_cdiv(slots, GROUP_SLOTS.value) + CHOICES.value) + 3, torch.int32)
    list_granules(
        positions, skip, rows, flags.view(torch.uint8), sequences, groups, B, S, blocks, programs
    )
    layout = _layout(hidden.dtype)
    steps = _cdiv(D, DEPTH.value)
    unused = rows
    args = (
        TensorDescriptor.from_tensor(_rows(hidden), [GRANULE.value, DEPTH.value], layout),
        TensorDescriptor.from_tensor(weight, [ROWS.value, DEPTH.value], layout),
        unused if bias is None else bias,
        unused if add is None else add,
        unused if fill is None else fill,
        rows, flags, sequences, groups, values,
        unused if winner is None else winner,
        unused if peak is None else peak,
        blocks, S, V, *((0, 0) if add is None else add.stride()),
    )  # fmt: skip
    # Rounds of two steps. Longer rounds run 1 to 2 % slower and take up to 5 s longer to compile.
    constants = {
        "KBLOCKS": steps,
        "EACH": 2 - steps % 2,
        "OUTER": encode(outer),
        "HAS_BIAS": bias is not None,
        "HAS_ADD": add is not None,
        "HAS_FILL": fill is not None,
        "WANT_WINNER": winner is not None,
    }
    launch_kernel(_peak_kernel, (programs,), args, constants, num_warps=4)


def list_granules(
    positions: Positions | None,
    skip: torch.Tensor | None,
    rows: torch.Tensor,
    flags: torch.Tensor,
    sequences: torch.Tensor,
    groups: torch.Tensor,
    B: int,
    S: int,
    blocks: int,
    programs: int,
) -> None:
    """Write rows, flags (bytes), sequences and groups, as `_list_kernel` describes them."""
    granules = _cdiv(S, GRANULE.value) if positions is None else positions.kinds.shape[1]
    # 4096 granules at a time, 8 a thread, fit the registers.
    wide = min(64, 1 << (granules - 1).bit_length())
    block = min(4096 // wide, max(16, 1 << (B - 1).bit_length()))
    args = (
        None if positions is None else positions.spans,
        None if positions is None else positions.kinds,
        skip, rows, flags, sequences, groups,
        B, S, 1 if positions is None else positions.spans.shape[1], granules, blocks, programs,
    )  # fmt: skip
    constants = {
        "HAS_SPANS": positions is not None,
        "HAS_SKIP": skip is not None,
        "BLOCK": block,
        "WIDE": wide,
    }
    launch_kernel(_list_kernel, (1,), args, constants, num_warps=16)
