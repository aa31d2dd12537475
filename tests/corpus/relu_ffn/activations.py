"""Activations between the projections: the many ways to write a rectifier and its product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import each, of
from corpus.relu_ffn.registry import (
    INFER,
    TRAIN,
    Block,
    K,
    N,
    block,
    function,
    gate,
    program,
    tokens,
)

each(
    block(),
    # Primer, Nemotron: relu(x) ** 2
    square_by_power=lambda x, m: m.down(F.relu(m.up(x)) ** 2),
    # ReLU Strikes Back: relu(x - 1)
    shifted_relu=lambda x, m: m.down(torch.relu(m.up(x) - 0.3)),
    relu6=lambda x, m: m.down(F.relu6(m.up(x))),
    scaled_after=lambda x, m: m.down(F.relu(m.gate(x)) * m.up(x) * 0.5),
    # A squashed second factor; the first one is zero for inactive neurons.
    sigmoid_up=lambda x, m: m.down(F.relu(m.gate(x)) * torch.sigmoid(m.up(x))),
)


each(
    block(bias=True),
    up_times_relu=lambda x, m: m.down(m.up(x) * torch.relu(m.gate(x))),
    # Vaswani et al.: max(0, x W1 + b1) W2 + b2.
    plain=lambda x, m: m.down(m.act(m.up(x))),
    # TurboSparse: both factors are rectified.
    drelu=lambda x, m: m.down(F.relu(m.gate(x)) * F.relu(m.up(x))),
    half_less_than_a_sigmoid=lambda x, m: m.down(F.relu(torch.sigmoid(m.up(x)) - 0.5)),
    negated_minimum=lambda x, m: m.down(-torch.minimum(-m.up(x), torch.zeros(()))),
    less_what_is_negative=lambda x, m: m.down((u := m.up(x)) - u.clamp(max=0)),
)


@block()
def product_in_place(x, m):
    h = m.up(x)
    h *= torch.relu(m.gate(x))
    return m.down(h)


@block(modes=INFER)
def all_in_place(x, m):
    h = m.gate(x)
    h.relu_()
    h.mul_(m.up(x))
    return m.down(h)


each(
    gate(),
    relu_in_place=lambda g: F.relu(g, inplace=True),
    clamp_min=lambda g: g.clamp(min=0),
    maximum_with_zeros=lambda g: torch.maximum(g, torch.zeros_like(g)),
    where_positive=lambda g: torch.where(g > 0, g, 0.0),
    times_its_sign_mask=lambda g: g * (g > 0),
    masked_fill_negative=lambda g: g.masked_fill(g <= 0, 0.0),
    mask_of_a_detached_gate=lambda g: torch.where(g.detach() > 0, g, 0.0),
    leaky_without_a_slope=lambda g: F.leaky_relu(g, negative_slope=0.0),
    # ELU with alpha 0, which is ReLU
    elu_of_nothing=lambda g: F.elu(g, alpha=0.0),
    # FATReLU
    threshold_function=lambda g: F.threshold(g, 0.1, 0.0),
    threshold_by_mask=lambda g: g * (g > 0.2).to(g.dtype),
    threshold_by_where=lambda g: torch.where(g > 0.05, g, torch.zeros_like(g)),
    scaled_before=lambda g: torch.relu(g * 0.25),
    # Gemma's soft cap: negative values stay negative
    softly_capped_before_the_rectifier=lambda g: F.relu(30 * torch.tanh(g / 30)),
)


@block(modes=INFER)
def half_the_absolute_value_first(x, m):
    u = m.up(x)
    return m.down(0.5 * (torch.abs(u) + u))


@block("no_rewrite", "abs is not monotone", modes=INFER, at="m.up(x).abs()")
def absolute_value_of_the_other(x, m):
    return m.down(F.relu(m.gate(x) + m.up(x).abs()))


@block(bias=True)
def square_by_itself(x, m):
    r = F.relu(m.up(x))
    return m.down(r * r)


@block()
def square_where_positive(x, m):
    z = m.up(x)
    return m.down(torch.where(z > 0, z * z, 0.0))


@block()
def square_times_a_comparison(x, m):
    z = m.up(x)
    return m.down(z * z * (z > 0))


@block()
def cube_by_itself(x, m):
    h = F.relu(m.up(x))
    return m.down(h * h * h)


@block()
def rectified_times_raw(x, m):
    u = m.up(x)
    return m.down(F.relu(u) * u)


@block(modes=INFER)
@block("no_rewrite", "dropout is active", TRAIN, at="m.drop(")
def dropout_of_activations(x, m):
    return m.down(m.drop(F.relu(m.up(x))))


@block()
@block(prefix="any_size_", dynamic=True)
@block(prefix="one_token_", shape=(K,))
@block(prefix="bfloat16_", dtype=torch.bfloat16, precision=torch.bfloat16)
@block(prefix="autocast_", autocast=torch.bfloat16, precision=torch.bfloat16, bias=True)
def relu_times_up(x, m):
    """The gated block of Llama with hidden_act="relu"."""
    return m.down(F.relu(m.gate(x)) * m.up(x))


@block(dtype=torch.float64)
def comparison_in_float64(x, m):
    """a gated sparse autoencoder"""
    return m.down((m.gate(x) > 0) * F.relu(m.up(x)))


class Scaled(Block):
    """A block with a learned scale per neuron, of either sign."""

    def __init__(self, forward):
        super().__init__(forward)
        self.scale = nn.Parameter(torch.randn(N, generator=torch.Generator().manual_seed(38)))


def scaled(*args, **kwargs):
    """Register `forward(x, m)` as `block` does, with `m.scale` [N]."""

    return function(lambda forward: (Scaled(forward), (tokens(),)), *args, **kwargs)


each(
    scaled(),
    # (IA)^3 of peft: the input of the down projection times a learned vector.
    ia3=lambda x, m: m.down(F.relu(m.gate(x)) * m.up(x) * m.scale.view(1, -1)),
    # Divided by the norm of every neuron's dictionary row, as a sparse autoencoder may.
    neuron_divisor=lambda x, m: m.down(F.relu(m.up(x)) / m.scale),
)


each(
    of(scaled(), lambda act: lambda x, m: m.down(act(m.up(x), m.scale))),
    scale_in_one_factor=lambda u, scale: u * (F.relu(u) * scale),
    # the two factors have different biases
    rectified_times_shifted=lambda u, shift: F.relu(u) * (u + shift),
    # as in the magnitudes of a gated sparse autoencoder
    rectified_of_scaled=lambda u, scale: F.relu(u * scale) * u,
    rectified_twice_with_one_bias=lambda u, shift: F.relu(u + shift) * (u + shift),
)


@scaled()
def shifted_in_place_between(x, m):
    u = m.up(x).clone()
    r = F.relu(u)
    u += m.scale
    return m.down(r * u)


@scaled(modes=TRAIN)
def statistic_of_the_factor_without_a_bias(x, m):
    """Two factors differ by a bias, and the L1 term reads the rectified one."""
    u = m.up(x)
    h = F.relu(u)
    return m.down(h * (u + m.scale)), h.abs().mean()


@scaled(modes=TRAIN)
def statistic_before_the_scale(x, m):
    """The L1 term reads activations before the scale."""
    h = F.relu(m.up(x))
    return m.down(h * m.scale), h.abs().mean()


@scaled("no_rewrite", "also read by abs", TRAIN, at="h.abs()")
def statistic_after_the_scale(x, m):
    """The L1 term reads scaled activations."""
    h = F.relu(m.up(x)) * m.scale
    return m.down(h), h.abs().mean()


@scaled("no_rewrite", "more than a factor or mask of every neuron", at="+ m.scale")
def neuron_shift(x, m):
    return m.down(F.relu(m.up(x)) + m.scale)


class Zeroed(Block):
    """A block with a zero-initialised gate: gradients at outputs of exactly 0 decide whether it learns."""

    def __init__(self, forward):
        super().__init__(forward)
        nn.init.zeros_(self.gate.weight)


# Where the gate is exactly 0, each spelling has its own gradient in PyTorch, which a rewrite must keep.
each(
    function(
        lambda act: (Zeroed(lambda x, m: m.down(act(m.gate(x)) * m.up(x))), (tokens(),)),
        modes=TRAIN,
        prefix="zeroed_gate_",
    ),
    relu=lambda g: F.relu(g),
    relu6=lambda g: F.relu6(g),
    clamp=lambda g: g.clamp(min=0),
    hardtanh=lambda g: F.hardtanh(g, 0.0, 5.0),
    times_from_zero_on=lambda g: g * (g >= 0),
    times_beyond_zero=lambda g: g * (g > 0),
    where_from_zero_on=lambda g: torch.where(g >= 0, g, 0.0),
    filled_below_zero=lambda g: g.masked_fill(g < 0, 0.0),
    detached_condition=lambda g: g * (g >= 0).detach(),
)


@block()
def capped_before_the_rectifier(x, m):
    """gpt-oss's clamp of the gate, with relu"""
    return m.down(F.relu(m.gate(x).clamp(max=7.0)) * (m.up(x) + 1))


