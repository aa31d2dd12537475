"""Spellings of the scores, of alpha and of the product with the values; and probabilities alone."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each
from corpus.entmax.registry import (
    INFER,
    SCALE,
    TRAIN,
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
    rows,
)


@attention()
@attention(prefix="any_size_", dynamic=True)
def textbook(q, k, v, mask):
    """softmax replaced by entmax15 in the annotated transformer"""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(entmax.entmax15(scores, dim=-1), v)


each(
    attention(),
    operator_at=lambda q, k, v, mask: entmax.sparsemax(q @ k.mT * SCALE) @ v,
    not_renormalised=lambda q, k, v, mask: (
        entmax.entmax_bisect(q @ k.mT * SCALE, alpha=1.3, n_iter=40, ensure_sum_one=False) @ v
    ),
    alpha_float=lambda q, k, v, mask: entmax.entmax_bisect(q @ k.mT * SCALE, alpha=1.3, dim=-1) @ v,
    bisect_of_sparsemax=lambda q, k, v, mask: entmax.sparsemax_bisect(q @ k.mT * SCALE, dim=-1) @ v,
)


@attention(dynamic=True)
def any_size_mask_of_merged_heads(q, k, v, mask):
    """The mask splits the axis of batch and heads; no operand has the number of heads as an axis of its own"""
    b, h, n = q.shape[:3]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    keep = mask[:, None].expand(b, h, n).reshape(b * h, 1, -1)
    scores = (q @ k.mT * SCALE).masked_fill(keep == 0, -1e9)
    return (entmax.sparsemax(scores, -1) @ v).view(b, h, n, -1)


@attention()
def both_scaled(q, k, v, mask):
    """q and k each divided by d**(1/4), as Megatron and SD do"""
    q, k = q / D**0.25, k / D**0.25
    return entmax.entmax15(torch.einsum("bhid,bhjd->bhij", q, k), dim=-1) @ v


@attention()
def einsum_length_first(q, k, v, mask):
    """the T2T layout: blhe,bshe->bhls and bhls,bshd->blhd (Informer, Autoformer, reformer-style)"""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("blhe,bshe->bhls", q, k)
    attn = entmax.entmax15(SCALE * scores, dim=-1)
    return torch.einsum("bhls,bshd->blhd", attn, v).contiguous()


@attention()
def keys_by_rows(q, k, v, mask):
    """scores transposed: entmax over axis 2 of [B, H, Lk, Lq]"""
    scores = k @ q.transpose(-1, -2) * SCALE
    attn = entmax.entmax15(scores, dim=2)
    return attn.transpose(-1, -2) @ v


@attention()
def baddbmm_alpha(q, k, v, mask):
    """Bloom and Megatron: torch.baddbmm(empty, q, k, beta=0, alpha=scale)"""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    room = q.new_zeros(B * H, L, L)
    scores = torch.baddbmm(room, q, k.transpose(1, 2), beta=0.0, alpha=SCALE)
    attn = entmax.entmax15(scores.view(B, H, L, L), dim=-1)
    return torch.bmm(attn.view(B * H, L, L), v)


@attention()
def values_by_product_and_sum(q, k, v, mask):
    """(attn.unsqueeze(-1) * v).sum: pooling written out"""
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return (attn.unsqueeze(-1) * v.unsqueeze(2)).sum(dim=3)


@attention()
def values_without_a_width(q, k, v, mask):
    """one number a key"""
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return torch.einsum("bhqk,bhk->bhq", attn, v[..., 0])


@attention()
def heads_added_up(q, k, v, mask):
    """the sum is no second product with the values"""
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return (attn @ v).sum(1)


@attention()
def alpha_tensor(q, k, v, mask):
    """a 0-dim tensor made on the way"""
    alpha = torch.tensor(1.25)
    return entmax.entmax_bisect(q @ k.mT * SCALE, alpha) @ v


@attention(inputs=lambda: (*qkv(), normal((H,), 7)))
def alpha_per_head(q, k, v, raw):
    """Correia et al.: alpha = 1 + sigmoid(a), one per head, with its gradient"""
    alpha = 1 + torch.sigmoid(raw).view(1, -1, 1, 1)
    return entmax.entmax_bisect(q @ k.mT * SCALE, alpha=alpha, dim=-1) @ v


@attention(modes=TRAIN, inputs=lambda: (*qkv(), normal((H,), 8)))
def temperature_per_head(q, k, v, t):
    """a learned temperature per head, as in Swin v2, which needs its gradient"""
    scale = t.exp().view(H, 1, 1)
    return entmax.entmax15(q @ k.mT * scale, dim=-1) @ v


class Module(nn.Module):
    """One attention head as a module that has the package's module as an attribute."""

    def __init__(self, transform: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E)
        self.transform = transform

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.transform((q @ k.transpose(-2, -1)) * D**-0.5)
        return self.out((attn @ v).transpose(1, 2).reshape(B, L, E))


each(
    program(),
    # timm's attention, packed qkv
    packed_qkv_entmax15_module=lambda: (Module(entmax.Entmax15(dim=-1)), (hidden(),)),
    packed_qkv_sparsemax_module=lambda: (Module(entmax.Sparsemax(dim=3)), (hidden(),)),
)


