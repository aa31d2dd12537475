"""A feed-forward block on a GPU, and tokens that activate uneven numbers of its neurons."""

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
    """Return random tokens [M, K]. Their last feature multiplies the gates' thresholds.

    With `uneven`, a third of the rows have more active neurons, a few have half of all, and a few have none.
    """
    x = torch.randn(M, K, device="cuda", dtype=dtype)
    x[:, -1] = 1
    if uneven:
        x[::3, -1] = 0.75
        x[5::97, -1] = 0
        x[7::50] = 0  # no active neuron
    return x


def of_a_step(x, weights, dy):
    """Return the outputs in inference and in training, and the gradients of the tokens and of all weights."""
    with torch.no_grad():
        y = sparse_inductor.ops.relu_ffn(x, **weights)
    trained = sparse_inductor.ops.relu_ffn(x, **weights)
    return [y, trained.detach(), *torch.autograd.grad(trained, (x, *weights.values()), dy)]