@block(modes=TRAIN)
def mask_without_gradients(x, m):
    """the mask of active neurons is computed under no_grad"""
    g = m.gate(x)
    with torch.no_grad():
        active = (g > 0).to(g.dtype)
    return m.down(g * active * m.up(x))


@block("no_rewrite", "grad mode changes", modes=TRAIN, at="rectified =")
def rectified_without_gradients(x, m):
    g = m.gate(x)
    with torch.no_grad():
        rectified = F.relu(g)
    return m.down(rectified * m.up(x))


@block(bias=True)
def product_times_its_mask(x, m):
    g = m.gate(x)
    return m.down(g * m.up(x) * (g > 0))


@block()
def product_filled_below_a_number(x, m):
    g = m.gate(x)
    return m.down((g * m.up(x)).masked_fill(g <= 0.25, 0.0))


@block()
def product_where_either_is_positive(x, m):
    """dReLU by a mask for each factor"""
    g, u = m.gate(x), m.up(x)
    return m.down(torch.where((g > 0), g * u, 0.0) * (u >= 0))


@block()
def odd_function_of_the_gate_times_its_mask(x, m):
    """tanh(g) * u * (g > 0.1): tanh(0) is 0, so masked neurons may be computed from g = 0"""
    g = m.gate(x)
    return m.down(torch.tanh(g) * m.up(x) * (g > 0.1).to(x.dtype))


