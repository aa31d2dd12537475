"""Spellings of sparse scoring the recogniser was not written against: exact ones are rewritten, numbers hold."""

from __future__ import annotations

import pytest

from recognition import check, only
from scoring_spellings import CASES

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_spelling(name):
    with only("sparse_scores") as report:
        check(BY_NAME[name], "sparse_scores", report)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
