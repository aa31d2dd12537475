"""README.md: its generated parts are what they should be, its code runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme
from support import heavy

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


# What a section's code expects to be there.
MODEL = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self, also_logits=False):
        super().__init__()
        self.embed, self.decoder, self.also_logits = nn.Embedding(50, 8), nn.Linear(8, 50), also_logits
    def forward(self, ids, mask):
        logits = self.decoder(self.embed(ids))
        values = (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)
        return (values, logits) if self.also_logits else values

model, other = Head(), Head(also_logits=True)
ids, mask = torch.randint(0, 50, (2, 6)), torch.ones(2, 6)
input_ids, attention_mask = ids, mask
"""
SECTIONS = re.findall(r"^## (.+)$", TEXT, re.M)


@pytest.mark.parametrize(
    "section",
    [s if s == "Use" else heavy(s) for s in SECTIONS if s != "Adding a pattern" and blocks(s)],
)
def test_the_code_of_a_section_runs(section, tmp_path):
    script = tmp_path / "section.py"  # a file: reports show its lines
    script.write_text(MODEL + "\n".join(blocks(section)))
    env = {**os.environ, "PYTHONPATH": str(readme.ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_exist():
    """Those of the README and of the documentation."""
    texts = [TEXT, *(page.read_text() for page in (readme.ROOT / "docs").rglob("*.md"))]
    makefile = (readme.ROOT / "Makefile").read_text()
    for text in texts:
        for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
        for module, first in re.findall(
            r"python -m ((?:sparse_inductor|benchmarks)[.\w]*) ?([\w-]*)", text
        ):
            if module == "sparse_inductor":
                assert first in ("demo", "doctor", "patterns", "explain"), first
            elif module == "benchmarks":
                assert (readme.ROOT / "benchmarks" / "families" / f"{first}.py").exists(), first
            else:
                assert importlib.util.find_spec(module), module


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (Path(readme.ROOT) / target).exists(), target
