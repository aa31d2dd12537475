"""Operators in the code that Inductor generates: it calls them without the dispatcher unless a mode is active."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad

import sparse_inductor
from programs import Block


@pytest.fixture
def compiled() -> tuple[Callable[[Tensor], Tensor], Block, str]:
    torch.manual_seed(0)
    model = Block(8).eval().requires_grad_(False)
    program = torch.compile(model, options=sparse_inductor.options(only="relu_ffn"))
    _, (code,) = run_and_get_code(program, torch.randn(3, 8))
    return program, model, code


def test_generated_code_calls_the_function(compiled):
    program, model, code = compiled
    assert "from sparse_inductor.ops._direct import site" in code
    assert "sparse_inductor_site('relu_ffn', 'cpu', True)" in code
    assert "= torch.ops.sparse_inductor.relu_ffn" not in code
    for _ in range(3):
        x = torch.randn(3, 8)
        torch.testing.assert_close(program(x), model(x))


def test_a_profiler_sees_the_operator(compiled):
    program, _, _ = compiled
    with torch.profiler.profile() as profile:
        program(torch.randn(3, 8))
    assert "sparse_inductor::relu_ffn" in {event.key for event in profile.key_averages()}


def test_forward_mode_is_refused_by_code_that_was_compiled_before(compiled):
    program, _, _ = compiled
    x = torch.randn(3, 8)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        program(forward_ad.make_dual(x, torch.ones_like(x)))


def test_unknown_sizes_are_told(compiled):
    program = torch.compile(
        Block(8), dynamic=True, options=sparse_inductor.options(only="relu_ffn")
    )
    with torch.no_grad():
        _, (code,) = run_and_get_code(program, torch.randn(3, 8))
    assert "sparse_inductor_site('relu_ffn', 'cpu', False)" in code


def test_arguments_that_are_left_to_defaults_are_passed_on():
    """Inductor passes defaults by name."""
    decoder = nn.Linear(8, 30).requires_grad_(False)

    def model(hidden: Tensor, mask: Tensor) -> Tensor:
        scores = torch.log1p(torch.relu(decoder(hidden))) * mask.unsqueeze(-1)
        return scores.max(dim=1).values

    program = torch.compile(model, options=sparse_inductor.options(only="splade_head"))
    hidden, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    _, (code,) = run_and_get_code(program, hidden, mask)
    assert "sparse_inductor_site('splade_head', 'cpu', True)" in code
    assert "out_dtype=None, argmax=False, even=False)" in code
    assert "= torch.ops.sparse_inductor" not in code
    for seed in range(3):
        hidden = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(program(hidden, mask), model(hidden, mask))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_model_returns_may_be_written_to_in_every_step(device):
    torch.manual_seed(0)
    model, x = Block(8).to(device), torch.randn(2, 3, 8, device=device)
    program = torch.compile(
        model, options=sparse_inductor.options(only="relu_ffn", policy="always")
    )
    model(x).mul_(2).sum().backward()
    wanted = model.down.weight.grad
    for _ in range(3):
        model.zero_grad()
        program(x).mul_(2).sum().backward()
        torch.testing.assert_close(model.down.weight.grad, wanted)
