"""The kinds of sparse autoencoders that libraries train, compiled as libraries compile them: all are rewritten, and
their losses and gradients are those of eager code."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import autoencoders as kinds
import sparse_inductor
from sparse_inductor.testing import (
    assert_matches_reference,
    assert_rewrites,
    compile_without_codegen,
)
from support import heavy

PRODUCTS = {"sparse_product": 2}
TOPK = {"topk_encode": 1, "sparse_decode": 1}
RETURNED = TOPK | {"sparse_product": 1}  # the pre-activations, too
REWRITTEN = {
    kinds.Standard: PRODUCTS,
    kinds.JumpReLU: PRODUCTS,
    # These contain the projections of the gate and of the magnitude, and the decoder of each.
    kinds.Gated: {"sparse_product": 3, "relu_ffn": 1},
    kinds.TopK: RETURNED,
    kinds.BatchTopK: RETURNED,
    kinds.Matryoshka: RETURNED,
}
QUICK = (kinds.JumpReLU,)  # not TopK and BatchTopK, which are examples of their patterns


def counted(report):
    found = {}
    for rewrite in report.rewrites:
        found[rewrite.pattern] = found.get(rewrite.pattern, 0) + 1
    return found


def trained(model, x, dead, program, autocast):
    """Run a step, and return its results and the gradients."""
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        out = program(x, dead)
    out.loss.backward()
    given = [out.loss, out.reconstruction, out.activations, out.pre]
    return [t.detach() for t in given], [p.grad for p in model.parameters()]


def check(kind, expected, dtype=torch.float32, autocast=False, dead=None, **limits):
    """Compare a compiled step of a kind with an eager one."""
    if kind is kinds.JumpReLU and torch.__version__ < (2, 13):
        pytest.skip("this torch loses the gradient of a Function that ends in a cast itself")
    # With this seed, no two pre-activations of a row tie for the k-th place, in bf16 either; topk leaves ties open.
    x = torch.randn(24, kinds.WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)
    eager = kind().to(dtype)
    model = copy.deepcopy(eager)
    with sparse_inductor.enabled(policy="always"):
        got = trained(model, x, dead, compile_without_codegen(model.step), autocast)
        assert counted(sparse_inductor.report()) == expected
    want = trained(eager, x, dead, eager.step, autocast)
    for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **limits)


@pytest.mark.parametrize("kind", [k if k in QUICK else heavy(k) for k in kinds.KINDS])
def test_a_training_step(kind):
    check(kind, REWRITTEN[kind], atol=1e-4, rtol=1e-4)


def test_a_tied_dictionary_written_first():
    """The weight is the first operand of the encoder's einsum."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dictionary = torch.nn.Parameter(torch.randn(64, 8))

        def forward(self, x):
            codes = torch.einsum("nd,bd->bn", self.dictionary, x).relu()
            return torch.einsum("bn,nd->bd", codes, self.dictionary), codes

    assert_rewrites(Tied(), (torch.randn(6, 8),), {"sparse_product": 2})


def test_tokens_flattened_between_the_products():
    class Flattened(kinds.BatchTopK):
        def forward(self, x):
            pre = (x @ self.W_enc).flatten(0, 1)
            return self.activation(pre) @ self.W_dec

    x = torch.randn(4, 6, kinds.WIDTH, generator=torch.Generator().manual_seed(9))
    explanation = assert_matches_reference(Flattened(), (x,), grads=True)
    assert_rewrites(explanation, expected=TOPK)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_training_step_in_bf16(kind):
    check(kind, REWRITTEN[kind], torch.bfloat16, atol=0.1, rtol=0.03)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_training_step_under_autocast(kind):
    check(kind, REWRITTEN[kind], autocast=True, atol=0.1, rtol=0.03)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (kinds.TopK, RETURNED | {"sparse_decode": 2}),
        (kinds.BatchTopK, RETURNED | {"sparse_decode": 2}),
    ],
)
def test_dead_neurons_that_learn_what_is_left_over(kind, expected):
    """Reading their number breaks the graph. The second top-k uses the pre-activations, which are available."""
    check(kind, expected, dead=torch.arange(kinds.NEURONS) % 3 == 0, atol=1e-4, rtol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (kinds.Standard, {"relu_ffn": 1}),
        (kinds.JumpReLUInference, {"relu_ffn": 1}),
        (kinds.Gated, {"relu_ffn": 1}),
        (kinds.TopK, TOPK),
    ],
)
def test_inference(kind, expected):
    model, x = kind(), torch.randn(24, kinds.WIDTH)
    with sparse_inductor.enabled(policy="always"), torch.no_grad():
        y = compile_without_codegen(model)(x)
        assert counted(sparse_inductor.report()) == expected
        torch.testing.assert_close(y, model(x))


def test_a_crosscoder_is_no_attention():
    """It multiplies rectified codes with a dictionary for each layer."""

    class Crosscoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Parameter(torch.randn(3, 8, 64))
            self.decoders = torch.nn.ParameterList(torch.randn(3, 64, 8).unbind())

        def forward(self, x):
            codes = torch.einsum("bld,ldn->bn", x, self.encoder).relu()
            return torch.einsum("bn,nld->bld", codes, torch.stack(list(self.decoders), 1))

    report = sparse_inductor.explain(Crosscoder(), torch.randn(6, 3, 8)).report
    assert not [m for m in report.near_misses if m.pattern == "entmax_attention"]
