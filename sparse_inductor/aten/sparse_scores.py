"""Sparse scoring with ATen, a bounded number of scores at a time. Results are bitwise the same on every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import compute_dtype, looks_at
from .csr import csr

BLOCK = 1 << 24  # scores per block: 64 MiB of fp32, a few milliseconds of work
_FEW = 8  # up to this many queries a sparse product is faster than embedding_bag (measured on two cores)


@dataclasses.dataclass(frozen=True)
class Documents:
    """N sparse rows: terms [nnz] in [0, V], values [nnz], row n from offsets[n] to offsets[n + 1].

    Term V is padding and is ignored.
    """

    offsets: Tensor
    terms: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        return self.offsets.numel() - 1


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """How one of PyTorch's look-up functions treats indices out of range."""

    negative: bool  # whether negative indices count from the end
    error: type[Exception]


_LOOKUPS = {
    "index": _Lookup(True, IndexError),
    "embedding": _Lookup(False, IndexError),
    "gather": _Lookup(False, RuntimeError),
}


def documents(
    ids: Tensor,
    values: Tensor,
    rows: Tensor | None,
    offsets: Tensor | None,
    num_docs: int,
    V: int,
    lookup: str = "",
) -> Documents:
    """Convert the arguments of `sparse_scores` to documents by row.

    Raises IndexError for a term outside [-V, V], a row outside [-N, N), and offsets that do not fit. `lookup` (one word
    for the terms, one for the rows or offsets) names PyTorch functions to imitate: the values that they reject raise
    the errors that they raise. On a GPU nothing is checked: invalid entries are ignored, as in the kernels, and there
    may be entries before the first offset and after the last.
    """
    of_ids, _, of_rows = lookup.partition(" ")
    terms = _terms(ids.reshape(-1), V, of_ids)
    values = values.reshape(-1)
    if rows is None and offsets is None:
        L = ids.shape[1]
        starts = torch.arange(0, num_docs * L + 1, max(L, 1), device=ids.device)
        starts = starts if L else torch.zeros(num_docs + 1, dtype=torch.int64, device=ids.device)
        return Documents(starts, terms, values)
    if offsets is not None and not looks_at(offsets):
        return Documents(offsets.long(), terms, values)
    if offsets is not None:
        if of_rows == "differences" and bool((offsets[1:] < offsets[:-1]).any()):
            return _backwards(offsets.long(), terms, values)
        first, last = _ends(offsets, ids.numel(), of_rows)
        here = slice(first, last)  # entries before and after belong to no document
        return Documents(offsets.long() - first, terms[here], values[here])
    assert rows is not None
    rows = _wrapped(rows.reshape(-1), num_docs, num_docs - 1, "rows", of_rows)
    if not looks_at(rows) or bool((rows[1:] < rows[:-1]).any()):
        rows, order = torch.sort(rows, stable=True)
        terms, values = terms[order], values[order]
    edges = torch.arange(num_docs + 1, device=rows.device, dtype=rows.dtype)
    return Documents(torch.searchsorted(rows, edges), terms, values)


def _terms(ids: Tensor, V: int, lookup: str) -> Tensor:
    terms = _wrapped(ids, V, V - 1 if lookup else V, "ids", lookup)
    return terms if looks_at(ids) else torch.where((terms < 0) | (terms > V), V, terms)


def _wrapped(index: Tensor, size: int, most: int, name: str, lookup: str = "") -> Tensor:
    """Check indices, and convert negative ones, which count from the end, if the look-up supports them."""
    if not looks_at(index):
        return torch.where(index < 0, index + size, index)
    if index.numel() == 0:
        return index
    low, high = torch.aminmax(index)
    rule, least, largest = _LOOKUPS[lookup or "index"], int(low), int(high)
    lowest = -size if rule.negative else 0
    if least < lowest or largest > most:
        bad = least if least < lowest else largest
        raise rule.error(f"{name} must be in [{lowest}, {most}], got {bad}: index out of range")
    return torch.where(index < 0, index + size, index) if least < 0 else index


