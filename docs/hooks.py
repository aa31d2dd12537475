"""Puts what was measured into the site: the pages of results, which lie beside it, and plots into pages, where
`<!-- plots: MACHINE -->` stands for those of one machine, named in their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    markdown = re.sub(r"(\.\./)benchmarks/(results/[\w./-]+\.md)", r"\2", markdown)
    return re.sub(r"<!-- plots: (.+?) -->", lambda found: plots(found[1]), markdown)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """mkdocs calls this with what the site is made of: results and their plots lie elsewhere."""
    from mkdocs.structure.files import File

    for path in sorted([*RESULTS.rglob("*.md"), *RESULTS.rglob("*.png")]):
        place = f"results/{path.relative_to(RESULTS)}"
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def plots(machine: str) -> str:
    """Every family's plot of a machine. Raises KeyError where there is none."""
    found = sorted(RESULTS.glob(f"*-{machine}.png"))
    if not found:
        raise KeyError(f"{RESULTS.name} has no plot of {machine!r}")
    return "\n\n".join(
        f"![{family}: time and memory over sizes, with and without the rewrite](results/{path.name})"
        for path in found
        for family in [path.stem.removesuffix(f"-{machine}")]
    )
