"""README.md: its generated parts are what they should be, its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import readme

TEXT = readme.README.read_text()


@pytest.mark.parametrize("part", ["patterns", "numbers-cpu", "numbers-gpu"])
def test_generated_parts_are_up_to_date(part):
    wanted = readme.parts()[part]()
    assert readme.find(TEXT, part) == wanted, "run python -m benchmarks.readme"


def test_every_example_and_near_miss_has_its_line():
    from sparse_inductor.pattern import registered

    part = readme.find(TEXT, "patterns")
    for pattern in registered().values():
        for example in (*pattern.examples, *pattern.near_misses):
            assert f"| `{readme.code_of(example)}` |" in part
        for example in pattern.near_misses:
            assert example.reason in part


def blocks(section: str) -> list[str]:
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", body, re.S)


def test_the_operators_examples_run():
    head, attention = blocks("The operators")
    space: dict[str, object] = {}
    exec(head, space)
    assert space["values"].shape == (2, 100)
    exec(attention, space)
    assert space["out"].shape == (2, 8, 128, 64)
    assert (space["p"] == 0).any()


def test_the_feed_forward_example_runs():
    (code,) = blocks("ReLU feed-forward blocks: when it pays")
    space: dict[str, object] = {}
    exec(code, space)
    assert space["y"].shape == (2, 16, 64) and space["stats"].shape == (4, 2, 16)


def test_the_indexs_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("An index over sparse documents")
    space: dict[str, object] = {}
    exec(code, space)
    assert space["scores"].shape == space["ids"].shape == (4, 10)
    assert space["more"] == range(1000, 1001) and len(space["index"]) == 1001


def test_the_patterns_in_the_readme_are_patterns():
    from sparse_inductor.pattern import register, unregister

    template, test, structural = blocks("Adding a pattern")
    space: dict[str, object] = {}
    exec(template + test, space)
    space["test_masked_relu"]()
    space = {}
    exec(structural, space)
    register(space["PATTERN"])
    unregister("my_head")


def test_a_pattern_and_its_tests_are_short():
    template, test, _ = blocks("Adding a pattern")
    written = [line for line in (template + test).splitlines() if line.strip()]
    assert len(written) <= 40


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (Path(readme.ROOT) / target).exists(), target
