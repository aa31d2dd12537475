"""The treatment of NaN and infinity; differences from the unrewritten program are documented."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_inductor
from corpus.splade_head.registry import Vocabulary, hidden, tokens
from support import compile_without_codegen, only_splade_head, rewrites


def _compiled(module, *inputs):
    with only_splade_head() as report:
        result = compile_without_codegen(module)(*inputs)
        assert len(rewrites(report)) == 1
    return result


def test_minus_infinity_times_its_sign_is_zero():
    """x * (x > 0) is NaN at -inf; the operator returns 0, which the formula means."""

    class Model(Vocabulary):
        def forward(self, h, forbid):
            logits = self.decoder(h) + forbid
            return torch.log1p(logits * (logits > 0)).amax(dim=1)

    forbid = torch.zeros(37).index_fill(0, torch.arange(4), float("-inf"))
    result = _compiled(Model(), hidden().detach(), forbid)
    assert (result[:, :4] == 0).all()
    assert result.isfinite().all()


def test_a_poisoned_token_poisons_banned_terms_too():
    """Filling a term's logits is rewritten as a weight of 0 for that term, and 0 times NaN is NaN."""

    class Model(Vocabulary):
        def forward(self, h):
            logits = self.decoder(h)
            logits[..., [0, 3]] = -1e4
            return tokens(logits).amax(dim=1)

    states = hidden().detach()
    states[0, 2] = float("nan")
    result = _compiled(Model(), states)
    assert result[0].isnan().all()
    assert (result[1:, [0, 3]] == 0).all() and result[1:].isfinite().all()


def _agrees(program, inputs, wanted, *given, only="relu_ffn"):
    """Check that values and the gradients of `wanted` equal the unrewritten program's, and return the gradients."""
    want = program(*inputs)
    expected = torch.autograd.grad(want if given else want.sum(), wanted, *given, allow_unused=True)
    with sparse_inductor.enabled(only=only, policy="always"):
        got = compile_without_codegen(program)(*inputs)
        found = torch.autograd.grad(got if given else got.sum(), wanted, *given, allow_unused=True)
    torch.testing.assert_close((got, *found), (want, *expected), equal_nan=True)
    return expected


@pytest.mark.parametrize(
    "kept",
    [
        lambda z: z * (z > 0.3),
        lambda z: F.threshold(z, 0.3, 0.0),
        lambda z: (z * (z > 0.0)).square(),
        lambda z: z.clamp_min(0.0) * z.clamp_min(0.0),
        lambda z: z.clamp_min(0.0) * z,
    ],
    ids=["product", "threshold", "square of a product", "clamps", "one clamp"],
)
def test_a_gradient_at_a_nan_is_that_of_eager(kept):
    """At a NaN, a clamp and a product with a comparison have slope 0, and F.threshold has slope 1.

    The factors that follow may be NaN, too. So these spellings differ in the weights' gradients for the finite features
    of a token that has a NaN.
    """

    def block(h, up, down):
        return F.linear(kept(F.linear(h, up)), down)

    states = torch.randn(2, 5, 8)
    states[0, 2, 3] = float("nan")
    up, down = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    expected = _agrees(block, (states, up, down), (up, down))
    assert expected[0][:, 3].isnan().all() and expected[1].isnan().any()


_T = torch.linspace(-0.5, 0.5, 16)


