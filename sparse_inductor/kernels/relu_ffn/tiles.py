"""Tiles of the products in Triton of rows that are not sparse (`relu_ffn.dense`, `relu_ffn.overflow`): their sizes, and
how several programs share what is left past the last round of all programs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..common.launch import sm_count
from ..common.tile_order import tile_last
from ..common.tiles import sizes_of

# Programs that share the sum of half a tile, of which a part is 64 KB, and steps of a sum that are worth a part.
SPLITS_TMA = tl.constexpr(16)
STEPS_TMA = tl.constexpr(6)
# Programs for each half, at the least, where others were made first: a part and its sum take a sixth of a tile's time.
LEAST_SPLITS = tl.constexpr(3)
# Stages of 40 KB of a tile of half the rows.
STAGES_HALF = tl.constexpr(4)
# Slices of its rows that a shared half's programs add the parts of.
SLICES = tl.constexpr(16)
# Parts that are asked for at once.
AT_ONCE = tl.constexpr(4)


def tile_of(t: torch.Tensor) -> dict[str, int]:
    """BM rows x BN columns, BK deep, and how to run it."""
    if not t.is_cuda:
        return {"BM": 16, "BN": 32, "BK": 16, "num_warps": 4, "num_stages": 1}
    facts = ["fp32"] if t.dtype == torch.float32 else []
    found: dict[str, Any] = sizes_of("relu_ffn", t.device, 0, *facts)
    return found


def narrow(tile: dict[str, int]) -> dict[str, int]:
    """The tile where operands come through pointers, which take registers too."""
    return {**tile, "BN": min(tile["BN"], 128)}


def programs_of(t: torch.Tensor) -> int:
    return sm_count(t.device) if t.is_cuda else 3


def precision(t: torch.Tensor) -> str:
    fast = t.is_cuda and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if fast and t.dtype == torch.float32 else "ieee"


@triton.jit
def rest_of(tiles, short, steps):
    """(tiles that are made by halves of their rows, those past the last round of all programs; the halves; the first of
    these, that are made by a program each; programs that share the sum of each of the others, of so many steps).

    The last `short` tiles have no other half. None is halved where that takes as long: where there is neither
    a program for each half, nor, when all programs have made one, LEAST_SPLITS for each that is left.
    """
    programs = tl.num_programs(0)
    rest = tiles % programs
    halves = 2 * rest - tl.minimum(rest, short)
    alone = tl.where(halves > programs, programs, 0)
    splits = programs // tl.maximum(halves - alone, 1)
    splits = tl.minimum(splits, tl.minimum(SPLITS_TMA, tl.maximum(steps // STEPS_TMA, 1)))
    some = (alone == 0) | (splits >= LEAST_SPLITS)
    rest, halves = tl.where(some, rest, 0), tl.where(some, halves, 0)
    return rest, halves, tl.where((halves == 0) | (splits == 1), halves, alone), splits


@triton.jit
def half_at(half, tiles, rest, halves, full, tiles_n, BM: tl.constexpr):
    """(first row, column tile) of one of so many halves of `rest` tiles."""
    two = 2 * (halves - rest)
    t = tiles - rest + tl.where(half < two, half // 2, half - two // 2)
    pm, pn = tile_last(t, full, tiles_n)
    return pm * BM + tl.where(half < two, half % 2 * (BM // 2), 0), pn


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
def leave_part(acc, parts, arrived, unit, splits, n_rows, BM: tl.constexpr, BN: tl.constexpr):
    """Put the first n_rows of a tile's part away."""
    i = tl.arange(0, BM)[:, None]
    at = i * BN + tl.arange(0, BN)[None, :]
    tl.store(parts + unit * (BM * BN) + at, acc, mask=i < n_rows)
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
def add_parts(
    out, bias, rows, parts, arrived, unit, splits, m0, n0, n_rows, N, stride_o,
    SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program's share of adding the parts of a tile [BM, BN] at (m0, n0): slices of its rows."""
    ROWS: tl.constexpr = BM // SLICES
    _wait_for_parts(arrived, unit, splits)
    for m in range(unit % splits * ROWS, tl.minimum(n_rows - m0, BM), splits * ROWS):
        total = sum_of_rows(parts, m, unit, splits, ROWS, BM, BN)
        put(total, out, bias, rows, m0 + m, n0, n_rows, N, stride_o, SCATTER, HAS_BIAS)


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
