"""Exact scores computed from rows: for a query's candidates, and for all documents if a query has no proof.

A score is an fp64 sum over the document's row, rounded once to fp32. Score and id are one int64 key, ordered as (score,
lower id first).
"""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl

from ..common.cuda import CudaKernel
from ..common.launch import relaunched
from ..common.pdl import wait_for_previous
from .sort import write_best

_DELETED = tl.constexpr(-(1 << 31))  # below every ordered score
_NONE = tl.constexpr(0x7FFFFFFF)  # no query
_TICKETS = tl.constexpr(
    1 << 13
)  # tickets per turn: one per part, and one per program that finds no part

# The largest vocabulary for which rescore.cu filters rows by a query's terms.
FILTERED_UP_TO = 1 << 16
# Terms per row that rescore.cu reads unconditionally, in four rounds of 32.
READ_ANYHOW = 128
# The largest number of keys of a query that a block of rescore.cu writes in order.
RANKED_UP_TO = 1024
filtered_kernel = CudaKernel(Path(__file__).with_suffix(".cu"), "rescore", __name__)


@triton.jit
def _ordered(score):
    """fp32 as an int32 with the same order; -0 equals 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(ordered, doc):
    return (ordered.to(tl.int64) << 32) | (4294967295 - doc.to(tl.int64))


@triton.jit
def _scale_of(doc, scales, chunk_docs, chunks, N: tl.constexpr, DEPTH: tl.constexpr):
    """(scale, zero) of 8-bit documents: the values of the last chunk that begins at or before each of them."""
    low = tl.zeros([N], tl.int32)
    high = tl.zeros([N], tl.int32) + chunks
    for _ in range(DEPTH):
        middle = (low + high) // 2
        begins = tl.load(chunk_docs + middle, mask=middle < chunks, other=2147483647)
        low = tl.where(begins <= doc, middle, low)
        high = tl.where(begins <= doc, high, middle)
    return tl.load(scales + 2 * low), tl.load(scales + 2 * low + 1)


@triton.jit
def _entries(terms, weights, at, some, scale, zero, BYTES: tl.constexpr, UNSIGNED16: tl.constexpr):
    """(terms, fp32 weights) of entries; 0 where `some` is False."""
    t = tl.load(terms + at, mask=some, other=0).to(tl.int32)
    if UNSIGNED16:
        t = t & 0xFFFF
    w = tl.load(weights + at, mask=some, other=0).to(tl.float32)
    if BYTES:
        w = tl.where(some, (w - zero) * scale, 0.0)
    return t, w


@relaunched
@triton.jit
def rescore_kernel(
    query, offsets, terms, weights, scales, chunk_docs, chunks, members, kept, kept_counts, keys, progress, V,
    BYTES: tl.constexpr, UNSIGNED16: tl.constexpr, ROOM: tl.constexpr, DOCS: tl.constexpr, DEPTH: tl.constexpr,
    BITS: tl.constexpr, LEFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (q, part) computes exact scores of the kept documents of query q, DOCS at a time. BITS: members [B, V /
    32] is the mask of a query's terms. LEFT: add to progress[2] the number of queries with results still to be written.

    Reads the terms of a kept document's row (2 bytes per entry) once, and the weights of the query's terms; writes 8
    bytes per document.
    """
    q = tl.program_id(0).to(tl.int64)
    query += q * V
    members += q * tl.cdiv(V, 32)
    kept += q * ROOM
    keys += q * ROOM
    wait_for_previous(PDL)
    n = tl.load(kept_counts + q)
    if LEFT:
        tl.atomic_add(progress + 2, 1, sem="relaxed")
    for first in range(tl.program_id(1) * DOCS, n, tl.num_programs(1) * DOCS):
        i = first + tl.arange(0, DOCS)
        here = i < n
        # Not loaded an iteration ahead: if the bound of the loop over entries depends on a carried value, Triton 3.6
        # keeps the bound of the first iteration.
        doc = tl.load(kept + i, mask=here, other=0)
        start = tl.load(offsets + doc)
        length = tl.where(here, tl.load(offsets + doc + 1) - start, 0).to(tl.int32)
        if BYTES:
            scale, zero = _scale_of(doc, scales, chunk_docs, chunks, DOCS, DEPTH)
        else:
            scale, zero = tl.full([DOCS], 1.0, tl.float32), tl.zeros([DOCS], tl.float32)
        # A warp reads one row, 32 entries at a time, with 96 in flight. Entries are the first axis, because Triton
        # places lanes along it if no axis is contiguous.
        acc = tl.zeros([32, DOCS], tl.float64)
        for j in range(0, tl.max(length, axis=0), 96):
            for u in tl.static_range(3):
                within = j + 32 * u + tl.arange(0, 32)[:, None]
                some = within < length[None, :]
                at = start[None, :] + within
                t, w = _entries(
                    terms, weights, at, some, scale[None, :], zero[None, :], BYTES, UNSIGNED16
                )
                if BITS:
                    # A query's mask stays in L1, so a sector of the query's row is read only for terms it contains.
                    word = tl.load(members + (t >> 5), mask=some, other=0)
                    some = some & (((word >> (t & 31)) & 1) != 0)
                x = tl.load(query + t, mask=some, other=0.0)
                acc += w.to(tl.float64) * x.to(tl.float64)
        score = tl.sum(acc, axis=0).to(tl.float32)
        tl.store(keys + i, _key(_ordered(score), doc), mask=here)


