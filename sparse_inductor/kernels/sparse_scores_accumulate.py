"""Scores of a chunk of documents for one query, added up in integers (GPUSparse, section 4.2, made exact).

A posting is one int32: the weight as a signed 19-bit fraction of the collection's largest, then 13 bits of the
document's place in its chunk. A query weight is an int32 fraction of the query's sum. The high half of their product,
and 1, is added to the document's int32 accumulator. Integer additions commute: whatever order the threads come in, the
bits are the same.

Accumulators live in shared memory, through inline PTX (`SHARED`), or in a scratch row of global memory that stays in
L2: the portable way, which the interpreter runs too.

The kernels here find candidates; `sparse_scores_search` proves the set and rescores it exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "CHUNK_BITS",
    "CHUNK_DOCS",
    "MAX_SUM",
    "WEIGHT_STEPS",
    "portable_kernel",
    "shared_kernel",
]

CHUNK_BITS = 13
# 32 KiB of accumulators: with PTX-declared shared memory at most 48 KiB are allowed.
CHUNK_DOCS = 1 << CHUNK_BITS
WEIGHT_STEPS = (1 << 18) - 1  # the largest weight; 19 bits with the sign
MAX_SUM = 1 << 30  # of a query's |integer weights|: accumulators stay within 2^29 and some carries

_ID_MASK = tl.constexpr(CHUNK_DOCS - 1)
_DOC_MAX = tl.constexpr(0x7FFFFFFF)

# One scalar asm declares the array, so that there is one of it; Triton places its own shared memory elsewhere.
_DECLARE = tl.constexpr(
    f"{{ .shared .align 16 .b8 sparse_scores_acc[{4 * CHUNK_DOCS}]; mov.u32 $0, sparse_scores_acc; }}"
)
# A contribution is the high half of the product and 1, see `_contribution`.
_ADD = tl.constexpr(
    "{ .reg .s32 t; mad.hi.s32 t, $2, $3, 1; red.shared.add.u32 [$1], t; mov.u32 $0, 0; }"
)
_ADD_IF = tl.constexpr(
    "{ .reg .s32 t; .reg .pred p; setp.lt.s32 p, $4, $5; mad.hi.s32 t, $2, $3, 1; "
    "@p red.shared.add.u32 [$1], t; mov.u32 $0, 0; }"
)
_LOAD = tl.constexpr("ld.shared.u32 $0, [$1];")
_STORE = tl.constexpr("{ st.shared.u32 [$1], $2; mov.u32 $0, 0; }")
_BARRIER = tl.constexpr("{ bar.sync 0; mov.u32 $0, 0; }")


@triton.jit
def _barrier(SHARED: tl.constexpr):
    if SHARED:
        tl.inline_asm_elementwise(_BARRIER, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.debug_barrier()


@triton.jit
def _contribution(posting, weight):
    """mad.hi.s32 of the whole posting, the document's place being too small to matter, and the weight; plus 1, so that
    what is positive stays so."""
    return ((posting.to(tl.int64) * weight.to(tl.int64)) >> 32).to(tl.int32) + 1


@triton.jit
def _add(acc, posting, weight, at, end, SHARED: tl.constexpr, WHOLE: tl.constexpr):
    """Add one block of postings; those with at >= end are none of the list (WHOLE: all are)."""
    if SHARED:
        address = acc + ((posting & _ID_MASK) << 2)
        if WHOLE:
            tl.inline_asm_elementwise(
                _ADD, "=r,r,r,r", [address, posting, weight], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            tl.inline_asm_elementwise(
                _ADD_IF, "=r,r,r,r,r,r", [address, posting, weight, at, end],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    elif WHOLE:
        value = _contribution(posting, weight)
        tl.atomic_add(acc + (posting & _ID_MASK), value, sem="relaxed")
    else:
        value = _contribution(posting, weight)
        tl.atomic_add(acc + (posting & _ID_MASK), value, mask=at < end, sem="relaxed")


@triton.jit
def _read(acc, place, SHARED: tl.constexpr):
    if SHARED:
        x = tl.inline_asm_elementwise(
            _LOAD, "=r,r", [acc + place * 4], dtype=tl.int32, is_pure=False, pack=1
        )
    else:  # .cg: the additions were made in L2, a line in L1 may be older
        x = tl.load(acc + place, cache_modifier=".cg")
    return x


@triton.jit
def _doc(chunk_docs, c, place, CHUNK: tl.constexpr, LISTED: tl.constexpr):
    """The ids of the documents at these places of chunk c."""
    if LISTED:
        doc = tl.load(chunk_docs + c.to(tl.int64) * CHUNK + place)
    else:
        doc = tl.load(chunk_docs + c) + place
    return doc


@triton.jit
def kth_largest(x, k, HIGH: tl.constexpr, STEPS: tl.constexpr):
    """The k-th largest of less than 2^20 non-negative int32, two bits at a step from bits HIGH + 1 and HIGH down; a
    lower bound of it after STEPS steps."""
    found = 0
    for step in range(STEPS):
        low = HIGH - 2 * step
        one = (x >= found + (1 << low)).to(tl.int64)
        two = (x >= found + (2 << low)).to(tl.int64)
        three = (x >= found + (3 << low)).to(tl.int64)
        counts = tl.sum(one + (two << 20) + (three << 40), axis=0)
        digit = ((counts & 0xFFFFF) >= k).to(tl.int32)
        digit += (((counts >> 20) & 0xFFFFF) >= k).to(tl.int32)
        digit += ((counts >> 40) >= k).to(tl.int32)
        found += digit << low
    return found


@triton.jit
def place_of_term(i, long, n, L):
    """Where term i of n stands in its query's row of L: long ones first, the others at the end."""
    return tl.where(i < long, i, L - n + i)


