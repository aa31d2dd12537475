"""The assertions of sparse_inductor.testing: which programs pass and fail, and the messages of failures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import sparse_inductor
from planted import bug_named
from processes import ROOT, python
from sparse_inductor.pattern import registered
from sparse_inductor.testing import (
    assert_graph,
    assert_matches_reference,
    assert_not_rewritten,
    assert_rewrites,
    compile_without_codegen,
)
from sparse_inductor.testing._variation import varied
from support import heavy


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(8, 20)

    def forward(self, hidden, mask):
        return (torch.log1p(torch.relu(self.decoder(hidden))) * mask.unsqueeze(-1)).amax(1)


class LogitsToo(Head):
    def forward(self, hidden, mask):
        logits = self.decoder(hidden)
        return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1), logits


ARGS = (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.int64))


def failing(assertion, *args, **kwargs) -> str:
    with pytest.raises(AssertionError) as caught:
        assertion(*args, **kwargs)
    return str(caught.value)


# Assertions about rewrites


def test_the_rewrites_are_counted():
    explanation = assert_rewrites(Head(), ARGS, {"splade_head": 1})
    assert explanation.report.rewrites[0].pattern == "splade_head"
    assert_rewrites(LogitsToo(), ARGS, {"splade_head": 0})
    assert_rewrites(LogitsToo(), ARGS, {})


def test_a_missing_rewrite_shows_the_nearest_miss_and_the_graph():
    message = failing(assert_rewrites, LogitsToo(), ARGS, {"splade_head": 1})
    assert message.startswith("expected 1 rewrite of splade_head, got 0")
    assert "because the logits are also returned" in message
    assert "test_testing.py:" in message and "logits = self.decoder(hidden)" in message
    assert "F.linear(hidden, decoder.weight, decoder.bias)" in message


def test_a_rewrite_too_many_shows_the_rewrite_and_the_difference():
    for assertion in (
        lambda: assert_rewrites(Head(), ARGS, {}),
        lambda: assert_rewrites(Head(), ARGS, {"splade_head": 0}),
        lambda: assert_not_rewritten(Head(), ARGS, "splade_head"),
    ):
        message = failing(assertion)
        assert "expected" in message
        assert "replaced linear, relu, log1p, mul, amax -> sparse_inductor::splade_head" in message
        assert "-relu: float32[2, 6, 20] = torch.relu(linear)" in message.replace("  -", "-")


def test_without_a_near_miss_the_message_says_what_is_looked_for():
    message = failing(assert_rewrites, torch.sin, ARGS[:1], {"splade_head": 1})
    assert "nothing here resembles splade_head" in message and "amax" in message


def test_graph_breaks_are_shown():
    def broken(x, m):
        x = x + 1
        torch._dynamo.graph_break()
        return x * m.unsqueeze(-1)

    message = failing(assert_rewrites, broken, ARGS, {"splade_head": 1})
    assert "graph break at test_testing.py:" in message


def test_a_reason_and_its_line_may_be_asked_for():
    ask = lambda **wanted: assert_not_rewritten(LogitsToo(), ARGS, "splade_head", **wanted)
    ask()
    ask(reason="also returned")
    ask(reason="also returned", at="logits = self.decoder")
    assert "expected a near miss of splade_head because 'masked'" in failing(ask, reason="masked")
    message = failing(ask, reason="also returned", at="amax")
    assert "at a line with 'amax'" in message and "because the logits are also returned" in message


@pytest.mark.parametrize(("assertion", "said"), [
    (lambda: assert_rewrites(Head(), ARGS[0]), "args must be a tuple of arguments, got Tensor"),
    (lambda: assert_matches_reference(Head(), ARGS[0]), "args must be a tuple of arguments, got Tensor"),
    (lambda: assert_rewrites(Head(), ARGS, "splade_head"), "expected must be a dict .*got 'splade_head'"),
    (lambda: assert_matches_reference(Head, ARGS), "a function or a module, got <class .*Head"),
])  # fmt: skip
def test_a_wrong_argument_is_named(assertion, said):
    with pytest.raises(TypeError, match=said):
        assertion()


@pytest.mark.parametrize(
    "assertion",
    [
        lambda: assert_rewrites(Head(), ARGS, {"splade_hat": 1}),
        lambda: assert_not_rewritten(Head(), ARGS, "splade_hat"),
        lambda: assert_matches_reference(Head(), ARGS, only="splade_hat"),
    ],
)
def test_an_unknown_pattern_is_named(assertion):
    with pytest.raises(ValueError, match="no pattern 'splade_hat'; known patterns: .*splade_head"):
        assertion()


def test_the_graph_as_a_snapshot():
    assert_graph(
        lambda x: torch.relu(x + 1),
        (torch.ones(3),),
        """
