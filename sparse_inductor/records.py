"""What was rewritten and what nearly was: the records, the report and its text."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import compat

__all__ = ["Check", "Density", "NearMiss", "Report", "Rewrite", "report"]

log = logging.getLogger("sparse_inductor")

JSON_VERSION = 1

Shape = tuple[int | str, ...]
"""A size that is symbolic at compile time is its expression as text ("s0")."""


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One subgraph that was replaced by an operator."""

    pattern: str
    stage: str
    """Where in the compile: "pre_grad" (the graph Dynamo hands over, before autograd)."""
    location: str
    """The user's line that the subgraph ends in: "model.py:41"."""
    op: str
    replaced: tuple[str, ...]
    """The ops that are gone, in the order of the program."""
    inputs: tuple[tuple[Shape, torch.dtype | None], ...]
    """(shape, dtype) of each tensor that the operator reads."""
    bytes_saved: int | None = None
    """Bytes that autograd no longer keeps for the backward; None where that is not known."""
    note: str = ""
    source: str = ""
    """The text of that line."""


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A subgraph that belongs to a pattern's family and was left as it is."""

    pattern: str
    stage: str
    location: str
    reason: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """What `verify=True` found of one rewrite, when it ran for the first time."""

    pattern: str
    location: str
    verdict: str = ""
    """"agrees", "differs" (the unrewritten result is kept and the pattern is off) or "unchecked"."""
    detail: str = ""
    error: float | None = None
    """The largest distance from a reference, absolute below 1 and relative above."""
    plain_error: float | None = None
    """The same of the operations as written."""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Density:
    """How many elements of a tensor were not zero when `explain` ran the program."""

    pattern: str
    location: str
    what: str
    """What the elements are: "probabilities"."""
    active: int
    total: int
    row: int
    """Elements of a row, which is what a user thinks of: the keys of a query, the vocabulary."""

    def __str__(self) -> str:
        share = self.active / self.total if self.total else 0.0
        mean = share * self.row
        shown = f"{mean:.0f}" if mean >= 100 else f"{mean:.1f}"
        return f"{shown} of {self.row} {self.what} a row are not zero ({share:.2%})"


class _Watch:
    """Graph breaks that a pattern has to explain although no pass ever sees them."""

    def __init__(self) -> None:
        self.on = 0
        self.reports: weakref.WeakSet[Report] = weakref.WeakSet()


_watch = _Watch()
_SPARSE_WAY_OUT = (
    "torch.sparse tensors end the graph before any pass can run: keep the collection in a "
    "sparse_inductor.SparseIndex, whose search() and scores() stand in a compiled program"
)


def watch_sparse_breaks(pattern: str) -> Callable[[], None]:
    """Until the result is called, graphs that end because of a torch.sparse tensor are near misses of `pattern`."""
    _watch.on += 1

    def stop() -> None:
        for one in list(_watch.reports):
            one.settle(pattern)
        _watch.on -= 1

    return stop


