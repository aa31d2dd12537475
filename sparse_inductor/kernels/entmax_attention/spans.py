"""The key tiles that are visible to a block of rows through a mask and a bias, computed on the device once per call.

A tile is empty (each key is dropped, or has a bias that makes it invisible), full (all keys are kept and have a bias of
0) or mixed. The span of a block consists of the range of its tiles that are not empty, its longest run of full tiles,
and the longest run of empty tiles inside the range (the gap). This describes completely a causal mask, padding on
either side, packed documents, and a sliding window with or without sinks. For all other tiles in the range the passes
read mask and bias, so that a span need not be tight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from .problem import Problem, Strided, entry_pointers, matrix

# A key with a bias of at most LOW is treated as invisible. Rows that may have such a key in their support are detected
# later. LOW is above fp16's lowest number, which additive masks contain.
LOW = tl.constexpr(-9000.0)
# Numbers per span: begin and end of the tiles, of the full run, of the gap; padded to 32 bytes.
NUMBERS = tl.constexpr(8)
# Keys of a boolean mask per 64-bit word.
WORD = 8


class Spans(NamedTuple):
    """The spans of all blocks: table int32 [B or 1, H or 1, blocks or 1, NUMBERS], and its strides, 0 for broadcast
    dimensions."""

    table: torch.Tensor
    strides: tuple[int, int, int]


@relaunched
@triton.jit
def _classes_kernel(
    bias, mask, classes, heads, rows, Lk,
    BM: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """A program classifies TILES tiles of BM rows: 0 for an empty tile, 1 for a mixed one, 2 for a full one.

    A mask without a bias may be read in words of several keys; Lk and KEYS are then numbers of words. ALL is the word
    that keeps all of its keys.
    """
    chunks = tl.cdiv(Lk, KEYS * TILES)
    blocks = tl.cdiv(rows, BM)
    chunk = tl.program_id(0) % chunks
    block = tl.program_id(0) // chunks % blocks
    bh = tl.program_id(0) // chunks // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    bias = None if bias is None else matrix(bias, b, h)
    mask = None if mask is None else matrix(mask, b, h)
    j = chunk * (KEYS * TILES) + tl.arange(0, KEYS * TILES)
    some = tl.zeros([KEYS * TILES], tl.int32)
    every = some + 1
    for r in range(0, tl.minimum(BM, rows - block * BM), STEP):
        i = block * BM + r + tl.arange(0, STEP)
        inside = (i < rows)[:, None] & (j < Lk)[None, :]
        kept = inside
        plain = inside | (inside == 0)
        if bias is not None:
            x = tl.load(entry_pointers(bias, i, j), mask=inside, other=0.0).to(tl.float32)
            kept = kept & ((x <= LOW) == 0)  # NaN is kept
            plain = plain & (x == 0.0)
        if mask is not None:
            keep = tl.load(entry_pointers(mask, i, j), mask=inside, other=ALL)
            kept = kept & (keep != 0)
            plain = plain & (keep == ALL)
        some = tl.maximum(some, tl.max(kept.to(tl.int32), 0))
        every = tl.minimum(every, tl.min(plain.to(tl.int32), 0))
    some = tl.max(tl.reshape(some, (TILES, KEYS)), 1)
    every = tl.min(tl.reshape(every, (TILES, KEYS)), 1)
    tiles = tl.cdiv(Lk, KEYS)
    t = chunk * TILES + tl.arange(0, TILES)
    at = classes + (bh.to(tl.int64) * blocks + block) * tiles + t
    tl.store(at, tl.where(every != 0, 2, some).to(tl.int8), mask=t < tiles)


@triton.jit
def _longest_run(hit, other, t, end):
    """Return (begin, end) of the longer of the first and the last run of `hit` tiles; (end, end) if there is none."""
    begin = tl.min(tl.where(hit, t, end), 0)
    stop = tl.min(tl.where(other & (t > begin), t, end), 0)
    last = tl.max(tl.where(hit, t + 1, begin), 0)
    first = tl.max(tl.where(other & (t < last), t + 1, begin), 0)
    longer = last - first > stop - begin
    return tl.where(longer, first, begin), tl.where(longer, last, stop)


@relaunched
@triton.jit
def _spans_kernel(classes, spans, tiles, NUMBERS: tl.constexpr, TILES: tl.constexpr):
    """A program writes the span of one block from the classes of its `tiles` tiles."""
    t = tl.arange(0, TILES)
    c = tl.load(classes + tl.program_id(0).to(tl.int64) * tiles + t, mask=t < tiles, other=0)
    end = tl.max(tl.where(c != 0, t + 1, 0), 0)
    begin = tl.min(tl.where(c != 0, t, end), 0)
    within = (t >= begin) & (t < end)
    full, full_end = _longest_run(within & (c == 2), within & (c != 2), t, end)
    gap, gap_end = _longest_run(within & (c == 0), within & (c != 0), t, end)
    at = spans + tl.program_id(0) * NUMBERS
    tl.store(at, begin)
    tl.store(at + 1, end)
    tl.store(at + 2, full)
    tl.store(at + 3, full_end)
    tl.store(at + 4, gap)
    tl.store(at + 5, gap_end)


def spans(problem: Problem, rows: int, keys: int) -> Spans:
    """Compute the spans of blocks of `rows` rows, in tiles of `keys` keys."""
    Lk = problem.k.shape[2]
    sides = [t for t in (problem.bias, problem.mask) if t is not None]
    B, H, Lq = (
        size if any(t.stride(d) for t in sides) else 1 for d, size in enumerate(problem.q.shape[:3])
    )
    blocks, tiles = triton.cdiv(Lq, rows), triton.cdiv(Lk, keys)
    classes = torch.empty(B, H, blocks, tiles, device=problem.q.device, dtype=torch.int8)
    table = torch.empty(B, H, blocks, NUMBERS.value, device=problem.q.device, dtype=torch.int32)
    bias, mask, word = problem.bias, problem.mask, 1
    if bias is None and mask is not None and _in_words(mask):
        mask, word = mask.view(torch.int64), WORD
    together = 8 * word
    _classes_kernel[(B * H * blocks * triton.cdiv(tiles, together),)](
        *(None if t is None else Strided.of(t) for t in (bias, mask)), classes, H, Lq, Lk // word,
        BM=rows, KEYS=keys // word, STEP=16, TILES=together, ALL=0x0101010101010101 if word == WORD else 1, num_warps=4,
    )  # fmt: skip
    _spans_kernel[(B * H * blocks,)](
        classes, table, tiles, NUMBERS=NUMBERS.value, TILES=triton.next_power_of_2(tiles), num_warps=1
    )  # fmt: skip
    b, h, block = (s if n > 1 else 0 for s, n in zip(table.stride(), (B, H, blocks)))
    return Spans(table, (b, h, block))


def _in_words(mask: torch.Tensor) -> bool:
    """Whether keys of a boolean mask can be read eight at a time."""
    numbers = mask.shape[3], mask.storage_offset(), mask.data_ptr(), *mask.stride()[:3]
    return mask.stride(3) == 1 and not any(n % WORD for n in numbers)


class Runs(NamedTuple):
    """The visible key tiles of a block of rows: `fulls` full tiles from tile `full` on, and `mixed` mixed tiles, which
    `mixed_tile` enumerates."""

    full: Any
    fulls: Any
    mixed: Any
    begin: Any
    one: Any
    first_end: Any
    two: Any
    second_end: Any


@triton.jit
def tiles_of(span, tiles):
    """Return the `Runs` of a block from its `Tiles` and its span, which may be None."""
    zero = tiles.seen * 0
    if span is None:
        return Runs(
            zero, tiles.whole, tiles.seen - tiles.whole, tiles.whole, zero, zero, zero, zero
        )
    else:
        end = tl.minimum(tl.load(span + 1), tiles.seen)
        begin = tl.minimum(tl.load(span), end)
        full_end = tl.minimum(tl.load(span + 3), tiles.whole)
        full = tl.maximum(tl.minimum(tl.load(span + 2), end), begin)
        full_end = tl.maximum(tl.minimum(full_end, end), full)
        gap = tl.maximum(tl.minimum(tl.load(span + 4), end), begin)
        gap_end = tl.maximum(tl.minimum(tl.load(span + 5), end), gap)
        # An empty run may have any position: move it to the end.
        gap = tl.where(gap == gap_end, end, gap)
        gap_end = tl.where(gap == end, end, gap_end)
        full = tl.where(full == full_end, end, full)
        full_end = tl.where(full == end, end, full_end)
        first, first_end = tl.minimum(full, gap), tl.minimum(full_end, gap_end)
        second, second_end = tl.maximum(full, gap), tl.maximum(full_end, gap_end)
        one = first - begin
        two = one + second - first_end
        mixed = two + end - second_end
        return Runs(full, full_end - full, mixed, begin, one, first_end, two, second_end)


@triton.jit
def mixed_tile(n, runs, SPANS: tl.constexpr):
    """Return the number of the n-th mixed tile; without SPANS mixed tiles are contiguous."""
    tile = runs.begin + n
    if SPANS:
        third = runs.second_end + n - runs.two
        second = tl.where(n < runs.two, runs.first_end + n - runs.one, third)
        tile = tl.where(n < runs.one, tile, second)
    return tile
