"""The generated parts of README.md and of the documentation: the first program and what it prints, what is matched and
declined, and the measured numbers.

    python -m benchmarks.pages            put them in
    python -m benchmarks.pages --check    exit status 1 when they are not what they should be

Each part stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import sparse_inductor
from sparse_inductor.pattern import Example, Pattern, registered

from .publish import Results, figures_table, markdown_table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PROGRAM = DOCS / "encoder.py"
RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Part:
    """A generated part: what makes it, and the pages that have it."""

    make: Callable[[], str]
    pages: tuple[Path, ...]


def parts() -> dict[str, Part]:
    """The parts by name."""
    first = (README, DOCS / "index.md")
    numbered = (DOCS / "numbers.md",)
    return {
        "program": Part(program, first),
        "report": Part(report, first),
        "patterns": Part(patterns, (DOCS / "patterns.md",)),
        "numbers-gpu": Part(lambda: numbers("gpu"), numbered),
        "numbers-cpu": Part(lambda: numbers("cpu"), numbered),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    stale = set()
    for name, part in parts().items():
        made = part.make()
        for page in part.pages:
            text = page.read_text()
            if untimed(find(text, name)) != untimed(made):
                stale.add(page.relative_to(ROOT).as_posix())
                if not check:
                    page.write_text(put(text, name, made))
    if check and stale:
        print(f"{', '.join(sorted(stale))}: run python -m benchmarks.pages", file=sys.stderr)
    return int(check and bool(stale))


def find(text: str, name: str) -> str:
    """What stands between the marks of a part. Raises ValueError when they are not there."""
    begin, end = _marks(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{begin} and {end} must each stand in the text once")
    return text.split(begin)[1].split(end)[0].strip("\n")


def put(text: str, name: str, part: str) -> str:
    """The text with one part replaced."""
    find(text, name)
    begin, end = _marks(name)
    head, rest = text.split(begin)
    return f"{head}{begin}\n{part}\n{end}{rest.split(end)[1]}"


def untimed(part: str) -> str:
    """The part without the time that a report's first line names: it is another one in each run."""
    return re.sub(r"took [\d.]+ m?s", "took", part)


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


# --- The first program ------------------------------------------------------------------------------------------------


def program() -> str:
    """The program that README.md and the home page show."""
    return f"```python\n{PROGRAM.read_text()}```"


def report() -> str:
    """What that program prints, on a CPU."""
    done = subprocess.run(
        [sys.executable, PROGRAM.name],
        cwd=PROGRAM.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return textwrap.indent(done.stdout.strip(), "    ")


# --- What is matched and what is declined -----------------------------------------------------------------------------


def patterns() -> str:
    """For each pattern its examples and near misses, as written and as the pass judges them now."""
    return "\n\n".join(_pattern(p) for p in registered().values())


def _pattern(pattern: Pattern) -> str:
    done = [["rewritten", "steps that the operator runs"]]
    for example in pattern.examples:
        rewrite = next(r for r in explained(example).rewrites if r.pattern == pattern.name)
        done.append([f"`{code_of(example)}`", f"`{rewrite.note}`"])
    left = [["left as it is", "because"]]
    for example in pattern.near_misses:
        miss = next(m for m in explained(example).near_misses if m.pattern == pattern.name)
        left.append([f"`{code_of(example)}`", miss.reason])
    title = f"**{pattern.name}**: `{pattern.summary}`"
    return "\n\n".join([title, markdown_table(done), markdown_table(left)])


def explained(example: Example) -> Any:
    """The report of one example, captured afresh."""
    fn, args = example.build()
    with torch.set_grad_enabled(example.training), sparse_inductor.enabled(policy="always"):
        return sparse_inductor.explain(fn, *args).report


def code_of(example: Example) -> str:
    """What an example computes, from the source of its function (or of the one its module was built
    around); its name where that is longer than a few statements."""
    fn, _ = example.build()
    function = fn
    if isinstance(fn, torch.nn.Module):
        inner = [f for f in vars(fn).values() if isinstance(f, types.FunctionType)]
        function = inner[0] if len(inner) == 1 else fn
    if not isinstance(function, types.FunctionType):
        return example.name
    path, line = function.__code__.co_filename, function.__code__.co_firstlineno
    text = Path(path).read_text()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Lambda | ast.FunctionDef) or node.lineno != line:
            continue
        body: list[Any] = [node.body] if isinstance(node, ast.Lambda) else node.body
        if len(body) > 2:
            break
        if isinstance(body[-1], ast.Return) and body[-1].value is not None:
            body = [*body[:-1], body[-1].value]
        parts = [ast.get_source_segment(text, part) or "" for part in body]
        return "; ".join(" ".join(part.split()) for part in parts)
    return example.name


# --- Numbers ----------------------------------------------------------------------------------------------------------


def numbers(kind: str) -> str:
    """The tables of figures of all published runs on a "cpu" or a "gpu"."""
    found = [Results.read(path) for path in sorted(RESULTS.glob("*.json"))]
    chosen = [r for r in found if ("driver" in r.machine) == (kind == "gpu")]
    return "\n\n".join(_numbers(r) for r in chosen) or "Not measured yet."


def _numbers(results: Results) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    page = f"../benchmarks/results/{results.slug}.md"
    notes = [
        f"`{results.command}`; {facts}. All figures: [{results.slug}.md]({page}).",
        *results.text,
    ]
    return "\n\n".join(
        [
            f"<details markdown><summary><b>{results.family}</b>: {len(results.rows)} figures</summary>",
            *notes,
            markdown_table(figures_table(results.rows)),
            "</details>",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
