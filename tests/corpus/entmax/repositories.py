"""Whole habits of well-known code bases: how they split heads, mask, scale and normalise."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import sparse_inductor
from corpus.case import each
from corpus.entmax.masks import some_rows_without_keys
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
    hidden,
    keep,
    normal,
    program,
    qkv,
    rows,
)

entmax = pytest.importorskip("entmax")


@rows()
def taus_expanded(x):
    """KrisKorrel/sparsemax-pytorch: two-dimensional, the threshold expanded, max with zeros"""
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    x = x - torch.max(x, dim=1, keepdim=True)[0].expand_as(x)
    zs = torch.sort(x, dim=1, descending=True)[0]
    at = torch.arange(1, shape[-1] + 1, dtype=x.dtype).view(1, -1).expand_as(zs)
    bound = 1 + at * zs
    inside = torch.gt(bound, torch.cumsum(zs, 1)).type(x.dtype)
    size = torch.max(inside * at, 1, keepdim=True)[0]
    taus = (torch.sum(inside * zs, 1, keepdim=True) - 1) / size
    return torch.max(torch.zeros_like(x), x - taus.expand_as(x)).reshape(shape)


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


class BisectTensorAlpha(Function):
    """The package's EntmaxBisectFunction turned into static methods, alpha a tensor with a gradient."""

    @staticmethod
    def forward(ctx, x, alpha, dim=-1, n_iter=40):
        if not isinstance(alpha, torch.Tensor):
            alpha = torch.tensor(alpha, dtype=x.dtype, device=x.device)
        shape = list(x.shape)
        shape[dim] = 1
        alpha = alpha.expand(*shape)
        ctx.alpha, ctx.dim = alpha, dim
        d = x.shape[dim]
        top, _ = x.max(dim=dim, keepdim=True)
        x = x * (alpha - 1)
        top = top * (alpha - 1)
        low = top - 1
        high = top - (1 / d) ** (alpha - 1)
        step = high - low
        for _ in range(n_iter):
            step = step / 2
            tau = low + step
            p = torch.clamp(x - tau, min=0) ** (1 / (alpha - 1))
            low = torch.where(((p.sum(dim) - 1) >= 0).unsqueeze(dim), tau, low)
        p = p / p.sum(dim=dim).unsqueeze(dim=dim)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        g = torch.where(y > 0, y ** (2 - ctx.alpha), y.new_zeros(1))
        dx = dy * g
        q = (dx.sum(ctx.dim) / g.sum(ctx.dim)).unsqueeze(ctx.dim)
        dx = dx - q * g
        d_alpha = None
        if ctx.needs_input_grad[1]:
            s = torch.where(y > 0, y * torch.log(y), y.new_zeros(1))
            ent = s.sum(ctx.dim).unsqueeze(ctx.dim)
            skewed = g / g.sum(ctx.dim).unsqueeze(ctx.dim)
            d_alpha = dy * (y - skewed) / ((ctx.alpha - 1) ** 2)
            d_alpha = d_alpha - dy * (s - skewed * ent) / (ctx.alpha - 1)
            d_alpha = d_alpha.sum(ctx.dim).unsqueeze(ctx.dim)
        return dx, d_alpha, None, None


@rows()
def static_bisect_float(x):
    """alpha becomes a tensor inside"""
    return BisectTensorAlpha.apply(x, 1.5)


@attention(inputs=lambda: (*qkv(), normal((H,), 7)))
def static_bisect_learned(q, k, v, raw):
    alpha = 1 + torch.sigmoid(raw).view(1, H, 1, 1).expand(B, H, L, 1)
    return BisectTensorAlpha.apply(q @ k.mT * SCALE, alpha) @ v


class SetUpContext(Function):
    """torch's newer way: forward without a context."""

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


class ScaleBuffer(nn.Module):
    """bentrevett's tutorials: the scale is a tensor on the device, the fill -1e10."""

    def __init__(self):
        super().__init__()
        self.scale = torch.sqrt(torch.FloatTensor([D]))

    def forward(self, q, k, v, mask):
        energy = torch.matmul(q, k.permute(0, 1, 3, 2)) / self.scale.to(q.dtype)
        energy = energy.masked_fill(mask[:, None, None] == 0, -1e10)
        return torch.matmul(entmax.entmax15(energy, dim=-1), v)


