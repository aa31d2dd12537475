"""Exact top-k of scores: the largest first, equal ones by lowest document id, NaN above all numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def keys_of(scores: Tensor, first: int) -> Tensor:
    """int64 keys of fp32 scores [B, n] of the documents first, first + 1, ...: a larger key is a better document.

    The high half is the score's bits in the order of the numbers (-0 as 0, every NaN as one), the low half the id,
    turned round, so that all keys are different and any selection is the selection.
    """
    ids = torch.arange(first, first + scores.shape[-1], device=scores.device)
    return keys_with_ids(scores, ids)


def keys_with_ids(scores: Tensor, ids: Tensor) -> Tensor:
    """The same for documents named one by one."""
    scores = torch.where(scores.isnan(), float("nan"), scores + 0.0)
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << _ID_BITS) | (_ID_MASK - ids)


def scores_and_ids(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 scores and int64 ids that keys were made of."""
    ordered = (keys >> _ID_BITS).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), _ID_MASK - (keys & _ID_MASK)


def best_of(parts: Iterable[tuple[int, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k best over parts (first id, scores [B, n]), in descending order.

    Holds one part and k keys a query. fp64 scores do not fit a key: they are sorted, stably.
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
        return wide[0].contiguous(), wide[1].contiguous()  # a sort keeps its input's order
    assert best is not None, "at least one part"
    return scores_and_ids(best)
