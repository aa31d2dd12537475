"""`batch_topk_encode` and `batch_topk_decode` against the program that they replace."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor import ops
from sparse_inductor.testing import compile_without_codegen

NAN = float("nan")


def tensors(dtype=torch.float64):
    torch.manual_seed(0)
    sizes = ((2, 5, 8), (8, 40), (40,), (40, 6), (6,), (8,))
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in sizes]


def written(x, w_enc, b_enc, w_dec, b_dec, shift, k):
    pre = (x - shift) @ w_enc + b_enc
    values, indices = pre.flatten().topk(k)
    f = torch.zeros_like(pre).flatten().scatter(0, indices, values.relu())
    return f.view_as(pre) @ w_dec + b_dec


def by_operators(x, w_enc, b_enc, w_dec, b_dec, shift, k, **more):
    values, indices = ops.batch_topk_encode(x, w_enc.t(), b_enc, k=k, shift=shift, **more)
    return ops.batch_topk_decode(values.relu(), indices, w_dec, b_dec, sizes=x.shape[:-1])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("k", [0, 1, 37, 400])
def test_values_and_gradients(k, ordered):
    given = tensors()
    want, got = written(*given, k), by_operators(*given, k, ordered=ordered)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), given) for y in (got, want)))


def test_a_shift_of_an_input_without_gradient():
    given = tensors()
    given[0].requires_grad_(False)
    want, got = written(*given, 30), by_operators(*given, 30)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), given[1:]) for y in (got, want))
    )


@pytest.mark.parametrize("shape", [(2, 5, 40), (10, 40), (400,)])
def test_a_product_that_is_given_is_not_computed_again(shape):
    x, w_enc, b_enc, *_ = tensors()
    scores = torch.randn(shape, dtype=x.dtype)
    values, indices = ops.batch_topk_encode(x, w_enc.t(), b_enc, k=30, scores=scores)
    torch.testing.assert_close((values, indices), tuple(scores.flatten().topk(30)))
    want = (x @ w_enc + b_enc).flatten()[indices]
    torch.testing.assert_close(
        *(torch.autograd.grad(y.sum(), (x, w_enc, b_enc)) for y in (values, want))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_ones_the_smallest_indices_are_kept_and_nan_is_the_largest(dtype):
    scores = torch.tensor([[1, 2, 0, 1], [NAN, -1, NAN, 1], [3, -0.0, 0, 1]], dtype=dtype)
    x, weight = torch.zeros(3, 2, dtype=dtype), torch.zeros(4, 2, dtype=dtype)
    _, by_size = ops.batch_topk_encode(x, weight, k=6, scores=scores)
    assert by_size.tolist() == [4, 6, 8, 1, 0, 3]
    _, by_index = ops.batch_topk_encode(x, weight, k=6, scores=scores, ordered=False)
    assert by_index.tolist() == [0, 1, 3, 4, 6, 8]


@pytest.mark.parametrize("sizes", [(10,), (2, 5), (5, 1, 2)])
def test_the_leading_sizes_of_the_result(sizes):
    *_, w_dec, b_dec, _ = tensors()
    values, indices = torch.randn(4, dtype=w_dec.dtype), torch.tensor([399, 0, 45, 41])
    f = torch.zeros(400, dtype=w_dec.dtype).index_put((indices,), values).view(*sizes, 40)
    y = ops.batch_topk_decode(values, indices.int(), w_dec, b_dec, sizes=sizes)
    torch.testing.assert_close(y, f @ w_dec + b_dec)
    y.zero_()  # is no view that autograd protects


@pytest.mark.parametrize("shapes", [((7, 8), (12, 8)), ((2, 5, 8), (3, 4, 8))])
def test_one_graph_for_all_numbers_of_rows(shapes):
    _, *weights = tensors()

    def program(x):
        return by_operators(x, *weights, 30)

    compiled = compile_without_codegen(program, dynamic=True)
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(
            *(torch.autograd.grad(f(x).square().sum(), (x, *weights)) for f in (compiled, program))
        )
    assert compiled.dynamo_graphs == 1


@pytest.mark.parametrize("indices", [[0, 400], [-1, 0]])
def test_an_index_out_of_range(indices):
    *_, w_dec, _, _ = tensors()
    with pytest.raises(IndexError, match="out of range"):
        values = torch.ones(2, dtype=w_dec.dtype)
        ops.batch_topk_decode(values, torch.tensor(indices), w_dec, sizes=(10,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: ops.batch_topk_encode(x, w, k=201), "k must be between 0 and 200, got 201"),
        (lambda x, w: ops.batch_topk_encode(x, w.t(), k=1), "weight"),
        (lambda x, w: ops.batch_topk_encode(x, w, k=1, scores=x), "scores must have 200 elements"),
        (lambda x, w: ops.batch_topk_encode(x, w, k=1, shift=x), "shift must be"),
        (lambda x, w: ops.batch_topk_decode(x[0], x[0], w, sizes=(1,)), "indices must be one of"),
        (lambda x, w: ops.batch_topk_decode(x, x.long(), w, sizes=(5,)), "must be \\[k\\]"),
        (lambda x, w: ops.batch_topk_decode(x[0], x[0].long(), w, sizes=(-1,)), "got \\(-1,\\)"),
        (
            lambda x, w: ops.batch_topk_decode(x[0], x[0].long(), w[:0], sizes=(9,)),
            "between 0 and 0",
        ),
        (lambda x, w: ops.batch_topk_decode(x[0], x.long(), w, sizes=(5,)), "must be \\[k\\]"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.zeros(5, 8), torch.zeros(40, 8))
