"""Conversion of queries from any form that `SparseIndex.search` takes to the form that its operators take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sources import (
    Entries,
    Rows,
    as_ids,
    as_weights,
    check_offsets,
    entries_of,
    entries_of_all,
    from_array,
    merged,
    to_dense,
)

# Sparse queries become dense in blocks of at most this size. A GPU needs larger launches.
_CPU_BYTES = 16 << 20
_GPU_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries over V terms, as dense `weights` [B, V] or as sparse `rows`. single: one query, given without a batch
    axis."""

    num_terms: int
    single: bool
    weights: Tensor | None
    rows: Rows | None = None

    @property
    def count(self) -> int:
        """The number of queries, B."""
        if self.weights is not None:
            return self.weights.shape[0]
        assert self.rows is not None
        return self.rows.count

    def dense(self, device: torch.device) -> Tensor:
        """Return all queries as fp32 [B, V]. Differentiable if `weights` is present."""
        if self.weights is not None:
            return self.weights.to(device=device, dtype=torch.float32)
        assert self.rows is not None
        return self._spread(self.rows, device)

    def blocks(self, device: torch.device) -> Iterator[Tensor]:
        """Yield the queries in dense blocks [b, V], at least one, so that memory is proportional to the input."""
        if self.rows is None:
            yield self.dense(device)
            return
        most = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
        step = max(1, most // (4 * self.num_terms))
        for first in range(0, max(self.rows.count, 1), step):
            last = min(first + step, self.rows.count)
            yield self._spread(self.rows.part(first, last), device)

    def _spread(self, rows: Rows, device: torch.device) -> Tensor:
        rows = rows.to(device)
        out = torch.zeros(rows.count, self.num_terms, dtype=torch.float32, device=device)
        row = torch.repeat_interleave(rows.offsets.diff(), output_size=rows.terms.numel())
        out[row, rows.terms] = rows.weights
        return out


def queries_of(queries: Any, V: int, device: torch.device, differentiable: bool = False) -> Queries:
    """Convert queries over V terms.

    Takes a dense or sparse tensor, array or scipy matrix [B, V] or [V]; a pair (terms, weights) [B, T] or [T]; a
    mapping {term: weight}; or a list of rows [V], pairs and mappings. Term ids outside [0, V), such as padding, are
    ignored, and the weights of a repeated term id are added. differentiable: convert a sparse tensor to dense under
    autograd.

    Raises ValueError and TypeError for other shapes and types.
    """
    if isinstance(queries, np.ndarray) and queries.dtype != object:
        queries = from_array(queries)
    if isinstance(queries, torch.Tensor):
        _check_shape(queries.shape, V)
        if queries.is_complex():
            raise TypeError(f"queries must be real, got {queries.dtype}")
        if queries.layout == torch.strided:
            return Queries(V, queries.dim() == 1, queries.reshape(-1, V))
        if differentiable or _spreads(queries.shape, queries.device):
            return Queries(V, queries.dim() == 1, to_dense(queries).reshape(-1, V))
    if _is_pair(queries):
        terms, weights = queries
        return _pair(terms, weights, V, device, differentiable)
    entries = entries_of(queries)
    if entries is not None:
        _check_shape(queries.shape, V)
        return _sparse(entries, V, single=len(queries.shape) == 1)
    if isinstance(queries, Mapping):  # a dok_matrix, also a mapping, was handled above
        return _sparse(entries_of_all([queries]), V, single=True)
    if not isinstance(queries, (list, tuple)) and not isinstance(queries, np.ndarray):
        raise TypeError(
            "queries must be a tensor, an array or a sparse matrix [B, V], a pair (terms, weights), a mapping, or a "
            f"list of rows [V], pairs and mappings; got {type(queries).__name__}"
        )
    entries = entries_of_all(list(queries))
    if entries.width is not None:
        _check_shape((entries.count, entries.width), V)
    return _sparse(entries, V, single=False)


def _spreads(shape: Any, device: torch.device) -> bool:
    """Whether sparse queries of this shape become dense at once. They do under a compiler, because its sizes must not
    depend on data, and on a GPU if they are small: sparse rows would save little memory and synchronise with the
    host."""
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and 4 * math.prod(shape) <= _GPU_BYTES


def _check_shape(shape: Any, V: int) -> None:
    if len(shape) not in (1, 2) or shape[-1] != V:
        raise ValueError(f"queries must be [B, V] or [V] with V = {V}, got shape {tuple(shape)}")


def _is_pair(queries: Any) -> bool:
    """Whether this is a pair (terms, weights), of a batch or of one query, and not a list of two queries."""
    if not isinstance(queries, (tuple, list)) or len(queries) != 2:
        return False
    terms, weights = queries
    if isinstance(terms, torch.Tensor):
        floats = terms.is_floating_point() and isinstance(queries, list)
        return terms.layout == torch.strided and not floats and isinstance(weights, torch.Tensor)
    if isinstance(terms, np.ndarray):
        return terms.dtype.kind in "iu"
    numbers = isinstance(terms, (list, tuple, range)) and all(
        isinstance(t, (int, np.integer)) for t in terms
    )
    return numbers and not isinstance(weights, Mapping)


def _pair(terms: Any, weights: Any, V: int, device: torch.device, differentiable: bool) -> Queries:
    if not isinstance(terms, torch.Tensor):
        terms = as_ids(terms, "queries")
    if not isinstance(weights, torch.Tensor):
        weights = as_weights(weights, "queries")
    if terms.shape != weights.shape or terms.dim() not in (1, 2):
        raise ValueError(
            f"terms and weights must both be [B, T] or [T], got {tuple(terms.shape)} and {tuple(weights.shape)}"
        )
    if terms.is_floating_point() or terms.is_complex() or terms.dtype == torch.bool:
        raise TypeError(f"term ids must be integers, got {terms.dtype}")
    if weights.is_complex():
        raise TypeError(f"weights must be real, got {weights.dtype}")
    single = terms.dim() == 1
    if single:
        terms, weights = terms.unsqueeze(0), weights.unsqueeze(0)
    B, T = terms.shape
    if not differentiable and not _spreads((B, V), device):
        offsets = torch.arange(B + 1, device=terms.device) * T
        flat = terms.reshape(-1), weights.detach().to(terms.device).reshape(-1)
        return _sparse(Entries(offsets, *flat, None), V, single)
    terms, weights = terms.to(device).long(), weights.to(device).float()
    known = (terms >= 0) & (terms < V)
    dense = torch.zeros(B, V + 1, dtype=torch.float32, device=device)
    # Unknown term ids go to an additional column. Dropping them would need data-dependent shapes, which do not compile.
    return Queries(V, single, dense.scatter_add(1, torch.where(known, terms, V), weights)[:, :V])


def _sparse(entries: Entries, V: int, single: bool) -> Queries:
    if entries.weights.is_complex():
        raise TypeError(f"queries must be real, got {entries.weights.dtype}")
    offsets = entries.offsets.long()
    check_offsets(offsets, entries)
    here = slice(int(offsets[0]), int(offsets[-1]))
    offsets, terms, weights = (
        offsets - offsets[0],
        entries.terms[here].long(),
        entries.weights[here],
    )
    known = (terms >= 0) & (terms < V)
    if not bool(known.all()):
        kept = torch.cat((known.new_zeros(1, dtype=torch.int64), known.cumsum(0)))
        offsets, terms, weights = kept[offsets], terms[known], weights[known]
    return Queries(V, single, None, merged(Entries(offsets, terms, weights, None), V))