@pytest.mark.parametrize(
    "kept, dropped",
    [
        (lambda z, u: torch.where(z > _T, z, 0.0), torch.nan),
        (lambda z, u: torch.where(z > _T, z.relu(), torch.zeros_like(z)), torch.nan),
        (lambda z, u: torch.where(~(z > _T), 0.0, z), torch.nan),
        (lambda z, u: z.masked_fill(z <= _T, 0.0), -torch.inf),
        (lambda z, u: torch.where(z > 0, z * u, 0.0), torch.nan),
        (lambda z, u: torch.where(z > -0.1, z.relu() * u, 0.0), torch.nan),
        (lambda z, u: (z > 0) * u, torch.nan),
        (lambda z, u: torch.where(z > 0, u, 0.0), torch.nan),
        (lambda z, u: u.relu().masked_fill(z <= 0.1, 0.0), -torch.inf),
    ],
    ids="where rectified replaced filled product another_rectifier gated selected dropped".split(),
)
def test_a_comparison_drops_what_is_no_number(kept, dropped):
    """A comparison with NaN is false, so where() drops NaN as well as -inf.

    masked_fill with the opposite comparison keeps NaN, and a product with the comparison itself is 0.
    """

    def block(h, gate, bias, up, down):
        return F.linear(kept(F.linear(h, gate, bias), F.linear(h, up)), down)

    h, up, down = torch.randn(2, 5, 8), torch.randn(16, 8) / 3, torch.randn(8, 16) / 4
    gate, bias = torch.randn(16, 8) / 3, torch.randn(16)
    bias[:3] = torch.tensor([dropped, -torch.inf, torch.inf])
    given = [t.requires_grad_() for t in (gate, bias, up, down)]
    _agrees(block, (h, *given), [given[0], given[1], given[3]])
    assert sparse_inductor.report().rewrites


def _root_head(h, up, down):
    z = F.linear(h, up)
    return F.softplus(z - 1e4 * (torch.arange(5) > 2).unsqueeze(-1)).sqrt().amax(1)


def _root_head_at_its_bound(h, up, down):
    z = F.linear(h * (torch.arange(5) > 2).unsqueeze(-1), up)
    return torch.maximum(z, z.new_zeros(())).sqrt().amax(1)


def _root_block(h, up, down):
    z = F.linear(h, up)
    return F.linear((z * (z > 0)).sqrt(), down)


def _product_of_nan(h, up, down):
    h = torch.cat([h, h.new_full((1, 5, 8), torch.nan)])
    weight = down.detach().t()
    z = F.linear(h, weight, up[:, 0])
    return F.linear(z * (z > 0.3) * F.linear(h, weight), down)


@pytest.mark.parametrize(
    "program", [_root_head, _root_head_at_its_bound, _root_block, _product_of_nan]
)
def test_zero_times_what_is_not_finite_is_nan_in_a_gradient(program):
    """The infinite value is the slope of a root at 0, or the NaN is the other factor of a product with a comparison.

    Positions that are not the largest, or not active, have a gradient of 0, which is multiplied with it.
    """
    h = torch.randn(2, 5, 8)
    up, down = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    (expected,) = _agrees(program, (h, up, down), up, only=None)
    assert expected.isnan().any()


@pytest.mark.parametrize("active", [torch.relu, lambda z: z * (z > 0.3)], ids=["relu", "product"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_gradient_that_is_not_finite_is_multiplied_by_zeros(active, gated):
    """Where a neuron is inactive, the backward of relu selects and gives 0. Products with a comparison or another
    projection multiply the gradient by 0, which gives NaN for a gradient that is not finite."""

    def block(h, gate, bias, up, down):
        a = active(F.linear(h, gate, bias))
        return F.linear(a * F.linear(h, up).relu() if gated else a, down)

    h, dy = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    dy[0, 2, 3] = torch.nan
    given = [torch.randn(s, requires_grad=True) for s in ((16, 8), (16,), (16, 8), (8, 16))]
    wanted = given if gated else [*given[:2], given[3]]
    expected = _agrees(block, (h, *given), wanted, dy)
    assert expected[1].isnan().any()


def test_a_term_that_is_nan_passes_a_gradient_of_zero_on():
    states, weight = torch.full((1, 2, 4), torch.nan), torch.randn(3, 4)
    bias = torch.zeros(3, requires_grad=True)

    class Model(nn.Module):
        def forward(self, states):
            return torch.log1p(F.linear(states, weight, bias).relu()).max(dim=1)[0]

    grad = torch.tensor([[0.0, 1.0, 1.0]])
    (got,) = torch.autograd.grad(_compiled(Model(), states), bias, grad)
    assert got.isnan().all()


@pytest.mark.parametrize("filled", [False, True])
def test_masked_positions_and_the_gradient_of_a_maximum_that_is_nan(filled):
    """amax then gives every position a NaN gradient. Times a mask's 0 it stays NaN; a fill blocks it."""

    def head(h, weight, keep):
        z = F.linear(h, weight)
        keep = keep.unsqueeze(-1)
        return (z.masked_fill(keep == 0, -1e4) if filled else z * keep).amax(1)

    states = torch.randn(2, 4, 8)
    states[0, 1] = float("nan")
    keep = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0]])
    weight = torch.randn(9, 8)

    def gradient(f):
        h = states.clone().requires_grad_()
        return torch.autograd.grad(f(h, weight, keep).sum(), h)[0]

    expected = gradient(head)
    with only_splade_head() as report:
        got = gradient(compile_without_codegen(head))
        assert len(rewrites(report)) == 1
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert expected[0, :2].isnan().all() and expected[0, 2].isnan().all() != filled


