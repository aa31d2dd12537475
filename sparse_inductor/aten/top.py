"""Exact top-k of scores: in descending order, equal scores in ascending order of id, NaN above all numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def keys_of(scores: Tensor, first: int) -> Tensor:
    """Return int64 keys of fp32 scores [B, n] of the documents first, first + 1, ...: larger keys are better documents.

    The high half holds the bits of the score, transformed so that they compare like the score (-0 as 0, every NaN as
    the same NaN). The low half is the complement of the id. All keys are thus different, and a top-k of them is unique.
    """
    ids = torch.arange(first, first + scores.shape[-1], device=scores.device)
    return keys_with_ids(scores, ids)


def keys_with_ids(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the keys of `keys_of` for documents with given ids."""
    scores = torch.where(scores.isnan(), float("nan"), scores + 0.0)
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << _ID_BITS) | (_ID_MASK - ids)


def scores_and_ids(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp32 scores and int64 ids that the keys encode."""
    ordered = (keys >> _ID_BITS).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), _ID_MASK - (keys & _ID_MASK)


def best_of(parts: Iterable[tuple[int, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """Return the scores and ids of the k best over parts (first id, scores [B, n]), in descending order.

    Holds one part and k keys per query. fp64 scores do not fit into a key and are sorted stably instead.
    """
    best: Tensor | None = None
    wide: tuple[Tensor, Tensor] | None = None
    for first, scores in parts:
        if scores.dtype == torch.float64:
            ids = torch.arange(first, first + scores.shape[1], device=scores.device)
            ids = ids.expand(scores.shape[0], -1)
            if wide is not None:
                scores, ids = torch.cat((wide[0], scores), 1), torch.cat((wide[1], ids), 1)
            scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
            wide = scores[:, :k], ids.gather(1, order[:, :k])
            continue
        keys = keys_of(scores.float(), first)
        if best is not None:
            keys = torch.cat((best, keys), 1)
        best = torch.topk(keys, min(k, keys.shape[1]), dim=1).values
    if wide is not None:
        return wide[0].contiguous(), wide[1].contiguous()  # a sort keeps the strides of its input
    assert best is not None, "at least one part"
    return scores_and_ids(best)
