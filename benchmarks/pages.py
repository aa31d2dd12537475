"""The generated parts of README.md and of the documentation: the first program and its output, the matched and declined
programs, and the measured numbers.

    python -m benchmarks.pages            update the parts
    python -m benchmarks.pages --check    exit with status 1 if a part is out of date

Each part is enclosed by `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
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
    """A generated part: the function that makes it, and the pages that contain it."""

    make: Callable[[], str]
    pages: tuple[Path, ...]


def parts() -> dict[str, Part]:
    """Return the parts by name."""
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
    """Run the command line; return the exit status."""
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
    """Return the text between the marks of a part. Raises ValueError unless each mark occurs exactly once."""
    begin, end = _marks(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{begin} and {end} must each stand in the text once")
    return text.split(begin)[1].split(end)[0].strip("\n")


def put(text: str, name: str, part: str) -> str:
    """Return the text with one part replaced."""
    find(text, name)
    begin, end = _marks(name)
    head, rest = text.split(begin)
    return f"{head}{begin}\n{part}\n{end}{rest.split(end)[1]}"


def untimed(part: str) -> str:
    """Return the part without the time in a report's first line, which differs from run to run."""
    return re.sub(r"took [\d.]+ m?s", "took", part)


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


# --- The first program ------------------------------------------------------------------------------------------------


def program() -> str:
    """Return the program that README.md and the home page show."""
    return f"```python\n{PROGRAM.read_text()}```"


def report() -> str:
    """Return the output of that program on a CPU."""
    done = subprocess.run(
        [sys.executable, PROGRAM.name],
        cwd=PROGRAM.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return textwrap.indent(done.stdout.strip(), "    ")


# --- Matched and declined programs ------------------------------------------------------------------------------------


def patterns() -> str:
    """Return the examples and near misses of each pattern, with the pass's current verdict on each."""
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
    """Capture one example and return the report."""
    fn, args = example.build()
    with torch.set_grad_enabled(example.training), sparse_inductor.enabled(policy="always"):
        return sparse_inductor.explain(fn, *args).report


def code_of(example: Example) -> str:
    """Return the source of the statements that an example computes.

    They are those of its function or, for a module, of the only function that the module holds. If there are more than
    two statements, the example's name is returned.
    """
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
    """Return the tables of figures of all published runs on a "cpu" or a "gpu"."""
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
