"""Spellings of the feed-forward block written before its recogniser: rewritten, and the numbers hold."""

from __future__ import annotations

import pytest

from cases import assert_case, left_behind
from ffn_spellings import CASES, B, N, S

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_spelling(name):
    case = BY_NAME[name]
    explanation = assert_case(case, only=("relu_ffn",))
    if case.expect == "rewrite":
        assert not left_behind(explanation, B * S * N), "hidden activations are still computed"


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
