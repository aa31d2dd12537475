"""A feed-forward block on a GPU, and tokens whose rows are uneven."""

from __future__ import annotations

import torch

import sparse_inductor


def block(N, K, D, share, dtype=torch.bfloat16):
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=dtype)
    gate = draw(N, K) / K**0.5
    gate[:, -1] = -torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share)).item()
    return {"gate": gate, "up": draw(N, K) / K**0.5, "down": draw(D, N) / 4}


def tokens(M, K, uneven, dtype=torch.bfloat16):
    """The last number is what the gates' thresholds are times: where uneven, a third of the rows have more active, a
    few half of all, and a few none."""
    x = torch.randn(M, K, device="cuda", dtype=dtype)
    x[:, -1] = 1
    if uneven:
        x[::3, -1] = 0.75
        x[5::97, -1] = 0
        x[7::50] = 0  # none
    return x


def of_a_step(x, weights, dy):
    """Outputs in inference and in training, and the gradients of the tokens and of all weights."""
    with torch.no_grad():
        y = sparse_inductor.ops.relu_ffn(x, **weights)
    trained = sparse_inductor.ops.relu_ffn(x, **weights)
    return [y, trained.detach(), *torch.autograd.grad(trained, (x, *weights.values()), dy)]
