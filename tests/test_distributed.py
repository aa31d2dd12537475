"""Several processes: operators on DTensors, DDP, FSDP2 and tensor parallelism have the results of one process.

These tests use gloo on the CPU; `pytest -m multigpu` runs the same checks over NCCL on two GPUs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import distributed_checks
from processes import ROOT, TESTS, python

WORLD = 2

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed"),
]


def run(folder: Path, device: str, checks: list[str]) -> dict[str, str]:
    """Run checks in one group of processes, and return {name: error or ""}."""
    arguments = (TESTS / "distributed_checks.py", folder, WORLD, device, *checks)
    without = ["TRITON_INTERPRET"] if device == "cuda" else []
    path = (ROOT, TESTS, os.environ.get("PYTHONPATH", ""))
    python("-W", "ignore", *arguments, path=path, without=without, timeout=500)
    return json.loads((folder / "results.json").read_text())


def assert_all_hold(folder: Path, device: str, checks: list[str]) -> None:
    results = run(folder, device, checks)
    assert results.keys() == set(checks)
    wrong = {name: said for name, said in results.items() if said}
    assert not wrong, "\n\n".join(f"{name}:\n{said}" for name, said in wrong.items())


def test_over_gloo(tmp_path):
    assert_all_hold(tmp_path, "cpu", list(distributed_checks.CHECKS))


@pytest.mark.multigpu
@pytest.mark.parametrize("part", distributed_checks.PARTS)
def test_over_nccl(part, tmp_path):
    """The parts can run in parallel, as in `make multigpu-test ARGS="-n 12"`, while kernels are compiled."""
    assert_all_hold(tmp_path, "cuda", distributed_checks.PARTS[part])
