"""Mistakes that a rewrite could hold, each to be planted for a test: a file a family.

A bug is planted where such a mistake would be made: in what the pattern puts into the graph, or in the operator. Each
names the program that shows it. A family's file has `PATTERN`, `PROGRAMS` and `BUGS`; it is found by lying here.
`overlooked` has those of another kind, what a pattern does not look at, and `table` says who catches which.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from planted.bug import Bug, Program

__all__ = ["BUGS", "PROGRAMS", "Bug", "bug_named", "program"]

PROGRAMS: dict[str, Program] = {}
BUGS: list[Bug] = []
for _found in pkgutil.iter_modules(__path__):
    if _found.name not in ("bug", "overlooked", "table"):
        _family = importlib.import_module(f"planted.{_found.name}")
        PROGRAMS |= _family.PROGRAMS
        BUGS += _family.BUGS


def program(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A callable and its arguments, made anew from fixed seeds."""
    return PROGRAMS[name].build()


def bug_named(name: str) -> Bug:
    """The one bug of that name."""
    (found,) = (bug for bug in BUGS if bug.name == name)
    return found
