"""The pass: it leaves valid graphs whatever a pattern does, changes only matched nodes, and chooses
sensibly between matches."""

from __future__ import annotations

import importlib
import logging
import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

import sparse_inductor
from programs import Block
from sparse_inductor import compat, graph_run, rewrite
from sparse_inductor.pattern import Miss
from sparse_inductor.reporting.records import Report
from sparse_inductor.testing import compile_without_codegen
from toy import Toy, ToyMatch


def trace(fn: Callable) -> fx.GraphModule:
    return fx.symbolic_trace(fn)


def run(gm: fx.GraphModule, *patterns) -> Report:
    report = Report()
    rewrite.RewritePass(patterns, report)(gm.graph)
    gm.recompile()
    return report


def targets(gm: fx.GraphModule) -> list[str]:
    return [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"]


def nodes(gm: fx.GraphModule) -> list[tuple]:
    return [(n, n.op, n.target, n.args, n.kwargs, tuple(n.users)) for n in gm.graph.nodes]


def two(x):
    return torch.relu(torch.relu(x + 1) + 1)


def test_a_match_is_replaced_and_recorded():
    gm = trace(two)
    report = run(gm, Toy())
    assert targets(gm) == ["add", "hardtanh", "add", "hardtanh"]
    assert [r.replaced for r in report.rewrites] == [("add", "relu")] * 2
    torch.testing.assert_close(gm(torch.arange(-3.0, 3.0)), two(torch.arange(-3.0, 3.0)))


def test_a_second_run_finds_nothing():
    gm = trace(two)
    run(gm, Toy())
    report = run(gm, Toy())
    assert not report.rewrites and not report.near_misses


def test_matches_are_counted_where_inductor_counts_its_own():
    before = counters["inductor"]["sparse_inductor_toy"]
    run(trace(two), Toy())
    assert counters["inductor"]["sparse_inductor_toy"] == before + 2


def test_dead_code_of_others_stays():
    def fn(x):
        x.add_(1)
        torch.sin(x)
        return torch.relu(x + 1)

    gm = trace(fn)
    run(gm, Toy())
    assert "sin" in targets(gm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_method"] == ["add_"]


def test_a_matched_node_that_others_read_stays():
    def fn(x):
        y = x + 1
        return torch.relu(y), y

    gm = trace(fn)
    run(gm, Toy())
    assert targets(gm) == ["add", "add", "hardtanh"]


def test_getitems_of_matched_nodes_go_with_them():
    def fn(x):
        values, _ = torch.max(x, 0)
        return torch.relu(values + 1)

    class Larger(Toy):
        def match(self, node, view):
            found = super().match(node, view)
            values = found.inputs[0]
            found.matched_nodes = (values.args[0], *found.matched_nodes)
            found.inputs = (values.args[0].args[0],)
            return found

    gm = trace(fn)
    run(gm, Larger())
    assert targets(gm) == ["add", "hardtanh"]


def test_of_two_patterns_the_larger_match_wins():
    class Larger(Toy):
        def match(self, node, view):
            found = super().match(node, view)
            if isinstance(found, ToyMatch) and found.inputs[0].target is torch.relu:
                inner = found.inputs[0]
                found.matched_nodes = (inner.args[0], inner, *found.matched_nodes)
                return found
            return None

    report = run(trace(two), Toy("small"), Larger("large"))
    assert [r.pattern for r in report.rewrites] == ["large"]


def test_a_near_miss_inside_a_match_is_not_reported():
    class Inner(Toy):
        def match(self, node, view):
            return Miss("not mine", node)

    report = run(trace(two), Toy(), Inner("inner"))
    assert len(report.rewrites) == 2 and not report.near_misses


def test_resolve_chooses_among_matches():
    class Choosy(Toy):
        def resolve(self, matches, view):
            kept, *rest = sorted(matches, key=lambda m: m.anchor.name)
            return [kept], [Miss("one is enough", m.anchor) for m in rest]

    report = run(trace(two), Choosy())
    assert len(report.rewrites) == 1
    assert [m.reason for m in report.near_misses] == ["one is enough"]


# Patterns that fail


@pytest.mark.breaks_pattern
@pytest.mark.parametrize("where", ["match", "resolve"])
def test_a_pattern_that_raises_is_reported_and_asked_about_the_next_graph(where, monkeypatch):
    def fail(*_):
        raise KeyError("a bug")

    bad = Toy("bad")
    monkeypatch.setattr(bad, where, fail, raising=False)
    gm = trace(two)
    report = run(gm, bad, Toy())
    assert targets(gm) == ["add", "hardtanh", "add", "hardtanh"]
    assert {r.pattern for r in report.rewrites} == {"toy"}
    assert "bad: KeyError: 'a bug'" in rewrite.failures
    monkeypatch.undo()
    assert len(run(trace(two), bad).rewrites) == 2


@pytest.mark.breaks_pattern
def test_a_failure_is_logged_once_a_graph_with_its_traceback(caplog):
    def fail(*_):
        raise KeyError("a bug")

    bad = Toy("bad")
    bad.match = fail
    with caplog.at_level(logging.DEBUG, "sparse_inductor"):
        report = run(trace(two), bad)
    (record,) = [r for r in caplog.records if r.exc_info]
    assert record.levelno == logging.DEBUG and record.exc_info[0] is KeyError
    assert {m.reason for m in report.near_misses} == {"the pattern raised: KeyError: 'a bug'"}
    assert all(r.levelno <= logging.INFO for r in caplog.records)


@pytest.mark.breaks_pattern
def test_a_match_without_its_anchor_is_a_mistake_of_its_pattern():
    class Bad(Toy):
        def match(self, node, view):
            found = super().match(node, view)
            found.matched_nodes = found.matched_nodes[:-1]
            return found

    report = run(trace(two), Bad("bad"))
    reason = "the pattern raised: AssertionError: matched_nodes lacks the anchor"
    assert not report.rewrites and {m.reason for m in report.near_misses} == {reason}


@pytest.mark.breaks_pattern
@pytest.mark.parametrize("harm", ["raise midway", "erase a node", "move a node", "invalid order"])
def test_a_failed_replace_leaves_the_graph_as_it_was(harm):
    class BadMatch(ToyMatch):
        def replace(self):
            graph = self.anchor.graph
            super().replace()
            if harm == "invalid order":
                first = next(iter(graph.nodes))
                first.meta["ours"] = self.anchor.meta["ours"] = True
                with graph.inserting_before(first):
                    new = graph.call_function(operator.neg, (self.anchor.args[0],))
                new.prepend(new.next)
                self.anchor.args = (new,)
                list(graph.nodes)[-1].prepend(new)
                return
            if harm == "erase a node":
                graph.erase_node(self.anchor)
            if harm == "move a node":
                list(graph.nodes)[-1].prepend(next(iter(graph.nodes)))
            raise RuntimeError("half way")

    class Bad(Toy):
        def match(self, node, view):
            found = super().match(node, view)
            return BadMatch(found.anchor, found.matched_nodes, found.inputs, pattern=self.name)

    gm = trace(two)
    before, text = nodes(gm), gm.code
    metadata = [(dict(n.meta), n.name) for n in gm.graph.nodes]
    report = run(gm, Bad("bad"))
    gm.graph.lint()
    assert not report.rewrites
    assert "replacing it raised" in report.near_misses[0].reason
    if harm == "erase a node":
        assert [n[2] for n in nodes(gm)] == [n[2] for n in before]
    else:
        assert nodes(gm) == before
        assert gm.code == text
    assert [(n.meta, n.name) for n in gm.graph.nodes] == metadata
    x = torch.arange(-3.0, 3.0)
    torch.testing.assert_close(gm(x), two(x))


@pytest.mark.breaks_pattern
@pytest.mark.parametrize("valid", [True, False])
def test_one_bad_replace_does_not_cost_the_others_theirs(valid):
    class BadMatch(ToyMatch):
        def replace(self):
            if valid:
                raise RuntimeError("half way")
            last = list(self.anchor.graph.nodes)[-1]
            last.prepend(self.anchor.args[0])
            self.anchor.args[0].prepend(self.anchor)

    class Bad(Toy):
        anchors = frozenset({"sigmoid"})

        def match(self, node, view):
            return BadMatch(node, (node,), tuple(node.all_input_nodes), pattern=self.name)

    gm = trace(lambda x: torch.sin(torch.sigmoid(torch.relu(x + 1))))
    report = run(gm, Bad("bad"), Toy())
    assert targets(gm) == ["add", "hardtanh", "sigmoid", "sin"]
    assert [r.pattern for r in report.rewrites] == ["toy"]
    assert [f.split(":")[0] for f in rewrite.failures] == ["bad"]


@pytest.mark.breaks_pattern
def test_of_two_matches_of_a_pattern_only_the_one_that_fails_is_given_up():
    class Picky(Toy):
        def match(self, node, view):
            found = super().match(node, view)
            if found.inputs[0].op == "placeholder":

                def replace():
                    ToyMatch.replace(found)
                    raise RuntimeError("not the first one")

                found.replace = replace
            return found

    gm = trace(two)
    report = run(gm, Picky())
    assert targets(gm) == ["add", "relu", "add", "hardtanh"]
    assert len(report.rewrites) == 1
    assert [m.reason for m in report.near_misses] == [
        "replacing it raised: RuntimeError: not the first one"
    ]


@pytest.mark.breaks_pattern
@pytest.mark.parametrize("part", ["add", "unseen", "log_graph"])
def test_a_report_that_fails_leaves_the_graph_as_it_was(part, monkeypatch):
    def fail(*_):
        raise RuntimeError("no report today")

    owner = rewrite.records if part == "log_graph" else Report
    monkeypatch.setattr(owner, part, fail)
    gm = trace(two)
    before = nodes(gm)
    report = run(gm, Toy())
    assert nodes(gm) == before and not report.rewrites


class Guarding(Toy):
    """A pattern that reads a size, and then declines, raises or matches."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def match(self, node, view):
        x = node.args[0].meta["example_value"]
        assert x.shape[0] % 3 == 1  # adds a guard and a known divisibility
        x.nonzero()  # adds a data-dependent symbol
        if self.end == "declines":
            return Miss("no", node)
        if self.end == "raises":
            raise RuntimeError("no")
        return super().match(node, view)


@pytest.mark.breaks_pattern
@pytest.mark.parametrize("end", ["declines", "raises", "matches"])
def test_what_is_known_of_sizes_is_kept_for_a_rewrite_alone(end):
    def known(gm):
        env = compat.shape_env_of(n.meta.get("example_value") for n in gm.graph.nodes)
        assert env is not None
        return {
            name: [str(v) for v in value] if isinstance(value, list) else str(value)
            for name, value in vars(env).items()
            if name in ("guards", "replacements", "divisible", "axioms", "var_to_range",
                        "deferred_runtime_asserts", "pending_fresh_unbacked_symbols",
                        "unbacked_symint_counter", "size_like")
        }  # fmt: skip

    seen = []

    def backend(gm, inputs):
        before = known(gm)
        rewrite.RewritePass([Guarding(end)], Report()).run(gm.graph)
        seen.append((before, known(gm)))
        return gm.forward

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(lambda x: torch.relu(x + 1), backend=backend, dynamic=True)(torch.randn(7))
    ((before, after),) = seen
    assert (before == after) == (end != "matches")
    assert after["pending_fresh_unbacked_symbols"] == before["pending_fresh_unbacked_symbols"] == []


def _planted(*args, **kwargs):
    raise RuntimeError("planted")


@pytest.mark.breaks_pattern
@pytest.mark.parametrize("part", ["shape function", "backward"])
def test_an_operator_that_cannot_be_traced_is_not_put_in(part, monkeypatch):
    op = importlib.import_module("sparse_inductor.ops.relu_ffn")
    if part == "backward":
        monkeypatch.setattr(op._ReluFfn, "backward", staticmethod(_planted))
    else:
        monkeypatch.setattr(op, "_fake", _planted)
        monkeypatch.setattr(op, "_check", _planted)
    block, x = Block(8), torch.randn(5, 8, requires_grad=True)
    report = sparse_inductor.report()
    for planted in (True, False):
        report.clear()
        torch._dynamo.reset()
        with sparse_inductor.enabled(only="relu_ffn"):
            y = compile_without_codegen(block)(x)
        torch.testing.assert_close(y, block(x))
        (g,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(g, torch.autograd.grad(block(x).sum(), x)[0])
        if planted:
            (miss,) = report.near_misses
            assert miss.reason == "replacing it raised: RuntimeError: planted"
            monkeypatch.undo()
        else:
            assert len(report.rewrites) == 1


@pytest.mark.breaks_pattern
def test_a_walker_that_fails_does_not_break_the_compile(monkeypatch):
    def fail(graph):
        raise ValueError("what is this node")

    monkeypatch.setattr(graph_run, "GraphView", fail)
    gm = trace(two)
    report = run(gm, Toy())
    assert targets(gm) == ["add", "relu", "add", "relu"]
    assert "the pass failed" in report.near_misses[0].reason
