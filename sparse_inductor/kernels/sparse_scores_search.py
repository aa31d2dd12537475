"""Search of an index on a GPU: candidates by integer scores, the set proved, the candidates rescored exactly.

    1. Queries become lists of (term, integer weight), long posting lists first, with a bound on the integer error.
    2. A sample of documents from all over the collection gives a threshold that about k documents, and some, reach.
    3. All chunks are scored; documents that reach the threshold are appended to their query's candidates.
    4. The k-th best candidate less twice the error bound is a proved limit: nobody below it can be among the k best.
       Candidates above are rescored from the rows, in fp64, rounded to fp32, and sorted with ties by lowest id.
    5. A query whose threshold proves wrong (too few or too many candidates, or a limit below the threshold) is answered
       by exact scores of all documents.

The [B, N] scores never exist. Launches have shapes that depend on sizes alone; only step 5 needs a look by the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparse_inductor.ops._top import best_of

from . import sparse_scores_documents as documents
from .sparse_scores_accumulate import (
    CHUNK_BITS,
    CHUNK_DOCS,
    MAX_SUM,
    WEIGHT_STEPS,
    kth_largest,
    portable_kernel,
    shared_kernel,
)

__all__ = ["LISTS", "Packed", "pack", "search"]

LISTS = 11  # of the tensors of a `Packed`; the rest are the rows

_DOC_MAX = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-(1 << 63))
_SUM_BITS = tl.constexpr(MAX_SUM.bit_length() - 1)

# Candidates of a query are selected and sorted by one program: 4 k and 2 k of them, in registers.
_MOST_K = 2048
# One chunk of sampled documents for so many chunks: three per cent more postings.
_SAMPLED = 32
# Postings in a chunk from which a list is walked on its own.
_LONG_LIST = 192


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunk-major postings: post int32 [nnz + pad], offsets int32 [chunks, V + 1] relative to bases int64 [chunks].

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
        """The first of them."""
        end = int(self.bases[chunks]) if chunks < self.count else self.post.numel()
        return Chunks(
            self.post[:end], self.offsets[:chunks], self.bases[:chunks], self.docs[:chunks]
        )


@dataclasses.dataclass(frozen=True)
class Packed:
    """What `pack` makes; `search` gets its tensors in this order."""

    chunks: Chunks
    sample: Chunks
    is_long: torch.Tensor  # uint8 [V]
    df: torch.Tensor  # int64 [V], documents a term
    largest: torch.Tensor  # fp64, the weight that is a fraction of 1
    offsets: torch.Tensor  # int64 [N + 1], of the rows
    terms: torch.Tensor  # [nnz]
    weights: torch.Tensor  # [nnz]
    scales: torch.Tensor  # fp32 [chunks, 2]: a weight is scale * (stored - zero)

    def tensors(self) -> list[torch.Tensor]:
        c, s = self.chunks, self.sample
        return [
            c.post, c.offsets, c.bases, c.docs, s.post, s.offsets, s.bases, s.docs,
            self.is_long, self.df, self.largest, self.offsets, self.terms, self.weights, self.scales,
        ]  # fmt: skip

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Packed:
        return Packed(Chunks(*tensors[:4]), Chunks(*tensors[4:8]), *tensors[8:])


# Packing


def pack(
    segments: Sequence[Any], num_terms: int, kept: int = 0, old: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """The tensors of a `Packed` for an index's segments, on their device; a segment at a time.

    4 bytes a posting and 4 (V + 1) a chunk, a thirtieth of that again for the sample, and the rows in one piece. The
    chunks of the first `kept` segments are taken over from `old`, unless a larger weight has come that changes the
    fraction all weights are kept as.
    """
    device = segments[0].offsets.device if segments else torch.device("cuda")
    new = segments[kept:]
    largest = max((float(s.values().abs().max()) for s in new if s.nnz), default=0.0)
    before = Packed.of(old) if kept else None
    if before is not None:
        known = float(before.largest)
        if largest > known:
            return pack(segments, num_terms)
        largest = known
    parts, scales, first = [], [], 0
    df = torch.zeros(num_terms, dtype=torch.int64, device=device)
    if before is not None:
        df += before.df
        first = sum(s.count for s in segments[:kept])
        chunks = sum(-(-s.count // CHUNK_DOCS) for s in segments[:kept])
        parts.append(before.chunks.first(chunks))
        scales.append(before.scales[:chunks])
        gone = before.offsets.numel() - 1 - first
        if gone:  # the last segment is made anew: its terms are counted again
            start = int(before.offsets[first])
            ids = before.terms[start:].long() & (0xFFFF if num_terms <= 1 << 16 else -1)
            df -= torch.bincount(ids, minlength=num_terms)
    for s in new:
        terms, values, lengths = s.term_ids(), s.values(), s.offsets.diff()
        rows = torch.repeat_interleave(
            torch.arange(s.count, device=device), lengths, output_size=s.nnz
        )
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
        torch.cat([s.terms for s in segments] or [empty.to(narrow)]),
        torch.cat([s.weights for s in segments] or [empty]),
        torch.cat(scales or [empty.view(0, 2)]).contiguous(),
    )
    chunks = _joined(parts, num_terms, device)
    sample = _sample(segments, N, num_terms, largest, chunks.count, device)
    long = (df.double() * CHUNK_DOCS / max(N, 1) >= _LONG_LIST).to(torch.uint8)
    peak = torch.tensor(largest, dtype=torch.float64, device=device)
    return Packed(chunks, sample, long, df, peak, *rows).tensors()


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
    post = (fraction.round().long() << CHUNK_BITS) | (rows[order] & (CHUNK_DOCS - 1))
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


def _sample(
    segments: Sequence[Any], N: int, V: int, largest: float, chunks: int, device: torch.device
) -> Chunks:
    """Chunks of documents taken at even steps from the whole collection, each chunk itself such a sample."""
    if chunks < 2:
        return _joined([], V, device)
    # One chunk is enough for a small collection; a large one has a second, wider look, of four at least: fewer would
    # leave the number of candidates at the mercy of some fifty sampled documents.
    count = 1 if chunks <= _SAMPLED else max(4, chunks // _SAMPLED)
    wanted = torch.arange(count * CHUNK_DOCS, device=device)
    # Chunk c takes every count-th of the sampled documents, so that its first is spread as widely as all of them.
    wanted = wanted.view(CHUNK_DOCS, count).t().reshape(-1)
    docs = (wanted * N) // (count * CHUNK_DOCS)
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
    return dataclasses.replace(made, docs=docs.view(count, CHUNK_DOCS).int().contiguous())


# Kernels around the scoring


@triton.jit
def _prepare_kernel(
    query, is_long, terms, weights, counts, long_counts, margin, status, V, BLOCK: tl.constexpr
):
    """One program a query: reads its V weights twice, writes its terms, 8 bytes each.

    status: 0, or 2 where a weight is NaN or infinite. margin: twice the error bound of an integer score, in its units.
    """
    q = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    n = tl.zeros([BLOCK], tl.int32)
    long = tl.zeros([BLOCK], tl.int32)
    for i in range(0, V, BLOCK):
        t = i + tl.arange(0, BLOCK)
        w = tl.load(query + q * V + t, mask=t < V, other=0.0)
        some = (w != 0).to(tl.int32)
        total += tl.abs(w).to(tl.float64)
        n += some
        long += some * tl.load(is_long + t, mask=t < V, other=0).to(tl.int32)
    sum_ = tl.sum(total, axis=0)
    terms_of = tl.sum(n, axis=0)
    sound = sum_ < float("inf")
    usable = sound.to(tl.int32)
    # The power of two, by its bits, that takes the sum just below MAX_SUM: scaling by it is exact.
    bits = tl.where(sound & (sum_ > 0), sum_, 1.0).to(tl.int64, bitcast=True)
    biased = -((bits >> 52) & 0x7FF) + (2 * 1023 + _SUM_BITS - 1)
    scale = (biased << 52).to(tl.float64, bitcast=True)
    # Each term: less than 1 by the shift, at most 1/4 by the rounded query weight; and half a step of every document
    # weight, 2^-20 of the query's sum.
    bound = 1.25 * terms_of + sum_ * scale * (1.0 / (1 << 20)) + 2.0
    tl.store(margin + q, (2.0 * bound).to(tl.int32) + 1)
    tl.store(status + q, tl.where(sound, 0, 2))
    all_long = tl.sum(long, axis=0)
    tl.store(counts + q, tl.where(sound, terms_of, 0))
    tl.store(long_counts + q, tl.where(sound, all_long, 0))
    next_long = 0
    next_short = all_long
    for i in range(0, V, BLOCK):
        t = i + tl.arange(0, BLOCK)
        w = tl.load(query + q * V + t, mask=t < V, other=0.0)
        is_ = tl.load(is_long + t, mask=t < V, other=0).to(tl.int32)
        some = (w != 0).to(tl.int32)
        first = some * is_
        second = some - first
        place = tl.where(
            first != 0,
            next_long + tl.cumsum(first, axis=0) - first,
            next_short + tl.cumsum(second, axis=0) - second,
        )
        scaled = w.to(tl.float64) * scale
        whole = tl.where(scaled < 0, scaled - 0.5, scaled + 0.5).to(tl.int32)
        keep = some * usable != 0
        tl.store(terms + q * V + place, t, mask=keep)
        tl.store(weights + q * V + place, whole, mask=keep)
        next_long += tl.sum(first, axis=0)
        next_short += tl.sum(second, axis=0)


@triton.jit
def _threshold_kernel(candidates, found, threshold, capacity, rank, BLOCK: tl.constexpr):
    """One program a query: raise its threshold to the score of rank `rank` among the sampled candidates."""
    q = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(found + q), capacity)
    at = tl.arange(0, BLOCK)
    x = tl.load(candidates + q * capacity + at, mask=at < n, other=0)
    better = kth_largest((x >> 32).to(tl.int32), rank, 29, 18)
    tl.store(threshold + q, tl.maximum(tl.load(threshold + q), better))
    tl.store(found + q, 0)


@triton.jit
def _select_kernel(
    candidates, found, threshold, margin, status, kept, kept_counts, k, capacity,
    BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program a query: the documents that may be among the k best, and whether that is proved.

    Reads 8 bytes a candidate, writes 4 a document kept. status: 1 where it is not proved.
    """
    q = tl.program_id(0).to(tl.int64)
    n = tl.load(found + q)
    at = tl.arange(0, BLOCK)
    x = tl.load(candidates + q * capacity + at, mask=at < tl.minimum(n, capacity), other=0)
    score = (x >> 32).to(tl.int32)
    kth = kth_largest(score, k, 29, 30)
    # fp32 rounding may make scores equal that differ by an ulp, 2^-23 of them.
    limit = kth - tl.load(margin + q) - (kth >> 22) - 1
    keep = (score >= limit) & (at < n)
    rank = tl.cumsum(keep.to(tl.int32), axis=0)
    many = tl.sum(keep.to(tl.int32), axis=0)
    doc = (x & _DOC_MAX).to(tl.int32) ^ _DOC_MAX
    tl.store(kept + q * ROOM + rank - 1, doc, mask=keep & (rank <= ROOM))
    proved = (n >= k) & (n <= capacity) & (limit >= tl.load(threshold + q)) & (many <= ROOM)
    tl.store(kept_counts + q, tl.where(proved, many, 0))
    before = tl.load(status + q)
    tl.store(status + q, tl.where(proved, before, tl.maximum(before, 1)))


