"""The hidden activations of a dense ReLU feed-forward block on Hopper GPUs, where the up projection is made: a
warp-specialised persistent kernel in Gluon.

    h = f(gate) * g(x up^T + bias)      from the gate projection, to its place or elsewhere

One warp copies operand tiles into a ring of shared-memory stages with the bulk copy engine; two warpgroups each
multiply 64 rows of a tile (`hopper_projection`). A tile's up projection is rounded, as PyTorch does, and held. While
the tensor cores are busy with the first steps of the next tile, it meets the gates, which came meanwhile, by pieces.
Tiles of 256 columns would take longer: their gates leave room for three stages.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sparse_inductor.epilogue.steps import Program

from .epilogue import encode, evaluate
from .gluon_names import let_next_start, load_box, wait_for_previous
from .hopper_projection import (
    as_held,
    biased,
    box_at,
    box_of,
    copy_tiles,
    make_boxes,
    nothing,
    pieces_of,
    place_of,
    projection,
    put,
    rounded,
    stages_beside,
    tiles_of,
)
from .hopper_ring import begin_step, end_step, make_ring, multiply_steps
from .hopper_tiles import CONSUMERS, ROWS, Tiles, as_boxed, is_wide, pieces_in
from .hopper_wide import Widened
from .launch import launch as launch_kernel
from .relu_ffn_packing import DENSE

__all__ = ["hidden", "may_activate"]


@gluon.jit
def _ask_for_gates(
    gates, boxes, read, m0, n0, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr
):
    """Send for consumer ME's part of the tile at (m0, n0), when what was stored from its boxes has left them."""
    tma.store_wait(0)
    bar = read.index(ME)
    mbarrier.expect(bar, COLUMNS * ROWS * 2)
    for place in gl.static_range(pieces_in(COLUMNS)):
        gate = gates[0] if is_wide(COLUMNS, place) else gates[1]
        m, n = box_at(m0, n0, place, COLUMNS, TURNED)
        load_box(gate, [m, n], bar, box_of(boxes, place, ME, COLUMNS, pieces_in(COLUMNS)))