# --- All documents ----------------------------------------------------------------------------------------------------


@triton.jit
def _drawn(progress, ticket, turn):
    """`ticket`, or a new ticket if it belongs to an earlier turn."""
    if ticket < turn * _TICKETS:
        tl.atomic_max(progress, turn * _TICKETS, sem="relaxed")
        ticket = tl.atomic_add(progress, 1, sem="relaxed")
    return ticket


@triton.jit
def _next_drawn(progress):
    """Mark the last ticket's part as done and draw the next ticket."""
    tl.debug_barrier()
    tl.atomic_add(progress + 1, 1, sem="acq_rel")
    return tl.atomic_add(progress, 1, sem="relaxed")


@triton.jit
def _all_done(progress, turn, parts):
    """Wait until all parts of this turn and of earlier ones are done."""
    while tl.atomic_add(progress + 1, 0, sem="acquire") < (turn + 1) * parts:
        pass
    tl.debug_barrier()


@triton.jit
def _next_unproved(status, after, B):
    """The first query from `after` on without a proof."""
    found = _NONE
    for b in range(0, B, 1024):
        q = b + tl.arange(0, 1024)
        wrong = tl.load(status + q, mask=(q >= after) & (q < B), other=0) == 1
        found = tl.minimum(found, tl.min(tl.where(wrong, q, _NONE), axis=0))
    return found


