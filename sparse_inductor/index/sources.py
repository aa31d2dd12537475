"""What a collection or a batch of queries may be given as, brought into one form: checked, merged CSR rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_inductor.ops._sparse_scores_aten import say_beta_once

__all__ = ["Rows", "is_single", "query_matrix", "rows_of"]

_LISTS = 4096  # documents given one by one that are checked together


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sparse rows: offsets int64 [n + 1], terms int64 [nnz] ascending and different within a row, weights fp32."""

    offsets: Tensor
    terms: Tensor
    weights: Tensor

    @property
    def count(self) -> int:
        return self.offsets.numel() - 1

    def part(self, first: int, last: int) -> Rows:
        """Rows first to last - 1."""
        offsets = self.offsets[first : last + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        return Rows(offsets - start, self.terms[start:end], self.weights[start:end])

    @staticmethod
    def join(parts: list[Rows]) -> Rows:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        lengths = torch.cat([p.offsets.diff() for p in parts])
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return Rows(
            offsets, torch.cat([p.terms for p in parts]), torch.cat([p.weights for p in parts])
        )


def rows_of(source: Any, num_terms: int | None, first: int = 0) -> Iterator[Rows]:
    """A collection as batches of rows: a matrix (scipy, torch sparse, dense), or an iterable of matrices or documents.

    A document is a pair (terms, weights) or a mapping from term to weight. `first` is the number of the first document,
    for messages.

    Raises TypeError for anything else, ValueError for unknown term ids and weights that are NaN or infinite.
    """
    matrix = _matrix(source)
    if matrix is not None:
        yield _checked(*matrix, num_terms, first)
        return
    if isinstance(source, (str, bytes, Mapping)) or not isinstance(source, Iterable):
        raise TypeError(
            "documents must be a scipy or torch sparse matrix [N, V], a dense tensor [N, V], or an iterable of such "
            f"matrices or of documents (terms, weights); got {type(source).__name__}"
        )
    pending: list[tuple[Tensor, Tensor]] = []
    for item in source:
        matrix = _matrix(item)
        if matrix is None:
            pending.append(_document(item, first + len(pending)))
        if pending and (matrix is not None or len(pending) == _LISTS):
            rows = _checked(*_gathered(pending), num_terms, first)
            first += rows.count
            pending = []
            yield rows
        if matrix is not None:
            rows = _checked(*matrix, num_terms, first)
            first += rows.count
            yield rows
    if pending:
        yield _checked(*_gathered(pending), num_terms, first)


def _matrix(source: Any) -> tuple[Tensor, Tensor, Tensor, int] | None:
    """(offsets, terms, weights, width) of anything that is a matrix, not yet checked."""
    if isinstance(source, torch.Tensor):
        if source.layout == torch.strided:
            if source.dim() != 2:
                raise ValueError(f"a matrix must be [N, V], got shape {tuple(source.shape)}")
            say_beta_once()
            source = source.detach().to_sparse_csr()
        elif source.layout == torch.sparse_coo:
            source = source.detach().coalesce().to_sparse_csr()
        elif source.layout != torch.sparse_csr:
            source = source.detach().to_sparse_csr()
        source = source.detach()
        if source.dim() != 2:
            raise ValueError(f"a matrix must be [N, V], got shape {tuple(source.shape)}")
        return source.crow_indices(), source.col_indices(), source.values(), source.shape[1]
    if hasattr(source, "tocsr") and hasattr(source, "shape"):
        csr = source.tocsr()
        parts = (torch.as_tensor(a) for a in (csr.indptr, csr.indices, csr.data))
        offsets, terms, weights = parts
        return offsets, terms, weights, csr.shape[1]
    return None


def _document(item: Any, number: int) -> tuple[Tensor, Tensor]:
    if isinstance(item, Mapping):
        item = (list(item.keys()), list(item.values()))
    try:
        terms, weights = item
        terms, weights = torch.as_tensor(terms), torch.as_tensor(weights)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"document {number} must be a pair (terms, weights) or a mapping, got {type(item).__name__}"
        ) from error
    if terms.dim() != 1 or terms.shape != weights.shape:
        raise ValueError(
            f"document {number}: terms and weights must be lists of one length, got {tuple(terms.shape)} and "
            f"{tuple(weights.shape)}"
        )
    if terms.numel() and (terms.is_floating_point() or terms.dtype == torch.bool):
        raise TypeError(f"document {number}: term ids must be integers, got {terms.dtype}")
    return terms.long(), weights.float()


