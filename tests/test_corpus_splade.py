"""Every corpus spelling of the SPLADE head: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

from corpus.case import Case
from corpus.splade import CASES, B, S, V
from support import assert_recognised, assert_same_result, only_splade_head, run_three_ways

BY_NAME = {case.name: case for case in CASES}


def _check(case: Case, **compiler) -> None:
    for package in case.requires:
        pytest.importorskip(package)
    with only_splade_head() as report:
        outcome = run_three_ways(case, **compiler)
        assert_same_result(outcome.got, outcome.eager, outcome.truth, case.precision)
        vocabulary = 64 if case.requires else V
        assert_recognised(case, outcome, report, logits_numel=B * S * vocabulary)


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    _check(BY_NAME[name])


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
    with inductor_config.patch(force_disable_caches=True):
        _check(BY_NAME[name], compiler=torch.compile)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
