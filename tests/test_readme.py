"""README.md: it is short, its program prints its report, and its links and commands exist."""

from __future__ import annotations

import importlib.util
import re

import pytest

from benchmarks import pages

TEXT = pages.README.read_text()
ALL = [pages.README, *sorted(pages.DOCS.rglob("*.md"))]
every_page = pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)


def test_it_is_short():
    assert len(TEXT.encode()) <= 9 * 1024


def test_its_program_prints_its_report():
    assert pages.find(TEXT, "program") == pages.program()
    assert pages.untimed(pages.find(TEXT, "report")) == pages.untimed(pages.report())


def test_its_program_is_all_of_its_code():
    assert TEXT.count("```python") == pages.find(TEXT, "program").count("```python") == 1


@every_page
def test_commands_exist(page):
    text, makefile = page.read_text(), (pages.ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    for module, first in re.findall(
        r"python -m ((?:sparse_inductor|benchmarks)[.\w]*) ?([\w-]*)", text
    ):
        if module == "sparse_inductor":
            assert first in ("demo", "doctor", "patterns", "explain"), first
        elif module == "benchmarks":
            assert (pages.ROOT / "benchmarks" / "families" / f"{first}.py").exists(), first
        else:
            assert importlib.util.find_spec(module), module


@every_page
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), target
