"""The gradients of a dense block's projections on Hopper GPUs, where the gradient of h is made: one kernel in Gluon.

    dh = dy down                                 [M, N]
    (gate, up, .) -> (d gate, d up, h)           in the place of both projections, and a third tensor

The tiles, the ring and the warps are those of `relu_ffn_hopper`; a tile ends by pieces of 64 columns, of which two at a
time are in shared memory. Made by two kernels, dh would be written and read once more.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_inductor.epilogue.steps import Program

from . import relu_ffn_hopper as hopper
from .boxes import addressable
from .epilogue import encode
from .gluon_names import load_box, store_box
from .launch import launch as launch_kernel
from .launch import multiprocessors
from .relu_ffn_dots import slopes as slopes_of

__all__ = ["applies", "slopes"]

ROWS, CONSUMERS, DEPTH = hopper.ROWS, hopper.CONSUMERS, hopper.DEPTH
COLUMNS, PIECES = gl.constexpr(256), gl.constexpr(4)
STAGES = gl.constexpr(3)
PIECE = gl.constexpr(64)
# Pieces of a consumer in shared memory, and its boxes: two of each projection and one of h.
HELD = gl.constexpr(2)
BOXES = gl.constexpr(5)


@gluon.jit
def _copy_tiles(source):
    """Producer warp: the operands of every tile of this program, in order, into the ring."""
    dy, down, dy_ring, down_ring, full, empty, tiles_m, tiles_n, steps = source
    BYTES: gl.constexpr = (ROWS * CONSUMERS + COLUMNS) * DEPTH * 2
    n = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = hopper._tile_at(t, tiles_m, tiles_n)
        for k in range(steps):
            stage = n % STAGES
            filled = full.index(stage)
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(filled, BYTES)
            for c in gl.static_range(CONSUMERS):
                box = dy_ring.index(stage * CONSUMERS + c)
                load_box(dy, [(pm * CONSUMERS + c) * ROWS, k * DEPTH], filled, box)
            load_box(down, [k * DEPTH, pn * COLUMNS], filled, down_ring.index(stage))
            n += 1


@gluon.jit
def _ask(gate, up, boxes, read, m0, n0, slot, ME: gl.constexpr, GATED: gl.constexpr):
    """Send for a piece of both projections."""
    bar = read.index(ME * HELD + slot)
    mbarrier.expect(bar, (1 + GATED) * ROWS * PIECE * 2)
    load_box(gate, [m0, n0], bar, boxes.index(ME * BOXES + 2 * slot))
    if GATED:
        load_box(up, [m0, n0], bar, boxes.index(ME * BOXES + 2 * slot + 1))


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, GATED: gl.constexpr, STATS: gl.constexpr, F: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """Consumer ME: 64 rows of every tile of this program."""
    (
        gate, up, hidden, dy_ring, down_ring, boxes, full, empty, read, d_stats, stride_s, tiles_m, tiles_n, steps,
        M, cut,
    ) = operands  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    PART: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 16]
    )
    n = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = hopper._tile_at(t, tiles_m, tiles_n)
        m0 = (pm * CONSUMERS + ME) * ROWS
        tma.store_wait(0)  # the last tile has left its boxes
        for i in gl.static_range(HELD):
            _ask(gate, up, boxes, read, m0, pn * COLUMNS + i * PIECE, i, ME, GATED)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
        for _ in range(steps):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            a = dy_ring.index(stage * CONSUMERS + ME)
            acc = warpgroup_mma(a, down_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))  # the other one multiplies
            mbarrier.arrive(empty.index(stage))
            n += 1
        a0, a1 = hopper._halves(acc)
        p0, p1 = hopper._halves(a0)
        p2, p3 = hopper._halves(a1)
        pieces = (p0, p1, p2, p3)
        row = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, PART))
        da_extra = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, PART))
        dh_extra = da_extra
        if STATS:
            da_extra = gl.load(d_stats + row, mask=row < M, other=0.0)
            dh_extra = gl.load(d_stats + 2 * stride_s + row, mask=row < M, other=0.0)
        h_box = boxes.index(ME * BOXES + 2 * HELD)
        for i in gl.static_range(PIECES):
            slot = i % HELD
            n0 = pn * COLUMNS + i * PIECE
            gate_box = boxes.index(ME * BOXES + 2 * slot)
            up_box = boxes.index(ME * BOXES + 2 * slot + 1)
            mbarrier.wait(read.index(ME * HELD + slot), i // HELD)
            g = gate_box.load(PART).to(gl.float32)
            u = g
            if GATED:
                u = up_box.load(PART).to(gl.float32)
            dh = gl.convert_layout(pieces[i], PART)
            dg, du, h = slopes_of(g, u, dh, da_extra[:, None], dh_extra[:, None], F, G, GATED)
            # Rows behind the last are zeros, for products that sum over rows.
            off = (g <= cut) | (row >= M)[:, None]
            tma.store_wait(1 + GATED)  # the last h has left its box
            h_box.store(gl.where(off, 0.0, h).to(hidden.dtype))
            gate_box.store(gl.where(off, 0.0, dg).to(hidden.dtype))
            if GATED:
                up_box.store(gl.where(off, 0.0, du).to(hidden.dtype))
            fence_async_shared()
            store_box(hidden, [m0, n0], h_box)
            store_box(gate, [m0, n0], gate_box)
            if GATED:
                store_box(up, [m0, n0], up_box)
            if i + 1 == HELD:
                # The other half of the pieces takes the place of this one.
                tma.store_wait(2 + GATED)
                _ask(gate, up, boxes, read, m0, n0 + PIECE, 0, ME, GATED)
                tma.store_wait(0)
                _ask(gate, up, boxes, read, m0, n0 + 2 * PIECE, 1, ME, GATED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "steps", "cut"])
def _slopes_kernel(
    dy, down, gate, up, hidden, d_stats, length, M, N, steps, stride_s, cut,
    GATED: gl.constexpr, STATS: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Nothing but where all M rows are listed."""
    dy_ring = gl.allocate_shared_memory(dy.dtype, [STAGES * CONSUMERS, ROWS, DEPTH], dy.layout)
    down_ring = gl.allocate_shared_memory(dy.dtype, [STAGES, DEPTH, COLUMNS], down.layout)
    boxes = gl.allocate_shared_memory(dy.dtype, [BOXES * CONSUMERS, ROWS, PIECE], gate.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [HELD * CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(HELD * CONSUMERS):
        mbarrier.init(read.index(i), count=1)
    tiles_m = gl.where(gl.load(length) == M, gl.cdiv(M, ROWS * CONSUMERS), 0)
    tiles_n = gl.cdiv(N, COLUMNS)
    source = (dy, down, dy_ring, down_ring, full, empty, tiles_m, tiles_n, steps)
    operands = (
        gate, up, hidden, dy_ring, down_ring, boxes, full, empty, read, d_stats, stride_s, tiles_m, tiles_n, steps,
        M, cut,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply_tiles, (operands, 0, GATED, STATS, F, G)),
            (_multiply_tiles, (operands, 1, GATED, STATS, F, G)),
            (_copy_tiles, (source,)),
        ],
        [4, 1],
        [240, 24],
    )