@program()
def scale_buffer():
    """bentrevett"""
    return ScaleBuffer(), (*qkv(), keep())


@attention(inputs=lambda: (*(t.transpose(1, 2) for t in qkv()), keep()))
def scaled_after_the_mask(q, k, v, mask):
    """Aladdin Persson: nqhd,nkhd->nhqk, -1e20, then divided"""
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    energy = energy.masked_fill(mask[:, None, None] == 0, float("-1e20"))
    attn = entmax.entmax15(energy / (E ** (1 / 2)), dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [attn, v]).reshape(B, L, E)


@attention()
def gpt1_mask(q, k, v, mask):
    """w * b - 1e10 * (1 - b)"""
    w = q @ k.mT * SCALE
    b = torch.tril(torch.ones(L, L, dtype=w.dtype)).view(1, 1, L, L)
    w = w * b - 1e10 * (1 - b)
    return entmax.entmax15(w, dim=-1) @ v


@attention()
def sdpa_reference(q, k, v, mask):
    """the code in the documentation of scaled_dot_product_attention"""
    bias = torch.zeros(L, L, dtype=q.dtype)
    lower = torch.ones(L, L, dtype=torch.bool).tril(diagonal=0)
    bias.masked_fill_(lower.logical_not(), float("-inf"))
    weight = q @ k.transpose(-2, -1) * SCALE
    weight += bias
    return entmax.entmax15(weight, dim=-1) @ v


@attention()
def square_subsequent_mask(q, k, v, mask):
    """nn.Transformer's first way to make it"""
    lower = (torch.triu(torch.ones(L, L)) == 1).transpose(0, 1)
    bias = lower.to(q.dtype).masked_fill(lower == 0, float("-inf")).masked_fill(lower == 1, 0.0)
    return entmax.sparsemax(q @ k.mT * SCALE + bias, dim=-1) @ v


@attention()
def full_then_triu_in_place(q, k, v, mask):
    """Llama as released"""
    bias = torch.full((1, 1, L, L), float("-inf"), dtype=q.dtype)
    bias.triu_(diagonal=1)
    return entmax.sparsemax((q @ k.mT * SCALE).add_(bias), dim=-1) @ v


@attention()
def ones_times_minus_infinity(q, k, v, mask):
    bias = torch.triu(torch.ones(L, L, dtype=q.dtype) * float("-inf"), diagonal=1)
    return entmax.entmax15(q @ k.mT * SCALE + bias, dim=-1) @ v


@attention()
def maximum_subtracted_first(q, k, v, mask):
    """one's own stabilisation before the package's"""
    scores = q @ k.mT * SCALE
    scores = scores - scores.max(dim=-1, keepdim=True)[0]
    return entmax.entmax15(scores, dim=-1) @ v


class Window(nn.Module):
    """Swin v2: cosine scores, a learned temperature, a bias table, shifted-window masks over a split batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.temperature = nn.Parameter(torch.zeros(H, 1, 1))
        self.bias = nn.Parameter(torch.randn(H, L, L))

    def forward(self, q, k, v, mask):
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.temperature, max=4.6).exp()
        attn = attn + self.bias.unsqueeze(0)
        windows = mask.shape[0]
        attn = attn.view(B // windows, windows, H, L, L) + mask.unsqueeze(1).unsqueeze(0)
        attn = entmax.entmax15(attn.view(-1, H, L, L), dim=-1)
        return (attn @ v).transpose(1, 2).reshape(B, L, E)


@program()
def swin_window():
    """Swin v2"""
    mask = torch.zeros(2, L, L).masked_fill(torch.arange(L) > 4, -100.0)
    return Window(), (*qkv(), mask)


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


@attention(modes=TRAIN)
def checkpointed(q, k, v, mask):
    def attend(q, k, v):
        return entmax.entmax15(q @ k.mT * SCALE, dim=-1) @ v

    return checkpoint(attend, q, k, v, use_reentrant=False)


@attention(inputs=lambda: (*qkv(kv_heads=2), keep()))
def keys_tiled(q, k, v, mask):
    """k.repeat(1, g, 1, 1): another order of heads than repeat_kv's"""
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return entmax.entmax15(q @ k.mT * SCALE, dim=-1) @ v


