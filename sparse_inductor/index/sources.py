"""Conversion of collections and batches of queries, in any supported form, to checked, merged CSR rows.

The results share no memory with the inputs, which the caller may modify afterwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import compat

_LISTS = 4096  # documents given one by one that are checked together
_BLOCK = 1 << 17  # documents of a matrix that are checked together


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
        """Return the rows from `first` to `last - 1`."""
        offsets = self.offsets[first : last + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        return Rows(offsets - start, self.terms[start:end], self.weights[start:end])

    def to(self, device: torch.device) -> Rows:
        """Return the same rows on another device."""
        return Rows(*(t.to(device) for t in (self.offsets, self.terms, self.weights)))

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """Concatenate rows."""
        if len(parts) == 1:
            return parts[0]
        lengths = torch.cat([p.offsets.diff() for p in parts])
        return Rows(
            _offsets(lengths),
            torch.cat([p.terms for p in parts]),
            torch.cat([p.weights for p in parts]),
        )


@dataclasses.dataclass(frozen=True)
class Entries:
    """Unchecked sparse rows, as given: terms may repeat and be in any order.

    width: the number of columns, if the source specifies it.
    """

    offsets: Tensor
    terms: Tensor
    weights: Tensor
    width: int | None

    @property
    def count(self) -> int:
        return self.offsets.numel() - 1


def collection_of(source: Any, num_terms: int | None, first: int = 0) -> tuple[int, Iterator[Rows]]:
    """Return the number of terms of a collection, and its documents as batches of rows.

    A collection is a matrix (scipy, torch sparse, dense), or an iterable of matrices, of rows or of documents; a
    document is a pair (terms, weights) or a mapping from term to weight. `first` is the number of the first document,
    for messages. `num_terms` defaults to the width of the first matrix or row.

    Raises TypeError for anything else, ValueError for unknown term ids and weights that are NaN or infinite.
    """
    whole = entries_of(source)
    if whole is not None:
        if len(source.shape) == 1:
            raise ValueError(f"a matrix must be [N, V], got shape {tuple(source.shape)}")
        num_terms = num_terms or _width(whole)
        return num_terms, _checked(whole, num_terms, first)
    if isinstance(source, (str, bytes, Mapping)) or not isinstance(source, Iterable):
        raise TypeError(
            "documents must be a scipy or torch sparse matrix [N, V], a dense tensor or array [N, V], or an iterable "
            "of such matrices, of their rows [V] or of documents (terms, weights); got "
            f"{_describe(source)}"
        )
    items = iter(source)
    if num_terms is None:
        head = list(itertools.islice(items, 1))
        entries = entries_of(head[0]) if head else None
        if entries is None:
            raise ValueError(
                "num_terms is needed: a list of documents does not say how many terms there are"
            )
        num_terms = _width(entries)
        items = itertools.chain(head, items)
    return num_terms, _batches(items, num_terms, first)


def _batches(items: Iterator[Any], num_terms: int, first: int) -> Iterator[Rows]:
    pending: list[Entries] = []
    for item in items:
        entries = entries_of(item)
        if entries is None:
            entries = _document(item, f"document {first + len(pending)}")
        if entries.count == 1:
            if entries.width is not None and entries.width > num_terms:
                raise ValueError(_too_wide(f"document {first + len(pending)}", entries, num_terms))
            # Copied, because a generator may reuse its buffers for the next document.
            own = dataclasses.replace(
                entries, terms=entries.terms.clone(), weights=entries.weights.clone()
            )
            pending.append(own)
            if len(pending) < _LISTS:
                continue
            entries = None
        if pending:
            yield from _checked(_joined(pending), num_terms, first)
            first += len(pending)
            pending = []
        if entries is not None:
            yield from _checked(entries, num_terms, first)
            first += entries.count
    if pending:
        yield from _checked(_joined(pending), num_terms, first)


def entries_of_all(queries: Sequence[Any]) -> Entries:
    """Combine queries that are given one by one, each as a row, a pair (terms, weights) or a mapping."""
    given = []
    for number, item in enumerate(queries):
        entries = entries_of(item)
        if entries is not None and entries.count != 1:
            raise ValueError(f"query {number} must be one row, got shape {tuple(item.shape)}")
        given.append(entries if entries is not None else _document(item, f"query {number}"))
    widths = {e.width for e in given if e.width is not None}
    if len(widths) > 1:
        raise ValueError(f"rows must have one number of columns, got {sorted(widths)}")
    joined = _joined(given)
    return dataclasses.replace(joined, width=widths.pop() if widths else None)


def entries_of(source: Any) -> Entries | None:
    """Return the entries of a matrix [N, V] or a row [V] (torch, numpy, scipy); None for any other object.

    Raises ValueError for another number of axes, TypeError for an array whose elements are not numbers.
    """
    if isinstance(source, np.ndarray):
        if source.dtype == object:
            return None  # possibly an array of documents
        if source.dtype.kind not in "biufc":
            raise TypeError(f"weights must be numbers, got an array of {source.dtype}")
        source = from_array(source)
    if isinstance(source, torch.Tensor):
        return _entries_of_tensor(source.detach())
    if hasattr(source, "tocsr") and hasattr(source, "shape"):
        if len(source.shape) == 1:
            coo = source.tocoo()
            terms, weights = (from_array(a) for a in (coo.coords[0], coo.data))
            return Entries(_offsets_of_one(terms), terms, weights, source.shape[0])
        csr = source.tocsr()
        used = int(csr.indptr[-1])  # the arrays may be longer than the entries
        offsets, terms, weights = (
            from_array(a) for a in (csr.indptr, csr.indices[:used], csr.data[:used])
        )
        return Entries(offsets, terms, weights, csr.shape[1])
    return None


def _entries_of_tensor(t: Tensor) -> Entries:
    if t.dim() not in (1, 2) or (t.layout == torch.sparse_coo and t.dense_dim()):
        raise ValueError(f"a matrix must be [N, V], got shape {tuple(t.shape)}")
    rows, width = (t.shape[0] if t.dim() == 2 else 1), t.shape[-1]
    if t.layout == torch.sparse_csr:
        if t.values().dim() != 1:
            raise ValueError(f"a matrix must be [N, V], got values of {tuple(t.values().shape)}")
        return Entries(t.crow_indices(), t.col_indices(), t.values(), width)
    if t.layout == torch.sparse_coo:
        index, weights = compat.coo_entries(t)  # unsorted: `merged` sorts and adds all entries
        row, terms = (None, index[0]) if t.dim() == 1 else index
    elif t.layout == torch.sparse_csc:
        row, weights = t.row_indices(), t.values()
        terms = torch.repeat_interleave(t.ccol_indices().diff(), output_size=row.numel())
    else:
        dense = to_dense(t)
        # Converted to bool, because few dtypes have `nonzero`.
        there = (dense if dense.dim() == 2 else dense[None]).bool()
        row, terms = there.nonzero().unbind(1)
        weights = dense[row, terms] if dense.dim() == 2 else dense[terms]
    if row is None:
        return Entries(_offsets_of_one(terms), terms, weights, width)
    if row.numel() > 1 and bool((row[1:] < row[:-1]).any()):
        row, order = torch.sort(row, stable=True)
        terms, weights = terms[order], weights[order]
    edges = torch.arange(rows + 1, device=row.device)
    return Entries(torch.searchsorted(row.contiguous(), edges), terms, weights, width)


def to_dense(t: Tensor) -> Tensor:
    """Return the tensor in dense form."""
    if t.layout == torch.strided:
        return t
    if torch.compiler.is_compiling() or not t.is_inference():
        return t.to_dense()
    with torch.inference_mode():  # to_dense writes in place to an inference tensor
        dense = t.to_dense()
    return dense.clone()


def _document(item: Any, name: str) -> Entries:
    """Return the entries of a pair (terms, weights) or a mapping."""
    if isinstance(item, Mapping):
        item = (list(item.keys()), list(item.values()))
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(
            f"{name} must be a row [V], which is a tensor or an array, a pair (terms, weights) or a mapping; got "
            f"{_describe(item)}"
        )
    terms, weights = as_ids(item[0], name), as_weights(item[1], name)
    if terms.dim() != 1 or terms.shape != weights.shape:
        alone = "; a document alone is [(terms, weights)]" if terms.dim() == 0 else ""
        raise ValueError(
            f"{name}: terms and weights must be lists of one length, got shapes {tuple(terms.shape)} and "
            f"{tuple(weights.shape)}{alone}"
        )
    return Entries(_offsets_of_one(terms), terms, weights, None)


def as_ids(ids: Any, name: str) -> Tensor:
    if not isinstance(ids, torch.Tensor):
        array = _as_array(ids, f"{name}: term ids must be integers")
        if not array.size:
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name}: term ids must be integers, got {_describe(ids)}")
        ids = from_array(array)
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise TypeError(f"{name}: term ids must be integers, got {ids.dtype}")
    return ids.detach()


def as_weights(weights: Any, name: str) -> Tensor:
    """Convert real numbers to a tensor. Python floats become fp64, independently of torch's default dtype."""
    if not isinstance(weights, torch.Tensor):
        array = _as_array(weights, f"{name}: weights must be real numbers")
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name}: weights must be real numbers, got {_describe(weights)}")
        weights = from_array(array)
    return weights.detach()


