"""The second product with the pools of `relu_ffn_pool` on Hopper GPUs, by a warp-specialised kernel in Gluon.

    out [128 rows of a block, :] = values [128, neurons of its pool] @ their rows of the down weights

It is for many blocks. The values stay in shared memory, 16 KiB for 64 neurons, while the weights stream past, 128
features of 64 neurons a stage: what a tile kernel reads once for every tile of features is read once a block (212 us at
65 536 tokens with pools of 344, 244 by tiles). Four warps fill the ring of stages, 16 bytes a thread, as the rows lie
anywhere; two warpgroups multiply 64 rows each. At a block's last features the next one's values take their place.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import relu_ffn_hopper as hopper
from .boxes import addressable
from .gluon_names import let_next_start, load_box, load_rows, store_box, wait_for_previous
from .hopper_ring import DEPTH, descriptor
from .hopper_tiles import CONSUMERS, ROWS, halves
from .launch import launch as launch_kernel
from .launch import multiprocessors
from .relu_ffn_packing import DENSE

__all__ = ["applies", "down"]

# Features of a tile, and a piece of one that is written at a time.
COLUMNS = gl.constexpr(128)
PIECE = gl.constexpr(64)
PRODUCERS = gl.constexpr(4)  # warps
# Stages, 16 KiB each.
STAGES = gl.constexpr(4)
# Blocks that a multiprocessor has at least: with half of one, at 8 192 tokens, tiles take 37 us for 42.
BLOCKS = 3
# Units of work it has at least, where a block's features can be shared by several.
UNITS = 4


@gluon.jit
def _steps(size, b, state, M):
    """Stages of DEPTH neurons that a tile of block b takes: none where its pool is empty or all rows are dense."""
    pooled = gl.where(gl.load(state + DENSE) == M, 0, gl.load(size + b))
    return gl.cdiv(pooled, DEPTH)


@gluon.jit
def _fill(source, SLOTS: gl.constexpr):
    """Producer: a block's values, and the weights of every tile of this program, in order."""
    (
        values, table, held, ring, held_full, held_empty, full, empty, size, neuron, state, units, parts, tiles, M,
        stride,
    ) = source  # fmt: skip
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [PRODUCERS, 1], [1, 0])
    BYTES: gl.constexpr = ROWS * CONSUMERS * DEPTH * 2
    i = gl.arange(0, DEPTH, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    n = 0  # stages filled
    v = 0  # blocks
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        b, part = unit // parts, unit % parts
        steps = _steps(size, b, state, M)
        if steps > 0:
            listed = neuron + b * (SLOTS * DEPTH)
            last = gl.load(size + b) - 1
            # Past the end, the last again: their values are 0.
            next = gl.load(listed + gl.minimum(i, last))
            for t in range(tiles):
                first = table + (part * tiles + t) * COLUMNS
                for s in range(steps):
                    rows = next[:, None] * stride + d[None, :]
                    # Those after these are known before there is room for them.
                    after = gl.where(s == steps - 1, 0, s + 1)
                    next = gl.load(listed + gl.minimum(after * DEPTH + i, last))
                    if t == 0:
                        mbarrier.wait(held_empty.index(s), (v & 1) ^ 1)
                        mbarrier.expect(held_full.index(s), BYTES)
                        for c in gl.static_range(CONSUMERS):
                            at = [(b * CONSUMERS + c) * ROWS, s * DEPTH]
                            load_box(values, at, held_full.index(s), held.index(s * CONSUMERS + c))
                    stage = n % STAGES
                    mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
                    load_rows(ring.index(stage), first + rows)
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    n += 1
            # Slots that this block has nothing for change hands all the same, so that all are in step.
            for s in range(steps, SLOTS):
                mbarrier.wait(held_empty.index(s), (v & 1) ^ 1)
                mbarrier.arrive(held_full.index(s))
            v += 1


@gluon.jit
def _multiply(operands, ME: gl.constexpr, SLOTS: gl.constexpr):
    """Consumer ME: 64 rows of every tile of this program."""
    (
        held, ring, boxes, held_full, held_empty, full, empty, out, size, state, units, parts, tiles, M,
    ) = operands  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    HALF: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 16]
    )
    n = 0
    v = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        b, part = unit // parts, unit % parts
        steps = _steps(size, b, state, M)
        if steps > 0:
            m0 = (b * CONSUMERS + ME) * ROWS
            for t in range(tiles):
                acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
                for s in range(steps):
                    if t == 0:
                        mbarrier.wait(held_full.index(s), v & 1)
                    stage = n % STAGES
                    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                    fence_async_shared()  # the weights were written as any thread writes
                    a = held.index(s * CONSUMERS + ME)
                    acc = warpgroup_mma(a, ring.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(acc,))  # the other one multiplies
                    mbarrier.arrive(empty.index(stage))
                    if t == tiles - 1:
                        mbarrier.arrive(held_empty.index(s))
                    n += 1
                left, right = halves(acc)
                pieces = (left, right)
                for i in gl.static_range(COLUMNS // PIECE):
                    box = boxes.index(ME * (COLUMNS // PIECE) + i)
                    tma.store_wait(COLUMNS // PIECE - 1)  # what was copied from it has left it
                    box.store(gl.convert_layout(pieces[i], HALF).to(out.dtype))
                    fence_async_shared()
                    store_box(out, [m0, (part * tiles + t) * COLUMNS + i * PIECE], box)
            for s in range(steps, SLOTS):
                mbarrier.wait(held_full.index(s), v & 1)
                mbarrier.arrive(held_empty.index(s))
            v += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "parts", "tiles"])
def _down_kernel(
    values, table, out, size, neuron, state, M, parts, tiles, stride, SIZE: gl.constexpr
):
    """A unit of work is a block and one of `parts` of its features, so many tiles. values [M, SIZE], out [M, D]."""
    SLOTS: gl.constexpr = SIZE // DEPTH
    held = gl.allocate_shared_memory(values.dtype, [SLOTS * CONSUMERS, ROWS, DEPTH], values.layout)
    ring = gl.allocate_shared_memory(values.dtype, [STAGES, DEPTH, COLUMNS], values.layout)
    boxes = gl.allocate_shared_memory(
        out.dtype, [COLUMNS // PIECE * CONSUMERS, ROWS, PIECE], out.layout
    )
    held_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    held_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(held_full.index(i), count=1)
        mbarrier.init(held_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * PRODUCERS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    let_next_start()
    wait_for_previous()
    units = gl.cdiv(M, ROWS * CONSUMERS) * parts
    source = (
        values, table, held, ring, held_full, held_empty, full, empty, size, neuron, state, units, parts, tiles, M,
        stride,
    )  # fmt: skip
    operands = (
        held, ring, boxes, held_full, held_empty, full, empty, out, size, state, units, parts, tiles, M,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (operands, 0, SLOTS)),
            (_multiply, (operands, 1, SLOTS)),
            (_fill, (source, SLOTS)),
        ],
        [4, PRODUCERS],
        [168, 88],
    )


def applies(values: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `down` can make out [M, D] of table [N, D] and what blocks have of their pools, [M, SIZE], and is quicker
    than tiles."""
    whole = table.shape[1] % COLUMNS.value == 0 and len(table) * table.stride(0) < 2**31
    if not whole or not hopper.applies(values) or not all(map(addressable, (table, out))):
        return False
    return len(values) >= BLOCKS * ROWS.value * CONSUMERS.value * multiprocessors(values.device)


def down(
    values: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    size: torch.Tensor,
    neuron: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """out = values @ table, of each block's neurons, in the rows of blocks with a pool. size [blocks], neuron [blocks,
    SIZE], values [M, SIZE], zeros behind a pool's last up to a multiple of DEPTH."""
    M, D = out.shape
    tiles = D // COLUMNS.value
    programs = multiprocessors(out.device)
    parts = 1
    while tiles % (2 * parts) == 0 and len(size) * parts < UNITS * programs:
        parts *= 2
    box = ROWS.value, DEPTH.value
    args = (
        descriptor(values, *box), table, descriptor(out, *box),
        size, neuron, state, M, parts, tiles // parts, table.stride(0),
    )  # fmt: skip
    constants = {"SIZE": values.shape[1]}
    launch_kernel(_down_kernel, (programs,), args, constants, num_warps=4, launch_pdl=True)
