"""Puts parts of README.md and measured plots into pages, so that each is written, generated and tested in one place.

`<!-- readme: NAME -->` stands for the generated part NAME or, with a leading `#`, for the section of that title;
`<!-- plots: MACHINE -->` for the plots that were measured on a machine, by the name in their files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    markdown = re.sub(r"<!-- readme: (.+?) -->", lambda found: part(found[1]), markdown)
    return re.sub(r"<!-- plots: (.+?) -->", lambda found: plots(found[1]), markdown)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """mkdocs calls this with what the site is made of: the plots lie elsewhere."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"plots/{path.name}", abs_src_path=str(path)))
    return files


def plots(machine: str) -> str:
    """Every family's plot of a machine. Raises KeyError where there is none."""
    found = sorted(RESULTS.glob(f"*-{machine}.png"))
    if not found:
        raise KeyError(f"{RESULTS.name} has no plot of {machine!r}")
    return "\n\n".join(
        f"![{family}: time and memory over sizes, with and without the rewrite](plots/{path.name})"
        for path in found
        for family in [path.stem.removesuffix(f"-{machine}")]
    )


def part(name: str) -> str:
    """A part of the README. Raises KeyError where there is none of that name."""
    text = README.read_text(encoding="utf-8")
    if name.startswith("#"):
        found = re.search(
            rf"^## {re.escape(name[1:].strip())}\n(.*?)(?=^## |\Z)", text, re.M | re.S
        )
    else:
        begin, end = (re.escape(f"<!-- {name}: {edge} -->") for edge in ("begin", "end"))
        found = re.search(rf"{begin}\n(.*?){end}", text, re.S)
    if found is None:
        raise KeyError(f"README.md has no part {name!r}")
    # Links into the source tree lead nowhere on the site.
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", found[1]).strip("\n")
