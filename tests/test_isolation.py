"""A pattern that fails on one program leaves it as written: compilation succeeds, and the next program is rewritten."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_inductor
from sparse_inductor.testing import compile_without_codegen
from support import only

UNBACKED = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


class Head(nn.Module):
    """A linear layer and a function `rest(linear, x, *more)`."""

    def __init__(self, rest):
        super().__init__()
        self.linear, self.rest = nn.Linear(6, 11), rest

    def forward(self, x, *more):
        return self.rest(self.linear, x, *more)


def packed(linear, tokens, ends):
    """Pool the sequences of one long tensor; their ends are given by a tensor."""
    at = ends.tolist()
    logits = torch.relu(linear(tokens))
    return torch.stack([logits[i:j].amax(0) for i, j in zip([0, *at], at)])


def at_least(linear, x, n):
    """Pool the first n rows of a batch."""
    return torch.relu(linear(x)[:n]).amax(1)


def indicators(linear, x):
    """Return 1 for the entries that are positive at any position."""
    return torch.where(linear(x) > 0, 1.0, 0.0).amax(1)


def squared(linear, x):
    return torch.relu(linear(x)).square().amax(1)


def agrees(model, *args, dynamic=None):
    got = compile_without_codegen(model, dynamic=dynamic)(*args)
    torch.testing.assert_close(got, model(*args))


def and_the_next_is_rewritten(report):
    report.clear()
    torch._dynamo.reset()
    agrees(Head(squared), torch.randn(2, 5, 6))
    assert len(report.rewrites) == 1 and not report.near_misses


def test_sizes_from_data():
    with only("splade_head") as report, torch._dynamo.config.patch(UNBACKED), torch.no_grad():
        agrees(Head(packed), torch.randn(12, 6), torch.tensor([3, 4, 12]))
        and_the_next_is_rewritten(report)


def test_a_size_without_a_guard():
    x = torch.randn(3, 5, 6)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with only("splade_head") as report, torch.no_grad():
        agrees(Head(squared), x)
        and_the_next_is_rewritten(report)


@pytest.mark.parametrize("grad", [False, True])
def test_symbolic_sizes_can_be_reported(grad):
    with only("splade_head") as report, torch.set_grad_enabled(grad):
        agrees(Head(at_least), torch.randn(4, 5, 6), 3, dynamic=True)
        (rewrite,) = report.rewrites
        assert rewrite.bytes_saved in ((None,) if grad else (0, None))
        assert report.to_json() and str(report)
        and_the_next_is_rewritten(report)


def test_numbers_in_the_place_of_tensors():
    with only("splade_head") as report, torch.no_grad():
        agrees(Head(indicators), torch.randn(2, 5, 6))
        assert not report.rewrites
        and_the_next_is_rewritten(report)


def test_a_maximum_over_nothing_raises_as_it_does_unrewritten():
    x = torch.randn(2, 0, 6)
    with only("splade_head") as report, torch.no_grad():
        with pytest.raises(Exception, match="amax"):
            compile_without_codegen(Head(squared))(x)
        assert not report.rewrites
        and_the_next_is_rewritten(report)


@pytest.mark.parametrize("attention", [False, True])
def test_an_integer_alpha(attention):
    entmax = pytest.importorskip("entmax")
    two, q = torch.tensor(2), torch.randn(2, 5, 4)

    def rows(q):
        z = q @ q.mT if attention else q
        p = entmax.entmax_bisect(z, two)
        return p @ q if attention else p

    with only("entmax", "entmax_attention") as report, torch.no_grad():
        torch.testing.assert_close(compile_without_codegen(rows)(q), rows(q))
        assert {m.reason for m in report.near_misses} == {"alpha is a tensor of torch.int64"}
        report.clear()
        compile_without_codegen(lambda z: entmax.sparsemax(z, -1))(q)
        assert len(report.rewrites) == 1


def test_a_pattern_that_asks_about_unknown_sizes_is_silent():
    """The pattern fails before it knows whether the node belongs to its family."""

    def rows(linear, x, ends):
        return linear(x[: ends.item()]).sum()

    with only("splade_head", "relu_ffn") as report, torch._dynamo.config.patch(UNBACKED):
        agrees(Head(rows), torch.randn(7, 6), torch.tensor(4))
        assert not report.near_misses
    assert not sparse_inductor.report().near_misses


def test_rows_of_no_scores_are_left_as_written():
    """A trial run on no rows is impossible. The package's function is traced because a saved tensor is written to."""
    entmax = pytest.importorskip("entmax")
    weight = torch.randn(8, 8, requires_grad=True)

    def program(x):
        p = entmax.entmax15((x * 2) @ (x @ weight).mT, dim=-1)
        x.clamp_(-0.5, 0.5)
        return p

    sparse_inductor.enable(only="entmax")
    with pytest.raises(Exception, match="non-zero size"):
        compile_without_codegen(program)(torch.randn(3, 0, 8))
    assert not any("raised" in miss.reason for miss in sparse_inductor.report().near_misses)
