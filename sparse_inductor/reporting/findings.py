"""The records of reports (rewrites, near misses, checks, densities), and their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..notices import bytes_text

Shape = tuple[int | str, ...]
"""A size that is symbolic at compile time is represented by its expression as text ("s0")."""


class Rewrite(NamedTuple):
    """One subgraph that was replaced by an operator."""

    pattern: str
    stage: str
    """The stage of the compile: "pre_grad" (Dynamo's graph, before autograd)."""
    location: str
    """The user's line in which the subgraph ends: "model.py:41"."""
    op: str
    replaced: tuple[str, ...]
    """The replaced ops, in program order."""
    inputs: tuple[tuple[Shape, torch.dtype | None], ...]
    """(shape, dtype) of each tensor that the operator reads."""
    bytes_saved: int | None = None
    """Bytes that autograd no longer keeps for the backward; None where that is not known."""
    note: str = ""
    source: str = ""
    """The text of that line."""


class NearMiss(NamedTuple):
    """A subgraph that belongs to a pattern's family but was not rewritten."""

    pattern: str
    stage: str
    location: str
    reason: str
    source: str = ""


class Pending(NamedTuple):
    """A subgraph that was recognised and runs as written, because its operator would not be faster there."""

    pattern: str
    location: str
    measured: float | None
    """The share of elements that were active when the program ran; None if nothing was counted."""
    pays_below: float
    """The share below which the operator is faster here; 0 if it never is."""
    reason: str
    source: str = ""


class Check(NamedTuple):
    """The result of `verify=True` for one rewrite, when it ran for the first time."""

    pattern: str
    location: str
    verdict: str = ""
    """"agrees", "differs" (the unrewritten result is kept) or "unchecked"."""
    detail: str = ""
    error: float | None = None
    """The largest distance from the reference (fp64, or fp32 if memory is short): absolute below 1, relative above."""
    plain_error: float | None = None
    """The same for the operations as written."""
    source: str = ""


class Density(NamedTuple):
    """The number of elements of a tensor that were not zero when `explain` ran the program."""

    pattern: str
    location: str
    what: str
    """The name of the elements: "probabilities"."""
    active: int
    total: int
    row: int
    """Elements of a row, which is the unit that users think of: the keys of a query, the vocabulary."""

    def __str__(self) -> str:
        share = self.active / self.total if self.total else 0.0
        mean = share * self.row
        shown = f"{mean:.0f}" if mean >= 100 else f"{mean:.1f}"
        return f"{shown} of {self.row} {self.what} a row are not zero ({share:.2%})"


def rewrite_dict(rewrite: Rewrite) -> dict[str, Any]:
    """Return a rewrite as data that can be written as JSON."""
    fields = rewrite._asdict()
    fields["inputs"] = [
        {"shape": list(shape), "dtype": _dtype(dtype)} for shape, dtype in rewrite.inputs
    ]
    fields["replaced"] = list(rewrite.replaced)
    return fields


def at_line(what: NearMiss | Check | Pending, because: str, times: str = "") -> list[str]:
    """Return the report's lines about a finding at a line of the user's program, with the reason."""
    lines = [f"  {what.location}  {what.pattern}{times}"]
    return lines + ([f"      {what.source}"] if what.source else []) + [f"      because {because}"]


def rewrite_lines(
    rewrite: Rewrite, times: int, checks: Iterable[Check] = (), densities: Iterable[Density] = ()
) -> list[str]:
    """Return the report's lines about one rewrite, with the checks and densities from its run."""
    lines = [f"  {rewrite.location}{times_text(times)}"]
    if rewrite.source:
        lines.append(f"      {rewrite.source}")
    facts = [("replaced", f"{', '.join(_runs(rewrite.replaced))} -> {rewrite.op}")]
    if rewrite.inputs:
        facts.append(
            ("inputs", ", ".join(tensor_text(shape, dtype) for shape, dtype in rewrite.inputs))
        )
    if rewrite.bytes_saved:
        facts.append(("saved", f"{bytes_text(rewrite.bytes_saved)} no longer kept for backward"))
    facts += [("active", str(d)) for d in dict.fromkeys(densities)]
    if rewrite.note:
        facts.append(("note", rewrite.note))
    facts += [("checked", c.detail) for c in dict.fromkeys(checks) if c.verdict == "agrees"]
    facts += [("checked", f"no: {c.detail}") for c in checks if c.verdict == "unchecked"]
    return lines + [f"      {label:<9}{text}" for label, text in facts]


def rewrite_text(rewrite: Rewrite) -> str:
    """Return the report's text about one rewrite alone."""
    return "\n".join(rewrite_lines(rewrite, 1))


def times_text(times: int) -> str:
    """Return the number of times as text, if it is more than one."""
    return f"  ({times} times)" if times > 1 else ""


def _runs(names: Iterable[str]) -> list[str]:
    counted = Counter(names)
    return [name if times == 1 else f"{times} x {name}" for name, times in counted.items()]


def tensor_text(shape: Shape, dtype: torch.dtype | None) -> str:
    """Return a tensor's dtype and shape as reports write them: "float32[2, 40]"."""
    return f"{_dtype(dtype)}[{', '.join(map(str, shape))}]"


def _dtype(dtype: torch.dtype | None) -> str:
    return "?" if dtype is None else str(dtype).removeprefix("torch.")
