"""Tiles of the products in Triton of rows that are not sparse (`relu_ffn_dense`, `relu_ffn_heavy`): their sizes, their
order, and how several programs share what is left past the last round of all programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import multiprocessors

__all__ = [
    "STAGES_HALF",
    "add_shared_halves",
    "is_last",
    "leave_part",
    "narrow",
    "precision",
    "programs_of",
    "put",
    "rest_of",
    "sum_of_rows",
    "tile_at",
    "tile_of",
    "tiles_in_rounds",
]

# Programs that share the sum of half a tile, of which a part is 64 KB, and steps of a sum that are worth a part.
SPLITS_BOXES = tl.constexpr(16)
STEPS_BOXES = tl.constexpr(6)
# Programs for each half, at the least, where others were made first: a part and its sum take a sixth of a tile's time.
LEAST_SPLITS = tl.constexpr(3)
# Stages of 32 KB of a tile of half the columns.
STAGES_HALF = tl.constexpr(5)
# Slices of its rows that a shared half's programs add the parts of.
SLICES = tl.constexpr(16)
# Parts that are asked for at once.
AT_ONCE = tl.constexpr(4)


def tile_of(t: torch.Tensor) -> dict[str, int]:
    """BM rows x BN columns, BK deep, and how to run it."""
    if not t.is_cuda:
        return {"BM": 16, "BN": 32, "BK": 16, "num_warps": 4, "num_stages": 1}
    if t.dtype == torch.float32:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    # 128 x 256 has the fewest operand bytes a flop of what fits the registers of 8 warps; three stages are 147 KB.
    return {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}


def narrow(tile: dict[str, int]) -> dict[str, int]:
    """The tile where operands come through pointers, which take registers too."""
    return {**tile, "BN": min(tile["BN"], 128)}


def programs_of(t: torch.Tensor) -> int:
    return multiprocessors(t.device) if t.is_cuda else 3


def precision(t: torch.Tensor) -> str:
    fast = t.is_cuda and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if fast and t.dtype == torch.float32 else "ieee"


@triton.jit
def tile_at(t, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles share their column tiles in turn, so that both operands stay in L2."""
    group = t // (GROUP * tiles_n)
    r = t % (GROUP * tiles_n)
    size = tl.minimum(GROUP, tiles_m - group * GROUP)
    return group * GROUP + r % size, r // size


@triton.jit
def rest_of(tiles, steps):
    """(tiles that are made by halves, those past the last round of all programs; the first of the halves, that are made
    by a program each; programs that share the sum of each of the others, of so many steps).

    None is halved where that takes as long: where there is neither a program for each half, nor, when all programs have
    made one, LEAST_SPLITS for each that is left.
    """
    programs = tl.num_programs(0)
    rest = tiles % programs
    alone = tl.where(2 * rest > programs, programs, 0)
    splits = programs // tl.maximum(2 * rest - alone, 1)
    splits = tl.minimum(splits, tl.minimum(SPLITS_BOXES, tl.maximum(steps // STEPS_BOXES, 1)))
    rest = tl.where((alone == 0) | (splits >= LEAST_SPLITS), rest, 0)
    return rest, tl.where((rest == 0) | (splits == 1), 2 * rest, alone), splits


def tiles_in_rounds(tiles: int, steps: int, programs: int) -> int:
    """How many of so many tiles `rest_of` leaves whole."""
    rest = tiles % programs
    if 2 * rest > programs:
        splits = min(
            programs // (2 * rest - programs), SPLITS_BOXES.value, steps // STEPS_BOXES.value
        )
        if splits < LEAST_SPLITS.value:
            return tiles
    return tiles - rest


@triton.jit
def is_last(acc, parts, arrived, unit, splits, BM: tl.constexpr, BN: tl.constexpr):
    """Put a tile's part away; whether the others of this tile are there, too."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(parts + unit * (BM * BN) + at, acc)
    tl.debug_barrier()  # all threads' parts are there
    last = tl.atomic_add(arrived + unit // splits, 1) == splits - 1
    tl.debug_barrier()
    return last


@triton.jit
def leave_part(acc, parts, arrived, unit, splits, BM: tl.constexpr, BN: tl.constexpr):
    """Put a tile's part away."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(parts + unit * (BM * BN) + at, acc)
    tl.debug_barrier()  # all threads' parts are there
    tl.atomic_add(arrived + unit // splits, 1, sem="release")


@triton.jit
def _wait_for_parts(arrived, unit, splits):
    """Wait for the other parts of this program's tile. Nobody waits for ever: programs start in order, leave their
    parts first, and those of a tile lie side by side."""
    there = 0
    while there < splits:
        there = tl.atomic_add(arrived + unit // splits, 0, sem="acquire").to(tl.int32)


@triton.jit
def sum_of_rows(parts, m0, unit, splits, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The sum of a tile's parts, in order, of ROWS rows from m0 on."""
    at = (m0 + tl.arange(0, ROWS))[:, None] * BN + tl.arange(0, BN)[None, :]
    first = unit // splits * splits
    total = tl.zeros([ROWS, BN], tl.float32)
    for i in range(0, splits, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            s = tl.full([1, 1], j, tl.int32) + i
            part = parts + (first + s) * (BM * BN) + at
            total += tl.load(part, mask=s < splits, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def put(
    acc, out, bias, rows, m0, n0, n_rows, N, stride, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """out[i] = acc + bias for a tile's rows i < n_rows from m0 on, as far as out [*, N] reaches; with SCATTER
    out[rows[i]]."""
    n = n0 + tl.arange(0, acc.shape[1])
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    i = m0 + tl.arange(0, acc.shape[0])
    row = tl.load(rows + i, mask=i < n_rows, other=0).to(tl.int64) if SCATTER else i.to(tl.int64)
    at = out + row[:, None] * stride + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(i < n_rows)[:, None] & (n < N)[None, :])


@triton.jit
def add_shared_halves(
    out, bias, rows, parts, arrived, shares, splits, alone, whole, tiles_m, tiles_n, n_rows, N, stride_o,
    SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """This program's share of adding the parts of halves."""
    HALF: tl.constexpr = BN // 2
    ROWS: tl.constexpr = BM // SLICES
    unit = tl.program_id(0)
    if shares:
        _wait_for_parts(arrived, unit, splits)
        half = alone + unit // splits
        pm, pn = tile_at(whole + half // 2, tiles_m, tiles_n, 8)
        n0 = pn * BN + half % 2 * HALF
        for m0 in range(unit % splits * ROWS, BM, splits * ROWS):
            total = sum_of_rows(parts, m0, unit, splits, ROWS, BM, HALF)
            put(total, out, bias, rows, pm * BM + m0, n0, n_rows, N, stride_o, SCATTER, HAS_BIAS)
