"""A Llama with ReLU feed-forward blocks and a static cache; blocks are compiled once and share their code.

Random weights, made so that a wanted share of the neurons is active in every layer: one feature of the residual stream
is constant, and every gate's weight for it is the threshold that the layer's own inputs ask for. Tokens of a text have
nothing in common then; with `alike`, their embeddings have a direction in common, as those of a real text do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparse_inductor
from benchmarks.bench import NotRewritten, fresh

PATTERN = "relu_ffn"
# The constant feature, in standard deviations of the others before they are normalised.
CONSTANT = 4.0
# Subjects a text may have, each a part of the vocabulary.
SUBJECTS = 64
# Neurons of a text that are looked at for how much its tokens share.
SHARED = 512


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model's shape; `context` tokens fit into the cache."""

    layers: int = 28
    hidden: int = 2048
    neurons: int = 5632
    heads: int = 32
    vocabulary: int = 32000
    context: int = 2048

    @property
    def parameters(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.neurons
        return self.layers * block + 2 * self.vocabulary * self.hidden

    def __str__(self) -> str:
        billions = self.parameters / 1e9
        return f"{billions:.2g} B ({self.layers} layers K{self.hidden} N{self.neurons})"


class Block(nn.Module):
    """Attention with rotary positions and a static cache, then the gated feed-forward block."""

    def __init__(self, sizes: Sizes, rows: int, like: dict[str, Any]) -> None:
        super().__init__()
        K, N, self.heads = sizes.hidden, sizes.neurons, sizes.heads

        def weights(out: int, features: int, scale: float) -> nn.Parameter:
            drawn = torch.randn(out, features, **like).mul_(scale * features**-0.5)
            return nn.Parameter(drawn, requires_grad=False)

        self.qkv, self.out = weights(3 * K, K, 1.0), weights(K, K, 0.3)
        self.gate, self.up, self.down = weights(N, K, 1.0), weights(N, K, 1.0), weights(K, N, 1.0)
        self.gate[:, 0] = 0
        self.out[0], self.down[0] = 0, 0  # the constant feature stays as it is
        ones = [nn.Parameter(torch.ones(K, **like), requires_grad=False) for _ in range(2)]
        self.norms = nn.ParameterList(ones)
        size = (rows, sizes.heads, sizes.context, K // sizes.heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(size, **like), persistent=False)

    def forward(self, x: Tensor, turn: Tensor, at: Tensor, keep: Tensor | None) -> Tensor:
        """x [B, L, K] at the positions `at`; keep [L, context] masks the cache, None: attend within x, causally."""
        x = x + self.attention(x, turn, at, keep)
        h = self.normalised(x)
        return x + F.linear(F.relu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)

    def attention(self, x: Tensor, turn: Tensor, at: Tensor, keep: Tensor | None) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.norms[0], 1e-6)
        parts = F.linear(h, self.qkv).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = _turned(parts[0], turn), _turned(parts[1], turn), parts[2]
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        if keep is None:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            found = _of_one(q, self.keys, self.values, keep)
        return F.linear(found.transpose(1, 2).reshape(x.shape), self.out)

    def normalised(self, x: Tensor) -> Tensor:
        """What the feed-forward block reads."""
        return F.rms_norm(x, x.shape[-1:], self.norms[1], 1e-6)


def _of_one(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Attention of one token, q [B, H, 1, D], written out: Inductor reads keys and values once each, where attention
    kernels made for many queries leave most of the GPU idle."""
    scores = (keys * q).float().sum(-1) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    return (values * weights.unsqueeze(-1)).sum(2, keepdim=True).to(q.dtype)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions; turn [2, L, D] holds cosines and sines."""
    left, right = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-right, left], -1) * turn[1]


