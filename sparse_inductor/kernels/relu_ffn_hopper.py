"""Products of a ReLU feed-forward block on Hopper GPUs, by one warp-specialised persistent kernel in Gluon.

One warp copies operand tiles into a ring of shared-memory stages with the bulk copy engine; two warpgroups each
multiply 64 rows of their own by columns that both share: 256, the widest wgmma, or half of that where fewer
multiprocessors then wait for the last tiles. A tile's sums are rounded and held, half the registers, and go to memory
by pieces while the tensor cores are busy with the first steps of the next tile. It ends in one of two ways:

    MARK    the gate projection is written twice: as numbers, for rows that turn out not to be sparse, and as a bit for
            each, all that `relu_ffn_packing.pack` reads of rows that are
    HIDDEN  the up projection, rounded as PyTorch does, meets the gate's, which becomes f(gate) * g(up); or that goes
            elsewhere, and the up projection is kept beside the gate's, for a backward

Marks, [M, tiles of 256 neurons, 4, 2] int32: bit b of word (tile, lane, half) is neuron
256 tile + 128 half + 8 (b // 2) + 2 lane + b % 2, as the threads hold the accumulator, so that marking moves no data.
"""

from __future__ import annotations

import functools
import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from sparse_inductor.epilogue.steps import Program

from .boxes import addressable
from .epilogue import encode, evaluate
from .gluon_names import let_next_start, load_box, store_box, wait_for_previous
from .hopper_ring import (
    CONSUMERS,
    DEPTH,
    PIECE,
    ROWS,
    accumulator,
    begin_step,
    columns_of,
    copy_tile,
    descriptor,
    end_step,
    make_ring,
    pieces,
    stages_of,
    tile_at,
)
from .launch import launch as launch_kernel
from .launch import multiprocessors
from .relu_ffn_packing import DENSE
from .unroll import unrolled

__all__ = [
    "applies",
    "hidden",
    "least_active",
    "leaves_room",
    "marked_product",
    "may_activate",
    "may_mark",
]

MARK, HIDDEN = gl.constexpr(0), gl.constexpr(1)

# Neurons of a tile of marks, and of a word of them.
MARKED, WORD = gl.constexpr(256), gl.constexpr(128)


@gluon.jit
def _clear(zeros, words):
    """Each program writes its share of `words` zeros."""
    PIECE: gl.constexpr = 256  # 16 bytes a thread
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    zero = gl.zeros([PIECE], gl.int64, layout)
    for first in range(gl.program_id(0) * PIECE, words, gl.num_programs(0) * PIECE):
        at = first + gl.arange(0, PIECE, layout)
        gl.store(zeros + at, zero, mask=at < words)


@gluon.jit
def _copy_tiles(source, COLUMNS: gl.constexpr, KBLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """Producer warp: the operands of every tile of this program, in order, into the ring."""
    x, weight, ring, tiles_m, tiles_n = source
    n = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = tile_at(t, tiles_m, tiles_n)
        m0, n0 = pm * (ROWS * CONSUMERS), pn * COLUMNS
        n = copy_tile(x, weight, ring, n, m0, n0, KBLOCKS, COLUMNS, STAGES, False, False)


@gluon.jit
def _or(a, b):
    return a | b


@gluon.constexpr_function
def _marks_layout(words):
    """An accumulator as its threads hold it, [64 rows, lane of its quad, word, bit], for so many words."""
    more = [[0, 0, 1, 0]] if words == 2 else []
    bits = [[0, 0, 0, 1 << b] for b in range(1, 5)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *bits, *more],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 4, words, 32],
    )


