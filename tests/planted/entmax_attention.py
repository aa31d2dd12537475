"""Mistakes that a rewrite of entmax attention could have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import entmax as package
import torch

from planted.bug import Bug, Plant, gradient, instead, programs, result
from sparse_inductor.match.entmax.replacement import Attention
from sparse_inductor.ops import _entmax_attention_aten as aten

PATTERN = "entmax_attention"
B, H, L, D = 2, 4, 6, 8


def _padded(q, k, v, keep, bias):
    """Attention with padding and a learned bias."""
    z = (q @ k.mT / math.sqrt(D) + bias).masked_fill(~keep, -math.inf)
    return package.entmax15(z, dim=-1) @ v


def _causal(q, k, v, keep, bias):
    """Causal sparsemax attention."""
    past = torch.ones(L, L, dtype=torch.bool).tril()
    return package.sparsemax((q @ k.mT / math.sqrt(D)).masked_fill(~past, -math.inf), dim=-1) @ v


def _grouped(q, k, v, keep, bias):
    """Grouped-query attention with two query heads per key head."""
    k, v = (t[:, :2].repeat_interleave(2, dim=1) for t in (k, v))
    return package.entmax15(q @ k.mT / math.sqrt(D), dim=-1) @ v


def _build(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, L, D, generator=generator).requires_grad_() for _ in "qkv")
    keep = torch.arange(L)[None, None, None] < torch.tensor([L - 1, 4])[:, None, None, None]
    return fn, (q, k, v, keep, torch.randn(H, L, L, generator=generator).requires_grad_())


PROGRAMS = programs(PATTERN, _build, padded=_padded, causal=_causal, grouped=_grouped)
_gradient = functools.partial(gradient, aten)


def _read(change: Callable[[Attention], dict[str, Any]]) -> Plant:
    """Return a plant that changes the match before the operator is inserted."""

    def wrong(emit: Callable[..., Any], self: Attention, e: Any) -> Any:
        return emit(dataclasses.replace(self, **change(self)), e)

    return instead(Attention, "emit", wrong)


def _alpha(a: Attention) -> dict[str, Any]:
    return {"found": dataclasses.replace(a.found, alpha=2.0)}


def _scores(**fields: Any) -> Callable[[Attention], dict[str, Any]]:
    return lambda a: {"scores": dataclasses.replace(a.scores, **fields)}


def _inverted(a: Attention) -> dict[str, Any]:
    masks = [dataclasses.replace(m, negate=not m.negate) for m in a.scores.masks]
    return _scores(masks=masks)(a)


def _subtracted(a: Attention) -> dict[str, Any]:
    return _scores(biases=[dataclasses.replace(b, factor=-1.0) for b in a.scores.biases])(a)


def _last_is_first(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([out[:, :, :-1], out[:, :, :1]], 2), y


def _rolled(which: str) -> Plant:
    """Return a plant that passes the operand of the next sequence."""

    def wrong(emit: Callable[..., Any], self: Attention, e: Any) -> Any:
        operand = getattr(self, which)
        moved = dataclasses.replace(operand, node=e.method("roll", operand.node, 1, 0))
        return emit(dataclasses.replace(self, **{which: moved}), e)

    return instead(Attention, "emit", wrong)


def _later(scores: Callable[..., Any], q: Any, k: Any, c: Any, t: Any, Lq: int, Lk: int) -> Any:
    """Compute the causal mask with a diagonal that is one key too far to the right."""
    if not t.causal:
        return scores(q, k, c, t, Lq, Lk)
    z, _ = scores(q, k, c, dataclasses.replace(t, causal=False), Lq, Lk)
    rows = torch.arange(c.i.start, c.i.stop).unsqueeze(-1)
    future = torch.arange(c.keys) > rows + 1
    return z.masked_fill_(future, t.fill), future


BUGS = (
    # The replacement by the pattern
    Bug("scale dropped", _read(_scores(scale=1.0)), "padded"),
    Bug("padding dropped", _read(_scores(masks=[])), "padded"),
    Bug("padding inverted", _read(_inverted), "padded"),
    Bug("bias of the scores dropped", _read(_scores(biases=[])), "padded"),
    Bug("bias of the scores subtracted", _read(_subtracted), "padded"),
    Bug("dropped keys with a score of zero", _read(_scores(fill=0.0)), "padded"),
    Bug("alpha of another family", _read(_alpha), "padded"),
    Bug("keys of the next sequence", _rolled("k"), "causal"),
    Bug("values of the next sequence", _rolled("v"), "causal"),
    Bug("not causal", _read(lambda a: {"causal": False, **_scores(masks=[])(a)}), "causal"),
    Bug("key heads of the next sequence", _rolled("k"), "grouped"),
    # The operator's forward
    Bug("one key of the future", instead(aten, "_scores", _later), "causal"),
    Bug("last query not written", result(aten, "forward", _last_is_first), "padded"),
    # The operator's backward
    Bug("gradient of the keys dropped", _gradient(1, torch.zeros_like), "padded", backward=True),
    Bug("gradient of the queries without the scale", _gradient(0, lambda g: g * math.sqrt(D)), "padded", backward=True),
    Bug("gradient of a bias dropped", _gradient(3, torch.zeros_like), "padded", backward=True),
    Bug("gradient of the values of the next key", _gradient(2, lambda g: g.roll(1, 2)), "causal", backward=True),
)  # fmt: skip
