"""The pass: ask every enabled pattern about its anchors, replace what matched, record what
happened.

Matching never changes the graph. All matches are collected first, then replaced; whatever goes
wrong, the graph ends up either rewritten and valid or exactly as it was, and the pattern at fault
is switched off for the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from . import compat, records
from .ability import missing
from .findings import Check, NearMiss, Rewrite, Shape
from .match.fakes import fake, tensors_in
from .pattern import Match, Miss, Pattern, Sparse
from .records import Report
from .snapshot import Snapshot
from .source import source_of

__all__ = ["Applied", "Outcome", "RewritePass", "broken"]

log = logging.getLogger("sparse_inductor")

STAGE = "pre_grad"

_told: set[torch.device] = set()  # devices that a warning has been logged for
broken: dict[str, str] = {}
"""Patterns that raised in this process, or that verify caught, with the error; they are not asked again."""


@dataclasses.dataclass(frozen=True)
class Applied:
    """A rewrite with the names of the nodes that are gone and of those that were put in."""

    rewrite: Rewrite
    replaced: tuple[str, ...]
    inserted: tuple[str, ...]
    sparse: tuple[Sparse, ...] = ()
    """Tensors of the graph as it was whose zeros can be counted."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one graph yielded; `applied` where the pass was asked to trace."""

    rewrites: tuple[Rewrite, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    applied: tuple[Applied, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Candidate:
    pattern: Pattern
    match: Match

    @property
    def nodes(self) -> set[fx.Node]:
        return {*self.match.swallowed, self.match.anchor}


class RewritePass:
    """A pass over one `fx.Graph`, for Inductor's `pre_grad_custom_pass` slot or for calling
    directly.

    `report` is where the records go; the process-wide one by default. `verify` has every rewrite
    checked when it first runs (see `verify.py`); `trace` keeps which nodes it concerned.
    """

    def __init__(
        self,
        patterns: Iterable[Pattern],
        report: Report | None = None,
        verify: bool = False,
        trace: bool = False,
    ) -> None:
        self._patterns = tuple(patterns)
        self._report = records.report() if report is None else report
        self._verify = verify
        self._trace = trace

    def __call__(self, graph: fx.Graph) -> None:
        self.run(graph)

    # Inductor deep-copies its configuration; a copy would write into a report of its own.
    def __deepcopy__(self, memo: dict[int, Any]) -> RewritePass:
        return self

    def run(self, graph: fx.Graph) -> Outcome:
        """Rewrite the graph in place; never raises because of a pattern."""
        started = time.perf_counter()
        off = [p.name for p in self._patterns if p.name in broken]
        run = _Run(graph, self._report if self._verify else None, self._trace)
        before = compat.graph_text(graph) if log.isEnabledFor(logging.DEBUG) else ""
        try:
            run.execute([p for p in self._patterns if p.name not in broken])
            run.near_misses += [
                _near_miss(name, Miss(f"the pattern is off for this process: {broken[name]}"), None)
                for name in off
            ]
        except Exception as error:  # the walker itself failed: nothing has been replaced yet
            log.exception("the pass failed and left the graph as it was")
            reason = f"the pass failed, please report it: {_describe(error)}"
            run.near_misses = [_near_miss(p.name, Miss(reason), None) for p in self._patterns]
        pass_ms = (time.perf_counter() - started) * 1e3
        if before and run.rewrites:
            log.debug("graph before:\n%s\ngraph after:\n%s", before, compat.graph_text(graph))
        for name, times in Counter(r.pattern for r in run.rewrites).items():
            compat.count(f"sparse_inductor_{name}", times)
        new = self._report.add(
            run.rewrites, run.near_misses, pass_ms, run.pattern_ms, compat.current_compile()
        )
        records.log_graph(run.rewrites, new, pass_ms, run.pattern_ms)
        return Outcome(tuple(run.rewrites), tuple(run.near_misses), tuple(run.applied))


class _Run:
    """One graph on its way through the pass."""

    def __init__(self, graph: fx.Graph, verify: Report | None = None, trace: bool = False) -> None:
        self.graph = graph
        self.verify = verify
        self.trace = trace
        self.inserted: dict[int, tuple[str, ...]] = {}
        self.applied: list[Applied] = []
        self.rewrites: list[Rewrite] = []
        self.near_misses: list[NearMiss] = []
        self.pattern_ms: defaultdict[str, float] = defaultdict(float)

    def execute(self, patterns: Sequence[Pattern]) -> None:
        by_anchor: defaultdict[str, list[Pattern]] = defaultdict(list)
        for pattern in patterns:
            for name in pattern.anchors:
                by_anchor[name].append(pattern)
        view = make_view(self.graph)
        matches, misses = self._match(by_anchor, view)
        order = {node: at for at, node in enumerate(self.graph.nodes)}
        accepted = _disjoint(self._resolve(matches, misses, view))
        # From the end of the graph to its start: a match whose input is another's anchor must have
        # been put in before that anchor's readers are redirected, else it would go on reading the
        # old one.
        accepted.sort(key=lambda c: order[c.match.anchor], reverse=True)
        # Records are made while the nodes are still there to be read.
        records_of = {id(c): _record(c, view) for c in accepted}
        done = self._replace(accepted, records_of)
        self.rewrites = [records_of[id(c)] for c in reversed(done)]
        if self.trace:
            self.applied = [
                Applied(
                    records_of[id(c)],
                    tuple(n.name for n in c.match.swallowed),
                    self.inserted[id(c)],
                    tuple(getattr(c.match, "sparse", ())),
                )
                for c in reversed(done)
            ]
        swallowed = {node for c in done for node in c.nodes}
        self.near_misses += [
            _near_miss(name, miss, anchor)
            for name, miss, anchor in misses
            if anchor not in swallowed
        ]

    def _match(
        self, by_anchor: dict[str, list[Pattern]], view: Any
    ) -> tuple[list[_Candidate], list[tuple[str, Miss, fx.Node | None]]]:
        candidates: list[_Candidate] = []
        misses: list[tuple[str, Miss, fx.Node | None]] = []
        for node in reversed(self.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            for pattern in by_anchor.get(view.name_of(node) or "", ()):
                if pattern.name in broken:
                    continue
                if transform := view.transforms.get(node):
                    misses += _transformed(pattern, node, view, transform)
                    continue
                with self._guarded(pattern, node):
                    found = pattern.match(node, view)
                    if not isinstance(found, Miss | None) and (lacking := _lacking(found)):
                        found = Miss(f"there is no operator here: {lacking}", node)
                    if isinstance(found, Miss):
                        misses.append((pattern.name, found, node))
                    elif found is not None:
                        candidates.append(_Candidate(pattern, found))
        return [c for c in candidates if c.pattern.name not in broken], misses

    def _resolve(
        self,
        candidates: list[_Candidate],
        misses: list[tuple[str, Miss, fx.Node | None]],
        view: Any,
    ) -> list[_Candidate]:
        accepted: list[_Candidate] = []
        for pattern in {c.pattern.name: c.pattern for c in candidates}.values():
            mine = [c for c in candidates if c.pattern is pattern]
            resolve = getattr(pattern, "resolve", None)
            if resolve is not None:
                matches = [c.match for c in mine]
                mine = []
                with self._guarded(pattern, matches[0].anchor):
                    kept, missed = resolve(matches, view)
                    mine = [_Candidate(pattern, match) for match in kept]
                    # No anchor: what another pattern makes of the node is no answer to this miss.
                    misses += [(pattern.name, miss, None) for miss in missed]
            accepted += mine
        return accepted

    def _replace(
        self, candidates: list[_Candidate], records_of: dict[int, Rewrite]
    ) -> list[_Candidate]:
        """Put the ops in; returns the candidates that were replaced, in the order given."""
        check_each = False
        while candidates:
            before = Snapshot(self.graph)
            at = None
            try:
                for candidate in candidates:
                    at = candidate
                    started = time.perf_counter()
                    present = {n.name for n in self.graph.nodes} if self.trace else set()
                    with self._verified(candidate, records_of[id(candidate)]):
                        candidate.match.replace()
                    if self.trace:
                        new = tuple(n.name for n in self.graph.nodes if n.name not in present)
                        self.inserted[id(candidate)] = new
                    self.pattern_ms[candidate.pattern.name] += (time.perf_counter() - started) * 1e3
                    if check_each:
                        self.graph.lint()
                if not check_each:
                    at = None
                    self.graph.lint()
            except Exception as error:
                intact = before.restore()
                if at is None and intact:
                    check_each = True  # the graph became invalid: once more, to learn by whom
                    continue
                guilty = (at or candidates[0]).pattern
                self._disable(guilty, error, (at or candidates[0]).match.anchor)
                # A pattern that erased nodes leaves the other matches with nodes that are no more.
                candidates = [c for c in candidates if c.pattern is not guilty] if intact else []
                continue
            self._erase(candidates)
            return candidates
        return []

    @contextlib.contextmanager
    def _verified(self, candidate: _Candidate, record: Rewrite) -> Iterator[None]:
        """Have a replacement checked when it first runs, if that is asked for."""
        if self.verify is None:
            yield
            return
        from . import verify
        from .region import CannotCut, Watch

        check = Check(record.pattern, record.location, source=record.source)
        watch = None
        try:
            watch = Watch(self.graph, candidate.nodes)
        except CannotCut as error:
            self.verify.add_check(_unchecked(check, error))
        yield
        if watch is not None:
            try:
                watch.finish()
            except CannotCut as error:
                self.verify.add_check(_unchecked(check, error))
            else:
                verify.guard(watch, check, self.verify, broken.__setitem__)

    def _erase(self, done: list[_Candidate]) -> None:
        swallowed = {node for c in done for node in c.nodes}
        for node in reversed(self.graph.nodes):
            if not node.users and (node in swallowed or _is_getitem_of(node, swallowed)):
                self.graph.erase_node(node)

    @contextlib.contextmanager
    def _guarded(self, pattern: Pattern, node: fx.Node) -> Iterator[None]:
        """Time a pattern, and switch it off if it raises."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._disable(pattern, error, node)
        finally:
            self.pattern_ms[pattern.name] += (time.perf_counter() - started) * 1e3

    def _disable(self, pattern: Pattern, error: Exception, node: fx.Node) -> None:
        broken[pattern.name] = _describe(error)
        log.warning("pattern %s raised and is off for this process", pattern.name, exc_info=error)
        reason = f"the pattern raised and is off for this process: {_describe(error)}"
        self.near_misses.append(_near_miss(pattern.name, Miss(reason), node))


def make_view(graph: fx.Graph) -> Any:
    """What patterns read the graph through."""
    from .match.graph import GraphView

    return GraphView(graph)


def _disjoint(candidates: list[_Candidate]) -> list[_Candidate]:
    """Where matches of different patterns share nodes, the larger wins: an attention block over the
    entmax in it."""
    owner: dict[fx.Node, str] = {}
    kept = []
    for candidate in sorted(candidates, key=lambda c: len(c.nodes), reverse=True):
        name = candidate.pattern.name
        if all(owner.get(node, name) == name for node in candidate.nodes):
            owner.update(dict.fromkeys(candidate.nodes, name))
            kept.append(candidate)
        else:
            log.debug(
                "%s at %s is part of a larger match",
                candidate.match.pattern,
                candidate.match.anchor,
            )
    return kept


def _lacking(match: Match) -> str:
    """What the kernels lack for a match, on its device or for its tensors; of a device said aloud once."""
    values = [v for n in (match.anchor, *match.swallowed) for v in tensors_in(fake(n))]
    if any(v.is_nested for v in values):
        return "the tensors are nested"
    device = values[0].device if values else None
    lacking = "" if device is None else missing(device)
    if lacking and device not in _told:
        _told.add(device)
        log.warning("nothing is rewritten on %s: %s", device, lacking)
    return lacking


def _transformed(
    pattern: Pattern, node: fx.Node, view: Any, transform: str
) -> list[tuple[str, Miss, fx.Node | None]]:
    """What a torch.func transform goes through stays as it is: the operators have no rule for it, and the values in
    the graph are wrapped, so that a pattern may stumble over them."""
    try:
        found = pattern.match(node, view)
    except Exception:
        return []
    if found is None or isinstance(found, Miss):
        return []
    reason = f"this runs inside torch.func ({transform}), whose transforms the operator does not take part in"
    return [(pattern.name, Miss(reason, node), node)]


def _is_getitem_of(node: fx.Node, swallowed: set[fx.Node]) -> bool:
    return (
        node.op == "call_function" and node.target is operator.getitem and node.args[0] in swallowed
    )


def _record(candidate: _Candidate, view: Any) -> Rewrite:
    match = candidate.match
    source = source_of(match.anchor, *reversed(match.swallowed))
    return Rewrite(
        pattern=candidate.pattern.name,
        stage=STAGE,
        location=source.location,
        op=match.op,
        replaced=tuple(view.name_of(n) or _target_name(n) for n in match.swallowed),
        inputs=tuple(_shape_and_dtype(n) for n in match.inputs if isinstance(n, fx.Node)),
        bytes_saved=match.bytes_saved,
        note=match.note,
        source=source.text,
    )


def _near_miss(pattern: str, miss: Miss, anchor: fx.Node | None) -> NearMiss:
    if anchor is None and miss.node is None:
        return NearMiss(pattern, STAGE, "?", miss.reason)
    source = source_of(miss.node, anchor)
    return NearMiss(pattern, STAGE, source.location, miss.reason, source.text)


def _unchecked(check: Check, error: Exception) -> Check:
    return dataclasses.replace(check, verdict="unchecked", detail=str(error))


def _shape_and_dtype(node: fx.Node) -> tuple[Shape, Any]:
    value = fake(node)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return (), None
    return tuple(size if type(size) is int else str(size) for size in value.shape), value.dtype


def _target_name(node: fx.Node) -> str:
    return (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
