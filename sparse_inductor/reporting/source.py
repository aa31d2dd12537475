"""From a graph node to the line of the user's program that it came from."""

from __future__ import annotations

import dataclasses
import linecache
import os
import re

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Code that only passes a call on: the line that called it says more.
_PASSING_ON = tuple(
    os.path.join(*parts)
    for parts in (
        ("sparse_inductor", "match", "entmax", "leaves.py"),
        ("entmax", "activations.py"),
        ("entmax", "losses.py"),
        ("entmax", "root_finding.py"),
    )
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of a program: `location` is "file.py:41", `text` the line itself, `path` the whole
    file name."""

    location: str
    text: str = ""
    path: str = ""


def source_of(*nodes: fx.Node | None) -> Source:
    """Where the first of `nodes` that knows it was written.

    That is the innermost frame outside torch: for a model from a library, the library's line, which
    says which op is meant; the user's own line that calls the model would be the same for every op.
    """
    for node in nodes:
        if node is not None and (trace := node.meta.get("stack_trace")):
            found = _innermost(trace)
            if found is not None:
                return found
    name = next((node.name for node in nodes if node is not None), "?")
    return Source(f"node {name}")


def _innermost(trace: str) -> Source | None:
    lines = trace.splitlines()
    passing_on: Source | None = None
    for at in reversed(range(len(lines))):
        frame = _FRAME.match(lines[at])
        if frame is None:
            continue
        path, number = frame["file"], int(frame["line"])
        if path.startswith((_TORCH, "<eval_with_key>", "<frozen")):
            continue
        following = lines[at + 1].strip() if at + 1 < len(lines) else ""
        found = source_at(path, number, "" if _FRAME.match(following) else following)
        if not path.endswith(_PASSING_ON):
            return found
        passing_on = passing_on or found  # nothing else, where such code is compiled by itself
    return passing_on


def source_at(path: str, line: int, text: str = "") -> Source:
    """The line `line` of a file, read from it unless `text` is known."""
    text = text.strip() or linecache.getline(path, line).strip()
    return Source(f"{os.path.basename(path)}:{line}", text, path)