class Llama:
    """Random weights with `share` of the neurons active; `rows` sequences at once.

    alike: share of an embedding's variance that is its subject's; the tokens of a prompt have one subject.
    active, shared: shares of the neurons that are active, and of these that are among the SHARED neurons that their
    text has active most often; means over the layers.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, share: float, rows: int, alike: float = 0.0
    ) -> None:
        torch.manual_seed(0)
        self.sizes, self.device, self.rows = sizes, device, rows
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        uneven = (1 + 0.2 * torch.randn(sizes.vocabulary, 1, **like)).clamp(0.5, 1.5)
        own = torch.randn(sizes.vocabulary, sizes.hidden, **like)
        subject = torch.randn(SUBJECTS, sizes.hidden, **like)
        each = -(-sizes.vocabulary // SUBJECTS)
        of_subject = subject.repeat_interleave(each, 0)[: sizes.vocabulary]
        self.embedding = ((1 - alike) ** 0.5 * own + alike**0.5 * of_subject) * uneven
        self.embedding[:, 0] = CONSTANT
        self.last = torch.randn(sizes.vocabulary, sizes.hidden, **like) * sizes.hidden**-0.5
        self.blocks = [Block(sizes, rows, like) for _ in range(sizes.layers)]
        angles = torch.outer(
            torch.arange(sizes.context, device=device),
            10000 ** -torch.linspace(0, 1, sizes.hidden // sizes.heads // 2, device=device),
        ).repeat(1, 2)
        self.turn = torch.stack([angles.cos(), angles.sin()]).to(dtype)
        if alike:
            first = torch.arange(rows, device=device)[:, None] % (sizes.vocabulary // each) * each
            self.prompt = first + torch.randint(0, each, (rows, sizes.context), device=device)
        else:
            self.prompt = torch.randint(0, sizes.vocabulary, (rows, sizes.context), device=device)
        self.active, self.shared = self._activate(share)

    @torch.no_grad()
    def _activate(self, share: float) -> tuple[float, float]:
        """Set every gate's threshold from the layer's inputs; returns `active` and `shared` then."""
        x, at = self.embedding[self.prompt], torch.arange(self.sizes.context, device=self.device)
        found = []
        for block in self.blocks:
            texts = block.normalised(x + block.attention(x, self.turn, at, None))
            h = texts.flatten(0, 1)
            h = h[:: max(1, len(h) // 1024)]
            # gate . h > 0, the constant feature left out, over that feature: where a share lies above.
            needed = (F.linear(h, block.gate).float() / h[:, :1].float()).flatten()
            block.gate[:, 0] = -needed.kthvalue(int((1 - share) * len(needed))).values
            times = [(F.linear(text, block.gate) > 0).float().sum(0) for text in texts]
            most = [n.topk(min(SHARED, len(n))).values.sum().item() for n in times]
            n_active = sum(n.sum().item() for n in times)
            found.append((n_active / texts[..., 0].numel() / len(block.gate), sum(most) / n_active))
            x = block(x, self.turn, at, None)
        active, shared = (sum(each) / len(found) for each in zip(*found, strict=True))
        return active, shared

    def _run(
        self, run: Callable[..., Tensor], ids: Tensor, at: Tensor, keep: Tensor | None
    ) -> Tensor:
        turn = self.turn[:, at]
        x = self.embedding[ids]
        for block in self.blocks:
            x = run(block, x, turn, at, keep)
        return F.linear(F.rms_norm(x[:, -1], x.shape[-1:]), self.last)

    def prefill(self, run: Callable[..., Tensor]) -> Callable[[], Tensor]:
        """The prompt in one go; logits of its last token."""
        at = torch.arange(self.sizes.context, device=self.device)

        @torch.no_grad()
        def work() -> Tensor:
            return self._run(run, self.prompt, at, None)

        return work

    def decode(self, run: Callable[..., Tensor]) -> Callable[[], Tensor]:
        """The next token, near the end of the cache; greedy."""
        last = self.sizes.context - 1
        at = torch.tensor([last], device=self.device)
        keep = torch.arange(self.sizes.context, device=self.device)[None] <= at[:, None]
        ids = self.prompt[:, -1:]

        @torch.no_grad()
        def work() -> Tensor:
            return self._run(run, ids, at, keep).argmax(-1)

        return work


def contender(name: str) -> Callable[..., Tensor]:
    """A way to run a block."""
    if name == "eager":
        return Block.forward
    options = sparse_inductor.options(only=PATTERN, policy="always") if name == "ours" else None
    return torch.compile(fresh(Block.forward), dynamic=False, options=options)


def checked(name: str, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The work, run once; raises NotRewritten unless just "ours" was rewritten."""
    before = len(sparse_inductor.report().rewrites)
    work()
    if (len(sparse_inductor.report().rewrites) > before) != (name == "ours"):
        raise NotRewritten(f"{name}: {sparse_inductor.report()}")
    return work