x: float32[3]
add: float32[3] = operator.add(x, 1)
relu: float32[3] = torch.relu(add)
return (relu,)
""",
    )


def test_a_snapshot_that_differs_shows_the_difference():
    assert "+hidden: float32[2, 6, 8]" in failing(assert_graph, Head(), ARGS, "\n", before=True)


@pytest.mark.heavy
def test_a_snapshot_is_accepted_on_request(tmp_path):
    test = tmp_path / "test_mine.py"
    test.write_text(
        "import torch\nfrom sparse_inductor.testing import assert_graph\n\n"
        'def test():\n    assert_graph(lambda x: x + 1, (torch.ones(3),), """""")\n'
    )
    accept = "EXPECTTEST_ACCEPT"
    for variables in ({accept: "1"}, {}):
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", test)
        python(*command, cwd=tmp_path, path=[ROOT], without=[accept], **variables)
    assert "add: float32[3] = operator.add(x, 1)" in test.read_text()


# Assertions about results


FIRST, *OTHERS = registered()["splade_head"].examples


@pytest.mark.parametrize("example", [FIRST, *map(heavy, OTHERS)], ids=lambda e: e.name)
def test_the_examples_match_the_reference(example):
    assert_matches_reference(
        *example.build(),
        dtypes=(torch.float32, torch.bfloat16, torch.float64),
        dynamic=(False, True),
    )


@pytest.mark.heavy
def test_generated_code_matches_the_reference():
    assert_matches_reference(Head(), ARGS, codegen=True)


def test_what_cannot_fail_is_refused():
    assert "nothing was rewritten" in failing(assert_matches_reference, LogitsToo(), ARGS)
    assert_matches_reference(LogitsToo(), ARGS, must_rewrite=False)
    head = Head().requires_grad_(False)
    with pytest.raises(ValueError, match="neither a parameter of fn nor an argument requires"):
        assert_matches_reference(head, ARGS)
    assert_matches_reference(head, ARGS, grads=False)


@pytest.mark.parametrize("name", ["mask dropped", "bias dropped"])
def test_a_mask_of_ones_and_a_bias_of_zeros_hide_no_mistake(name):
    head = Head()
    nn.init.zeros_(head.decoder.bias)
    with bug_named(name).plant():
        assert "inputs varied" in failing(assert_matches_reference, head, ARGS, grads=False)
        assert_matches_reference(
            head, ARGS, grads=False, vary=0
        )  # the given inputs alone do not show the mistake


def test_nothing_of_the_callers_changes():
    head = Head()
    args = (ARGS[0].clone().requires_grad_(), ARGS[1].clone())
    state = {k: v.clone() for k, v in head.state_dict().items()}
    random = torch.get_rng_state()
    assert_matches_reference(head, args)
    torch.testing.assert_close(dict(head.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(args[0], ARGS[0]) and args[0].grad is None
    assert all(p.grad is None for p in head.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not sparse_inductor.report()


def test_a_function_that_closes_over_a_module():
    head = Head().double()
    args = (ARGS[0].double(), ARGS[1])
    assert_matches_reference(lambda x, m: head(x, m) * 2, args, dtypes=(torch.float32, None))
    with bug_named("gradient of the bias dropped").plant():
        message = failing(assert_matches_reference, lambda x, m: head(x, m) * 2, args)
    assert "gradient of decoder.bias" in message


def test_a_result_that_is_added_to_the_arguments_is_no_argument():
    """As the modules of sentence-transformers do."""

    class Pooled(Head):
        def forward(self, features):
            features["embedding"] = super().forward(features["hidden"], features["mask"])
            return features

    features = {"hidden": torch.randn(2, 5, 8, requires_grad=True), "mask": torch.ones(2, 5)}
    assert_matches_reference(Pooled(), [features], vary=0)
    assert [*features] == ["hidden", "mask"]


def test_variation_keeps_what_inputs_mean():
    ids = torch.tensor([[5, 0, 7]])
    mask, bias = torch.ones(40, 40, dtype=torch.int64), torch.zeros(40)
    additive = torch.zeros(40, 40)
    additive[:, 30:] = -1e4
    weight = torch.nn.Parameter(torch.zeros(40))
    new_ids, new_mask, new_additive, new_weight, new_bias = varied(
        (ids, mask, additive, weight, bias), 1
    )
    assert torch.equal(new_ids, ids)
    assert set(new_mask.unique().tolist()) == {0, 1} and new_mask.dtype == torch.int64
    assert torch.equal(new_additive.flatten().sort()[0], additive.flatten().sort()[0])
    assert not torch.equal(new_additive, additive)
    assert new_weight.requires_grad and new_weight.unique().numel() == 40
    assert set(new_bias.unique().tolist()) <= {0.0, 1.0}


# The plugin

PLUGIN_TESTS = """
import pytest

