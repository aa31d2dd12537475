"""Exact top-k of wide rows with a bound.

The columns are divided into groups. The k-th largest group maximum is no larger than the k-th largest entry, so only
groups with a maximum that reaches this bound can contain one of the k largest entries. If the maxima are distinct,
these are k groups, and only their entries are read again. If more groups reach the bound than the list holds (all
entries equal, all NaN), the whole row is read.

Entries are compared as integer keys of the same width, in the same order: -0 equals 0, NaN is above all other entries,
and equal entries are ordered by column. Exactly k entries are kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import Launcher, launch
from ..common.transpose import along_rows

# Columns per group: 32 is faster than 64 and 128 on an H100.
GROUP = 32
# Groups per program of `_maxima_kernel`: loads of 16 bytes a thread.
PART = 64
# Columns that are read at a time if a whole row is read: CHUNK, or A_WARP per warp if that is less.
CHUNK, A_WARP = 4096, 1024
# Bits of keys per warp. Fewer warps wait less for each other at each reduction, as long as registers suffice.
HELD = 1 << 15
# Largest k for which groups are used: more keys do not fit a program's registers.
MOST = 256
# Bytes of the encoder's product per chunk of rows: less than the gradients and their buffers take in training. Chunks
# are larger for a large weight (WEIGHT_SHARE): every chunk reads it again, which should take less time than the
# product.
PRODUCT = 192 << 20
# Rows per tile of the product; chunks are whole tiles.
ROWS = 128
WEIGHT_SHARE = 4


@triton.jit
def _keys_of(x, BITS: tl.constexpr):
    """Return entries as int32 keys in the same order, NaN above all others. 16-bit entries have 16-bit keys."""
    if BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1
    key = tl.where(bits < 0, bits ^ HIGHEST, bits)
    wide = x.to(tl.float32)  # the interpreter compares bf16 by its bits
    key = tl.where(wide == 0.0, 0, key)
    return tl.where(wide != wide, HIGHEST, key)


@triton.jit
def load_keys(row, at, here, BITS: tl.constexpr):
    """Return (entries, keys) of columns `at`, with the lowest key where `here` is false."""
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    x = tl.load(row + at, mask=here, other=0.0)
    return x, tl.where(here, _keys_of(x, BITS), LOWEST)


@triton.jit
def _kth(keys, K: tl.constexpr, BITS: tl.constexpr):
    """Return the largest number that at least K keys reach, which is the K-th largest key."""
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    bound = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= K, 0, LOWEST)
    bit = tl.full([], 1 << (BITS - 2), tl.int32)
    for _ in range(BITS - 1):
        trial = bound + bit
        bound = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= K, trial, bound)
        bit = bit >> 1
    return bound


@triton.jit
def _count(row, N, trial, CHUNK: tl.constexpr, BITS: tl.constexpr):
    """Return the number of entries of a row with a key of at least `trial`."""
    total = tl.zeros([], tl.int32)
    for first in range(0, N, CHUNK):
        at = first + tl.arange(0, CHUNK)
        _, key = load_keys(row, at, at < N, BITS)
        total += tl.sum(((key >= trial) & (at < N)).to(tl.int32), 0)
    return total


@triton.jit
def _put(values, indices, x, at, keys, bound, taken, ties, equal):
    """Append the entries above the bound, and the first `ties` entries that equal it, after the `taken` entries
    already written. equal: number of earlier entries that equal the bound. Returns the new (taken, equal)."""
    above = keys > bound
    same = keys == bound
    rank = equal + tl.cumsum(same.to(tl.int32), 0)
    keep = above | (same & (rank <= ties))
    to = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(values + to, x, mask=keep)
    tl.store(indices + to, at.to(tl.int64), mask=keep)
    return taken + tl.sum(keep.to(tl.int32), 0), equal + tl.sum(same.to(tl.int32), 0)


@triton.jit
def _put_whole(
    row, values, indices, N, reached, K: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr
):
    """Write the K largest entries of a row, in column order. reached: a key that at least K entries reach. If at least
    K entries exceed it, the row is read once for every bit of a key."""
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1
    bound = reached
    ties = tl.full([], K, tl.int32)
    if bound < HIGHEST:
        ties = K - _count(row, N, bound + 1, CHUNK, BITS)
    if ties <= 0:
        bound = tl.where(_count(row, N, 0, CHUNK, BITS) >= K, 0, LOWEST)
        bit = tl.full([], 1 << (BITS - 2), tl.int32)
        for _ in range(BITS - 1):
            trial = bound + bit
            bound = tl.where(_count(row, N, trial, CHUNK, BITS) >= K, trial, bound)
            bit = bit >> 1
        ties = tl.full([], K, tl.int32)
        if bound < HIGHEST:
            ties = K - _count(row, N, bound + 1, CHUNK, BITS)
    taken = tl.zeros([], tl.int32)
    equal = tl.zeros([], tl.int32)
    for first in range(0, N, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x, key = load_keys(row, at, at < N, BITS)
        taken, equal = _put(values, indices, x, at, key, bound, taken, ties, equal)


@triton.jit
def _put_listed(
    row, listed, values, indices, many, N,
    K: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write the K largest entries of the listed groups, in column order."""
    j = tl.arange(0, LISTED)
    g = tl.load(listed + j, mask=j < many, other=0)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x, key = load_keys(row, at, (j < many)[:, None] & (at < N), BITS)
    x = tl.reshape(x, [LISTED * GROUP])
    key = tl.reshape(key, [LISTED * GROUP])
    bound = _kth(key, K, BITS)
    ties = K - tl.sum((key > bound).to(tl.int32), 0)
    _put(values, indices, x, tl.reshape(at, [LISTED * GROUP]), key, bound, 0, ties, 0)


