"""Output for users: report, log lines, structured trace, explain."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from pathlib import Path

import pytest
import torch
from sparse_inductor.patterns.entmax import sorted_sparsemax

import sparse_inductor
from processes import python, threads
from sparse_inductor import SparseIndex
from sparse_inductor.reporting.findings import NearMiss, Rewrite
from sparse_inductor.reporting.records import Report
from sparse_inductor.reporting.source import source_of
from toy import captured, relu_alone, relu_of_sum

X = torch.randn(4)


pytestmark = pytest.mark.usefixtures("toy")


def run_script(code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(code)
    return python(script, **env)


def line_of(fn) -> str:
    return f"toy.py:{fn.__code__.co_firstlineno + 1}"


# Records


def test_a_block_whose_activations_vanish_is_no_attention():
    up, down = torch.randn(8, 4), torch.randn(4, 8)
    found = sparse_inductor.explain(lambda x: torch.relu(x @ up.T) * 1e-25 @ down.T, X[None])
    assert not any("entmax" in miss.pattern for miss in found.report.near_misses)


def test_the_sum_that_normalises_masked_probabilities_is_no_attention():
    def attend(q, k, v, mask):
        p = sorted_sparsemax(q @ k.mT) * mask
        return (p / (p.sum(-1, keepdim=True) + 1e-9)) @ v

    with sparse_inductor.enabled(only="entmax_attention"):
        found = sparse_inductor.explain(attend, *torch.randn(3, 2, 4, 8), torch.ones(4))
    (miss,) = found.report.near_misses
    assert miss.reason.startswith("mul changes the probabilities")


def test_a_rewrite_says_what_where_and_of_what():
    sparse_inductor.enable(only="toy")
    captured(relu_of_sum, X)
    assert sparse_inductor.report().rewrites == [
        Rewrite(
            pattern="toy",
            stage="pre_grad",
            location=line_of(relu_of_sum),
            op="hardtanh",
            replaced=("add", "relu"),
            inputs=(((4,), torch.float32),),
            bytes_saved=3 << 20,
            note="",
            source="return torch.relu(x + 1)",
        )
    ]


def test_a_near_miss_says_where_and_why():
    sparse_inductor.enable(only="toy")
    captured(relu_alone, X)
    expected = NearMiss(
        "toy", "pre_grad", line_of(relu_alone), "its input is not a sum", "return torch.relu(x)"
    )
    assert sparse_inductor.report().near_misses == [expected]


def test_symbolic_sizes_are_text():
    sparse_inductor.enable(only="toy")
    torch._dynamo.mark_dynamic(x := torch.randn(5, 2), 0)
    captured(relu_of_sum, x)
    ((shape, _dtype),) = sparse_inductor.report().rewrites[0].inputs
    assert isinstance(shape[0], str) and shape[1] == 2


def test_the_same_near_miss_is_listed_once_a_compile():
    def twice(x):
        return [torch.relu(y) for y in (x, x * 2)]

    sparse_inductor.enable(only="toy")
    captured(twice, X)
    assert len(sparse_inductor.report().near_misses) == 1
    torch._dynamo.reset()
    captured(twice, X)
    assert len(sparse_inductor.report().near_misses) == 2


def test_the_report_lasts_until_it_is_cleared():
    with sparse_inductor.enabled(only="toy"):
        captured(relu_of_sum, X)
    report = sparse_inductor.report()
    assert (
        report is sparse_inductor.report()
        and report.rewrites
        and report.pass_ms > 0
        and report.graphs == 1
    )
    report.clear()
    assert not report and report.pass_ms == 0 and report.graphs == 0


def test_threads_may_add_and_read():
    report = Report()
    miss = [NearMiss("toy", "pre_grad", "a.py:1", "reason")]

    def add():
        for _ in range(200):
            report.add([], miss, 1.0, {"toy": 1.0})
            str(report)

    with threads(*[add] * 4):
        pass
    assert len(report.near_misses) == report.graphs == 800
    assert report.pattern_ms == {"toy": 800.0}


def test_source_prefers_the_innermost_frame_outside_torch():
    node = next(iter(torch.fx.symbolic_trace(relu_alone).graph.nodes))
    inside_torch = f'  File "{torch.__path__[0]}/nn/functional.py", line 10, in relu\n    return torch.relu(input)\n'
    node.meta["stack_trace"] = (
        '  File "/home/me/train.py", line 7, in main\n    model(x)\n'
        '  File "/home/me/model.py", line 41, in forward\n    h = F.relu(h)\n' + inside_torch
    )
    assert source_of(node).location == "model.py:41"
    assert source_of(node).text == "h = F.relu(h)"


# Text and JSON


def sample() -> Report:
    report = Report()
    rewrite = Rewrite(
        "splade_head",
        "pre_grad",
        "model.py:41",
        "sparse_inductor::splade_head",
        ("linear", "mul", "relu", "log1p", "amax"),
        (((8, 128, 768), torch.bfloat16), (("s0", 768), torch.bfloat16)),
        62_500_000,
        "mask is boolean",
        "return torch.log1p(torch.relu(logits * mask)).amax(1)",
    )
    miss = NearMiss(
        "relu_ffn",
        "pre_grad",
        "ffn.py:12",
        "the activations are also returned (ffn.py:14)",
        "h = act(x)",
    )
    report.add([rewrite, rewrite], [miss], 4.25, {"splade_head": 3.5, "relu_ffn": 0.5})
    return report


def test_the_text_of_a_report():
    expected = """\
