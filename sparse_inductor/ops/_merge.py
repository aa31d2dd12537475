"""The top k over several processes: each process converts its results to keys and merges the keys of all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..aten.top import keys_with_ids, scores_and_ids
from ..layers import Operator, has_kernels, launches

_NONE = torch.iinfo(torch.int64).min  # the key of an empty place in the results


def keys(scores: Tensor, ids: Tensor, first: int) -> Tensor:
    """int64 keys [B, k] of results. A larger score, or the lower id of equal scores, has the larger key.

    first: the number of documents in the preceding processes, which is added to the ids.
    """
    return _run(_KEYS, scores, ids, first)


def merged(keys: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and ids [B, k] of the k best of keys [world, B, k]. own: this process's scores [B, k]."""
    return _run(_MERGED, keys, own)


def _run(operator: Operator, t: Tensor, *rest: Any) -> Any:
    # While compiling, Dynamo traces the ATen implementation.
    if has_kernels(t) and not torch.compiler.is_compiling():
        return operator.run(operator.fn, (t, *rest))
    return operator.fn(t, *rest)


def _keys(scores: Tensor, ids: Tensor, first: int) -> Tensor:
    if not torch.compiler.is_compiling() and launches(scores):
        from ..kernels.sparse_scores import merge as kernel

        return kernel.keys(scores, ids, first)
    lost = ids < 0
    return keys_with_ids(scores, torch.where(lost, 0, ids + first)).masked_fill(lost, _NONE)


def _merged(keys: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling() and launches(keys):
        from ..kernels.sparse_scores import merge as kernel

        return kernel.merged(keys, own)
    best = torch.topk(keys.transpose(0, 1).flatten(1), own.shape[1]).values
    none = best == _NONE
    found, ids = scores_and_ids(best)
    found = found.masked_fill(none, float("-inf"))
    # A query that is not finite has NaN scores in every process.
    return found.masked_fill(own.isnan(), float("nan")), ids.masked_fill(none, -1)


_KEYS = Operator("index_keys", _keys)
_MERGED = Operator("index_merged", _merged)