@functools.cache
def _wide_layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([DEPTH.value, COLUMNS.value], element)


def applies(
    dy: torch.Tensor, down: torch.Tensor, gate: torch.Tensor, f: Program, g: Program
) -> bool:
    """Whether `slopes` can run: dy [M, D] and down [D, N], both rows of 16-byte pieces."""
    return (
        hopper.applies(dy)
        and all(map(addressable, (down, gate)))
        and down.shape[1] % 8 == 0
        and hopper.may_activate(f, g)
    )


def slopes(
    dy: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    hidden: torch.Tensor,
    d_stats: torch.Tensor | None,
    length: torch.Tensor,
    f: Program,
    g: Program,
    cut: float,
) -> None:
    """Where `length` says that all rows of dy [M, D] are listed, (gate, up) to their gradients, in place, and h to
    `hidden`: all three of M rows and more, which become zeros up to a multiple of a tile, as far as there are any."""
    M, D = dy.shape
    N = down.shape[1]
    narrow, wide = hopper._layout(dy.dtype), _wide_layout(dy.dtype)
    box = [ROWS.value, PIECE.value]
    boxes = [
        TensorDescriptor.from_tensor(gate if t is None else t, box, narrow)
        for t in (gate, up, hidden)
    ]
    args = (
        TensorDescriptor.from_tensor(dy, [ROWS.value, DEPTH.value], narrow),
        TensorDescriptor.from_tensor(down, [DEPTH.value, COLUMNS.value], wide),
        *boxes, length if d_stats is None else d_stats, length,
        M, N, -(-D // DEPTH.value), 0 if d_stats is None else d_stats.stride(0), cut,
    )  # fmt: skip
    constants = {
        "GATED": up is not None, "STATS": d_stats is not None, "F": encode(f), "G": encode(g),
    }  # fmt: skip
    programs = multiprocessors(dy.device)
    launch_kernel(_slopes_kernel, (programs,), args, constants, num_warps=4)
