"""Segments of consecutive documents: their rows as stored in memory and files, and their posting lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .documents import as_int
from .sources import Rows

try:
    from scipy import sparse as scipy_sparse
except ImportError:  # torch sorts instead, about five times slower
    scipy_sparse = None

# The most documents in a segment. 2 ** 17 fp64 accumulators are 1 MiB, which stays in a core's cache while a query's
# posting lists are read. It is also 16 of the chunks on which the GPU kernels work.
CAPACITY = 1 << 17

_FEW = 1024  # up to this many documents, a scale that fits better is not worth a separate segment

WEIGHTS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.uint8,
}
_MOST_TERMS = (1 << 31) - 1  # term ids are stored in 32 bits


@dataclasses.dataclass(frozen=True)
class Postings:
    """Posting lists of a segment, on a CPU. Term t has docs (int32) and weights (fp32) from offsets[t] to
    offsets[t + 1]."""

    offsets: Tensor
    docs: Tensor
    weights: Tensor


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows of documents.

    offsets: int64 [n + 1]. terms: [nnz], int32, or int16 (the low 16 bits) if that represents all terms. weights: [nnz]
    in the index's precision; the value of an 8-bit weight is `scale * stored`, or `scale * (stored - 127)` if `signed`.
    error: the largest difference between a stored weight and the given weight.
    """

    offsets: Tensor
    terms: Tensor
    weights: Tensor
    scale: float = 1.0
    signed: bool = False
    error: float = 0.0

    @property
    def count(self) -> int:
        return self.offsets.numel() - 1

    @property
    def nnz(self) -> int:
        return self.terms.numel()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.offsets, self.terms, self.weights))

    @staticmethod
    def of(rows: Rows, num_terms: int, precision: str, beside: Segment | None = None) -> Segment:
        """Convert rows to the precision of the index.

        8-bit weights take the scale of the neighbouring segment `beside` if it fits them, so that `join` can merge
        both.

        Raises ValueError if a weight overflows the precision.
        """
        terms = rows.terms.to(term_dtype(num_terms))
        given = rows.weights
        scale, signed = 1.0, False
        if precision == "float32":
            return Segment(rows.offsets, terms, given)
        if precision == "int8":
            scale, signed = _scale_of(given, rows.count, beside)
            steps = 127 if signed else 255
            weights = (given / scale).round().clamp(-steps, steps) + (127 if signed else 0)
            stored = weights.to(torch.uint8)
        else:
            stored = given.to(WEIGHTS[precision])
            if not bool(torch.isfinite(stored).all()):
                largest = float(given.abs().max())
                raise ValueError(
                    f"a weight of {largest:g} does not fit {precision}; use float32 or int8"
                )
        made = Segment(rows.offsets, terms, stored, scale, signed)
        error = float((made.values() - given).abs().max()) if given.numel() else 0.0
        return dataclasses.replace(made, error=error)

    def term_ids(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the term ids [nnz]."""
        ids = self.terms.to(dtype)
        return ids & 0xFFFF if self.terms.dtype == torch.int16 else ids

    def values(self) -> Tensor:
        """Return the dequantised weights, fp32 [nnz]."""
        w = self.weights.float()
        if self.weights.dtype != torch.uint8:
            return w
        return (w - 127 if self.signed else w) * self.scale

    def rows(self) -> Rows:
        """Return the rows with dequantised weights."""
        return Rows(self.offsets.long(), self.term_ids(), self.values())

    def joins(self, after: Segment) -> bool:
        """Whether both segments have the same scale and sign, so that `join` can concatenate their stored weights."""
        return (self.scale, self.signed) == (after.scale, after.signed)

    @staticmethod
    def join(parts: Sequence[Segment]) -> Segment:
        """Concatenate segments, with their weights as stored."""
        if len(parts) == 1:
            return parts[0]
        rows = Rows.join([Rows(s.offsets, s.terms, s.weights) for s in parts])
        error = max(s.error for s in parts)
        return dataclasses.replace(
            parts[0], offsets=rows.offsets, terms=rows.terms, weights=rows.weights, error=error
        )

    def without(self, gone: Tensor) -> Segment:
        """Return the segment with empty rows for the documents that `gone` marks."""
        lengths = self.offsets.diff()
        kept = torch.repeat_interleave(~gone, lengths, output_size=self.nnz)
        offsets = torch.zeros_like(self.offsets)
        torch.cumsum(lengths.masked_fill(gone, 0), 0, out=offsets[1:])
        return dataclasses.replace(
            self, offsets=offsets, terms=self.terms[kept], weights=self.weights[kept]
        )

    def taken(self, rows: Tensor) -> Segment:
        """Return a segment of the rows with these numbers, int64 [m], in this order."""
        starts = self.offsets[rows]
        offsets = torch.nn.functional.pad((self.offsets[rows + 1] - starts).cumsum(0), (1, 0))
        lengths, total = offsets.diff(), int(offsets[-1])
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
        at = shift + torch.arange(total, device=shift.device)
        return dataclasses.replace(
            self, offsets=offsets, terms=self.terms[at], weights=self.weights[at]
        )

    def to(self, device: torch.device) -> Segment:
        """Return the same segment on another device."""
        move = lambda t: t.to(device)
        return dataclasses.replace(
            self, offsets=move(self.offsets), terms=move(self.terms), weights=move(self.weights)
        )

    def postings(self, num_terms: int) -> Postings:
        """Build the posting lists of the segment."""
        values = self.values()
        if scipy_sparse is not None:
            terms = self.term_ids(torch.int32)
            rows = scipy_sparse.csr_matrix(
                (values.numpy(), terms.numpy(), self.offsets.numpy()), (self.count, num_terms)
            )
            columns = rows.tocsc()
            offsets, docs, weights = (
                torch.from_numpy(a) for a in (columns.indptr, columns.indices, columns.data)
            )
            return Postings(offsets.long(), docs.int(), weights)
        docs = torch.repeat_interleave(self.offsets.diff()).int()
        ordered, order = torch.sort(self.term_ids(), stable=True)
        offsets = torch.searchsorted(ordered, torch.arange(num_terms + 1, device="cpu"))
        return Postings(offsets, docs[order], values[order])


def checked_kind(num_terms: Any, weights: str) -> tuple[int, str]:
    """Return the number of terms and the precision of an index.

    Raises ValueError if either is not supported.
    """
    num_terms = as_int(num_terms, "num_terms")
    if not 0 < num_terms <= _MOST_TERMS:
        raise ValueError(f"num_terms must be from 1 to {_MOST_TERMS}, got {num_terms}")
    if weights not in [*WEIGHTS]:  # a list, because the argument may be unhashable
        raise ValueError(f"weights must be one of {sorted(WEIGHTS)}, got {weights!r}")
    return num_terms, weights


def term_dtype(num_terms: int) -> torch.dtype:
    """Return the dtype in which term ids are stored."""
    return torch.int16 if num_terms <= 1 << 16 else torch.int32


def _scale_of(given: Tensor, documents: int, beside: Segment | None) -> tuple[float, bool]:
    """Return the scale of 8-bit weights, and whether they are stored as signed."""
    low, high = (float(x) for x in torch.aminmax(given)) if given.numel() else (0.0, 0.0)
    largest = max(-low, high)
    if beside is not None and beside.nnz:
        most = beside.scale * (127 if beside.signed else 255)
        # Many documents get a separate scale if the shared one would lose more than a bit of precision.
        shared = documents <= _FEW or largest >= most / 2
        if shared and high <= most and low >= (-most if beside.signed else 0):
            return beside.scale, beside.signed
    signed = low < 0
    scale = largest / (127 if signed else 255) if largest > 0 else 1.0
    # Weights are dequantised in fp32, so the scale must be an fp32 number.
    scale = float(torch.tensor(scale, dtype=torch.float32, device="cpu"))
    return max(scale, torch.finfo(torch.float32).tiny), signed