@attention(inputs=lambda: (qkv()[0], normal((B, L, D), 2), normal((B, L, D), 3)))
def one_key_head_einsum(q, k, v):
    """lucidrains' multi-query: b h i d, b j d -> b h i j"""
    sim = torch.einsum("b h i d, b j d -> b h i j", q * SCALE, k)
    return torch.einsum("b h i j, b j d -> b h i d", entmax.entmax15(sim, dim=-1), v)


@attention()
def band(q, k, v, mask):
    """a sliding window"""
    at = torch.arange(L)
    near = (at[None, :] - at[:, None]).abs() <= 2
    scores = (q @ k.mT * SCALE).masked_fill(~near, torch.finfo(q.dtype).min)
    return entmax.sparsemax(scores, dim=-1) @ v


@attention()
def partial_function(q, k, v, mask):
    """functools.partial in a table of activations"""
    table = {"entmax": functools.partial(entmax.entmax_bisect, alpha=1.5, n_iter=25, dim=-1)}
    return table["entmax"](q @ k.mT * SCALE) @ v


@attention(inputs=lambda: (*qkv(), torch.tensor(1.4)))
def scheduled_alpha(q, k, v, alpha):
    """a buffer that a schedule moves"""
    return entmax.entmax_bisect(q @ k.mT * SCALE, alpha=alpha) @ v


@attention(modes=INFER, inputs=lambda: (*qkv(), normal((L, L), 6, 1.0)))
def nan_replaced(q, k, v, bias):
    """torch.nan_to_num around the probabilities"""
    return torch.nan_to_num(entmax.entmax_bisect(q @ k.mT * SCALE + bias)) @ v


@attention(inputs=lambda: (*qkv(), normal((L, H, D), 6)))
def relative_keys(q, k, v, positions):
    """Transformer-XL and Music Transformer: two products added"""
    position = torch.einsum("bhqd,khd->bhqk", q, positions)
    scores = (q @ k.mT + position) * SCALE
    return entmax.entmax15(scores, dim=-1) @ v


@attention()
def log_of_a_mask(q, k, v, mask):
    scores = q @ k.mT * SCALE + mask[:, None, None].to(q.dtype).log()
    return entmax.entmax15(scores, dim=-1) @ v


@attention(pattern="entmax", inputs=lambda: (normal((L, D), 1), normal((D,), 2), normal((D,), 3)))
def graph_attention(h, a, b):
    """GAT: scores are sums, not products"""
    scores = F.leaky_relu((h @ a)[:, None] + (h @ b)[None, :], 0.2)
    adjacent = torch.ones(L, L).tril(2).triu(-2).bool()
    return entmax.sparsemax(scores.masked_fill(~adjacent, -9e15), dim=1) @ h


@attention(pattern="entmax", inputs=lambda: (normal((B, L, E), 1), normal((E, 3), 2)))
def mixture_of_experts(x, w):
    """a router: gates times the outputs of experts"""
    gates = entmax.entmax_bisect(x @ w, alpha=1.5, dim=-1)
    outputs = torch.stack([torch.relu(x * i) for i in range(3)], dim=-2)
    return (gates.unsqueeze(-1) * outputs).sum(-2)


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


@attention(inputs=lambda: (normal((B, L, D), 1), normal((9, D), 2), normal((9, E), 3)))
def memory_of_parameters(x, keys, values):
    """a table of learned keys and values"""
    return entmax.entmax15(x @ keys.t(), dim=-1) @ values


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
    """one query a row of the batch, the keys first in the product"""
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


@attention(modes=INFER)
def normalised_by_name(q, k, v, mask):
    return F.normalize(entmax.sparsemax(q @ k.mT * SCALE, dim=-1), p=1, dim=-1) @ v


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
