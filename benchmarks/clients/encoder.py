"""Training a transformer encoder on long sequences, with entmax attention or with softmax attention in its place.

All layers share one compiled code. `trained()` gives queries the variance 6 and keys the variance 1, so that a row
keeps a handful of keys, as in trained models. Without it, weights have the default initialization of `nn.Linear`, and
scores are so flat that entmax keeps nearly every key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparse_inductor
from benchmarks.bench import NotRewritten, fresh

PATTERN = "entmax_attention"
VARIANCE = 6.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The encoder's shape and its batch."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    batch: int = 4
    tokens: int = 8192

    def __str__(self) -> str:
        return f"{self.layers} layers D{self.hidden} H{self.heads}, B{self.batch} L{self.tokens}"


class Layer(nn.Module):
    """A pre-norm encoder layer."""

    def __init__(self, sizes: Sizes, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        K, self.heads, self.attend = sizes.hidden, sizes.heads, attend
        self.norms = nn.ModuleList([nn.LayerNorm(K), nn.LayerNorm(K)])
        self.q, self.k, self.v, self.out = (nn.Linear(K, K) for _ in range(4))
        self.up, self.down = nn.Linear(K, 4 * K), nn.Linear(4 * K, K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attend(*self.projected(x)).transpose(1, 2).reshape(x.shape)
        x = x + self.out(h)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def projected(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values [B, H, L, D]."""
        h = self.norms[0](x)
        size = (*x.shape[:2], self.heads, -1)
        return [linear(h).view(size).transpose(1, 2) for linear in (self.q, self.k, self.v)]


def entmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import entmax

    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return entmax.entmax15(scores, dim=-1).to(v.dtype) @ v


ATTENTIONS = {"ours": entmax_attention, "compile": entmax_attention,
              "softmax": F.scaled_dot_product_attention}  # fmt: skip


class Training:
    """Training steps of one contender: "ours", "compile" (entmax unrewritten) or "softmax"."""

    def __init__(self, sizes: Sizes, device: torch.device, name: str) -> None:
        torch.manual_seed(0)
        self.sizes, self.device, self.name = sizes, device, name
        with torch.device(device):
            self.layers = nn.ModuleList(
                [Layer(sizes, ATTENTIONS[name]) for _ in range(sizes.layers)]
            )
            self.x, self.target = torch.randn(2, sizes.batch, sizes.tokens, sizes.hidden).unbind()
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-8, fused=fused)
        self._run = torch.compile(fresh(Layer.forward), dynamic=False)
        self._rewritten = name != "ours"

    def trained(self) -> None:
        """Set the projections so that queries and keys have the variances of trained models; inputs are normalised."""
        torch.manual_seed(1)
        with torch.no_grad():
            for layer in self.layers:
                for linear, variance in ((layer.q, VARIANCE), (layer.k, 1.0)):
                    linear.bias.zero_()
                    linear.weight.normal_(0, (variance / self.sizes.hidden) ** 0.5)

    def step(self) -> Tensor:
        """Run one training step; return the loss."""
        if self._rewritten:
            return self._step()
        before = len(sparse_inductor.report().rewrites)
        with sparse_inductor.enabled(only=PATTERN, policy="always"):
            loss = self._step()
        if len(sparse_inductor.report().rewrites) == before:
            raise NotRewritten(f"{PATTERN} was not rewritten:\n{sparse_inductor.report()}")
        self._rewritten = True
        return loss

    def _step(self) -> Tensor:
        x = self.x
        with torch.autocast(self.device.type, torch.bfloat16):
            for layer in self.layers:
                x = self._run(layer, x)
            loss = F.mse_loss(x.float(), self.target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def supports(self) -> tuple[float, float]:
        """Return the mean number of keys that a row keeps, in the first and in the last layer."""
        from benchmarks.families.entmax_attention import support

        found, x = [], self.x[:1]
        with torch.autocast(self.device.type, torch.bfloat16):
            for layer in self.layers:
                q, k, _ = layer.projected(x)
                found.append(support(q, k, False, 1.5))
                # The operator itself: softmax attention would give the later layers different states.
                h = sparse_inductor.ops.entmax_attention(*layer.projected(x))
                x = x + layer.out(h.transpose(1, 2).reshape(x.shape))
                x = x + layer.down(F.gelu(layer.up(layer.norms[1](x))))
        return found[0], found[-1]
