"""Every corpus spelling of entmax attention: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

from corpus.case import Case
from corpus.entmax import CASES
from support import assert_recognised, assert_same_result, only, rewrites, run_three_ways

BY_NAME = {case.name: case for case in CASES}
# Of the cases whose expectation is open, those that are exact are rewritten, too.
NOT_EXACT = {
    "hand_bisect_midpoint__infer",
    "hand_bisect_midpoint__train",
    "hand_bisect_early_exit",
    "miss_not_renormalised",
}


def _check(case: Case, **compiler) -> None:
    for package in case.requires:
        pytest.importorskip(package)
    with only("entmax", "entmax_attention") as report:
        outcome = run_three_ways(case, **compiler)
        assert_same_result(outcome.got, outcome.eager, outcome.truth, case.precision)
        assert_recognised(case, outcome, report)
        if case.expect == "maybe":
            found = len(rewrites(report, case.pattern)) >= case.rewrites
            assert found == (case.name not in NOT_EXACT), report
        if case.expect == "rewrite" and not compiler:
            assert outcome.compiled.dynamo_graphs == 1


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    _check(BY_NAME[name])


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
    with inductor_config.patch(force_disable_caches=True):
        _check(BY_NAME[name], compiler=torch.compile)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
