"""Text and tables on standard output: with rich if it is installed and the output is a terminal, otherwise plain."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "note": "dim"}


def rich_console() -> Any | None:
    """Return a rich console, or None for plain text."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def print_text(text: str, style: str = "") -> None:
    """Print a line or paragraph."""
    console = rich_console()
    if console is None:
        print(text)
    else:
        console.print(text, style=STYLES.get(style, style), markup=False)


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    styles: Sequence[str] = (),
) -> None:
    """Print a table; `styles` colours whole rows. In plain text, the last column is not wrapped and the others are
    aligned."""
    console = rich_console()
    if console is None:
        print(plain_table(headers, rows, title))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    named = any(headers)
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE if named else None,
        show_header=named,
        padding=(0, 1),
    )
    for header in headers:
        table.add_column(header, overflow="fold")
    for at, row in enumerate(rows):
        style = STYLES.get(styles[at], "") if at < len(styles) else ""
        table.add_row(*map(Text, row), style=style)
    console.print(table)


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return the table as aligned text."""
    lines = [tuple(headers), *map(tuple, rows)] if any(headers) else [*map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    widths[-1] = 0
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return f"{title}\n{textwrap.indent(table, '  ')}" if title else table


def print_diff(text: str) -> None:
    """Print a unified diff, coloured in a terminal."""
    console = rich_console()
    if console is None:
        print(text)
        return
    from rich.syntax import Syntax

    console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
