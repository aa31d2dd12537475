"""Random models: blocks of the families, their near misses and ordinary layers on hidden states, then a head.

A model is described by a `Plan`, which Hypothesis draws and prints; the same plan builds the same model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from entmax import entmax15, entmax_bisect, sparsemax
from hypothesis import strategies as st
from torch import Tensor, nn

HEADS = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """B, L, D, V: sizes. blocks, head: keys of the tables below."""

    blocks: tuple[str, ...]
    head: str
    B: int
    L: int
    D: int
    V: int
    dtype: torch.dtype
    autocast: bool
    training: bool
    dynamic: bool | None
    mask: str
    seed: int


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=0, max_size=3).map(tuple),
        head=st.sampled_from(sorted(HEADS_OF)),
        B=st.integers(1, 4),
        L=st.integers(1, 9),
        D=st.sampled_from([8, 12, 16]),
        V=st.sampled_from([1, 5, 17, 40]),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
        autocast=st.booleans(),
        training=st.booleans(),
        dynamic=st.sampled_from([None, None, False, True]),
        mask=st.sampled_from(["none", "padding", "bool", "empty row", "weights"]),
        seed=st.integers(0, 2**16),
    )


Block = Callable[[nn.Module, Tensor, Tensor], Tensor]
BLOCKS: dict[str, Block] = {}
HEADS_OF: dict[str, Block] = {}
# The pattern that a block or head has to be rewritten by, or (None) must not be by any.
EXPECTED: dict[str, str | None] = {}


def block(pattern: str | None = "", table: dict[str, Block] = BLOCKS) -> Callable[[Block], Block]:
    """Registers one; pattern "" says nothing about what is to become of it."""

    def register(fn: Block) -> Block:
        table[fn.__name__] = fn
        if pattern != "":
            EXPECTED[fn.__name__] = pattern
        return fn

    return register


def head(pattern: str | None = "") -> Callable[[Block], Block]:
    return block(pattern, HEADS_OF)


class Layer(nn.Module):
    """Weights that any block can use."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        D, V = plan.D, plan.V
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.gate, self.down = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, 3 * D),
            nn.Linear(3 * D, D),
        )
        self.norm = nn.LayerNorm(D)
        self.vocabulary = nn.Linear(D, V)
        self.alpha = nn.Parameter(torch.tensor(1.4))
        self.taps = nn.Conv1d(D, D, 3, padding=1)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, L, D = x.shape
        return tuple(
            m(x).view(B, L, HEADS, D // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v)
        )

    def scores(self, x: Tensor, mask: Tensor, fill: float = -1e9) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return s.masked_fill(mask[:, None, None] == 0, fill), v

    def merged(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(Layer(plan) for _ in range(len(plan.blocks) + 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for name, layer in zip(self.plan.blocks, self.layers):
            x = BLOCKS[name](layer, x, mask)
        return HEADS_OF[self.plan.head](self.layers[-1], x, mask)


def build(plan: Plan) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and its inputs."""
    torch.manual_seed(plan.seed)
    model = Model(plan).to(plan.dtype).train(plan.training)
    x = (torch.randn(plan.B, plan.L, plan.D) * 1.5).to(plan.dtype).requires_grad_(plan.training)
    mask = torch.ones(plan.B, plan.L)
    if plan.mask != "none":
        mask[-1, plan.L // 2 :] = 0
    if plan.mask == "empty row":
        mask[0] = 0
    if plan.mask == "weights":
        mask = mask * torch.rand(plan.B, plan.L)
    return model, (x, mask.bool() if plan.mask == "bool" else mask.to(plan.dtype))


def must_be(plan: Plan) -> set[str]:
    """Patterns that have to have matched."""
    return {p for name in (*plan.blocks, plan.head) if (p := EXPECTED.get(name))}


def must_not_be(plan: Plan) -> bool:
    """Whether nothing at all may be rewritten."""
    return all(EXPECTED.get(name, "") is None for name in (*plan.blocks, plan.head))


# Ordinary layers


@block(None)
def mlp(layer, x, mask):
    return x + layer.down(F.gelu(layer.up(layer.norm(x))))


@block(None)
def convolution(layer, x, mask):
    return F.silu(layer.taps(x.transpose(1, 2)).transpose(1, 2))


@block(None)
def softmax_attention(layer, x, mask):
    scores, v = layer.scores(x, mask)
    return layer.merged(x, scores.softmax(-1) @ v)


@block(None)
def fused_attention(layer, x, mask):
    q, k, v = layer.heads(x)
    return layer.merged(x, F.scaled_dot_product_attention(q, k, v))


@block(None)
def highway(layer, x, mask):
    gate = torch.sigmoid(layer.q(x))
    return gate * torch.tanh(layer.k(x)) + (1 - gate) * x


# Rectified blocks, gated and not


@block()
def relu_mlp(layer, x, mask):
    return x + layer.down(F.relu(layer.up(layer.norm(x))))


@block()
def gated_relu_mlp(layer, x, mask):
    h = layer.norm(x)
    return x + layer.down(F.relu(layer.gate(h)) * layer.up(h))


@block()
def squared_relu_mlp(layer, x, mask):
    return x + layer.down(F.relu(layer.up(layer.norm(x))).square())


@block()
def relu_mlp_whose_activations_are_used(layer, x, mask):
    h = F.relu(layer.up(x))
    return x + layer.down(h) + h.mean()


# Entmax


@block("entmax_attention")
def entmax_attention(layer, x, mask):
    scores, v = layer.scores(x, mask)
    return layer.merged(x, entmax15(scores, dim=-1) @ v)


@block("entmax_attention")
def sparsemax_attention(layer, x, mask):
    scores, v = layer.scores(x, mask)
    return layer.merged(x, sparsemax(scores, dim=-1) @ v)


@block("entmax_attention")
def learned_entmax_attention(layer, x, mask):
    scores, v = layer.scores(x, mask)
    return layer.merged(x, entmax_bisect(scores, layer.alpha + 0.1, dim=-1) @ v)


@block("entmax_attention")
def causal_entmax_attention(layer, x, mask):
    q, k, v = layer.heads(x)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return layer.merged(x, entmax15(scores.masked_fill(~keep, -1e9), -1) @ v)


@block("entmax")
def entmax_whose_probabilities_are_used(layer, x, mask):
    scores, v = layer.scores(x, mask)
    p = entmax15(scores, dim=-1)
    return layer.merged(x, p @ v) + p.amax(-1).mean()


@block("entmax")
def router(layer, x, mask):
    p = sparsemax(layer.q(x), dim=-1)
    return x + p * layer.k(x)


@block(None)
def clamped_scores(layer, x, mask):
    """Looks like a sparse attention, and is none."""
    scores, v = layer.scores(x, mask)
    p = F.relu(scores)
    return layer.merged(x, (p / (p.sum(-1, keepdim=True) + 1)) @ v)


# Heads


@head("splade_head")
def splade(layer, x, mask):
    return (torch.log1p(F.relu(layer.vocabulary(x))) * mask.unsqueeze(-1)).amax(1)


@head("splade_head")
def splade_by_max(layer, x, mask):
    return torch.max(torch.log(1 + torch.relu(layer.vocabulary(x))) * mask[..., None], dim=1).values


@head("splade_head")
def masked_before(layer, x, mask):
    logits = layer.vocabulary(x).masked_fill((mask == 0).unsqueeze(-1), -1e4)
    return logits.max(dim=1)[0].relu().log1p()


@head("splade_head")
def square_root(layer, x, mask):
    return (F.relu(layer.vocabulary(x)).sqrt() * mask.unsqueeze(-1)).amax(dim=1)


@head("splade_head")
def unmasked(layer, x, mask):
    return F.leaky_relu(layer.vocabulary(x)).amax(1)


@head(None)
def sum_pooling(layer, x, mask):
    return (torch.log1p(F.relu(layer.vocabulary(x))) * mask.unsqueeze(-1)).sum(1)


@head(None)
def over_the_vocabulary(layer, x, mask):
    return torch.log1p(F.relu(layer.vocabulary(x))).amax(2)


@head(None)
def logits_used_twice(layer, x, mask):
    logits = layer.vocabulary(x)
    return torch.log1p(F.relu(logits)).amax(1) + logits.mean(1)


@head(None)
def not_monotone(layer, x, mask):
    return (layer.vocabulary(x).sin() * mask.unsqueeze(-1)).amax(1)


@head(None)
def first_token(layer, x, mask):
    return layer.vocabulary(x[:, 0])