sparse_inductor: 2 rewrites, 1 near miss in 1 graph; the pass took 4.2 ms

splade_head
  model.py:41  (2 times)
      return torch.log1p(torch.relu(logits * mask)).amax(1)
      replaced linear, mul, relu, log1p, amax -> sparse_inductor::splade_head
      inputs   bfloat16[8, 128, 768], bfloat16[s0, 768]
      saved    59.6 MiB no longer kept for backward
      note     mask is boolean

not rewritten, but nearly
  ffn.py:12  relu_ffn
      h = act(x)
      because the activations are also returned (ffn.py:14)"""
    assert str(sample()) == expected


def test_the_text_of_an_empty_report_says_what_to_do():
    assert "enable() before torch.compile" in str(Report())


def test_json_holds_everything():
    data = json.loads(sample().to_json())
    assert data["version"] == 1
    assert data["pass_ms"] == 4.25 and data["graphs"] == 1
    assert data["pattern_ms"] == {"relu_ffn": 0.5, "splade_head": 3.5}
    assert data["rewrites"][0] == {
        "pattern": "splade_head",
        "stage": "pre_grad",
        "location": "model.py:41",
        "op": "sparse_inductor::splade_head",
        "replaced": ["linear", "mul", "relu", "log1p", "amax"],
        "inputs": [
            {"shape": [8, 128, 768], "dtype": "bfloat16"},
            {"shape": ["s0", 768], "dtype": "bfloat16"},
        ],
        "bytes_saved": 62_500_000,
        "note": "mask is boolean",
        "source": "return torch.log1p(torch.relu(logits * mask)).amax(1)",
    }
    assert data["near_misses"][0]["reason"] == "the activations are also returned (ffn.py:14)"


# Logs


def test_one_info_line_a_pattern(caplog):
    def both(x):
        return torch.relu(x + 1), torch.relu(x)

    sparse_inductor.enable(only="toy")
    with caplog.at_level(logging.INFO, "sparse_inductor"):
        captured(both, X)
    (line,) = [r.message for r in caplog.records]
    assert re.fullmatch(
        r"toy: 1 rewrite \(test_report.py:\d+\), 3.0 MiB no longer kept for backward, "
        r"1 near miss \(test_report.py:\d+: its input is not a sum\), [\d.]+ ms",
        line,
    )


SCRIPT = """
import sys, torch, sparse_inductor, toy
sparse_inductor.register(toy.Toy())
sparse_inductor.enable(only="toy")
print(toy.captured(toy.relu_of_sum, torch.randn(4)))
"""


def test_torch_logs_turns_the_log_on(tmp_path):
    done = run_script(SCRIPT, tmp_path, TORCH_LOGS="+sparse_inductor")
    assert "hardtanh" in done.stdout
    assert "toy: 1 rewrite (toy.py:" in done.stderr
    assert "graph before:" in done.stderr and "graph after:" in done.stderr


@pytest.mark.heavy
def test_the_log_is_silent_without_it(tmp_path):
    done = run_script(SCRIPT, tmp_path)
    assert "rewrite" not in done.stderr


@pytest.mark.heavy
def test_torch_logs_leaves_the_operators_importable(tmp_path):
    # torch imports the package and its subpackages to find their loggers while torch itself is only
    # partly imported.
    code = "import torch, sparse_inductor\nsparse_inductor.ops\n"
    run_script(code, tmp_path, TORCH_LOGS="+sparse_inductor")


@pytest.mark.heavy
def test_the_structured_trace_holds_an_artifact(tmp_path):
    run_script(SCRIPT, tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    text = "".join(f.read_text() for f in (tmp_path / "trace").iterdir())
    assert '"name": "sparse_inductor"' in text
    assert "return torch.relu(x + 1)" in text


# Import


def test_the_public_names_are_there():
    for name in (
        "enable",
        "disable",
        "enabled",
        "options",
        "report",
        "explain",
        "register",
        "SparseIndex",
    ):
        assert callable(getattr(sparse_inductor, name))
        assert name in dir(sparse_inductor) and name in sparse_inductor.__all__
    assert sparse_inductor.SparseIndex is SparseIndex
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sparse_inductor.nonsense


# explain


def test_explain_shows_report_graphs_and_diff():
    explanation = sparse_inductor.explain(relu_of_sum, X)
    assert [r.pattern for r in explanation.report.rewrites] == ["toy"]
    assert (
        "torch.relu" in explanation.graphs[0].before and "hardtanh" in explanation.graphs[0].after
    )
    assert "-        relu" in explanation.diff and "+        hardtanh" in explanation.diff
    assert str(explanation).startswith("sparse_inductor: 1 rewrite") and "hardtanh" in str(
        explanation
    )
    assert not sparse_inductor.report()


def test_explain_names_graph_breaks():
    def broken(x):
        x = x * 2
        torch._dynamo.graph_break()
        return torch.relu(x + 1)

    explanation = sparse_inductor.explain(broken, X)
    (one,) = explanation.graph_breaks
    assert one.location == f"test_report.py:{broken.__code__.co_firstlineno + 2}"
    assert "graph_break" in one.reason
    assert len(explanation.graphs) == 2 and "graph breaks" in str(explanation)


def test_explain_says_why_a_frame_is_left_to_python():
    """What it calls is compiled by itself: no graph ends where the frame does."""

    def doubled(x):
        return x * 2

    def looped(x):
        for _ in range(2):
            x = doubled(x)
            torch._dynamo.graph_break()
        return x

    explanation = sparse_inductor.explain(looped, X)
    (one,) = explanation.graph_breaks
    assert explanation.graphs and "graph_break" in one.reason and one.why in str(explanation)
    assert not sparse_inductor.explain(doubled, X).graph_breaks


def test_explain_says_why_no_graph_was_captured():
    def picked(x, at):
        return sum(x[at[i]] for i in (0, 1))

    for _ in range(2):
        explanation = sparse_inductor.explain(picked, X, torch.zeros(2).long())
        (one,) = explanation.graph_breaks
        assert one.why == "Data dependent operator"
        assert "captured no graph" in str(explanation) and one.why in str(explanation)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.relu(self.norm(torch.dropout(self.linear(x), 0.5, True)) + 1)


@pytest.mark.parametrize("kind", ["module", "method", "closure", "compiled"])
def test_explain_changes_nothing_of_the_callers(kind):
    net = Net()
    x = torch.randn(3, 4)
    fn = {
        "module": net,
        "method": net.forward,
        "closure": lambda x: net(x),
        "compiled": torch.compile(net),
    }[kind]
    state, rng = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    explanation = sparse_inductor.explain(fn, x)
    assert len(explanation.report.rewrites) == 1
    torch.testing.assert_close(dict(net.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", ["class", "nothing", "text"])
def test_explain_refuses_what_is_no_function(kind):
    """`torch.compile` would change the class, and with it every such module of the program."""
    Mine = type("Mine", (Net,), {})
    fn, before = {"class": Mine, "nothing": None, "text": "Net"}[kind], dict(vars(Mine))
    with pytest.raises(TypeError, match="expected a function or a module, got "):
        sparse_inductor.explain(fn, torch.randn(3, 4))
    assert dict(vars(Mine)) == before


def test_explain_does_not_change_the_arguments():
    def in_place(x):
        return torch.relu(x.mul_(2) + 1)

    x = torch.ones(4)
    assert sparse_inductor.explain(in_place, x).report.rewrites
    assert torch.equal(x, torch.ones(4))


def test_explain_does_not_change_parameters_that_the_model_writes_to():
    class Momentum(Net):
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return super().forward(x)

    net = Momentum()
    before = net.linear.weight.detach().clone()
    assert sparse_inductor.explain(net, torch.randn(3, 4)).report.rewrites
    assert torch.equal(net.linear.weight, before)
    with torch.no_grad():
        net.linear.weight.add_(1)  # the caller's tensors are no copies of anything afterwards
    assert torch.equal(net.linear.weight, before + 1)


def test_explain_does_not_copy_a_large_model(monkeypatch):
    import copy

    net = Net()
    net.table = torch.nn.Parameter(torch.zeros(1 << 20))
    copied = []
    real = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda *args: copied.append(real(*args)) or copied[-1])
    sparse_inductor.explain(net, torch.randn(3, 4))
    assert torch._C._is_cow_tensor(copied[0].table)


def test_explain_uses_the_enabled_selection():
    sparse_inductor.enable(only=[])
    assert not sparse_inductor.explain(relu_of_sum, X).report.rewrites


def test_explain_keeps_what_was_compiled():
    frames = []

    def backend(gm, inputs):
        frames.append(gm)
        return gm.forward

    compiled = torch.compile(relu_of_sum, backend=backend)
    compiled(X)
    assert sparse_inductor.explain(relu_of_sum, X).report.rewrites
    assert sparse_inductor.explain(compiled, torch.randn(9)).report.rewrites
    compiled(X)
    assert len(frames) == 1