@pytest.mark.parametrize("what", ["rows", "attention"])
def test_gradients_that_are_not_finite_stay_with_what_sparsemax_keeps(what):
    sparsemax = pytest.importorskip("entmax").sparsemax
    q, k, v = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def gradients(fn):
        bias, found = torch.linspace(-1, 1, 50).view(2, 5, 5).requires_grad_(), []
        for value in (torch.nan, torch.inf):
            y = fn(bias)
            dy = torch.ones_like(y).index_fill(-1, torch.tensor([1]), value)
            found += torch.autograd.grad(y, bias, dy)
        return torch.stack(found)

    def program(bias):
        p = sparsemax(q @ k.mT + bias, dim=-1)
        return p if what == "rows" else p @ v

    want = gradients(program)
    assert want[0].isnan().any() and want[1].isnan().any() and (want == 0).any()
    with sparse_inductor.enabled(policy="always"):
        got = gradients(compile_without_codegen(program))
        assert len(sparse_inductor.report().rewrites) == 1
    torch.testing.assert_close(got, want, equal_nan=True)


def test_scores_times_infinity_are_as_written():
    """They are not rewritten, so the program raises the same error."""
    entmax15 = pytest.importorskip("entmax").entmax15
    program = lambda q: entmax15(q @ q.mT * float("inf"), -1) @ q
    with sparse_inductor.enabled(only="entmax_attention", policy="always"):
        with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
            compile_without_codegen(program)(torch.randn(3, 8))
        assert not sparse_inductor.report().rewrites
        assert "multiplied by inf" in str(sparse_inductor.report())


_NUMBERS = {
    "head": lambda m, x: torch.relu(m.a(x) * 1e30 * 1e30 * 1e-30 * 1e-30).amax(1),
    "head that divides": lambda m, x: torch.log1p(torch.relu(m.a(x) / 1e-39)).amax(1),
    "block": lambda m, x: m.b(torch.relu(m.a(x)) * 1e-30 * 1e-30 * 1e30 * 1e30),
    "factors of a block": lambda m, x: m.b(
        torch.relu(m.a(x)) * 1e25 * (m.a(x) * 1e25) * 1e-25 * 1e-25
    ),
    "scores": lambda m, x: m.rows(m.q(x) @ m.k(x).mT * 1e-30 * 1e-30 * 1e30 * 1e30) @ x,
    "queries and keys": lambda m, x: (
        m.rows((m.q(x) * 1e-25) @ (m.k(x) * 1e-25).mT * 1e25 * 1e25) @ x
    ),
    "probabilities": lambda m, x: (
        (m.rows(m.q(x) @ m.k(x).mT) * torch.arange(5)[:, None] * 1e30 * 1e30) @ x
    ),
    "documents": lambda m, x: (x[0, :, m.ids] * 1e30 * (m.weights * 1e-30)).sum(-1) * 1e30,
}


