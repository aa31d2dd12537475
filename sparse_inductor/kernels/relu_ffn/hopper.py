"""The gate projection of a ReLU feed-forward block on Hopper GPUs, by a warp-specialised persistent kernel in Gluon.

The kernel writes the projection and a bitmask of its active elements. `relu_ffn.packing` finds the active neurons in
the bitmask alone; the whole projection is read only for rows that turn out not to be sparse.

One warp copies operand tiles into a ring of shared-memory stages by TMA; two warpgroups each compute 64 rows of a tile
of 128 tokens x 256 or 128 neurons. The weight has unit stride along the features (K-major) or along the neurons
(N-major). A finished tile is rounded to 16 bits, which halves its registers. The tile and its bitmask are written in
pieces of 64 columns while the tensor cores compute the first steps of the next tile.

The bitmask, [M, tiles of 256 neurons, 8] int32, follows the accumulator's layout over the four threads that share a
token, so that computing it moves no data between threads: bit b of word (tile, w) is neuron
256 tile + 128 (w % 2) + 8 (b // 2) + 2 (w // 2) + b % 2.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.arch import capability
from ..common.gluon_names import let_next_start, tma_load, tma_store
from ..common.launch import launch as launch_kernel
from ..common.launch import sm_count
from ..common.tile_order import tile_at
from ..common.tma import tma_addressable

# Rows per warpgroup, the M of a wgmma. 64 x 256 fp32 accumulators take 128 registers a thread.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
# Features per stage: 128 bytes of 16-bit elements, one swizzle row of shared memory.
DEPTH = gl.constexpr(64)
# A tile is written in pieces of 64 columns through one staging buffer of 8 KiB per warpgroup: two would cost a stage.
PIECE = gl.constexpr(64)
# Neurons per tile of the bitmask, and per group of four words, one from each of the four threads.
BITMASK_TILE, WORDS = gl.constexpr(256), gl.constexpr(128)
# Shared memory per SM for the ring and the staging buffers, in bytes.
SHARED = 225 << 10
# (columns of a tile, its time relative to a tile of 256 columns), H200, K = 2 048.
COSTS = ((256, 1.0), (128, 0.535))
# Maximum features of an N-major weight for which this kernel is used. cuBLAS multiplies 11 % faster, but packing must
# then read the projection (H200, 4 096 tokens: at 768 features a block takes 340 us, with cuBLAS 390; at 2 304 features
# 629 and 616).
N_MAJOR_FEATURES = 2048
# Benefit of idle SMs in the last wave, in waves (see `tile_for`).
ROOM = 0.25


@gluon.constexpr_function
def _accumulator(columns):
    """Return the layout of a warpgroup's accumulators [64, columns]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def _pieces(v, COUNT: gl.constexpr):
    """Cut a tile into COUNT pieces of its columns, from left to right. No data moves."""
    if COUNT == 1:
        return (v,)
    else:
        n: gl.constexpr = v.shape[1] // 2
        left, right = v.reshape([v.shape[0], 2, n]).permute((0, 2, 1)).split()
        return _pieces(left, COUNT // 2) + _pieces(right, COUNT // 2)


@gluon.jit
def _make_ring(a, b, STAGES: gl.constexpr):
    """Return (stages of TMA tiles of a, stages of b, mbarriers of full stages, mbarriers of empty stages)."""
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * CONSUMERS, ROWS, DEPTH], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return a_ring, b_ring, full, empty


@gluon.jit
def _place_of(t, tiles_m, tiles_n, ME: gl.constexpr, COLUMNS: gl.constexpr):
    """Return (first token, first neuron) of consumer ME's part of a tile."""
    pm, pn = tile_at(t, tiles_m, tiles_n)
    return (pm * CONSUMERS + ME) * ROWS, pn * COLUMNS


