"""A ring of operand stages in shared memory of a Hopper GPU, which one warp fills by the bulk copy engine and two
warpgroups multiply from, each 64 rows of its own by columns that both share.

Every operand is a matrix in rows; what is summed over may be its columns, or with BY_DEPTH its rows. The second one,
and sums, are tuples, of as many as a tile's columns have parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_names import load_box, reinterpret
from .hopper_tiles import CONSUMERS, ROWS, grain_of, offset_of, part_of, parts_in
from .hopper_wide import begin_wide, end_wide

__all__ = [
    "DEPTH",
    "begin_step",
    "copy_tile",
    "descriptor",
    "descriptors",
    "end_step",
    "layout",
    "make_ring",
    "multiply_steps",
    "multiply_tile",
    "stages_of",
]

# Features a stage: 128 bytes of 16-bit elements, one swizzle row of shared memory.
DEPTH = gl.constexpr(64)
# Shared memory of a multiprocessor that operands and what is read and written may take, in bytes.
SHARED = 225 << 10


@gluon.jit
def make_ring(
    a, b, COLUMNS: gl.constexpr, STAGES: gl.constexpr, A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr
):  # fmt: skip
    """Stages of boxes of the matrices a and b, and what says which of them are full and which empty."""
    A_BOX: gl.constexpr = (DEPTH, ROWS) if A_BY_DEPTH else (ROWS, DEPTH)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * CONSUMERS, A_BOX[0], A_BOX[1]], a.layout)
    if B_BY_DEPTH:
        b_ring = gl.allocate_shared_memory(a.dtype, [STAGES, DEPTH, COLUMNS], b[0].layout)
    else:
        GRAIN: gl.constexpr = grain_of(COLUMNS)
        b_ring = gl.allocate_shared_memory(
            a.dtype, [STAGES * (COLUMNS // GRAIN), GRAIN, DEPTH], b[0].layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return a_ring, b_ring, full, empty


@gluon.jit
def _part(b_ring, stage, PART: gl.constexpr, COLUMNS: gl.constexpr, BY_DEPTH: gl.constexpr):
    """A part of a stage's columns, which follow each other in shared memory."""
    if BY_DEPTH:
        return b_ring.index(stage)
    else:
        GRAIN: gl.constexpr = grain_of(COLUMNS)
        first = b_ring.index(stage * (COLUMNS // GRAIN) + offset_of(COLUMNS, PART) // GRAIN)
        if part_of(COLUMNS, PART) == GRAIN:
            return first
        else:
            return reinterpret(first, b_ring.dtype, [part_of(COLUMNS, PART), DEPTH], b_ring.layout)


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
        for i in gl.static_range(parts_in(COLUMNS)):
            b_box = _part(b_ring, stage, i, COLUMNS, B_BY_DEPTH)
            if B_BY_DEPTH:
                load_box(b[i], [k, n0 + offset_of(COLUMNS, i)], filled, b_box)
            else:
                load_box(b[i], [n0 + offset_of(COLUMNS, i), k], filled, b_box)
        n += 1
    return n


@gluon.constexpr_function
def _columns_of(shape, stages, by_depth):
    """Of a tile whose ring for the second operand has this shape."""
    return shape[2] if by_depth else shape[0] // stages * shape[1]


@gluon.jit
def begin_step(
    accs, ring, n, MORE: gl.constexpr, ME: gl.constexpr, STAGES: gl.constexpr,
    A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr,
):  # fmt: skip
    """Warpgroup ME: (accs, if MORE) + the product of the n-th filling's stage, which is under way then."""
    a_ring, b_ring, full, _ = ring
    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    a = a_ring.index(stage * CONSUMERS + ME)
    if A_BY_DEPTH:
        a = a.permute((1, 0))
    COLUMNS: gl.constexpr = _columns_of(b_ring.shape, STAGES, B_BY_DEPTH)
    if len(accs) > 1:
        begin_wide()
    made: gl.tuple = ()
    for i in gl.static_range(len(accs)):
        b = _part(b_ring, stage, i, COLUMNS, B_BY_DEPTH)
        if not B_BY_DEPTH:
            b = b.permute((1, 0))
        made = made + (warpgroup_mma(a, b, accs[i], use_acc=MORE, is_async=True),)
    if len(accs) > 1:
        end_wide()
    return made


@gluon.jit
def end_step(accs, ring, n, LEFT: gl.constexpr, STAGES: gl.constexpr):
    """All products but of so many steps are made, and the n-th filling's stage is empty."""
    made = warpgroup_mma_wait(LEFT * len(accs), deps=accs)
    mbarrier.arrive(ring[3].index(n % STAGES))
    if len(accs) == 1:
        return (made,)
    else:
        return made


@gluon.jit
def multiply_steps(accs, ring, n, ME: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Warpgroup ME: accs + the product of so many stages from the n-th filling on, each under way before the one in
    front is waited for; how many there were then."""
    for i in gl.static_range(STEPS):
        accs = begin_step(accs, ring, n, True, ME, STAGES, False, False)
        if i > 0:
            accs = end_step(accs, ring, n - 1, 1, STAGES)
        n += 1
    accs = end_step(accs, ring, n - 1, 0, STAGES)
    return accs, n


@gluon.jit
def multiply_tile(
    accs, ring, n, steps, ME: gl.constexpr, STAGES: gl.constexpr, A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr
):  # fmt: skip
    """Warpgroup ME: accs + the product of so many stages from the n-th filling on; how many there were then."""
    for _ in range(steps):
        accs = begin_step(accs, ring, n, True, ME, STAGES, A_BY_DEPTH, B_BY_DEPTH)
        accs = end_step(accs, ring, n, 0, STAGES)  # the other one multiplies
        n += 1
    return accs, n


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


def descriptors(t: torch.Tensor, parts: Sequence[int]) -> tuple[TensorDescriptor, ...]:
    """`t`, whose rows are a tile's columns, in boxes of each of their parts, DEPTH features wide; four, the last ones
    the same if it has fewer parts."""
    made = tuple(descriptor(t, columns, DEPTH.value) for columns in parts)
    return (*made, *[made[-1]] * 3)[:4]