@attention(modes=INFER, precision=torch.bfloat16, inputs=lambda: (*qkv(dtype=torch.bfloat16),))
def upcast_and_back(q, k, v):
    """transformers: softmax(dim=-1, dtype=float32).to(query.dtype)"""
    attn = entmax.entmax15((q @ k.mT * SCALE).float(), dim=-1).to(q.dtype)
    return attn @ v


@attention(precision=torch.bfloat16, inputs=lambda: (*qkv(dtype=torch.bfloat16),))
def operands_upcast(q, k, v):
    """scores in float from the start"""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * SCALE
    return torch.matmul(entmax.entmax15(scores, -1).type_as(v), v)


@program(autocast=torch.bfloat16, precision=torch.bfloat16)
def under_autocast():
    return Module(entmax.EntmaxBisect(1.5)), (hidden(),)


@attention(inputs=lambda: (*qkv(keys=11), keep(11)))
def cross_attention(q, k, v, mask):
    scores = q @ k.transpose(2, 3) * SCALE
    scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    return entmax.sparsemax(scores, dim=-1) @ v


@attention(inputs=lambda: (normal((B, L, D), 1), normal((B, L, D), 2), normal((B, L, 2 * D), 4)))
def single_head_of_other_width(q, k, v):
    """[B, L, D] with values twice as wide"""
    return entmax.entmax15(q @ k.transpose(1, 2) / 3.0, dim=2) @ v


@attention(
    pattern="entmax",
    beside="entmax_attention",
    inputs=lambda: (normal((D,), 1), normal((B, L, D), 2)),
)
def pooling_by_a_learned_query(query, states):
    """attention pooling: one query vector for a batch of sequences"""
    scores = torch.matmul(states, query)
    attn = entmax.entmax15(scores, dim=-1)
    return torch.bmm(attn.unsqueeze(1), states).squeeze(1)


each(
    rows(),
    last_axis=lambda x: entmax.entmax15(x, dim=-1),
    first_axis=lambda x: entmax.sparsemax(x, 0),
    middle_axis=lambda x: entmax.entmax_bisect(x, alpha=1.4, dim=1),
    # the argument k, as for a router over many experts
    axis_by_name_and_k=lambda x: entmax.sparsemax(X=x, dim=2, k=3),
)


@rows(shape=(6, 9))
def router(x):
    """a gate: logits to weights, and a load term"""
    gates = entmax.entmax15(x * 0.5, dim=-1)
    return gates, (gates > 0).float().mean(0)


no_attention = functools.partial(attention, "no_rewrite", prefix="no_attention_")


@attention(pattern="entmax", beside="entmax_attention")
@no_attention("probabilities are also returned", at="attn =")
def probabilities_returned(q, k, v, mask):
    """output_attentions=True"""
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return attn @ v, attn


@attention(pattern="entmax", beside="entmax_attention", modes=TRAIN)
@no_attention("dropout is active", TRAIN, at="F.dropout(")
def dropout_in_training(q, k, v, mask):
    """attention dropout between probabilities and values"""
    return F.dropout(entmax.entmax15(q @ k.mT * SCALE, dim=-1), 0.25) @ v


@attention(
    pattern="entmax",
    beside="entmax_attention",
    inputs=lambda: (normal((2, 7, 8), 1), normal((8,), 2), keep()),
)
def additive_pooling(states, w, mask):
    """scores from one linear; no keys"""
    scores = torch.tanh(states) @ w
    attn = entmax.entmax15(scores.masked_fill(~mask, -1e9), dim=1)
    return (states * attn.unsqueeze(-1)).sum(1)


@program(pattern="entmax", rewrites=2)
def two_in_a_row():
    return lambda x: entmax.sparsemax(entmax.entmax15(x, -1) * 4, -1), (normal((4, 6), 1, 2.0),)


@attention()
def cosine_similarity(q, k, v, mask):
    """the norms of queries and of keys divide the scores"""
    scores = q @ k.mT / q.norm(dim=-1, keepdim=True) / k.norm(dim=-1).unsqueeze(-2)
    return entmax.entmax15(scores * 8.0, dim=-1) @ v


@attention()
def less_a_number(q, k, v, mask):
    """a constant margin, which does not change the probabilities of a row"""
    return (
        entmax.entmax15(
            (q @ k.mT * SCALE - 4.0).masked_fill(~mask[:, None, None], -torch.inf), dim=-1
        )
        @ v
    )


@attention()
def less_the_distance(q, k, v, mask):
    """positions are integers"""
    at = torch.arange(L)
    return entmax.sparsemax(q @ k.mT * SCALE - (at[:, None] - at).abs(), dim=-1) @ v


@attention()
def normalised_behind_the_mask(q, k, v, mask):
    """F.normalize by the sums of the kept probabilities"""
    dropped = ~mask[:, None, None]
    p = entmax.sparsemax((q @ k.mT * SCALE).masked_fill(dropped, -torch.inf), dim=-1)
    return F.normalize(p.masked_fill(dropped, 0.0), p=1, dim=-1) @ v
