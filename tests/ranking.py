"""Random collections and queries, and an exact search by brute force to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def sparse(rows: int, terms: int, share: float, seed: int = 0) -> Tensor:
    """Return random weights [rows, terms] in [0, 1), of which about `share` are not 0."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, terms, generator=g) * (torch.rand(rows, terms, generator=g) < share)


def counts(rows: int, terms: int, seed: int = 0, share: float = 1.0) -> Tensor:
    """Return random weights 0, 1 and 2, so that equal scores are common."""
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(3, (rows, terms), generator=g).float()
    return drawn * (torch.rand(rows, terms, generator=g) < share)


def best(dense: Tensor, q: Tensor, k: int, left: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the exact top-k values and ids of the documents where `left`, bool [N] or [B, N], is true.

    Scores are fp64 products rounded to fp32. Ties go to the lowest id. Where there are fewer than k documents, values
    are -inf and ids -1.
    """
    scores = (q.double() @ dense.double().t()).float() + 0.0
    if left is not None:
        scores = scores.masked_fill(~left, -INF)
    values, ids = torch.sort(scores, dim=1, descending=True, stable=True)
    values = torch.nn.functional.pad(values, (0, k), value=-INF)[:, :k]
    ids = torch.nn.functional.pad(ids, (0, k), value=-1)[:, :k]
    return values, ids.masked_fill(values == -INF, -1)
