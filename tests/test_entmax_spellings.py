"""Entmax written in many ways: exact ones are rewritten in one graph, numbers hold, near misses say why."""

from __future__ import annotations

import pytest

from cases import assert_case
from entmax_spellings import CASES

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_spelling(name):
    explanation = assert_case(BY_NAME[name], only=("entmax", "entmax_attention"))
    assert not explanation.graph_breaks


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