@gluon.jit
def _end_piece(
    piece, ends, m0, n0, PLACE: gl.constexpr, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr,
    KEEP: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """A piece of consumer ME's part of the tile at (m0, n0) meets the gates there."""
    boxes, up_boxes, _read, outs, ups, cut = ends
    at = box_at(m0, n0, PLACE, COLUMNS, TURNED)
    u = as_boxed(piece)
    if KEEP:
        # The last piece's up projection has left; its h may be on its way.
        tma.store_wait(1)
        put(u, box_of(up_boxes, PLACE, ME, COLUMNS, 1), ups, at, TURNED)
    box = box_of(boxes, PLACE, ME, COLUMNS, pieces_in(COLUMNS))
    g = as_held(box, TURNED).load(u.type.layout).to(gl.float32)
    h = gl.where(g <= cut, 0.0, evaluate(g, F) * evaluate(u.to(gl.float32), G))
    put(h.to(outs[0].dtype), box, outs, at, TURNED)


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr,
    STAGES: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Consumer ME: 64 rows of every tile of this program."""
    ends, ring, gates, bias, tiles_m, tiles_n, N = operands
    boxes, _up_boxes, read, outs, _ups, _cut = ends
    dtype: gl.constexpr = outs[0].dtype
    COUNT: gl.constexpr = pieces_in(COLUMNS)
    # A piece every second step, if there are as many; behind the last one the gates of this tile are sent for.
    APART: gl.constexpr = 2 if EACH >= 2 * COUNT else 1
    ASKS: gl.constexpr = min(APART * COUNT, EACH - 1)
    n = 0  # stages consumed
    phase = 0
    held = nothing(dtype, COLUMNS)
    m_held, n_held = 0, 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m0, n0 = place_of(t, tiles_m, tiles_n, ME, COLUMNS, TURNED)
        accs = nothing(gl.float32, COLUMNS)
        found = pieces_of(held, COLUMNS)
        for i in gl.static_range(EACH):
            accs = begin_step(accs, ring, n, i > 0, ME, COLUMNS, STAGES, False, False)
            if i < APART * COUNT and i % APART == 0 and t > gl.program_id(0):
                if i == 0:
                    mbarrier.wait(read.index(ME), phase ^ 1)
                _end_piece(
                    found[i // APART], ends, m_held, n_held, i // APART, ME, COLUMNS, TURNED, KEEP, F, G
                )  # fmt: skip
            if i == ASKS:
                _ask_for_gates(gates, boxes, read, m0, n0, ME, COLUMNS, TURNED)
            if i > 0:
                accs = end_step(accs, ring, n - 1, 1, STAGES)
            n += 1
        accs = end_step(accs, ring, n - 1, 0, STAGES)
        for _k in range(EACH, KBLOCKS, EACH):
            accs, n = multiply_steps(accs, ring, n, ME, EACH, COLUMNS, STAGES)
        accs = biased(accs, bias, n0, N, TURNED, HAS_BIAS)
        held, m_held, n_held = rounded(accs, dtype), m0, n0
        phase = phase ^ 1
    if gl.program_id(0) < tiles_m * tiles_n:
        mbarrier.wait(read.index(ME), phase ^ 1)
        found = pieces_of(held, COLUMNS)
        for i in gl.static_range(COUNT):
            _end_piece(found[i], ends, m_held, n_held, i, ME, COLUMNS, TURNED, KEEP, F, G)
    tma.store_wait(0)


@Widened
@gluon.jit(do_not_specialize=["M", "N", "cut"])
def _hidden_kernel(
    a, b0, b1, b2, b3, gate, gate_small, out, out_small, up, up_small, bias, state, whole, M, N, cut,
    COLUMNS: gl.constexpr, TURNED: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr, STAGES: gl.constexpr,
    KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """out [M, N] = f(gate) * g(x up^T + bias); a program owns every so manieth tile. Nothing but where the state says
    that all M rows take the dense path; with KEEP, 1 in `whole` says so, else 0, and the product goes to `up`, too.

    a, b: x and the weight, in boxes of each part of a tile's columns; or the weight and x, if TURNED.
    """
    b = (b0, b1, b2, b3)
    ring = make_ring(a, b, COLUMNS, STAGES, False, False)
    gates, outs, ups = (gate, gate_small), (out, out_small), (up, up_small)
    boxes = make_boxes(outs, COLUMNS, pieces_in(COLUMNS))
    up_boxes = boxes
    if KEEP:
        up_boxes = make_boxes(ups, COLUMNS, 1)
    read = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(read.index(i), count=1)
    tiles_m, tiles_n = tiles_of(M, N, COLUMNS, TURNED)
    # A multiprocessor has no room for anything beside this: the next kernel starts where tiles have run out.
    let_next_start()
    wait_for_previous()
    dense = gl.load(state + DENSE) == M
    tiles_m = gl.where(dense, tiles_m, 0)
    if KEEP:
        gl.store(whole, dense.to(gl.int32), mask=gl.program_id(0) == 0)
    source = (a, b, ring, tiles_m, tiles_n)
    ends = (boxes, up_boxes, read, outs, ups, cut)
    operands = (ends, ring, gates, bias, tiles_m, tiles_n, N)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (operands, 0, COLUMNS, TURNED, KBLOCKS, EACH, STAGES, KEEP, HAS_BIAS, F, G),
            ),
            (
                _multiply_tiles,
                (operands, 1, COLUMNS, TURNED, KBLOCKS, EACH, STAGES, KEEP, HAS_BIAS, F, G),
            ),
            (copy_tiles, (source, COLUMNS, TURNED, KBLOCKS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def stages(columns: int, keeps: bool) -> int:
    """Stages of the ring, beside what is read and written."""
    return stages_beside(columns, pieces_in(columns), *([1] if keeps else []))


# By whether the up projection is kept.
TILES = {
    keeps: Tiles(
        functools.partial(stages, keeps=keeps),
        upright=((128, 0.49),),
        turned=((192, 0.74), (176, 0.685), (160, 0.62), (144, 0.56)),  # wider: three stages only
    )
    for keeps in (False, True)
}


def may_activate(f: Program, g: Program) -> bool:
    """Whether `hidden` can run these: pow begins with tl.full, which has no layout in Gluon."""
    return all(step.fn != "pow" for step in (*f, *g))


def hidden(
    x: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor,
    state: torch.Tensor,
    f: Program,
    g: Program,
    cut: float,
    out: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Where all rows take the dense path, h of their gate projection [M, N] in `out`, which may be the same.

    kept: the up projection goes to the first, and 1 to the second, one int32; 0 where not all rows take that path.
    """
    keeps = kept is not None
    of = projection(x, up, TILES[keeps])
    ups, whole = kept or (out, out)
    outs = of.boxes(out)
    args = (
        *of.operands, *of.boxes(gate), *outs, *(of.boxes(ups) if keeps else outs),
        out if bias is None else bias, state, whole, len(x), len(up), cut,
    )  # fmt: skip
    constants = {
        **of.constants,
        "KEEP": keeps,
        "HAS_BIAS": bias is not None,
        "F": encode(f),
        "G": encode(g),
    }
    launch_kernel(_hidden_kernel, (of.programs,), args, constants, num_warps=4, launch_pdl=True)
