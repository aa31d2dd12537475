"""Every way to compile gives eager's results and gradients, for every family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparse_inductor
from programs import LAYERS, D
from sparse_inductor.testing import compile_without_codegen


def layer(pattern: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[pattern]()


def step(program: Callable[..., Tensor], module: nn.Module) -> list[Tensor | None]:
    """What a training step makes: the result, gradients of the input and of the parameters."""
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = program(x)
    module.zero_grad()
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_steps_alike(got: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


# Higher-order operators


def a_region_used_twice(f):
    region = torch.compiler.nested_compile_region(f)
    return lambda x: region(region(x) + 1)


def a_region_in_a_region(f):
    region = torch.compiler.nested_compile_region(f)
    outer = torch.compiler.nested_compile_region(lambda x: region(x) * 2)
    return lambda x: outer(x) + region(x)


def a_region_with_a_detached_result(f):
    region = torch.compiler.nested_compile_region(lambda x: (f(x), f(x).detach(), x * 2))

    def program(x):
        y, constant, double = region(x)
        return y * constant + double

    return program


def a_checkpointed_region(f):
    region = torch.compiler.nested_compile_region(f)
    return lambda x: checkpoint(region, x, use_reentrant=False) + region(x)


REGIONS = (
    a_region_used_twice,
    a_region_in_a_region,
    a_region_with_a_detached_result,
    a_checkpointed_region,
)


@pytest.mark.parametrize("pattern", LAYERS)
@pytest.mark.parametrize("within", REGIONS, ids=lambda f: f.__name__)
def test_regions_compiled_once_have_gradients(pattern, within):
    module = layer(pattern)
    program = within(module)
    wanted = step(program, module)
    with sparse_inductor.enabled(only=pattern, strict=True):
        got = step(compile_without_codegen(program, fullgraph=True), module)
    assert_steps_alike(got, wanted)


def test_attention_in_training_is_left_to_a_cpp_wrapper():
    module = layer("entmax_attention")
    wanted = step(module, module)
    with (
        sparse_inductor.enabled(only="entmax_attention"),
        torch._inductor.config.patch(cpp_wrapper=True),
    ):
        got = step(compile_without_codegen(module), module)
    assert_steps_alike(got, wanted)
    report = sparse_inductor.report()
    assert not report.rewrites
    assert any("C++ wrapper" in miss.reason for miss in report.near_misses)
