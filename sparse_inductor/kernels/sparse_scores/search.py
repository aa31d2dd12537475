"""Search of an index on a GPU: candidates by integer scores, a proof that they suffice, and exact rescoring.

    1. Queries become lists of (term, integer weight), long posting lists first, with a bound on the integer error.
    2. A sample of documents from the whole collection gives a threshold that somewhat more than k documents reach.
    3. All chunks are scored; documents that reach the threshold are appended to their query's candidates.
    4. The score of the k-th best candidate minus twice the error bound is a proved limit: no document below it is among
       the k best. Candidates above it are rescored from the rows, in fp64, rounded to fp32, and sorted with ties by
       lowest id.
    5. A query without a proof (too many candidates, too few although there are enough matches, or a limit below the
       threshold) is answered by exact scores of all documents, in a launch that otherwise does nothing. In a large
       batch, that launch also sorts the few queries that the rescoring kernel does not sort itself.

The [B, N] scores are never stored. Launches depend on sizes only, so the host does not synchronise with the GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparse_inductor.layers import launches

from ...aten import sparse_scores as aten
from ...aten.top import best_of
from ..common.arch import capability
from ..common.launch import relaunched, sm_count
from ..common.pdl import pdl_options
from . import documents
from .accumulate import (
    CHUNK_BITS,
    CHUNK_DOCS,
    COUNTERS_APART,
    MAX_SUM,
    WEIGHT_STEPS,
    kth_largest,
    place_of_term,
    portable_kernel,
    shared_kernel,
)
from .rescore import (
    FILTERED_UP_TO,
    RANKED_UP_TO,
    READ_ANYHOW,
    everything_kernel,
    filtered_kernel,
    rescore_kernel,
)
from .select import select_kernel
from .sort import sort_kernel

LISTS = 11  # the number of tensors in a `Packed` before the rows

_APART = tl.constexpr(COUNTERS_APART)
_UNIT = tl.constexpr(2.0 ** (32 - CHUNK_BITS) / WEIGHT_STEPS)
_SUM_BITS = tl.constexpr(MAX_SUM.bit_length() - 1)

# The largest k. One program per query selects from up to 4 k candidates and sorts up to 2 k of them, in registers.
_MOST_K = 2048
# There is one chunk of sampled documents per _SAMPLED chunks, which adds 3 % of postings.
_SAMPLED = 32
# The largest number of queries per batch of launches: their candidates take 64 MiB or more.
_MOST_QUERIES = 2048
# The largest number of terms of a query; a query with more is scored from the rows.
_MOST_TERMS = 4096
# Bytes for the exact scores of all documents for some queries at a time: the larger part of a search's memory.
_EVERYTHING_BYTES = 80 << 20
# (programs per SM, warps) of `everything_kernel`: two fit once the preceding kernels have ended. The interpreter runs
# programs one after the other, so that one program must be able to compute everything.
_EVERYTHING = (2, 8)
_EVERYTHING_ELSEWHERE = (2, 32)
# (weights of a query that are read at a time, warps): 8 per thread, for four programs per SM, or for one if there are
# no more programs than SMs.
_READ = (2048, 8)
_READ_ALONE = (8192, 32)
# Postings per chunk from which on a list counts as long.
_LONG_LIST = 192
# C++ types of weights; fp16 is read as its bits.
_STORED = {torch.float32: "float", torch.float16: "unsigned short", torch.uint8: "unsigned char"}


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Postings in order of chunks: post int32 [nnz], offsets int32 [chunks, V + 1] relative to bases int64 [chunks].

    docs: the first document of each chunk [chunks], or the sampled documents themselves [chunks, CHUNK_DOCS].
    """

    post: torch.Tensor
    offsets: torch.Tensor
    bases: torch.Tensor
    docs: torch.Tensor

    @property
    def count(self) -> int:
        return self.bases.numel()

    def first(self, chunks: int) -> Chunks:
        """The first `chunks` chunks."""
        end = int(self.bases[chunks]) if chunks < self.count else self.post.numel()
        return Chunks(
            self.post[:end], self.offsets[:chunks], self.bases[:chunks], self.docs[:chunks]
        )


