"""Other steps between the projections: a factor or mask of every token, a learned scalar, batch normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each, of
from corpus.relu_ffn.registry import (
    BOTH,
    INFER,
    TRAIN,
    B,
    Block,
    K,
    N,
    S,
    function,
    program,
    tokens,
    weight,
)


class Weighed(Block):
    """A block with an input p [B, S, 1] beside its tokens; `bn` uses its running statistics if `frozen`."""

    def __init__(self, forward, frozen: bool):
        super().__init__(forward, bias=True)
        self.frozen = frozen
        self.factor = nn.Parameter(torch.tensor([-0.9]))
        self.scale = nn.Parameter(weight(N, seed=59).detach())
        self.bn = nn.BatchNorm1d(N)
        mean, of_weight, of_bias = (weight(N, seed=60 + i).detach() for i in range(3))
        self.bn.running_mean.copy_(mean)
        self.bn.weight.data.copy_(of_weight)
        self.bn.bias.data.copy_(of_bias)
        self.bn.running_var.copy_(mean.square() + 0.5)

    def train(self, mode: bool = True):
        super().train(mode)
        self.bn.train(mode and not self.frozen)
        return self

    def forward(self, x, p):
        return self._forward(x, p, self)


def weighed(*how, frozen=True, **fields):
    """Register `forward(x, p, m)`."""

    return function(
        lambda forward: (Weighed(forward, frozen), (tokens(), weight(B, S, 1, seed=64))),
        *how,
        **fields,
    )


@weighed()
def router_probability(x, p, m):
    """Megatron's weighted squared relu: an expert's activations times the probability of its token"""
    return m.down((F.relu(m.up(x)).pow(2) * torch.sigmoid(p)).to(x.dtype))


@weighed()
def probability_in_one_factor(x, p, m):
    """the token's factor, a constant and a neuron's scale, all in different places"""
    return m.down(F.relu(m.gate(x)) * m.scale * (m.up(x) * p) * 0.5)


@weighed(modes=INFER)
def padding_filled_with_zeros(x, p, m):
    """padding may be anything, but is zero after the activation"""
    x = x.masked_fill(p < 0, float("inf"))
    return m.down(F.relu(m.up(x)).masked_fill(p < 0, 0.0))


@weighed(modes=INFER)
def padded_product_filled_with_zeros(x, p, m):
    """the same after a product, with infinite values in the padding"""
    x = x.masked_fill(p < 0, float("inf"))
    return m.down((F.relu(m.gate(x)) * m.up(x)).masked_fill(p < 0, 0.0))


each(
    weighed(),
    product_where_kept=lambda x, p, m: m.down(torch.where(p > 0, m.up(x) * F.relu(m.gate(x)), 0.0)),
    pruned_neurons=lambda x, p, m: m.down(F.relu(m.up(x)).masked_fill(m.scale < 0, 0.0)),
    # MetaFormer: a learned scalar times the squared relu
    star_relu_without_its_bias=lambda x, p, m: m.down(m.factor * F.relu(m.up(x)) ** 2),
    # PointNet and the like: linear, batch norm with running statistics, relu, linear
    batch_norm_before=lambda x, p, m: m.down(F.relu(m.bn(m.up(x).transpose(1, 2)).transpose(1, 2))),
    gate_by_sign=lambda x, p, m: m.down(m.up(x) * (m.gate(x) > 0)),
    selected_by_sign=lambda x, p, m: m.down(torch.where(m.gate(x) > 0.1, m.up(x), 0.0)),
    # a predictor of which neurons are active
    filled_by_sign=lambda x, p, m: m.down(F.relu(m.up(x)).masked_fill(~(m.gate(x) > 0), 0.0)),
    dropped_by_sign=lambda x, p, m: m.down(torch.where(m.gate(x) < m.scale, 0.0, F.relu(m.up(x)))),
)


@weighed()
def assigned_by_sign(x, p, m):
    h = F.relu(m.up(x)).clone()
    h[m.gate(x) < 0] = 0
    return m.down(h)


def _router(x, m):
    """One number per token, for each neuron."""
    return F.linear(x, m.gate.weight[:1]).expand(-1, -1, N)


each(
    weighed(),
    tokens_selected_by_a_router=lambda x, p, m: m.down(
        torch.where(_router(x, m) > 0, F.relu(m.up(x)), 0.0)
    ),
    tokens_times_a_router=lambda x, p, m: m.down((_router(x, m) > 0) * F.relu(m.up(x))),
)


@weighed()
def product_unless_dropped(x, p, m):
    h = F.relu(m.gate(x)) * m.up(x)
    return m.down(torch.where(p < 0, torch.zeros_like(h), h))


@weighed()
def pruned_neurons_of_a_product(x, p, m):
    """where(keep, product, 0), followed by a factor of every neuron"""
    h = torch.where(m.scale > 0, F.relu(m.gate(x)) * m.up(x), 0.0)
    return m.down(h * m.scale)


@weighed("no_rewrite", "more than a factor or mask", at=".masked_fill(")
def pruned_neurons_filled_with_ones(x, p, m):
    return m.down(F.relu(m.up(x)).masked_fill(m.scale < 0, 1.0))


@weighed("no_rewrite", "a number filled in between", at=".masked_fill(")
def padding_filled_with_ones(x, p, m):
    return m.down(F.relu(m.up(x)).masked_fill(p < 0, 1.0))


@weighed("no_rewrite", "masked_fill after the product of two", at=".masked_fill(")
def padded_product_filled_with_ones(x, p, m):
    return m.down((F.relu(m.gate(x)) * m.up(x)).masked_fill(p < 0, 1.0))


@weighed("no_rewrite", "a comparison (lt)", at="h.abs() < 0.1")
def small_products_filled(x, p, m):
    h = F.relu(m.gate(x)) * m.up(x)
    return m.down(h.masked_fill(h.abs() < 0.1, 0.0))


@weighed("no_rewrite", "made of the activations", at="< 3")
def weak_tokens_filled(x, p, m):
    h = F.relu(m.up(x))
    return m.down(h.masked_fill(h.sum(-1, keepdim=True) < 3, 0.0))


@weighed("no_rewrite", "more than a factor or mask", at="+ m.scale[:1]")
def star_relu(x, p, m):
    """MetaFormer: a learned scalar times the squared relu, plus another"""
    return m.down(m.factor * F.relu(m.up(x)) ** 2 + m.scale[:1])


@weighed("no_rewrite", "differs by sequence and by output", at="m.scale")
def modulated_neurons(x, p, m):
    """FiLM before the rectifier: a factor of every neuron made of the first token"""
    return m.down(F.relu(m.up(x) * torch.tanh(p[:, :1] + m.scale)))


@program(modes=INFER)
def masked_convolutions():
    """VITS, Glow-TTS: both convolutions see x * mask"""
    torch.manual_seed(65)
    mask = (torch.arange(S) < 3).float().expand(B, 1, S)
    up, down = nn.Conv1d(K, N, 1), nn.Conv1d(N, K, 1)
    return lambda x: down(torch.relu(up(x * mask)) * mask) * mask, (tokens(shape=(B, K, S)),)


@weighed("no_rewrite", "of every token comes before relu", at="F.relu(")
def token_factor_before(x, p, m):
    """The factor is rectified, too."""
    return m.down(F.relu(m.up(x) * p))


@weighed("no_rewrite", "a term of every token", at="+ p")
def token_term(x, p, m):
    """StarReLU's bias, one per token"""
    return m.down(F.relu(m.up(x)) + p)


