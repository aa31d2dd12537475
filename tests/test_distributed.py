"""Several processes: operators on DTensors, DDP, FSDP2 and tensor parallel give what one process gives.

gloo on the CPU here; `pytest -m multigpu` does the same over NCCL on two GPUs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distributed_checks

TESTS = Path(__file__).parent
WORLD = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed"),
]


def run(folder: Path, device: str) -> dict[str, str]:
    """All checks in one group of processes: {name: error or ""}."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "CHECKS_PORT": str(port)}
    if device == "cuda":
        env.pop("TRITON_INTERPRET", None)
    script = str(TESTS / "distributed_checks.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(folder), str(WORLD), device],
        env=env, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


def assert_all_hold(results: dict[str, str]) -> None:
    assert results.keys() == distributed_checks.CHECKS.keys()
    wrong = {name: said for name, said in results.items() if said}
    assert not wrong, "\n\n".join(f"{name}:\n{said}" for name, said in wrong.items())


def test_over_gloo(tmp_path):
    assert_all_hold(run(tmp_path, "cpu"))


@pytest.mark.multigpu
def test_over_nccl(tmp_path):
    assert_all_hold(run(tmp_path, "cuda"))
