"""The SPLADE head's forward on Hopper GPUs: a warp-specialised persistent kernel in Gluon.

One warp copies operand tiles into a ring of shared-memory stages with the bulk copy engine. Two
warpgroups each multiply 64 vocabulary rows of their own by 256 positions that both share, and
reduce their accumulator while the other keeps the tensor cores busy.

The 256 positions of a tile are 8 granules of 32 consecutive positions, taken from a compact list of
the granules that hold a kept position. So a tile may end one sequence and begin the next, and
padding costs at most 31 positions a sequence.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_inductor.epilogue.steps import Program

from .epilogue import encode, evaluate

__all__ = ["applies", "launch"]

# Positions a granule: a sequence wastes half of one; smaller boxes mean more copy requests a stage.
GRANULE = gl.constexpr(32)
# Granules a tile: 256 positions, the widest wgmma, in one 64-bit word of flags.
GRANULES = gl.constexpr(8)
# Vocabulary rows a warpgroup: the height of a wgmma. 64 x 256 fp32 are 128 registers a thread.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
# Features a stage: 128 bytes of 16-bit elements, one swizzle row of shared memory.
DEPTH = gl.constexpr(64)
# 48 KiB each; four fit the 227 KiB of a multiprocessor.
STAGES = gl.constexpr(4)
# Flags of a granule, a byte.
MIXED = gl.constexpr(
    1
)  # some position has another add than 0 or, behind those, -inf: look at `add`
LAST = gl.constexpr(2)  # the sequence ends here
# From this bit on, how many of the first positions are kept, with add == 0 (right padding, or the
# end of the sequence); 0 stands for all 32.
PREFIX = gl.constexpr(3)
# Instead of a sequence's shift from slots to positions: it has holes, look at the list.
HOLES = gl.constexpr(-(2**31))
# Positions a group of sequences. Its hidden states (12 MiB at D = 768) stay in L2 while all of the
# weight passes by; a longer group reads the weight fewer times and ends in fewer partial tiles.
GROUP_POSITIONS = 8192

NEG_INF = gl.constexpr(float("-inf"))
NAN_SPREADS = gl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _classify(add_rows, stride_as, g, S, mine, HAS_ADD: tl.constexpr):
    """(kept, flags but LAST) of granules g [BLOCK] of each sequence, int32 [GROUP, BLOCK]."""
    i = tl.arange(0, GRANULE)[None, None, :]
    s = g[None, :, None] * GRANULE + i
    inside = mine[:, None, None] & (s < S)
    if HAS_ADD:
        at = s.to(tl.int64) * stride_as
        plus = tl.load(add_rows + at, mask=inside, other=float("-inf"))
    else:
        plus = tl.where(inside, 0.0, float("-inf"))
    dropped = (plus == float("-inf")).to(tl.int32)
    zero = (plus == 0.0).to(tl.int32)
    length = tl.sum(zero, 2)
    prefix = tl.min(tl.where(i < length[:, :, None], zero, dropped), 2)
    flag = tl.where((prefix != 0) & (length > 0), (length % GRANULE) << PREFIX, MIXED)
    return 1 - tl.min(dropped, 2), flag


@triton.jit
def _granule_list_kernel(
    add, skip, rows, flags, order, shifts, tiles,
    B, S, stride_ab, stride_as, capacity,
    HAS_ADD: tl.constexpr, HAS_SKIP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program lists the granules of GROUP sequences that hold a kept position, in order.

    From slot p * capacity on, rows[slot] = b * S + s of a granule's first position and
    flags[slot] its flags; tiles[p] = tiles of GRANULES slots. order[p * GROUP:] = the listed
    sequences, and shifts[p * GROUP:] = position minus slot * GRANULE in each, or HOLES. A sequence
    with skip[b] set is not listed; any other one without a kept position lists its first granule,
    so that its columns are written. Reads 4 * GROUP * S bytes of `add`, twice, and writes 5 bytes
    a granule.
    """
    base = tl.program_id(0) * capacity
    b = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    mine = b < B
    if HAS_SKIP:
        mine = mine & (tl.load(skip + b, mask=mine, other=1) == 0)
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order + tl.program_id(0) * GROUP + place, b, mask=mine)
    add_rows = add + b.to(tl.int64)[:, None, None] * stride_ab if HAS_ADD else add
    total = tl.zeros([GROUP], tl.int32)
    first = tl.full([GROUP], 2**30, tl.int32)
    final = tl.zeros([GROUP], tl.int32)
    for g0 in range(0, tl.cdiv(S, GRANULE), BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        keep, flag = _classify(add_rows, stride_as, g, S, mine, HAS_ADD)
        total += tl.sum(keep, 1)
        first = tl.minimum(first, tl.min(tl.where(keep != 0, g[None, :], 2**30), 1))
        final = tl.maximum(final, tl.max(tl.where(keep != 0, g[None, :], 0), 1))
    nothing = (total == 0) & mine
    first = tl.where(nothing, 0, first)
    slots = tl.where(nothing, 1, total)
    shift = (first - (tl.cumsum(slots, 0) - slots)) * GRANULE
    shift = tl.where(final - first + 1 > slots, HOLES, shift)
    tl.store(shifts + tl.program_id(0) * GROUP + place, shift, mask=mine)
    n = 0
    seen = tl.zeros([GROUP], tl.int32)
    for g0 in range(0, tl.cdiv(S, GRANULE), BLOCK):
        g = g0 + tl.arange(0, BLOCK)
        keep, flag = _classify(add_rows, stride_as, g, S, mine, HAS_ADD)
        keep = tl.where(nothing[:, None] & (g == 0)[None, :], 1, keep)
        last = (seen[:, None] + tl.cumsum(keep, 1) == total[:, None]) | nothing[:, None]
        flat = tl.reshape(keep, [GROUP * BLOCK])
        slot = tl.reshape(base + n + tl.cumsum(flat, 0) - flat, [GROUP, BLOCK])
        tl.store(rows + slot, b[:, None] * S + g[None, :] * GRANULE, mask=keep != 0)
        flag = flag | (LAST * last.to(tl.int32))
        tl.store(flags + slot, flag.to(tl.uint8), mask=keep != 0)
        seen += tl.sum(keep, 1)
        n += tl.sum(flat, 0)
    # Slots that fill the last tile: any row, no flag. What they add is never read.
    count = tl.cdiv(n, GRANULES)
    pad = n + tl.arange(0, GRANULES)
    tl.store(rows + base + pad, pad * 0, mask=pad < count * GRANULES)
    tl.store(flags + base + pad, (pad * 0).to(tl.uint8), mask=pad < count * GRANULES)
    tl.store(tiles + tl.program_id(0), count)


@gluon.jit
def _copy_tiles(source, KBLOCKS: gl.constexpr):
    """Producer warp: the operands of every tile of this program's units, in order, into the ring.

    A stage takes 8 KiB of weight a consumer and 8 boxes of 4 KiB of hidden.
    """
    hidden, weight, h_ring, w_ring, full, empty, rows, tiles, groups, blocks, capacity = source
    BYTES: gl.constexpr = (ROWS * CONSUMERS + GRANULE * GRANULES) * DEPTH * 2
    h_box = h_ring._reinterpret(h_ring.dtype, [STAGES * GRANULES, GRANULE, DEPTH], h_ring.layout)
    n = 0
    for unit in range(gl.program_id(0), groups * blocks, gl.num_programs(0)):
        group = unit // blocks
        v0 = (unit % blocks) * ROWS * CONSUMERS
        for tile in range(gl.load(tiles + group)):
            slot = rows + group * capacity + tile * GRANULES
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
                    box = w_ring.index(stage * CONSUMERS + c)
                    tma.async_copy_global_to_shared(weight, [v0 + c * ROWS, k * DEPTH], filled, box)
                for g in gl.static_range(GRANULES):
                    box = h_box.index(stage * GRANULES + g)
                    tma.async_copy_global_to_shared(hidden, [row[g], k * DEPTH], filled, box)
                n += 1


@gluon.jit
def _halves(x):
    """A tensor [A, B, 2n] as its two halves [A, B, n] of the last dimension."""
    n: gl.constexpr = x.shape[2] // 2
    return x.reshape([x.shape[0], x.shape[1], 2, n]).permute((0, 1, 3, 2)).split()


@gluon.jit
def _max(v, w):
    return gl.maximum(v, w, propagate_nan=NAN_SPREADS)


@gluon.jit
def _first_max(v, i, w, j):
    better = (w > v) | ((w == v) & (j < i))
    return _max(v, w), gl.where(better, j, i)


@gluon.jit
def _keep(best, where, saved, piece, slot, PIECE: gl.constexpr, WANT_WINNER: gl.constexpr):
    """Fold a granule into each thread's running maximum; ties keep the first, NaN spreads.

    Keeping the whole granule that raised the maximum, and looking for the column once a sequence,
    takes two instructions an element where carrying the column takes three.
    """
    piece = gl.convert_layout(piece, PIECE)
    top = gl.reduce(piece, 2, _max)
    if WANT_WINNER:
        better = top > best
        where = gl.where(better, slot, where)
        saved = gl.where(better[:, :, None], piece, saved)
    return _max(best, top), where, saved


@gluon.jit
def _write_columns(
    best, where, saved, column, b, shift, list_rows, v, in_v, bias, fill, values, winner, peak, S, V,
    OUTER: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_FILL: gl.constexpr, WANT_WINNER: gl.constexpr,
):  # fmt: skip
    """Columns v [64] of sequence b, from each lane's maximum [64, 4], its slot and its granule.

    Nothing is loaded here but for rare cases: a wait for memory is a wait of the whole warpgroup.
    """
    if WANT_WINNER:
        at = gl.min(gl.where(saved == best[:, :, None], column[None, :, :], GRANULE - 1), 2)
        top, at = gl.reduce((best, where * GRANULE + at), 1, _first_max)
    else:
        top = gl.reduce(best, 1, _max)
    none = top == NEG_INF  # nothing kept: the bias has no say in that
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
            s = gl.load(list_rows + at // GRANULE, mask=in_v, other=0) - b * S + at % GRANULE
        else:
            s = at + shift
        # NaN equals no column and takes its granule's last one: keep it inside the sequence.
        s = gl.where(lost, -1, gl.minimum(s, S - 1))
        gl.store(winner + out, s.to(winner.dtype.element_ty), mask=in_v)


@gluon.jit
def _reduce_tiles(
    operands,
    ME: gl.constexpr, KBLOCKS: gl.constexpr, OUTER: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_ADD: gl.constexpr, HAS_FILL: gl.constexpr,
    WANT_WINNER: gl.constexpr,
):  # fmt: skip
    """Consumer ME: logits of its 64 vocabulary rows, reduced over the positions of each sequence.

    A thread holds, of each of two rows, the running maximum over its columns, the slot of the
    granule it came from and that granule's 8 elements; the four lanes of a row meet when the
    sequence ends.
    """
    (
        h_ring, w_ring, full, empty, bias, add, fill, rows, flags, order, shifts, tiles,
        values, winner, peak, groups, group_size, blocks, capacity, S, V, stride_ab, stride_as,
    ) = operands  # fmt: skip
    # Flags that leave the short path: all but the last granule's LAST.
    SLOW: gl.constexpr = -1 - (LAST << (8 * (GRANULES - 1)))
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, GRANULE * GRANULES, 16]
    )
    # A granule of the accumulator as its threads hold it: a quad of lanes shares a row, a lane has
    # every fourth pair of columns, 8 elements of each of two rows.
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
    for unit in range(gl.program_id(0), groups * blocks, gl.num_programs(0)):
        group = unit // blocks
        v = ((unit % blocks) * CONSUMERS + ME) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, QUAD))
        in_v = v < V
        offset = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, QUAD))
        if HAS_BIAS:
            offset = gl.load(bias + v, mask=in_v, other=0.0).to(gl.float32)
        list_rows = rows + group * capacity
        list_flags = flags + group * (capacity // GRANULES)
        sequence = group * group_size
        b = gl.load(order + sequence)
        shift = gl.load(shifts + sequence)
        best = gl.full([ROWS, 4], NEG_INF, gl.float32, QUAD)
        where = gl.full([ROWS, 4], 0, gl.int32, QUAD)
        saved = gl.full([ROWS, 4, 8], 0.0, gl.float32, PIECE)
        for tile in range(gl.load(tiles + group)):
            flag = gl.load(list_flags + tile)
            acc = gl.zeros([ROWS, GRANULE * GRANULES], gl.float32, MMA)
            # Unrolled: an accumulator carried over a loop edge would be waited for at every step.
            for k in gl.static_range(KBLOCKS):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                w = w_ring.index(stage * CONSUMERS + ME)
                h = h_ring.index(stage).permute((1, 0))
                acc = warpgroup_mma(w, h, acc, use_acc=k > 0, is_async=True)
                if k > 0:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                    mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))
                n += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))
            # [row, granule, 8 columns, lane, pair] -> the granules' 8 elements of one thread. No
            # data moves.
            x = acc.reshape([ROWS, GRANULES, 4, 4, 2]).permute((0, 3, 1, 2, 4))
            a0, a1 = _halves(x.reshape([ROWS, 4, 8 * GRANULES]))
            b0, b1 = _halves(a0)
            b2, b3 = _halves(a1)
            pieces = _halves(b0) + _halves(b1) + _halves(b2) + _halves(b3)
            slot = tile * GRANULES
            if (flag & SLOW) == 0:
                for g in gl.static_range(GRANULES):
                    best, where, saved = _keep(
                        best, where, saved, pieces[g], slot + g, PIECE, WANT_WINNER
                    )
            else:
                # Two at a time where neither has a flag: each hides the other's latency.
                for pair in gl.static_range(0, GRANULES, 2):
                    if ((flag >> (8 * pair)) & 0xFFFF) == 0:
                        for g in gl.static_range(pair, pair + 2):
                            best, where, saved = _keep(
                                best, where, saved, pieces[g], slot + g, PIECE, WANT_WINNER
                            )
                    else:
                        for g in gl.static_range(pair, pair + 2):
                            piece = gl.convert_layout(pieces[g], PIECE)
                            bits = (flag >> (8 * g)).to(gl.int32) & 0xFF
                            length = bits >> PREFIX
                            if length != 0:
                                piece = gl.where((column < length)[None, :, :], piece, NEG_INF)
                            if HAS_ADD and (bits & MIXED) != 0:
                                s = gl.load(list_rows + slot + g) - b * S + column
                                at = b.to(gl.int64) * stride_ab + s.to(gl.int64) * stride_as
                                plus = gl.load(add + at, mask=s < S, other=NEG_INF)[None, :, :]
                                # Not just the sum: a dropped NaN + -inf would be NaN.
                                piece = gl.where(plus == NEG_INF, NEG_INF, piece + plus)
                            best, where, saved = _keep(
                                best, where, saved, piece, slot + g, PIECE, WANT_WINNER
                            )
                            if g + 1 < GRANULES and (bits & LAST) != 0:
                                _write_columns(
                                    best, where, saved, column, b, shift, list_rows, v, in_v,
                                    offset, fill, values, winner, peak, S, V,
                                    OUTER, HAS_BIAS, HAS_FILL, WANT_WINNER,
                                )  # fmt: skip
                                best = gl.full([ROWS, 4], NEG_INF, gl.float32, QUAD)
                                where = gl.full([ROWS, 4], 0, gl.int32, QUAD) + slot + g + 1
                                sequence += 1
                                b = gl.load(order + sequence)
                                shift = gl.load(shifts + sequence)
            if (flag & (LAST << (8 * (GRANULES - 1)))) != 0:
                _write_columns(
                    best, where, saved, column, b, shift, list_rows, v, in_v,
                    offset, fill, values, winner, peak, S, V,
                    OUTER, HAS_BIAS, HAS_FILL, WANT_WINNER,
                )  # fmt: skip
                best = gl.full([ROWS, 4], NEG_INF, gl.float32, QUAD)
                where = gl.full([ROWS, 4], 0, gl.int32, QUAD) + slot + GRANULES
                sequence += 1
                b = gl.load(order + sequence)
                shift = gl.load(shifts + sequence)