def _as_array(values: Any, otherwise: str) -> np.ndarray:
    try:
        kinds = {*map(type, values)} if isinstance(values, (list, tuple)) else ()
        if any(issubclass(kind, torch.Tensor) for kind in kinds):
            values = [v.tolist() if isinstance(v, torch.Tensor) else v for v in values]
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{otherwise}, got {_describe(values)}") from error


def from_array(array: np.ndarray) -> Tensor:
    """Convert an array to a CPU tensor. The data are copied if torch does not support their dtype, byte order or
    strides, or would warn because the array is read-only."""
    if torch.compiler.is_compiling():
        return torch.as_tensor(array, device="cpu")
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind == "f" and dtype.itemsize > 8:
        dtype = np.dtype(np.float64)
    needed = array.dtype != dtype or not array.flags.writeable or min(array.strides, default=0) < 0
    return torch.from_numpy(np.array(array, dtype) if needed else array)


def _describe(value: Any) -> str:
    """Return the name of a value's type, followed by the value if that is short."""
    text = repr(value) if isinstance(value, (str, bytes, int, float, list, tuple, dict)) else ""
    kind = type(value).__name__
    return f"{kind} {text}" if 0 < len(text) <= 60 else kind


def _width(entries: Entries) -> int:
    assert entries.width is not None
    return entries.width


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _offsets_of_one(terms: Tensor) -> Tensor:
    return torch.tensor([0, terms.numel()], device=terms.device)


