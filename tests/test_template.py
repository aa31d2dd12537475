"""Patterns made from two functions: their matches, near misses with reasons, and replacements."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F

import sparse_inductor
from sparse_inductor import Template
from sparse_inductor.fingerprint import fingerprint
from sparse_inductor.pattern import Example
from sparse_inductor.testing import (
    assert_graph,
    assert_matches_reference,
    assert_not_rewritten,
    assert_pattern,
    assert_rewrites,
)
from support import registered


def search(x, w, c):
    return (torch.relu(x) * w).sum(-1, keepdim=True) + c


def replacement(x, w, c):
    return torch.einsum("...d,...d->...", torch.relu(x), w).unsqueeze(-1) + c


def summed_too(p):
    return p.sum(-1, True) + 1, p


def example(name, fn, training=False, reason=""):
    def build():
        torch.manual_seed(0)
        return fn, (torch.randn(3, 4, requires_grad=training), torch.randn(3, 4))

    return Example(name, build, training, reason)


GATED = Template(
    "gated",
    "einsum",
    "(relu(x) * w).sum(-1, True) + c -> einsum(relu(x), w) + c",
    search,
    replacement,
    examples=(
        example("as_searched", lambda x, w: search(x, w, 1.0)),
        example("in_training", lambda x, w: search(x, w, 1.0), training=True),
        example("other_spelling", lambda x, w: torch.add(1, torch.sum(w.mul(x.relu()), -1, True))),
        example("clamped", lambda x, w: (F.relu(x) * w).sum(dim=-1, keepdim=True) + w[:, :1]),
    ),
    near_misses=(
        example("no_keepdim", lambda x, w: (torch.relu(x) * w).sum(-1) + 1, reason="sum has other arguments"),
        example("gelu", lambda x, w: (F.gelu(x) * w).sum(-1, True) + 1, reason="relu is looked for where"),
        example("read", lambda x, w: summed_too(torch.relu(x) * w), reason="mul is also returned"),
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def gated():
    with registered(GATED):
        yield


def test_its_examples_are_its_tests():
    assert_pattern(GATED, dtypes=(torch.float32, torch.bfloat16))


X, W = torch.randn(3, 4), torch.randn(3, 4)


def test_what_is_put_in():
    assert_graph(
        lambda x, w: search(x, w, 2.0),
        (X, W),
        """
x: float32[3, 4]
w: float32[3, 4]
relu_1: float32[3, 4] = torch.relu(x)
einsum: float32[3] = torch.einsum('...d,...d->...', relu_1, w)
unsqueeze: float32[3, 1] = einsum.unsqueeze(-1)
add_1: float32[3, 1] = operator.add(unsqueeze, 2.0)
return (add_1,)
""",
    )


def test_a_parameter_used_twice_has_to_be_the_same():
    template = Template(
        "twice", "square", "x * relu(x) -> relu(x) ** 2", lambda x: x * torch.relu(x), lambda x: torch.relu(x).square()
    )  # fmt: skip
    with registered(template):
        assert_rewrites(lambda x: torch.relu(x) * x, (X,), {"twice": 1})
        assert_rewrites(lambda x, y: torch.relu(x) * y, (X, W), {"twice": 0})


def test_an_input_written_to_in_between_is_seen():
    def written(x, w):
        y = torch.relu(x) * w
        w.add_(1)
        return y.sum(-1, keepdim=True) + 1

    assert_not_rewritten(written, (X, W), "gated", reason="w is changed in place")


def test_a_gradient_that_is_cut_is_seen():
    def cut(x, w):
        with torch.no_grad():
            y = torch.relu(x) * w
        return y.sum(-1, keepdim=True) + 1

    x = X.clone().requires_grad_()
    assert_not_rewritten(cut, (x, W), "gated", reason="under no_grad")


def test_a_condition_declines_with_its_reason():
    small = Template(
        "small", "einsum", "as gated, where c is 1", search, replacement,
        check=lambda x, w, c: None if c == 1 else f"c is {c}",
    )  # fmt: skip
    with registered(small), sparse_inductor.enabled(only="small"):
        assert_rewrites(lambda x, w: search(x, w, 1), (X, W), {"small": 1})
        assert_not_rewritten(lambda x, w: search(x, w, 3), (X, W), "small", reason="c is 3")


def test_two_of_them_in_a_row():
    def both(x, w):
        return search(search(x, w, 1).expand(3, 4), w, 2)

    assert_rewrites(both, (X, W), {"gated": 2})
    assert_matches_reference(both, (X, W), grads=False, only="gated")


@pytest.mark.breaks_pattern
@pytest.mark.parametrize(
    ("replaced", "shape"),
    [
        (lambda x, w, c: (torch.relu(x) * w).sum() + c, r"[]"),
        (lambda x, w, c: torch.relu(x) * w + c, "[3, 4]"),
    ],
)
def test_a_replacement_of_another_shape_is_caught_and_changes_nothing(replaced, shape):
    wrong = Template("wrong", "sum", "wrong", search, replaced)
    with registered(wrong):
        with sparse_inductor.enabled(only="wrong"):
            explanation = sparse_inductor.explain(lambda x, w: search(x, w, 1), X, W)
        (miss,) = explanation.report.near_misses
        assert f"has shape {shape}, it was [3, 1]" in miss.reason
        assert explanation.graphs[0].before == explanation.graphs[0].after


@pytest.mark.parametrize(
    ("searched", "replaced", "said"),
    [
        (lambda x: torch.relu(x), lambda y: torch.relu(y), "different parameters"),
        (lambda x: x if x.sum() > 0 else -x, lambda x: x, "cannot be traced"),
        (lambda x: x, lambda x: x, "result of one operation"),
        (lambda x: torch.fft.fft(x), lambda x: x, "no canonical name"),
        (lambda x: torch.relu(x), lambda x: (x, x), "replacement has to return one tensor"),
        (lambda x: torch.relu(x), None, "None cannot be traced"),
        (torch.relu, lambda x: x, "relu cannot be traced"),
        (lambda x: torch.relu(x), functools.partial(torch.relu), "cannot be traced"),
    ],
)
def test_what_is_no_template_is_named(searched, replaced, said):
    with pytest.raises(TypeError, match=said):
        Template("bad", "op", "summary", searched, replaced)


def test_the_functions_sources_are_part_of_the_cache_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for number in (1, 2):
        text = (
            f"import torch\ndef search(x): return torch.relu(x)\ndef new(x): return x * {number}\n"
        )
        (tmp_path / f"edited_{number}.py").write_text(text)
        module = importlib.import_module(f"edited_{number}")
        keys.append(fingerprint([Template("mine", "op", "s", module.search, module.new)]))
    assert None not in keys and keys[0] != keys[1]


def test_a_pattern_without_examples_has_no_tests():
    bare = Template("bare", "op", "summary", lambda x: torch.relu(x), lambda x: x)
    with pytest.raises(AssertionError, match="needs an example and a near miss"):
        assert_pattern(bare)
