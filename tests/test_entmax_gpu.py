"""Entmax and entmax attention on a GPU: the operators, eager and compiled, run by the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from sparse_inductor.ops import entmax, entmax_attention
from support import in_a_graph, relative

pytestmark = pytest.mark.gpu
ops = torch.ops.sparse_inductor


def _gradients(fn, leaves, seed=1):
    out = fn(*leaves)
    g = torch.Generator(device="cuda").manual_seed(seed)
    cotangent = torch.randn(out.shape, generator=g, device="cuda", dtype=torch.float32)
    return out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


def _double(leaves):
    return [t.detach().double().requires_grad_() for t in leaves]


# Every kind of tile: rows per lane, per thread, per warp, and streamed, with contiguous and with strided columns.
ROWS = [
    ((5000, 33), -1),
    ((3000, 64), -1),
    ((777, 300), -1),
    ((200, 3000), -1),
    ((20, 30_000), -1),
    ((7, 50_000), -1),
    ((3000, 64, 4), 1),
    ((3000, 50, 3), 1),
    ((64, 500, 3), 1),
    ((16, 900, 50), 1),
    ((2, 9000, 40), 1),
    ((300, 1000), 0),
    ((4, 70, 3, 50), 1),
]


@pytest.mark.parametrize(
    "shape, dim, dtype, alpha",
    [
        *((shape, dim, torch.float32, 1.5) for shape, dim in ROWS),
        *((shape, dim, torch.bfloat16, 1.5) for shape, dim in ROWS[1::4]),
        *((shape, dim, torch.float32, 1.3) for shape, dim in ROWS[2::4]),
        *((shape, dim, torch.float32, "each") for shape, dim in ROWS[3::4]),
    ],
)
def test_rows_of_every_layout(shape, dim, dtype, alpha):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    leaves = [x]
    if alpha == "each":
        rows = list(shape)
        rows[dim] = 1
        leaves.append((torch.rand(rows, device="cuda") * 0.6 + 1.2).requires_grad_())

    def fn(x, *a):
        return entmax(x, *(a or (alpha,)), dim=dim)

    ours, truth = _gradients(fn, leaves), _gradients(fn, _double(leaves))
    assert (ours[0].double() - truth[0]).abs().max() < (2e-6 if dtype == torch.float32 else 4e-3)
    if dtype == torch.float32:
        assert (ours[0].double().sum(dim) - 1).abs().max() < 2e-6
    for got, true in zip(ours[1:], truth[1:], strict=True):
        # The gradient is computed from the probability that was rounded to 16 bits.
        assert relative(got, true) < (2e-5 if dtype == torch.float32 else 2e-2)


def _leaves_and_function(alpha):
    torch.manual_seed(0)
    leaves = [(torch.randn(6, 4, 300, device="cuda") * 2).requires_grad_()]
    if alpha == "learned":
        leaves.append((torch.rand(4, 1, device="cuda") * 0.6 + 1.2).requires_grad_())
    return leaves, lambda x, *a: entmax(x, *(a or (alpha,)))


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.3, "learned"])
def test_inductor_launches_the_kernels_of_rows_itself(alpha):
    """A compiled graph, forward and backward, launches the kernels without the dispatcher or this package's Python."""
    leaves, fn = _leaves_and_function(alpha)
    eager = _gradients(fn, leaves)
    got, code = run_and_get_code(_gradients, torch.compile(fn), leaves)
    text = "".join(code)
    assert "ops.sparse_inductor.entmax" not in text
    assert "_forward_kernel" in text and "_backward_kernel" in text
    torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)


def test_rows_of_symbolic_sizes_stay_an_operator():
    fn = torch.compile(lambda x: entmax(x, 1.5), dynamic=True)
    with torch.no_grad():
        _, code = run_and_get_code(fn, torch.randn(30, 70, device="cuda"))
        assert "ops.sparse_inductor.entmax" in "".join(code)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for rows, columns in ((31, 64), (8, 3000), (100, 65)):
            x = torch.randn(rows, columns, device="cuda")
            torch.testing.assert_close(fn(x), entmax(x, 1.5), rtol=1e-6, atol=1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_kernels_in_a_graph_take_what_inductor_made_of_their_inputs():
    """Inputs are views with an offset, transposed products, and results with strides that Inductor chooses."""

    def fn(a, b):
        scores = (a @ b).transpose(1, 2) + 1
        return entmax(scores[:, 1:, 3:], 1.5, dim=1), entmax(a[1:, :, 1:], 1.5).sin()

    a, b = (torch.randn(s, device="cuda") for s in ((3, 70, 33), (3, 33, 90)))
    for got, truth in zip(torch.compile(fn)(a, b), fn(a, b), strict=True):
        # Inductor may pad the product and sum in another order, so that scores of about 15 differ in the last bits.
        torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-4)


