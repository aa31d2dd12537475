"""The pattern: masked mean pooling as users write it, and its replacement."""

from __future__ import annotations

import torch

from sparse_inductor import Template
from sparse_inductor.graph.fakes import fake
from sparse_inductor.pattern import Example

from . import op  # noqa: F401  (defines the operator)


def search(hidden, mask, eps):
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp(min=eps)


def replacement(hidden, mask, eps):
    return torch.ops.masked_mean.pool(hidden, mask, eps)


def check(hidden, mask, eps):
    if torch.is_grad_enabled() and fake(mask).requires_grad:
        return "the mask needs a gradient"
    return None


def example(name, fn, training=False, reason=""):
    def build():
        torch.manual_seed(0)
        mask = (torch.arange(6) < torch.tensor([[6], [3]])).float()
        return fn, (torch.randn(2, 6, 8, requires_grad=training), mask)

    return Example(name, build, training, reason)


def pooled(hidden, mask):
    masked = hidden * mask.unsqueeze(-1)
    return masked.sum(dim=1) / torch.clamp(mask.sum(1, keepdim=True), min=1e-9)


def masked_too(hidden, mask):
    masked = hidden * mask.unsqueeze(-1)
    return masked.sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9), masked


PATTERN = Template(
    "masked_mean",
    "masked_mean::pool",
    "(hidden * mask).sum(1) / mask.sum(1) -> pool(hidden, mask)",
    search,
    replacement,
    check=check,
    examples=(
        example("as_in_sentence_transformers", pooled),
        example("in_training", pooled, training=True),
        example(
            "operands_in_another_order",
            lambda h, m: torch.sum(m.unsqueeze(-1) * h, 1) / m.sum(1, True).clamp(min=1.0),
        ),
    ),
    near_misses=(
        example("states_read_too", masked_too, reason="the result of mul is also returned"),
        example(
            "another_divisor",
            lambda h, m: (h * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True).clamp(max=8.0),
            reason="clamp",
        ),
    ),
)
