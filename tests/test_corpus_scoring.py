"""Every corpus spelling of sparse scoring: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest

from cases import assert_case
from corpus.scoring import CASES

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    assert_case(BY_NAME[name], only=("sparse_scores",))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded_rows_einsum", "padded_scatter_add_end_to_end"])
def test_corpus_through_inductor(name):
    assert_case(BY_NAME[name], only=("sparse_scores",), codegen=True)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