def _joined(parts: Sequence[Entries]) -> Entries:
    """Concatenate rows that are given one by one, on their common device, or on the CPU if their devices differ."""
    devices = {p.terms.device for p in parts}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    lengths = torch.tensor([p.terms.numel() for p in parts], device=device)
    terms = [p.terms.to(device=device, dtype=torch.int64) for p in parts]
    dtypes = {p.weights.dtype for p in parts}
    # fp64 represents weights of all other dtypes, so that a message can show a weight as it was given.
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is None:
        dtype = torch.complex128 if any(d.is_complex for d in dtypes) else torch.float64
    weights = [p.weights.to(device=device, dtype=dtype) for p in parts]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    joined = torch.cat(terms or [none]), torch.cat(weights or [none])
    return Entries(_offsets(lengths), *joined, None)


def _too_wide(what: str, entries: Entries, num_terms: int) -> str:
    return f"{what} has {entries.width} columns, more than num_terms = {num_terms}"


def _checked(entries: Entries, num_terms: int, first: int) -> Iterator[Rows]:
    """Check and merge entries, and yield the rows one block of documents at a time."""
    if entries.width is not None and entries.width > num_terms:
        raise ValueError(_too_wide("the matrix", entries, num_terms))
    if entries.weights.is_complex():
        raise TypeError(f"weights must be real, got {entries.weights.dtype}")
    offsets = entries.offsets.long()
    check_offsets(offsets, entries)
    for row in range(0, max(entries.count, 1), _BLOCK):
        edges = offsets[row : row + _BLOCK + 1]
        here = slice(int(edges[0]), int(edges[-1]))
        weights = entries.weights[here]
        if weights.is_floating_point() and weights.itemsize == 1:
            weights = weights.float()  # isfinite does not support 8-bit floats
        block = Entries(edges - edges[0], entries.terms[here].long(), weights, None)
        _check_values(block, num_terms, first + row)
        rows = merged(block, num_terms)
        _check_sums(rows, first + row)
        yield rows


