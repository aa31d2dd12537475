"""Heads: grouped queries, one key head for all, transformers' attention functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from corpus.entmax.registry import B, D, E, H, L, attention, hidden, keep, normal, program, qkv

entmax = pytest.importorskip("entmax")
SCALE = 1 / math.sqrt(D)


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
def repeated_by_interleave(q, k, v, mask):
    """repeat_interleave(n, dim=1)"""
    k, v = k.repeat_interleave(2, dim=1), torch.repeat_interleave(v, 2, 1)
    return entmax.entmax15(q @ k.transpose(2, 3) * SCALE, dim=-1) @ v


@attention(inputs=grouped)
def grouped_einsum(q, k, v, mask):
    """bhgqd,bhkd->bhgqk"""
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


class SelfAttention(nn.Module):
    """BERT's self attention with separate projections and a switched-off dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(E, E) for _ in range(3))
        self.dropout = nn.Dropout(0.0)

    def split(self, x):
        return x.view(*x.shape[:-1], H, D).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D)
        scores = scores + mask
        context = torch.matmul(self.dropout(entmax.entmax15(scores, dim=-1)), v)
        context = context.permute(0, 2, 1, 3).contiguous()
        return context.view(*context.shape[:-2], E)


@program()
def bert_self_attention():
    """BERT"""
    mask = (1.0 - keep()[:, None, None, :].float()) * -10000.0
    return SelfAttention(), (hidden(), mask)