@triton.jit
def _score_one(
    acc, c, q,
    postings, offsets, bases, chunk_docs, terms, weights, counts, long_counts,
    threshold, found, candidates, deleted,
    V1, L, capacity, rank,
    CHUNK: tl.constexpr, LONG: tl.constexpr, LISTS: tl.constexpr, WIDTH: tl.constexpr,
    READ: tl.constexpr, RANKED: tl.constexpr, LISTED: tl.constexpr, HAS_DELETED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Score chunk c for query q, then append the documents that reach the threshold, or (RANKED) make the threshold:
    the score of rank `rank` in this chunk. LISTED: a chunk of sampled documents, named in `chunk_docs` [., CHUNK].

    Reads 4 bytes a posting of the query's terms in the chunk and 8 bytes a term of offsets; writes 8 bytes a candidate.
    """
    if SHARED:
        zeros = acc + tl.arange(0, CHUNK) * 4
        tl.inline_asm_elementwise(
            _STORE, "=r,r,r", [zeros, tl.zeros([CHUNK], tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        tl.store(acc + tl.arange(0, CHUNK), tl.zeros([CHUNK], tl.int32))
    n = tl.load(counts + q)
    long = tl.load(long_counts + q)
    lists = offsets + c.to(tl.int64) * V1
    chunk = postings + tl.load(bases + c)
    my_terms = terms + q.to(tl.int64) * L
    my_weights = weights + q.to(tl.int64) * L
    _barrier(SHARED)
    # Bounds are loaded anew in every iteration: a scalar that is carried over only to be the lower bound of an inner
    # loop is dropped by Triton 3.6 and 3.7.
    for j in range(0, long):
        t = tl.load(my_terms + j)
        w = tl.load(my_weights + j)
        start = tl.load(lists + t)
        length = tl.load(lists + t + 1) - start
        list_ = chunk + start
        whole = (length // LONG) * LONG
        wide = w + tl.zeros([LONG], tl.int32)
        for i in range(0, whole, LONG):
            at = i + tl.arange(0, LONG)
            _add(acc, tl.load(list_ + at), wide, at, at, SHARED, True)
        at = whole + tl.arange(0, LONG)
        end = length + tl.zeros([LONG], tl.int32)
        _add(acc, tl.load(list_ + at, mask=at < length, other=0), wide, at, end, SHARED, False)
    for j in range(long, n, LISTS):
        which = L - n + j + tl.arange(0, LISTS)
        some = which < L
        t = tl.load(my_terms + which, mask=some, other=0)
        w = tl.load(my_weights + which, mask=some, other=0)
        start = tl.load(lists + t, mask=some, other=0)
        length = tl.load(lists + t + 1, mask=some, other=0) - start
        longest = tl.max(length, axis=0)
        block = (chunk + start)[:, None] + tl.arange(0, WIDTH)[None, :]
        wide = w[:, None] + tl.zeros([LISTS, WIDTH], tl.int32)
        end = length[:, None] + tl.zeros([LISTS, WIDTH], tl.int32)
        for i in range(0, longest, WIDTH):
            at = i + tl.arange(0, WIDTH)[None, :] + tl.zeros([LISTS, WIDTH], tl.int32)
            x = tl.load(block + i, mask=at < end, other=0)
            _add(acc, x, wide, at, end, SHARED, False)
    _barrier(SHARED)
    if RANKED:
        place = tl.arange(0, CHUNK)
        score = _read(acc, place, SHARED)
        if HAS_DELETED:
            doc = _doc(chunk_docs, c, place, CHUNK, LISTED)
            score = tl.where(tl.load(deleted + doc, mask=score > 0, other=0) != 0, 0, score)
        # 18 of 30 bits: a bound from below, 2^-18 of the range away, for little more than half the time
        tl.store(threshold + q, tl.maximum(kth_largest(score, rank, 28, 9), 1))
        tl.store(found + q, 0)
    else:
        least = tl.load(threshold + q)
        mine = candidates + q.to(tl.int64) * capacity
        for i in range(0, CHUNK, READ):
            place = i + tl.arange(0, READ)
            score = _read(acc, place, SHARED)
            if tl.max(score, axis=0) >= least:
                reached = score >= least
                doc = _doc(chunk_docs, c, place, CHUNK, LISTED)
                if HAS_DELETED:
                    gone = tl.load(deleted + doc, mask=reached, other=0)
                    reached = reached & (gone == 0)
                slot = tl.atomic_add(
                    found + q + tl.zeros([READ], tl.int32), 1, mask=reached, sem="relaxed"
                )
                key = (score.to(tl.int64) << 32) | (doc ^ _DOC_MAX).to(tl.int64)
                tl.store(mine + slot, key, mask=reached & (slot < capacity))


@triton.jit(do_not_specialize=["first_chunk", "B", "L", "rank"])
def shared_kernel(
    postings, offsets, bases, chunk_docs, terms, weights, counts, long_counts,
    threshold, found, candidates, deleted,
    first_chunk, B, V1, L, capacity, rank,
    CHUNK: tl.constexpr, LONG: tl.constexpr, LISTS: tl.constexpr, WIDTH: tl.constexpr,
    READ: tl.constexpr, RANKED: tl.constexpr, LISTED: tl.constexpr, HAS_DELETED: tl.constexpr,
):  # fmt: skip
    """One (chunk, query) a program, accumulators in shared memory.

    Queries run fastest, so that a chunk's postings are in L2 while all queries pass over them.
    """
    acc = tl.inline_asm_elementwise(_DECLARE, "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    c = first_chunk + tl.program_id(0) // B
    q = tl.program_id(0) % B
    _score_one(
        acc, c, q,
        postings, offsets, bases, chunk_docs, terms, weights, counts, long_counts,
        threshold, found, candidates, deleted,
        V1, L, capacity, rank,
        CHUNK, LONG, LISTS, WIDTH, READ, RANKED, LISTED, HAS_DELETED, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_chunk", "B", "L", "rank", "work"])
def portable_kernel(
    scratch, work,
    postings, offsets, bases, chunk_docs, terms, weights, counts, long_counts,
    threshold, found, candidates, deleted,
    first_chunk, B, V1, L, capacity, rank,
    CHUNK: tl.constexpr, LONG: tl.constexpr, LISTS: tl.constexpr, WIDTH: tl.constexpr,
    READ: tl.constexpr, RANKED: tl.constexpr, LISTED: tl.constexpr, HAS_DELETED: tl.constexpr,
):  # fmt: skip
    """The same with accumulators in a row of `scratch` [programs, CHUNK]; programs stride over (chunk, query) pairs."""
    me = tl.program_id(0)
    programs = tl.num_programs(0)
    acc = scratch + me.to(tl.int64) * CHUNK
    for turn in range(0, tl.cdiv(work - me, programs)):
        item = me + turn * programs
        _score_one(
            acc, first_chunk + item // B, item % B,
            postings, offsets, bases, chunk_docs, terms, weights, counts, long_counts,
            threshold, found, candidates, deleted,
            V1, L, capacity, rank,
            CHUNK, LONG, LISTS, WIDTH, READ, RANKED, LISTED, HAS_DELETED, False,
        )  # fmt: skip
        tl.debug_barrier()