def _attention_inputs(dtype, H=4, Lq=130, Lk=200):
    torch.manual_seed(0)
    shapes = ((2, H, Lq, 64), (2, 2, Lk, 64), (2, 2, Lk, 64))
    return [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    "dtype, alpha, fill",
    [
        (torch.float32, 1.5, -math.inf),
        (torch.float32, 1.25, -1e9),
        (torch.float32, "heads", -math.inf),
        (torch.bfloat16, 1.5, -1e9),
        (torch.bfloat16, 2.0, -math.inf),
        (torch.bfloat16, "heads", -1e9),
    ],
)
def test_attention_and_all_its_gradients(dtype, alpha, fill):
    leaves = _attention_inputs(dtype)
    (B, H, Lq, _), Lk = leaves[0].shape, leaves[1].shape[2]
    leaves.append(torch.randn(1, H, 1, Lk, device="cuda").to(dtype).requires_grad_())
    if alpha == "heads":
        leaves.append(
            torch.tensor([1.2, 1.5, 1.8, 2.0], device="cuda").view(1, H, 1, 1).requires_grad_()
        )
    mask = torch.rand(B, 1, Lq, Lk, device="cuda") > 0.3
    mask[0, 0, 3] = False
    lengths = torch.tensor([Lk, 150], device="cuda")

    def fn(q, k, v, bias, *a):
        return entmax_attention(
            q, k, v, *(a or (alpha,)), bias=bias, mask=mask, causal=True, fill=fill, key_lengths=lengths
        )  # fmt: skip

    ours, truth = _gradients(fn, leaves), _gradients(fn, _double(leaves))
    for got, true in zip(ours, truth, strict=True):
        assert relative(got, true) < (2e-3 if dtype == torch.float32 else 2e-2)
    assert all(torch.equal(a, b) for a, b in zip(ours, _gradients(fn, leaves), strict=True)), (
        "not repeatable"
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_training(dynamic):
    def fn(q, k, v, bias):
        scores = entmax(q @ k.mT * 0.125 + bias, 1.5)
        return entmax_attention(q, k, v, bias=bias, causal=True) + scores @ v

    compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic)
    for L in (100, 140):
        leaves = _attention_inputs(torch.float32, H=2, Lq=L, Lk=L)
        leaves.append(torch.randn(1, 2, 1, L, device="cuda", requires_grad=True))
        for got, eager in zip(_gradients(compiled, leaves), _gradients(fn, leaves), strict=True):
            assert relative(got, eager) < 1e-3


def test_operators_check_out():
    q, k, v = _attention_inputs(torch.bfloat16)
    bias = torch.randn(1, 4, 1, 200, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    alpha = torch.full((1, 4, 1, 1), 1.4, device="cuda", requires_grad=True)
    lengths = torch.tensor([150, 200], device="cuda")
    op = ops.entmax_attention.default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # fmt: skip
    for args in (
        (q, k, v, bias, None, alpha, None, lengths, 0.0, 0.3, -1e9, True, True),
        (*(t.double() for t in (q, k, v)), *[None] * 5, 1.5, 0.3, -math.inf, True, False),
    ):
        torch.library.opcheck(op, args, test_utils=tests)
    x = torch.randn(64, 200, device="cuda", requires_grad=True)
    torch.library.opcheck(ops.entmax.default, (x, alpha[0, 0], 0.0, -1), test_utils=tests)


def test_autocast_reaches_the_16_bit_kernels():
    q, k, v = _attention_inputs(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = entmax_attention(q, k, v)
        assert entmax(q, 1.5).dtype == torch.float32
    assert out.dtype == torch.bfloat16
    assert relative(out, entmax_attention(*_double([q, k, v]))) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_captured_in_a_cuda_graph(dtype):
    q, k, v = (t.detach() for t in _attention_inputs(dtype))
    alpha = torch.full((1, 4, 1, 1), 1.4, device="cuda")

    def fn():
        return entmax_attention(q, k, v), entmax_attention(q, k, v, alpha), entmax(q, 1.5, 1)

    eager = fn()
    graph, captured = in_a_graph(fn, before=1)
    graph.replay()
    for a, b in zip(captured, eager, strict=True):
        assert relative(a, b) < 1e-6