@dataclasses.dataclass(frozen=True)
class Packed:
    """The result of `pack`, whose tensors `search` takes in this order."""

    chunks: Chunks
    sample: Chunks
    is_long: torch.Tensor  # int32 [V / 32], a bit per term: whether its lists count as long
    df: torch.Tensor  # int64 [V], documents per term
    # fp64 [2]: the largest |weight|, which is WEIGHT_STEPS as an integer weight; the least weight, or 0 if none is
    # negative.
    extremes: torch.Tensor
    offsets: torch.Tensor  # int64 [N + 1], of the rows
    terms: torch.Tensor  # [nnz + READ_ANYHOW]
    weights: torch.Tensor  # [nnz]
    scales: torch.Tensor  # fp32 [chunks, 2]: a weight is scale * (stored - zero)

    def tensors(self) -> list[torch.Tensor]:
        c, s = self.chunks, self.sample
        return [
            c.post, c.offsets, c.bases, c.docs, s.post, s.offsets, s.bases, s.docs,
            self.is_long, self.df, self.extremes, self.offsets, self.terms, self.weights, self.scales,
        ]  # fmt: skip

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Packed:
        return Packed(Chunks(*tensors[:4]), Chunks(*tensors[4:8]), *tensors[8:])


# Packing


def pack(
    segments: Sequence[Any], num_terms: int, kept: int = 0, old: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """The tensors of a `Packed` for an index's segments, on their device, with the segments in order.

    Takes 4 bytes per posting and 4 (V + 1) per chunk, a thirtieth of that again for the sample, and the rows in one
    tensor. The chunks of the first `kept` segments are taken from `old`, unless a new largest weight changes the unit
    of all integer weights.
    """
    device = segments[0].offsets.device if segments else torch.device("cuda")
    new = segments[kept:]
    largest = least = 0.0
    for s in new:
        if s.nnz:
            low, high = torch.stack(torch.aminmax(s.values())).tolist()
            largest, least = max(largest, high, -low), min(least, low)
    before = Packed.of(old) if kept else None
    if before is not None:
        known = before.extremes.tolist()
        if largest > known[0]:
            return pack(segments, num_terms)
        largest, least = known[0], min(least, known[1])
    parts, scales, first = [], [], 0
    df = torch.zeros(num_terms, dtype=torch.int64, device=device)
    if before is not None:
        df += before.df
        first = sum(s.count for s in segments[:kept])
        chunks = sum(-(-s.count // CHUNK_DOCS) for s in segments[:kept])
        parts.append(before.chunks.first(chunks))
        scales.append(before.scales[:chunks])
        gone = before.offsets.numel() - 1 - first
        if gone:  # the last segment is packed again: subtract its old terms
            start = int(before.offsets[first])
            ids = before.terms[start : int(before.offsets[-1])].long() & (
                0xFFFF if num_terms <= 1 << 16 else -1
            )
            df -= torch.bincount(ids, minlength=num_terms)
    for s in new:
        terms, values, lengths = s.term_ids(), s.values(), s.offsets.diff()
        rows = torch.repeat_interleave(lengths, output_size=s.nnz)
        made = _chunked(rows, terms, values, s.count, num_terms, largest)
        parts.append(dataclasses.replace(made, docs=made.docs + first))
        zero = 127.0 if s.signed else 0.0
        scales.append(torch.tensor([[s.scale, zero]], device=device).expand(made.count, 2))
        df += torch.bincount(terms, minlength=num_terms)
        first += s.count
    N = first
    offsets, at = [torch.zeros(1, dtype=torch.int64, device=device)], 0
    for s in segments:
        offsets.append(s.offsets[1:].long() + at)
        at += s.nnz
    narrow = torch.int16 if num_terms <= 1 << 16 else torch.int32
    empty = torch.zeros(0, device=device)
    rows = (
        torch.cat(offsets),
        torch.cat(
            [*(s.terms for s in segments), torch.zeros(READ_ANYHOW, dtype=narrow, device=device)]
        ),
        torch.cat([s.weights for s in segments] or [empty]),
        torch.cat(scales or [empty.view(0, 2)]).contiguous(),
    )
    chunks = _joined(parts, num_terms, device)
    sample = _sample(segments, N, num_terms, largest, device)
    long = _bits(df.double() * CHUNK_DOCS / max(N, 1) >= _LONG_LIST)
    extremes = torch.tensor([largest, least], dtype=torch.float64, device=device)
    return Packed(chunks, sample, long, df, extremes, *rows).tensors()


def _chunked(
    rows: torch.Tensor, terms: torch.Tensor, values: torch.Tensor, n: int, V: int, largest: float
) -> Chunks:
    """Entries of documents 0 to n - 1 as chunks."""
    device = rows.device
    count = -(-n // CHUNK_DOCS)
    key = (rows >> CHUNK_BITS) * V + terms
    key, order = torch.sort(key, stable=True)
    edges = torch.arange(count * V + 1, device=device)
    starts = torch.searchsorted(key, edges)
    bases = starts[: count * V : V] if count else starts[:0]
    offsets = torch.empty(count, V + 1, dtype=torch.int32, device=device)
    for c in range(count):
        offsets[c] = (starts[c * V : (c + 1) * V + 1] - bases[c]).int()
    fraction = values[order].double() * (WEIGHT_STEPS / largest if largest else 0.0)
    # Never 0: a match has a positive score if all weights are positive.
    fraction = torch.where((fraction > 0) & (fraction < 1), 1.0, fraction.round())
    post = (fraction.long() << CHUNK_BITS) | (rows[order] & (CHUNK_DOCS - 1))
    docs = torch.arange(count, device=device, dtype=torch.int32) * CHUNK_DOCS
    return Chunks(post.int(), offsets, bases.clone(), docs)


def _joined(parts: Sequence[Chunks], V: int, device: torch.device) -> Chunks:
    bases, at = [], 0
    for p in parts:
        bases.append(p.bases + at)
        at += p.post.numel()
    none = torch.zeros(0, dtype=torch.int32, device=device)
    return Chunks(
        torch.cat([p.post for p in parts] or [none]),
        torch.cat([p.offsets for p in parts] or [none.view(0, V + 1)]),
        torch.cat(bases or [none.long()]),
        torch.cat([p.docs for p in parts] or [none]).int(),
    )


def sampled(N: int) -> tuple[int, int]:
    """(chunks, documents in each) of a collection's sample; (0, 0) for fewer than two chunks."""
    chunks = -(-N // CHUNK_DOCS)
    if chunks < 2:
        return 0, 0
    # For a small collection one chunk, a twenty-fifth of the documents, is enough. A large collection has a wider
    # sample of at least four chunks for a second pass: with fewer, the number of candidates would depend on about fifty
    # documents.
    if chunks <= _SAMPLED:
        return 1, min(CHUNK_DOCS, max(N // 25, CHUNK_DOCS // 8))
    return max(4, chunks // _SAMPLED), CHUNK_DOCS


def _sample(
    segments: Sequence[Any], N: int, V: int, largest: float, device: torch.device
) -> Chunks:
    """Chunks of documents sampled at even steps from the whole collection; each chunk is an even sample itself."""
    count, size = sampled(N)
    if not count:
        return _joined([], V, device)
    wanted = torch.arange(count * size, device=device)
    # Chunk c takes every count-th sampled document, so that each chunk covers the whole collection.
    wanted = wanted.view(size, count).t().reshape(-1)
    docs = (wanted * N) // (count * size)
    rows, terms, values, first = [], [], [], 0
    for s in segments:
        here = ((docs >= first) & (docs < first + s.count)).nonzero().squeeze(1)
        local = docs[here] - first
        lengths = s.offsets.diff()[local]
        total = int(lengths.sum())
        step = torch.arange(total, device=device)
        ends = lengths.cumsum(0)
        inside = step - torch.repeat_interleave(ends - lengths, lengths, output_size=total)
        at = torch.repeat_interleave(s.offsets[local], lengths, output_size=total) + inside
        rows.append(torch.repeat_interleave(here, lengths, output_size=total))
        terms.append(s.term_ids()[at])
        values.append(s.values()[at])
        first += s.count
    made = _chunked(
        torch.cat(rows), torch.cat(terms), torch.cat(values), count * CHUNK_DOCS, V, largest
    )
    docs = torch.nn.functional.pad(docs, (0, count * CHUNK_DOCS - docs.numel()))
    return dataclasses.replace(made, docs=docs.view(count, CHUNK_DOCS).int().contiguous())


def _bits(flags: torch.Tensor) -> torch.Tensor:
    """Booleans packed into int32 words, the first in the lowest bit."""
    words = torch.nn.functional.pad(flags.long(), (0, -flags.numel() % 32)).view(-1, 32)
    packed = (words << torch.arange(32, device=flags.device)).sum(1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


# Kernels around the scoring


@relaunched
@triton.jit(do_not_specialize=["V", "L"])
def _prepare_kernel(
    query, is_long, extremes, terms, weights, counts, long_counts, margin, unit, positive, status, threshold, found,
    slots, progress, members, V, L, BLOCK: tl.constexpr, SORTED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A program per query: reads its V weights once, writes its terms, 8 bytes each, and initialises the counters of
    the other kernels.

    If SORTED, terms with long lists are stored in terms[q, :long_counts] and the other terms at the end of the row;
    otherwise all terms count as long. Places are assigned by an atomic counter, because a scan would wait for all
    threads. The order of terms is therefore not deterministic, which does not change sums of integers. BITS: write
    members [B, V / 32], the mask of a query's terms.

    status: 0; 1 if integer scores cannot be trusted or there are more than L terms; 2 if a weight is NaN or infinite.
    margin: twice the error bound of an integer score, in units of `unit`. positive: whether no weight of the query and
    the index is negative. counts are 0 unless status is 0.
    """
    q = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mine = terms + q * L
    raw = weights + q * L
    slot = slots + 2 * q
    tl.store(slot, 0)
    tl.store(slot + 1, 0)
    tl.debug_barrier()
    least = tl.zeros([BLOCK], tl.float32)
    row = query + q * V + at
    coming = tl.load(row, mask=at < V, other=0.0)
    after = tl.load(row + BLOCK, mask=at + BLOCK < V, other=0.0)
    for i in range(0, V, BLOCK):
        t = i + at
        w = coming
        coming = after
        after = tl.load(row + i + 2 * BLOCK, mask=t + 2 * BLOCK < V, other=0.0)
        some = w != 0
        if BITS:
            bits = tl.reshape(some.to(tl.int32) << (at & 31), [BLOCK // 32, 32])
            word = (i >> 5) + tl.arange(0, BLOCK // 32)
            inside = word < tl.cdiv(V, 32)
            tl.store(members + q * tl.cdiv(V, 32) + word, tl.sum(bits, axis=1), mask=inside)
        if SORTED:
            short = 1 - ((tl.load(is_long + (t >> 5), mask=some, other=0) >> (t & 31)) & 1)
        else:
            short = tl.zeros([BLOCK], tl.int32)
        n = tl.atomic_add(slot + short, 1, mask=some, sem="relaxed")
        place = tl.where(short != 0, L - 1 - n, n)
        kept = some & (n < L)
        tl.store(mine + place, t, mask=kept)
        tl.store(raw + place, w.to(tl.int32, bitcast=True), mask=kept)
        least = tl.minimum(least, w)
    tl.debug_barrier()
    all_long = tl.load(slot, cache_modifier=".cg")
    all_short = tl.load(slot + 1, cache_modifier=".cg")
    terms_of = all_long + all_short
    stored = tl.minimum(terms_of, L)
    sum_ = tl.full([], 0.0, tl.float64)
    for i in range(0, stored, BLOCK):
        place = place_of_term(i + at, all_long, terms_of, L)
        w = tl.load(raw + place, mask=i + at < stored, other=0, cache_modifier=".cg")
        sum_ += tl.sum(tl.abs(w.to(tl.float32, bitcast=True)).to(tl.float64), axis=0)
    sound = sum_ < float("inf")
    # Scores that overflow fp32, or are denormal, may be equal although the integers differ.
    most = sum_ * tl.load(extremes)
    trusted = (most < 1e38) & ((most > 1e-24) | (most == 0)) & (terms_of <= L)
    usable = (sound & trusted).to(tl.int32)
    # The power of two, by its bits, that scales the sum to just below MAX_SUM: scaling by it is exact.
    bits = tl.where((usable != 0) & (sum_ > 0), sum_, 1.0).to(tl.int64, bitcast=True)
    biased = -((bits >> 52) & 0x7FF) + (2 * 1023 + _SUM_BITS - 1)
    scale = (biased << 52).to(tl.float64, bitcast=True)
    # Errors: 1 per term from the shift, and 1/4 per term from the rounded query weight. One step of every document
    # weight is 2^-19 of the query's sum; half of it is due to rounding, half to never rounding to 0. The document's
    # bits in a posting add as much again.
    bound = 1.25 * terms_of + sum_ * scale * (2.0 / (1 << 19)) + 2.0
    tl.store(margin + q, (2.0 * tl.where(usable != 0, bound, 0.0)).to(tl.int32) + 1)
    tl.store(status + q, tl.where(sound, tl.where(trusted, 0, 1), 2))
    tl.store(unit + q, (tl.load(extremes) * _UNIT / scale).to(tl.float32))
    tl.store(positive + q, (tl.min(least, axis=0) >= 0) & (tl.load(extremes + 1) >= 0))
    tl.store(counts + q, terms_of * usable)
    tl.store(long_counts + q, all_long * usable)
    # Threshold 1 makes every document with a positive score a candidate, if there is no sample.
    tl.store(threshold + q, 1)
    tl.store(found + q * _APART, 0)
    tl.store(found + q * _APART + 1, 0)
    if q == 0:
        tl.store(progress + tl.arange(0, 4), tl.zeros([4], tl.int32))
    for i in range(0, stored, BLOCK):
        place = place_of_term(i + at, all_long, terms_of, L)
        keep = tl.where(usable != 0, i + at < stored, False)
        w = tl.load(raw + place, mask=keep, other=0, cache_modifier=".cg")
        scaled = w.to(tl.float32, bitcast=True).to(tl.float64) * scale
        whole = tl.where(scaled < 0, scaled - 0.5, scaled + 0.5).to(tl.int32)
        tl.store(raw + place, whole, mask=keep)


@relaunched
@triton.jit
def _threshold_kernel(candidates, found, threshold, capacity, rank, BLOCK: tl.constexpr):
    """A program per query: raise its threshold to the score of rank `rank` among the sampled candidates."""
    q = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(found + q * _APART), capacity)
    at = tl.arange(0, BLOCK)
    x = tl.load(candidates + q * capacity + at, mask=at < n, other=0)
    better = kth_largest((x >> 32).to(tl.int32), rank, 14)
    tl.store(threshold + q, tl.maximum(tl.load(threshold + q), better))
    tl.store(found + q * _APART, 0)


# Searching


def _uses_shared(device: torch.device) -> bool:
    """Whether the CUDA C++ kernels can run: an NVIDIA GPU from Volta on, with native integer atomics in shared
    memory."""
    return device.type == "cuda" and torch.version.hip is None and capability(device) >= (7, 0)


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Per-query state between the launches: 8 bytes per term of the longest query, 8 bytes per candidate."""

    terms: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    long_counts: torch.Tensor
    margin: torch.Tensor
    positive: torch.Tensor
    status: torch.Tensor
    threshold: torch.Tensor
    found: torch.Tensor
    kept_counts: torch.Tensor
    unit: torch.Tensor
    candidates: torch.Tensor
    kept: torch.Tensor
    keys: torch.Tensor
    begins: torch.Tensor
    moved: torch.Tensor
    slots: torch.Tensor
    progress: torch.Tensor
    members: torch.Tensor

    @staticmethod
    def of(
        B: int, L: int, capacity: int, room: int, members: int, device: torch.device
    ) -> _Scratch:
        """members: number of terms of the queries' bit masks."""
        new = lambda *shape, dtype=torch.int32: torch.empty(*shape, dtype=dtype, device=device)
        names = (
            "counts",
            "long_counts",
            "margin",
            "positive",
            "status",
            "threshold",
            "kept_counts",
        )
        # Rows are aligned to 16 bytes for any B: Triton compiles a kernel again for other alignments.
        numbers = new(len(names), -(-B // 4) * 4)[:, :B]
        return _Scratch(
            terms=new(B, L), weights=new(B, L), unit=new(B, dtype=torch.float32),
            found=new(B, COUNTERS_APART), candidates=new(B, capacity, dtype=torch.int64), kept=new(B, room),
            keys=new(B, room, dtype=torch.int64), begins=new(B, room), moved=new(B, room, dtype=torch.int64),
            slots=new(B, 2), progress=new(4), members=new(B, -(-members // 32)), **dict(zip(names, numbers)),
        )  # fmt: skip


def rank_in_sample(expected: float, k: int) -> int:
    """The rank in a sample at which a document's score becomes the threshold, with a margin of five standard
    deviations. expected: the expected number of the k best documents in the sample."""
    return min(k, math.ceil(expected + 5 * math.sqrt(expected) + 8))


def search(
    query: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    counts: Sequence[int],
    deleted: torch.Tensor,
    k: int,
    shared: bool | None = None,
    proved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 scores and int64 ids [B, k] of the best documents; see `SparseIndex.search`.

    query: fp32 [B, V]. shared: use the shared-memory kernels instead of the portable ones (default: if the GPU supports
    them). proved: False returns the approximate integer scores, to measure the cost of exactness.

    The host does not synchronise with the GPU, so the search can be captured in a CUDA graph.
    """
    p = Packed.of(tensors)
    B = query.shape[0]
    N = sum(counts)
    query = query.contiguous()
    k_here = min(k, N)
    scores = torch.empty(B, k_here, dtype=torch.float32, device=query.device)
    ids = torch.empty(B, k_here, dtype=torch.int64, device=query.device)
    if not (B and k_here):
        return _filled(scores, ids, k)
    if p.sample.count == 0 or k_here > _MOST_K or not launches(query):
        _exact(query, p, counts, deleted, scores, ids)
        return _filled(scores, ids, k)
    shared = _uses_shared(query.device) if shared is None else shared
    with torch.cuda.device_of(query):
        for b in range(0, B, _MOST_QUERIES):
            part = slice(b, b + _MOST_QUERIES)
            _candidates(query[part], p, deleted, scores[part], ids[part], shared, proved)
    return _filled(scores, ids, k)


def _filled(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    more = k - scores.shape[1]
    if not more:
        return scores, ids
    pad = torch.nn.functional.pad
    lost = (ids[:, :1] == -1) & scores[:, :1].isnan() if ids.shape[1] else None
    scores, ids = pad(scores, (0, more), value=float("-inf")), pad(ids, (0, more), value=-1)
    return (scores if lost is None else scores.masked_fill(lost, float("nan"))), ids


def _candidates(query, p: Packed, deleted, scores, ids, shared: bool, proved: bool) -> None:
    B, V = query.shape
    N = p.offsets.numel() - 1
    k = scores.shape[1]
    # 1.3 k to 2.4 k documents reach the threshold, or some hundreds for a small k.
    capacity = max(2048, triton.next_power_of_2(3 * k))
    # Room for fewer than k matches of a query and k further documents, or for the k best and documents close to them.
    room = triton.next_power_of_2(max(2 * k, k + 24))
    s = _Scratch.of(B, min(V, _MOST_TERMS), capacity, room, 0 if shared else V, query.device)
    alone = query.is_cuda and sm_count(query.device) >= B
    block, warps = _READ_ALONE if alone else _READ
    block = max(32, min(triton.next_power_of_2(V), block))
    _prepare_kernel[(B,)](
        query, p.is_long, p.extremes, s.terms, s.weights, s.counts, s.long_counts, s.margin, s.unit, s.positive,
        s.status, s.threshold, s.found, s.slots, s.progress, s.members, V, s.terms.shape[1],
        BLOCK=block, SORTED=not shared, BITS=not shared, num_warps=min(warps, max(1, block // 128)), maxnreg=64,
    )  # fmt: skip
    run = functools.partial(_score, s, p, deleted, capacity, shared)
    share = sampled(N)[1] / N
    rank = rank_in_sample(k * share, k)
    run(p.sample, 1, rank, listed=True)
    # About rank / share documents reach the threshold. If these are too many, a second pass over all sampled documents
    # raises it.
    if rank / share > 2.2 * k and p.sample.count > 1:
        better = rank_in_sample(k * share * p.sample.count, k)
        run(p.sample, p.sample.count, listed=True)
        _threshold_kernel[(B,)](
            s.candidates, s.found, s.threshold, capacity, better, BLOCK=capacity, num_warps=8
        )
    run(p.chunks, p.chunks.count)
    starts = pdl_options(query) if proved else {"PDL": False}
    select_kernel[(B,)](
        s.candidates, s.found, s.threshold, s.margin, s.positive, deleted, s.status, s.kept, s.kept_counts,
        s.keys, N, k, capacity, BLOCK=capacity, PART=2048, ROOM=room, PROVED=proved, PDL=starts["PDL"],
        num_warps=8, maxnreg=64,
    )  # fmt: skip
    if proved and _rescore(query, p, deleted, s, k, shared, scores, ids, starts):
        return
    sort_kernel[(B,)](
        s.keys, s.kept_counts, s.status, s.unit, s.found, s.kept, s.begins, s.moved, scores, ids, k,
        SMALL=triton.next_power_of_2(k), ROOM=room, PROVED=proved, num_warps=8, maxnreg=64, **starts,
    )  # fmt: skip


def _rescore(
    query,
    p: Packed,
    deleted,
    s: _Scratch,
    k: int,
    shared: bool,
    scores,
    ids,
    starts: dict[str, bool],
) -> bool:
    """Compute the exact keys of kept documents, and of the k best of all documents for queries without a proof. Returns
    whether scores and ids have been written, too."""
    B, V = query.shape
    N = p.offsets.numel() - 1
    room = s.kept.shape[1]
    rows = (query, p.offsets, p.terms, p.weights, p.scales, p.chunks.docs, p.chunks.count)
    kinds = {
        "BYTES": p.weights.dtype == torch.uint8, "UNSIGNED16": p.terms.dtype == torch.int16, "ROOM": room,
        "DEPTH": max(1, p.chunks.count.bit_length()),
    }  # fmt: skip
    aligned = (p.terms.data_ptr() | p.weights.data_ptr()) % 16 == 0  # rows are read in vectors
    filtered = shared and V <= FILTERED_UP_TO and aligned
    # Every block of the filtered kernel initialises a filter, which takes a microsecond, so there are no more blocks
    # than run at once: four per SM. A program of the portable kernel scores 16 documents at a time.
    slots = 4 * sm_count(query.device) if query.is_cuda else 1
    parts = max(
        1, min(triton.cdiv(k, 64), slots // B) if filtered else min(triton.cdiv(k, 16), 2048 // B)
    )
    ranked = _ranks(filtered, parts, k)
    if filtered:
        filtered_kernel.launch(
            (B, parts), *rows, s.terms, s.counts, s.long_counts, s.kept, s.kept_counts, s.keys, s.found, scores, ids,
            s.progress, V, s.terms.shape[1], k,
            STORED=_STORED[p.weights.dtype], ROOM=room, APART=COUNTERS_APART, RANKED=ranked, RANKED_UP_TO=RANKED_UP_TO,
            READ_ANYHOW=READ_ANYHOW, PDL=starts["PDL"], num_warps=8,
        )  # fmt: skip
    else:
        rescore_kernel[(B, parts)](
            *rows, s.members, s.kept, s.kept_counts, s.keys, s.progress, V, DOCS=16, BITS=not shared, LEFT=ranked,
            num_warps=8, maxnreg=64, **kinds, **starts,
        )  # fmt: skip
    group = max(1, min(4, B, _EVERYTHING_BYTES // (4 * N)))
    group = 1 << (group.bit_length() - 1)
    new = lambda *shape, dtype=torch.int32: torch.empty(*shape, dtype=dtype, device=query.device)
    cuda = query.is_cuda
    each, warps = _EVERYTHING if cuda else _EVERYTHING_ELSEWHERE
    programs = each * (sm_count(query.device) if cuda else 1)
    everything_kernel[(programs,)](
        *rows, deleted, s.status, s.keys, s.kept_counts,
        new(V, group, dtype=torch.float32), new(group, N), new(32, group), new(programs, 2), s.progress,
        s.unit, s.found, s.kept, s.begins, s.moved, scores, ids,
        V, N, B, k, GROUP=group, DOCS=2 * warps, WIDTH=32, READ=64 * warps, SORTED=ranked,
        SMALL=triton.next_power_of_2(k), num_warps=warps, **kinds, **starts,
        **({"maxnreg": 128} if cuda else {}),
    )  # fmt: skip
    return ranked


def _ranks(filtered: bool, parts: int, k: int) -> bool:
    """Whether `filtered_kernel` writes the results of most queries, and `everything_kernel` the results of the others.
    This requires one part per query, and that the usual number of kept documents, a few more than k, can be ranked."""
    return filtered and parts == 1 and k + 24 <= RANKED_UP_TO


def _score(
    s: _Scratch, p: Packed, deleted, capacity: int, shared: bool,
    c: Chunks, count: int, rank: int = 0, listed: bool = False,
) -> None:  # fmt: skip
    """Run the scoring kernel on the first `count` chunks of c."""
    B, L = s.terms.shape
    args = (
        c.post, c.offsets, c.bases, c.docs, s.terms, s.weights, s.counts, s.long_counts,
        s.threshold, s.found, s.candidates, deleted, B, p.df.numel() + 1, L, capacity, rank,
    )  # fmt: skip
    ranked = triton.next_power_of_2(sampled(p.offsets.numel() - 1)[1]) if rank else 0
    flags = {"CHUNK": CHUNK_DOCS, "RANKED": ranked, "LISTED": listed}
    work = count * B
    if shared:
        # 16 warps were slower.
        shared_kernel.launch((work,), *args, **flags, APART=COUNTERS_APART, num_warps=8)
        return
    # 32 KiB each: 16 MiB of scratch, well within L2
    programs = min(work, 4 * sm_count(deleted.device) if deleted.is_cuda else 4)
    scratch = torch.empty(programs, CHUNK_DOCS, dtype=torch.int32, device=deleted.device)
    # LONG = 512: two postings per thread. Tiles of 32 x 32 keep the lanes of a warp on one short list.
    portable_kernel[(programs,)](
        scratch, work, *args, **flags, LONG=512, LISTS=32, WIDTH=32, READ=min(2048, CHUNK_DOCS), num_warps=8
    )  # fmt: skip


def _exact(query, p: Packed, counts, deleted, scores, ids) -> None:
    """Write the best documents by exact scores of all documents, computed one block at a time; NaN for a query that is
    not finite."""
    table, V = documents.table_of(query, True), query.shape[1]
    score_rows = documents.score_rows if launches(query) else _score_rows
    sound = torch.isfinite(query).all(1, keepdim=True)

    def parts():
        values = p.weights if p.weights.dtype != torch.uint8 else None
        step = max(1024, documents.BLOCK // query.shape[0])
        for at in range(0, sum(counts), step):
            n = min(step, sum(counts) - at)
            if values is None:
                block = _bytes_block(score_rows, table, V, p, at, n)
            else:
                block = score_rows(table, p.offsets, p.terms, values, at, n, torch.float32, V, True)
            yield at, block.t().masked_fill(deleted[at : at + n], float("-inf"))

    found, which = best_of(parts(), scores.shape[1])
    which = torch.where(found == float("-inf"), -1, which)
    scores.copy_(torch.where(sound, found, float("nan")))
    ids.copy_(torch.where(sound, which, -1))


def _score_rows(table, offsets, ids, values, first, count, out_dtype, V, wide) -> torch.Tensor:
    """`documents.score_rows` by ATen, for rows with offsets."""
    offsets = offsets[first : first + count + 1]
    here = slice(int(offsets[0]), int(offsets[-1]))
    terms = ids[here].long()
    terms = terms & 0xFFFF if ids.dtype == torch.int16 else terms
    query = table[:V].t().to(torch.float64 if wide else torch.float32)
    docs = aten.Documents(offsets - here.start, terms, values[here])
    return torch.cat([scores for _, scores in aten.blocks(query, docs)], 1).t().to(out_dtype)


def _bytes_block(score_rows, table, V: int, p: Packed, first: int, n: int) -> torch.Tensor:
    """Scores of a block of documents whose 8-bit weights are converted to fp32."""
    offsets = p.offsets[first : first + n + 1]
    start, end = int(offsets[0]), int(offsets[-1])
    docs = torch.arange(first, first + n, device=offsets.device, dtype=torch.int32)
    chunk = torch.searchsorted(p.chunks.docs, docs, right=True) - 1
    scale, zero = p.scales[chunk].unbind(1)
    lengths = offsets.diff()
    spread = lambda t: torch.repeat_interleave(t, lengths, output_size=end - start)
    values = (p.weights[start:end].float() - spread(zero)) * spread(scale)
    return score_rows(
        table, offsets - start, p.terms[start:end], values, 0, n, torch.float32, V, True
    )