def _backwards(offsets: Tensor, terms: Tensor, values: Tensor) -> Documents:
    """Return documents that are defined by differences of prefix sums at their offsets, which may decrease. Entries
    between decreasing offsets are subtracted."""
    low, high = torch.minimum(offsets[:-1], offsets[1:]), torch.maximum(offsets[:-1], offsets[1:])
    if int(low.min()) < 0 or int(high.max()) > terms.numel():
        raise IndexError(f"offsets must be in [0, {terms.numel()}]: index out of range")
    starts = F.pad((high - low).cumsum(0), (1, 0))
    docs = torch.repeat_interleave(high - low)
    at = torch.arange(docs.numel(), device=docs.device) + (low - starts[:-1])[docs]
    signs = (offsets[1:] - offsets[:-1]).sign()[docs].to(values.dtype)
    return Documents(starts, terms[at], values[at] * signs)


def _ends(offsets: Tensor, nnz: int, rule: str) -> tuple[int, int]:
    """Return the first and the last offset, after checking that offsets are non-decreasing and within the entries."""
    falls = bool((offsets[1:] < offsets[:-1]).any())
    first, last = int(offsets[0]), int(offsets[-1])
    if (rule == "bags" and first != 0) or (rule == "lengths" and last != nnz):
        raise RuntimeError(f"the entries are 0 to {nnz}, offsets go from {first} to {last}")
    if falls or first < 0 or last > nnz:
        error = RuntimeError if rule == "bags" or (rule and falls) else IndexError
        raise error(
            f"offsets must rise and stay within the number of entries, {nnz}; they go from {first} to {last}"
            + (" and fall in between" if falls else "")
        )
    return first, last


def blocks(query: Tensor, docs: Documents, block: int = BLOCK) -> Iterator[tuple[int, Tensor]]:
    """Yield (first document, scores [B, n]) for blocks of documents, in the compute dtype."""
    B, V = query.shape
    dtype = compute_dtype(query, docs.values)
    step = max(1024, block // max(B, 1))
    table = F.pad(query.to(dtype), (0, 1)).t().contiguous()  # [V + 1, B]: term V has weight 0
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        yield 0, _all_scores(table, docs, dtype)
        return
    small = max(V + 1, docs.terms.numel()) < 2**31
    for first in range(0, docs.count, step):
        offsets = docs.offsets[first : first + step + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        terms, values = docs.terms[start:end], docs.values[start:end].to(dtype)
        offsets = offsets - start
        if B <= _FEW and looks_at(query):  # cuSPARSE does not guarantee the order of additions
            kind = torch.int32 if small else torch.int64
            rows = csr(offsets.to(kind), terms.to(kind), values, (len(offsets) - 1, V + 1))
            yield first, (rows @ table).t()
        else:
            yield first, F.embedding_bag(
                terms.long(), table, offsets, mode="sum", per_sample_weights=values,
                include_last_offset=True,
            ).t()  # fmt: skip


def _all_scores(table: Tensor, docs: Documents, dtype: torch.dtype) -> Tensor:
    """Return scores [B, N] without reading offsets on the host, which stream capture does not allow. Processes some
    queries at a time."""
    nnz, B = docs.terms.numel(), table.shape[1]
    step = max(1, BLOCK // max(nnz, 1))
    weights = docs.values.to(dtype).unsqueeze(1)
    parts = []
    for b in range(0, B, step):
        products = table[:, b : b + step].index_select(0, docs.terms) * weights
        parts.append(
            torch.segment_reduce(products, "sum", offsets=docs.offsets, axis=0, unsafe=True).t()
        )
    return torch.cat(parts)


def transposed(docs: Documents, V: int) -> Documents:
    """Return the posting lists: row v holds the documents of term v."""
    ids = docs.terms.long()
    if looks_at(ids):
        rows = torch.repeat_interleave(docs.offsets.diff(), output_size=ids.numel())
    else:
        at = torch.arange(ids.numel(), device=ids.device)
        rows = torch.searchsorted(docs.offsets, at, right=True) - 1
        ids = torch.where((rows < 0) | (rows >= docs.count), V, ids)
        rows = rows.clamp(0, max(docs.count - 1, 0))
    terms, order = torch.sort(ids, stable=True)
    edges = torch.arange(V + 1, device=terms.device)
    offsets = torch.searchsorted(terms, edges)
    end = int(offsets[-1]) if looks_at(ids) else ids.numel()  # padding comes last
    return Documents(offsets, rows[order][:end], docs.values[order][:end])
