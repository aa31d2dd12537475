"""Several processes: operators on DTensors, DDP, FSDP2 and tensor parallel give what one process gives.

gloo on the CPU here; `pytest -m multigpu` does the same over NCCL on two GPUs.
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
    """Checks in one group of processes: {name: error or ""}."""
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
    """In parts, for `make multigpu-test ARGS="-n 12"`: kernels are compiled meanwhile."""
    assert_all_hold(tmp_path, "cuda", distributed_checks.PARTS[part])