class Report:
    """Everything since the last `clear()`, of the whole process; safe to read while other threads
    compile."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clear()
        _watch.reports.add(self)

    def _clear(self) -> None:
        self._rewrites: list[Rewrite] = []
        self._near_misses: list[NearMiss] = []
        self._checks: list[Check] = []
        self._densities: list[Density] = []
        self._compile: weakref.ref[object] | None = None
        self._seen: set[NearMiss] = set()
        self._pattern_ms: Counter[str] = Counter()
        self._pass_ms = 0.0
        self._graphs = 0
        self._sparse_breaks = compat.sparse_graph_breaks()

    def settle(self, pattern: str = "sparse_scores") -> None:
        """Record what only Dynamo knows: that it ended graphs because of torch.sparse tensors."""
        if not _watch.on:
            return
        now = compat.sparse_graph_breaks()
        with self._lock:
            if now > self._sparse_breaks:
                self._near_misses.append(NearMiss(pattern, "dynamo", "?", _SPARSE_WAY_OUT))
            self._sparse_breaks = now

    @property
    def rewrites(self) -> list[Rewrite]:
        """The rewrites, oldest first."""
        with self._lock:
            return list(self._rewrites)

    @property
    def near_misses(self) -> list[NearMiss]:
        """The near misses, oldest first; the same one is listed once a compile."""
        self.settle()
        with self._lock:
            return list(self._near_misses)

    @property
    def checks(self) -> list[Check]:
        """What `verify=True` found, oldest first; empty without it."""
        with self._lock:
            return list(self._checks)

    @property
    def densities(self) -> list[Density]:
        """What `explain` counted, oldest first; empty in the report of the process."""
        with self._lock:
            return list(self._densities)

    def add_density(self, density: Density) -> None:
        """Record what was counted in a rewrite's subgraph."""
        with self._lock:
            self._densities.append(density)

    def add_check(self, check: Check) -> None:
        """Record what was found of a rewrite when it ran."""
        with self._lock:
            self._checks.append(check)

    @property
    def pass_ms(self) -> float:
        """Milliseconds spent in the pass, over all graphs."""
        with self._lock:
            return self._pass_ms

    @property
    def pattern_ms(self) -> dict[str, float]:
        """Milliseconds spent in each pattern's own matching and replacing."""
        with self._lock:
            return dict(self._pattern_ms)

    @property
    def graphs(self) -> int:
        """How many graphs the pass has looked at."""
        with self._lock:
            return self._graphs

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._clear()

    def add(
        self,
        rewrites: Iterable[Rewrite],
        near_misses: Iterable[NearMiss],
        pass_ms: float,
        pattern_ms: Mapping[str, float],
        compile: object | None = None,
    ) -> list[NearMiss]:
        """Record one graph; returns the near misses that this compile (any object) had not shown
        before."""
        with self._lock:
            # One line can reach the pass several times within a compile: a body called twice is two
            # graphs.
            if compile is None or self._compile is None or self._compile() is not compile:
                self._compile = None if compile is None else weakref.ref(compile)
                self._seen = set()
            new = [miss for miss in dict.fromkeys(near_misses) if miss not in self._seen]
            self._seen.update(new)
            self._rewrites.extend(rewrites)
            self._near_misses.extend(new)
            self._pass_ms += pass_ms
            self._pattern_ms.update(pattern_ms)
            self._graphs += 1
            return new

    def __bool__(self) -> bool:
        self.settle()
        with self._lock:
            return bool(self._rewrites or self._near_misses)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<sparse_inductor report: {_count(self._rewrites, 'rewrite')}, "
                f"{_count(self._near_misses, 'near miss')}, {_count(self._graphs, 'graph')}>"
            )

    def __str__(self) -> str:
        with self._lock:
            return "\n".join(_render(self))

    def to_json(self) -> str:
        """The report as JSON text.

        `{"version": 1, "graphs", "pass_ms", "pattern_ms", "rewrites": [...], "near_misses": [...],
        "checks": [...], "densities": [...]}`; the entries have the fields of `Rewrite`, `NearMiss`,
        `Check` and `Density`, an input is `{"shape": [...], "dtype": "bfloat16"}`. Fields may be
        added within a version; none is removed or changes its meaning.
        """
        return json.dumps(self.as_dict(), indent=2)

    def as_dict(self) -> dict[str, Any]:
        """What `to_json` writes, as plain dictionaries and lists."""
        self.settle()
        with self._lock:
            return {
                "version": JSON_VERSION,
                "graphs": self._graphs,
                "pass_ms": round(self._pass_ms, 3),
                "pattern_ms": {name: round(ms, 3) for name, ms in sorted(self._pattern_ms.items())},
                "rewrites": [rewrite_dict(r) for r in self._rewrites],
                "near_misses": [dataclasses.asdict(m) for m in self._near_misses],
                "checks": [dataclasses.asdict(c) for c in self._checks],
                "densities": [dataclasses.asdict(d) for d in self._densities],
            }


_process_wide = Report()


def report() -> Report:
    """The process-wide report: everything since the start or the last `clear()`."""
    return _process_wide


def rewrite_dict(rewrite: Rewrite) -> dict[str, Any]:
    """A rewrite as JSON-able data."""
    fields = dataclasses.asdict(rewrite)
    fields["inputs"] = [
        {"shape": list(shape), "dtype": _dtype(dtype)} for shape, dtype in rewrite.inputs
    ]
    fields["replaced"] = list(rewrite.replaced)
    return fields


