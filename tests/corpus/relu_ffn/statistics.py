"""Sparsity statistics read beside the down projection (TwELL, section 3.4: the L1 term of the loss)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from corpus.case import each, of
from corpus.relu_ffn.registry import INFER, TRAIN, K, N, block


def beside(make: Callable, *how: Any, **fields: Any) -> Callable[[Callable], Callable]:
    """Register a block with `statistic(h)` of the activations h = `make(x, m)`, which the down projection reads."""

    def wrap(statistic: Callable) -> Callable:
        def forward(x, m):
            h = make(x, m)
            return m.down(h), statistic(h)

        return forward

    return of(block(*how, **fields), wrap)


plain = functools.partial(beside, lambda x, m: F.relu(m.up(x)))
gated = functools.partial(beside, lambda x, m: F.relu(m.gate(x)) * m.up(x))

each(
    gated(),
    mean_absolute=lambda h: h.abs().mean(),
    mean_distance_from_zeros=lambda h: F.l1_loss(h, torch.zeros_like(h)),
    count_of_each_token=lambda h: torch.count_nonzero(h, dim=-1),
)
each(
    plain(),
    sum_of_plain=lambda h: torch.sum(torch.abs(h)),
    norm_one=lambda h: h.norm(p=1),
    distance_from_zeros=lambda h: torch.nn.L1Loss(reduction="sum")(torch.zeros_like(h), h),
    count_per_token=lambda h: (h != 0).sum(-1),
    norm_zero=lambda h: h.norm(p=0, dim=-1).mean(),
    norm_of_linalg=lambda h: torch.linalg.norm(h, ord=1, dim=-1).mean(),
)


@block()
def mean_of_gate(x, m):
    a = F.relu(m.gate(x))
    return m.down(a * m.up(x)), a.mean()


@plain("no_rewrite", "also read by l1_loss", at="F.l1_loss(")
def distances_from_zeros(h):
    return F.l1_loss(h, torch.zeros_like(h), reduction="none")


@block()
def share_of_nonzeros(x, m):
    h = F.relu(m.gate(x))
    return m.down(h * m.up(x)), (h > 0).float().mean()


@gated(modes=TRAIN)
def both_statistics(h):
    """L1 in the loss, L0 for the log."""
    return h.abs().sum(dim=-1).mean(), (h.detach() != 0).float().mean()


each(
    plain(modes=TRAIN),
    neurons_that_fired=lambda h: (h > 0).any((0, 1)),
    dead_neurons=lambda h: (h.detach() == 0).all((0, 1), keepdim=True),
    activity_of_each_neuron=lambda h: (h > 0).float().mean(dim=(0, 1)),
    neurons_that_fired_axis_by_axis=lambda h: (h > 0).any(0).any(0, keepdim=True),
    tokens_in_a_row=lambda h: (h.flatten(0, 1) > 0).sum(0),
)
each(
    gated(),
    tokens_of_each_neuron=lambda h: h.count_nonzero((0, 1)),
    zeros_of_each_neuron=lambda h: (h == 0).sum((0, 1)),
)


@plain("no_rewrite", "a statistic of every neuron", modes=INFER, at="any(0)")
def neurons_that_fired_in_each_row(h):
    return (h > 0).any(0).sum(0)


@plain(modes=INFER, dtype=torch.float64)
def activity_of_each_neuron_in_float64(h):
    return (h > 0).double().mean(dim=(0, 1))


@plain(modes=TRAIN)
def statistic_of_tokens(h):
    return h.abs().mean(dim=-1)


@block()
def share_of_zeros_without_gradients(x, m):
    """a logged statistic, computed under torch.no_grad() before the down projection"""
    h = F.relu(m.gate(x))
    with torch.no_grad():
        zeros = (h == 0).float().mean()
    return m.down(h * m.up(x)), zeros


@block(bias=True)
def weighed_by_the_norms_of_the_decoder(x, m):
    """the L1 term of sparse autoencoders, after the reconstruction"""
    h = F.relu(m.up(x))
    y = m.down(h)
    return y, (h * m.down.weight.norm(dim=0)).norm(p=1, dim=-1).mean()


@block(modes=TRAIN, prefix="autocast_", autocast=torch.bfloat16, precision=torch.bfloat16)
def weighed_by_norms(x, m):
    """the norms are computed in fp32 after the projection, as autocast has them"""
    h = F.relu(m.up(x))
    y = m.down(h)
    return y, (h * m.down.weight.norm(dim=0)).sum(-1).mean()


@block(modes=INFER, bias=True)
def weighed_sum_before_the_projection(x, m):
    """the score of a probe on the activations"""
    h = F.relu(m.up(x)).square()
    score = (m.up.bias * h).sum(dim=(1, 2))
    return m.down(h), score


@block(bias=True)
def weighed_by_a_product_with_the_norms(x, m):
    """a product of matrix and vector in the L1 term"""
    h = F.relu(m.up(x))
    return m.down(h), (h @ m.down.weight.norm(dim=0)).mean()


@block(modes=INFER)
def weighed_by_a_vector_in_an_einsum(x, m):
    h = F.relu(m.up(x))
    return m.down(h), torch.einsum("n,bsn->bs", m.gate.weight[:, 0], h)


@block()
def weighed_by_the_norms_of_linalg(x, m):
    """the norms are [1, N], and computed after the projection"""
    h = F.relu(m.up(x))
    y = m.down(h)
    norms = torch.linalg.norm(m.down.weight.T, dim=1, keepdim=True).T
    return y, (h * norms).sum(-1).mean()


@block()
def weighed_and_summed_by_an_einsum(x, m):
    h = F.relu(m.up(x))
    return m.down(h), torch.einsum("bsn,n->", h, m.down.weight.norm(dim=0))


@plain("no_rewrite", "also read by linalg_norm", modes=INFER, at="torch.linalg.norm(")
def norm_of_matrices(h):
    return torch.linalg.norm(h, ord=1, dim=(-2, -1))


@block("no_rewrite", "also read by einsum", modes=INFER, shape=(2, N, K), at="bsn,s->bn")
def tokens_weighed_by_a_vector(x, m):
    """as many tokens as neurons"""
    h = F.relu(m.up(x))
    return m.down(h), torch.einsum("bsn,s->bn", h, m.gate.weight[:, 0])


@block("no_rewrite", "also read by mul", modes=INFER, bias=True, at="(h * m.up.bias).abs()")
def weighed_by_what_may_be_negative(x, m):
    """an L1 term of weighed activations"""
    h = F.relu(m.up(x))
    return m.down(h), (h * m.up.bias).abs().sum(-1)


@block(modes=TRAIN)
def logged_sum_of_weighted_neurons(x, m):
    """a logged value has no gradient, although its operands have one"""
    norms = m.down.weight.norm(dim=0)
    h = F.relu(m.up(x))
    with torch.no_grad():
        logged = (h * norms).sum(-1)
    return m.down(h) * logged.mean()