@triton.jit
def _score_everything(
    query, offsets, terms, weights, scales, chunk_docs, chunks, deleted, status, keys, kept_counts,
    table, scores, counts, part_counts, progress, V, N, B, k,
    BYTES: tl.constexpr, UNSIGNED16: tl.constexpr, ROOM: tl.constexpr, GROUP: tl.constexpr,
    DOCS: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the keys of the k best of all documents for queries with status 1: see `everything_kernel`. Returns (the
    unused ticket, the next turn)."""
    parts = tl.num_programs(0)
    span = tl.cdiv(N, parts)
    g = tl.arange(0, GROUP)
    turn = 0
    ticket = -1
    wrong = _next_unproved(status, 0, B)
    while wrong < B:
        which = tl.full([GROUP], _NONE, tl.int32)
        for i in tl.static_range(GROUP):
            which = tl.where(g == i, wrong, which)
            wrong = _next_unproved(status, wrong + 1, B) if wrong < B else wrong
        ticket = _drawn(progress, ticket, turn)
        while ticket < turn * _TICKETS + parts:
            part = ticket - turn * _TICKETS
            for t0 in range(part * READ, V, parts * READ):
                t = t0 + tl.arange(0, READ)
                row = tl.where(which < B, which, 0).to(tl.int64) * V
                x = tl.load(query + row[None, :] + t[:, None], mask=(t < V)[:, None], other=0.0)
                tl.store(table + t[:, None] * GROUP + g[None, :], x, mask=(t < V)[:, None])
            if part == 0:
                at = tl.arange(0, 32)[:, None] * GROUP + g[None, :]
                tl.store(counts + at, tl.zeros([32, GROUP], tl.int32))
            ticket = _next_drawn(progress)
        _all_done(progress, turn, parts)
        turn += 1

        ticket = _drawn(progress, ticket, turn)
        while ticket < turn * _TICKETS + parts:
            low = (ticket - turn * _TICKETS) * span
            high = tl.minimum(low + span, N)
            for first in range(low, high, DOCS):
                doc = first + tl.arange(0, DOCS)
                here = doc < high
                start = tl.load(offsets + doc, mask=here, other=0)
                length = (tl.load(offsets + doc + 1, mask=here, other=0) - start).to(tl.int32)
                if BYTES:
                    scale, zero = _scale_of(doc, scales, chunk_docs, chunks, DOCS, DEPTH)
                else:
                    scale, zero = tl.full([DOCS], 1.0, tl.float32), tl.zeros([DOCS], tl.float32)
                acc = tl.zeros([DOCS, GROUP], tl.float64)
                for j in range(0, tl.max(length, axis=0), WIDTH):
                    within = j + tl.arange(0, WIDTH)[None, :]
                    some = within < length[:, None]
                    at = start[:, None] + within
                    t, w = _entries(
                        terms, weights, at, some, scale[:, None], zero[:, None], BYTES, UNSIGNED16
                    )
                    x = tl.load(table + (t * GROUP)[:, :, None] + g[None, None, :])
                    acc += tl.sum(w.to(tl.float64)[:, :, None] * x.to(tl.float64), axis=1)
                gone = tl.load(deleted + doc, mask=here, other=0) != 0
                ordered = tl.where(gone[:, None], _DELETED, _ordered(acc.to(tl.float32)))
                place = g.to(tl.int64)[None, :] * N + doc[:, None]
                tl.store(scores + place, ordered, mask=here[:, None])
            ticket = _next_drawn(progress)
        _all_done(progress, turn, parts)
        turn += 1

        kth = tl.zeros([GROUP], tl.int64) - 2147483648
        for step in range(32):
            trial = kth + (tl.full([], 1, tl.int64) << (31 - step))
            ticket = _drawn(progress, ticket, turn)
            while ticket < turn * _TICKETS + parts:
                low = (ticket - turn * _TICKETS) * span
                high = tl.minimum(low + span, N)
                reached = tl.zeros([GROUP], tl.int32)
                for first in range(low, high, READ):
                    doc = first + tl.arange(0, READ)
                    place = g.to(tl.int64)[:, None] * N + doc[None, :]
                    x = tl.load(scores + place, mask=(doc < high)[None, :], other=_DELETED)
                    reached += tl.sum((x.to(tl.int64) >= trial[:, None]).to(tl.int32), axis=1)
                tl.atomic_add(counts + step * GROUP + g, reached, sem="relaxed")
                ticket = _next_drawn(progress)
            _all_done(progress, turn, parts)
            turn += 1
            enough = tl.load(counts + step * GROUP + g, cache_modifier=".cg") >= k
            kth = tl.where(enough, trial, kth)

        for i in tl.static_range(GROUP):
            q = tl.sum(tl.where(g == i, which, 0), axis=0).to(tl.int64)
            limit = tl.sum(tl.where(g == i, kth, 0), axis=0)
            mine = scores + tl.full([], i, tl.int64) * N
            ticket = _drawn(progress, ticket, turn)
            while ticket < turn * _TICKETS + parts:
                part = ticket - turn * _TICKETS
                low = part * span
                high = tl.minimum(low + span, N)
                above = 0
                equal = 0
                for first in range(low, high, READ):
                    doc = first + tl.arange(0, READ)
                    x = tl.load(mine + doc, mask=doc < high, other=_DELETED).to(tl.int64)
                    live = x != _DELETED
                    above += tl.sum((live & (x > limit)).to(tl.int32), axis=0)
                    equal += tl.sum((live & (x == limit)).to(tl.int32), axis=0)
                tl.store(part_counts + 2 * part, above)
                tl.store(part_counts + 2 * part + 1, equal)
                ticket = _next_drawn(progress)
            _all_done(progress, turn, parts)
            turn += 1

            ticket = _drawn(progress, ticket, turn)
            while ticket < turn * _TICKETS + parts:
                part = ticket - turn * _TICKETS
                low = part * span
                high = tl.minimum(low + span, N)
                all_above = 0
                all_equal = 0
                next_above = 0
                next_equal = 0
                own = 0
                for p in range(0, parts, 256):
                    other = p + tl.arange(0, 256)
                    a = tl.load(
                        part_counts + 2 * other, mask=other < parts, other=0, cache_modifier=".cg"
                    )
                    e = tl.load(
                        part_counts + 2 * other + 1,
                        mask=other < parts,
                        other=0,
                        cache_modifier=".cg",
                    )
                    all_above += tl.sum(a, axis=0)
                    all_equal += tl.sum(e, axis=0)
                    next_above += tl.sum(tl.where(other < part, a, 0), axis=0)
                    next_equal += tl.sum(tl.where(other < part, e, 0), axis=0)
                    own += tl.sum(tl.where(other == part, a + e, 0), axis=0)
                if q < B:
                    if part == 0:
                        tl.store(kept_counts + q, tl.minimum(all_above + all_equal, k))
                    if own > 0:
                        for first in range(low, high, READ):
                            doc = first + tl.arange(0, READ)
                            x = tl.load(mine + doc, mask=doc < high, other=_DELETED)
                            live = x != _DELETED
                            better = (live & (x.to(tl.int64) > limit)).to(tl.int32)
                            same = (live & (x.to(tl.int64) == limit)).to(tl.int32)
                            rank = next_equal + tl.cumsum(same, axis=0) - 1
                            place = tl.where(
                                better != 0,
                                next_above + tl.cumsum(better, axis=0) - 1,
                                all_above + rank,
                            )
                            wanted = (better != 0) | ((same != 0) & (all_above + rank < k))
                            tl.store(keys + q * ROOM + place, _key(x, doc), mask=wanted)
                            next_above += tl.sum(better, axis=0)
                            next_equal += tl.sum(same, axis=0)
                ticket = _next_drawn(progress)
            _all_done(progress, turn, parts)
            turn += 1
    return ticket, turn


@relaunched
@triton.jit(do_not_specialize=["N", "B", "k"])
def everything_kernel(
    query, offsets, terms, weights, scales, chunk_docs, chunks, deleted, status, keys, kept_counts,
    table, scores, counts, part_counts, progress, unit, found, counters, begins, moved, best, ids, V, N, B, k,
    BYTES: tl.constexpr, UNSIGNED16: tl.constexpr, ROOM: tl.constexpr, GROUP: tl.constexpr,
    DOCS: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, DEPTH: tl.constexpr,
    SORTED: tl.constexpr, SMALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Exact results from all documents for queries with status 1; returns at once without such queries.

    It is one launch without host synchronisation, also in a CUDA graph. The work is divided into turns with one part
    per program in the grid; a turn begins when all parts of the previous turn are done. Programs draw parts as tickets
    (progress: tickets drawn, parts done), so a program waits only for parts of programs that are running. The number of
    resident programs therefore does not matter, whereas a cooperative launch would wait until the whole GPU is free.

    GROUP queries are computed together: their weights are adjacent in `table` [V, GROUP], so that an entry gathers one
    sector for all of them. A part is a range of documents, scored into `scores` [GROUP, N]. The k-th best score is
    found bit by bit with counts [32, GROUP]. Documents above it, and those equal to it with the lowest ids, are written
    to keys, at places computed from part_counts [programs, 2] of all parts. SORTED: also write the scores and ids of
    these queries and of those that rescoring has not written; progress[2] is their number.
    """
    wait_for_previous(PDL)
    if SORTED:
        left = tl.load(progress + 2, cache_modifier=".cg") > 0  # rarely true
    else:
        left = True
    if left:
        ticket, turn = _score_everything(
            query, offsets, terms, weights, scales, chunk_docs, chunks, deleted, status, keys, kept_counts,
            table, scores, counts, part_counts, progress, V, N, B, k,
            BYTES, UNSIGNED16, ROOM, GROUP, DOCS, WIDTH, READ, DEPTH,
        )  # fmt: skip
        if SORTED:
            parts = tl.num_programs(0)
            ticket = _drawn(progress, ticket, turn)
            while ticket < turn * _TICKETS + parts:
                part = ticket - turn * _TICKETS
                for i in range(0, tl.cdiv(B - part, parts)):
                    q = (part + i * parts).to(tl.int64)
                    write_best(
                        q, keys, kept_counts, status, unit, found, counters, begins, moved, best, ids, k,
                        SMALL, ROOM, True,
                    )  # fmt: skip
                ticket = _next_drawn(progress)