@block("no_rewrite", "two functions of one projection", at="m.gate(x)")
def exponential_times_its_mask(x, m):
    """exp(0) is not 0"""
    g = m.gate(x)
    return m.down(torch.exp(g) * m.up(x) * (g > 0.1))


@block()
def product_assigned_where_negative(x, m):
    g = m.gate(x)
    h = g * m.up(x)
    h[g < 0] = 0.0
    return m.down(h)


@block()
def product_by_einsum(x, m):
    """einsum as an elementwise product, also with a vector"""
    h = torch.einsum("...n,...n->...n", F.relu(m.gate(x)), m.up(x))
    return m.down(torch.einsum("bsn,n->bsn", h, torch.linspace(0.5, 1.5, N, device=x.device)))


@program()
def every_other_neuron_in_place():
    """the same of interleaved halves, the other one cut out afterwards"""
    wide, down = nn.Linear(8, 2 * N), nn.Linear(N, 8)

    def f(x):
        h = wide(x)
        gate = h[..., ::2]
        gate.relu_()
        return down(gate * h[..., 1::2])

    return f, (tokens(),)


@block(bias=True)
def a_neuron_ablated(x, m):
    """interpretability research does this to find the effect of a feature"""
    h = m.act(m.up(x)).clone()
    h[..., 5] = 0.0
    return m.down(h)


@block(modes=INFER)
def neurons_and_a_token_ablated(x, m):
    """a list of neurons, and the first token's"""
    h = F.relu(m.gate(x)) * m.up(x)
    h[..., [3, 7]] = 0
    h[:, 0] = 0
    return m.down(h)


@block(modes=INFER, bias=True)
def neurons_ablated_by_a_mask(x, m):
    """a boolean mask of the neurons, and index_fill"""
    h = m.act(m.up(x))
    h[:, :, torch.arange(N) % 4 == 0] = 0.0
    return m.down(h.index_fill(-1, torch.tensor([1, 2]), 0.0))


@block(modes=INFER, bias=True)
def reshaped_there_and_back(x, m):
    """neurons are put into groups, and nothing is done with the groups"""
    return m.down(m.act(m.up(x)).unflatten(-1, (4, -1)).clone().flatten(-2))


@block("no_rewrite", "also read by mean", at="d.mean()")
def detached_gate_read_beside_its_mask(x, m):
    """a statistic of the gate from which the mask is computed"""
    g = m.gate(x)
    d = g.detach()
    return m.down(g * (d > 0) * m.up(x)), d.mean()
