"""The gate projection of a ReLU feed-forward block on Hopper GPUs, by a warp-specialised persistent kernel in Gluon.

It is written twice: as numbers, for rows that turn out not to be sparse, and as a bit for each, all that
`relu_ffn_marked` reads of rows that are.

One warp copies operand tiles into a ring of shared-memory stages with the bulk copy engine; two warpgroups each
multiply 64 rows of a tile (`hopper_projection`). A tile's sums are rounded and held, half the registers, and go to
memory by pieces while the tensor cores are busy with the first steps of the next tile. Marks are made of sums at the
tile's end, where threads hold a token's neurons; of a TURNED tile, whose threads hold a neuron's tokens, they are made
of what pieces leave in shared memory.

Marks, [M, tiles of 256 neurons, 8] int32: bit b of word (tile, w) is neuron 256 tile + 32 w + b. BY_QUAD, as the four
threads that share a token hold its sums, so that marking moves no data, it is neuron
256 tile + 128 (w % 2) + 8 (b // 2) + 2 (w // 2) + b % 2.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .boxes import addressable
from .gluon_names import let_next_start
from .hopper_projection import (
    behind,
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
from .hopper_tiles import PIECE, ROWS, as_boxed, pieces_in, tile_for
from .launch import launch as launch_kernel
from .launch import multiprocessors

__all__ = ["Marks", "applies", "least_active", "leaves_room", "marked_product", "may_mark"]

# Neurons of a tile of marks, and of two of its words.
MARKED, WORDS = gl.constexpr(256), gl.constexpr(128)
# Pieces of a tile that a warpgroup has boxes for: one is filled while the other one is copied.
BOXED = gl.constexpr(2)


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
def _or(a, b):
    return a | b


@gluon.constexpr_function
def _quads(words):
    """Sums as their threads hold them, [64 tokens, lane of its quad, word, bit], for so many words."""
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
def _mark_sums(sums, marks, m, n0, M, N, least):
    """Write the marks, BY_QUAD, of a tile's sums, of tokens from m and neurons from n0 on."""
    COUNT: gl.constexpr = sums.shape[1] // WORDS
    HELD: gl.constexpr = _quads(COUNT)
    OF_WORDS: gl.constexpr = gl.SliceLayout(3, HELD)
    LANES: gl.constexpr = gl.SliceLayout(2, OF_WORDS)
    bit = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, HELD))))
    bit = (gl.full([32], 1, gl.int32, bit.type.layout) << bit)[None, None, None, :]
    lane = gl.arange(0, 4, gl.SliceLayout(0, LANES))
    n = n0 + WORDS * gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, OF_WORDS)))
    word = (2 * lane)[None, :, None] + (n // MARKED * 8 + n % MARKED // WORDS)[None, None, :]
    held = sums.reshape([ROWS, COUNT, 16, 4, 2]).permute((0, 3, 1, 2, 4))
    held = gl.convert_layout(held.reshape([ROWS, 4, COUNT, 32]), HELD)
    # NaN is active.
    found = gl.reduce(gl.where(held <= least, 0, bit), 3, _or)
    # Neurons past the last: zeros of the weight, but NaN where a token is not finite. N is a multiple of 8.
    left = gl.minimum(gl.maximum(N - n, 0) // 8, 16)
    there = gl.full([COUNT], 1, gl.int32, left.type.layout) << (2 * left)
    there = gl.where(left == 16, -1, there - 1)
    row = (m + gl.arange(0, ROWS, gl.SliceLayout(1, LANES))).to(gl.int64)
    at = (row * (gl.cdiv(N, MARKED) * 8))[:, None, None] + word
    gl.store(marks + at, found & there[None, None, :], mask=(row < M)[:, None, None])


@gluon.jit
def _mark_box(box, marks, m, n, M, N, least):
    """Write the marks of what is in a box, of tokens from m and neurons from n on."""
    TOKENS: gl.constexpr = box.shape[0]
    NEURONS: gl.constexpr = box.shape[1]
    EACH: gl.constexpr = TOKENS * NEURONS // 128  # neurons of a thread, of one word
    HELD: gl.constexpr = gl.BlockedLayout(
        [1, EACH], [32 * EACH // NEURONS, NEURONS // EACH], [4, 1], [1, 0]
    )
    COUNT: gl.constexpr = NEURONS // 32
    bit = gl.arange(0, NEURONS, gl.SliceLayout(0, HELD)) % 32
    bit = gl.full([NEURONS], 1, gl.int32, bit.type.layout) << bit
    # NaN is active.
    found = gl.where(box.load(HELD).to(gl.float32) <= least, 0, bit[None, :])
    found = gl.reduce(found.reshape([TOKENS, COUNT, 32]), 2, _or)
    OF_WORDS: gl.constexpr = found.type.layout
    # Neurons past the last: zeros of the weight, but NaN where a token is not finite.
    first = n + 32 * gl.arange(0, COUNT, gl.SliceLayout(0, OF_WORDS))
    left = gl.minimum(gl.maximum(N - first, 0), 32)
    there = gl.where(left == 32, -1, (gl.full([COUNT], 1, gl.int32, left.type.layout) << left) - 1)
    row = (m + gl.arange(0, TOKENS, gl.SliceLayout(1, OF_WORDS))).to(gl.int64)
    at = (row * (gl.cdiv(N, MARKED) * 8))[:, None] + (first // 32)[None, :]
    gl.store(marks + at, found & there[None, :], mask=(row < M)[:, None])


@gluon.jit
def _end_piece(
    piece,
    ends,
    m0,
    n0,
    PLACE: gl.constexpr,
    ME: gl.constexpr,
    COLUMNS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """A piece of consumer ME's part of the tile at (m0, n0) goes to its place there."""
    boxes, outs, _marks, _M, _N, _least = ends
    tma.store_wait(behind(COLUMNS, PLACE, BOXED.value))
    box = box_of(boxes, PLACE, ME, COLUMNS, BOXED)
    put(as_boxed(piece), box, outs, box_at(m0, n0, PLACE, TURNED), TURNED)


@gluon.jit
def _mark_piece(
    ends, m0, n0, PLACE: gl.constexpr, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr
):
    """The marks of a piece that has gone to memory, whose box has not been written to again."""
    boxes, _outs, marks, M, N, least = ends
    m, n = box_at(m0, n0, PLACE, TURNED)
    _mark_box(box_of(boxes, PLACE, ME, COLUMNS, BOXED), marks, m, n, M, N, least)


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Consumer ME: 64 rows of every tile of this program. A tile's pieces go to memory while the tensor cores are busy
    with the first steps of the next one."""
    ends, ring, bias, tiles_m, tiles_n = operands
    _boxes, outs, marks, M, N, least = ends
    dtype: gl.constexpr = outs[0].dtype
    COUNT: gl.constexpr = pieces_in(COLUMNS)
    # If TURNED, a piece every second step, if there are as many: its marks follow within the other one.
    APART: gl.constexpr = 2 if TURNED and EACH >= 2 * COUNT else 1
    n = 0  # stages consumed
    held = nothing(dtype, COLUMNS)
    m_held, n_held = 0, 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m0, n0 = place_of(t, tiles_m, tiles_n, ME, COLUMNS, TURNED)
        accs = nothing(gl.float32, COLUMNS)
        found = pieces_of(held)
        for i in gl.static_range(EACH):
            accs = begin_step(accs, ring, n, i > 0, ME, STAGES, False, False)
            if i < APART * COUNT and t > gl.program_id(0):
                if i % APART == 0:
                    _end_piece(
                        found[i // APART], ends, m_held, n_held, i // APART, ME, COLUMNS, TURNED
                    )
                if TURNED and i % APART == APART - 1:
                    _mark_piece(ends, m_held, n_held, i // APART, ME, COLUMNS, TURNED)
            if i > 0:
                accs = end_step(accs, ring, n - 1, 1, STAGES)
            n += 1
        accs = end_step(accs, ring, n - 1, 0, STAGES)
        for _k in range(EACH, KBLOCKS, EACH):
            accs, n = multiply_steps(accs, ring, n, ME, EACH, STAGES)
        accs = biased(accs, bias, n0, N, TURNED, HAS_BIAS)
        if not TURNED:
            _mark_sums(accs[0], marks, m0, n0, M, N, least)
        held, m_held, n_held = rounded(accs, dtype), m0, n0
    if gl.program_id(0) < tiles_m * tiles_n:
        found = pieces_of(held)
        for i in gl.static_range(COUNT):
            _end_piece(found[i], ends, m_held, n_held, i, ME, COLUMNS, TURNED)
            if TURNED:
                _mark_piece(ends, m_held, n_held, i, ME, COLUMNS, TURNED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "least", "words"])
def _product_kernel(
    a, b0, b1, b2, out, out_small, bias, marks, state, M, N, least, words,
    COLUMNS: gl.constexpr, TURNED: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """out [M, N] = x weight^T + bias, and its marks; a program owns every so manieth tile. Zeros of the state, of so
    many int64 words.

    a, b: x and the weight, in boxes of each part of a tile's columns; or the weight and x, if TURNED.
    """
    b = (b0, b1, b2)
    ring = make_ring(a, b, COLUMNS, STAGES, False, False)
    outs = (out, out_small)
    boxes = make_boxes(outs, COLUMNS, BOXED)
    marked = gl.cdiv(N, MARKED) * MARKED  # neurons past the last have marks
    tiles_m, tiles_n = tiles_of(M, marked, COLUMNS, TURNED)
    # A multiprocessor has no room for anything beside this: the next kernel starts where tiles have run out.
    let_next_start()
    _clear(state, words)
    source = (a, b, ring, tiles_m, tiles_n)
    operands = ((boxes, outs, marks, M, N, least), ring, bias, tiles_m, tiles_n)
    gl.warp_specialize(
        [
            (_multiply_tiles, (operands, 0, COLUMNS, TURNED, KBLOCKS, EACH, STAGES, HAS_BIAS)),
            (_multiply_tiles, (operands, 1, COLUMNS, TURNED, KBLOCKS, EACH, STAGES, HAS_BIAS)),
            (copy_tiles, (source, COLUMNS, TURNED, KBLOCKS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def stages(columns: int) -> int:
    """Stages of the ring, beside what is written."""
    return stages_beside(columns, BOXED.value * PIECE.value + columns % PIECE.value)


def leaves_room(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `marked_product` has tiles of 256 columns here, and a third of the multiprocessors nothing to do in their
    last round."""
    tile = tile_for(len(x), len(weight), multiprocessors(x.device), stages)
    return tile.columns == 256 and tile.waiting >= 1 / 3


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


class Marks(NamedTuple):
    """words [M, a whole number of tiles of 8], and in which order they are."""

    words: torch.Tensor
    by_quad: bool


def marked_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: float,
    state: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Marks]:
    """(x weight^T + bias [M, N], marks of what of it is not <= cut). `state`, int64, becomes zeros.

    out: where the product goes, unless to new memory.
    """
    M, N = len(x), len(weight)
    if out is None:
        out = x.new_empty(M, N)
    marks = torch.empty(M, 8 * -(-N // MARKED.value), dtype=torch.int32, device=x.device)
    of = projection(x, weight, stages)
    args = (
        *of.operands, *of.boxes(out), out if bias is None else bias, marks, state,
        M, N, least_active(cut, x.dtype), len(state),
    )  # fmt: skip
    constants = {**of.constants, "HAS_BIAS": bias is not None}
    launch_kernel(_product_kernel, (of.programs,), args, constants, num_warps=4)
    return out, Marks(marks, not of.constants["TURNED"])
