"""Exact scores per document: sums of its terms' gathered query weights, in a fixed order.

    out[n, b] = sum over the entries p of document n of values[p] * table[ids[p], b]

Without atomics, results are bitwise repeatable. Portable Triton, which also runs in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched

# Scores per block: 16 MiB, plus 32 MiB for keys and about as much again in `topk`.
BLOCK = 1 << 22
_FEW = 4  # most queries for which a tile of documents per query wastes less than a row of queries per document


@triton.jit
def _ids(ids, at, mask, V, UNSIGNED16: tl.constexpr):
    """Term ids, negative ones counted from the end; V, which adds nothing, for ids outside [0, V)."""
    t = tl.load(ids + at, mask=mask, other=0).to(tl.int32)
    if UNSIGNED16:
        t = t & 0xFFFF
    else:
        t = tl.where(t < 0, t + V, t)
        t = tl.where((t < 0) | (t >= V), V, t)
    return t


@triton.jit
def _bounds(offsets, n, L, PADDED: tl.constexpr):
    if PADDED:
        start = n.to(tl.int64) * L
        end = start + L
    else:
        start = tl.load(offsets + n).to(tl.int64)
        end = tl.load(offsets + n + 1).to(tl.int64)
    return start, end


@relaunched
@triton.jit(do_not_specialize=["first", "count", "B", "L"])
def _rows_kernel(
    table, offsets, ids, values, out, first, count, B, L, V,
    PADDED: tl.constexpr, UNSIGNED16: tl.constexpr, BB: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A program computes out[n, b0:b0 + BB], reading BB weights of `table` [V + 1, B] per entry."""
    n = tl.program_id(0)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    start, end = _bounds(offsets, first + n, L, PADDED)
    acc = tl.zeros([BB], table.dtype.element_ty)
    for i in range(start, end, UNROLL):
        at = i + tl.arange(0, UNROLL)
        t = _ids(ids, at, at < end, V, UNSIGNED16)
        w = tl.load(values + at, mask=at < end, other=0.0).to(table.dtype.element_ty)
        mask = (at < end)[:, None] & (b < B)[None, :]
        q = tl.load(table + t.to(tl.int64)[:, None] * B + b[None, :], mask=mask, other=0.0)
        acc += tl.sum(q * w[:, None], axis=0)
    tl.store(out + n.to(tl.int64) * B + b, acc.to(out.dtype.element_ty), mask=b < B)


@relaunched
@triton.jit(do_not_specialize=["first", "count", "B", "L"])
def _few_kernel(
    table, offsets, ids, values, out, first, count, B, L, V, stride_t, stride_b,
    PADDED: tl.constexpr, UNSIGNED16: tl.constexpr, WIDE: tl.constexpr, DOCS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program computes out[b, n0:n0 + DOCS], WIDTH entries of DOCS documents at a time; sums in fp64 if WIDE."""
    n = tl.program_id(0) * DOCS + tl.arange(0, DOCS)
    b = tl.program_id(1)
    inside = n < count
    last = tl.where(inside, n, 0)
    start, end = _bounds(offsets, first + last, L, PADDED)
    end = tl.where(inside, end, start)
    longest = tl.max(end - start, axis=0)
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    acc = tl.zeros([DOCS], SUM)
    mine = table + b.to(tl.int64) * stride_b
    for i in range(0, longest, WIDTH):
        at = start[:, None] + i + tl.arange(0, WIDTH)[None, :]
        mask = at < end[:, None]
        t = _ids(ids, at, mask, V, UNSIGNED16)
        w = tl.load(values + at, mask=mask, other=0.0).to(SUM)
        q = tl.load(mine + t.to(tl.int64) * stride_t, mask=mask & (t < V), other=0.0).to(SUM)
        acc += tl.sum(q * w, axis=1)
    tl.store(out + b.to(tl.int64) * count + n, acc.to(out.dtype.element_ty), mask=inside)


def table_of(query: torch.Tensor, wide: bool) -> torch.Tensor:
    """Queries [B, V] as the table of `score_rows`: a view [V, B] for few queries; else contiguous [V + 1, B] in the
    dtype of the sums, with a last row of zeros for invalid ids."""
    if query.shape[0] <= _FEW:
        return query.t()
    query = query.to(torch.float64 if wide else torch.float32)
    return torch.nn.functional.pad(query, (0, 1)).t().contiguous()


def score_rows(
    table: torch.Tensor,
    offsets: torch.Tensor | None,
    ids: torch.Tensor,
    values: torch.Tensor,
    first: int,
    count: int,
    out_dtype: torch.dtype,
    num_terms: int,
    wide: bool,
) -> torch.Tensor:
    """Scores [count, B] of the documents first, first + 1, ..., rounded once from fp32, or fp64 if `wide`. For few
    queries the result is column-major.

    table: from `table_of`, for queries of `num_terms` terms. ids and values [nnz] with offsets [N + 1], or padded [N,
    L] with offsets None. int16 ids are unsigned.
    """
    V, B = num_terms, table.shape[1]
    few = B <= _FEW
    shape = (B, count) if few else (count, B)
    out = torch.empty(shape, device=table.device, dtype=out_dtype)
    out = out.t() if few else out
    if not out.numel():
        return out
    padded = offsets is None
    L = ids.shape[1] if padded else 0
    args = (table, offsets, ids, values, out, first, count, B, L, V)
    flags = {"PADDED": padded, "UNSIGNED16": ids.dtype == torch.int16}
    with torch.cuda.device_of(table):
        if few:
            # 16 documents by 32 entries: 512 loads in flight for 128 threads; a document of 127 terms takes 4 steps.
            _few_kernel[(triton.cdiv(count, 16), B)](
                *args, *table.stride(), WIDE=wide, DOCS=16, WIDTH=32, num_warps=4, **flags
            )
        else:
            # Rows of up to 256 queries, 2 per thread with 4 warps; 8 entries in flight hide the latency of the gather.
            width = min(256, triton.next_power_of_2(B))
            grid = (count, triton.cdiv(B, width))
            _rows_kernel[grid](*args, BB=width, UNROLL=8, num_warps=4, **flags)
    return out


def _by_row(
    rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, num_docs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coordinates as (offsets, ids, values). Coordinates that are sorted already are not copied; checking this requires
    a host synchronisation, so while a CUDA graph is captured they are always sorted again."""
    rows = torch.where(rows < 0, rows + num_docs, rows)
    capturing = rows.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or bool((rows[1:] < rows[:-1]).any()):
        rows, order = torch.sort(rows, stable=True)
        ids, values = ids[order], values[order]
    edges = torch.arange(num_docs + 1, device=rows.device, dtype=rows.dtype)
    return torch.searchsorted(rows, edges), ids, values


def blocks(
    query: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor | None,
    offsets: torch.Tensor | None,
    num_docs: int,
    out_dtype: torch.dtype,
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first document, scores [B, n]) for blocks of the documents of `sparse_scores`'s arguments.

    Term ids and rows that are out of range add nothing: checking them would synchronise with the GPU.
    """
    wide = torch.float64 in (query.dtype, values.dtype)
    table, V = table_of(query, wide), query.shape[1]
    if rows is not None:
        offsets, ids, values = _by_row(rows, ids, values, num_docs)
    step = max(1024, BLOCK // max(query.shape[0], 1))
    ids, values = ids.contiguous(), values.contiguous()
    offsets = None if offsets is None else offsets.contiguous()
    for first in range(0, num_docs, step):
        count = min(step, num_docs - first)
        scores = score_rows(table, offsets, ids, values, first, count, out_dtype, V, wide)
        yield first, scores.t()
