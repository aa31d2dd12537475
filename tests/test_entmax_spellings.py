"""Entmax written in many ways: exact ones are rewritten in one graph, numbers hold, near misses say why."""

from __future__ import annotations

import pytest

from entmax_spellings import CASES
from support import assert_recognised, assert_same_result, only, run_three_ways

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_spelling(name):
    case = BY_NAME[name]
    with only("entmax", "entmax_attention") as report:
        outcome = run_three_ways(case)
        assert_same_result(outcome.got, outcome.eager, outcome.truth, case.precision)
        assert_recognised(case, outcome, report)
        assert outcome.compiled.dynamo_graphs == 1


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
