"""Puts parts of README.md into pages, so that each is written, generated and tested in one place.

`<!-- readme: NAME -->` stands for the generated part NAME or, with a leading `#`, for the section of that title.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    return re.sub(r"<!-- readme: (.+?) -->", lambda found: part(found[1]), markdown)


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