@pytest.mark.needs_gpu
def test_gpu(): pass

def test_nan(nan_filled_memory):
    import torch
    assert torch.empty(8).isnan().all()

def test_nan_is_over():
    import torch
    assert not torch.utils.deterministic.fill_uninitialized_memory or not torch.are_deterministic_algorithms_enabled()

def test_kernel(triton_device):
    assert triton_device.type == "cpu"

def test_clean(clean_dynamo):
    import sparse_inductor
    sparse_inductor.enable()

def test_still_clean(clean_dynamo):
    from sparse_inductor import session
    assert session._state.session is None

def test_raises(clean_dynamo):
    from sparse_inductor.rewrite import failures
    failures.append("mine: RuntimeError: oops")

@pytest.mark.breaks_pattern
def test_raises_on_purpose(clean_dynamo):
    from sparse_inductor.rewrite import failures
    failures.append("mine: RuntimeError: oops")
"""


def run_pytest(tmp_path: Path, text: str, *options: str) -> str:
    shutil.copy(ROOT / "tests" / "toy.py", tmp_path / "toy.py")
    (tmp_path / "test_theirs.py").write_text(text)
    command = ["-m", "pytest", "-rA", "--strict-markers", "-p", "no:cacheprovider"]
    command += ["-p", "sparse_inductor.pytest_plugin", *options, "test_theirs.py"]
    done = python(*command, cwd=tmp_path, path=[ROOT], check=False, TRITON_INTERPRET="0")
    return done.stdout + done.stderr


@pytest.mark.heavy
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_markers_and_fixtures(tmp_path):
    out = run_pytest(tmp_path, PLUGIN_TESTS, "--triton-interpret")
    assert "no CUDA GPU" in out
    for name in "nan nan_is_over kernel[interpreter] clean still_clean raises_on_purpose".split():
        assert f"PASSED test_theirs.py::test_{name}\n" in out, out
    assert "1 error" in out and "patterns raised: ['mine: RuntimeError: oops']" in out
    assert "Triton's interpreter is on" in out


def test_the_plugin_is_light(tmp_path):
    text = "import sys\ndef test():\n    assert 'torch' not in sys.modules\n"
    assert "1 passed" in run_pytest(tmp_path, text)


def test_the_plugin_is_an_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    assert '"sparse_inductor.pytest_plugin" = "sparse_inductor.pytest_plugin"' in text


def test_compiling_without_a_compiler_shows_what_became_of_it():
    head, (hidden, mask) = Head(), ARGS
    logits = hidden.shape[0] * hidden.shape[1] * head.decoder.out_features
    with torch.no_grad():
        plain = compile_without_codegen(head)
        torch.testing.assert_close(plain(hidden, mask), head(hidden, mask))
        assert plain.calls("splade_head") == 0 and len(plain.matmuls(logits)) == 1
        torch._dynamo.reset()
        with sparse_inductor.enabled(only="splade_head"):
            rewritten = compile_without_codegen(head, fullgraph=True)
            for _ in range(2):
                torch.testing.assert_close(rewritten(hidden, mask), head(hidden, mask))
    assert rewritten.dynamo_graphs == len(rewritten.graphs) == 1
    assert rewritten.calls("splade_head") == 1 and not rewritten.matmuls(logits)