@triton.jit
def _order(row, values, indices, K: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr):
    """Sort a row's entries: the largest first, equal entries by column."""
    i = tl.arange(0, ROOM)
    at = tl.load(indices + i, mask=i < K, other=0)
    _, key = load_keys(row, at, i < K, BITS)
    packed = (key.to(tl.int64) << 32) | (2147483647 - at)
    packed = tl.sort(tl.where(i < K, packed, -9223372036854775808), descending=True)
    at = 2147483647 - (packed & 2147483647)
    x = tl.load(row + at, mask=i < K, other=0.0)
    tl.debug_barrier()
    tl.store(values + i, x, mask=i < K)
    tl.store(indices + i, at, mask=i < K)


@triton.jit
def _maxima_kernel(
    scores, maxima, N, groups, stride, GROUP: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr
):
    """Program (m, part) writes the largest keys of PART groups of a row."""
    m = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * PART + tl.arange(0, PART)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    _, key = load_keys(scores + m * stride, at, at < N, BITS)
    to = maxima + m * groups + g
    tl.store(to, tl.max(key, 1).to(maxima.dtype.element_ty), mask=g < groups)


@triton.jit(do_not_specialize=["first"])
def _top_kernel(
    scores, maxima, listed, values, indices, first, N, groups, stride,
    K: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, MAXIMA: tl.constexpr, LISTED: tl.constexpr,
    ROOM: tl.constexpr, BY_GROUPS: tl.constexpr, ORDERED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Program m writes the K largest entries of row m to row first + m. listed [rows, LISTED]: scratch."""
    m = tl.program_id(0).to(tl.int64)
    row = scores + m * stride
    values += (first + m) * K
    indices += (first + m) * K
    many = tl.full([], LISTED + 1, tl.int32)
    reached = tl.full([], -(1 << (BITS - 1)), tl.int32)
    if BY_GROUPS:
        listed += m * LISTED
        g = tl.arange(0, MAXIMA)
        top = tl.load(maxima + m * groups + g, mask=g < groups, other=-(1 << (BITS - 1)))
        top = top.to(tl.int32)
        reached = _kth(top, K, BITS)
        hit = (top >= reached) & (g < groups)
        to = tl.cumsum(hit.to(tl.int32), 0) - 1
        many = tl.sum(hit.to(tl.int32), 0)
        tl.store(listed + to, g, mask=hit & (to < LISTED))
        tl.debug_barrier()
        if many <= LISTED:
            _put_listed(row, listed, values, indices, many, N, K, GROUP, LISTED, BITS)
    if many > LISTED:
        _put_whole(row, values, indices, N, reached, K, CHUNK, BITS)
    if ORDERED:
        tl.debug_barrier()
        _order(row, values, indices, K, ROOM, BITS)


def top(
    scores: Tensor,
    k: int,
    ordered: bool,
    values: Tensor,
    indices: Tensor,
    first: int = 0,
    run: Launcher = launch,
) -> None:
    """Write the k largest entries of each row of scores [M, N] to rows first to first + M of values and int64 indices
    [*, k], contiguous. ordered: sort them, else they are in column order. run: launches the kernels."""
    scores = along_rows(scores)
    M, N = scores.shape
    group, part, chunk = (GROUP, PART, CHUNK) if scores.is_cuda else (4, 8, 64)
    groups = triton.cdiv(N, group)
    listed = triton.next_power_of_2(k + max(8, k // 2))
    by_groups = listed <= groups // 2 and k <= MOST
    bits = 8 * scores.element_size()
    keys = torch.int16 if bits == 16 else torch.int32
    maxima = scores.new_empty(M if by_groups else 1, groups, dtype=keys)
    kept = scores.new_empty(M if by_groups else 1, listed, dtype=torch.int32)
    stride = scores.stride(0)
    warps = 4
    if by_groups:
        held = max(triton.next_power_of_2(groups), listed * group)
        warps = 16 if held > 8192 else min(4, max(1, held * bits // HELD))
        chunk = min(chunk, A_WARP * warps)
        constants = {"GROUP": group, "PART": part, "BITS": bits}
        grid = M, triton.cdiv(groups, part)
        run(_maxima_kernel, grid, (scores, maxima, N, groups, stride), constants, 4)
    constants = {
        "K": k, "GROUP": group, "CHUNK": chunk, "MAXIMA": triton.next_power_of_2(groups), "LISTED": listed,
        "ROOM": triton.next_power_of_2(k), "BY_GROUPS": by_groups, "ORDERED": ordered, "BITS": bits,
    }  # fmt: skip
    given = scores, maxima, kept, values, indices, first, N, groups, stride
    run(_top_kernel, (M,), given, constants, warps)


def encode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scores: Tensor | None,
    k: int,
    ordered: bool,
    run: Launcher = launch,
) -> tuple[Tensor, Tensor]:
    """Return (values, int64 indices) [M, k], the top-k of x @ weight.t() + bias, which may be given as `scores`."""
    M, N = len(x), len(weight)
    values = x.new_empty(M, k)
    indices = x.new_empty(M, k, dtype=torch.int64)
    if scores is not None:
        top(scores, k, ordered, values, indices, run=run)
        return values, indices
    most = max(PRODUCT, weight.numel() * weight.element_size() // WEIGHT_SHARE)
    most //= N * x.element_size()
    step = triton.cdiv(M, max(1, triton.cdiv(M, max(1, most))))
    step = triton.cdiv(step, ROWS) * ROWS
    for i in range(0, M, step):
        product = F.linear(x[i : i + step], weight, bias)
        top(product, k, ordered, values, indices, i, run)
    return values, indices