def check_offsets(offsets: Tensor, entries: Entries) -> None:
    """Raise ValueError unless the offsets are non-decreasing and within the entries; CSR tensors may be unchecked."""
    nnz = entries.terms.numel()
    if entries.weights.numel() != nnz:
        raise ValueError(f"there are {nnz} term ids and {entries.weights.numel()} weights")
    if offsets.numel() == 0:
        raise ValueError("a matrix needs at least one row offset, got none")
    ends = offsets.new_tensor([0]), offsets, offsets.new_tensor([nnz])
    falls = (torch.cat(ends).diff() < 0).nonzero()
    if falls.numel():
        raise ValueError(
            f"row offsets must rise from 0 or more to {nnz} or less, the number of entries: see row {int(falls[0, 0])}"
        )


def _check_values(block: Entries, num_terms: int, first: int) -> None:
    def fail(bad: Tensor, what: str) -> None:
        at = int(bad.nonzero()[0, 0])
        number = first + int(torch.searchsorted(block.offsets, at, right=True)) - 1
        term, weight = int(block.terms[at]), float(block.weights[at])
        raise ValueError(f"document {number}: {what.format(term=term, weight=weight)}")

    if not block.terms.numel():
        return
    low, high = (int(x) for x in torch.aminmax(block.terms))
    if low < 0 or high >= num_terms:
        bad = (block.terms < 0) | (block.terms >= num_terms)
        fail(bad, f"term id {{term}} is not in [0, {num_terms})")
    if not _all_finite(block.weights.float()):
        bad = ~torch.isfinite(block.weights)
        if bool(bad.any()):
            fail(bad, "the weight of term {term} is {weight}; it must be finite")
        bad = ~torch.isfinite(block.weights.float())
        fail(bad, "the weight of term {term} is {weight}; it does not fit float32")


def _check_sums(rows: Rows, first: int) -> None:
    if not _all_finite(rows.weights):
        at = int((~torch.isfinite(rows.weights)).nonzero()[0, 0])
        number = first + int(torch.searchsorted(rows.offsets, at, right=True)) - 1
        raise ValueError(
            f"document {number}: the weights of term {int(rows.terms[at])} add up to {float(rows.weights[at])}; they "
            "must fit float32"
        )


def _ascending(offsets: Tensor, terms: Tensor) -> bool:
    """Whether the terms of each row are strictly ascending. The offsets run from 0 to the number of terms."""
    rises = torch.ones(terms.numel() + 1, dtype=torch.bool, device=terms.device)
    torch.gt(terms[1:], terms[:-1], out=rises[1:-1])
    return bool(rises.index_fill_(0, offsets, True).all())


def _all_finite(weights: Tensor) -> bool:
    """Whether all weights are finite, in a tenth of the time of `isfinite`. `aminmax` propagates NaN."""
    return not weights.numel() or all(math.isfinite(x) for x in torch.aminmax(weights))


def merged(entries: Entries, num_terms: int) -> Rows:
    """Sort terms, add the weights of repeated ones and drop weights of 0. The result shares no memory with the
    input."""
    offsets, terms, weights = entries.offsets, entries.terms, entries.weights
    if _ascending(offsets, terms):
        own = weights.to(torch.float32, copy=True)
        if bool(own.all()):
            return Rows(offsets.clone(), terms.clone(), own)
    rows = torch.repeat_interleave(offsets.diff(), output_size=terms.numel())
    keys = rows * num_terms + terms
    if terms.numel() > 1 and not bool((keys[1:] > keys[:-1]).all()):
        keys, order = torch.sort(keys, stable=True)
        terms, weights = terms[order], weights[order]  # each within its row
        if not bool((keys[1:] > keys[:-1]).all()):
            keys, inverse = torch.unique_consecutive(keys, return_inverse=True)
            sums = torch.zeros(keys.numel(), dtype=torch.float64, device=keys.device)
            weights = sums.index_add_(0, inverse, weights.double())
            rows, terms = torch.div(keys, num_terms, rounding_mode="floor"), keys % num_terms
    weights = weights.to(torch.float32, copy=True)
    kept = weights != 0
    if not bool(kept.all()):
        rows, terms, weights = rows[kept], terms[kept], weights[kept]
    edges = torch.arange(entries.count + 1, device=rows.device)
    return Rows(torch.searchsorted(rows, edges), terms.clone(), weights)
