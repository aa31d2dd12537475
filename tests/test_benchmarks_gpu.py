"""The benchmarks' clock on a real GPU."""

from __future__ import annotations

import os
import time

import pytest
import torch

from benchmarks import measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="shares the GPU: no times"),
]

GPU = torch.device("cuda")


def test_the_host_is_not_in_the_time_but_in_the_latency():
    x = torch.empty(2**24, device=GPU)

    def slow_host() -> None:
        x.zero_()
        time.sleep(3e-3)
        x.zero_()

    def prompt() -> None:
        x.zero_()
        x.zero_()

    found = measure.race({"slow": slow_host, "prompt": prompt}, GPU, 0.0, (5, 5))
    assert found["slow"].ms == pytest.approx(found["prompt"].ms, abs=0.05)
    assert found["slow"].latency > 3
    assert found["prompt"].latency < 1
    assert not found["slow"].disturbed


def test_a_call_that_waits_for_the_gpu_is_marked():
    x = torch.zeros(2**24, device=GPU)

    def work() -> None:
        x.sum().item()
        time.sleep(2e-3)
        x.zero_()

    found = measure.race({"it": work}, GPU, 0.0, (5, 5))["it"]
    assert found.ms > 2
    assert found.disturbed
