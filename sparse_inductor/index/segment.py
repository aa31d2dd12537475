"""A run of documents: their rows as they are kept and saved, and what searching them needs."""

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
except ImportError:  # sorting with torch then, some five times slower
    scipy_sparse = None

# Documents in a segment. 2 ** 17 fp64 accumulators are 1 MiB, which stays in a core's cache while a query's posting
# lists go by; and it is 16 of the chunks that the GPU kernels work on.
CAPACITY = 1 << 17

_FEW = 1024  # documents for which a segment of their own would cost more than it is worth

WEIGHTS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.uint8,
}
_MOST_TERMS = (1 << 31) - 1  # term ids are stored in 32 bits


@dataclasses.dataclass(frozen=True)
class Postings:
    """The segment by term, on a CPU: docs int32 and weights fp32 from offsets[t] to offsets[t + 1]."""

    offsets: Tensor
    docs: Tensor
    weights: Tensor


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows of documents.

    offsets: int64 [n + 1]. terms: [nnz], int32, or the low 16 bits as int16 where that holds every term. weights: [nnz]
    in the index's precision; a weight is `scale * stored` where 8 bits are stored, minus `scale * 127` where `signed`.
    error: the largest distance of a weight from what was given.
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
        """Rows in the precision of the index.

        8-bit weights take the scale of the segment `beside` which they come where that holds them, so that `join` can
        make one of both.

        Raises ValueError where a weight overflows the precision.
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
        """[nnz]."""
        ids = self.terms.to(dtype)
        return ids & 0xFFFF if self.terms.dtype == torch.int16 else ids

    def values(self) -> Tensor:
        """The weights as they count, fp32 [nnz]."""
        w = self.weights.float()
        if self.weights.dtype != torch.uint8:
            return w
        return (w - 127 if self.signed else w) * self.scale

    def rows(self) -> Rows:
        """The rows with the weights as they count."""
        return Rows(self.offsets.long(), self.term_ids(), self.values())

    def joins(self, after: Segment) -> bool:
        """Whether the stored weights of both mean the same, so that `join` can put them together as they are."""
        return (self.scale, self.signed) == (after.scale, after.signed)

    @staticmethod
    def join(parts: Sequence[Segment]) -> Segment:
        """One after the other, the weights as they were stored."""
        if len(parts) == 1:
            return parts[0]
        rows = Rows.join([Rows(s.offsets, s.terms, s.weights) for s in parts])
        error = max(s.error for s in parts)
        return dataclasses.replace(
            parts[0], offsets=rows.offsets, terms=rows.terms, weights=rows.weights, error=error
        )

    def without(self, gone: Tensor) -> Segment:
        """The segment with the rows of deleted documents empty."""
        lengths = self.offsets.diff()
        kept = torch.repeat_interleave(~gone, lengths, output_size=self.nnz)
        offsets = torch.zeros_like(self.offsets)
        torch.cumsum(lengths.masked_fill(gone, 0), 0, out=offsets[1:])
        return dataclasses.replace(
            self, offsets=offsets, terms=self.terms[kept], weights=self.weights[kept]
        )

    def taken(self, rows: Tensor) -> Segment:
        """The rows with these numbers, int64 [m], in this order."""
        starts = self.offsets[rows]
        offsets = torch.nn.functional.pad((self.offsets[rows + 1] - starts).cumsum(0), (1, 0))
        lengths, total = offsets.diff(), int(offsets[-1])
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
        at = shift + torch.arange(total, device=shift.device)
        return dataclasses.replace(
            self, offsets=offsets, terms=self.terms[at], weights=self.weights[at]
        )

    def to(self, device: torch.device) -> Segment:
        """The same on another device."""
        move = lambda t: t.to(device)
        return dataclasses.replace(
            self, offsets=move(self.offsets), terms=move(self.terms), weights=move(self.weights)
        )

    def postings(self, num_terms: int) -> Postings:
        """The segment by term."""
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
    """The number of terms and the precision of an index.

    Raises ValueError where there is no such index.
    """
    num_terms = as_int(num_terms, "num_terms")
    if not 0 < num_terms <= _MOST_TERMS:
        raise ValueError(f"num_terms must be from 1 to {_MOST_TERMS}, got {num_terms}")
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {sorted(WEIGHTS)}, got {weights!r}")
    return num_terms, weights


def term_dtype(num_terms: int) -> torch.dtype:
    """How term ids are stored."""
    return torch.int16 if num_terms <= 1 << 16 else torch.int32


def _scale_of(given: Tensor, documents: int, beside: Segment | None) -> tuple[float, bool]:
    """The scale of 8-bit weights, and whether some are negative."""
    low, high = (float(x) for x in torch.aminmax(given)) if given.numel() else (0.0, 0.0)
    largest = max(-low, high)
    if beside is not None and beside.nnz:
        most = beside.scale * (127 if beside.signed else 255)
        # Where many documents would lose more than a bit, they get a scale of their own.
        shared = documents <= _FEW or largest >= most / 2
        if shared and high <= most and low >= (-most if beside.signed else 0):
            return beside.scale, beside.signed
    signed = low < 0
    scale = largest / (127 if signed else 255) if largest > 0 else 1.0
    # The dequantised weight is computed in fp32; the scale has to be the number that is used there.
    scale = float(torch.tensor(scale, dtype=torch.float32, device="cpu"))
    return max(scale, torch.finfo(torch.float32).tiny), signed