# Sizes that change from batch to batch: a kernel for each of their divisibilities would take
# seconds to compile.
SIZES = ["groups", "group_size", "blocks", "capacity", "S", "V", "stride_ab", "stride_as"]


@gluon.jit(do_not_specialize=SIZES)
def _peak_kernel(
    hidden, weight, bias, add, fill, rows, flags, order, shifts, tiles, values, winner, peak,
    groups, group_size, blocks, capacity, S, V, stride_ab, stride_as,
    KBLOCKS: gl.constexpr, OUTER: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_ADD: gl.constexpr, HAS_FILL: gl.constexpr,
    WANT_WINNER: gl.constexpr,
):  # fmt: skip
    """A program owns units of 128 vocabulary rows x a group of sequences, strided over the grid.

    Vocabulary is the fast dimension of the units, so that all programs read the same hidden states
    at about the same time. A unit reads its 128 * D weight elements once a tile and the group's
    hidden states once, both out of L2, and writes 128 values (and winners, and peaks) a sequence.
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
    source = (hidden, weight, h_ring, w_ring, full, empty, rows, tiles, groups, blocks, capacity)
    operands = (
        h_ring, w_ring, full, empty, bias, add, fill, rows, flags, order, shifts, tiles,
        values, winner, peak, groups, group_size, blocks, capacity, S, V, stride_ab, stride_as,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _reduce_tiles,
                (operands, 0, KBLOCKS, OUTER, HAS_BIAS, HAS_ADD, HAS_FILL, WANT_WINNER),
            ),
            (
                _reduce_tiles,
                (operands, 1, KBLOCKS, OUTER, HAS_BIAS, HAS_ADD, HAS_FILL, WANT_WINNER),
            ),
            (_copy_tiles, (source, KBLOCKS)),
        ],
        [4, 1],
        # 2 x 240 for accumulators and running maxima, 24 for the producer: 504 of 512 a lane.
        [240, 24],
    )


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)  # triton.cdiv wraps its arguments in constexpr: 4 us a call


@functools.cache
def _layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    box = [ROWS.value, DEPTH.value]
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(box, element)


def _addressable(rows: torch.Tensor) -> bool:
    """Whether the copy engine can address rows [R, D] of 16-bit elements."""
    stride = rows.stride(0)
    return (
        rows.stride(1) == 1
        and stride % 8 == 0  # 16 bytes
        and stride >= rows.shape[1]
        and rows.data_ptr() % 16 == 0
    )


def applies(hidden: torch.Tensor, weight: torch.Tensor, outer: Program) -> bool:
    """Whether this kernel can run: Hopper, 16-bit operands, sizes the copy engine can address."""
    if hidden.device.type != "cuda" or hidden.dtype not in (torch.float16, torch.bfloat16):
        return False
    if any(step.fn == "pow" for step in outer):  # begins with tl.full, which has no layout in Gluon
        return False
    B, S, D = hidden.shape
    return (
        torch.cuda.get_device_capability(hidden.device)[0] == 9
        and D % 8 == 0
        and D <= 4096  # the loop over features is unrolled
        and B * S < 2**31 - 256  # rows are 32-bit coordinates
        # A transposed weight is copied while that is cheap; else the portable kernel reads it.
        and (_addressable(weight) or weight.nbytes <= 64 * 2**20)
    )


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    """hidden [B, S, D] as addressable rows [B * S, D]; a copy only where strides force one."""
    B, S, D = hidden.shape
    batch, token, feature = hidden.stride()
    if B == 1 or S == 1 or batch == S * token:
        row = token if S > 1 else batch if B > 1 else D
        rows = hidden.as_strided((B * S, D), (row, feature))
        if _addressable(rows):
            return rows
    return hidden.clone(memory_format=torch.contiguous_format).view(B * S, D)


def _balanced_group(largest: int, B: int, blocks: int, programs: int) -> int:
    """Sequences a group: the largest power of two that leaves few programs idle in the last wave."""

    def busy(group: int) -> float:
        waves = _cdiv(B, group) * blocks / programs
        return waves / math.ceil(waves)

    sizes = [largest >> i for i in range(largest.bit_length())]
    # 0.95: below, what the idle programs cost exceeds the partial tiles of smaller groups.
    return next((g for g in sizes if busy(g) >= 0.95), max(sizes, key=busy))


def launch(operands, outputs, outer: Program, skip: torch.Tensor | None = None) -> None:
    """Fill outputs (values, winner, peak) from operands (hidden, weight, bias, add, fill).

    As `splade_head_forward.forward` without `inner`; sequences with skip[b] set are left alone.
    """
    hidden, weight, bias, add, fill = operands
    values, winner, peak = outputs
    B, S, D = hidden.shape
    V = weight.shape[0]
    if not _addressable(weight):
        weight = weight.clone(memory_format=torch.contiguous_format)
    granules = _cdiv(S, GRANULE.value)
    blocks = _cdiv(V, ROWS.value * CONSUMERS.value)
    programs = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    # One pass of the list kernel holds a block of one sequence, or whole sequences.
    block = min(1 << (granules - 1).bit_length(), GROUP_POSITIONS // GRANULE.value)
    group = GROUP_POSITIONS // GRANULE.value // block if granules <= block else 1
    group = _balanced_group(min(group, 1 << (B - 1).bit_length()), B, blocks, programs)
    groups = _cdiv(B, group)
    capacity = _cdiv(group * granules, GRANULES.value) * GRANULES.value

    def empty(n, dtype):
        return torch.empty(n, device=hidden.device, dtype=dtype)

    rows = empty(groups * capacity, torch.int32)
    flags = empty(groups * capacity // GRANULES.value, torch.int64)
    order = empty(groups * group + 1, torch.int32)  # one more: the next sequence is loaded ahead
    shifts = empty(groups * group + 1, torch.int32)
    tiles = empty(groups, torch.int32)
    strides = (0, 0) if add is None else add.stride()
    _granule_list_kernel[(groups,)](
        add, skip, rows, flags.view(torch.uint8), order, shifts, tiles, B, S, *strides, capacity,
        HAS_ADD=add is not None, HAS_SKIP=skip is not None, GROUP=group, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    layout = _layout(hidden.dtype)
    unused = tiles
    _peak_kernel[(min(programs, groups * blocks),)](
        TensorDescriptor.from_tensor(_rows(hidden), [GRANULE.value, DEPTH.value], layout),
        TensorDescriptor.from_tensor(weight, [ROWS.value, DEPTH.value], layout),
        unused if bias is None else bias,
        unused if add is None else add,
        unused if fill is None else fill,
        rows, flags, order, shifts, tiles, values,
        unused if winner is None else winner,
        unused if peak is None else peak,
        groups, group, blocks, capacity, S, V, *strides,
        KBLOCKS=_cdiv(D, DEPTH.value), OUTER=encode(outer),
        HAS_BIAS=bias is not None, HAS_ADD=add is not None, HAS_FILL=fill is not None,
        WANT_WINNER=winner is not None, num_warps=4,
    )  # fmt: skip
