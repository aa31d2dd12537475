"""Finds the line of the user's program that a graph node comes from."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Code that only forwards a call: the line of its caller is more informative.
_PASSING_ON = tuple(
    os.path.join(*parts)
    for parts in (
        ("sparse_inductor", "match", "entmax", "leaves.py"),
        ("entmax", "activations.py"),
        ("entmax", "losses.py"),
        ("entmax", "root_finding.py"),
    )
)


class Source(NamedTuple):
    """A line of a program: `location` is "file.py:41", `text` the line itself, `path` the full path of the file."""

    location: str
    text: str = ""
    path: str = ""


def source_of(*nodes: fx.Node | None) -> Source:
    """Return the line of the program for the first of `nodes` with a stack trace.

    It is the line of the innermost frame outside torch. For a model from a library, that is the library's line, which
    identifies the op; the user's own line that calls the model would be the same for every op.
    """
    for node in nodes:
        if node is not None and (trace := node.meta.get("stack_trace")):
            found = _innermost(trace)
            if found is not None:
                return found
    name = next((node.name for node in nodes if node is not None), "?")
    return Source(f"node {name}")


def of_the_entmax_package(node: fx.Node | None) -> bool:
    """Whether a node is an operation inside the entmax package. Dynamo traces such operations if the call, which a
    pattern has judged at the user's line, stays as written."""
    folders = getattr(sys.modules.get("entmax"), "__path__", ())
    trace = None if node is None else node.meta.get("stack_trace")
    found = next(_frames(trace), None) if trace and folders else None
    return found is not None and os.path.dirname(found.path) in folders


def _innermost(trace: str) -> Source | None:
    passing_on: Source | None = None
    for found in _frames(trace):
        if not found.path.endswith(_PASSING_ON):
            return found
        passing_on = passing_on or found  # the only frame if such code is compiled by itself
    return passing_on


def _frames(trace: str) -> Iterator[Source]:
    """Yield the frames outside torch, the innermost first."""
    lines = trace.splitlines()
    for at in reversed(range(len(lines))):
        frame = _FRAME.match(lines[at])
        if frame is None:
            continue
        path, number = frame["file"], int(frame["line"])
        if path.startswith((_TORCH, "<eval_with_key>", "<frozen")):
            continue
        following = lines[at + 1].strip() if at + 1 < len(lines) else ""
        yield source_at(path, number, "" if _FRAME.match(following) else following)


def source_at(path: str, line: int, text: str = "") -> Source:
    """Return the line `line` of a file, read from it unless `text` is given."""
    text = text.strip() or linecache.getline(path, line).strip()
    return Source(f"{os.path.basename(path)}:{line}", text, path)
