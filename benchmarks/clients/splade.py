"""Training a SPLADE encoder of BERT-base's shape: masked-LM model, max pooling, contrastive loss, FLOPS regulariser.

All encoder layers share one compiled code (regional compilation). The program from the masked-LM head to the loss,
which contains the rewrite, is compiled as a whole. Both contenders train the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparse_inductor
from benchmarks.bench import NotRewritten, fresh
from benchmarks.demo.model import loss_of

PATTERN = "splade_head"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The encoder's shape. A text has `tokens` tokens."""

    vocabulary: int
    layers: int = 12
    hidden: int = 768
    tokens: int = 256

    def __str__(self) -> str:
        return (
            f"{self.layers} layers D{self.hidden} V{self.vocabulary}, {self.tokens} tokens a text"
        )


class Head(nn.Module):
    """The program from the encoder's last states to the loss, as in naver/splade. Half of the batch are queries."""

    def __init__(self, predictions: nn.Module) -> None:
        super().__init__()
        self.predictions = predictions

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        return loss_of(self.values(hidden, attention_mask))

    def values(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one representation per text, [B, V]."""
        logits = self.predictions(hidden)
        weights = torch.log1p(torch.relu(logits)) * attention_mask.unsqueeze(-1)
        return torch.max(weights, dim=1).values


class Training:
    """Training steps of any contender on random texts."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden,
            num_hidden_layers=sizes.layers, num_attention_heads=max(1, sizes.hidden // 64),
            max_position_embeddings=sizes.tokens,
        )  # fmt: skip
        with torch.device(device):
            self.mlm = BertForMaskedLM(config).train()
        self.sizes, self.device = sizes, device
        self.checkpointing = False
        # The steps update the weights, but the learning rate is so small that the share of active terms stays the same.
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.mlm.parameters(), lr=1e-8, fused=fused)
        bert = self.mlm.bert
        self._layers = [torch.compile(layer) for layer in bert.encoder.layer]
        self._embeddings = torch.compile(bert.embeddings)
        self._eager = bert.embeddings, list(bert.encoder.layer)
        self.head = Head(self.mlm.cls)
        ours = sparse_inductor.options(only=PATTERN, policy="always")
        self._heads: dict[str, Callable[..., Tensor]] = {
            "eager": Head.forward,
            "compile": torch.compile(_code("compile")),
            "ours": torch.compile(_code("ours"), options=ours),
        }
        self.texts = Texts(sizes, device)

    def step(self, name: str, batch: int) -> Tensor:
        """Run one training step of a contender; return the loss."""
        ids, mask = self.texts.of(batch)
        before = _rewritten()
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self._encode(ids, mask, name)
            loss = self._heads[name](self.head, _any_batch(hidden), _any_batch(mask))
        if (name == "ours" and not _rewritten()) or (name != "ours" and _rewritten() > before):
            raise NotRewritten(f"{name}: {sparse_inductor.report()}")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _encode(self, ids: Tensor, mask: Tensor, name: str = "eager") -> Tensor:
        embeddings, layers = self._eager if name == "eager" else (self._embeddings, self._layers)
        keep = mask.bool()[:, None, None, :].expand(-1, -1, ids.shape[1], -1)
        hidden = _any_batch(embeddings(_any_batch(ids)))
        for layer in layers:
            if self.checkpointing:
                found = checkpoint(layer, hidden, _any_batch(keep), use_reentrant=False)
            else:
                found = layer(hidden, _any_batch(keep))
            hidden = _any_batch(found[0] if isinstance(found, tuple) else found)
        return hidden

    @torch.no_grad()
    def activate(self, share: float | None, texts: int = 8) -> float:
        """Shift the head's bias so that `share` of the terms are active; return the measured share.

        If `share` is None, the bias is 0, as in an untrained model.
        """
        bias = self.mlm.cls.predictions.decoder.bias
        bias.zero_()
        ids, mask = self.texts.of(texts)
        hidden = self._shifted(ids, mask, share)
        with torch.autocast(self.device.type, torch.bfloat16):
            return (self.head.values(hidden, mask) > 0).float().mean().item()

    def _shifted(self, ids: Tensor, mask: Tensor, share: float | None) -> Tensor:
        """Shift the bias; return the last states.

        The autocast context is separate from the caller's, because autocast caches the bias that it has cast.
        """
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self._encode(ids, mask)
            if share is not None:
                logits = self.mlm.cls(hidden).float()
                tops = logits.masked_fill(~mask.bool().unsqueeze(-1), -torch.inf).amax(1)
                ordered = tops.flatten().sort().values
                at = int((1 - share) * (len(ordered) - 1))
                self.mlm.cls.predictions.decoder.bias.sub_(ordered[at])
        return hidden


@functools.cache
def _code(name: str) -> Callable[..., Tensor]:
    """Return the head's code for a contender, cached so that all models of the same shape share one compilation."""
    return fresh(Head.forward)


def _rewritten() -> int:
    return sum(r.pattern == PATTERN for r in sparse_inductor.report().rewrites)


class Texts:
    """Random token ids. If `padded` is set, texts have random lengths, half of `tokens` on average."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.padded = False

    def of(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return ids and mask [batch, tokens], which are always the same for the same batch size."""
        drawn = torch.Generator(self.device).manual_seed(batch)
        size, like = (batch, self.sizes.tokens), {"device": self.device, "generator": drawn}
        ids = torch.randint(0, self.sizes.vocabulary, size, **like)
        if not self.padded:
            return ids, torch.ones_like(ids)
        lengths = torch.randint(1, self.sizes.tokens + 1, (batch, 1), **like)
        return ids, (torch.arange(self.sizes.tokens, device=self.device) < lengths).long()


def _any_batch(tensor: Tensor) -> Tensor:
    """Mark the batch size as dynamic, so that the search for the largest batch does not recompile."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
