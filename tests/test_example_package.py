"""The example package as a third party has it: built, installed beside the wheel, found, and its own tests run."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

import processes
from processes import ROOT

EXAMPLE = ROOT / "examples" / "masked_mean"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("build", "hatchling"))),
        reason="needs build and hatchling",
    ),
]


def python(*arguments: str | Path, cwd: Path, path: Iterable[Path] = ()) -> str:
    """Run Python without the editable install of the tests, so that it finds the installed wheels only."""
    return processes.python(*arguments, cwd=cwd, path=path, timeout=600).stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Installs both packages from their wheels into a folder and returns it."""
    base = tmp_path_factory.mktemp("outsider")
    skipped = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")
    for name, tree in (("ours", ROOT), ("theirs", EXAMPLE)):
        shutil.copytree(tree, base / name, ignore=skipped)
        python("-m", "build", "--wheel", "--no-isolation", "--outdir", base, base / name, cwd=base)
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", base / "site")
    python(*pip, *base.glob("*.whl"), cwd=base)
    return base / "site"


def test_installing_it_is_all_there_is_to_do(site, tmp_path):
    listed = python("-m", "sparse_inductor", "patterns", cwd=tmp_path, path=[site])
    assert re.search(r"^masked_mean +masked_mean::pool +", listed, re.M)
    where = python(
        "-c", "import sparse_inductor; print(sparse_inductor.__file__)", cwd=tmp_path, path=[site]
    )
    assert Path(where.strip()).is_relative_to(site)


def test_its_tests_pass(site, tmp_path):
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    out = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path, path=[site])
    assert "3 passed" in out


def test_doctor_runs_its_operator(site, tmp_path):
    out = python("-m", "sparse_inductor", "doctor", cwd=tmp_path, path=[site])
    assert re.search(r"ok  masked_mean::pool +values and gradients agree", out)


def test_it_stays_small():
    lines = sum(
        1
        for file in EXAMPLE.rglob("*.py")
        for line in file.read_text().splitlines()
        if line.strip()
    )
    assert lines <= 120
