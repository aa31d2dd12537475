"""Small models that contain rewrites of every family, for tests of the ways to run a program."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from entmax import entmax15
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

VOCABULARY, WORDS, D, HEADS = 37, 50, 16, 2


class Attention(nn.Module):
    """Entmax attention with a padding mask."""

    def __init__(self, dim: int = D, heads: int = HEADS) -> None:
        super().__init__()
        self.width = dim // heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, L, _ = x.shape
        q, k, v = (
            m(x).view(B, L, -1, self.width).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.width)
        scores = scores.masked_fill(mask[:, None, None] == 0, -1e9)
        mixed = entmax15(scores, dim=-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(B, L, -1))


class Encoder(nn.Module):
    """A SPLADE encoder: embedding, entmax attention, SPLADE head. Its result is [B, VOCABULARY]."""

    def __init__(self, dim: int = D, heads: int = HEADS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, dim)
        self.attention = Attention(dim, heads)
        self.decoder = nn.Linear(dim, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.body(ids, mask), mask)

    def body(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.attention(self.embedding(ids), mask)

    def head(self, hidden: Tensor, mask: Tensor) -> Tensor:
        logits = self.decoder(hidden)
        return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)


def batch(B: int = 3, L: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens [B, L] and their mask [B, L]; the last sequence is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (B, L), generator=generator)
    mask = torch.ones(B, L)
    mask[-1, L // 2 + 1 :] = 0
    return ids, mask


def encoder(seed: int = 0, **kwargs) -> Encoder:
    """Return an `Encoder` whose random weights depend on the seed alone."""
    torch.manual_seed(seed)
    return Encoder(**kwargs)


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixing(nn.Module):
    """Attention over all tokens."""

    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return entmax15(self.q(x) @ self.k(x).mT / math.sqrt(D), dim=-1) @ self.v(x)


class Routing(nn.Module):
    """Sparse probabilities over the features."""

    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return entmax15(self.gate(x), dim=-1)


class Pooling(nn.Module):
    """A SPLADE head with a vocabulary of `dim` terms; its result is added to every token."""

    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.decoder = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.log1p(torch.relu(self.decoder(x))).amax(1, keepdim=True)


class Scoring(nn.Module):
    """Scores of `dim` documents for each sequence's first token, added to every token."""

    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(3 * dim).view(dim, 3) % (dim - 1))
        self.register_buffer("weights", torch.rand(dim, 3))

    def forward(self, x: Tensor) -> Tensor:
        query = x[:, 0]
        return x + (query[:, self.ids] * self.weights).sum(-1).unsqueeze(1)


LAYERS = {
    "relu_ffn": Block,
    "entmax_attention": Mixing,
    "entmax": Routing,
    "splade_head": Pooling,
    "sparse_scores": Scoring,
}
"""For each pattern, a module [B, L, D] -> [B, L, D] that it rewrites once."""


def layer(pattern: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[pattern]()


class Model(nn.Sequential):
    """A chain of attention, a feed-forward block, sparse scores and a SPLADE head."""

    PATTERNS = ("entmax_attention", "relu_ffn", "sparse_scores", "splade_head")

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(*(LAYERS[name]() for name in self.PATTERNS))


def draw(batch: int = 2, length: int = 5, seed: int = 1) -> Tensor:
    """Return a random input [batch, length, D] for `layer` or `Model`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, D, generator=generator, dtype=torch.float32)
    return x.requires_grad_()


def step(
    program: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor | None = None
) -> list[Tensor | None]:
    """Run a training step and return the result and the gradients of the input and of the parameters.

    Where gradients are disabled, return the result alone.
    """
    x = draw() if x is None else x
    y = program(x)
    if not torch.is_grad_enabled():
        return [y]
    module.zero_grad()
    y.square().sum().backward()
    return [y.detach(), x.grad, *(whole(p.grad) for p in module.parameters())]


def whole(t: Tensor | None) -> Tensor | None:
    return t.full_tensor() if isinstance(t, DTensor) else t
