"""Operators with kernels that Inductor launches itself: where a graph gets the operator's body, and where it keeps the
operator."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from functorch.compile import aot_function
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_inductor import layers
from sparse_inductor.ops import _dispatch
from sparse_inductor.ops._dispatch import inline


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Registers an operator that multiplies, with a body that adds, and returns a list for the traced graphs."""
    monkeypatch.setattr(_dispatch, "replays", lambda: True)  # as if Triton launched kernels
    lib = torch.library.Library("inline_test", "FRAGMENT")
    lib.define("twice(Tensor x, float factor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl("twice", lambda x, factor: x * factor, "CPU")
    torch.library.register_fake("inline_test::twice", lambda x, factor: x * 1, lib=lib)
    inline(lib, "twice", lambda x, factor, run: x + x, lambda x, factor: factor == 2.0)
    yield []
    lib._destroy()


def traced(graphs: list[str], fn, *args, **options) -> str:
    def backend(gm, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(traced, _):
            graphs.append(traced.code)
            return traced.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(gm, inputs)

    result = torch.compile(fn, backend=backend, **options)(*args)
    torch.testing.assert_close(result, fn(*args))
    return graphs[-1]


def test_a_graph_gets_the_body(graphs):
    code = traced(graphs, lambda x: torch.ops.inline_test.twice(x, 2.0), torch.randn(4, 3))
    assert "aten.add" in code
    assert "inline_test" not in code


def test_what_the_body_does_not_take_stays_the_operator(graphs):
    code = traced(graphs, lambda x: torch.ops.inline_test.twice(x, 3.0), torch.randn(4, 3))
    assert "inline_test.twice" in code


def test_what_the_body_cannot_launch_stays_the_operator(graphs):
    """Once Inductor launches a kernel, there is no fallback if it fails."""

    def body(x: Tensor, run: object) -> Tensor:
        torch.neg(x)
        raise RuntimeError("PassManager::run failed")

    lib = torch.library.Library("inline_test", "FRAGMENT")
    lib.define("thrice(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl("thrice", lambda x: x * 3, "CPU")
    torch.library.register_fake("inline_test::thrice", lambda x: x * 1, lib=lib)
    inline(lib, "thrice", body, lambda x: True)
    try:
        code = traced(graphs, lambda x: torch.ops.inline_test.thrice(x), torch.randn(4, 3))
    finally:
        lib._destroy()
    assert "inline_test.thrice" in code and "aten.neg" not in code


def test_an_operator_whose_kernel_has_failed_stays_one(graphs):
    x = torch.randn(4, 3)

    def fails(x: Tensor, factor: float) -> Tensor:
        raise RuntimeError("Triton Error [CUDA]: invalid device function")

    try:
        with pytest.warns(layers.KernelWarning):
            layers.Operator("twice", lambda x, factor: x * factor).run(fails, (x, 2.0))
        code = traced(graphs, lambda x: torch.ops.inline_test.twice(x, 2.0), x)
        assert "inline_test.twice" in code
    finally:
        layers.forget()


def test_symbolic_sizes_keep_the_operator(graphs):
    def fn(x: Tensor) -> Tensor:
        return torch.ops.inline_test.twice(x, 2.0)

    code = traced(graphs, fn, torch.randn(4, 3), dynamic=True)
    assert "inline_test.twice" in code


def test_an_exported_program_keeps_the_operator(graphs):
    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.inline_test.twice(x, 2.0)

    program = torch.export.export(Twice(), (torch.randn(4, 3),))
    for kept in (program, program.run_decompositions()):
        assert "inline_test.twice" in kept.graph_module.code


def test_eager_calls_run_the_operator(graphs):
    x = torch.randn(4)
    torch.testing.assert_close(torch.ops.inline_test.twice(x, 2.0), x * 2)


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize(
    "tokens, neurons, products",
    [(1, 256, 0), (64, 256, 3), (1664, 256, 3), (1664, 8192, 3), (1665, 8192, 0), (4096, 256, 3)],
)
def test_a_feed_forward_block_of_some_tokens_on_a_gpu_is_inductors(
    tokens, neurons, products, stats
):
    """For too many tokens to skip weights and too few to pack rows, Inductor compiles the original dense block."""
    import sparse_inductor.ops  # noqa: F401

    graphs: list[str] = []

    def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        op = torch.ops.sparse_inductor.relu_ffn
        y, numbers, _ = op(
            x, gate, None, up, None, down, None, None, None, "relu", "", stats, False
        )
        assert numbers.shape == (4 if stats else 0, tokens) and numbers.dtype == torch.float32
        return y, numbers

    def keep(gm, _):
        graphs.append(gm.code)
        return gm

    with FakeTensorMode():
        like = {"device": "cuda", "dtype": torch.bfloat16}
        sizes = (tokens, 64), (neurons, 64), (neurons, 64), (64, neurons)
        tensors = [torch.empty(*size, **like) for size in sizes]
        aot_function(block, fw_compiler=keep)(*tensors)
    if stats and tokens == 1:
        products = 3  # decoding by active neurons computes no statistics
    assert graphs[-1].count("aten.mm") == products
    assert ("sparse_inductor.relu_ffn" in graphs[-1]) == (products == 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("up", [None, "", "relu"])
def test_what_inductor_gets_of_a_feed_forward_block_is_what_the_operator_makes(up, dtype):
    """Values, statistics and all gradients are compared."""
    # `sparse_inductor.ops.relu_ffn` as an attribute is the function.
    ops = importlib.import_module("sparse_inductor.ops.relu_ffn")

    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype).div_(4).requires_grad_()
    x, gate, down, bias = draw(3, 5, 16), draw(24, 16), draw(8, 24), draw(24)
    ups = (None, None) if up is None else (draw(24, 16), None)
    tensors = [x, gate, bias, *ups, down, None, draw(24), None]
    learned = [t for t in tensors if t is not None]
    steps = "relu | square", up or ""
    found = []
    for y, numbers, counts in (
        ops._dense(ops._Call(*tensors, *steps, True, True)),
        torch.ops.sparse_inductor.relu_ffn(*tensors, *steps, True, True),
    ):
        loss = y.double().sin().sum() + (numbers[0] - 2 * numbers[2] + numbers[4]).double().sum()
        found.append([y, numbers, counts, *torch.autograd.grad(loss, learned)])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*found, **tolerance)
