"""A Llama with ReLU feed-forward blocks and a static cache; all blocks share one compiled code.

The weights are random, but a given share of the neurons is active in every layer: one feature of the residual stream is
constant, and every gate's weight for it acts as a threshold that is set from the layer's own inputs. The tokens of a
text then have nothing in common. With `alike`, their embeddings share a direction, as in a real text.
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
# The constant feature, in standard deviations of the other features before normalisation.
CONSTANT = 4.0
# The number of possible subjects of a text; each has a part of the vocabulary.
SUBJECTS = 64
# The number of a text's most often active neurons, among which the active neurons of its tokens are counted.
SHARED = 512


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model's shape. The cache holds `context` tokens."""

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
        self.out[0], self.down[0] = 0, 0  # no block changes the constant feature
        ones = [nn.Parameter(torch.ones(K, **like), requires_grad=False) for _ in range(2)]
        self.norms = nn.ParameterList(ones)
        size = (rows, sizes.heads, sizes.context, K // sizes.heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(size, **like), persistent=False)

    def forward(self, x: Tensor, turn: Tensor, at: Tensor, keep: Tensor | None) -> Tensor:
        """Run the block on x [B, L, K] at the positions `at`.

        keep [L, context] masks the cache; if it is None, x attends only to itself, causally.
        """
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
        """Return the input of the feed-forward block."""
        return F.rms_norm(x, x.shape[-1:], self.norms[1], 1e-6)


def _of_one(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Compute attention of one token, q [B, H, 1, D], with plain operations.

    Inductor then reads keys and values once each, whereas attention kernels for many queries leave most of the GPU
    idle.
    """
    scores = (keys * q).float().sum(-1) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    return (values * weights.unsqueeze(-1)).sum(2, keepdim=True).to(q.dtype)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Apply rotary positions; turn [2, L, D] holds cosines and sines."""
    left, right = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-right, left], -1) * turn[1]


class Llama:
    """A model with random weights and `share` of its neurons active, which runs `rows` sequences at once.

    alike: the share of an embedding's variance that is due to its subject; all tokens of a prompt have the same
    subject. active: the share of the neurons that are active. shared: the share of these active neurons that are among
    the SHARED most often active neurons of their text. Both are means over the layers.
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
        """Set every gate's threshold from the layer's inputs; return the resulting `active` and `shared`."""
        x, at = self.embedding[self.prompt], torch.arange(self.sizes.context, device=self.device)
        found = []
        for block in self.blocks:
            texts = block.normalised(x + block.attention(x, self.turn, at, None))
            h = texts.flatten(0, 1)
            h = h[:: max(1, len(h) // 1024)]
            # gate[:, 0] is still 0, so a neuron is active if this ratio exceeds the threshold -gate[:, 0]. The quantile
            # of the ratios is the threshold at which `share` of the neurons are active.
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
        """Return a function that runs the whole prompt and returns the logits of its last token."""
        at = torch.arange(self.sizes.context, device=self.device)

        @torch.no_grad()
        def work() -> Tensor:
            return self._run(run, self.prompt, at, None)

        return work

    def decode(self, run: Callable[..., Tensor]) -> Callable[[], Tensor]:
        """Return a function that greedily decodes the next token, near the end of the cache."""
        last = self.sizes.context - 1
        at = torch.tensor([last], device=self.device)
        keep = torch.arange(self.sizes.context, device=self.device)[None] <= at[:, None]
        ids = self.prompt[:, -1:]

        @torch.no_grad()
        def work() -> Tensor:
            return self._run(run, ids, at, keep).argmax(-1)

        return work


def contender(name: str) -> Callable[..., Tensor]:
    """Return a contender's function that runs a block."""
    if name == "eager":
        return Block.forward
    options = sparse_inductor.options(only=PATTERN, policy="always") if name == "ours" else None
    return torch.compile(fresh(Block.forward), dynamic=False, options=options)


def checked(name: str, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run the work once and return it. Raises NotRewritten if "ours" was not rewritten or another contender was."""
    before = len(sparse_inductor.report().rewrites)
    work()
    if (len(sparse_inductor.report().rewrites) > before) != (name == "ours"):
        raise NotRewritten(f"{name}: {sparse_inductor.report()}")
    return work
