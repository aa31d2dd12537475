"""Exact scores from the rows: of a query's candidates, and of all documents where candidates prove nothing.

A score is an fp64 sum over the document's row, rounded once to fp32. Scores and ids travel as one int64 key that sorts
as (score, lower id first).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import relaunched
from ..common.pdl import wait_for_previous
from . import ptx
from .accumulate import COUNTERS_APART
from .sort import write_best

_DELETED = tl.constexpr(-(1 << 31))  # below every ordered score
_NONE = tl.constexpr(0x7FFFFFFF)  # no query
_TICKETS = tl.constexpr(1 << 13)  # of a turn: one a part, and one a program that finds none left
_APART = tl.constexpr(COUNTERS_APART)

# In shared memory: bits of the terms a query has, by which most entries of a row are passed over (see
# `sparse_scores.ptx.mark`), the places of the rows a block goes on with, 8 bytes each or, with scales, 16, and lists.
FILTER_TERMS = 1023  # where a quarter of the bits is set, weights might as well be loaded at once
FILTERED_UP_TO = 1 << 16  # terms of 16 bits
_ROWS_BYTES = 8192
_FILTER = tl.constexpr(ptx.FILTER_BYTES)
_WARPS = 8
_TURN = tl.constexpr(ptx.TURN)
_LENGTH_AT = tl.constexpr(ptx.LENGTH_AT)
_MOST_FILTERED = tl.constexpr(FILTER_TERMS)
_SHARED = ptx.FILTER_BYTES + _ROWS_BYTES + ptx.PASSED_BYTES
_DECLARE = tl.constexpr(
    f"{{ .shared .align 128 .b8 sparse_scores_rows[{_SHARED}]; mov.u32 $0, sparse_scores_rows; }}"
)
_CLEAR = tl.constexpr(ptx.clear(ptx.FILTER_BYTES // 4, 32 * _WARPS))
_MARK = tl.constexpr(ptx.mark())
_ROWS = tl.constexpr(_ROWS_BYTES // 8)
_ROWS_SCALED = tl.constexpr(_ROWS_BYTES // 16)
_RESCORE = tl.constexpr(ptx.rescore("singles", _ROWS_BYTES // 8))
_RESCORE_HALVES = tl.constexpr(ptx.rescore("halves", _ROWS_BYTES // 8))
_RESCORE_BYTES = tl.constexpr(ptx.rescore("bytes", _ROWS_BYTES // 16))
_RANK = tl.constexpr(ptx.rank())
RANKED_UP_TO = ptx.RANKED  # keys
_RANKED = tl.constexpr(RANKED_UP_TO)
_ORDINAL = tl.constexpr(ptx.ordinal())
_CLASSES = tl.constexpr(8)  # of lengths, 32 apart
_COUNTERS = tl.constexpr(ptx.FILTER_BYTES + _ROWS_BYTES)  # of them, where lists come later
_COUNT = tl.constexpr("ld.shared.u32 $0, [$1];")
_CLEAR_COUNT = tl.constexpr("{ st.shared.u32 [$1], 0; mov.u32 $0, 0; }")
# Not `tl.store`, for which threads would exchange through shared memory what they store.
_KEEP = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.u32 [$1], $2; mov.u32 $0, 0; }"
)
_PLACE = tl.constexpr("{ st.shared.b64 [$1], $2; mov.u32 $0, 0; }")
_SCALES = tl.constexpr("{ st.shared.v2.f32 [$1], {$2, $3}; mov.u32 $0, 0; }")
_BARRIER = tl.constexpr("{ bar.sync 0; mov.u32 $0, 0; }")


@triton.jit
def _ordered(score):
    """fp32 as an int32 that sorts the same way; -0 as 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(ordered, doc):
    return (ordered.to(tl.int64) << 32) | (4294967295 - doc.to(tl.int64))


