"""Gate and up projections that are one parameter [2, K, N], multiplied at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from corpus.relu_ffn.registry import B, K, N, S, function, tokens, weight


def stacked(*sizes: int, **fields: Any) -> Callable[[Callable], Callable]:
    """Register `forward(x, w, down)` with a stack of weights of these sizes."""

    def make(forward: Callable) -> tuple:
        w = weight(sizes[0] * sizes[1], sizes[2]).detach().view(sizes).requires_grad_()
        return forward, (tokens(), w, weight(N, K, seed=36))

    return function(make, prefix="stacked_", **fields)


@stacked(2, K, N)
def einsum_first(x, w, down):
    """einsum to [2, B, S, N], taken apart by unpacking"""
    gate, up = torch.einsum("bsk,ekn->ebsn", x, w)
    return (F.relu(gate) * up) @ down


@stacked(2, N, K)
def einsum_inside(x, w, down):
    gate, up = torch.einsum("bsk,enk->bsen", x, w).unbind(2)
    return torch.einsum("bsn,nk->bsk", F.relu(gate).square() * up, down)


@stacked(K, 2, N)
def flax_order(x, w, down):
    """weights as [K, 2, N], the statistic of TwELL beside it"""
    h = torch.einsum("...k,kgn->...gn", x, w)
    a = F.relu(h[..., 0, :]) * h[..., -1, :]
    return a @ down, a.abs().mean()


@stacked(2, K, N)
def bmm_of_repeated_tokens(x, w, down):
    h = torch.bmm(x.reshape(1, -1, K).expand(2, -1, -1), w)
    return ((F.relu(h[0]) * h.select(0, 1)) @ down).view(B, S, K)


@stacked(2, N, K)
def broadcast_matmul(x, w, down):
    """matmul, tokens and weights with an axis to broadcast"""
    h = torch.matmul(x.unsqueeze(0), w.transpose(1, 2).unsqueeze(1))
    return (F.relu(h[0]) * h[1]) @ down


@stacked(3, K, N, expect="no_rewrite", why="also read by sum", at="h[2].sum()")
def third_is_read(x, w, down):
    """what else is computed together is read"""
    h = torch.einsum("bsk,ekn->ebsn", x, w)
    return (F.relu(h[0]) * h[1]) @ down, h[2].sum()


@stacked(2, K, N, expect="no_rewrite", why="read different inputs", at="h[1]")
def tokens_of_their_own(x, w, down):
    """bmm of two inputs"""
    h = torch.bmm(torch.stack([x, x.flip(1)]).view(2, B * S, K), w)
    return ((F.relu(h[0]) * h[1]) @ down).view(B, S, K)


@stacked(
    2, K, N, expect="no_rewrite", why="changed in place before", modes=(False,), at="torch.einsum("
)
def tokens_written_in_between(x, w, down):
    x = x.clone()
    h = torch.einsum("bsk,ekn->ebsn", x, w)
    x *= 2
    return (F.relu(h[0]) * h[1]) @ down
