"""Selection of the candidates that may be among a query's k best, and the proof that they suffice."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import relaunched
from ..common.pdl import let_next_start
from .accumulate import COUNTERS_APART, kth_largest

_DOC_MAX = tl.constexpr(0x7FFFFFFF)
_APART = tl.constexpr(COUNTERS_APART)


@triton.jit
def select(
    q, candidates, found, threshold, margin, positive, deleted, status, kept, kept_counts, keys, N, k, capacity,
    BLOCK: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr, PROVED: tl.constexpr,
):  # fmt: skip
    """Write the documents that may be among the k best of query q to `kept`, in any order; returns their number.

    If fewer than k documents match, the first k documents are kept, too: they score 0 or are among the matches. Reads 8
    bytes per candidate, writes 4 per kept document. status becomes 1 if there is no proof that the kept documents
    suffice. Without PROVED the keys of the k best by integer scores are written instead.
    """
    n = tl.load(found + q * _APART)
    at = tl.arange(0, BLOCK)
    mine = candidates + q * capacity
    stored = tl.minimum(n, capacity)
    score = (tl.load(mine + at, mask=at < stored, other=0) >> 32).to(tl.int32)
    # All candidates reach the threshold. 12 steps from it end within 2^-12 of the range between the threshold and the
    # largest score, so only a few per thousand more documents are kept.
    least = tl.load(threshold + q)
    kth = least - 1 + kth_largest(tl.maximum(score - least + 1, 0), k, 12)
    all_matches = (n < k) & (least == 1) & (tl.load(positive + q) != 0)
    if PROVED:
        # Rounding to fp32 may make scores equal that differ by an ulp, a relative 2^-23.
        limit = kth - tl.load(margin + q) - (kth >> 22) - 1
    else:
        limit = kth
    keep = (score >= limit) & (at < stored)
    # An atomic counter assigns the places, because a scan, with its barriers, takes longer than everything else.
    counter = found + q * _APART + 1
    place = tl.atomic_add(counter + tl.zeros([BLOCK], tl.int32), 1, mask=keep, sem="relaxed")
    x = tl.load(mine + at, mask=keep, other=0)
    doc = (x & _DOC_MAX).to(tl.int32) ^ _DOC_MAX
    if PROVED:
        tl.store(kept + q * ROOM + place, doc, mask=keep & (place < ROOM))
    else:
        key = (x & -4294967296) | (4294967295 - doc.to(tl.int64))
        tl.store(keys + q * ROOM + place, key, mask=keep & (place < ROOM))
    tl.debug_barrier()
    many = tl.load(counter, cache_modifier=".cg")
    proved = (n >= k) & (n <= capacity) & (many <= ROOM)
    if PROVED:
        proved = proved & (limit >= least)
    before = tl.load(status + q)
    if all_matches & (before == 0):
        more = 0
        i = 0
        while (i < N) & (more < k):
            id_ = i + tl.arange(0, PART)
            live = (tl.load(deleted + id_, mask=id_ < N, other=1) == 0).to(tl.int32)
            nth = more + tl.cumsum(live, axis=0) - 1
            tl.store(kept + q * ROOM + many + nth, id_, mask=(live != 0) & (nth < k))
            more += tl.sum(live, axis=0)
            i += PART
        many += tl.minimum(more, k)
        proved = proved | (more >= 0)
    many = tl.where(proved & (before == 0), many, 0)
    tl.store(kept_counts + q, many)
    tl.store(status + q, tl.where(proved, before, tl.maximum(before, 1)))
    return many


@relaunched
@triton.jit
def select_kernel(
    candidates, found, threshold, margin, positive, deleted, status, kept, kept_counts, keys, N, k, capacity,
    BLOCK: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr, PROVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`select` with a program per query. PDL: `rescore_kernel` starts while this kernel ends."""
    let_next_start(PDL)
    q = tl.program_id(0).to(tl.int64)
    select(
        q, candidates, found, threshold, margin, positive, deleted, status, kept, kept_counts, keys, N, k, capacity,
        BLOCK, PART, ROOM, PROVED,
    )  # fmt: skip
