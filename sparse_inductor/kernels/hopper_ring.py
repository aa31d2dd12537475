"""A ring of operand stages in shared memory of a Hopper GPU, which one warp fills by the bulk copy engine and two
warpgroups multiply from, each 64 rows of its own by columns that both share.

Every operand is a matrix in rows; what is summed over may be its columns, or with BY_DEPTH its rows.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_names import load_box

__all__ = [
    "CONSUMERS",
    "DEPTH",
    "GROUP",
    "PIECE",
    "ROWS",
    "accumulator",
    "begin_step",
    "columns_of",
    "copy_tile",
    "descriptor",
    "end_step",
    "halves",
    "layout",
    "make_ring",
    "multiply_tile",
    "pieces",
    "stages_of",
    "tile_at",
]

# Rows a warpgroup: the height of a wgmma. 64 x 256 fp32 are 128 registers a thread.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
# Features a stage: 128 bytes of 16-bit elements, one swizzle row of shared memory.
DEPTH = gl.constexpr(64)
# A tile is read and written by pieces of 64 columns, 8 KiB a warpgroup.
PIECE = gl.constexpr(64)
# Row tiles that share their column tiles in turn: 4 MiB of tokens of K = 2 048 stay in L2 beside the weight.
GROUP = gl.constexpr(8)
# Shared memory of a multiprocessor that operands and what is read and written may take, in bytes.
SHARED = 225 << 10
# What a tile of 128 columns takes, for one of 256, whose operands are fewer bytes a flop.
NARROW = 0.52


@gluon.constexpr_function
def accumulator(columns):
    """How a warpgroup's threads hold sums [64, columns]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def tile_at(t, tiles_m, tiles_n):
    """(row tile, column tile)."""
    group = t // (GROUP * tiles_n)
    r = t % (GROUP * tiles_n)
    size = gl.minimum(GROUP, tiles_m - group * GROUP)
    return group * GROUP + r % size, r // size


@gluon.jit
def halves(v):
    """A tile's left and right half. No data moves."""
    n: gl.constexpr = v.shape[1] // 2
    left, right = v.reshape([v.shape[0], 2, n]).permute((0, 2, 1)).split()
    return left, right


@gluon.jit
def pieces(v, COUNT: gl.constexpr):
    """A tile's so many pieces, from left to right. No data moves."""
    if COUNT == 1:
        return (v,)
    else:
        left, right = halves(v)
        return pieces(left, COUNT // 2) + pieces(right, COUNT // 2)


@gluon.jit
def make_ring(
    a, b, COLUMNS: gl.constexpr, STAGES: gl.constexpr, A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr
):  # fmt: skip
    """Stages of boxes of the matrices a and b, and what says which of them are full and which empty."""
    A_BOX: gl.constexpr = (DEPTH, ROWS) if A_BY_DEPTH else (ROWS, DEPTH)
    B_BOX: gl.constexpr = (DEPTH, COLUMNS) if B_BY_DEPTH else (COLUMNS, DEPTH)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * CONSUMERS, A_BOX[0], A_BOX[1]], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, B_BOX[0], B_BOX[1]], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return a_ring, b_ring, full, empty


@gluon.jit
def copy_tile(
    a, b, ring, n, m0, n0, steps, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr,
):  # fmt: skip
    """The warp that copies: a tile's operands, into the stages from the n-th filling on; how many there are then."""
    a_ring, b_ring, full, empty = ring
    BYTES: gl.constexpr = (ROWS * CONSUMERS + COLUMNS) * DEPTH * 2
    for step in range(steps):
        stage = n % STAGES
        filled = full.index(stage)
        k = step * DEPTH
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(filled, BYTES)
        for c in gl.static_range(CONSUMERS):
            m = m0 + c * ROWS
            a_box = a_ring.index(stage * CONSUMERS + c)
            if A_BY_DEPTH:
                load_box(a, [k, m], filled, a_box)
            else:
                load_box(a, [m, k], filled, a_box)
        if B_BY_DEPTH:
            load_box(b, [k, n0], filled, b_ring.index(stage))
        else:
            load_box(b, [n0, k], filled, b_ring.index(stage))
        n += 1
    return n


@gluon.jit
def begin_step(
    acc, ring, n, MORE: gl.constexpr, ME: gl.constexpr, STAGES: gl.constexpr,
    A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr,
):  # fmt: skip
    """Warpgroup ME: (acc, if MORE) + the product of the n-th filling's stage, which is under way then."""
    a_ring, b_ring, full, _ = ring
    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    a = a_ring.index(stage * CONSUMERS + ME)
    b = b_ring.index(stage)
    if A_BY_DEPTH:
        a = a.permute((1, 0))
    if not B_BY_DEPTH:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=MORE, is_async=True)


@gluon.jit
def end_step(acc, ring, n, LEFT: gl.constexpr, STAGES: gl.constexpr):
    """All products but so many are made, and the n-th filling's stage is empty."""
    acc = warpgroup_mma_wait(LEFT, deps=(acc,))
    mbarrier.arrive(ring[3].index(n % STAGES))
    return acc


@gluon.jit
def multiply_tile(
    acc, ring, n, steps, ME: gl.constexpr, STAGES: gl.constexpr, A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr
):  # fmt: skip
    """Warpgroup ME: acc + the product of so many stages from the n-th filling on; how many there were then."""
    for _ in range(steps):
        acc = begin_step(acc, ring, n, True, ME, STAGES, A_BY_DEPTH, B_BY_DEPTH)
        acc = end_step(acc, ring, n, 0, STAGES)  # the other one multiplies
        n += 1
    return acc, n


def columns_of(M: int, N: int, programs: int) -> tuple[int, float]:
    """(columns of a tile of so many programs' product [M, N], how many of the programs the last round leaves waiting),
    the latter in rounds of tiles of 256 columns."""
    tiles = -(-M // (ROWS.value * CONSUMERS.value)) * -(-N // 256)
    costs = []
    for columns, cost in ((256, 1.0), (128, NARROW)):
        rounds = -(-tiles * (256 // columns) // programs)
        costs.append(
            (rounds * cost, columns, (rounds - tiles * (256 // columns) / programs) * cost)
        )
    _, columns, waiting = min(costs, key=lambda of: of[0])
    return columns, waiting


def stages_of(columns: int, beside: int) -> int:
    """Stages of the ring: as many as fit a multiprocessor beside so many bytes."""
    stage = (ROWS.value * CONSUMERS.value + columns) * DEPTH.value * 2
    return (SHARED - beside) // stage


@functools.cache
def layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def descriptor(t: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`t` in boxes of rows x columns."""
    return TensorDescriptor.from_tensor(t, [rows, columns], layout(t.dtype, rows, columns))