@gluon.jit
def _mark(acc, marks, m0, n0, M, N, least):
    """Write the marks of columns from n0 on, a tile [64, 256] or half of one."""
    COUNT: gl.constexpr = acc.shape[1] // WORD
    HELD: gl.constexpr = _marks_layout(COUNT)
    WORDS: gl.constexpr = gl.SliceLayout(3, HELD)
    LANES: gl.constexpr = gl.SliceLayout(2, WORDS)
    bit = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, HELD))))
    bit = (gl.full([32], 1, gl.int32, bit.type.layout) << bit)[None, None, None, :]
    lane = gl.arange(0, 4, gl.SliceLayout(0, LANES))
    n = n0 + WORD * gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    word = (2 * lane)[None, :, None] + (n // MARKED * 8 + n % MARKED // WORD)[None, None, :]
    held = acc.reshape([ROWS, COUNT, 16, 4, 2]).permute((0, 3, 1, 2, 4))
    held = gl.convert_layout(held.reshape([ROWS, 4, COUNT, 32]), HELD)
    # NaN is active.
    found = gl.reduce(gl.where(held <= least, 0, bit), 3, _or)
    # Neurons past the last: zeros of the weight, but NaN where a token is not finite. N is a multiple of 8.
    left = gl.minimum(gl.maximum(N - n, 0) // 8, 16)
    there = gl.where(
        left == 16, -1, (gl.full([COUNT], 1, gl.int32, left.type.layout) << (2 * left)) - 1
    )
    found = found & there[None, None, :]
    row = (m0 + gl.arange(0, ROWS, gl.SliceLayout(1, LANES))).to(gl.int64)
    at = (row * (gl.cdiv(N, MARKED) * 8))[:, None, None] + word
    gl.store(marks + at, found, mask=(row < M)[:, None, None])


@gluon.jit
def _ask_for_gates(gate, out_ring, read, m0, n0, ME: gl.constexpr, PIECES: gl.constexpr):
    """Send for consumer ME's part of the tile at (m0, n0), when what was stored from its boxes has left them."""
    tma.store_wait(0)
    bar = read.index(ME)
    mbarrier.expect(bar, PIECES * ROWS * PIECE * 2)
    for i in gl.static_range(PIECES):
        load_box(gate, [m0, n0 + i * PIECE], bar, out_ring.index(PIECES * ME + i))


@gluon.jit
def _end_piece(
    held, ends, m0, n0, phase, PLACE: gl.constexpr, ME: gl.constexpr, BOXES: gl.constexpr, MODE: gl.constexpr,
    KEEP: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """A piece of consumer ME's part of the tile at (m0, n0) goes to its place there, as MODE says."""
    out_ring, up_ring, read, out, ups, cut = ends
    OF_PIECE: gl.constexpr = accumulator(PIECE)
    piece = gl.convert_layout(pieces(held, held.shape[1] // PIECE)[PLACE], OF_PIECE)
    box = out_ring.index(BOXES * ME + PLACE % BOXES)
    at = [m0, n0 + PLACE * PIECE]
    if KEEP:
        tma.store_wait(1)  # the up projection's last piece has left; h may be on its way
        up_ring.index(ME).store(piece)
        fence_async_shared()
        store_box(ups, at, up_ring.index(ME))
    if MODE == HIDDEN:
        if PLACE == 0:
            mbarrier.wait(read.index(ME), phase)
        g = box.load(OF_PIECE).to(gl.float32)
        h = gl.where(g <= cut, 0.0, evaluate(g, F) * evaluate(piece.to(gl.float32), G))
        piece = h.to(out.dtype)
    else:
        tma.store_wait(BOXES - 1)  # what was copied from this box has left it
    box.store(piece)
    fence_async_shared()
    store_box(out, at, box)


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, COLUMNS: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr,
    STAGES: gl.constexpr, BOXES: gl.constexpr, MODE: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr,
    F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Consumer ME: 64 rows of every tile of this program. A tile's pieces go to memory while the tensor cores are busy
    with the first steps of the next one."""
    ends, ring, tiles = operands
    out_ring, _up_ring, read, out, _ups, cut = ends
    gate, bias, marks, tiles_m, tiles_n, M, N = tiles
    MMA: gl.constexpr = accumulator(COLUMNS)
    PIECES: gl.constexpr = COLUMNS // PIECE
    n = 0  # stages consumed
    phase = 0
    held = gl.zeros([ROWS, COLUMNS], out.dtype, MMA)
    m_held, n_held = 0, 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = tile_at(t, tiles_m, tiles_n)
        m0, n0 = (pm * CONSUMERS + ME) * ROWS, pn * COLUMNS
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
        for i in gl.static_range(EACH):
            acc = begin_step(acc, ring, n, i > 0, ME, STAGES, False, False)
            if i < PIECES and t > gl.program_id(0):
                _end_piece(held, ends, m_held, n_held, phase ^ 1, i, ME, BOXES, MODE, KEEP, F, G)
            if MODE == HIDDEN and i == PIECES:
                _ask_for_gates(gate, out_ring, read, m0, n0, ME, PIECES)
            if i > 0:
                acc = end_step(acc, ring, n - 1, 1, STAGES)
            n += 1
        acc = end_step(acc, ring, n - 1, 0, STAGES)
        for _k in range(EACH, KBLOCKS, EACH):
            for i in gl.static_range(EACH):
                acc = begin_step(acc, ring, n, True, ME, STAGES, False, False)
                if i > 0:
                    acc = end_step(acc, ring, n - 1, 1, STAGES)
                n += 1
            acc = end_step(acc, ring, n - 1, 0, STAGES)
        if HAS_BIAS:
            j = n0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
            acc += gl.load(bias + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
        if MODE == MARK:
            _mark(acc, marks, m0, n0, M, N, cut)
        held, m_held, n_held = acc.to(out.dtype), m0, n0
        phase = phase ^ 1
    if gl.program_id(0) < tiles_m * tiles_n:
        for i in gl.static_range(PIECES):
            _end_piece(held, ends, m_held, n_held, phase ^ 1, i, ME, BOXES, MODE, KEEP, F, G)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "cut", "words"])
def _product_kernel(
    x, weight, gate, out, ups, bias, marks, state, whole, M, N, cut, words,
    COLUMNS: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """x weight^T + bias, which ends as MODE says in out [M, N]. A program owns every so manieth tile.

    HIDDEN does nothing but where the state says that all M rows take the dense path; with KEEP, 1 in
    `whole` says so, else 0, and the product goes to `ups`, too. MARK makes zeros of the state, of so many int64 words.
    """
    # All of a tile, where it is read first; else two, so that one is filled while the other one is copied.
    BOXES: gl.constexpr = COLUMNS // PIECE if MODE == HIDDEN else 2
    ring = make_ring(x, weight, COLUMNS, STAGES, False, False)
    out_ring = gl.allocate_shared_memory(out.dtype, [BOXES * CONSUMERS, ROWS, PIECE], out.layout)
    up_ring = out_ring
    if KEEP:
        up_ring = gl.allocate_shared_memory(out.dtype, [CONSUMERS, ROWS, PIECE], out.layout)
    read = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(read.index(i), count=1)
    tiles_m = gl.cdiv(M, ROWS * CONSUMERS)
    tiles_n = gl.cdiv(N, COLUMNS)
    if MODE == MARK:
        tiles_n = gl.cdiv(N, MARKED) * (MARKED // COLUMNS)  # all marks are written
    # A multiprocessor has no room for anything beside this: the next kernel starts where tiles have run out.
    let_next_start()
    if MODE == MARK:
        _clear(state, words)
    if MODE == HIDDEN:
        wait_for_previous()
        dense = gl.load(state + DENSE) == M
        tiles_m = gl.where(dense, tiles_m, 0)
        if KEEP:
            gl.store(whole, dense.to(gl.int32), mask=gl.program_id(0) == 0)
    source = (x, weight, ring, tiles_m, tiles_n)
    ends = (out_ring, up_ring, read, out, ups, cut)
    tiles = (gate, bias, marks, tiles_m, tiles_n, M, N)
    operands = (ends, ring, tiles)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (operands, 0, COLUMNS, KBLOCKS, EACH, STAGES, BOXES, MODE, KEEP, HAS_BIAS, F, G),
            ),
            (
                _multiply_tiles,
                (operands, 1, COLUMNS, KBLOCKS, EACH, STAGES, BOXES, MODE, KEEP, HAS_BIAS, F, G),
            ),
            (_copy_tiles, (source, COLUMNS, KBLOCKS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def leaves_room(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a third of the multiprocessors has nothing to do in the last round of whole tiles of `marked_product`."""
    columns, waiting = columns_of(len(x), len(weight), multiprocessors(x.device))
    return columns == 256 and waiting >= 1 / 3


def _stages(columns: int, mode: int, keeps: bool) -> int:
    """Stages of the ring, beside what is read and written."""
    boxes = (columns // PIECE.value if mode == HIDDEN else 2) + keeps
    return stages_of(columns, CONSUMERS.value * boxes * ROWS.value * PIECE.value * 2)


@functools.lru_cache(maxsize=256)
def least_active(cut: float, dtype: torch.dtype) -> float:
    """The largest fp32 number that, rounded to this type, is still <= cut."""
    low = torch.tensor(cut, dtype=torch.float64).to(dtype)
    if low.item() > cut:
        low = _next(low, -math.inf)
    high = _next(low, math.inf)
    middle = (low.double().item() + high.double().item()) / 2
    fp32 = torch.tensor(middle, dtype=torch.float32)
    if fp32.to(dtype).item() > cut:  # the tie rounds up
        fp32 = torch.nextafter(fp32, torch.tensor(-math.inf))
    return fp32.item()


def _next(t: torch.Tensor, towards: float) -> torch.Tensor:
    """The neighbour of a 16-bit number."""
    bits = int(t.view(torch.int16))
    up = towards > 0
    if t.item() == 0:
        bits = 1 if up else -0x8000 + 1
    else:
        bits += 1 if (t.item() > 0) == up else -1
    return torch.tensor(bits, dtype=torch.int16).view(t.dtype)


def applies(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether this kernel can run: Hopper, 16-bit operands, sizes the copy engine can address."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and all(map(addressable, (x, *weights)))
        and all(len(w) % 8 == 0 for w in weights)  # of what is written too
    )


def may_mark(x: torch.Tensor, gate: torch.Tensor, cut: float) -> bool:
    """Whether `marked_product` can run."""
    return applies(x, gate) and math.isfinite(cut)


def may_activate(f: Program, g: Program) -> bool:
    """Whether `hidden` can run these: pow begins with tl.full, which has no layout in Gluon."""
    return all(step.fn != "pow" for step in (*f, *g))


def _launch(
    mode,
    a,
    weight,
    gate,
    out,
    bias,
    marks,
    state,
    cut,
    f: Program = (),
    g: Program = (),
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    (M, K), N = a.shape, len(weight)
    programs = multiprocessors(a.device)
    columns, _ = columns_of(M, N, programs)
    # More than a tile has pieces: past the last feature are zeros.
    steps, each = unrolled(max(-(-K // DEPTH.value), columns // PIECE.value + 1))
    unused = out
    ups, whole = kept or (out, unused)

    args = (
        descriptor(a, ROWS.value, DEPTH.value), descriptor(weight, columns, DEPTH.value),
        *(descriptor(t, ROWS.value, PIECE.value) for t in (gate, out, ups)),
        unused if bias is None else bias,
        unused if marks is None else marks,
        state, whole, M, N, cut, len(state),
    )  # fmt: skip
    constants = {
        "COLUMNS": columns,
        "KBLOCKS": steps,
        "EACH": each,
        "STAGES": _stages(columns, mode.value, kept is not None),
        "MODE": mode.value,
        "KEEP": kept is not None,
        "HAS_BIAS": bias is not None,
        "F": encode(f),
        "G": encode(g),
    }
    early = {"launch_pdl": True} if mode == HIDDEN else {}
    launch_kernel(_product_kernel, (programs,), args, constants, num_warps=4, **early)


def marked_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: float,
    state: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x weight^T + bias [M, N], marks [M, words] of what of it is not <= cut). `state`, int64, becomes zeros.

    out: where the product goes, unless to new memory.
    """
    M, N = len(x), len(weight)
    if out is None:
        out = x.new_empty(M, N)
    marks = torch.empty(M, 8 * -(-N // MARKED.value), dtype=torch.int32, device=x.device)
    _launch(MARK, x, weight, out, out, bias, marks, state, least_active(cut, x.dtype))
    return out, marks


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
    _launch(HIDDEN, x, up, gate, out, bias, None, state, cut, f, g, kept)