@program(modes=INFER)
def batch_norm_of_channels():
    torch.manual_seed(66)
    block = nn.Sequential(nn.Conv2d(K, N, 1), nn.BatchNorm2d(N), nn.ReLU(True), nn.Conv2d(N, K, 1))
    block[1].running_mean.copy_(weight(N).detach())
    return block, (tokens(shape=(B, K, 3, S)),)


@weighed("no_rewrite", "batch_norm after the activation", at="m.bn(")
def batch_norm_after(x, p, m):
    return m.down(m.bn(F.relu(m.up(x)).flatten(0, 1)))


@weighed("no_rewrite", "statistics of the batch itself", TRAIN, frozen=False, at="m.bn(")
def batch_norm_of_the_batch(x, p, m):
    return m.down(F.relu(m.bn(m.up(x).flatten(0, 1))))


@weighed("no_rewrite", "another axis than the linear's", INFER, at="F.batch_norm(")
def batch_norm_of_tokens(x, p, m):
    """the second axis is the sequence"""
    return m.down(F.relu(F.batch_norm(m.up(x), m.scale[:S], m.scale[:S].exp())))


@weighed()
def negative_assigned(x, p, m):
    h = m.up(x).clone()
    h[h < 0] = 0
    return m.down(h)


@weighed("no_rewrite", "a term of every token", INFER, at="h += p")
def negative_assigned_too_late(x, p, m):
    """the mask was computed before the values changed"""
    h = m.up(x).clone()
    negative = h < 0
    h += p
    h[negative] = 0
    return m.down(h)


