"""What a search finds, by brute force."""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def best(dense: Tensor, q: Tensor, k: int, left: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The true top-k of the documents that are left, bool [N] or [B, N]: fp64 products rounded to fp32, ties by lowest
    id, -inf and -1 where documents run out."""
    scores = (q.double() @ dense.double().t()).float() + 0.0
    if left is not None:
        scores = scores.masked_fill(~left, -INF)
    values, ids = torch.sort(scores, dim=1, descending=True, stable=True)
    values = torch.nn.functional.pad(values, (0, k), value=-INF)[:, :k]
    ids = torch.nn.functional.pad(ids, (0, k), value=-1)[:, :k]
    return values, ids.masked_fill(values == -INF, -1)
