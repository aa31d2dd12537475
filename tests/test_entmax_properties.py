"""Properties of entmax that hold for every row, length, scale and alpha."""

from __future__ import annotations

import math

import entmax as package
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparse_inductor.ops import entmax

ALPHAS = st.one_of(st.sampled_from([1.25, 1.5, 4 / 3, 2.0]), st.floats(1.001, 4.0))
SCALES = st.sampled_from([1e-4, 1e-2, 0.3, 1.0, 5.0, 100.0])


@st.composite
def rows(draw, dtype=torch.float32):
    """Draw three rows: normal, with ties, with a far outlier, with -inf entries, or with an offset."""
    n = draw(st.integers(1, 700))
    seed = draw(st.integers(0, 2**20))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, n, generator=g, dtype=torch.float64) * draw(SCALES)
    kind = draw(st.sampled_from(["plain", "ties", "outlier", "-inf", "offset"]))
    if kind == "ties":
        x = x.round()
    elif kind == "outlier":
        x[:, 0] += 50
    elif kind == "-inf":
        x[torch.rand(x.shape, generator=g) < 0.5] = -math.inf
        x[:, 0] = 0
    elif kind == "offset":
        x += 300
    return x.to(dtype)


@settings(max_examples=200)
@given(rows(), ALPHAS)
def test_on_the_simplex(x, alpha):
    p = entmax(x, alpha)
    assert (p >= 0).all()
    assert (p.double().sum(-1) - 1).abs().max() < 1e-6


@settings(max_examples=100)
@given(rows(), ALPHAS)
def test_order_is_preserved(x, alpha):
    sorted_x, order = x.sort(-1)
    p = entmax(x, alpha).gather(-1, order)
    # The last elements of a row, which do not fill a vector, may get powers that differ from the others' by 1 or 2 ulp.
    step, ulps = p.diff(dim=-1), 4 * torch.finfo(p.dtype).eps * p[..., 1:]
    assert (step >= -ulps).all()
    ties = sorted_x.diff(dim=-1) == 0
    assert (step.abs() <= ulps)[ties].all()


@settings(max_examples=100)
@given(rows(torch.float64), ALPHAS)
def test_optimality(x, alpha):
    """p_i^(alpha - 1) / (alpha - 1) = x_i - lambda on the support, x_i <= lambda off it: the KKT conditions."""
    p = entmax(x, alpha)
    support = p > 1e-9
    multiplier = x - p ** (alpha - 1) / (alpha - 1)
    level = multiplier.masked_fill(~support, -math.inf).amax(-1, keepdim=True)
    tolerance = 1e-6 * (1 + x[x.isfinite()].abs().max())
    assert ((multiplier - level).abs() <= tolerance)[support].all()
    assert (x <= level + (1e-9) ** (alpha - 1) / (alpha - 1) + tolerance)[~support].all()


@settings(max_examples=50)
@given(rows())
def test_alpha_to_one_is_softmax(x):
    errors = [
        (entmax(x, a) - x.double().softmax(-1)).abs().max() for a in (1.01, 1 + 1e-4, 1 + 1e-6)
    ]
    assert errors[1] < max(2e-6, 0.1 * errors[0]) and errors[2] < 5e-6


@settings(max_examples=50)
@given(rows(torch.float64))
def test_large_alpha_is_argmax(x):
    top = x.topk(min(2, x.shape[-1])).values
    assume(x.shape[-1] == 1 or (top[:, 0] - top[:, 1]).min() > 0.05)
    p = entmax(x, 21.0)  # the result has one entry if the gap is at least 1 / (alpha - 1)
    assert (p.argmax(-1) == x.argmax(-1)).all() and p.amax(-1).min() > 1 - 1e-9


@settings(max_examples=50)
@given(rows(torch.float64), ALPHAS)
def test_gradients_sum_to_zero_and_stay_on_the_support(x, alpha):
    x = x.requires_grad_()
    p = entmax(x, alpha)
    (dx,) = torch.autograd.grad(p, x, torch.randn_like(p))
    assert not dx[p == 0].any()
    assert dx.sum(-1).abs().max() <= 1e-9 * (1 + dx.abs().max() * dx.shape[-1])


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("n", [4096, 65536])
@pytest.mark.parametrize("scale", [0.0, 1e-5, 1e-3, 0.1])
def test_mild_scores_lose_no_mass(alpha, n, scale):
    """With almost equal scores most entries are positive, and a fixed number of bisections misses the threshold."""
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(0)) * scale
    p = entmax(x, alpha)
    assert (p.double().sum(-1) - 1).abs().max() < 1e-6
    assert (p.double() - entmax(x.double(), alpha)).abs().max() < 1e-6
    if scale <= 1e-3:
        bisected = package.entmax_bisect(x, alpha, n_iter=5, ensure_sum_one=False)
        assert (bisected.sum(-1) - 1).abs().min() > 1, "no longer the case this test is about"
