"""Mistakes that a rewrite could have, which tests plant deliberately; one file per family.

A bug is planted where a developer would make such a mistake: in the replacement that the pattern inserts into the
graph, or in the operator. Each bug names a program that shows it. The file of a family has `PATTERN`, `PROGRAMS` and
`BUGS`; all files in this folder are imported. `overlooked` has mistakes of another kind: properties of a program that a
pattern fails to check. `table` shows which instrument catches which mistake.
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
    """Build a callable and its arguments from fixed seeds."""
    return PROGRAMS[name].build()


def bug_named(name: str) -> Bug:
    """Return the bug of that name."""
    (found,) = (bug for bug in BUGS if bug.name == name)
    return found
