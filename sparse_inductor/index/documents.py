"""Documents that an argument names: by their ids, or by a boolean mask."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sources import from_array


def document_ids(ids: Iterable[int] | Tensor | np.ndarray, count: int) -> Tensor:
    """int64 ids below `count` of documents that are named by their ids or by a boolean mask.

    Raises what `SparseIndex.delete` documents.
    """
    if not isinstance(ids, (torch.Tensor, np.ndarray)):
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise TypeError(
                f"ids must be document ids or a boolean mask of all documents, got {type(ids).__name__} {ids!r}"
            )
        named = list(ids)
        if named and all(isinstance(i, (bool, np.bool_)) for i in named):
            ids = torch.tensor(named, dtype=torch.bool, device="cpu")
        else:
            if {*map(type, named)} != {int}:
                named = [as_int(i, "a document id") for i in named]
            try:
                ids = np.array(named, np.int64)
            except OverflowError:
                raise IndexError(_no_document(named, 0, count)) from None
    ids = (ids if isinstance(ids, torch.Tensor) else from_array(ids)).detach()
    ids = ids.to_dense() if ids.layout != torch.strided else ids
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise IndexError(
                f"a mask of documents must have shape ({count},), one place for every document; got {tuple(ids.shape)}"
            )
        return ids.nonzero().squeeze(1)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.uint8:
        also = ": is it a mask? That is torch.bool" if ids.dtype == torch.uint8 else ""
        raise TypeError(f"document ids must be integers, got {ids.dtype}{also}")
    return _checked(ids.long().reshape(-1), 0, count)


def candidate_ids(documents: Any, count: int) -> Tensor:
    """int64 ids [M] or [B, M] below `count`, or -1.

    Raises what `SparseIndex.scores` documents.
    """
    ids = documents if isinstance(documents, Tensor) else from_array(np.asarray(documents))
    if not ids.numel():
        ids = ids.long()
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"document ids must be integers, got {ids.dtype}")
    if ids.dim() not in (1, 2):
        raise ValueError(f"documents must be ids [M] or [B, M], got shape {tuple(ids.shape)}")
    return _checked(ids.long(), -1, count)


def as_tensor(documents: Any) -> Tensor | None:
    """An argument of `search` as a compiled program hands it on."""
    if documents is None or isinstance(documents, Tensor):
        return documents
    return torch.as_tensor(documents, device="cpu")


def is_mask(documents: Any) -> bool:
    """Whether documents are named by a boolean mask, and not by their ids."""
    booleans = torch.bool, np.bool_
    return isinstance(documents, (Tensor, np.ndarray)) and documents.dtype in booleans


def marked(documents: Any, like: Tensor, argument: str) -> Tensor:
    """A mask of the documents that an argument of `search` names, [N] or [B, N]; like: [N], or [B, N] if another
    argument had a row for each query."""
    count = like.shape[-1]
    if not is_mask(documents):
        marks = torch.zeros(count, dtype=torch.bool, device=like.device)
        return marks.scatter_(0, document_ids(documents, count).to(like.device), True)
    mask = (documents if isinstance(documents, Tensor) else from_array(documents)).to(like.device)
    if mask.dim() not in (1, 2) or mask.shape[-1] > count:
        raise IndexError(
            f"{argument}: a mask of documents has shape (N,) or (B, N), N at most {count}; got {tuple(mask.shape)}"
        )
    missing = count - mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, missing)) if missing else mask


def _checked(ids: Tensor, least: int, count: int) -> Tensor:
    """The ids, int64, if all are from `least` to `count` - 1."""
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
    """An int of at least 0, also where a compiler traces."""
    if not isinstance(value, int) or isinstance(value, bool):
        value = as_int(value, name)
    if value < 0:
        raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
    return value


def as_int(value: Any, name: str) -> int:
    """An int of Python from whatever is one.

    Raises TypeError for other things and for booleans, ValueError for floats.
    """
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise (TypeError if name == "a document id" else ValueError)(
        f"{name} must be an int, got {value!r}"
    )
