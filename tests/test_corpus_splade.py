"""Every corpus spelling of the SPLADE head: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest

from cases import assert_case, left_behind
from corpus.splade import CASES, B, S, V

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    case = BY_NAME[name]
    explanation = assert_case(case, only=("splade_head",))
    if case.expect == "rewrite":
        vocabulary = 64 if case.requires else V
        assert not left_behind(explanation, B * S * vocabulary), "logits are still computed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "naver_log1plus_mul_maxdim__infer",
        "naver_log1plus_mul_maxdim__train",
        "scaling_retriever_inplace_scale__train",
        "log1p_autocast_bf16",
        "lib_st_sparseencoder_bert",
    ],
)
def test_corpus_through_inductor(name):
    assert_case(BY_NAME[name], only=("splade_head",), codegen=True)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
