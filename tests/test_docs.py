"""The documentation: every code block runs, every part that pages take from the README is there, the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

_spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.heavy
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
    # A file, so that the report has lines to show.
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n".join(blocks(page)))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_parts_of_the_readme_are_found(page):
    text = hooks.on_page_markdown(page.read_text())
    assert "<!-- readme:" not in text


def test_a_part_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="no part '# Nonsense'"):
        hooks.part("# Nonsense")


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_the_reference_names_what_exists():
    for name in re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.M):
        module, _, attribute = name.rpartition(".")
        if importlib.util.find_spec(module) is not None and attribute:
            found = importlib.import_module(module)
            assert hasattr(found, attribute) or importlib.util.find_spec(name), name
        else:
            pytest.fail(f"{name} does not exist")


def test_the_reference_has_every_public_name():
    import sparse_inductor
    from sparse_inductor import index, ops, testing

    named = re.findall(r"\w+", (DOCS / "reference.md").read_text())
    public = {*sparse_inductor.__all__, *ops.__all__, *index.__all__, *testing.__all__}
    assert public - {"__version__"} <= set(named)


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs-material and mkdocstrings"
)
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").exists()
