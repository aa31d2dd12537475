"""In every kind of installation the pattern files are modules of the package, and nothing else is
installed beside it."""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import processes
from processes import ROOT

PATTERN = "splade_head"

pytestmark = [
    pytest.mark.skipif(
        not (ROOT / "patterns" / f"{PATTERN}.py").exists()
        or not (ROOT / "pyproject.toml").exists(),
        reason="needs a checkout",
    ),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("build", "hatchling"))),
        reason="needs build and hatchling",
    ),
]

IMPORTS = f"""
import sparse_inductor
from sparse_inductor.pattern import registered
import sparse_inductor.patterns.{PATTERN} as module
assert registered()["{PATTERN}"] is module.PATTERN
print(sparse_inductor.__file__, module.__file__, sep="\\n")
"""


def python(*arguments: str | Path, cwd: Path, path: Iterable[Path] = ()) -> str:
    return processes.python(*arguments, cwd=cwd, path=path).stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the source tree, isolated from everything else on the path."""
    tree = tmp_path_factory.mktemp("checkout") / "tree"
    skipped = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=skipped)
    return tree


@pytest.fixture(scope="module")
def dist(checkout, tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    return out


def installed(wheel: Path, target: Path) -> Path:
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")
    python(*pip, target, wheel, cwd=target.parent)
    return target


def test_the_wheel_imports_in_a_clean_folder(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    target = installed(wheel, tmp_path / "site")
    package, module = python("-c", IMPORTS, cwd=tmp_path, path=[target]).split()
    assert package == str(target / "sparse_inductor" / "__init__.py")
    assert module == str(target / "sparse_inductor" / "patterns" / f"{PATTERN}.py")


def test_the_wheel_holds_one_top_level_package(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "sparse_inductor/kernels/sparse_scores/cpu.cpp" in names
    assert "sparse_inductor/kernels/common/launches.c" in names
    assert "sparse_inductor/kernels/common/device.cuh" in names
    assert "sparse_inductor/kernels/sparse_scores/rescore.cu" in names
    top = {name.split("/")[0] for name in names}
    assert top == {"sparse_inductor", next(t for t in top if t.endswith(".dist-info"))}
    assert all(names.count(name) == 1 for name in names)
    assert "sparse_inductor/explanation/page.html.jinja" in names
    in_patterns = {n.split("/")[-1] for n in names if n.startswith("sparse_inductor/patterns/")}
    assert in_patterns == {"__init__.py", *(f.name for f in (ROOT / "patterns").glob("*.py"))}


CLIENT = """
import torch
import sparse_inductor
from sparse_inductor.testing import assert_matches_reference

sparse_inductor.enable(only=["splade_head"], policy={"splade_head": "always"}, strict=True)
names: list[str] = [r.pattern for r in sparse_inductor.report().rewrites]
page: str = sparse_inductor.explain(torch.nn.Linear(2, 3), torch.ones(1, 2)).to_html()
compiled = torch.compile(torch.nn.Linear(2, 3), options=sparse_inductor.options())
values: torch.Tensor = sparse_inductor.ops.splade_head(torch.ones(1, 2, 3), torch.ones(4, 3))
index = sparse_inductor.SparseIndex.build(torch.eye(3).to_sparse_csr())
scores, ids = index.search(torch.eye(3), 2)
total: torch.Tensor = scores.sum()
wrong: int = sparse_inductor.report()
"""


@pytest.mark.heavy
def test_a_clients_mypy_accepts_the_types(dist, tmp_path):
    """It reports one error, for the last line of the client, which shows that it reads the types."""
    pytest.importorskip("mypy")
    target = installed(*dist.glob("*.whl"), tmp_path / "site")
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\nmypy_path = {target}\n")
    done = processes.python("-m", "mypy", "client.py", cwd=tmp_path, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith("client.py:")]
    assert len(errors) == 1 and "Report" in errors[0], done.stdout


@pytest.mark.heavy
def test_a_bare_checkout_imports(checkout, tmp_path):
    _, module = python("-c", IMPORTS, cwd=tmp_path, path=[checkout]).split()
    assert module == str(checkout / "patterns" / f"{PATTERN}.py")


def test_an_editable_install_imports(checkout, tmp_path):
    build = f"import hatchling.build as b; b.build_editable({str(tmp_path)!r})"
    python("-c", build, cwd=checkout)
    (wheel,) = tmp_path.glob("*.whl")
    target = installed(wheel, tmp_path / "site")
    # Remove the editable install of the tests from the path, if there is one.
    path = (
        "import os, site, sys\n"
        "here = 'sparse_inductor/__init__.py'\n"
        "sys.path[:] = [p for p in sys.path if not os.path.isfile(os.path.join(p, here))]\n"
        f"site.addsitedir({str(target)!r})\n"
    )
    _, module = python("-c", path + IMPORTS, cwd=tmp_path).split()
    assert module == str(checkout / "patterns" / f"{PATTERN}.py")


@pytest.mark.heavy
def test_somebody_elses_patterns_package_beside_the_wheel_is_left_alone(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    target = installed(wheel, tmp_path / "site")
    (target / "patterns").mkdir()
    (target / "patterns" / "theirs.py").write_text("raise RuntimeError('imported')\n")
    python("-c", IMPORTS, cwd=tmp_path, path=[target])


@pytest.mark.heavy
def test_a_checkout_shadows_an_installed_wheel(checkout, dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    target = installed(wheel, tmp_path / "site")
    package, module = python("-c", IMPORTS, cwd=tmp_path, path=(checkout, target)).split()
    assert Path(package).is_relative_to(checkout) and Path(module).is_relative_to(checkout)
