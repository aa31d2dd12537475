"""Crosscoders: one dictionary for the activations of several layers, encoder and decoder over two axes each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_inductor
from sparse_inductor.testing import assert_matches_reference, assert_rewrites
from support import heavy

LAYERS, WIDTH, NEURONS = 2, 6, 112


class Crosscoder(nn.Module):
    """A crosscoder; its decoder's weight is [L, N, D] with `by_layer`, and [N, L, D] otherwise."""

    def __init__(self, forward, by_layer=False):
        super().__init__()
        torch.manual_seed(0)
        self.W_enc = nn.Parameter(torch.randn(LAYERS, WIDTH, NEURONS))
        sizes = (LAYERS, NEURONS, WIDTH) if by_layer else (NEURONS, LAYERS, WIDTH)
        self.W_dec = nn.Parameter(torch.randn(sizes))
        self.b_enc = nn.Parameter(torch.randn(NEURONS))
        self.b_dec = nn.Parameter(torch.randn(LAYERS, WIDTH))
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def pre(s, x):
    return torch.einsum("b l d, l d n -> b n", x, s.W_enc) + s.b_enc


def plain(s, x):
    return torch.einsum("bn,nld->bld", F.relu(pre(s, x)), s.W_dec) + s.b_dec


def layers_added_up(s, x):
    f = F.relu(torch.einsum("bld,ldn->bln", x, s.W_enc).sum(dim=1) + s.b_enc)
    return torch.einsum("bn,nld->bld", f, s.W_dec) + s.b_dec


def layers_multiplied_one_by_one(s, x):
    f = F.relu((x.transpose(0, 1) @ s.W_enc).sum(0) + s.b_enc)
    return torch.einsum("bn,nld->bld", f, s.W_dec) + s.b_dec


def activations_kept(s, x):
    f = F.relu(pre(s, x))
    return torch.einsum("b n, n l d -> b l d", f, s.W_dec) + s.b_dec, f


def by_tensordot(s, x):
    f = F.relu(torch.tensordot(x, s.W_enc, 2) + s.b_enc)
    return torch.tensordot(f, s.W_dec, 1) + s.b_dec, f


def tied(s, x):
    f = F.relu(pre(s, x))
    return torch.einsum("bn,ldn->bld", f, s.W_enc) + s.b_dec, f


def norms_in_the_loss(s, x):
    f = F.relu(pre(s, x))
    y = torch.einsum("bn,nld->bld", f, s.W_dec) + s.b_dec
    return y, (f * s.W_dec.norm(dim=-1).sum(-1)).sum(-1).mean()


def largest(s, x):
    values, indices = pre(s, x).topk(4)
    f = x.new_zeros(len(x), NEURONS).scatter(-1, indices, values.relu())
    return torch.einsum("bn,nld->bld", f, s.W_dec) + s.b_dec


PRODUCTS = {"sparse_product": 2}
TOPK = {"topk_encode": 1, "sparse_decode": 1}


REWRITTEN = {  # in training, in inference
    plain: ({"relu_ffn": 1}, {"relu_ffn": 1}),
    layers_added_up: ({"relu_ffn": 1}, {"relu_ffn": 1}),
    layers_multiplied_one_by_one: ({"relu_ffn": 1}, {"relu_ffn": 1}),
    activations_kept: (PRODUCTS, {"sparse_product": 1}),
    by_tensordot: (PRODUCTS, {"sparse_product": 1}),
    tied: (PRODUCTS, {"sparse_product": 1}),
    norms_in_the_loss: ({"relu_ffn": 1}, {"relu_ffn": 1}),
    largest: (TOPK, TOPK),
}


@pytest.mark.parametrize("dynamic", [heavy(None), True])
@pytest.mark.parametrize("forward", REWRITTEN)
def test_it_is_rewritten(forward, dynamic):
    x = torch.randn(5, LAYERS, WIDTH, requires_grad=True)
    for grads, expected in zip((True, False), REWRITTEN[forward]):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grads), sparse_inductor.enabled(policy="always"):
            found = assert_matches_reference(
                Crosscoder(forward), (x,), grads=grads, inference=not grads, dynamic=dynamic, vary=0,
                codegen=False, aot=False,
            )  # fmt: skip
        assert_rewrites(found, expected=expected)


def each_layer(s, x):
    """Use separate activations for every layer."""
    f = F.relu(torch.einsum("bld,ldn->bln", x, s.W_enc) + s.b_enc)
    return torch.einsum("bln,nld->bld", f, s.W_dec), f


def layers_read_apart(s, x):
    """Add up the layers' projections, and return them."""
    z = torch.einsum("bld,ldn->bln", x, s.W_enc)
    return torch.einsum("bn,nld->bld", F.relu(z.sum(1) + s.b_enc), s.W_dec), z


def decoded_by_layer(s, x):
    """Use a weight of which no view is a matrix [N, L * D]; a rewrite would have to copy it at each call."""
    return torch.einsum("bn,lnd->bld", F.relu(pre(s, x)), s.W_dec)


def turned(s, x):
    """Return [L, B, D], where the batch is between the layers and their width."""
    return torch.einsum("bn,nld->lbd", F.relu(pre(s, x)), s.W_dec)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (each_layer, "weights of its own"),
        (layers_read_apart, "the result of einsum is also returned"),
        (decoded_by_layer, "several axes at once, or to several"),
        (turned, "several axes at once, or to several"),
    ],
)
def test_it_is_left_as_it_is(forward, reason):
    model = Crosscoder(forward, by_layer=forward is decoded_by_layer)
    report = sparse_inductor.explain(model, torch.randn(5, LAYERS, WIDTH)).report
    assert not report.rewrites
    assert [m for m in report.near_misses if reason in m.reason and "torch.einsum(" in m.source]
