"""The kernels of entmax over rows against chunked ATen in fp64."""

import math

import pytest
import torch

from sparse_inductor.kernels.entmax import rows as kernels
from sparse_inductor.ops import _entmax_aten as aten
from support import heavy

# In the interpreter, NumPy warns where a GPU silently produces inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# These cover fp32 arithmetic and the rounding of the output.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
STREAMED = (
    64  # a limit of columns for the registers that makes small rows take the path of long ones
)


def scores(*shape, device, scale=1.0, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to(device, dtype)


def check(x, alpha, dim=-1, resident=kernels._RESIDENT):
    """Check probabilities, their sums, and the gradients of x and alpha; return the probabilities."""
    wide = alpha.double() if isinstance(alpha, torch.Tensor) else alpha
    limit = TOLERANCE[x.dtype]
    y = kernels.forward(x, alpha, dim, resident=resident)
    assert y.dtype == x.dtype and y.stride() == torch.empty_like(x).stride()
    assert (y.double() - aten.forward(x.double(), wide, dim)).abs().max() < limit
    if x.dtype == torch.float32:
        assert (y.double().sum(dim) - 1).abs().max() < 2e-6
    grad = scores(*x.shape, device=x.device, dtype=x.dtype, seed=1)
    needs = (True, isinstance(alpha, torch.Tensor))
    got = kernels.backward(grad, y, alpha, dim, needs, resident=resident)
    truth = aten.backward(grad.double(), y.double(), wide, dim, needs)
    for g, t in zip(got, truth, strict=True):
        assert (g is None) == (t is None)
        if g is not None and t is not None:
            assert ((g.double() - t).abs() / t.abs().clamp(min=1)).max() < 5 * limit
    return y


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "alpha, scale",
    [(alpha, 1.0) for alpha in (1.001, 1.25, 1.3, 1.5, 1.9, 2.0, 2.5)]
    + [(alpha, scale) for alpha in (1.3, 1.5) for scale in (0.01, 8.0)]
    + [heavy(alpha, scale) for alpha in (1.001, 1.25, 1.9, 2.0, 2.5) for scale in (0.01, 8.0)],
)
def test_rows_in_registers_and_streamed(device, alpha, scale):
    check(scores(3, 700, device=device, scale=scale), alpha)
    check(scores(2, 1500, device=device, scale=scale), alpha)
    check(scores(2, 1500, device=device, scale=scale), alpha, resident=STREAMED)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 129, 1024, 1025])
def test_odd_lengths(device, n):
    check(scores(5, n, device=device), 1.5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("resident", [kernels._RESIDENT, STREAMED])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dimension_of_any_layout(device, dim, resident):
    x = scores(4, 3, 40, device=device)
    check(x, 1.5, dim, resident)
    check(x.permute(2, 0, 1), 2.0, dim, resident)
    check(x.transpose(0, 1)[:, ::2], 1.3, dim, resident)
    check(x[:, :1].expand(4, 3, 40), 1.5, dim, resident)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    check(scores(3, 300, device=device, dtype=dtype, scale=3), 1.5)
    check(scores(3, 300, 4, device=device, dtype=dtype, scale=3), 1.7, 1)


@pytest.mark.parametrize("resident", [kernels._RESIDENT, STREAMED])
def test_an_alpha_of_each_row(device, resident):
    alpha = torch.tensor([1.5, 2.0, 1.2, 3.0], device=device).view(4, 1, 1)
    check(scores(4, 3, 70, device=device), alpha, -1, resident)
    check(scores(4, 2, 1500, device=device), alpha, -1, resident)
    check(scores(4, 20, 3, device=device), alpha, 1, resident)
    check(scores(2, 4, 2, 70, device=device).transpose(0, 1), alpha.unsqueeze(-1), 3, resident)


@pytest.mark.parametrize("resident", [kernels._RESIDENT, STREAMED])
@pytest.mark.parametrize("alpha", [1.2, 1.25, 1.5, 2.0, 3.0])
def test_rows_without_scores_are_zero_and_nan_stays_in_its_row(device, alpha, resident):
    x = scores(5, 1100, device=device)
    x[1], x[2, 5], x[3, 7] = -math.inf, math.nan, math.inf
    x[4, 1:] = -math.inf
    y = kernels.forward(x, alpha, -1, resident=resident)
    assert y[0].isfinite().all() and not y[1].any()
    assert y[2:4].isnan().all()
    assert y[4, 0] == 1 and not y[4, 1:].any()
    dx, _ = kernels.backward(torch.ones_like(x), y, alpha, -1, (True, False), resident=resident)
    assert not dx[1].any() and dx[0].isfinite().all()


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_mild_scores_lose_no_mass(device, alpha):
    # With two almost equal levels over many columns, a fixed number of bisections would stop far from the threshold.
    x = torch.zeros(2, 3000, device=device)
    x[:, ::2] = 1e-4
    y = check(x, alpha)
    assert (y[:, 0] > y[:, 1]).all() and (y > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8192, 32768, 65536, 200_001])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0, 1.7])
def test_long_rows_sum_to_one(alpha, n):
    for scale in (1e-3, 0.1, 1.0, 5.0):
        x = torch.randn(8, n, device="cuda") * scale
        x[0], x[1, :100] = 0.25, 1.0
        y = kernels.forward(x, alpha, -1)
        assert (y.double().sum(-1) - 1).abs().max() < 1e-6
        assert (y.double() - aten.forward(x.double(), alpha, -1)).abs().max() < 2e-6


@pytest.mark.parametrize("resident", [kernels._RESIDENT, STREAMED])
def test_an_infinite_gradient_where_sparsemax_is_zero_is_none(device, resident):
    y = kernels.forward(scores(3, 70, device=device), 2.0, -1)
    grad = torch.where(y == 0, torch.inf, scores(3, 70, device=device, seed=1))
    dx, _ = kernels.backward(grad, y, 2.0, -1, (True, False), resident=resident)
    finite, _ = kernels.backward(grad.masked_fill(y == 0, 0), y, 2.0, -1, (True, False))
    torch.testing.assert_close(dx, finite)