each(
    of(weighed(), lambda act: lambda x, p, m: m.down(act(m.up(x), m.scale))),
    # JumpReLU as sparse autoencoders write it
    learned_threshold_as_a_factor=lambda h, theta: h * (h > theta),
    learned_threshold=lambda h, theta: torch.where(h > theta, h, torch.zeros_like(h)),
    jump_relu_of_gemma_scope=lambda h, theta: (h > theta.exp()) * F.relu(h),
    jump_relu_filled=lambda h, theta: h.masked_fill(h.detach() <= theta, 0.0),
    # BatchTopK in inference: one threshold for all
    above_a_number_for_all=lambda h, theta: F.relu(h) * (F.relu(h) > theta.mean()),
    # neurons that exceed a learned number are dropped
    rectified_up_to_a_ceiling=lambda h, theta: F.relu(h) * ~(h > theta),
    # the mask has no effect
    shifted_beyond_its_threshold=lambda h, theta: F.relu(h - theta) * (h > theta),
)


@weighed()
def rectified_and_not_below_a_buffer(x, p, m):
    """BatchTopK in inference: acts * (acts >= threshold), one number for all"""
    a = F.relu(m.up(x))
    return m.down(a * (a >= m.factor))


@weighed()
def gated_autoencoder(x, p, m):
    """one projection, a bias for the gate, a scale for the magnitude"""
    z = m.up(x)
    active = ((z + m.scale) > 0).to(x.dtype)
    return m.down(active * F.relu(z * m.scale.exp() + 0.1))


@weighed(modes=BOTH)
def active_features_counted(x, p, m):
    """the mask is added up, too"""
    h = m.up(x)
    mask = (h > m.scale).to(h.dtype)
    return m.down(mask * h), mask.sum(-1).mean()


@weighed(modes=INFER)
@weighed("no_rewrite", "passes no gradient on", TRAIN, at="m.down(")
def binary_features(x, p, m):
    return m.down((m.up(x) > m.scale).to(x.dtype))


@weighed("no_rewrite", "a threshold of every token", at="(h > p)")
def threshold_of_each_token(x, p, m):
    """a router decides how many neurons stay"""
    h = m.up(x)
    return m.down(F.relu(h) * (h > p))


@weighed("no_rewrite", "may be no number: log", at=".log()")
def logarithm_of_the_factor(x, p, m):
    return m.down(F.relu(m.gate(x)) * m.up(x).log())


@weighed(
    "no_rewrite",
    "compared in torch.float32",
    precision=torch.bfloat16,
    at="(h > m.scale)",
)
def threshold_in_float32(x, p, m):
    h = F.linear(x.bfloat16(), m.up.weight.bfloat16())
    return F.linear(F.relu(h) * (h > m.scale), m.down.weight.bfloat16())


@weighed(modes=TRAIN)
def statistic_before_a_token_factor(x, p, m):
    """The L1 term reads activations before the router's factor."""
    h = F.relu(m.up(x))
    return m.down(h * p), h.abs().mean()


@weighed("no_rewrite", "also read by abs", TRAIN, at="h.abs()")
def statistic_after_a_token_factor(x, p, m):
    """The L1 term reads activations after the router's factor."""
    h = F.relu(m.up(x)) * p
    return m.down(h), h.abs().mean()
