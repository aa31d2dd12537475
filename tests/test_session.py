"""enable, disable, enabled, options: which patterns are enabled, for which code, and that all state is restored."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch._inductor import config

import sparse_inductor
from processes import threads
from sparse_inductor import compat, session, slots
from support import compile_without_codegen, registered
from toy import Toy, captured, matched, relu_alone, relu_of_sum

X = torch.randn(4)
SLOTS = ("pre_grad_custom_pass", "post_grad_custom_pre_pass")
SETTINGS = [name for name in (*SLOTS, "pre_grad_pass_timing") if compat.has_setting(name)]
needs_timing = pytest.mark.skipif(
    len(SETTINGS) < 3, reason="this torch has no pre_grad_pass_timing"
)
needs_lists = pytest.mark.skipif(
    not compat.slots_take_lists(), reason="this torch has no lists of passes"
)


pytestmark = pytest.mark.usefixtures("toys")


def saved():
    return [compat.save_setting(name) for name in SETTINGS]


# Which patterns


def test_enable_rewrites_what_is_compiled_from_then_on():
    sparse_inductor.enable(only="toy")
    assert "hardtanh" in captured(relu_of_sum, X)
    assert matched() == ["toy"]


def test_nothing_is_rewritten_without_enable():
    assert "relu" in captured(relu_of_sum, X)
    assert not sparse_inductor.report()


@pytest.mark.parametrize(
    "names", ["other", ["other"], ("other",), {"other"}, "other, ", iter(["other"]), []]
)
def test_only_takes_one_name_or_several_or_none(names):
    sparse_inductor.enable(only=names)
    captured(relu_of_sum, X)
    assert matched() == (["other"] if names else [])


@pytest.mark.parametrize(("skip", "environment"), [("toy", ""), ([], "toy,")])
def test_patterns_are_left_out(skip, environment, monkeypatch):
    monkeypatch.setenv("SPARSE_INDUCTOR_SKIP", environment)
    sparse_inductor.enable(only=["toy", "other"], skip=skip)
    captured(relu_of_sum, X)
    assert matched() == ["other"]


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_an_unknown_name_raises_with_the_known_ones_and_a_suggestion(argument):
    with pytest.raises(ValueError, match=rf"{argument}.*'toyy'.*did you mean 'toy'\?.*other.*toy"):
        sparse_inductor.enable(**{argument: "toyy"})
    assert config.pre_grad_custom_pass is None


def test_an_unknown_name_in_the_environment_raises(monkeypatch):
    monkeypatch.setenv("SPARSE_INDUCTOR_SKIP", "nonsense")
    with pytest.raises(ValueError, match="SPARSE_INDUCTOR_SKIP.*nonsense"):
        sparse_inductor.enable()


@pytest.mark.parametrize("only", [3, [3]])
def test_something_that_is_no_name_raises(only):
    with pytest.raises(TypeError, match="only takes pattern names, got 3"):
        sparse_inductor.enable(only=only)


# On and off


def test_enable_is_idempotent():
    sparse_inductor.enable()
    once = [config.pre_grad_custom_pass, config.post_grad_custom_pre_pass]
    sparse_inductor.enable()
    assert [config.pre_grad_custom_pass, config.post_grad_custom_pre_pass] == once


def test_enable_with_other_arguments_changes_the_selection():
    sparse_inductor.enable(only="toy")
    sparse_inductor.enable(only="other")
    captured(relu_of_sum, X)
    assert matched() == ["other"]


def test_disable_puts_unset_settings_back():
    before = saved()
    sparse_inductor.disable()  # nothing is enabled
    assert saved() == before
    sparse_inductor.enable()
    assert saved() != before
    sparse_inductor.disable()
    assert saved() == before


def test_disable_puts_the_users_objects_back():
    mine = [lambda graph: None] if compat.slots_take_lists() else (lambda graph: None)
    with config.patch(pre_grad_custom_pass=mine):
        sparse_inductor.enable()
        assert config.pre_grad_custom_pass is not mine
        sparse_inductor.disable()
        assert config.pre_grad_custom_pass is mine


def test_the_users_passes_run_in_their_order_and_before_ours():
    calls = []

    def first(graph):
        calls.append("first")

    def second(graph):
        calls.append("second")
        calls.append("relu" if any(n.target is torch.relu for n in graph.nodes) else "rewritten")

    mine = [first, second] if compat.slots_take_lists() else slots.Chain([first, second])
    with config.patch(pre_grad_custom_pass=mine):
        sparse_inductor.enable(only="toy")
        assert "hardtanh" in captured(relu_of_sum, X)
        sparse_inductor.disable()
    assert calls == ["first", "second", "relu"]


@needs_lists
def test_a_pass_appended_in_between_stays():
    def mine(graph):
        pass

    with config.patch(pre_grad_custom_pass=None):
        sparse_inductor.enable()
        config.pre_grad_custom_pass.append(mine)
        sparse_inductor.disable()
        assert config.pre_grad_custom_pass == [mine]


def test_a_slot_overwritten_in_between_is_left_alone_and_enable_repairs_it():
    def mine(graph):
        pass

    with config.patch(pre_grad_custom_pass=None):
        sparse_inductor.enable(only="toy")
        config.pre_grad_custom_pass = mine
        sparse_inductor.enable(only="toy")
        assert "hardtanh" in captured(relu_of_sum, X)
        config.pre_grad_custom_pass = mine
        sparse_inductor.disable()
        assert config.pre_grad_custom_pass is mine


def test_a_slot_that_takes_one_callable_holds_a_chain(monkeypatch):
    monkeypatch.setattr(compat, "slots_take_lists", lambda: False)
    calls = []
    with config.patch(pre_grad_custom_pass=calls.append):
        sparse_inductor.enable(only="toy")
        assert "hardtanh" in captured(relu_of_sum, X)
        assert isinstance(config.pre_grad_custom_pass, slots.Chain) and len(calls) == 1
        sparse_inductor.disable()
        assert config.pre_grad_custom_pass == calls.append


@needs_timing
def test_a_timing_that_the_user_chose_is_respected():
    with config.patch(pre_grad_pass_timing="late"):
        sparse_inductor.enable()
        assert config.pre_grad_pass_timing == "late"
        sparse_inductor.disable()
        assert config.pre_grad_pass_timing == "late"


def test_other_threads_are_rewritten_too():
    sparse_inductor.enable(only="toy")
    names = []
    with threads(lambda: names.extend(captured(relu_of_sum, X))):
        pass
    assert "hardtanh" in names


def test_disable_in_another_thread_turns_it_off_here():
    sparse_inductor.enable(only="toy")
    with threads(sparse_inductor.disable):
        pass
    assert "relu" in captured(relu_of_sum, X)
    sparse_inductor.enable(only="toy")
    torch._dynamo.reset()
    assert "hardtanh" in captured(relu_of_sum, X)
    assert matched() == ["toy"]
    sparse_inductor.disable()
    assert config.pre_grad_custom_pass is None


# Blocks


def test_a_block_is_on_inside_and_off_outside():
    before = saved()
    with sparse_inductor.enabled(only="toy"):
        assert "hardtanh" in captured(relu_of_sum, X)
    torch._dynamo.reset()
    assert "relu" in captured(relu_of_sum, X)
    assert saved() == before


def test_the_outer_block_comes_back():
    with sparse_inductor.enabled(only="toy"):
        with sparse_inductor.enabled(only="other"):
            pass
        captured(relu_of_sum, X)
    assert matched() == ["toy"]


@pytest.mark.parametrize("between", [lambda: None, sparse_inductor.disable])
def test_blocks_that_overlap_do_not_end_one_another(between):
    """As in two threads: neither block is nested in the other."""
    before = saved()
    first, second = sparse_inductor.enabled(only="other"), sparse_inductor.enabled(only="toy")
    first.__enter__()
    between()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "hardtanh" in captured(relu_of_sum, X)
    second.__exit__(None, None, None)
    torch._dynamo.reset()
    assert "relu" in captured(relu_of_sum, X)
    assert saved() == before


def test_a_block_ends_after_an_exception_too():
    before = saved()
    with contextlib.suppress(KeyError), sparse_inductor.enabled():
        raise KeyError
    assert saved() == before


# The warning for enabling after a compilation


def test_enable_after_a_compile_warns_and_says_what_to_do():
    captured(relu_of_sum, X)
    with pytest.warns(UserWarning, match=r"torch._dynamo.reset\(\)") as warned:
        with sparse_inductor.enabled():
            pass
        sparse_inductor.enable()
    assert [w.filename for w in warned] == [__file__] * 2  # the warning points to the caller


def test_where_warnings_are_errors_it_is_logged(caplog):
    captured(relu_of_sum, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_inductor.enable(only="toy")
    assert "torch._dynamo.reset()" in caplog.text
    torch._dynamo.reset()
    captured(relu_of_sum, X)
    assert matched() == ["toy"]


def test_enable_before_a_compile_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_inductor.enable()
        captured(relu_of_sum, X)
        sparse_inductor.enable()  # nothing changes


def test_explain_does_not_count_as_a_compile():
    sparse_inductor.explain(relu_of_sum, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_inductor.enable()


# Strict


def test_strict_raises_at_the_end_of_the_block():
    with pytest.raises(session.StrictError, match="other: nothing resembles it"):
        with sparse_inductor.enabled(only=["other"], strict=True):
            captured(torch.sin, X)


def test_strict_raises_from_disable_after_everything_was_put_back():
    before = saved()
    sparse_inductor.enable(only="toy", strict=True)
    with pytest.raises(session.StrictError, match="toy: nothing was compiled"):
        sparse_inductor.disable()
    assert saved() == before


def test_strict_raises_from_the_compile_when_it_was_a_near_miss():
    sparse_inductor.enable(only="toy", strict=True)
    with pytest.raises(
        Exception,
        match=r"strict=True(.|\n)*toy: nearly matched at toy.py:\d+, but its input is not",
    ):
        captured(relu_alone, X)


def test_strict_waits_for_the_rest_of_the_program_after_a_graph_break():
    def broken_in_two(x):
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.relu(y + 1)

    sparse_inductor.enable(only="toy", strict=True)
    captured(broken_in_two, X)
    sparse_inductor.disable()


def test_strict_without_names_wants_any_match():
    with pytest.raises(session.StrictError, match="no pattern matched"):
        with sparse_inductor.enabled(strict=True):
            captured(torch.sin, X)
    torch._dynamo.reset()
    with sparse_inductor.enabled(strict=True):
        captured(relu_of_sum, X)


def test_a_block_within_an_equal_one_leaves_it_as_it_was():
    with sparse_inductor.enabled(strict=True):
        with contextlib.suppress(KeyError), sparse_inductor.enabled(strict=True):
            raise KeyError
        captured(relu_of_sum, X)


def test_strict_does_not_hide_the_users_exception():
    with pytest.raises(KeyError):
        with sparse_inductor.enabled(only="toy", strict=True):
            raise KeyError


def test_a_match_in_an_inner_block_counts_for_the_outer_one():
    with sparse_inductor.enabled(only="toy", strict=True):
        with sparse_inductor.enabled(only="toy"):
            captured(relu_of_sum, X)


# Process-wide switches of a pattern


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch traces Functions wrongly")
def test_class_methods_are_traced_while_entmax_is_enabled():
    class Twice(torch.autograd.Function):
        @classmethod
        def forward(cls, ctx, x):
            return x * 2

        @classmethod
        def backward(cls, ctx, grad):
            return grad * 3  # not the true gradient, which shows that this backward runs

    def graphs_of(x, **options):
        torch._dynamo.reset()
        compiled = compile_without_codegen(lambda x: Twice.apply(x.sin()).cos(), **options)
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        want = -3 * (2 * x.sin()).sin() * x.cos()
        torch.testing.assert_close(gradient, want)
        return compiled.dynamo_graphs

    x = torch.randn(5, requires_grad=True)
    before = graphs_of(x)
    with sparse_inductor.enabled("entmax"):
        assert graphs_of(x, fullgraph=True) == 1
        assert graphs_of(x) == before + 1, "nothing is rewritten, and Dynamo begins anew"
    assert graphs_of(x) == before
    assert before > 1 or torch.__version__ >= (2, 14), "it is traced without us"


def test_setup_is_called_by_enable_and_undone_by_disable():
    calls = []

    class WithSetup(Toy):
        def setup(self):
            calls.append("up")
            return lambda: calls.append("down")

    with registered(WithSetup("with_setup")):
        sparse_inductor.enable(skip="with_setup")
        assert calls == []
        sparse_inductor.enable()
        sparse_inductor.enable()
        assert calls == ["up"]
        sparse_inductor.disable()
        assert calls == ["up", "down"]


def test_a_setup_that_raises_leaves_nothing_on():
    class Raises(Toy):
        def setup(self):
            raise OSError("no such switch")

    before = saved()
    with registered(Raises("raises")), pytest.raises(OSError, match="no such switch"):
        sparse_inductor.enable()
    assert saved() == before