def _gathered(documents: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, int | None]:
    offsets = torch.zeros(len(documents) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([t.numel() for t, _ in documents]).cumsum(0)
    return offsets, torch.cat([t for t, _ in documents]), torch.cat([w for _, w in documents]), None


def _checked(
    offsets: Tensor,
    terms: Tensor,
    weights: Tensor,
    width: int | None,
    num_terms: int | None,
    first: int,
) -> Rows:
    offsets, terms = offsets.long(), terms.long()
    V = num_terms if num_terms is not None else width
    if V is None:
        raise ValueError(
            "num_terms is needed: a list of documents does not say how many terms there are"
        )
    if width is not None and width > V:
        raise ValueError(f"the matrix has {width} columns, more than num_terms = {V}")
    if weights.is_complex():
        raise TypeError(f"weights must be real, got {weights.dtype}")
    weights = weights.float()

    def fail(bad: Tensor, what: str) -> None:
        at = int(bad.nonzero()[0, 0])
        number = first + int(torch.searchsorted(offsets, at, right=True)) - 1
        raise ValueError(
            f"document {number}: {what.format(term=int(terms[at]), weight=float(weights[at]))}"
        )

    if terms.numel():
        low, high = torch.aminmax(terms)
        if int(low) < 0 or int(high) >= V:
            fail((terms < 0) | (terms >= V), f"term id {{term}} is not in [0, {V})")
        if not bool(torch.isfinite(weights).all()):
            fail(
                ~torch.isfinite(weights), "the weight of term {term} is {weight}; it must be finite"
            )
    return _merged(offsets, terms, weights, V)


def _merged(offsets: Tensor, terms: Tensor, weights: Tensor, V: int) -> Rows:
    """Terms in ascending order, those named twice added up, those of weight 0 left out."""
    n = offsets.numel() - 1
    rows = torch.repeat_interleave(
        torch.arange(n, device=terms.device), offsets.diff(), output_size=terms.numel()
    )
    keys = rows * V + terms
    if terms.numel() > 1 and not bool((keys[1:] > keys[:-1]).all()):
        keys, order = torch.sort(keys, stable=True)
        weights = weights[order]
        keys, inverse = torch.unique_consecutive(keys, return_inverse=True)
        sums = torch.zeros(keys.numel(), dtype=torch.float64, device=keys.device)
        weights = sums.index_add_(0, inverse, weights.double()).float()
        rows, terms = torch.div(keys, V, rounding_mode="floor"), keys % V
    kept = weights != 0
    if not bool(kept.all()):
        rows, terms, weights = rows[kept], terms[kept], weights[kept]
    offsets = torch.searchsorted(rows, torch.arange(n + 1, device=rows.device))
    return Rows(offsets, terms, weights.contiguous())


def is_single(queries: Any) -> bool:
    """Whether these are the weights or the terms of one query, without a batch axis."""
    if isinstance(queries, torch.Tensor):
        return queries.dim() == 1
    return isinstance(queries, (tuple, list)) and len(queries) == 2 and queries[0].dim() == 1


def query_matrix(queries: Any, V: int, device: torch.device) -> Tensor:
    """Queries as dense fp32 [B, V].

    Takes a dense or sparse tensor or scipy matrix [B, V] (or a dense [V]), or a pair (terms, weights) of tensors
    [B, T] or [T]; term ids outside [0, V), such as padding, count nothing; terms named twice add up.
    """
    if isinstance(queries, (tuple, list)) and len(queries) == 2:
        terms, weights = queries
        if not (isinstance(terms, torch.Tensor) and isinstance(weights, torch.Tensor)):
            raise TypeError("a pair of queries must be two tensors, (terms, weights)")
        if terms.shape != weights.shape or terms.dim() not in (1, 2):
            raise ValueError(
                f"terms and weights must both be [B, T] or [T], got {tuple(terms.shape)} and {tuple(weights.shape)}"
            )
        if terms.is_floating_point() or terms.dtype == torch.bool:
            raise TypeError(f"term ids must be integers, got {terms.dtype}")
        if terms.dim() == 1:
            terms, weights = terms.unsqueeze(0), weights.unsqueeze(0)
        terms, weights = terms.to(device).long(), weights.to(device).float()
        known = (terms >= 0) & (terms < V)
        dense = torch.zeros(terms.shape[0], V + 1, device=device)
        # One slot more for what is not known: no data-dependent shapes, so it compiles.
        return dense.scatter_add(1, torch.where(known, terms, V), weights)[:, :V]
    if hasattr(queries, "tocsr") and not isinstance(queries, torch.Tensor):
        queries = torch.as_tensor(queries.toarray())
    if not isinstance(queries, torch.Tensor):
        raise TypeError(
            f"queries must be a tensor, a sparse matrix or a pair (terms, weights), got {type(queries).__name__}"
        )
    if queries.layout != torch.strided:
        queries = queries.to_dense()
    if queries.dim() not in (1, 2) or queries.shape[-1] != V:
        raise ValueError(
            f"queries must be [B, V] or [V] with V = {V}, got shape {tuple(queries.shape)}"
        )
    if queries.is_complex():
        raise TypeError(f"queries must be real, got {queries.dtype}")
    queries = queries if queries.dim() == 2 else queries.unsqueeze(0)
    return queries.to(device=device, dtype=torch.float32)
