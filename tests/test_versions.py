"""All lists of supported versions agree, and the package uses the syntax of the oldest supported Python."""

from __future__ import annotations

import ast
import re

import pytest

from sources import ROOT, source_files
from sparse_inductor.doctor import TESTED_TORCH, TESTED_TRITON

NAMED = {"torch": TESTED_TORCH, "triton": TESTED_TRITON}


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@pytest.mark.parametrize("name", NAMED)
def test_requirements_and_readme_name_the_versions_that_doctor_knows(name):
    oldest, newest = map(dotted, NAMED[name])
    assert f'"{name}>={oldest}' in (ROOT / "pyproject.toml").read_text()
    readme = (ROOT / "README.md").read_text().lower()
    assert f"{name} {oldest} to {newest}" in readme


def test_make_versions_runs_the_oldest_and_the_newest_torch():
    (line,) = re.findall(r"^VERSIONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    versions = [tuple(map(int, v.split(".")))[:2] for v in line.split()]
    assert (versions[0], versions[-1]) == TESTED_TORCH


def test_sources_parse_as_python_3_10():
    for path in source_files():
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


@pytest.mark.parametrize("private", [r"triton\.knobs", r"triton\.compiler", r"triton\.__version__"])
def test_triton_is_reached_into_in_one_module(private):
    found = {
        str(path.relative_to(ROOT))
        for path in source_files()
        if re.search(private, path.read_text())
    }
    assert found <= {"sparse_inductor/compat/triton.py"}
