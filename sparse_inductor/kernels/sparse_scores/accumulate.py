"""Integer scores of a chunk of documents for one query (GPUSparse, section 4.2, made exact).

A posting is one int32: the weight as a signed 19-bit fraction of the collection's largest weight, then 13 bits for the
document's place in its chunk. A query weight is an int32 fraction of the query's sum. The high half of their product,
made odd, is added to the document's int32 accumulator. Integer additions commute, so the result does not depend on the
order in which threads add.

Accumulators are in shared memory (accumulate.cu). The portable kernel, which also runs in the interpreter, keeps them
in a scratch row of global memory that stays in L2.

These kernels find candidates; `sparse_scores.search` proves that they suffice and rescores them exactly.
"""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl

from ..common.cuda import CudaKernel
from ..common.launch import relaunched

CHUNK_BITS = 13
# 32 KiB of accumulators: more than 48 KiB of shared memory would require setting an attribute of the kernel.
CHUNK_DOCS = 1 << CHUNK_BITS
WEIGHT_STEPS = (1 << 18) - 1  # the largest weight; 19 bits with the sign
# Bound of a query's sum of |integer weights|: accumulators stay within 2^29, plus 1 per term.
MAX_SUM = 1 << 30

# Words between the candidate counters of two queries, a cache line: atomics on the same line would be serialised.
COUNTERS_APART = 32

_APART = tl.constexpr(COUNTERS_APART)
_ID_MASK = tl.constexpr(CHUNK_DOCS - 1)
_DOC_MAX = tl.constexpr(0x7FFFFFFF)

shared_kernel = CudaKernel(Path(__file__).with_suffix(".cu"), "score_chunks", __name__)


@triton.jit
def _contribution(posting, weight):
    """The high half of posting * weight; the document's bits in the posting are too small to matter. It is made odd, so
    that a positive contribution is not 0."""
    return ((posting.to(tl.int64) * weight.to(tl.int64)) >> 32).to(tl.int32) | 1


@triton.jit
def kth_largest(x, k, STEPS: tl.constexpr):
    """The k-th largest of non-negative int32 by bisection. With fewer than 31 steps it is a lower bound, within
    2^-STEPS of the largest. 0 if fewer than k are positive."""
    width = tl.max(x, axis=0) + 1
    found = 0
    for _ in range(STEPS):
        width = (width + 1) >> 1
        enough = tl.sum((x >= found + width).to(tl.int32), axis=0) >= k
        found = tl.where(enough, found + width, found)
    return found


@triton.jit
def place_of_term(i, long, n, L):
    """Place of term i of n in its query's row of L: terms with long lists are at the start, the others at the end."""
    return tl.where(i < long, i, L - n + i)


@relaunched
@triton.jit(do_not_specialize=["B", "L", "rank", "work"])
def portable_kernel(
    scratch, work, postings, offsets, bases, chunk_docs, terms, weights, counts, long_counts,
    threshold, found, candidates, deleted, B, V1, L, capacity, rank,
    CHUNK: tl.constexpr, LONG: tl.constexpr, LISTS: tl.constexpr, WIDTH: tl.constexpr,
    READ: tl.constexpr, RANKED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """`score_chunks` of accumulate.cu with accumulators in a row of `scratch` [programs, CHUNK]; programs stride over
    (chunk, query) pairs."""
    me = tl.program_id(0)
    programs = tl.num_programs(0)
    acc = scratch + me.to(tl.int64) * CHUNK
    for turn in range(0, tl.cdiv(work - me, programs)):
        c = (me + turn * programs) // B
        q = (me + turn * programs) % B
        tl.store(acc + tl.arange(0, CHUNK), tl.zeros([CHUNK], tl.int32))
        n = tl.load(counts + q)
        long = tl.load(long_counts + q)
        lists = offsets + c.to(tl.int64) * V1
        chunk = postings + tl.load(bases + c)
        my_terms = terms + q.to(tl.int64) * L
        my_weights = weights + q.to(tl.int64) * L
        tl.debug_barrier()
        # Bounds are loaded in every iteration: Triton 3.6 and 3.7 drop a carried scalar that is only used as the lower
        # bound of an inner loop.
        for j in range(0, long):
            t = tl.load(my_terms + j)
            w = tl.load(my_weights + j)
            start = tl.load(lists + t)
            length = tl.load(lists + t + 1) - start
            for i in range(0, length, LONG):
                at = i + tl.arange(0, LONG)
                x = tl.load(chunk + start + at, mask=at < length, other=0)
                place = acc + (x & _ID_MASK)
                tl.atomic_add(place, _contribution(x, w), mask=at < length, sem="relaxed")
        for j in range(long, n, LISTS):
            which = L - n + j + tl.arange(0, LISTS)
            some = which < L
            t = tl.load(my_terms + which, mask=some, other=0)
            w = tl.load(my_weights + which, mask=some, other=0)
            start = tl.load(lists + t, mask=some, other=0)
            length = tl.load(lists + t + 1, mask=some, other=0) - start
            block = (chunk + start)[:, None] + tl.arange(0, WIDTH)[None, :]
            for i in range(0, tl.max(length, axis=0), WIDTH):
                here = i + tl.arange(0, WIDTH)[None, :] < length[:, None]
                x = tl.load(block + i, mask=here, other=0)
                place = acc + (x & _ID_MASK)
                tl.atomic_add(place, _contribution(x, w[:, None]), mask=here, sem="relaxed")
        tl.debug_barrier()
        # .cg: atomics update L2, so a line in L1 may be stale.
        if RANKED:
            place = tl.arange(0, RANKED)
            score = tl.load(acc + place, cache_modifier=".cg")
            doc = tl.load(chunk_docs + c.to(tl.int64) * CHUNK + place)
            score = tl.where(tl.load(deleted + doc, mask=score > 0, other=0) != 0, 0, score)
            # 12 steps end within 2^-12 of the largest score: a few per cent more documents reach the threshold, in a
            # third of the time.
            tl.store(threshold + q, tl.maximum(kth_largest(score, rank, 12), 1))
            tl.store(found + q * _APART, 0)
        else:
            least = tl.load(threshold + q)
            mine = candidates + q.to(tl.int64) * capacity
            for i in range(0, CHUNK, READ):
                place = i + tl.arange(0, READ)
                score = tl.load(acc + place, cache_modifier=".cg")
                if tl.max(score, axis=0) >= least:
                    reached = score >= least
                    if LISTED:
                        doc = tl.load(chunk_docs + c.to(tl.int64) * CHUNK + place)
                    else:
                        doc = tl.load(chunk_docs + c) + place
                    gone = tl.load(deleted + doc, mask=reached, other=0)
                    reached = reached & (gone == 0)
                    count = found + q * _APART + tl.zeros([READ], tl.int32)
                    slot = tl.atomic_add(count, 1, mask=reached, sem="relaxed")
                    key = (score.to(tl.int64) << 32) | (doc ^ _DOC_MAX).to(tl.int64)
                    tl.store(mine + slot, key, mask=reached & (slot < capacity))
        tl.debug_barrier()
