"""Spellings of the feed-forward block written before its recogniser: rewritten, and the numbers hold."""

from __future__ import annotations

import pytest

from ffn_spellings import CASES, B, N, S
from ffn_support import assert_recognised, only_relu_ffn
from support import assert_same_result, run_three_ways

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_spelling(name):
    case = BY_NAME[name]
    with only_relu_ffn() as report:
        outcome = run_three_ways(case)
        assert_same_result(outcome.got, outcome.eager, outcome.truth, case.precision)
        assert_recognised(case, outcome, report, hidden_numel=B * S * N)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
