"""The documentation: every code block runs, generated parts are what they should be, the site builds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks import pages
from processes import ROOT, python
from support import registered

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

_spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def ran(page: str, first: int | None = None) -> dict[str, object]:
    """Run the code of a page, or its `first` blocks, and return the names that it defines."""
    space: dict[str, object] = {}
    exec("\n".join(blocks(DOCS / page)[:first]), space)
    return space


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.heavy
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
    # The code runs from a file, so that the report can show source lines.
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n".join(blocks(page)))
    python(script, cwd=tmp_path, path=[ROOT], timeout=600)


# The README's test generates the report of the first program.
@pytest.mark.parametrize("name", [name for name in pages.parts() if name != "report"])
def test_generated_parts_are_up_to_date(name):
    part = pages.parts()[name]
    made = part.make()
    for page in part.pages:
        assert pages.find(page.read_text(), name) == made, "run python -m benchmarks.pages"


def test_the_home_page_has_the_report_of_the_readme():
    first, *others = (pages.find(p.read_text(), "report") for p in pages.parts()["report"].pages)
    assert [pages.untimed(other) for other in others] == [pages.untimed(first)]


def test_every_example_and_near_miss_has_its_line():
    from sparse_inductor.pattern import registered

    part = pages.find((DOCS / "patterns.md").read_text(), "patterns")
    for pattern in registered().values():
        for example in (*pattern.examples, *pattern.near_misses):
            assert f"| `{pages.code_of(example)}` |" in part
        for example in pattern.near_misses:
            assert example.reason in part


def test_the_operators_examples_run():
    space = ran("operators.md")
    assert space["values"].shape == (2, 100) and space["out"].shape == (2, 8, 128, 64)
    assert (space["p"] == 0).any()


def test_the_feed_forward_example_runs():
    space = ran("feed-forward.md")
    assert space["y"].shape == (2, 16, 64) and space["stats"].shape == (4, 2, 16)


def test_the_indexs_first_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = ran("how-to/build-an-index.md", 1)
    assert space["scores"].shape == space["ids"].shape == (4, 10)
    assert space["more"] == range(1000, 1001) and len(space["index"]) == 1001


def test_the_documented_patterns_are_patterns():
    ran("how-to/write-a-pattern.md", 2)["test_masked_relu"]()
    structural = blocks(DOCS / "how-to" / "write-a-pattern.md")[2]
    space: dict[str, object] = {}
    exec(structural, space)
    with registered(space["PATTERN"]):
        pass


def test_a_pattern_and_its_tests_are_short():
    template, test, *_ = blocks(DOCS / "how-to" / "write-a-pattern.md")
    written = [line for line in (template + test).splitlines() if line.strip()]
    assert len(written) <= 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_plots_are_found(page):
    assert "<!-- plots:" not in hooks.on_page_markdown(page.read_text())


def test_a_machine_without_a_plot_is_named():
    with pytest.raises(KeyError, match="no plot of 'abacus'"):
        hooks.plots("abacus")


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
    command = ("-m", "mkdocs", "build", "--site-dir", tmp_path / "site")
    done = python(*command, NO_MKDOCS_2_WARNING="1")
    assert "WARNING" not in done.stderr, done.stdout + done.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").exists()
