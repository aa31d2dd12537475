"""Exact top-k of all entries of a tensor, as BatchTopK autoencoders take over the pre-activations of a whole batch.

The entries are divided into groups, as in `topk`: the k-th largest group maximum is no larger than the k-th largest
entry, so only groups with a maximum that reaches this bound can contain one of the k largest. The tensor is read once
for the maxima, and after that only these groups. The k-th largest of the maxima, and then of the entries of the listed
groups, is found by a radix selection: one histogram for each byte of a key. If a bound is reached by many groups (all
entries equal, fewer than k that are not zero), more of the tensor is read again, and the result is as exact.

Keys are those of `topk`: NaN is above all other entries, and equal entries are ordered by position. The maxima are kept
as the upper 16 bits of their keys.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import Launcher, launch
from .topk import load_keys

# Entries per group, and groups per program of `_maxima_kernel`.
GROUP = 32
PART = 128
# Programs of the other kernels, each with a contiguous segment of the groups, and entries that one has at a time.
PROGRAMS = 1024
BLOCK = 1024
WARPS = 4
# Groups for each of the k entries from which on maxima are used.
EACH = 4
BINS = tl.constexpr(256)


@triton.jit
def _maxima_kernel(
    x, maxima, n, groups, GROUP: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr
):
    """Program p writes the upper 16 bits of the largest keys of PART groups of x [n]."""
    first = tl.program_id(0).to(tl.int64) * PART
    g = tl.arange(0, PART)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    _, key = load_keys(x + first * GROUP, at, at < n - first * GROUP, BITS)
    top = tl.max(key, 1) >> (BITS - 16)
    tl.store(maxima + first + g, top.to(tl.int16), mask=g < groups - first)


@triton.jit
def _segment(state, many, LISTED: tl.constexpr):
    """Return the bounds of this program's part of `many` items, or of the number of listed groups."""
    if LISTED:
        many = tl.load(state)
    each = tl.cdiv(many, tl.num_programs(0))
    first = tl.minimum(tl.program_id(0) * each, many)
    return first, tl.minimum(first + each, many)


@triton.jit
def _keys(
    source, listed, first, end, n, GROUP: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr
):
    """Return (entries, keys, positions, mask) of GROUPS items from `first` on, before `end`. An item is a key if
    `source` is of integers, else the group of x with this number, or with the number that is listed there."""
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    i = first + tl.arange(0, GROUPS)
    if source.dtype.element_ty.is_int():
        here = i < end
        key = tl.load(source + i, mask=here, other=LOWEST).to(tl.int32)
        return key, key, i, here
    else:
        g = i
        if listed is not None:
            g = tl.load(listed + i, mask=i < end, other=0)
        at = g.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        here = (i < end)[:, None] & (at < n)
        x, key = load_keys(source, at, here, BITS)
        m: tl.constexpr = GROUPS * GROUP
        return tl.reshape(x, [m]), tl.reshape(key, [m]), tl.reshape(at, [m]), tl.reshape(here, [m])


@triton.jit
def _chosen(histograms, k, BYTES: tl.constexpr):
    """Return (the first BYTES bytes of the k-th largest key as a signed number, its rank among keys with these)."""
    bins = tl.arange(0, BINS)
    prefix = tl.zeros([], tl.int32)
    for i in tl.static_range(BYTES):
        count = tl.load(histograms + i * BINS + bins)
        behind = tl.sum(count, 0) - tl.cumsum(count, 0)
        bin = tl.sum((behind + count >= k).to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(bins == bin, behind, 0), 0)
        prefix = prefix * BINS + (bin - 128 if i == 0 else bin)
    return prefix, k


