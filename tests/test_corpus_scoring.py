"""Every corpus spelling of sparse scoring: recognised as expected, numbers as good as eager's."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

from corpus.scoring import CASES
from recognition import check
from support import only

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_corpus(name):
    with only("sparse_scores") as report:
        check(BY_NAME[name], "sparse_scores", report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded_rows_einsum", "padded_scatter_add_end_to_end"])
def test_corpus_through_inductor(name):
    with inductor_config.patch(force_disable_caches=True), only("sparse_scores") as report:
        check(BY_NAME[name], "sparse_scores", report, torch.compile)


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)
