"""Documents that an argument names: by their ids, or by a boolean mask."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sources import from_array

__all__ = ["as_count", "as_int", "as_tensor", "candidate_ids", "document_ids", "marked"]


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
            whole = [as_int(i, "a document id") for i in named]
            for i in whole:
                if not 0 <= i < count:  # before it has to fit 64 bits
                    raise IndexError(_no_document(i, count))
            ids = torch.tensor(whole, dtype=torch.int64, device="cpu")
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
    ids = ids.long().reshape(-1)
    bad = (ids < 0) | (ids >= count)
    if bool(bad.any()):
        raise IndexError(_no_document(int(ids[bad][0]), count))
    return ids


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
    ids = ids.long()
    bad = (ids < -1) | (ids >= count)
    if bool(bad.any()):
        raise IndexError(_no_document(int(ids[bad][0]), count))
    return ids


def as_tensor(documents: Any) -> Tensor | None:
    """An argument of `search` as a compiled program hands it on."""
    if documents is None or isinstance(documents, Tensor):
        return documents
    return torch.as_tensor(documents, device="cpu")


def marked(documents: Any, like: Tensor, argument: str) -> Tensor:
    """A mask of the documents that an argument of `search` names, [N] or [B, N]; like: [N], or [B, N] if another
    argument had a row for each query."""
    count = like.shape[-1]
    if not isinstance(documents, (Tensor, np.ndarray)) or documents.dtype not in (
        torch.bool,
        np.bool_,
    ):
        marks = torch.zeros(count, dtype=torch.bool, device=like.device)
        marks[document_ids(documents, count).to(like.device)] = True
        return marks
    mask = (documents if isinstance(documents, Tensor) else from_array(documents)).to(like.device)
    if mask.dim() not in (1, 2) or mask.shape[-1] > count:
        raise IndexError(
            f"{argument}: a mask of documents has shape (N,) or (B, N), N at most {count}; got {tuple(mask.shape)}"
        )
    return torch.nn.functional.pad(mask, (0, count - mask.shape[-1]))


def _no_document(number: int, count: int) -> str:
    which = f"ids are 0 to {count - 1}" if count else "there are none"
    return f"there is no document {number}: {which}"


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