@triton.jit
def _scale_of(doc, scales, chunk_docs, chunks, N: tl.constexpr, DEPTH: tl.constexpr):
    """(scale, zero) of 8-bit documents: of the last chunk that begins at or before them."""
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
    """Terms and fp32 weights of rows; 0 and 0 where there is none."""
    t = tl.load(terms + at, mask=some, other=0).to(tl.int32)
    if UNSIGNED16:
        t = t & 0xFFFF
    w = tl.load(weights + at, mask=some, other=0).to(tl.float32)
    if BYTES:
        w = tl.where(some, (w - zero) * scale, 0.0)
    return t, w


@triton.jit
def _barrier():
    tl.inline_asm_elementwise(_BARRIER, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _set_filter(table, query_terms, count, long, L):
    """Set the query's filter up in shared memory."""
    tl.inline_asm_elementwise(_CLEAR, "=r,r", [table], dtype=tl.int32, is_pure=False, pack=1)
    _barrier()
    tl.inline_asm_elementwise(
        _MARK, "=r,r,l,r,r,r", [table, query_terms.to(tl.int64), count, long, L - count],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _by_length(table, length, here):
    """Where each of a block's rows is to go, so that a warp's rows end together: the longest first, in any order else.
    Sets and clears counters behind two barriers."""
    kind = _CLASSES - tl.minimum((length + 31) // 32, _CLASSES)
    kind = tl.where(here, kind, _CLASSES + 1)
    counters = table + _COUNTERS
    ordinal = tl.inline_asm_elementwise(
        _ORDINAL, "=r,r,r", [counters + kind * 0, kind], dtype=tl.int32, is_pure=False, pack=1
    )
    _barrier()
    for c in tl.static_range(_CLASSES + 1):
        count = tl.inline_asm_elementwise(
            _COUNT, "=r,r", [counters + 4 * c], dtype=tl.int32, is_pure=False, pack=1
        )
        ordinal += tl.where(kind > c, count, 0)
    return ordinal


@triton.jit
def _score_filtered(
    table, query, query_terms, count, long, L, offsets, terms, weights, scales, chunk_docs, chunks, kept, n, keys,
    BYTES: tl.constexpr, DEPTH: tl.constexpr, SET: tl.constexpr,
):  # fmt: skip
    """The documents of every program_id(1)-th turn; the query by its filter, which may be SET already, and its row."""
    ROWS: tl.constexpr = _ROWS_SCALED if BYTES else _ROWS
    places = table + _FILTER
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    for first in range(0, tl.cdiv(n, _TURN * parts) * _TURN, ROWS):
        r = first + tl.arange(0, ROWS)
        i = (r // _TURN * parts + part) * _TURN + r % _TURN
        here = i < n
        doc = tl.load(kept + i, mask=here, other=0)
        start = tl.load(offsets + doc, mask=here, other=0)
        end = tl.load(offsets + doc + 1, mask=here, other=0)
        if first == 0:
            if not SET:  # while the first are looked up
                _set_filter(table, query_terms, count, long, L)
        else:
            _barrier()  # the rows before are done with
        tl.inline_asm_elementwise(
            _CLEAR_COUNT, "=r,r", [table + _COUNTERS + 4 * tl.arange(0, 32)], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
        _barrier()
        place = _by_length(table, (end - start).to(tl.int32) + (start & 7).to(tl.int32), here)
        s = first + place
        at = places + place * 8
        tl.inline_asm_elementwise(
            _PLACE, "=r,r,l", [at, start | ((end - start) << _LENGTH_AT)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        if BYTES:
            scale, zero = _scale_of(doc, scales, chunk_docs, chunks, ROWS, DEPTH)
            tl.inline_asm_elementwise(
                _SCALES, "=r,r,f,f", [at + 8 * ROWS, scale, zero], dtype=tl.int32, is_pure=False, pack=1
            )  # fmt: skip
        i = (s // _TURN * parts + part) * _TURN + s % _TURN
        tl.inline_asm_elementwise(
            _KEEP, "=r,l,r,r", [(kept + i).to(tl.int64), doc, here.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        _barrier()
        HALF: tl.constexpr = weights.dtype.element_ty == tl.float16
        CODE: tl.constexpr = _RESCORE_BYTES if BYTES else (_RESCORE_HALVES if HALF else _RESCORE)
        tl.inline_asm_elementwise(
            CODE, "=r,r,r,l,l,l,l,l,r,r,r",
            [
                table, places, terms.to(tl.int64), weights.to(tl.int64), kept.to(tl.int64), keys.to(tl.int64),
                query.to(tl.int64), n, first * parts + part * _TURN, parts * _TURN,
            ],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _score_kept(
    query, members, offsets, terms, weights, scales, chunk_docs, chunks, kept, n, keys,
    BYTES: tl.constexpr, UNSIGNED16: tl.constexpr, DOCS: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """DOCS documents at a time, every program_id(1)-th lot; the query by its bits and row, or its row."""
    for first in range(tl.program_id(1) * DOCS, n, tl.num_programs(1) * DOCS):
        i = first + tl.arange(0, DOCS)
        here = i < n
        # Not loaded an iteration ahead: where the bound of the loop over entries depends on what is carried over,
        # Triton 3.6 keeps the first iteration's.
        doc = tl.load(kept + i, mask=here, other=0)
        start = tl.load(offsets + doc)
        length = tl.where(here, tl.load(offsets + doc + 1) - start, 0).to(tl.int32)
        if BYTES:
            scale, zero = _scale_of(doc, scales, chunk_docs, chunks, DOCS, DEPTH)
        else:
            scale, zero = tl.full([DOCS], 1.0, tl.float32), tl.zeros([DOCS], tl.float32)
        # A row is one warp's, 32 entries at a time; STEPS times as many are under way at once.
        # Entries are the first axis, which Triton lets lanes run along where it cannot tell which is better.
        acc = tl.zeros([32, DOCS], tl.float64)
        for j in range(0, tl.max(length, axis=0), 32 * STEPS):
            for u in tl.static_range(STEPS):
                within = j + 32 * u + tl.arange(0, 32)[:, None]
                some = within < length[None, :]
                at = start[None, :] + within
                t, w = _entries(
                    terms, weights, at, some, scale[None, :], zero[None, :], BYTES, UNSIGNED16
                )
                if BITS:
                    # A query's bits stay in L1; of its row a sector is read for each term that is in it.
                    word = tl.load(members + (t >> 5), mask=some, other=0)
                    some = some & (((word >> (t & 31)) & 1) != 0)
                x = tl.load(query + t, mask=some, other=0.0)
                acc += w.to(tl.float64) * x.to(tl.float64)
        score = tl.sum(acc, axis=0).to(tl.float32)
        tl.store(keys + i, _key(_ordered(score), doc), mask=here)


@relaunched
@triton.jit
def rescore_kernel(
    query, offsets, terms, weights, scales, chunk_docs, chunks,
    query_terms, query_counts, long_counts, members, kept, kept_counts, keys, found, scores, ids, progress,
    V, L, k,
    BYTES: tl.constexpr, UNSIGNED16: tl.constexpr, ROOM: tl.constexpr,
    DOCS: tl.constexpr, DEPTH: tl.constexpr, FILTERED: tl.constexpr, RANKED: tl.constexpr,
    BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Exact scores of the kept documents of a query; programs (q, part).

    FILTERED: a filter in shared memory tells most of what is not in the query, where it has few enough terms. BITS:
    members [B, V / 32] says which terms a query has. Reads the terms of the rows (2 bytes an
    entry) once a kept document, and weights where the query has the term; writes 8 bytes each.
    RANKED: the only part of a query writes the k best, too, where that is simple, and leaves a count of -1; where not,
    it counts the query in progress[2].
    """
    q = tl.program_id(0).to(tl.int64)
    row = query + q * V
    members += q * tl.cdiv(V, 32)
    kept += q * ROOM
    keys += q * ROOM
    if FILTERED:
        count = tl.load(query_counts + q)
        long = tl.load(long_counts + q)
        query_terms += q * L
        table = tl.inline_asm_elementwise(_DECLARE, "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        if PDL:  # noqa: SIM102, which the compiler knows
            # Terms are `_prepare_kernel`'s, which had ended when `select_kernel`, the one in front, started.
            if count <= _MOST_FILTERED:
                _set_filter(table, query_terms, count, long, L)
    wait_for_previous(PDL)
    n = tl.load(kept_counts + q)
    if RANKED:
        simple = False
        if FILTERED:
            # Where documents may have come twice, there were fewer than k candidates.
            simple = (n >= k) & (n <= _RANKED) & (tl.load(found + q * _APART) >= k)
            simple = simple & (count <= _MOST_FILTERED)
        if not simple:
            tl.atomic_add(progress + 2, 1, sem="relaxed")
    if FILTERED:
        if count <= _MOST_FILTERED:
            _score_filtered(
                table, row, query_terms, count, long, L, offsets, terms, weights,
                scales, chunk_docs, chunks, kept, n, keys, BYTES, DEPTH, PDL,
            )  # fmt: skip
            if RANKED:  # noqa: SIM102, which the compiler knows
                if simple:
                    _barrier()
                    tl.inline_asm_elementwise(
                        _RANK, "=r,r,l,r,r,l,l",
                        [table, keys.to(tl.int64), n, k, (scores + q * k).to(tl.int64), (ids + q * k).to(tl.int64)],
                        dtype=tl.int32, is_pure=False, pack=1,
                    )  # fmt: skip
                    tl.store(kept_counts + q, -1)
        else:
            _score_kept(
                row, members, offsets, terms, weights, scales, chunk_docs, chunks, kept, n, keys,
                BYTES, UNSIGNED16, DOCS, DEPTH, False, 3,
            )  # fmt: skip
    else:
        _score_kept(
            row, members, offsets, terms, weights, scales, chunk_docs, chunks, kept, n, keys,
            BYTES, UNSIGNED16, DOCS, DEPTH, BITS, 3,
        )  # fmt: skip


# --- All documents ----------------------------------------------------------------------------------------------------


@triton.jit
def _drawn(progress, ticket, turn):
    """A ticket: the one there is, unless that is of a turn before."""
    if ticket < turn * _TICKETS:
        tl.atomic_max(progress, turn * _TICKETS, sem="relaxed")
        ticket = tl.atomic_add(progress, 1, sem="relaxed")
    return ticket


@triton.jit
def _next_drawn(progress):
    """The next ticket, now that what the last one stood for is done."""
    tl.debug_barrier()
    tl.atomic_add(progress + 1, 1, sem="acq_rel")
    return tl.atomic_add(progress, 1, sem="relaxed")


@triton.jit
def _all_done(progress, turn, parts):
    """Wait until all parts of this turn and those before are done."""
    while tl.atomic_add(progress + 1, 0, sem="acquire") < (turn + 1) * parts:
        pass
    tl.debug_barrier()


@triton.jit
def _next_unproved(status, after, B):
    """The first query from `after` on whose answer is not proved."""
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
    """The keys of the k best of all documents for the queries of status 1: see `everything_kernel`. Returns the ticket
    that is left, and the turn that comes."""
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
    """The k best of all documents, exactly, for the queries of status 1; nothing where there are none.

    One launch, in a CUDA graph, too, and without a look by the host. Work goes in turns, each of as many parts as there
    are programs, and a turn begins when all parts of the one before are done. A program draws its parts (progress: the
    tickets drawn, the parts done), so that what it waits for is in the hands of programs that run: nothing is asked of
    how many run at once, where a cooperative launch would wait for the whole GPU to be free, every time.

    GROUP queries go together: their weights lie side by side in `table` [V, GROUP], so that an entry gathers one sector
    for all. A part is a range of the documents, scored into `scores` [GROUP, N]; the k-th best score is found bit by
    bit, counts [32, GROUP]; documents above it, and of those equal to it the lowest, are written to keys, at places
    that follow from every part's part_counts [programs, 2].
    SORTED: these answers, and all others that `rescore_kernel` has left, are written, too; progress[2] says how many.
    """
    wait_for_previous(PDL)
    if SORTED:
        left = tl.load(progress + 2, cache_modifier=".cg") > 0  # most often not
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