@triton.jit
def _histogram_kernel(
    source, listed, state, many, n, k,
    BYTE: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Add up the histogram of byte BYTE of the keys that agree with the k-th largest key in the bytes before it.

    The arguments of this kernel and the next two: source, listed: see `_keys`. state: the number of listed groups, then
    from 256 * FIRST on the histograms of these keys, one for each byte. many: the number of items, unless there is a
    list."""
    histograms = state + FIRST * BINS
    prefix, _rank = _chosen(histograms, k, BYTE)
    bins = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    others = tl.zeros([], tl.int32)
    first, end = _segment(state, many, listed is not None)
    for at in tl.range(first, end, GROUPS, num_stages=1):
        _x, key, _place, here = _keys(source, listed, at, end, n, GROUP, GROUPS, BITS)
        byte = key >> (BITS - 8 - 8 * BYTE)
        if BYTE == 0:
            byte += 128
        else:
            here &= (byte >> 8) == prefix
            byte &= 255
        # The mask of tl.histogram may have another layout than its input (Triton 3.6), so the others are counted as 0.
        count += tl.histogram(tl.where(here, byte, 0), BINS)
        others += tl.sum((~here).to(tl.int32), 0)
    count -= tl.where(bins == 0, others, 0)
    tl.atomic_add(histograms + BYTE * BINS + bins, count, mask=count > 0, sem="relaxed")


@triton.jit
def _count_kernel(
    source, listed, state, counts, many, n, k,
    FIRST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Program p writes the numbers of keys of its segment that are above the k-th largest key, to counts[0, p], and
    that equal it, to counts[1, p]."""
    bound, _rank = _chosen(state + FIRST * BINS, k, BITS // 8)
    above, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    first, end = _segment(state, many, listed is not None)
    for at in tl.range(first, end, GROUPS, num_stages=1):
        _x, key, _place, here = _keys(source, listed, at, end, n, GROUP, GROUPS, BITS)
        above += tl.sum((here & (key > bound)).to(tl.int32), 0)
        equal += tl.sum((here & (key == bound)).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0), above)
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), equal)


@triton.jit
def _write_kernel(
    source, listed, state, counts, values, positions, many, n, k,
    FIRST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the k largest items by position: `values`, unless it is None, and `positions`. Without `values`, all items
    that equal the k-th largest are written, and the number of items to `state`."""
    bound, ties = _chosen(state + FIRST * BINS, k, BITS // 8)
    if values is None:
        ties = tl.full([], 2147483647, tl.int32)
    p = tl.arange(0, PROGRAMS)
    before = p < tl.program_id(0)
    equal = tl.sum(tl.load(counts + PROGRAMS + p, mask=before, other=0), 0)
    taken = tl.sum(tl.load(counts + p, mask=before, other=0), 0) + tl.minimum(equal, ties)
    first, end = _segment(state, many, listed is not None)
    for at in tl.range(first, end, GROUPS, num_stages=1):
        x, key, place, here = _keys(source, listed, at, end, n, GROUP, GROUPS, BITS)
        same = here & (key == bound)
        keep = (here & (key > bound)) | (same & (equal + tl.cumsum(same.to(tl.int32), 0) <= ties))
        to = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
        if values is not None:
            tl.store(values + to, x, mask=keep)
        tl.store(positions + to, place.to(positions.dtype.element_ty), mask=keep)
        taken += tl.sum(keep.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)
    if values is None:
        tl.store(state, taken, mask=tl.program_id(0) == PROGRAMS - 1)


def top(x: Tensor, k: int, run: Launcher = launch) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of x [n] and their int64 positions, in ascending order of the positions. run:
    launches the kernels."""
    x, n = x.contiguous(), x.numel()
    group, part, block, programs = (GROUP, PART, BLOCK, PROGRAMS) if x.is_cuda else (4, 8, 32, 4)
    groups = triton.cdiv(n, group)
    bits = 8 * x.element_size()
    new = functools.partial(torch.empty, dtype=torch.int32, device=x.device)
    state = torch.zeros((3 + bits // 8) * 256, dtype=torch.int32, device=x.device)

    def select(source, listed, values, positions, first, group, bits) -> None:
        constants = {"FIRST": first, "GROUP": group, "GROUPS": block // group, "BITS": bits}
        counts, numbers, grid = new(2, programs), (groups, n, k), (programs,)
        given: tuple[Any, ...] = source, listed, state
        for byte in range(bits // 8):
            run(_histogram_kernel, grid, (*given, *numbers), {"BYTE": byte, **constants}, WARPS)
        given += (counts,)
        run(_count_kernel, grid, (*given, *numbers), constants, WARPS)
        given += values, positions
        constants["PROGRAMS"] = programs
        run(_write_kernel, grid, (*given, *numbers), constants, WARPS)

    listed = None
    if EACH * k <= groups:
        maxima, listed = new(groups, dtype=torch.int16), new(groups)
        constants = {"GROUP": group, "PART": part, "BITS": bits}
        run(_maxima_kernel, (triton.cdiv(groups, part),), (x, maxima, n, groups), constants, WARPS)
        select(maxima, None, None, listed, 1, 1, 16)
    values, positions = x.new_empty(k), new(k, dtype=torch.int64)
    select(x, listed, values, positions, 3, group, bits)
    return values, positions
