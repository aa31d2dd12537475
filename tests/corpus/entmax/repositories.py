"""Attention of well-known code bases: their ways to split heads, mask, scale and normalise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

import sparse_inductor
from corpus.case import each
from corpus.entmax.masks import some_rows_without_keys
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
    rows,
    scored,
)


def sparsemax_threshold(x):
    s = x.sort(-1, descending=True).values
    n = torch.arange(1, x.size(-1) + 1, dtype=x.dtype)
    c = s.cumsum(-1) - 1
    size = (s * n > c).sum(-1, keepdim=True)
    return c.gather(-1, size - 1) / size


@rows()
def threshold_by_where(x):
    tau = sparsemax_threshold(x)
    return torch.where(x > tau, x - tau, 0.0)


@rows()
def threshold_by_product(x):
    tau = sparsemax_threshold(x)
    return (x - tau) * (x > tau)


@rows(modes=INFER)
def newton(x):
    """Newton steps from below, normalised by F.normalize"""
    z = x / 2
    tau = z.amax(-1, keepdim=True) - 1
    for _ in range(30):
        r = torch.relu(z - tau)
        tau = tau + ((r**2).sum(-1, keepdim=True) - 1) / (2 * r.sum(-1, keepdim=True))
    return F.normalize(torch.relu(z - tau) ** 2, p=1, dim=-1)


@rows()
def michelot(x):
    """Steps that drop what is below the threshold: those after the last drop are sparsemax, too"""
    tau = x.amax(-1, keepdim=True) - 1
    for _ in range(14):
        p = torch.relu(x - tau)
        tau = tau + (p.sum(-1, keepdim=True) - 1) / (p > 0).sum(-1, keepdim=True)
    return torch.relu(x - tau)


class SetUpContext(Function):
    """A Function in torch's newer form, with setup_context and a forward without a context."""

    @staticmethod
    def forward(x):
        x = x - x.amax(-1, keepdim=True)
        s = x.sort(-1, descending=True).values
        n = torch.arange(1, x.size(-1) + 1, dtype=x.dtype)
        c = s.cumsum(-1) - 1
        size = (s * n > c).sum(-1, keepdim=True)
        return torch.relu(x - c.gather(-1, size - 1) / size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        inside = (p > 0).to(grad.dtype)
        mean = (grad * inside).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)
        return inside * (grad - mean)


