"""Adapters beside the projections of a block (LoRA: W x + s B (A x)), and other sums of linear maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.case import INFER, TRAIN
from corpus.relu_ffn.registry import Block, K, N, function, tokens

RANK = 4


class Adapted(nn.Module):
    """gate(x), up(x) and down(h) are layers with an adapter each, as peft's `lora.Linear` computes them."""

    def __init__(self, forward, frozen, bias, dropout=0.0, scaling=2.0, adapts="gate up down"):
        super().__init__()
        self.block, self._forward, self._scaling = Block(forward, bias), forward, scaling
        self.block.requires_grad_(not frozen)
        sizes = {"gate": (K, N), "up": (K, N), "down": (N, K)}
        adapted = [name for name in sizes if name in adapts]
        self.a = nn.ModuleDict({n: nn.Linear(sizes[n][0], RANK, bias=False) for n in adapted})
        self.b = nn.ModuleDict({n: nn.Linear(RANK, sizes[n][1], bias=False) for n in adapted})
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x):
        return self._forward(x, self)

    def _layer(self, name, x):
        result = getattr(self.block, name)(x)
        if name in self.a:
            result = result + self.b[name](self.a[name](self.drop(x))) * self._scaling
        return result

    def gate(self, x):
        return self._layer("gate", x)

    def up(self, x):
        return self._layer("up", x)

    def down(self, x):
        return self._layer("down", x)


def adapted(
    *how, frozen=True, bias=False, dropout=0.0, scaling=2.0, adapts="gate up down", **fields
):
    """Register `forward(x, m)` of an `Adapted`."""
    given = frozen, bias, dropout, scaling, adapts
    return function(lambda forward: (Adapted(forward, *given), (tokens(),)), *how, **fields)


@adapted(bias=True)
@adapted(prefix="all_weights_learn_", frozen=False)
@adapted(prefix="of_the_gate_", adapts="gate")
@adapted(prefix="autocast_", autocast=torch.bfloat16)
@adapted(
    "maybe", "dynamic=True makes a symbol of the scaling, too", prefix="any_size_", dynamic=True
)
@adapted(prefix="dropout_in_eval_", adapts="gate up", dropout=0.3, modes=INFER)
@adapted(
    "no_rewrite", "also read by dropout", TRAIN, prefix="dropped_activations_", adapts="down",
    dropout=0.3, at="self.drop(x)",
)  # fmt: skip
def lora(x, m):
    """Frozen weights, an adapter for each of the three."""
    return m.down(F.relu(m.gate(x)) * m.up(x))


@adapted()
def lora_and_an_l1_term(x, m):
    h = F.relu(m.gate(x)) * m.up(x)
    return m.down(h), h.abs().mean()


@adapted(adapts="gate up")
def lora_of_flattened_tokens(x, m):
    t = x.flatten(0, 1)
    return m.down((F.relu(m.gate(t)) * m.up(t)).view(*x.shape[:2], N))


class _Two(nn.Module):
    """A block with a projection that is a sum of linear maps."""

    def __init__(self, forward, frozen=False):
        super().__init__()
        self.block, self._forward = Block(forward, bias=True), forward
        self.block.requires_grad_(not frozen)
        self.a, self.b = nn.Linear(K, RANK, bias=False), nn.Linear(RANK, N)
        self.d, self.e = nn.Linear(N, RANK, bias=False), nn.Linear(RANK, K, bias=False)
        self.c, self.scale = nn.Linear(K, N), nn.Parameter(torch.rand(N) + 0.5)

    def forward(self, x):
        return self._forward(x, self, self.block)


def two(*how, frozen=False, **fields):
    return function(lambda forward: (_Two(forward, frozen), (tokens(),)), *how, **fields)


@two()
def conditioned_on_other_tokens(x, m, block):
    """relu(W x + V t), where t is a hidden state or conditions the layer."""
    return block.down(F.relu(block.gate(x) + m.c(x.flip(1))))


@two()
def adapter_in_front(x, m, block):
    return block.down(F.relu(m.b(m.a(x)) / 2 + block.gate(x)) * block.up(x))


@two()
def adapter_that_is_taken_off(x, m, block):
    return block.down(F.relu(block.gate(x) - m.b(m.a(x))) * block.up(x))


@two(frozen=True)
def two_adapters(x, m, block):
    """Both adapt the gate projection, and the second one has full rank."""
    return block.down(F.relu(block.gate(x) + m.b(m.a(x)) + 0.5 * m.c(x)) * block.up(x))


@two(frozen=True)
def learned_scale_of_an_adapted_gate(x, m, block):
    """The scale is multiplied into frozen weights, which then need a gradient for the scale."""
    return block.down(F.relu((block.gate(x) + m.b(m.a(x))) * m.scale) * block.up(x))


@two(frozen=True)
def learned_scale_of_an_adapted_hidden(x, m, block):
    h = F.relu(block.gate(x)) * block.up(x) * m.scale
    return block.down(h) + m.e(m.d(h))


@two("no_rewrite", "add combines two tensors", at="torch.tanh(")
def adapter_with_an_activation(x, m, block):
    return block.down(F.relu(block.gate(x) + torch.tanh(m.b(m.a(x)))) * block.up(x))


@two("no_rewrite", "also read by linear", at="m.d(h)")
def adapter_that_is_watched(x, m, block):
    h = F.relu(block.gate(x)) * block.up(x)
    t = m.d(h)
    return block.down(h) + m.e(t), t
