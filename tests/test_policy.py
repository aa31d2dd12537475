"""Policy: blocks run as written until what they compute shows that the operator is faster, and go back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_inductor
from sparse_inductor import profile
from sparse_inductor.pattern import registered
from sparse_inductor.policy import Worth, policies
from sparse_inductor.testing import compile_without_codegen

NAMES = ["relu_ffn", "splade_head"]


class Blocks(nn.Module):
    """Two feed-forward blocks; a large negative bias makes one inactive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ups = nn.ModuleList(nn.Linear(8, 40) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(40, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs):
            x = x + down(torch.relu(up(x)))
        return x


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = registered()["relu_ffn"]
    monkeypatch.setattr(type(pattern), "worth", lambda *_: Worth(0.05, "for this test"))
    monkeypatch.setattr(profile, "LOOKS", ())
    monkeypatch.setattr(profile, "RECHECK", 6)


def rewritten(compiled) -> int:
    return compiled.calls("relu_ffn")


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("training", [False, True])
def test_a_block_is_rewritten_when_it_becomes_sparse_and_goes_back(training):
    model, reference = Blocks(), Blocks()
    report = sparse_inductor.report()
    report.clear()
    sparse_inductor.enable(only="relu_ffn", policy="auto")
    compiled = compile_without_codegen(model)
    bias, same_bias = model.ups[0].bias, reference.ups[0].bias

    def step() -> None:
        x = torch.randn(4, 5, 8)
        with torch.set_grad_enabled(training):
            y, expected = compiled(x), reference(x)
            torch.testing.assert_close(y, expected)
            if training:
                y.square().sum().backward()
                expected.square().sum().backward()
                for p, q in zip(model.parameters(), reference.parameters()):
                    torch.testing.assert_close(p.grad, q.grad)
                model.zero_grad()
                reference.zero_grad()

    def run(value: float) -> None:
        with torch.no_grad():
            bias.fill_(value)
            same_bias.fill_(value)
        for _ in range(14):
            step()

    run(0.0)
    assert not report.rewrites
    first, _ = report.pending
    assert first.measured is not None and first.measured > 0.2
    assert "of 40 neurons active; pays below" in first.reason

    run(-50.0)
    assert [r.pattern for r in report.rewrites] == ["relu_ffn"]
    assert len(report.pending) == 1

    run(0.0)
    assert len(report.rewrites) == 1
    assert len(report.pending) == 2


@pytest.mark.parametrize(
    ("policy", "default", "expected"),
    [
        (None, "always", {"relu_ffn": "always", "splade_head": "always"}),
        ("never", "always", {"relu_ffn": "never", "splade_head": "never"}),
        ({"relu_ffn": "auto"}, "always", {"relu_ffn": "auto", "splade_head": "always"}),
    ],
)
def test_choices(policy, default, expected, monkeypatch):
    monkeypatch.delenv("SPARSE_INDUCTOR_POLICY", raising=False)
    assert policies(policy, NAMES, default) == expected


def test_the_environment_chooses_where_the_caller_does_not(monkeypatch):
    monkeypatch.setenv("SPARSE_INDUCTOR_POLICY", "never")
    assert set(policies(None, NAMES, "always").values()) == {"never"}
    assert set(policies("auto", NAMES, "always").values()) == {"auto"}


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("sometimes", ValueError, "policy takes 'auto', 'always' or 'never', got 'sometimes'"),
        ({"relu_fn": "auto"}, ValueError, "no pattern 'relu_fn', did you mean 'relu_ffn'?"),
        ({"relu_ffn": "on"}, ValueError, "policy['relu_ffn'] takes"),
        (3, TypeError, "or a dict of pattern names to them, got 3"),
    ],
)
def test_bad_policies_are_named(policy, error, text):
    with pytest.raises(error) as caught:
        policies(policy, NAMES, "always")
    assert text in str(caught.value)


def test_never_leaves_a_block_as_written():
    report = sparse_inductor.report()
    report.clear()
    sparse_inductor.enable(only="relu_ffn", policy="never")
    with torch.no_grad():
        compiled = compile_without_codegen(Blocks())
        compiled(torch.randn(2, 3, 8))
    assert rewritten(compiled) == 0 and not report.rewrites
    assert [p.reason for p in report.pending] == ["the policy is 'never'"] * 2


def test_a_block_that_was_not_measured_is_left_as_written():
    report = sparse_inductor.report()
    report.clear()
    sparse_inductor.enable(only="relu_ffn", policy="auto")
    with torch.no_grad():
        compile_without_codegen(Blocks())(torch.randn(2, 3, 8))
    assert not report.rewrites
    assert all("products this small" in p.reason for p in report.pending)
    assert "as written for now" in str(report)