class InPlaceSparsemax(Function):
    """TabNet's and NODE's: the maximum is taken off the input itself."""

    @staticmethod
    def forward(ctx, x):
        x -= x.max(-1, keepdim=True).values
        out = torch.clamp(x - sparsemax_threshold(x), min=0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        grad = grad.clone()
        grad[p == 0] = 0
        mean = grad.sum(-1) / (p != 0).sum(-1).to(p.dtype)
        return torch.where(p != 0, grad - mean.unsqueeze(-1), grad)


@rows()
def function_that_writes_to_its_input(x):
    """TabNet: scores times priors, which nobody else reads"""
    return InPlaceSparsemax.apply(x * 1.5)


each(
    attention(),
    function_with_setup_context=lambda q, k, v, mask: SetUpContext.apply(q @ k.mT * SCALE) @ v,
    integer_alpha=lambda q, k, v, mask: entmax.entmax_bisect(q @ k.mT * SCALE, alpha=2) @ v,
    # this package's own operator on the scores
    operator_called=lambda q, k, v, mask: sparse_inductor.ops.entmax(q @ k.mT * SCALE, 1.5) @ v,
)


@attention(inputs=lambda: (normal((B, 5, E), 1), normal((B, L, E), 2), keep()))
def global_attention(source, memory, mask):
    """OpenNMT: align.view(batch * target, source), normalised, viewed back; bmm with the memory"""
    target = source.size(1)
    align = torch.bmm(source, memory.transpose(1, 2))
    align = align.masked_fill(~mask.unsqueeze(1), -float("inf"))
    vectors = entmax.sparsemax(align.view(B * target, L), -1)
    return torch.bmm(vectors.view(B, target, L), memory)


@attention(inputs=lambda: (*(t.transpose(1, 2) for t in qkv()), keep()))
def scaled_after_the_mask(q, k, v, mask):
    """Aladdin Persson: nqhd,nkhd->nhqk, -1e20, then divided"""
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    energy = energy.masked_fill(mask[:, None, None] == 0, float("-1e20"))
    attn = entmax.entmax15(energy / (E ** (1 / 2)), dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [attn, v]).reshape(B, L, E)


@scored()
def gpt1_mask(w, mask):
    b = torch.tril(torch.ones(L, L, dtype=w.dtype)).view(1, 1, L, L)
    return w * b - 1e10 * (1 - b)


@scored()
def sdpa_reference(weight, mask):
    """the code in the documentation of scaled_dot_product_attention"""
    bias = torch.zeros(L, L, dtype=weight.dtype)
    lower = torch.ones(L, L, dtype=torch.bool).tril(diagonal=0)
    bias.masked_fill_(lower.logical_not(), float("-inf"))
    weight += bias


@attention()
def full_then_triu_in_place(q, k, v, mask):
    """Llama as released"""
    bias = torch.full((1, 1, L, L), float("-inf"), dtype=q.dtype)
    bias.triu_(diagonal=1)
    return entmax.sparsemax((q @ k.mT * SCALE).add_(bias), dim=-1) @ v


@attention(inputs=lambda: (*qkv(), torch.zeros(2, L, L).masked_fill(torch.arange(L) > 4, -100.0)))
def windows(q, k, v, masks):
    """Swin: one mask per window, added to a batch that is split into windows"""
    scores = (q @ k.mT * SCALE).view(-1, 2, H, L, L) + masks.unsqueeze(1).unsqueeze(0)
    return entmax.entmax15(scores.view(-1, H, L, L), dim=-1) @ v


@attention(inputs=lambda: (normal((B, E, 4, 5), 1), normal((B, E, 4, 5), 2)))
def sagan(x, y):
    """SAGAN: [B, C, H, W], the values come first in the product"""
    q = x.view(B, E, -1).permute(0, 2, 1)
    attn = entmax.sparsemax(torch.bmm(q, y.view(B, E, -1)) / 8, dim=-1)
    return torch.bmm(x.view(B, E, -1), attn.permute(0, 2, 1)).view(B, E, 4, 5)


@attention(inputs=lambda: (hidden(), keep()))
def heads_by_split_and_cat(x, mask):
    """Kyubyong: torch.cat(torch.split(x, d, dim=2), dim=0), the batch inside the heads"""
    h = torch.cat(torch.split(x, D, dim=2), dim=0)
    scores = torch.bmm(h, h.transpose(1, 2)) / math.sqrt(D)
    dropped = (~mask).repeat(H, 1).unsqueeze(1).repeat(1, L, 1)
    scores = torch.where(dropped, torch.ones_like(scores) * (-(2**32) + 1), scores)
    out = torch.bmm(entmax.entmax15(scores, dim=-1), h)
    return torch.cat(torch.split(out, B, dim=0), dim=2)


@attention(inputs=lambda: (normal((B, H, 1, D), 1), *qkv()[1:]))
def one_token_decoded(q, k, v):
    """a step of generation with a cache"""
    return entmax.entmax15(q @ k.mT * SCALE, dim=-1) @ v


@attention(inputs=lambda: (*qkv(keys=11),))
def later_queries_of_a_cache(q, k, v):
    """the triangle ends at the last key"""
    scores = q @ k.mT * SCALE
    lower = torch.ones(L, 11, dtype=torch.bool).tril(diagonal=11 - L)
    return entmax.entmax15(scores.masked_fill(~lower, float("-inf")), dim=-1) @ v


@attention(inputs=lambda: (*qkv(keys=11),))
def triangle_from_the_top(q, k, v):
    """a plain tril of a rectangle: aligned at the first key"""
    scores = q @ k.mT * SCALE
    lower = torch.ones(L, 11, dtype=torch.bool).tril()
    return entmax.entmax15(scores.masked_fill(~lower, float("-inf")), dim=-1) @ v


@attention(inputs=lambda: (*qkv(kv_heads=2), keep()))
def keys_tiled(q, k, v, mask):
    """k.repeat(1, g, 1, 1): another order of heads than repeat_kv's"""
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return entmax.entmax15(q @ k.mT * SCALE, dim=-1) @ v


@scored()
def band(scores, mask):
    """a sliding window"""
    at = torch.arange(L)
    near = (at[None, :] - at[:, None]).abs() <= 2
    return scores.masked_fill(~near, torch.finfo(scores.dtype).min)


@attention(inputs=lambda: (*qkv(), torch.tensor(1.4)))
def scheduled_alpha(q, k, v, alpha):
    """a buffer that a schedule moves"""
    return entmax.entmax_bisect(q @ k.mT * SCALE, alpha=alpha) @ v


@attention(inputs=lambda: (*qkv(), normal((L, H, D), 6)))
def relative_keys(q, k, v, positions):
    """Transformer-XL and Music Transformer: two products added"""
    position = torch.einsum("bhqd,khd->bhqk", q, positions)
    scores = (q @ k.mT + position) * SCALE
    return entmax.entmax15(scores, dim=-1) @ v


@attention(rewrites=2)
def two_values(q, k, v, mask):
    """keys and values pooled with the same probabilities"""
    attn = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return attn @ v, attn @ k


@attention(modes=INFER)
def nan_replaced_by_where(q, k, v, mask):
    """torch.where(torch.isnan(attn), 0, attn) after rows that may have no keys"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], float("-inf"))
    attn = entmax.entmax_bisect(scores, alpha=1.5)
    attn = torch.where(torch.isnan(attn), torch.zeros_like(attn), attn)
    return attn @ v


@attention(inputs=lambda: (*(t[0, 0] for t in qkv()),))
def two_dimensional(q, k, v):
    return entmax.entmax15(q @ k.t() * SCALE, dim=-1) @ v


@attention(rewrites=4)
def a_loop_over_heads(q, k, v, mask):
    """each head by itself, stacked afterwards"""
    one = [entmax.entmax15(q[:, h] @ k[:, h].mT * SCALE, -1) @ v[:, h] for h in range(H)]
    return torch.stack(one, 1)


@attention(inputs=lambda: (*qkv(), normal((H,), 6), normal((1, H, L, L), 7)))
def bias_before_the_temperature(q, k, v, t, bias):
    """(scores + bias) / temperature, both learned"""
    scores = (q @ k.mT + bias) / t.exp().view(H, 1, 1)
    return entmax.entmax15(scores, dim=-1) @ v


@attention(inputs=lambda: (normal((B, D), 1), normal((B, L, D), 2), keep()))
def pointer_network(q, memory, mask):
    """one query per row of the batch, keys first in the product"""
    scores = torch.bmm(memory, q.unsqueeze(2)).squeeze(2) / D**0.5
    p = entmax.entmax15(scores.masked_fill(~mask, -1e9), dim=-1)
    return torch.bmm(p.unsqueeze(1), memory).squeeze(1)


@attention()
def divided_by_their_sum(q, k, v, mask):
    """entmax_bisect's last step once more, by a careful user"""
    p = entmax.entmax15(q @ k.mT * SCALE, dim=-1)
    return p / p.sum(dim=-1, keepdim=True).clamp_min(1e-12) @ v


@attention(inputs=lambda: (*qkv(), some_rows_without_keys()), modes=INFER)
def masked_once_more_and_divided(q, k, v, dropped):
    """the mask multiplied in, what is left divided by its sum and an epsilon: rows without a key are zeros"""
    p = entmax.entmax15((q @ k.mT * SCALE).masked_fill(dropped[:, None], -1e9), dim=-1)
    p = p * ~dropped[:, None]
    return p / (p.sum(-1, keepdim=True) + 1e-9) @ v


class StaticCache(nn.Module):
    """gpt-fast: buffers that the step's keys and values are written into, and a mask looked up by position."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        self.register_buffer("k", torch.randn(B, 1, 16, D, generator=generator))
        self.register_buffer("v", torch.randn(B, 1, 16, D, generator=generator))
        self.register_buffer("causal", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, q, k, v, position):
        self.k[:, :, position] = k
        self.v[:, :, position] = v
        scores = q @ self.k.expand(-1, H, -1, -1).mT * SCALE
        scores = scores.masked_fill(~self.causal[position], -torch.inf)
        return entmax.entmax15(scores, dim=-1) @ self.v.repeat_interleave(H, dim=1)


@program(modes=INFER)
def static_cache():
    """a part of the keys is written in place, heads are repeated afterwards"""
    step = [normal((B, h, 2, D), seed) for h, seed in ((H, 1), (1, 2), (1, 4))]
    return StaticCache(), (*step, torch.tensor([8, 9]))


@program(modes=INFER)
def values_written_between():
    """the values come last, and so does what is written into them"""

    def attend(q, k, v, new):
        p = entmax.sparsemax(q @ k.mT * SCALE, dim=-1)
        v = v.clone()
        v[:, :, 2:3] = new
        return p @ v

    return attend, (*qkv(), normal((B, H, 1, D), 6))
