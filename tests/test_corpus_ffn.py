"""Every corpus spelling of the ReLU feed-forward block: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest

from cases import assert_case, left_behind
from corpus.ffn import CASES, B, N, S

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    case = BY_NAME[name]
    explanation = assert_case(case, only=("relu_ffn",))
    # A model has other products as large as its hidden activations.
    if case.expect == "rewrite" and not case.requires:
        assert not left_behind(explanation, B * S * N), "hidden activations are still computed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama_relu__infer", "llama_relu__train", "statistics__train", "llama_autocast__train"]
)
def test_corpus_through_inductor(name):
    assert_case(BY_NAME[name], only=("relu_ffn",), codegen=True)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
