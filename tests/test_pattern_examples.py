"""Every built-in pattern's own examples and near misses, so that a new pattern file comes with its tests."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import sparse_inductor
from corpus.case import Case
from sparse_inductor import patterns
from support import assert_same_result, run_three_ways

NAMES = [f"{patterns.__name__}.{info.name}" for info in pkgutil.iter_modules(patterns.__path__)]
FILES = [importlib.import_module(name) for name in NAMES]
PATTERNS = {p.name: p for p in (getattr(file, "PATTERN", None) for file in FILES) if p is not None}
EXAMPLES = [(n, e) for n, p in PATTERNS.items() for e in p.examples]
NEAR_MISSES = [(n, e) for n, p in PATTERNS.items() for e in p.near_misses]


def _name(value):
    return value if isinstance(value, str) else value.name


@pytest.fixture
def report():
    torch._dynamo.reset()
    found = sparse_inductor.report()
    found.clear()
    yield found
    sparse_inductor.disable()


def _run(pattern, example, expect):
    sparse_inductor.enable(only=[pattern])
    case = Case(example.name, "", example.build, expect, example.reason, example.training)
    outcome = run_three_ways(case)
    assert_same_result(outcome.got, outcome.eager, outcome.truth, torch.float32)


@pytest.mark.parametrize(("pattern", "example"), EXAMPLES, ids=_name)
def test_an_example_is_rewritten_and_keeps_its_numbers(pattern, example, report):
    _run(pattern, example, "rewrite")
    assert [r.pattern for r in report.rewrites] == [pattern]


@pytest.mark.parametrize(("pattern", "example"), NEAR_MISSES, ids=_name)
def test_a_near_miss_is_left_alone_and_says_why(pattern, example, report):
    assert example.reason, "a near miss says what its reason should be"
    _run(pattern, example, "no_rewrite")
    assert not report.rewrites
    assert any(example.reason in miss.reason for miss in report.near_misses)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_shows_what_it_takes_and_what_it_declines(name):
    assert len(PATTERNS[name].examples) >= 3
    assert len(PATTERNS[name].near_misses) >= 3
