"""`sparse_product` and `sparse_gradient_linear` against the products that they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_inductor import ops
from sparse_inductor.ops import _sparse_products_aten as aten


def mostly_zeros(*shape, share, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype) * (torch.rand(shape) < share)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_a_decoder_and_its_gradients(share):
    f = mostly_zeros(3, 5, 60, share=share).requires_grad_()
    weight, bias = (torch.randn(s, dtype=f.dtype, requires_grad=True) for s in ((7, 60), (7,)))
    got, want = ops.sparse_product(f, weight.t(), bias), F.linear(f, weight, bias)
    torch.testing.assert_close(got, want)
    given = (f, weight, bias)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), given) for y in (got, want)))


def test_a_decoder_of_what_it_rectifies():
    z, weight = mostly_zeros(3, 5, 60, share=0.3).requires_grad_(), torch.randn(60, 7).double()
    got, want = ops.sparse_product(z, weight, relu=True), z.relu() @ weight
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), z) for y in (got, want)))


@pytest.mark.parametrize("of_x", [True, False])
def test_an_encoder_with_a_shift(of_x):
    x = torch.randn(3, 5, 7).double().requires_grad_(of_x)
    weight, shift = (torch.randn(s).double().requires_grad_() for s in ((60, 7), (7,)))
    got = ops.sparse_gradient_linear(x, weight, shift=shift)
    want = F.linear(x - shift, weight)
    torch.testing.assert_close(got, want)
    given = [weight, shift, *([x] if of_x else [])]
    gradient = mostly_zeros(3, 5, 60, share=0.1)
    torch.testing.assert_close(*(torch.autograd.grad(y, given, gradient) for y in (got, want)))
    with pytest.raises(ValueError, match=r"shift must be \[7\], got shape \(2,\)"):
        ops.sparse_gradient_linear(x, weight, shift=torch.zeros(2).double())


def test_zero_times_what_is_not_finite_is_nan():
    f, weight = mostly_zeros(15, 60, share=0.01), torch.randn(60, 7, dtype=torch.float64)
    weight[3, 2] = torch.nan
    torch.testing.assert_close(aten.matmul(f, weight), f @ weight, equal_nan=True)
    torch.testing.assert_close(aten.outer(f.t(), weight)[0], f @ weight, equal_nan=True)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_an_encoder_whose_gradient_is_mostly_zeros(share):
    gradient = mostly_zeros(3, 5, 60, share=share)
    given = [
        torch.randn(s, dtype=gradient.dtype, requires_grad=True)
        for s in ((3, 5, 7), (7, 60), (60,))
    ]
    x, weight, bias = given
    got, want = ops.sparse_gradient_linear(x, weight.t(), bias), x @ weight + bias
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(y, given, gradient) for y in (got, want))):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_as_good_as_a_dense_product(dtype):
    h = mostly_zeros(40, 600, share=0.02, dtype=dtype)
    weight, x = torch.randn(600, 8).to(dtype), torch.randn(40, 8).to(dtype)
    for got, want in (
        (aten.matmul(h, weight), h.double() @ weight.double()),
        (aten.outer(h, x)[0], h.t().double() @ x.double()),
        (aten.outer(h, x)[1], h.double().sum(0)),
    ):
        torch.testing.assert_close(got, want.to(dtype))


def test_rows_of_no_entries():
    f, weight = torch.zeros(3, 0, requires_grad=True), torch.randn(0, 6, requires_grad=True)
    y = ops.sparse_product(f, weight)
    assert y.shape == (3, 6) and not y.any()
    assert [g.shape for g in torch.autograd.grad(y.sum(), (f, weight))] == [(3, 0), (0, 6)]


def test_what_does_not_fit_is_refused():
    f, weight = torch.randn(3, 5), torch.randn(5, 6)
    with pytest.raises(ValueError, match="do not fit"):
        ops.sparse_product(f, weight.t())
    with pytest.raises(ValueError, match="bias must be"):
        ops.sparse_product(f, weight, torch.zeros(5))
    with pytest.raises(TypeError, match="weight must have the dtype"):
        ops.sparse_gradient_linear(f, weight.t().double())
