"""The operator of entmax over rows called directly on the CPU, against the entmax package in fp64."""

from __future__ import annotations

import math

import entmax as package
import pytest
import torch

from sparse_inductor.ops import _entmax_aten as aten
from sparse_inductor.ops import entmax

ops = torch.ops.sparse_inductor


def truth(x, alpha, dim=-1):
    x = x.double()
    if alpha == 1.5:
        return package.entmax15(x, dim=dim)
    if alpha == 2:
        return package.sparsemax(x, dim=dim)
    return package.entmax_bisect(x, alpha, dim=dim, n_iter=100)


@pytest.mark.parametrize("n", [1, 2, 7, 130, 513, 2000])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("alpha", [1.001, 1.05, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0])
def test_probabilities_are_exact(alpha, scale, n):
    torch.manual_seed(0)
    x = torch.randn(6, n) * scale
    p = entmax(x, alpha)
    assert (p - truth(x, alpha)).abs().max() < 2e-6
    assert (p.double().sum(-1) - 1).abs().max() < 1e-6
    assert (entmax(x.double(), alpha) - truth(x, alpha)).abs().max() < 1e-9


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_dimension_strides_and_dtype(dim, dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 9, 7).to(dtype).transpose(0, 2)[:, ::2]
    p = entmax(x, 1.5, dim)
    assert p.dtype == dtype and p.shape == x.shape
    limit = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    assert (p.double() - truth(x, 1.5, dim)).abs().max() < limit


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 2.7])
def test_gradients_of_scores_and_alpha_and_of_each_alone(alpha):
    torch.manual_seed(0)
    x = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    a = (torch.rand(4, 1, 3, dtype=torch.float64) * 0.1 + alpha).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entmax(x, alpha, 1), x)
    assert torch.autograd.gradcheck(lambda x, a: entmax(x, a, 1), (x, a))
    one = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: entmax(x.detach(), a, 1), one)


def test_rows_without_scores_are_zero_and_nan_stays_in_its_row():
    x = torch.randn(4, 200)
    x[1], x[2, 5], x[3, 7] = -math.inf, math.nan, math.inf
    for alpha in (1.5, 2.0, 1.2, 3.0):
        p = entmax(x, alpha)
        assert p[0].isfinite().all() and not p[1].any()
        assert p[2:].isnan().all()


def test_an_alpha_of_each_row():
    x = torch.randn(5, 40)
    alpha = torch.tensor([1.5, 2.0, 1.2, 3.0, 1.01]).unsqueeze(-1)
    together = entmax(x, alpha)
    for row, a, p in zip(x, alpha, together, strict=True):
        assert (p - truth(row, a.item())).abs().max() < 2e-6


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3)])
def test_empty(shape):
    x = torch.randn(shape, requires_grad=True)
    p = entmax(x)
    p.sum().backward()
    assert p.shape == x.grad.shape == shape


@pytest.mark.parametrize(
    "error, words, arguments",
    [
        (ValueError, "alpha must be above 1, got 1.0", {"alpha": 1.0}),
        (ValueError, "alpha must be finite", {"alpha": math.inf}),
        (ValueError, "dim must be from -2 to 1", {"dim": 2}),
        (ValueError, "alpha must broadcast to", {"alpha": torch.full((3, 4), 1.5)}),
        (TypeError, "alpha must be one of", {"alpha": torch.tensor([2])}),
        (TypeError, "x must be one of", {"x": torch.ones(3, 4, dtype=torch.int64)}),
    ],
)
def test_bad_input_names_the_value(error, words, arguments):
    with pytest.raises(error, match=words):
        entmax(**{"x": torch.randn(3, 4), **arguments})


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_the_guarded_iteration_takes_over_where_the_fast_one_is_stopped(alpha, monkeypatch):
    x = torch.randn(5, 300)
    exact = entmax(x, alpha)
    monkeypatch.setattr(aten, "_FAST_STEPS", 1)
    assert (entmax(x, alpha) - exact).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_gradients_in_half_precision(alpha, dtype):
    x = torch.randn(6, 200).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    g = torch.randn(6, 200).to(dtype)
    (dx,) = torch.autograd.grad(entmax(x, alpha), x, g)
    (truth,) = torch.autograd.grad(entmax(wide, alpha), wide, g.double())
    assert dx.dtype == dtype and (dx - truth).norm() < 1e-2 * truth.norm()


def test_autocast_leaves_the_precision_of_the_scores():
    x = torch.randn(3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(entmax(x), entmax(x))
        assert entmax(x).dtype == torch.float32
