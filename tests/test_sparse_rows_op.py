"""`topk_encode` and `sparse_decode` against the program that they replace."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor import ops

NAN = float("nan")


def tensors(dtype=torch.float64, requires_grad=True):
    torch.manual_seed(0)
    sizes = ((2, 5, 8), (8, 40), (40,), (40, 6), (6,))
    return [torch.randn(s, dtype=dtype).requires_grad_(requires_grad) for s in sizes]


def written(x, w_enc, b_enc, w_dec, b_dec, k=4):
    pre = x @ w_enc + b_enc
    values, indices = pre.topk(k)
    return torch.zeros_like(pre).scatter(-1, indices, values.relu()) @ w_dec + b_dec


def by_operators(x, w_enc, b_enc, w_dec, b_dec, k=4, scores=None):
    values, indices = ops.topk_encode(x, w_enc.t(), b_enc, k=k, scores=scores)
    return ops.sparse_decode(values.relu(), indices, w_dec, b_dec)


@pytest.mark.parametrize("k", [0, 1, 4, 40])
def test_values_and_gradients(k):
    given = tensors()
    want, got = written(*given, k), by_operators(*given, k)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), given) for y in (got, want)))


@pytest.mark.parametrize("row", [torch.nan, torch.inf])
def test_zero_times_what_is_not_finite_is_nan_in_the_gradient_of_a_weight(row):
    x, w_enc, b_enc, w_dec, b_dec = tensors()
    dy = torch.randn(2, 5, 6, dtype=x.dtype)
    dy[0, 2, 3] = row
    given = (w_enc, b_enc, w_dec, b_dec)
    got, want = (
        torch.autograd.grad(program(x, *given), given, dy) for program in (by_operators, written)
    )
    assert want[2][:, 3].isnan().any()
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("of_rows", [False, True])
def test_a_shift_and_its_gradient(of_rows):
    x, w_enc, b_enc, *_ = tensors()
    x, shift = x.detach().requires_grad_(of_rows), torch.randn(8, dtype=x.dtype, requires_grad=True)
    given = (shift, w_enc, b_enc, *([x] if of_rows else []))
    values, indices = ops.topk_encode(x, w_enc.t(), b_enc, k=3, shift=shift)
    want = ((x - shift) @ w_enc + b_enc).gather(-1, indices)
    torch.testing.assert_close(values, want)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), given) for y in (values, want))
    )
    with torch.no_grad():
        again = ops.topk_encode(x, w_enc.t(), b_enc, k=3, shift=shift)
    torch.testing.assert_close(again, (values, indices))


def test_a_product_that_is_given_is_not_made_again():
    x, w_enc, b_enc, *_ = tensors()
    scores = torch.randn(2, 5, 40, dtype=x.dtype)
    values, indices = ops.topk_encode(x, w_enc.t(), b_enc, k=3, scores=scores)
    torch.testing.assert_close((values, indices), tuple(scores.topk(3)))
    want = (x @ w_enc + b_enc).gather(-1, indices)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.sum(), (x, w_enc, b_enc)) for y in (values, want))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_ones_the_smallest_columns_are_kept_and_nan_is_the_largest(dtype):
    scores = torch.tensor(
        [[1, 2, 1, 1, 0, 1], [NAN, 3, NAN, 1, NAN, NAN], [0, -0.0, 0, -1, -0.0, 0]], dtype=dtype
    )
    x, weight = torch.zeros(3, 2, dtype=dtype), torch.zeros(6, 2, dtype=dtype)
    _, by_size = ops.topk_encode(x, weight, k=3, scores=scores)
    assert by_size.tolist() == [[1, 0, 2], [0, 2, 4], [0, 1, 2]]
    _, by_column = ops.topk_encode(x, weight, k=3, scores=scores, ordered=False)
    assert by_column.tolist() == [[0, 1, 2], [0, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: ops.topk_encode(x, w, k=41), "k must be between 0 and 40"),
        (lambda x, w: ops.topk_encode(x, w.t(), k=1), "weight"),
        (lambda x, w: ops.topk_encode(x, w, k=1, scores=x), "scores must be"),
        (lambda x, w: ops.topk_encode(x, w, k=1, shift=x), "shift must be"),
        (lambda x, w: ops.sparse_decode(x, x, w), "indices must be one of"),
        (lambda x, w: ops.sparse_decode(x, torch.zeros(3, dtype=torch.int64), w), "must be"),
        (lambda x, w: ops.sparse_decode(x.double(), x.long(), w), "dtype of values"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.zeros(5, 8), torch.zeros(40, 8))
