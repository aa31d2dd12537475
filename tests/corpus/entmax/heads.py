"""Heads: grouped queries, one key head for all, transformers' attention functions."""

from __future__ import annotations

import torch
from torch import nn

from corpus.entmax.registry import (
    INFER,
    SCALE,
    B,
    D,
    E,
    H,
    L,
    attention,
    entmax,
    hidden,
    keep,
    normal,
    program,
    qkv,
)


def repeat_kv(x, n):
    """transformers' repeat_kv, in its own words"""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, n, length, width).reshape(batch, -1, length, width)


def grouped():
    return (*qkv(kv_heads=2), keep())


@attention(inputs=grouped)
def repeated_by_expand(q, k, v, mask):
    """Llama"""
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    return entmax.entmax15(q @ k.transpose(2, 3) * SCALE, dim=-1) @ v


@attention(inputs=grouped)
def grouped_einsum(q, k, v, mask):
    q = q.reshape(B, 2, 2, L, D)
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * SCALE
    scores = scores.masked_fill(~mask[:, None, None, None], float("-inf"))
    attn = entmax.entmax15(scores, dim=-1)
    return torch.einsum("bhgqk,bhkd->bhgqd", attn, v).reshape(B, H, L, D)


@attention(inputs=grouped)
def grouped_broadcast(q, k, v, mask):
    """[B, Hkv, G, L, D] times [B, Hkv, 1, L, D]"""
    q = q.view(B, 2, 2, L, D)
    scores = torch.matmul(q, k.unsqueeze(2).transpose(-1, -2)) * SCALE
    return (entmax.entmax15(scores, dim=-1) @ v.unsqueeze(2)).flatten(1, 2)


@attention(inputs=grouped)
def groups_before_key_heads(q, k, v, mask):
    """[B, G, Hkv, L, D] times [B, 1, Hkv, L, D], and a view of the result"""
    q = q.view(B, 2, 2, L, D)
    scores = q @ k.unsqueeze(1).mT * SCALE
    return (entmax.entmax15(scores, dim=-1) @ v.unsqueeze(1)).view(B, H, L, D)


@attention(inputs=lambda: (*qkv(kv_heads=1), keep()))
def one_key_head(q, k, v, mask):
    """multi-query attention: the key head broadcasts"""
    scores = q @ k.transpose(-1, -2) * SCALE
    return entmax.sparsemax(scores, dim=-1) @ v


@attention(inputs=lambda: (normal((B, 3, H, L, D), 1), normal((B, 3, H, L, D), 2), keep()))
def five_axes(q, k, mask):
    """frames or rows beside the batch: [B, T, H, L, D]"""
    scores = q @ k.transpose(-1, -2) * SCALE
    scores = scores.masked_fill(~mask[:, None, None, None], -1e9)
    return entmax.entmax15(scores, dim=-1) @ k


@program()
def memories_in_linears():
    """external attention: keys and values are the weights of two linears"""
    keys, values = nn.Linear(E, 16), nn.Linear(16, E)
    return lambda x: values(entmax.sparsemax(keys(x), -1)), (hidden(),)


@program(modes=INFER)
def memories_in_convolutions():
    """the same over channels"""
    keys, values = nn.Conv1d(E, 16, 1, bias=False), nn.Conv1d(16, E, 1, bias=False)
    return lambda x: values(entmax.sparsemax(keys(x), 1)), (hidden().mT,)


@attention(inputs=lambda: (*qkv(), normal((H, D, 6), 9)), modes=INFER)
def projected_by_an_einsum(q, k, v, w):
    """heads and their width are summed up in the projection"""
    attn = entmax.entmax15(torch.einsum("bhid,bhjd->bhij", q, k), -1)
    out = torch.einsum("bhij,bhjd->bihd", attn, v)
    return torch.einsum("bihd,hde->bie", out, w)


@attention(inputs=lambda: tuple(normal((2, L, D), seed) for seed in range(4)))
def values_by_baddbmm(q, k, v, residual):
    """the residual is added by the product with the values"""
    attn = entmax.entmax15(torch.baddbmm(q.new_zeros(1), q, k.mT, alpha=0.3), -1)
    return torch.baddbmm(residual, attn, v, beta=0.5, alpha=2.0)


@attention(inputs=lambda: tuple(normal((L, D), seed) for seed in range(3)), modes=INFER)
def products_without_operators(q, k, v):
    """inner for the scores, tensordot for the values"""
    return torch.tensordot(entmax.entmax15(torch.inner(q, k), -1), v, dims=1)