@gluon.jit
def _copy_tiles(
    source, COLUMNS: gl.constexpr, KBLOCKS: gl.constexpr, STAGES: gl.constexpr, K_MAJOR: gl.constexpr
):  # fmt: skip
    """The producer warp: copies the operands of this program's tiles into the ring, in order."""
    a, b, ring, tiles_m, tiles_n = source
    a_ring, b_ring, full, empty = ring
    BYTES: gl.constexpr = (ROWS * CONSUMERS + COLUMNS) * DEPTH * 2
    n = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m0, n0 = _place_of(t, tiles_m, tiles_n, 0, COLUMNS)
        for step in range(KBLOCKS):
            stage = n % STAGES
            filled = full.index(stage)
            k = step * DEPTH
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(filled, BYTES)
            for c in gl.static_range(CONSUMERS):
                tma_load(a, [m0 + c * ROWS, k], filled, a_ring.index(stage * CONSUMERS + c))
            tma_load(b, [n0, k] if K_MAJOR else [k, n0], filled, b_ring.index(stage))
            n += 1


@gluon.jit
def _begin_step(acc, ring, n, MORE: gl.constexpr, ME: gl.constexpr, STAGES: gl.constexpr):
    """Warpgroup ME: start the product of the n-th stage, added to acc if MORE; returns the pending accumulator."""
    a_ring, b_ring, full, _empty = ring
    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    a = a_ring.index(stage * CONSUMERS + ME)
    b = b_ring.index(stage)
    if b.shape[0] != DEPTH:  # a tile of a K-major weight
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=MORE, is_async=True)


@gluon.jit
def _end_step(acc, ring, n, LEFT: gl.constexpr, STAGES: gl.constexpr):
    """Wait until at most LEFT products are pending and release the n-th stage."""
    acc = warpgroup_mma_wait(LEFT, deps=(acc,))
    mbarrier.arrive(ring[3].index(n % STAGES))
    return acc


@gluon.jit
def _clear(zeros, words):
    """Write `words` zeros; each program writes a share."""
    PIECE: gl.constexpr = 512  # 16 bytes a thread
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    zero = gl.zeros([PIECE], gl.int32, layout)
    for first in range(gl.program_id(0) * PIECE, words, gl.num_programs(0) * PIECE):
        at = first + gl.arange(0, PIECE, layout)
        gl.store(zeros + at, zero, mask=at < words)


@gluon.jit
def _or(a, b):
    return a | b


@gluon.constexpr_function
def _greater(dtype):
    """Return PTX that compares the two 16-bit numbers of one register with those of another: all bits of a half are
    set if its number is greater or NaN. The second result, which `pack=2` requires, is 0."""
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return f"set.gtu.u32.{kind} $0, $2, $3; mov.b32 $1, 0;"


@gluon.constexpr_function
def _by_halves(shape):
    return [*shape[:-1], 2, 16]


@gluon.constexpr_function
def _along(layout, axes):
    """Return the layout of a vector along the last of `axes` axes."""
    for _ in range(axes - 1):
        layout = gl.SliceLayout(0, layout)
    return layout


@gluon.jit
def _last(LENGTH: gl.constexpr, LAYOUT: gl.constexpr, AXES: gl.constexpr):
    """Return arange(LENGTH) along the last of AXES axes."""
    v = gl.arange(0, LENGTH, _along(LAYOUT, AXES))
    for _ in gl.static_range(AXES - 1):
        v = gl.expand_dims(v, 0)
    return v


