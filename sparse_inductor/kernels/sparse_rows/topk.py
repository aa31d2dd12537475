"""Exact top-k of wide rows, by a bound: the k-th largest of the maxima of groups of columns is no larger than the k-th
largest entry, so that only groups whose maximum reaches it can hold one of the k.

These are k groups where the maxima differ, and as many entries are looked at again as they have; a row of more groups
than there is room for (all entries equal, all NaN) is looked at whole. Entries are compared by integers of their own
width that sort as they do, -0 as 0 and NaN above all, equal ones by column: exactly k are kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import Launcher, launch

# Columns of a group: 32 beat 64 and 128 on an H100.
GROUP = 32
# Groups whose maxima a program takes: 16 bytes a thread and load.
PART = 64
# Columns of a row at a time where it is looked at whole, and of those as many a warp where a row has few.
CHUNK, A_WARP = 4096, 1024
# Bits of keys that a warp holds: more fit its registers, but fewer warps wait less for each other at each sum.
HELD = 1 << 15
# Entries a row at most that are found by groups: more do not fit a program's registers.
MOST = 256
# Bytes of the encoder's product that exist at a time. More where the weight is large, which is read again for each
# part: that is to take less time than the product.
PRODUCT = 96 << 20
# Rows of a tile of the product: parts are made of whole ones.
ROWS = 128
WEIGHT_SHARE = 4


@triton.jit
def _keys_of(x, BITS: tl.constexpr):
    """Entries as int32 that sort the same way, NaN above all; of 16 bits they are in the low half."""
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
def _load_keys(row, at, here, BITS: tl.constexpr):
    """(entries, keys) of some columns; a key below all others where there is none."""
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    x = tl.load(row + at, mask=here, other=0.0)
    return x, tl.where(here, _keys_of(x, BITS), LOWEST)


@triton.jit
def _kth(keys, K: tl.constexpr, BITS: tl.constexpr):
    """The largest number that at least K of the keys reach."""
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
    """How many entries of a row reach a number."""
    total = tl.zeros([], tl.int32)
    for first in range(0, N, CHUNK):
        at = first + tl.arange(0, CHUNK)
        _, key = _load_keys(row, at, at < N, BITS)
        total += tl.sum(((key >= trial) & (at < N)).to(tl.int32), 0)
    return total


@triton.jit
def _put(values, indices, x, at, keys, bound, taken, ties, equal):
    """Write the entries above the bound, and as many that equal it as are wanted, behind the `taken` that are there;
    `equal` of those that equal it came before. Returns both counts."""
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
    """The K largest of a row, by column. reached: a number that at least K of its entries reach. Where at
    least K exceed it, all of the row is read once for each bit."""
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
        x, key = _load_keys(row, at, at < N, BITS)
        taken, equal = _put(values, indices, x, at, key, bound, taken, ties, equal)


@triton.jit
def _put_listed(
    row, listed, values, indices, many, N,
    K: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The K largest of the groups that are listed, by column."""
    j = tl.arange(0, LISTED)
    g = tl.load(listed + j, mask=j < many, other=0)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x, key = _load_keys(row, at, (j < many)[:, None] & (at < N), BITS)
    x = tl.reshape(x, [LISTED * GROUP])
    key = tl.reshape(key, [LISTED * GROUP])
    bound = _kth(key, K, BITS)
    ties = K - tl.sum((key > bound).to(tl.int32), 0)
    _put(values, indices, x, tl.reshape(at, [LISTED * GROUP]), key, bound, 0, ties, 0)


@triton.jit
def _order(row, values, indices, K: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr):
    """Put a row's entries in order: the largest first, equal ones by column."""
    i = tl.arange(0, ROOM)
    at = tl.load(indices + i, mask=i < K, other=0)
    _, key = _load_keys(row, at, i < K, BITS)
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
    """Program (m, part) writes the largest key of PART groups of a row, reading each entry once."""
    m = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * PART + tl.arange(0, PART)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    _, key = _load_keys(scores + m * stride, at, at < N, BITS)
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
    """The k largest entries of each row of scores [M, N] into rows `first` to first + M of values and int64 indices
    [*, k], which are contiguous. run: what launches the kernels."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
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
    """(values, int64 indices) [M, k] of the rows of x @ weight.t() + bias, or of `scores`, which is that."""
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
