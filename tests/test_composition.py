"""One torch.compile call with options, a session for the process, and the user's own passes, in
every combination."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import sparse_inductor
from sparse_inductor import compat, session, slots
from toy import captured, matched, relu_of_sum

X = torch.arange(-3.0, 3.0)


pytestmark = pytest.mark.usefixtures("toys")


class Mine(CustomGraphPass):
    """A user's pass, which records its calls by name."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __call__(self, graph):
        self.calls.append(self.name)

    def uuid(self):
        return self.name


def compiled_with(options, fn=relu_of_sum):
    """Compile `fn` by Inductor with these options, call it, and return its result."""
    return torch.compile(fn, options=options)(X)


def test_options_rewrite_one_compile_and_no_other():
    torch.testing.assert_close(compiled_with(sparse_inductor.options(only="toy")), relu_of_sum(X))
    assert matched() == ["toy"]
    torch._dynamo.reset()
    captured(relu_of_sum, X)
    assert matched() == ["toy"]
    assert config.pre_grad_custom_pass is None


def test_options_decide_alone_where_a_session_is_enabled():
    sparse_inductor.enable(only="toy")
    compiled_with(sparse_inductor.options(only="other"))
    assert matched() == ["other"]


def test_options_made_before_enable_do_not_run_twice():
    options = sparse_inductor.options(only="toy")
    sparse_inductor.enable(only="toy")
    compiled_with(options)
    assert matched() == ["toy"] and sparse_inductor.report().graphs == 1


def test_options_outlive_the_session():
    sparse_inductor.enable()
    options = sparse_inductor.options(only="toy")
    sparse_inductor.disable()
    compiled_with(options)
    assert matched() == ["toy"]


def test_options_combine_with_other_options():
    seen = []

    def mine(graph):
        seen.append(config.epilogue_fusion)

    with config.patch(joint_custom_post_pass=mine):
        compiled_with({**sparse_inductor.options(only="toy"), "epilogue_fusion": False})
    assert matched() == ["toy"] and seen == [False]


def test_options_keep_the_users_passes():
    calls = []
    with config.patch(
        pre_grad_custom_pass=Mine("pre", calls),
        post_grad_custom_pre_pass=Mine("post", calls),
        force_disable_caches=True,
    ):
        compiled_with(sparse_inductor.options(only="toy"))
    assert calls == ["pre", "post"] and matched() == ["toy"]


def test_equal_options_do_not_recompile():
    for _ in range(3):
        compiled_with(sparse_inductor.options(only="toy"))
    assert matched() == ["toy"]


def test_other_options_do():
    compiled_with(sparse_inductor.options(only="toy"))
    compiled_with(sparse_inductor.options(only="other"))
    assert matched() == ["toy", "other"]


def test_strict_options_raise_from_the_compile():
    with pytest.raises(Exception, match=r"strict=True(.|\n)*toy: nothing resembles it"):
        compiled_with(sparse_inductor.options(only="toy", strict=True), torch.sin)


def broken_in_two(x):
    x = x * 2
    torch._dynamo.graph_break()
    return torch.relu(x + 1)


@pytest.mark.parametrize("fn", [relu_of_sum, broken_in_two])
def test_strict_options_are_content_when_it_matched_and_wait_for_that(fn):
    compiled_with(sparse_inductor.options(only="toy", strict=True), fn)
    assert matched() == ["toy"]


def test_unknown_names_raise():
    with pytest.raises(ValueError, match="known patterns"):
        sparse_inductor.options(only="nonsense")


def test_nested_bodies_are_rewritten():
    def body(x):
        return torch.relu(x + 1)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(body, x.sin(), use_reentrant=False)

    sparse_inductor.enable(only="toy")
    x = X.clone().requires_grad_()
    y = torch.compile(checkpointed, fullgraph=True)(x)
    y.sum().backward()
    torch.testing.assert_close(y, checkpointed(x))
    assert matched() == ["toy"]


def test_a_chain_of_passes_runs_all_and_is_cacheable_only_if_all_are():
    calls = []
    mine = Mine("mine", calls)
    chain = slots.Chain([mine, calls.append])
    chain("graph")
    assert calls == ["mine", "graph"]
    assert chain.uuid() is None
    assert slots.Chain([mine, mine]).uuid() == ("mine", "mine")


def test_the_cache_key_holds_the_uuids_of_passes_that_ran_early():
    sparse_inductor.enable(only="toy")
    (key,) = slots.passes_of(compat.setting(session.KEY_SLOT))
    without = key.uuid()
    with config.patch(pre_grad_custom_pass=slots.slot_value([Mine("version 7", [])])):
        assert key.uuid() == f"{without}|'version 7'"