@gluon.jit
def _bitmask_of(held, least):
    """Return the bitmask words [...] of 16-bit numbers [..., 32], which threads hold as pairs in registers. least: the
    largest inactive numbers, in the same dtype, or a single one in both halves of an int32."""
    AXES: gl.constexpr = len(held.shape) + 1
    compare: gl.constexpr = _greater(held.dtype)
    REGISTERS: gl.constexpr = "=r,=r,r,r,r" if least.dtype == gl.int32 else "=r,=r,r,r"
    found = gl.inline_asm_elementwise(
        compare, REGISTERS, [held, least], dtype=gl.int32, is_pure=True, pack=2
    )
    # The first number of each pair is in the lower half of its register, the second one in the upper half.
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
    """Return the layout of the accumulators viewed as [64 tokens, lane of the token's quad, word, bit]."""
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
def _store_bitmask(sums, bitmask, m, n0, M, N, least):
    """Write the bitmask of a tile's rounded results, for tokens from m and neurons from n0 on. least: the largest
    inactive number in both halves of an int32, or a pointer to one number per neuron [N]."""
    COUNT: gl.constexpr = sums.shape[1] // WORDS
    HELD: gl.constexpr = _quads(COUNT)
    OF_WORDS: gl.constexpr = gl.SliceLayout(3, HELD)
    LANES: gl.constexpr = gl.SliceLayout(2, OF_WORDS)
    lane = gl.arange(0, 4, gl.SliceLayout(0, LANES))
    n = n0 + WORDS * gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, OF_WORDS)))
    word = (2 * lane)[None, :, None] + (n // BITMASK_TILE * 8 + n % BITMASK_TILE // WORDS)[
        None, None, :
    ]
    held = sums.reshape([ROWS, COUNT, 16, 4, 2]).permute((0, 3, 1, 2, 4))
    held = gl.convert_layout(held.reshape([ROWS, 4, COUNT, 32]), HELD)
    if least.dtype.is_ptr():
        OF_BITS: gl.constexpr = gl.SliceLayout(0, HELD)
        bit = _last(32, OF_BITS, 3)
        of_lane = 2 * gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, OF_BITS)))[:, None, None]
        of_word = WORDS * gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, OF_BITS)))
        of_bits = n0 + of_lane + of_word[None, :, None] + 8 * (bit // 2) + bit % 2
        least = gl.load(least + of_bits, mask=of_bits < N, other=0.0)[None, :, :, :]
    found = gl.convert_layout(_bitmask_of(held, least), OF_WORDS)
    # Padding neurons past N have zero weights, but yield NaN for a token that is not finite. N is a multiple of 8.
    left = gl.minimum(gl.maximum(N - n, 0) // 8, 16)
    there = gl.full([COUNT], 1, gl.int32, left.type.layout) << (2 * left)
    there = gl.where(left == 16, -1, there - 1)
    row = (m + gl.arange(0, ROWS, gl.SliceLayout(1, LANES))).to(gl.int64)
    at = (row * (gl.cdiv(N, BITMASK_TILE) * 8))[:, None, None] + word
    gl.store(bitmask + at, found & there[None, None, :], mask=(row < M)[:, None, None])


@gluon.jit
def _end_piece(piece, ends, m0, n0, PLACE: gl.constexpr, ME: gl.constexpr):
    """Store a piece of consumer ME's part of the tile at (m0, n0) by TMA, through the warpgroup's staging buffer."""
    staging, out, _bitmask, _M, _N, _least = ends
    tma.store_wait(0)
    tile_out = staging.index(ME)
    tile_out.store(gl.convert_layout(piece, _accumulator(PIECE)))
    fence_async_shared()
    tma_store(out, [m0, n0 + PLACE * PIECE], tile_out)


@gluon.jit
def _mark_pieces(held, ends, m0, n0, PLACE: gl.constexpr, COLUMNS: gl.constexpr):
    """After every second piece, write the bitmask of the last two."""
    _staging, _out, bitmask, M, N, least = ends
    if PLACE % 2 == 1:
        both = _pieces(held, COLUMNS // WORDS)[PLACE // 2]
        _store_bitmask(both, bitmask, m0, n0 + PLACE // 2 * WORDS, M, N, least)


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, COLUMNS: gl.constexpr, KBLOCKS: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Consumer ME: computes 64 rows of every tile of this program. A tile's pieces are written while the tensor cores
    compute the first steps of the next one."""
    ends, ring, bias, tiles_m, tiles_n = operands
    _staging, out, _bitmask, _M, N, _least = ends
    dtype: gl.constexpr = out.dtype
    SUMS: gl.constexpr = _accumulator(COLUMNS)
    COUNT: gl.constexpr = COLUMNS // PIECE
    # One piece every second step if there are enough steps; bitmasks are written in the steps between.
    APART: gl.constexpr = 2 if KBLOCKS >= 2 * COUNT else 1
    BESIDE: gl.constexpr = APART * COUNT
    n = 0  # stages consumed
    held = gl.zeros([ROWS, COLUMNS], dtype, SUMS)
    m_held, n_held = 0, 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m0, n0 = _place_of(t, tiles_m, tiles_n, ME, COLUMNS)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        found = _pieces(held, COUNT)
        for i in gl.static_range(BESIDE):
            acc = _begin_step(acc, ring, n, i > 0, ME, STAGES)
            if t > gl.program_id(0):
                if i % APART == 0:
                    _end_piece(found[i // APART], ends, m_held, n_held, i // APART, ME)
                if i % APART == APART - 1:
                    _mark_pieces(held, ends, m_held, n_held, i // APART, COLUMNS)
            if i > 0:
                acc = _end_step(acc, ring, n - 1, 1, STAGES)
            n += 1
        # The products of one step are pending between iterations, so nothing else may access the accumulator there.
        for _k in range(BESIDE, KBLOCKS):
            acc = _begin_step(acc, ring, n, True, ME, STAGES)
            acc = _end_step(acc, ring, n - 1, 1, STAGES)
            n += 1
        acc = _end_step(acc, ring, n - 1, 0, STAGES)
        if HAS_BIAS:
            at = n0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))
            acc += gl.load(bias + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
        held, m_held, n_held = acc.to(dtype), m0, n0
    if gl.program_id(0) < tiles_m * tiles_n:
        found = _pieces(held, COUNT)
        for i in gl.static_range(COUNT):
            _end_piece(found[i], ends, m_held, n_held, i, ME)
            _mark_pieces(held, ends, m_held, n_held, i, COLUMNS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "words"])
def _product_kernel(
    a, b, out, bias, bitmask, state, M, N, least, words,
    COLUMNS: gl.constexpr, KBLOCKS: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Persistent kernel: out [M, N] = x @ weight^T + bias and its bitmask; `words` int32 of `state` become zeros.

    a, b and out are TMA descriptors. a: x with tiles of ROWS x DEPTH. b: the weight with tiles of COLUMNS x DEPTH if it
    is K-major, else its transpose with tiles of DEPTH x COLUMNS. out: tiles of PIECE x PIECE. least: see
    `_store_bitmask`.
    """
    ring = _make_ring(a, b, STAGES)
    staging = gl.allocate_shared_memory(out.dtype, [CONSUMERS, PIECE, PIECE], out.layout)
    covered = gl.cdiv(N, BITMASK_TILE) * BITMASK_TILE  # padding neurons have bits, too
    tiles_m, tiles_n = gl.cdiv(M, ROWS * CONSUMERS), gl.cdiv(covered, COLUMNS)
    # This program fills its SM, so the next kernel starts only on SMs that have no tiles left.
    let_next_start()
    _clear(state, words)
    source = (a, b, ring, tiles_m, tiles_n)
    operands = ((staging, out, bitmask, M, N, least), ring, bias, tiles_m, tiles_n)
    gl.warp_specialize(
        [
            (_multiply_tiles, (operands, 0, COLUMNS, KBLOCKS, STAGES, HAS_BIAS)),
            (_multiply_tiles, (operands, 1, COLUMNS, KBLOCKS, STAGES, HAS_BIAS)),
            (_copy_tiles, (source, COLUMNS, KBLOCKS, STAGES, K_MAJOR)),
        ],
        [4, 1],
        [240, 24],
    )


def stages(columns: int) -> int:
    """Return the number of ring stages that fit an SM in addition to the staging buffers."""
    rows = ROWS.value * CONSUMERS.value
    beside = rows * PIECE.value * 2
    return (SHARED - beside) // ((rows + columns) * DEPTH.value * 2)


@functools.lru_cache(maxsize=256)
def tile_for(M: int, N: int, programs: int, room: float = 0) -> int:
    """Return the tile width in columns with which `programs` programs compute a product [M, N] in the least time.

    room: the benefit, in waves of tiles of 256 columns, of leaving a third of the SMs idle in the last wave, so that
    another kernel can run on them.
    """
    found = []
    for columns, cost in COSTS:
        share = -(-M // (ROWS.value * CONSUMERS.value)) * -(-N // columns) / programs
        waves = math.ceil(share)
        leaves = columns == 256 and (waves - share) * cost >= 1 / 3
        found.append((waves * cost - room * leaves, columns))
    return min(found)[1]


@functools.lru_cache(maxsize=256)
def _constants(M: int, K: int, N: int, programs: int, room: float) -> dict[str, int]:
    columns = tile_for(M, N, programs, room)
    # At least as many steps as a tile has pieces; steps past the last feature multiply zeros.
    steps = max(-(-K // DEPTH.value), columns // PIECE.value)
    return {"COLUMNS": columns, "KBLOCKS": steps, "STAGES": stages(columns)}


@functools.cache
def layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Return the layout of a TMA tile in shared memory."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def _described(t: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a TMA descriptor of `t` with tiles of rows x columns."""
    return TensorDescriptor.from_tensor(t, [rows, columns], layout(t.dtype, rows, columns))


def _is_k_major(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K] has unit stride along K rather than N."""
    return weight.stride(1) == 1


def _stored(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight or its transpose, whichever has unit stride along its rows."""
    return weight if _is_k_major(weight) else weight.t()


def applies(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether this kernel can run: Hopper, 16-bit operands, sizes that TMA can address."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16)
        and capability(x.device)[0] == 9
        and all(map(tma_addressable, (x, *map(_stored, weights))))
        and all(len(w) % 8 == 0 for w in weights)  # TMA also addresses the result's rows
    )


def may_emit_bitmask(
    x: torch.Tensor, gate: torch.Tensor, threshold: float, thresholds: torch.Tensor | None = None
) -> bool:
    """Whether `product_with_bitmask` can run and is worthwhile."""
    worth = _is_k_major(gate) or gate.shape[1] <= N_MAJOR_FEATURES
    return worth and applies(x, gate) and (thresholds is not None or math.isfinite(threshold))


@functools.lru_cache(maxsize=256)
def twice(threshold: float, dtype: torch.dtype) -> int:
    """Return the largest number <= threshold of a 16-bit dtype, in both halves of an int32."""
    t = torch.tensor(threshold, dtype=torch.float64).to(dtype)
    bits = int(t.view(torch.int16)) & 0xFFFF
    if t.item() > threshold:
        bits = 0x8001 if t == 0 else bits - 1 if t > 0 else bits + 1
    return ((bits << 16 | bits) ^ 0x80000000) - 0x80000000


def words(N: int) -> int:
    """Return the number of words per row of the bitmask."""
    return 8 * -(-N // BITMASK_TILE.value)


def product_with_bitmask(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    threshold: float,
    state: torch.Tensor,
    room: bool = False,
    thresholds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x @ weight^T + bias [M, N], bitmask of the elements that are not <= threshold). Fills `state`, int32,
    with zeros.

    weight: [N, K], unit stride along either. room: another kernel can run at the same time as the last tiles.
    thresholds: one per neuron [N], contiguous, in the dtype of x, instead of `threshold`.
    """
    M, N = len(x), len(weight)
    out = x.new_empty(M, N)
    bitmask = torch.empty(M, words(N), dtype=torch.int32, device=x.device)
    programs = sm_count(x.device)
    constants = _constants(*x.shape, N, programs, ROOM if room else 0)
    k_major = _is_k_major(weight)
    tile = (constants["COLUMNS"], DEPTH.value)[:: 1 if k_major else -1]
    args = (
        _described(x, ROWS.value, DEPTH.value), _described(_stored(weight), *tile),
        _described(out, PIECE.value, PIECE.value), out if bias is None else bias, bitmask, state,
        M, N, twice(threshold, x.dtype) if thresholds is None else thresholds, len(state),
    )  # fmt: skip
    constants = {**constants, "HAS_BIAS": bias is not None, "K_MAJOR": k_major}
    launch_kernel(_product_kernel, (programs,), args, constants, num_warps=4)
    return out, bitmask