def log_graph(
    rewrites: Iterable[Rewrite],
    near_misses: Iterable[NearMiss],
    pass_ms: float,
    pattern_ms: Mapping[str, float],
) -> None:
    """One INFO line a pattern that found something in a graph, and an artifact in the structured
    trace."""
    rewrites, near_misses = list(rewrites), list(near_misses)
    if not rewrites and not near_misses:
        log.debug("nothing to rewrite in this graph (%.1f ms)", pass_ms)
        return
    for name in dict.fromkeys([*(r.pattern for r in rewrites), *(m.pattern for m in near_misses)]):
        done = [r for r in rewrites if r.pattern == name]
        missed = [m for m in near_misses if m.pattern == name]
        parts = []
        if done:
            saved = _saved(done)
            parts.append(
                f"{_count(done, 'rewrite')} ({', '.join(dict.fromkeys(r.location for r in done))})"
                + (f", {bytes_text(saved)} no longer kept for backward" if saved else "")
            )
        if missed:
            reasons = dict.fromkeys(f"{m.location}: {m.reason}" for m in missed)
            parts.append(f"{_count(missed, 'near miss')} ({'; '.join(reasons)})")
        log.info("%s: %s, %.1f ms", name, ", ".join(parts), pattern_ms.get(name, 0.0))
    compat.trace_artifact(
        "sparse_inductor",
        {
            "version": JSON_VERSION,
            "pass_ms": round(pass_ms, 3),
            "rewrites": [rewrite_dict(r) for r in rewrites],
            "near_misses": [dataclasses.asdict(m) for m in near_misses],
        },
    )


def _render(report: Report) -> list[str]:
    rewrites, near_misses = report.rewrites, report.near_misses
    if not report.graphs and not near_misses:
        return [
            "sparse_inductor: no graph seen yet "
            "(enable() before torch.compile, then call the compiled function)"
        ]
    lines = [
        f"sparse_inductor: {_count(rewrites, 'rewrite')}, {_count(near_misses, 'near miss')} in "
        f"{_count(report.graphs, 'graph')}; the pass took {report.pass_ms:.1f} ms"
    ]
    wrong = [c for c in report.checks if c.verdict == "differs"]
    if wrong:
        lines += ["", "caught by verify: the unrewritten result is used, the pattern is off"]
        for check in wrong:
            lines += _at_line(check, check.detail)
    for name in dict.fromkeys(r.pattern for r in rewrites):
        mine = Counter(r for r in rewrites if r.pattern == name)
        lines += ["", name]
        for rewrite, times in mine.items():
            checks = [c for c in report.checks if _of(c) == _of(rewrite)]
            counted = [d for d in report.densities if _of(d) == _of(rewrite)]
            lines += _render_rewrite(rewrite, times, checks, counted)
    if near_misses:
        lines += ["", "not rewritten, but nearly"]
        for miss, times in Counter(near_misses).items():
            lines += _at_line(miss, miss.reason, _times(times))
    return lines


def _at_line(what: NearMiss | Check, because: str, times: str = "") -> list[str]:
    lines = [f"  {what.location}  {what.pattern}{times}"]
    return lines + ([f"      {what.source}"] if what.source else []) + [f"      because {because}"]


def _of(what: Rewrite | Check | Density) -> tuple[str, str]:
    return what.pattern, what.location


def _render_rewrite(
    rewrite: Rewrite, times: int, checks: Iterable[Check] = (), densities: Iterable[Density] = ()
) -> list[str]:
    lines = [f"  {rewrite.location}{_times(times)}"]
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
    """One rewrite as the report words it."""
    return "\n".join(_render_rewrite(rewrite, 1))


def _saved(rewrites: Iterable[Rewrite]) -> int:
    return sum(r.bytes_saved or 0 for r in rewrites)


def _times(times: int) -> str:
    return f"  ({times} times)" if times > 1 else ""


def _runs(names: Iterable[str]) -> list[str]:
    counted = Counter(names)
    return [name if times == 1 else f"{times} x {name}" for name, times in counted.items()]


def tensor_text(shape: Shape, dtype: torch.dtype | None) -> str:
    """A tensor as reports write it: "float32[2, 40]"."""
    return f"{_dtype(dtype)}[{', '.join(map(str, shape))}]"


def _dtype(dtype: torch.dtype | None) -> str:
    return "?" if dtype is None else str(dtype).removeprefix("torch.")


def _count(what: Any, noun: str) -> str:
    number = what if isinstance(what, int) else len(what)
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def bytes_text(number: int) -> str:
    """A number of bytes in the unit that fits."""
    value = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return (
                f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
            )
        value /= 1024
    return f"{value:.1f} TiB"
