"""The gate projection of a ReLU feed-forward block on Hopper GPUs, by a warp-specialised persistent kernel in Gluon.

It is written twice: as numbers, for rows that turn out not to be sparse, and as a bit for each, all that
`relu_ffn_marked` reads of rows that are.

One warp copies operand tiles into a ring of shared-memory stages with the bulk copy engine; two warpgroups each
multiply 64 rows of a tile (`hopper_projection`). A tile's sums are rounded and held, half the registers, and go to
memory by pieces while the tensor cores are busy with the first steps of the next tile. Marks are made then, too: of the
sums, where threads hold a token's neurons; of a TURNED tile, whose threads hold a neuron's tokens, of what pieces leave
in shared memory.

Marks, [M, tiles of 256 neurons, 8] int32: bit b of word (tile, w) is neuron 256 tile + 32 w + b. BY_QUAD, as the four
threads that share a token hold its sums, so that marking moves no data, it is neuron
256 tile + 128 (w % 2) + 8 (b // 2) + 2 (w // 2) + b % 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .arch import capability
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
from .hopper_tiles import ROWS, Tiles, as_boxed, leaves_room, pieces, pieces_in, tile_for
from .hopper_wide import Widened
from .launch import launch as launch_kernel
from .launch import multiprocessors
from .relu_ffn_packing import twice

__all__ = ["Marks", "applies", "has_room", "marked_product", "may_mark"]

# Neurons of a tile of marks, and of two of its words.
MARKED, WORDS = gl.constexpr(256), gl.constexpr(128)
# Pieces of a tile, of either size, that a warpgroup has boxes for. A second one was a stage of the ring less.
BOXED = gl.constexpr(1)


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
def _greater(dtype):
    """Of two numbers of a register that are greater than those of another one, or NaN, all bits; a second result for
    the other number, 0."""
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return f"set.gtu.u32.{kind} $0, $2, $3; mov.b32 $1, 0;"


@gluon.constexpr_function
def _by_halves(shape):
    return [*shape[:-1], 2, 16]


@gluon.constexpr_function
def _along(layout, axes):
    """The layout of a vector along the last of so many axes."""
    for _ in range(axes - 1):
        layout = gl.SliceLayout(0, layout)
    return layout


@gluon.jit
def _last(LENGTH: gl.constexpr, LAYOUT: gl.constexpr, AXES: gl.constexpr):
    """0 to LENGTH - 1 along the last of so many axes."""
    v = gl.arange(0, LENGTH, _along(LAYOUT, AXES))
    for _ in gl.static_range(AXES - 1):
        v = gl.expand_dims(v, 0)
    return v


@gluon.jit
def _marks_of(held, least):
    """Words [...] of marks of 16-bit numbers [..., 32], which threads hold by pairs. least: twice the largest number
    that is not active, in an int32."""
    AXES: gl.constexpr = len(held.shape) + 1
    compare: gl.constexpr = _greater(held.dtype)
    found = gl.inline_asm_elementwise(
        compare, "=r,=r,r,r,r", [held, least], dtype=gl.int32, is_pure=True, pack=2
    )
    # The first numbers of eight pairs have the lower half of a register, the second ones the upper half.
    found = found.reshape(_by_halves(found.shape))
    HALVED: gl.constexpr = found.type.layout
    pair = _last(16, HALVED, AXES) // 2
    one = gl.full(pair.shape, 1, gl.int32, pair.type.layout)
    found = gl.reduce(found & ((one << (2 * pair)) | (one << (2 * pair + 17))), AXES - 1, _or)
    HALVES: gl.constexpr = found.type.layout
    half = _last(2, HALVES, AXES - 1)
    found = (found & 0xFFFF) | ((found >> 16) & 0xFFFF)
    return gl.reduce(found << (16 * half), AXES - 2, _or)


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
    """Write the marks, BY_QUAD, of a tile's rounded sums, of tokens from m and neurons from n0 on."""
    COUNT: gl.constexpr = sums.shape[1] // WORDS
    HELD: gl.constexpr = _quads(COUNT)
    OF_WORDS: gl.constexpr = gl.SliceLayout(3, HELD)
    LANES: gl.constexpr = gl.SliceLayout(2, OF_WORDS)
    lane = gl.arange(0, 4, gl.SliceLayout(0, LANES))
    n = n0 + WORDS * gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, OF_WORDS)))
    word = (2 * lane)[None, :, None] + (n // MARKED * 8 + n % MARKED // WORDS)[None, None, :]
    held = sums.reshape([ROWS, COUNT, 16, 4, 2]).permute((0, 3, 1, 2, 4))
    held = gl.convert_layout(held.reshape([ROWS, 4, COUNT, 32]), HELD)
    found = gl.convert_layout(_marks_of(held, least), OF_WORDS)
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
    found = _marks_of(box.load(HELD).reshape([TOKENS, COUNT, 32]), least)
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
    put(as_boxed(piece), box, outs, box_at(m0, n0, PLACE, COLUMNS, TURNED), TURNED)


@gluon.jit
def _mark_piece(
    held, ends, m0, n0, PLACE: gl.constexpr, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr
):  # fmt: skip
    """The marks of a piece that has gone to memory, whose box has not been written to again; with every second one that
    is not TURNED, those of both."""
    boxes, _outs, marks, M, N, least = ends
    if TURNED:
        m, n = box_at(m0, n0, PLACE, COLUMNS, TURNED)
        _mark_box(box_of(boxes, PLACE, ME, COLUMNS, BOXED), marks, m, n, M, N, least)
    elif PLACE % 2 == 1:
        both = pieces(held[0], COLUMNS // WORDS)[PLACE // 2]
        _mark_sums(both, marks, m0, n0 + PLACE // 2 * WORDS, M, N, least)


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Consumer ME: 64 rows of every tile of this program. A tile's pieces go to memory while the tensor cores are busy
    with the first steps of the next one."""
    ends, ring, bias, tiles_m, tiles_n = operands
    _boxes, outs, _marks, _M, N, _least = ends
    dtype: gl.constexpr = outs[0].dtype
    COUNT: gl.constexpr = pieces_in(COLUMNS)
    # A piece every second step, if there are as many: its marks follow within the other one.
    APART: gl.constexpr = 2 if EACH >= 2 * COUNT else 1
    n = 0  # stages consumed
    held = nothing(dtype, COLUMNS)
    m_held, n_held = 0, 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m0, n0 = place_of(t, tiles_m, tiles_n, ME, COLUMNS, TURNED)
        accs = nothing(gl.float32, COLUMNS)
        found = pieces_of(held, COLUMNS)
        for i in gl.static_range(EACH):
            accs = begin_step(accs, ring, n, i > 0, ME, COLUMNS, STAGES, False, False)
            if i < APART * COUNT and t > gl.program_id(0):
                if i % APART == 0:
                    _end_piece(
                        found[i // APART], ends, m_held, n_held, i // APART, ME, COLUMNS, TURNED
                    )
                if i % APART == APART - 1:
                    _mark_piece(held, ends, m_held, n_held, i // APART, ME, COLUMNS, TURNED)
            if i > 0:
                accs = end_step(accs, ring, n - 1, 1, STAGES)
            n += 1
        accs = end_step(accs, ring, n - 1, 0, STAGES)
        for _k in range(EACH, KBLOCKS, EACH):
            accs, n = multiply_steps(accs, ring, n, ME, EACH, COLUMNS, STAGES)
        accs = biased(accs, bias, n0, N, TURNED, HAS_BIAS)
        held, m_held, n_held = rounded(accs, dtype), m0, n0
    if gl.program_id(0) < tiles_m * tiles_n:
        found = pieces_of(held, COLUMNS)
        for i in gl.static_range(COUNT):
            _end_piece(found[i], ends, m_held, n_held, i, ME, COLUMNS, TURNED)
            _mark_piece(held, ends, m_held, n_held, i, ME, COLUMNS, TURNED)
    tma.store_wait(0)


@Widened
@gluon.jit(do_not_specialize=["M", "N", "least", "words"])
def _product_kernel(
    a, b0, b1, b2, b3, out, out_small, bias, marks, state, M, N, least, words,
    COLUMNS: gl.constexpr, TURNED: gl.constexpr, KBLOCKS: gl.constexpr, EACH: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """out [M, N] = x weight^T + bias, and its marks; a program owns every so manieth tile. Zeros of the state, of so
    many int64 words.

    a, b: x and the weight, in boxes of each part of a tile's columns; or the weight and x, if TURNED.
    """
    b = (b0, b1, b2, b3)
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
    return stages_beside(columns, BOXED.value)


TILES = Tiles(
    stages,
    upright=((256, 1.0), (128, 0.535)),
    turned=(
        (240, 0.985), (224, 0.905), (208, 0.84), (192, 0.775), (176, 0.73), (160, 0.66), (144, 0.6),
    ),
)  # fmt: skip
# What room in the last round is worth, in rounds.
ROOM = 0.25


def has_room(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `marked_product`, asked for room, has some beside its last round."""
    return leaves_room(tile_for(len(x), len(weight), multiprocessors(x.device), TILES, ROOM))


def applies(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether this kernel can run: Hopper, 16-bit operands, sizes the copy engine can address."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16)
        and capability(x.device)[0] == 9
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
    room: bool = False,
) -> tuple[torch.Tensor, Marks]:
    """(x weight^T + bias [M, N], marks of what of it is not <= cut). `state`, int64, becomes zeros.

    room: something else is to be made beside the last tiles.
    """
    M, N = len(x), len(weight)
    out = x.new_empty(M, N)
    marks = torch.empty(M, 8 * -(-N // MARKED.value), dtype=torch.int32, device=x.device)
    of = projection(x, weight, TILES, ROOM if room else 0)
    args = (
        *of.operands, *of.boxes(out), out if bias is None else bias, marks, state,
        M, N, twice(cut, x.dtype), len(state),
    )  # fmt: skip
    constants = {**of.constants, "HAS_BIAS": bias is not None}
    launch_kernel(_product_kernel, (of.programs,), args, constants, num_warps=4)
    return out, Marks(marks, not of.constants["TURNED"])
