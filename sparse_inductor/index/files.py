"""The file of an index: its segments as tensors, and checks that the contents of a file form a valid index."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

from . import storage
from .contents import Contents
from .progress import Progress
from .segment import WEIGHTS, Segment, checked_kind, term_dtype

_KIND = "sparse_inductor.SparseIndex"
_VERSION = 1


def pending(
    path: str | os.PathLike[str],
    contents: Contents,
    weights: str,
    progress: bool = False,
    more: Mapping[str, Tensor] | None = None,
) -> storage.PendingFile:
    """Write the file of an index of this precision, complete but not yet in place. `more` are additional tensors."""
    tensors = {"deleted": contents.deleted, **(more or {})}
    for i, s in enumerate(contents.segments):
        tensors.update(
            {f"{i}.offsets": s.offsets, f"{i}.terms": s.terms, f"{i}.weights": s.weights}
        )
    facts = {
        "num_terms": contents.num_terms,
        "weights": weights,
        "segments": [[s.scale, s.signed, s.error] for s in contents.segments],
    }
    with Progress(progress, "MiB", "written", step=256) as shown:

        def write(file: BinaryIO) -> None:
            storage.write_tensors(
                file, tensors, _KIND, _VERSION, facts, lambda size: shown.add(size >> 20)
            )

        return storage.PendingFile(path, write)


def contents(
    path: str | os.PathLike[str], device: torch.device, verify: bool, progress: bool
) -> tuple[Contents, str, dict[str, Tensor]]:
    """Return the contents of an index file on a device, the precision of the index, and all tensors of the file.

    Raises FileNotFoundError and IndexFileError.
    """
    with Progress(progress, "documents", "loaded") as shown:
        tensors, facts = storage.read(path, _KIND, _VERSION, verify)
        try:
            num_terms, weights = checked_kind(facts["num_terms"], facts["weights"])
            segments = [
                _sound_segment(tensors, i, num_terms, weights, *about).to(device)
                for i, about in enumerate(facts["segments"])
            ]
            deleted = _sound_marks(tensors["deleted"], sum(s.count for s in segments))
        except (KeyError, TypeError, ValueError) as error:
            raise storage.IndexFileError(
                f"{path} is damaged: its contents are not an index ({error})"
            ) from error
        made = Contents.of(num_terms, shown.each(segments), deleted.to(device))
        return made, weights, tensors


def _sound_segment(
    tensors: Mapping[str, Tensor],
    number: int,
    num_terms: int,
    precision: str,
    scale: float,
    signed: bool,
    error: float,
) -> Segment:
    """Return a segment of a file after checking that none of its values leads to an access out of bounds. The check is
    cheap compared to building the postings."""
    offsets, terms, weights = (
        tensors[f"{number}.{name}"] for name in ("offsets", "terms", "weights")
    )
    s = Segment(offsets, terms, weights, float(scale), bool(signed), float(error))
    dtypes = torch.int64, term_dtype(num_terms), WEIGHTS[precision]
    if (offsets.dtype, terms.dtype, weights.dtype) != dtypes or not offsets.numel():
        raise ValueError(f"the dtypes of segment {number} differ from those of the index")
    if not terms.numel() == weights.numel() == int(offsets[-1]):
        raise ValueError(
            f"segment {number} has {terms.numel()} terms and {weights.numel()} weights, not as many as its offsets say"
        )
    if int(offsets[0]) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"the offsets of segment {number} do not rise from 0")
    if terms.numel() and not 0 <= int(s.term_ids().min()) <= int(s.term_ids().max()) < num_terms:
        raise ValueError(f"a term of segment {number} is not in [0, {num_terms})")
    if not (math.isfinite(s.scale) and math.isfinite(s.error)):
        raise ValueError(f"the scale of segment {number} is {scale}")
    return s


def _sound_marks(deleted: Tensor, count: int) -> Tensor:
    """Return the marks of deleted documents of a file, as a copy."""
    if deleted.dtype != torch.bool or deleted.shape != (count,):
        raise ValueError(
            f"the mask of deleted documents is {deleted.dtype} {tuple(deleted.shape)}, not bool ({count},)"
        )
    return deleted.view(torch.uint8) != 0  # bytes other than 0 and 1 are not valid booleans