@triton.jit
def _rescore_kernel(
    query, offsets, terms, weights, scales, chunk_of_docs, chunks, kept, kept_counts, keys, V,
    BYTES: tl.constexpr, UNSIGNED16: tl.constexpr,
    ROOM: tl.constexpr, DOCS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A program owns keys[q, i0:i0 + DOCS]: the exact score of each, in fp64 from the document's row, rounded once."""
    q = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * DOCS + tl.arange(0, DOCS)
    n = tl.load(kept_counts + q)
    mine = i < n
    doc = tl.load(kept + q * ROOM + i, mask=mine, other=0)
    start = tl.load(offsets + doc, mask=mine, other=0)
    end = tl.load(offsets + doc + 1, mask=mine, other=0)
    if BYTES:  # the chunk that holds the document: the last that begins at or before it
        low = tl.zeros([DOCS], tl.int32)
        high = tl.zeros([DOCS], tl.int32) + chunks
        for _ in range(DEPTH):
            middle = (low + high) // 2
            begins = tl.load(chunk_of_docs + middle, mask=middle < chunks, other=2147483647)
            low = tl.where(begins <= doc, middle, low)
            high = tl.where(begins <= doc, high, middle)
        scale = tl.load(scales + 2 * low)
        zero = tl.load(scales + 2 * low + 1)
    acc = tl.zeros([DOCS], tl.float64)
    longest = tl.max((end - start).to(tl.int32), axis=0)
    for j in range(0, longest, WIDTH):
        at = start[:, None] + j + tl.arange(0, WIDTH)[None, :]
        some = at < end[:, None]
        t = tl.load(terms + at, mask=some, other=0).to(tl.int32)
        if UNSIGNED16:
            t = t & 0xFFFF
        w = tl.load(weights + at, mask=some, other=0).to(tl.float32)
        if BYTES:
            w = (w - zero[:, None]) * scale[:, None]
        x = tl.load(query + q * V + t, mask=some, other=0.0)
        acc += tl.sum(tl.where(some, w.to(tl.float64) * x.to(tl.float64), 0.0), axis=1)
    bits = (acc.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (4294967295 - doc.to(tl.int64))
    tl.store(keys + q * ROOM + i, tl.where(mine, key, _LOWEST), mask=i < ROOM)


@triton.jit
def _sort_kernel(keys, status, scores, ids, k, ROOM: tl.constexpr):
    """One program a query: the k largest keys in order; NaN and -1 where the query is not answered here."""
    q = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, ROOM)
    key = tl.sort(tl.load(keys + q * ROOM + at), descending=True)
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    answered = tl.load(status + q) == 0
    value = tl.where(answered, bits.to(tl.float32, bitcast=True), float("nan"))
    doc = tl.where(answered, 4294967295 - (key & 4294967295), -1)
    tl.store(scores + q * k + at, value, mask=at < k)
    tl.store(ids + q * k + at, doc, mask=at < k)


# Searching


def _uses_shared(device: torch.device) -> bool:
    """Whether the PTX kernel runs here: an NVIDIA GPU from Volta on, whose shared memory adds integers natively."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (7, 0)
    )


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Per-query state between the launches: 8 V bytes a query for the lists, 8 a candidate."""

    terms: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    long_counts: torch.Tensor
    margin: torch.Tensor
    status: torch.Tensor
    threshold: torch.Tensor
    found: torch.Tensor
    candidates: torch.Tensor

    @staticmethod
    def of(B: int, V: int, capacity: int, device: torch.device) -> _Scratch:
        new = lambda *shape, dtype=torch.int32: torch.empty(*shape, dtype=dtype, device=device)
        # Threshold 1: without a sample every document with a positive score is a candidate.
        return _Scratch(
            new(B, V), new(B, V), new(B), new(B), new(B), new(B),
            torch.ones(B, dtype=torch.int32, device=device),
            torch.zeros(B, dtype=torch.int32, device=device),
            new(B, capacity, dtype=torch.int64),
        )  # fmt: skip


def rank_in_sample(expected: float, k: int) -> int:
    """The rank to take as threshold where `expected` of the k best are expected in a sample: five deviations safe."""
    return min(k, math.ceil(expected + 5 * math.sqrt(expected) + 8))


def search(
    query: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    counts: Sequence[int],
    deleted: torch.Tensor,
    k: int,
    shared: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 scores and int64 ids [B, k] of the best documents; see `SparseIndex.search`.

    query fp32 [B, V]. `shared` chooses between the shared-memory kernel and the portable one (default: by the machine).

    While a CUDA graph is captured the host cannot look: a query whose threshold proves wrong then has scores NaN and
    ids -1, as one with a NaN weight.
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
    capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
    if p.sample.count == 0 or k_here > _MOST_K:
        _exact(query, p, counts, deleted, scores, ids)
        return _filled(scores, ids, k)
    with torch.cuda.device_of(query):
        status = _candidates(query, p, deleted, scores, ids, shared)
    if not capturing:
        wrong = (status == 1).nonzero().squeeze(1)
        if wrong.numel():
            found, which = scores[wrong], ids[wrong]
            _exact(query[wrong], p, counts, deleted, found, which)
            scores[wrong], ids[wrong] = found, which
    return _filled(scores, ids, k)


def _filled(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    more = k - scores.shape[1]
    if not more:
        return scores, ids
    pad = torch.nn.functional.pad
    lost = (ids[:, :1] == -1) & scores[:, :1].isnan() if ids.shape[1] else None
    scores, ids = pad(scores, (0, more), value=float("-inf")), pad(ids, (0, more), value=-1)
    return (scores if lost is None else scores.masked_fill(lost, float("nan"))), ids


def _candidates(query, p: Packed, deleted, scores, ids, shared) -> torch.Tensor:
    B, V = query.shape
    k = scores.shape[1]
    device = query.device
    # The threshold lets 1.3 k to 2.4 k documents through, and for a small k some hundreds.
    capacity = max(2048, triton.next_power_of_2(3 * k))
    s = _Scratch.of(B, V, capacity, device)
    _prepare_kernel[(B,)](
        query, p.is_long, s.terms, s.weights, s.counts, s.long_counts, s.margin, s.status, V,
        BLOCK=2048, num_warps=8,
    )  # fmt: skip
    shared = _uses_shared(device) if shared is None else shared
    run = _Launch(s, p, deleted, capacity, shared)
    N = p.offsets.numel() - 1
    share = CHUNK_DOCS / N
    rank = rank_in_sample(k * share, k)
    run(p.sample, 0, 1, rank=rank, listed=True)
    # The threshold lets through about rank / share: where that is too many, all sampled documents give a better one.
    if rank / share > 2.2 * k and p.sample.count > 1:
        better = rank_in_sample(k * share * p.sample.count, k)
        run(p.sample, 0, p.sample.count, listed=True)
        _threshold_kernel[(B,)](
            s.candidates, s.found, s.threshold, capacity, better, BLOCK=capacity, num_warps=8
        )
    run(p.chunks, 0, p.chunks.count)
    room = triton.next_power_of_2(k + max(24, k // 8))
    kept = torch.empty(B, room, dtype=torch.int32, device=device)
    kept_counts = torch.empty(B, dtype=torch.int32, device=device)
    keys = torch.empty(B, room, dtype=torch.int64, device=device)
    _select_kernel[(B,)](
        s.candidates, s.found, s.threshold, s.margin, s.status, kept, kept_counts, k, capacity,
        BLOCK=capacity, ROOM=room, num_warps=8,
    )  # fmt: skip
    _rescore_kernel[(B, triton.cdiv(room, 16))](
        query, p.offsets, p.terms, p.weights, p.scales, p.chunks.docs, p.chunks.count,
        kept, kept_counts, keys, V,
        BYTES=p.weights.dtype == torch.uint8, UNSIGNED16=p.terms.dtype == torch.int16,
        ROOM=room, DOCS=16, WIDTH=32, DEPTH=max(1, p.chunks.count.bit_length()), num_warps=4,
    )  # fmt: skip
    _sort_kernel[(B,)](keys, s.status, scores, ids, k, ROOM=room, num_warps=8)
    return s.status


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One pass of the scoring kernel over chunks."""

    s: _Scratch
    p: Packed
    deleted: torch.Tensor
    capacity: int
    shared: bool

    def __call__(
        self, c: Chunks, first: int, last: int, rank: int = 0, listed: bool = False
    ) -> None:
        s = self.s
        B, V = s.terms.shape
        args = (
            c.post, c.offsets, c.bases, c.docs, s.terms, s.weights, s.counts, s.long_counts,
            s.threshold, s.found, s.candidates, self.deleted,
            first, B, V + 1, V, self.capacity, rank,
        )  # fmt: skip
        # 512: four postings a thread at 128 to a quarter warp; 32 x 32 tiles keep the lanes of a warp on one short list
        flags: dict[str, Any] = {
            "CHUNK": CHUNK_DOCS, "LONG": 512, "LISTS": 32, "WIDTH": 32, "READ": min(2048, CHUNK_DOCS),
            "RANKED": rank > 0, "LISTED": listed, "HAS_DELETED": True, "num_warps": 8,
        }  # fmt: skip
        work = (last - first) * B
        if self.shared:
            # 40 registers: six blocks of 8 warps an SM, as many as 32 KiB of accumulators each allow
            shared_kernel[(work,)](*args, **flags, maxnreg=None if rank else 40)
            return
        programs = work
        if self.deleted.is_cuda:
            sms = torch.cuda.get_device_properties(self.deleted.device).multi_processor_count
            programs = min(work, 4 * sms)  # 32 KiB each: 16 MiB of scratch, well within L2
        else:
            programs = min(work, 4)
        scratch = torch.empty(programs, CHUNK_DOCS, dtype=torch.int32, device=self.deleted.device)
        portable_kernel[(programs,)](scratch, work, *args, **flags)


def _exact(query, p: Packed, counts, deleted, scores, ids) -> None:
    """All documents' exact scores, a block at a time, and the best of them; a query that is not finite gets NaN."""
    table = torch.nn.functional.pad(query.double(), (0, 1)).t().contiguous()
    sound = torch.isfinite(query).all(1, keepdim=True)

    def parts():
        values = p.weights if p.weights.dtype != torch.uint8 else None
        step = max(1024, documents.BLOCK // query.shape[0])
        for at in range(0, sum(counts), step):
            n = min(step, sum(counts) - at)
            if values is None:
                block = _bytes_block(table, p, at, n)
            else:
                block = documents.score_rows(
                    table, p.offsets, p.terms, values, at, n, torch.float32
                )
            yield at, block.t().masked_fill(deleted[at : at + n], float("-inf"))

    found, which = best_of(parts(), scores.shape[1])
    which = torch.where(found == float("-inf"), -1, which)
    scores.copy_(torch.where(sound, found, float("nan")))
    ids.copy_(torch.where(sound, which, -1))


def _bytes_block(table, p: Packed, first: int, n: int) -> torch.Tensor:
    """8-bit weights are spread out to fp32 for a block of documents."""
    offsets = p.offsets[first : first + n + 1]
    start, end = int(offsets[0]), int(offsets[-1])
    docs = torch.arange(first, first + n, device=offsets.device, dtype=torch.int32)
    chunk = torch.searchsorted(p.chunks.docs, docs, right=True) - 1
    scale, zero = p.scales[chunk].unbind(1)
    lengths = offsets.diff()
    spread = lambda t: torch.repeat_interleave(t, lengths, output_size=end - start)
    values = (p.weights[start:end].float() - spread(zero)) * spread(scale)
    return documents.score_rows(
        table, offsets - start, p.terms[start:end], values, 0, n, torch.float32
    )
