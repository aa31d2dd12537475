"""Every corpus spelling of entmax attention: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest

from cases import assert_case
from corpus.entmax import CASES

PATTERNS = ("entmax", "entmax_attention")
BY_NAME = {case.name: case for case in CASES}
# Of the cases whose expectation is open, those that are exact are rewritten, too.
NOT_EXACT = {
    "hand_bisect_midpoint__infer",
    "hand_bisect_midpoint__train",
    "hand_bisect_early_exit",
    "miss_not_renormalised",
}


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    case = BY_NAME[name]
    explanation = assert_case(case, only=PATTERNS)
    if case.expect == "maybe":
        found = [r for r in explanation.report.rewrites if r.pattern == case.pattern]
        assert (len(found) >= case.rewrites) == (name not in NOT_EXACT), explanation.report
    if case.expect == "rewrite":
        assert not explanation.graph_breaks


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "pkg_entmax15_masked_fill__infer",
        "pkg_bisect_learned_alpha__train",
        "function_sparsemax__train",
        "lib_llama__infer",
    ],
)
def test_corpus_through_inductor(name):
    assert_case(BY_NAME[name], only=PATTERNS, codegen=True)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
