"""Every corpus spelling of the ReLU feed-forward block: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

from corpus.ffn import CASES, B, N, S
from ffn_support import assert_recognised, only_relu_ffn
from support import assert_same_result, run_three_ways

BY_NAME = {case.name: case for case in CASES}


def _check(case, **compiler) -> None:
    for package in case.requires:
        pytest.importorskip(package)
    with only_relu_ffn() as report:
        outcome = run_three_ways(case, **compiler)
        assert_same_result(outcome.got, outcome.eager, outcome.truth, case.precision)
        # A model has other products as large as its hidden activations.
        numel = B * S * N if not case.requires else 1 << 40
        assert_recognised(case, outcome, report, hidden_numel=numel)


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    _check(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama_relu__infer", "llama_relu__train", "statistics__train", "llama_autocast__train"]
)
def test_corpus_through_inductor(name):
    with inductor_config.patch(force_disable_caches=True):
        _check(BY_NAME[name], compiler=torch.compile)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
