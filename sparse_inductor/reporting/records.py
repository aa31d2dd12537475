"""The report: all rewrites and near misses of the process or of one call."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import compat, layers
from ..notices import bytes_text, count_text
from .findings import (
    Check,
    Density,
    NearMiss,
    Pending,
    Rewrite,
    at_line,
    rewrite_dict,
    rewrite_lines,
    times_text,
)

if TYPE_CHECKING:
    from ..ops._collections import Collection

log = logging.getLogger("sparse_inductor")

JSON_VERSION = 1


# Graph breaks at torch.sparse tensors, which no pass sees: the number of active watches, and the reports that record
# these breaks.
_watching = 0
_reports: weakref.WeakSet[Report] = weakref.WeakSet()
_SPARSE_WAY_OUT = (
    "torch.sparse tensors end the graph before any pass can run: a collection that is scored belongs in a "
    "sparse_inductor.SparseIndex, whose search() and scores() stand in a compiled program"
)


def watch_sparse_breaks(pattern: str) -> Callable[[], None]:
    """Record graph breaks at torch.sparse tensors as near misses of `pattern`, until the result is called."""
    global _watching
    _watching += 1

    def stop() -> None:
        global _watching
        for one in list(_reports):
            one.settle(pattern)
        _watching -= 1

    return stop


class Report:
    """All records since the last `clear()`; safe to read while other threads compile."""

    pass_ms: float
    """Milliseconds spent in the pass, over all graphs, also those that Dynamo has discarded."""
    graphs: int
    """The number of graphs that the pass has processed, without those that Dynamo has discarded."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clear()
        _reports.add(self)

    def _clear(self) -> None:
        self._rewrites: list[Rewrite] = []
        self._near_misses: list[NearMiss] = []
        self._pending: list[Pending] = []
        self._live: dict[Callable[[], list[Pending]], None] = {}
        self._checks: list[Check] = []
        self._densities: list[Density] = []
        self._compile: weakref.ref[object] | None = None
        self._seen: set[NearMiss] = set()
        self._attempt = 0  # how often the current compile has been restarted
        self._pattern_ms: Counter[str] = Counter()
        self.pass_ms = 0.0
        self.graphs = 0
        self._sparse_breaks = compat.sparse_graph_breaks()
        self._start = self._sizes()  # before the current compile

    def _sizes(self) -> tuple[int, ...]:
        found = (self._rewrites, self._pending, self._live, self._checks)
        return (*(len(entries) for entries in found), self.graphs)

    def settle(self, pattern: str = "sparse_scores") -> None:
        """Record that Dynamo ended graphs because of torch.sparse tensors, as its counters show."""
        if not _watching:
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
        """The near misses, oldest first; each is listed once per compile."""
        self.settle()
        with self._lock:
            return list(self._near_misses)

    @property
    def pending(self) -> list[Pending]:
        """Recognised blocks that run as written for now, with their latest counts."""
        with self._lock:
            return [*self._pending, *(one for pending in self._live for one in pending())]

    def add_pending(
        self, pending: Iterable[Pending], live: Callable[[], list[Pending]] | None
    ) -> None:
        """Record blocks of one graph that run as written. live: returns further ones each time the report is read."""
        with self._lock:
            self._pending.extend(pending)
            if live is not None:
                self._live.setdefault(live)

    @property
    def checks(self) -> list[Check]:
        """The results of `verify=True`, oldest first; empty without it."""
        with self._lock:
            return list(self._checks)

    @property
    def densities(self) -> list[Density]:
        """The counts of `explain`, oldest first; empty in the process-wide report."""
        with self._lock:
            return list(self._densities)

    def add_density(self, density: Density) -> None:
        """Record the count for a tensor of a rewrite."""
        with self._lock:
            self._densities.append(density)

    def add_check(self, check: Check) -> None:
        """Record the result of a check."""
        with self._lock:
            self._checks.append(check)

    @property
    def pattern_ms(self) -> dict[str, float]:
        """Milliseconds spent in each pattern's own matching and replacing."""
        with self._lock:
            return dict(self._pattern_ms)

    def clear(self) -> None:
        """Remove all records."""
        with self._lock:
            self._clear()

    def _is_current(self, compile: object | None) -> bool:
        return compile is not None and self._compile is not None and self._compile() is compile

    def unseen(self, near_misses: Iterable[NearMiss], compile: object | None) -> list[NearMiss]:
        """Return the near misses that this compile (any object) has not recorded before."""
        with self._lock:
            # One line can reach the pass several times within a compile: a body called twice is two graphs.
            seen = self._seen if self._is_current(compile) else ()
            return [miss for miss in dict.fromkeys(near_misses) if miss not in seen]

    def add(
        self,
        rewrites: Iterable[Rewrite],
        near_misses: Iterable[NearMiss],
        pass_ms: float,
        pattern_ms: Mapping[str, float],
        compile: object | None = None,
    ) -> None:
        """Record one graph of a compile (any object); each near miss is recorded once per compile. If Dynamo has
        restarted the compile, its earlier records are removed, except near misses: those graphs are discarded."""
        with self._lock:
            self._add_near_misses(near_misses, compile)
            self._rewrites.extend(rewrites)
            self.pass_ms += pass_ms
            self._pattern_ms.update(pattern_ms)
            self.graphs += 1

    def begin_anew(
        self, near_misses: Iterable[NearMiss], compile: object | None, keep: Sequence[str] = ()
    ) -> None:
        """Remove the records of a compile (any object) that restarts, except near misses, to which these are added, and
        blocks of the patterns in `keep` that run as written."""
        with self._lock:
            self._add_near_misses(near_misses, compile)
            kept = [p for p in self._pending[self._start[1] :] if p.pattern in keep]
            self._drop()
            self._pending += kept
            self._start = self._sizes()

    def _add_near_misses(self, near_misses: Iterable[NearMiss], compile: object | None) -> None:
        new = self.unseen(near_misses, compile)
        if not self._is_current(compile):
            self._compile = None if compile is None else weakref.ref(compile)
            self._seen, self._start = set(), self._sizes()
        elif compat.attempt(compile) != self._attempt:
            self._drop()
        self._attempt = compat.attempt(compile)
        self._seen.update(new)
        self._near_misses.extend(new)

    def _drop(self) -> None:
        """Remove the current compile's records, except near misses."""
        rewrites, pending, live, checks, self.graphs = self._start
        del self._rewrites[rewrites:], self._pending[pending:], self._checks[checks:]
        for source in [*self._live][live:]:
            del self._live[source]

    def __bool__(self) -> bool:
        self.settle()
        with self._lock:
            return bool(self._rewrites or self._near_misses)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<sparse_inductor report: {count_text(self._rewrites, 'rewrite')}, "
                f"{count_text(self._near_misses, 'near miss')}, {count_text(self.graphs, 'graph')}>"
            )

    def __str__(self) -> str:
        with self._lock:
            return "\n".join(_render(self))

    def to_json(self) -> str:
        """The report as JSON text.

        `{"version": 1, "graphs", "pass_ms", "pattern_ms", "rewrites": [...], "near_misses": [...],
        "pending": [...], "checks": [...], "densities": [...], "fallbacks": [...], "collections": [...]}`; the entries
        have the fields of `Rewrite`, `NearMiss`, `Pending`, `Check`, `Density` and `layers.Fallback`; an input is
        `{"shape": [...], "dtype": "bfloat16"}`. Fields may be added within a version; none is removed or changes its
        meaning.
        """
        return json.dumps(self.as_dict(), indent=2)

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of `to_json` as plain dictionaries and lists."""
        self.settle()
        with self._lock:
            return {
                "version": JSON_VERSION,
                "graphs": self.graphs,
                "pass_ms": round(self.pass_ms, 3),
                "pattern_ms": {name: round(ms, 3) for name, ms in sorted(self._pattern_ms.items())},
                "rewrites": [rewrite_dict(r) for r in self._rewrites],
                "near_misses": [m._asdict() for m in self._near_misses],
                "pending": [p._asdict() for p in self.pending],
                "checks": [c._asdict() for c in self._checks],
                "densities": [d._asdict() for d in self._densities],
                "fallbacks": [f.as_dict() for f in layers.fallbacks()],
                "collections": [c.as_dict() for c in _collections(self)],
            }


# The heading of `Report.pending`.
AS_WRITTEN = 'as written for now (policy="always" rewrites it)'
# The heading of `Report.near_misses`.
NEARLY = "not rewritten, but nearly"

_process_wide = Report()


def report() -> Report:
    """Return the process-wide report: all records since the start or the last `clear()`."""
    return _process_wide


def log_graph(
    rewrites: Iterable[Rewrite],
    near_misses: Iterable[NearMiss],
    pass_ms: float,
    pattern_ms: Mapping[str, float],
) -> None:
    """Log one INFO line for each pattern with findings in a graph, and add an artifact to the structured trace."""
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
                f"{count_text(done, 'rewrite')} ({', '.join(dict.fromkeys(r.location for r in done))})"
                + (f", {bytes_text(saved)} no longer kept for backward" if saved else "")
            )
        if missed:
            reasons = dict.fromkeys(f"{m.location}: {m.reason}" for m in missed)
            parts.append(f"{count_text(missed, 'near miss')} ({'; '.join(reasons)})")
        log.info("%s: %s, %.1f ms", name, ", ".join(parts), pattern_ms.get(name, 0.0))
    compat.trace_artifact(
        "sparse_inductor",
        {
            "version": JSON_VERSION,
            "pass_ms": round(pass_ms, 3),
            "rewrites": [rewrite_dict(r) for r in rewrites],
            "near_misses": [m._asdict() for m in near_misses],
        },
    )


def _render(report: Report) -> list[str]:
    return [
        *_found(report),
        *_section("collections", ([f"  {c}"] for c in _collections(report))),
        *_section("slower, because a kernel fails", ([f"  {f}"] for f in layers.fallbacks())),
    ]


def _section(title: str, entries: Iterable[list[str]]) -> list[str]:
    """Return the lines of some entries under a title; no lines if there are no entries."""
    lines = [line for entry in entries for line in entry]
    return ["", title, *lines] if lines else []


def _collections(report: Report) -> list[Collection]:
    """Return the collections of documents that compiled programs score."""
    if not report.graphs:
        return []
    from ..ops._collections import collections

    return collections()


def _found(report: Report) -> list[str]:
    rewrites, near_misses = report.rewrites, report.near_misses
    if not report.graphs and not near_misses:
        return [
            "sparse_inductor: no graph seen yet "
            "(enable() before torch.compile, then call the compiled function)"
        ]
    lines = [
        f"sparse_inductor: {count_text(rewrites, 'rewrite')}, {count_text(near_misses, 'near miss')} in "
        f"{count_text(report.graphs, 'graph')}; the pass took {report.pass_ms:.1f} ms"
    ]
    wrong = (at_line(c, c.detail) for c in report.checks if c.verdict == "differs")
    lines += _section("caught by verify: the unrewritten result is used", wrong)
    for name in dict.fromkeys(r.pattern for r in rewrites):
        mine = Counter(r for r in rewrites if r.pattern == name).items()
        lines += _section(name, (rewrite_lines(r, n, *found_of(report, r)) for r, n in mine))
    as_they_are: tuple[tuple[str, Sequence[Pending | NearMiss]], ...] = (
        (AS_WRITTEN, report.pending),
        (NEARLY, near_misses),
    )
    for title, found in as_they_are:
        counted = Counter(found).items()
        lines += _section(title, (at_line(f, f.reason, times_text(n)) for f, n in counted))
    return lines


def found_of(report: Report, rewrite: Rewrite) -> tuple[list[Check], list[Density]]:
    """Return the checks and densities of a rewrite from its run."""

    def is_its(what: Check | Density) -> bool:
        return (what.pattern, what.location) == (rewrite.pattern, rewrite.location)

    return list(filter(is_its, report.checks)), list(filter(is_its, report.densities))


def _saved(rewrites: Iterable[Rewrite]) -> int:
    return sum(r.bytes_saved or 0 for r in rewrites)