@pytest.mark.parametrize("name", _NUMBERS)
def test_numbers_that_are_folded_overflow_where_they_do_in_eager(name):
    entmax = pytest.importorskip("entmax")
    model = nn.Module()
    model.a, model.b = nn.Linear(6, 8), nn.Linear(8, 6)
    model.q, model.k = nn.Linear(6, 6), nn.Linear(6, 6)
    model.ids, model.weights = torch.randint(0, 6, (7, 3)), torch.rand(7, 3) * 1e10
    model.rows = lambda z: entmax.entmax15(z, -1)
    x = torch.randn(2, 5, 6, requires_grad=True)
    program = lambda x: _NUMBERS[name](model, x)

    def run(f):
        y = f(x)
        return y, torch.autograd.grad(y.sum(), x)

    expected = run(program)
    with sparse_inductor.enabled(policy="always"):
        got = run(compile_without_codegen(program))
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_a_mask_of_zeros_does_not_hide_what_overflowed():
    class Model(Vocabulary):
        def forward(self, h, keep):
            return ((self.decoder(h) * 1e3).exp() * keep.unsqueeze(-1)).amax(1)

    module, states, keep = Model(), hidden().detach(), torch.ones(hidden().shape[:2])
    keep[:, 2:] = 0
    expected = module(states, keep)
    assert expected.isnan().any() and not expected.isnan().all()
    torch.testing.assert_close(_compiled(module, states, keep), expected, equal_nan=True)


def test_a_token_that_a_slice_leaves_out_is_not_read():
    """Unrewritten, its logits exist, and 0 times its state is NaN in the gradient of the weight."""

    class Model(Vocabulary):
        def forward(self, h):
            return tokens(self.decoder(h)[:, 1:]).amax(dim=1)

    model, states = Model(), hidden().detach()
    states[0, 0, 0] = float("nan")
    expected = model(states)
    (wanted,) = torch.autograd.grad(expected.sum(), model.decoder.weight)
    result = _compiled(model, states)
    (found,) = torch.autograd.grad(result.sum(), model.decoder.weight)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(found[:, 1:], wanted[:, 1:])
    assert wanted[:, 0].isnan().all() and found.isfinite().all()


def test_an_infinite_factor_of_a_term_multiplies_the_maximum_alone():
    """Unrewritten, it also multiplies the other positions, and infinity times 0 is NaN."""

    class Model(Vocabulary):
        def forward(self, h, idf):
            return (tokens(self.decoder(h)) * idf.relu()).amax(dim=1)

    model, states = Model(), hidden().detach()
    idf = torch.ones(37).index_fill(0, torch.arange(9), float("inf"))
    expected, result = model(states, idf), _compiled(model, states, idf)
    assert expected[:, :9].isnan().any() and not result[:, :9].isfinite().any()
    torch.testing.assert_close(result[:, 9:], expected[:, 9:])
    assert (result[:, :9][~expected[:, :9].isnan()] == torch.inf).all()


def test_a_prefix_sum_that_is_nan_is_that_of_one_document():
    """Unrewritten, all later documents are NaN as well."""

    def scores(query, ids, values, bounds):
        sums = F.pad((query[ids] * values).cumsum(0), (1, 0))
        return sums[bounds[1:]] - sums[bounds[:-1]]

    query = torch.rand(8)
    query[5] = float("nan")  # in the second of four documents
    inputs = query, torch.arange(12) % 8, torch.arange(1.0, 13), torch.arange(0, 13, 3)
    with sparse_inductor.enabled(only="sparse_scores", policy="always"):
        result = compile_without_codegen(scores)(*inputs)
    assert scores(*inputs).isnan().tolist() == [False, True, True, True]
    assert result.isnan().tolist() == [False, True, False, False]
