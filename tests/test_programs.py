"""Every program of the corpus, captured once: recognition and report as expected, results as accurate as eager's."""

from __future__ import annotations

import collections

import pytest
import torch

import sparse_inductor
from corpus.cases import CASES
from corpus.check import check
from support import heavy

BY_ID = {case.id: case for case in CASES}

# Inductor's treatment of a rewritten graph does not depend on its spelling, so a few programs of each family suffice.
THROUGH_INDUCTOR = (
    "splade_head-naver__infer",
    "splade_head-naver__train",
    "relu_ffn-relu_times_up__infer",
    "relu_ffn-both_statistics__train",
    "entmax-fill_minus_infinity__infer",
    "entmax-alpha_per_head__train",
    "sparse_scores-padded_scatter_add_end_to_end__infer",
    heavy("splade_head-scaling_retriever_inplace_scale__train"),
    heavy("splade_head-autocast_naver__infer"),
    heavy("relu_ffn-relu_times_up__train"),
    heavy("relu_ffn-autocast_relu_times_up__train"),
    heavy("entmax-function_sparsemax__train"),
    heavy("entmax-lib_llama__infer"),
    heavy("sparse_scores-einsum_over_batch__infer"),
)


# For two of three programs that are expected to behave alike in training, inference runs in `make test-all` only.
# Training compares values, too, and a program that is declined in inference is also declined in training.
TWICE = [
    case.id
    for case in CASES
    if not case.training
    and (twin := BY_ID.get(case.id.removesuffix("infer") + "train"))
    and (twin.expect, twin.why, twin.pattern) == (case.expect, case.why, case.pattern)
]
LATER = {name for at, name in enumerate(TWICE) if at % 3}


@pytest.mark.parametrize("name", [heavy(name) if name in LATER else name for name in BY_ID])
def test_program(name):
    with sparse_inductor.enabled():
        check(BY_ID[name])


@pytest.mark.heavy
@pytest.mark.parametrize("name", BY_ID)
def test_program_through_autograd(name):
    if name.endswith("half_values__infer") and torch.__version__ < (2, 13):
        pytest.skip("this torch drops casts that narrow itself")
    with sparse_inductor.enabled():
        check(BY_ID[name], how="aten")


@pytest.mark.parametrize("name", THROUGH_INDUCTOR)
def test_program_through_inductor(name):
    with sparse_inductor.enabled():
        check(BY_ID[name], how="inductor")


def test_names_are_unique():
    twice = [name for name, n in collections.Counter(case.id for case in CASES).items() if n > 1]
    assert not twice
