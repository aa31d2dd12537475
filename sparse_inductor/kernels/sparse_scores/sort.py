"""Sorting of a query's k best keys, which are written as scores and ids.

A key is an int64 ordered as (score, lower id first).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import relaunched
from ..common.pdl import wait_for_previous
from .accumulate import COUNTERS_APART

LOWEST = -(1 << 63)  # the key of an absent document
_LOWEST = tl.constexpr(LOWEST)
_APART = tl.constexpr(COUNTERS_APART)


@triton.jit
def score_of(key):
    """The score of a key."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def doc_of(key):
    """The document of a key."""
    return 4294967295 - (key & 4294967295)


@triton.jit
def _write(key, place, wanted, unit, scores, ids, PROVED: tl.constexpr):
    """Write the scores and ids of keys."""
    if PROVED:
        value = score_of(key)
    else:
        value = (key >> 32).to(tl.int32).to(tl.float32) * unit
    none = key == _LOWEST
    doc = tl.where(none, -1, doc_of(key))
    tl.store(scores + place, tl.where(none, float("-inf"), value), mask=wanted)
    tl.store(ids + place, doc, mask=wanted)


@triton.jit
def _write_sorted(
    mine, many, twice, unit, scores, ids, k, SIZE: tl.constexpr, PROVED: tl.constexpr
):
    """Write keys [SIZE] in order. twice: documents may occur twice; one of two equal keys is dropped."""
    at = tl.arange(0, SIZE)
    key = tl.sort(tl.load(mine + at, mask=at < many, other=_LOWEST), descending=True)
    if twice:
        tl.store(mine + at, key)
        tl.debug_barrier()
        after = tl.load(mine + at - 1, mask=at > 0, other=_LOWEST)
        again = (after == key) & (key != _LOWEST)
        key = tl.sort(tl.where(again, _LOWEST, key), descending=True)
    _write(key, at, at < k, unit, scores, ids, PROVED)


@triton.jit
def _write_ranked(
    mine, many, twice, unit, counters, begins, moved, scores, ids, k, SIZE: tl.constexpr, PROVED: tl.constexpr
):  # fmt: skip
    """Write keys [many], each at its rank: a bucket sort with SIZE buckets of equal width, in which the rank of a key
    within its bucket is the number of larger keys. (tl.sort takes 55 exchange steps for a thousand keys and compiles
    for twenty seconds.) twice: documents may occur twice; a first round removes one of two equal keys.

    counters and begins int32 [SIZE], moved int64 [SIZE] are scratch.
    """
    at = tl.arange(0, SIZE)
    key = tl.load(mine + at, mask=at < many, other=_LOWEST)
    rank = at
    for _ in range(0, 1 + twice.to(tl.int32)):
        tl.store(counters + at, tl.zeros([SIZE], tl.int32))
        here = key != _LOWEST
        score = key >> 32
        high = tl.max(tl.where(here, score, -2147483648), axis=0)
        low = tl.min(tl.where(here, score, 2147483647), axis=0)
        # The bucket width: the least power of two, from the exponent of the range, that gives at most SIZE buckets.
        bits = ((high - low).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
        shift = tl.maximum(bits - (SIZE.bit_length() - 1), 0).to(tl.int64)
        bucket = tl.where(here, (high - score) >> shift, 0)
        tl.debug_barrier()
        place = tl.atomic_add(counters + bucket, 1, mask=here, sem="relaxed")
        tl.debug_barrier()
        # .cg: atomics update L2, so a line in L1 may be stale.
        count = tl.load(counters + at, cache_modifier=".cg")
        tl.store(begins + at, tl.cumsum(count, axis=0) - count)
        tl.debug_barrier()
        begin = tl.load(begins + bucket, mask=here, other=0)
        tl.store(moved + begin + place, key, mask=here)
        tl.debug_barrier()
        # From here on keys are in the order of buckets, so that neighbouring threads access the same lines.
        here = at < tl.sum(here.to(tl.int32), axis=0)
        key = tl.load(moved + at, mask=here, other=_LOWEST)
        bucket = tl.where(here, (high - (key >> 32)) >> shift, 0)
        begin = tl.load(begins + bucket, mask=here, other=0)
        count = tl.load(counters + bucket, mask=here, other=0, cache_modifier=".cg")
        rank = begin
        again = here & (at < 0)
        for j in range(0, tl.max(count, axis=0)):
            other = tl.load(moved + begin + j, mask=j < count, other=_LOWEST)
            rank += (other > key).to(tl.int32)
            again = again | ((other == key) & (begin + j < at))
        tl.debug_barrier()
        key = tl.where(again, _LOWEST, key)
    here = key != _LOWEST
    there = tl.sum(here.to(tl.int32), axis=0)
    _write(key, rank, here & (rank < k), unit, scores, ids, PROVED)
    nothing = tl.full([SIZE], _LOWEST, tl.int64)
    _write(nothing, at, (at >= there) & (at < k), unit, scores, ids, PROVED)


@triton.jit
def _write_nan(scores, ids, k, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(scores + at, float("nan"), mask=at < k)
    tl.store(ids + at, -1, mask=at < k)


@triton.jit
def write_best(
    q, keys, kept_counts, status, unit, found, counters, begins, moved, scores, ids, k,
    SMALL: tl.constexpr, ROOM: tl.constexpr, PROVED: tl.constexpr,
):  # fmt: skip
    """Write the k largest keys of query q in order; NaN and -1 if the query is not finite; nothing if its count is -1,
    because `filtered_kernel` has written the result.

    Usually only a few more than k keys are kept, and sorting SMALL keys takes half the time of sorting ROOM. counters,
    begins [B, ROOM] int32 and moved [B, ROOM] int64 are scratch.
    """
    # .cg: in `everything_kernel` another program may have written the count.
    many = tl.load(kept_counts + q, cache_modifier=".cg")
    mine = keys + q * ROOM
    best = scores + q * k
    which = ids + q * k
    one = tl.load(unit + q)
    twice = tl.load(found + q * _APART) < k
    if many < 0:
        pass
    elif tl.load(status + q) == 2:
        _write_nan(best, which, k, ROOM)
    elif ROOM <= 256:
        _write_sorted(mine, many, twice, one, best, which, k, ROOM, PROVED)
    else:
        counters += q * ROOM
        begins += q * ROOM
        moved += q * ROOM
        if many <= SMALL:
            _write_ranked(
                mine, many, twice, one, counters, begins, moved, best, which, k, SMALL, PROVED
            )
        else:
            _write_ranked(
                mine, many, twice, one, counters, begins, moved, best, which, k, ROOM, PROVED
            )


@relaunched
@triton.jit
def sort_kernel(
    keys, kept_counts, status, unit, found, counters, begins, moved, scores, ids, k,
    SMALL: tl.constexpr, ROOM: tl.constexpr, PROVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`write_best` with a program per query."""
    wait_for_previous(PDL)
    q = tl.program_id(0).to(tl.int64)
    write_best(
        q, keys, kept_counts, status, unit, found, counters, begins, moved, scores, ids, k, SMALL, ROOM, PROVED
    )  # fmt: skip
