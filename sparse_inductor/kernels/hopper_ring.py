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

from .gluon_names import load_box
from .hopper_tiles import CONSUMERS, ROWS, offset_of, part_of, parts_in
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
    "stages_of",
]

# Features a stage: 128 bytes of 16-bit elements, one swizzle row of shared memory.
DEPTH = gl.constexpr(64)
# Shared memory of a multiprocessor that operands and what is read and written may take, in bytes.
SHARED = 225 << 10


@gluon.constexpr_function
def _rows_held(columns):
    """Rows of a stage's box of the second operand, a power of two as all shared memory in Gluon: the columns are a
    slice of it."""
    return 1 << (columns - 1).bit_length()


@gluon.constexpr_function
def _boxes_apart(columns):
    """How many warpgroups' boxes of the first operand are allocated beside the second one's box: the last warpgroup's
    is in that one's unused rows, where there are enough."""
    fits = _rows_held(columns) - columns >= ROWS.value
    return CONSUMERS.value - 1 if fits else CONSUMERS.value


@gluon.jit
def make_ring(
    a, b, COLUMNS: gl.constexpr, STAGES: gl.constexpr, A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr
):  # fmt: skip
    """Stages of boxes of the matrices a and b, and what says which of them are full and which empty."""
    A_BOX: gl.constexpr = (DEPTH, ROWS) if A_BY_DEPTH else (ROWS, DEPTH)
    a_ring = gl.allocate_shared_memory(
        a.dtype, [STAGES * _boxes_apart(COLUMNS), A_BOX[0], A_BOX[1]], a.layout
    )
    B_BOX: gl.constexpr = (DEPTH, COLUMNS) if B_BY_DEPTH else (_rows_held(COLUMNS), DEPTH)
    b_ring = gl.allocate_shared_memory(a.dtype, [STAGES, B_BOX[0], B_BOX[1]], b[0].layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return a_ring, b_ring, full, empty


@gluon.jit
def _first(ring, stage, ME: gl.constexpr, STAGES: gl.constexpr):
    """Warpgroup ME's box of a stage's first operand."""
    a_ring, b_ring, _, _ = ring
    APART: gl.constexpr = a_ring.shape[0] // STAGES
    if ME < APART:
        return a_ring.index(stage * APART + ME)
    else:
        return b_ring.index(stage).slice(b_ring.shape[1] - ROWS, ROWS)


@gluon.jit
def _second(ring, stage, START: gl.constexpr, COLUMNS: gl.constexpr, BY_DEPTH: gl.constexpr):
    """So many columns of a stage's second operand; all of them by depth."""
    held = ring[1].index(stage)
    if BY_DEPTH or held.shape[0] == COLUMNS:
        return held
    else:
        return held.slice(START, COLUMNS)


@gluon.jit
def copy_tile(
    a, b, ring, n, m0, n0, steps, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr,
):  # fmt: skip
    """The warp that copies: a tile's operands, into the stages from the n-th filling on; how many there are then."""
    _, _, full, empty = ring
    BYTES: gl.constexpr = (ROWS * CONSUMERS + COLUMNS) * DEPTH * 2
    for step in range(steps):
        stage = n % STAGES
        filled = full.index(stage)
        k = step * DEPTH
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(filled, BYTES)
        for c in gl.static_range(CONSUMERS):
            m = m0 + c * ROWS
            a_box = _first(ring, stage, c, STAGES)
            if A_BY_DEPTH:
                load_box(a, [k, m], filled, a_box)
            else:
                load_box(a, [m, k], filled, a_box)
        for i in gl.static_range(parts_in(COLUMNS)):
            b_box = _second(ring, stage, offset_of(COLUMNS, i), part_of(COLUMNS, i), B_BY_DEPTH)
            if B_BY_DEPTH:
                load_box(b[i], [k, n0 + offset_of(COLUMNS, i)], filled, b_box)
            else:
                load_box(b[i], [n0 + offset_of(COLUMNS, i), k], filled, b_box)
        n += 1
    return n


@gluon.jit
def begin_step(
    accs, ring, n, MORE: gl.constexpr, ME: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    A_BY_DEPTH: gl.constexpr, B_BY_DEPTH: gl.constexpr,
):  # fmt: skip
    """Warpgroup ME: (accs, if MORE) + the product of the n-th filling's stage, which is under way then."""
    stage = n % STAGES
    mbarrier.wait(ring[2].index(stage), (n // STAGES) & 1)
    a = _first(ring, stage, ME, STAGES)
    if A_BY_DEPTH:
        a = a.permute((1, 0))
    if len(accs) > 1:
        begin_wide()
    made: gl.tuple = ()
    for i in gl.static_range(len(accs)):
        b = _second(ring, stage, offset_of(COLUMNS, i), part_of(COLUMNS, i), B_BY_DEPTH)
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
def multiply_steps(
    accs, ring, n, ME: gl.constexpr, STEPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Warpgroup ME: accs + the product of so many stages from the n-th filling on, each under way before the one in
    front is waited for; how many there were then."""
    for i in gl.static_range(STEPS):
        accs = begin_step(accs, ring, n, True, ME, COLUMNS, STAGES, False, False)
        if i > 0:
            accs = end_step(accs, ring, n - 1, 1, STAGES)
        n += 1
    accs = end_step(accs, ring, n - 1, 0, STAGES)
    return accs, n


def stages_of(columns: int, beside: int) -> int:
    """Stages of the ring: as many as fit a multiprocessor beside so many bytes."""
    stage = (ROWS.value * _boxes_apart(columns) + _rows_held(columns)) * DEPTH.value * 2
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
