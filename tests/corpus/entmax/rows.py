"""The row transformation alone: routers, pooling, probabilities that others read."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each
from corpus.entmax.registry import SCALE, TRAIN, attention, keep, normal, program, rows

entmax = pytest.importorskip("entmax")


each(
    rows(),
    last_axis=lambda x: entmax.entmax15(x, dim=-1),
    first_axis=lambda x: entmax.sparsemax(x, 0),
    middle_axis=lambda x: entmax.entmax_bisect(x, alpha=1.4, dim=1),
    # k= of a router over many experts
    axis_by_name_and_k=lambda x: entmax.sparsemax(X=x, dim=2, k=3),
)


@rows(shape=(6, 9))
def router(x):
    """a gate: logits to weights, and a load term"""
    gates = entmax.entmax15(x * 0.5, dim=-1)
    return gates, (gates > 0).float().mean(0)


no_attention = functools.partial(attention, "no_rewrite", prefix="no_attention_")


@attention(pattern="entmax")
@no_attention("probabilities are also returned", at="attn =")
def probabilities_returned(q, k, v, mask):
    """output_attentions=True"""
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return attn @ v, attn


@attention(pattern="entmax", modes=TRAIN)
@no_attention("dropout is active", TRAIN, at="F.dropout(")
def dropout_in_training(q, k, v, mask):
    """attention dropout between probabilities and values"""
    return F.dropout(entmax.entmax15(q @ k.mT * SCALE, dim=-1), 0.25) @ v


@attention(pattern="entmax")
def sparsity_counted(q, k, v, mask):
    """the share of zeros, logged"""
    attn = entmax.sparsemax(q @ k.mT * SCALE, dim=-1)
    return attn @ v, (attn == 0).float().mean()


@attention(pattern="entmax", inputs=lambda: (normal((2, 7, 8), 1), normal((8,), 2), keep()))
def additive_pooling(states, w, mask):
    """scores from one linear; no keys"""
    scores = torch.tanh(states) @ w
    attn = entmax.entmax15(scores.masked_fill(~mask, -1e9), dim=1)
    return (states * attn.unsqueeze(-1)).sum(1)


@program(pattern="entmax")
def classifier_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), entmax.Entmax15(dim=1)), (normal((4, 6), 1),)


@program(pattern="entmax", rewrites=2)
def two_in_a_row():
    return lambda x: entmax.sparsemax(entmax.entmax15(x, -1) * 4, -1), (normal((4, 6), 1, 2.0),)
