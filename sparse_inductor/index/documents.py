"""Conversion of arguments that name documents, by their ids or by a boolean mask."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sources import from_array


def document_ids(ids: Iterable[int] | Tensor | np.ndarray, count: int) -> Tensor:
    """Return int64 ids below `count` for documents that are named by their ids or by a boolean mask.

    Raises the errors that `SparseIndex.delete` documents.
    """
    named = _named(ids, "ids", count)
    if named.dtype != torch.bool:
        return _checked(_integers(named).reshape(-1), 0, count)
    if named.shape != (count,):
        raise IndexError(
            f"a mask of documents must have shape ({count},), one place for every document; got {tuple(named.shape)}"
        )
    return named.nonzero().squeeze(1)


def filter_of(documents: Any, count: int, argument: str) -> Tensor:
    """Convert a filter of `search` to int64 ids below `count`, or to a mask [N] or [B, N] with N at most `count`."""
    named = _named(documents, argument, count)
    if named.dtype != torch.bool:
        if named.shape[1:].numel() > 1:
            raise ValueError(
                f"{argument}: ids are for all queries and [M], a mask may have a row for each; got {tuple(named.shape)}"
            )
        return _checked(_integers(named).reshape(-1), 0, count)
    if named.dim() not in (1, 2) or named.shape[-1] > count:
        raise IndexError(
            f"{argument}: a mask of documents has shape (N,) or (B, N), N at most {count}; got {tuple(named.shape)}"
        )
    return named


def candidate_ids(documents: Any, count: int) -> Tensor:
    """Return int64 ids [M] or [B, M], each below `count` or -1.

    Raises the errors that `SparseIndex.scores` documents.
    """
    ids = _integers(_named(documents, "documents", count))
    if ids.dim() not in (1, 2):
        raise ValueError(f"documents must be ids [M] or [B, M], got shape {tuple(ids.shape)}")
    return _checked(ids, -1, count)


def as_tensor(documents: Any) -> Tensor | None:
    """Convert a filter of `search` to a tensor, the form in which a compiled program passes it to the operator."""
    if documents is None or isinstance(documents, Tensor):
        return documents
    given = documents if isinstance(documents, np.ndarray) else list(documents)
    return torch.as_tensor(given, device="cpu")


def marked(documents: Any, like: Tensor, argument: str) -> Tensor:
    """Return a mask, [N] or [B, N], of the documents that a filter of `search` names. like: [N], or [B, N] if another
    filter has a row for each query."""
    count = like.shape[-1]
    named = filter_of(documents, count, argument).to(like.device)
    if named.dtype != torch.bool:
        marks = torch.zeros(count, dtype=torch.bool, device=like.device)
        return marks.scatter_(0, named, True)
    missing = count - named.shape[-1]
    return torch.nn.functional.pad(named, (0, missing)) if missing else named


def _named(documents: Any, argument: str, count: int) -> Tensor:
    """Convert an argument to a tensor: a boolean mask, or values that should be ids. An empty argument becomes an empty
    tensor of ids unless it is boolean."""
    if isinstance(documents, np.ndarray) and documents.dtype.kind in "biufc":
        documents = from_array(documents)
    elif not isinstance(documents, torch.Tensor):
        documents = _listed(documents, argument, count)
    found = documents.detach()
    found = found if found.layout == torch.strided else found.to_dense()
    return found if found.numel() or found.dtype == torch.bool else found.long()


def _listed(documents: Any, argument: str, count: int) -> Tensor:
    """Convert an iterable of Python ids or booleans, or of rows of them."""
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Iterable):
        kind = type(documents).__name__
        raise TypeError(
            f"{argument} must be document ids or a boolean mask of all documents, got {kind} {documents!r}"
        )
    given = list(documents)
    kinds = {*map(type, given)}
    if kinds and kinds <= {list, tuple, np.ndarray, torch.Tensor}:
        rows = [_named(row, argument, count) for row in given]
        if len({(row.shape, row.dtype) for row in rows}) == 1:
            return torch.stack(rows)
    if kinds and kinds <= {bool, np.bool_}:
        return torch.tensor(given, dtype=torch.bool, device="cpu")
    if kinds != {int}:
        given = [as_int(i, "a document id") for i in given]
    try:
        return from_array(np.array(given, np.int64))
    except OverflowError:
        raise IndexError(_no_document(given, 0, count)) from None


def _integers(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype in (torch.bool, torch.uint8):
        also = ": is it a mask? That is torch.bool" if ids.dtype == torch.uint8 else ""
        raise TypeError(f"document ids must be integers, got {ids.dtype}{also}")
    return ids.long()


def _checked(ids: Tensor, least: int, count: int) -> Tensor:
    """Return the ids, int64, after checking that all are from `least` to `count` - 1."""
    if ids.numel():
        low, high = torch.aminmax(ids)
        if not least <= int(low) <= int(high) < count:
            raise IndexError(_no_document(ids.flatten().tolist(), least, count))
    return ids


def _no_document(ids: Iterable[int], least: int, count: int) -> str:
    wrong = next(i for i in ids if not least <= i < count)
    which = f"ids are 0 to {count - 1}" if count else "there are none"
    return f"there is no document {wrong}: {which}"


def as_count(value: Any, name: str) -> int:
    """Return the value as an int of at least 0. Works under compiler tracing, too."""
    if not isinstance(value, int) or isinstance(value, bool):
        value = as_int(value, name)
    if value < 0:
        raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
    return value


def as_float(value: Any, name: str) -> float:
    """Convert a real number to a float that is not NaN.

    Raises ValueError for other values.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name} must be a number and not NaN, got {value!r}")
    return number


def as_int(value: Any, name: str) -> int:
    """Convert an integer of any type to a Python int.

    Raises an error for other values and for booleans: TypeError for a document id, else ValueError.
    """
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise (TypeError if name == "a document id" else ValueError)(
        f"{name} must be an int, got {value!r}"
    )
