"""The pass over one graph: matching, replacement, and the records for the report.

Matching never changes the graph. All matches are collected first, then replaced, then run on fake
tensors, backward included. After any error, the graph is either rewritten and valid, or exactly as
it was, symbolic sizes included. The pattern that failed stays enabled for the next node and graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from . import compat
from .admission import unrewritable, without_kernels
from .graph.fakes import complete, fake, tensors_in
from .graph.modes import known
from .graph.names import target_name
from .graph.saved import copying_what_is_written
from .graph.view import GraphView
from .notices import described
from .pattern import Match, Miss, Pattern, Sparse
from .policy.decisions import Decisions
from .rehearsal import keeping_shape, rehearse
from .reporting.findings import Check, NearMiss, Rewrite, Shape
from .reporting.records import Report
from .reporting.source import of_the_entmax_package, source_of
from .results import keep_apart, keep_layouts, layouts
from .snapshot import Snapshot

log = logging.getLogger("sparse_inductor")

STAGE = "pre_grad"


class Applied(NamedTuple):
    """A rewrite with the names of the nodes that it removed and of those that it inserted."""

    rewrite: Rewrite
    replaced: tuple[str, ...]
    inserted: tuple[str, ...]
    sparse: tuple[Sparse, ...] = ()
    """Tensors of the original graph in which zeros can be counted."""


@dataclasses.dataclass
class _Candidate:
    pattern: Pattern
    match: Match

    @property
    def nodes(self) -> set[fx.Node]:
        return set(self.match.matched_nodes)


@dataclasses.dataclass
class _Accepted(_Candidate):
    """A match to replace. inserted: the names of its new nodes, if the run traces rewrites."""

    record: Rewrite
    inserted: tuple[str, ...] = ()


class GraphRun:
    """The pass over one graph."""

    def __init__(
        self,
        graph: fx.Graph,
        verify: Report | None,
        trace: bool,
        policy: Mapping[str, str],
        hooked: bool,
    ) -> None:
        self.graph = graph
        self.hooked = hooked  # whether the program has saved-tensor hooks
        self.decisions = Decisions(policy, dry=trace)
        self.verify = verify
        self.trace = trace
        self.applied: list[Applied] = []
        self.rewrites: list[Rewrite] = []
        self.near_misses: list[NearMiss] = []
        self.checks: list[Check] = []  # of rewrites that cannot be checked
        self.pattern_ms: defaultdict[str, float] = defaultdict(float)
        self._env = compat.shape_env_of(
            v for n in graph.nodes for v in (*tensors_in(fake(n)), fake(n))
        )
        self._sizes = compat.ShapeState(self._env)
        self._before = Snapshot(graph)  # the graph that is matched
        self._start = self._before, self._sizes
        self._done: list[_Accepted] = []
        self._view: GraphView
        self._logged: set[tuple[object, ...]] = set()

    def execute(self, patterns: Sequence[Pattern]) -> None:
        # Fresh unbacked symbols can be discarded: a rewrite is traced again later, which creates them again.
        with compat.discarding_unbacked(self._env), contextlib.ExitStack() as stack:
            if complete(self.graph):
                self._before = Snapshot(self.graph)
            view = self._view = GraphView(self.graph)
            by_anchor = self._asked(patterns, view)
            if not by_anchor:
                return
            stack.enter_context(known(view.modes))
            matches, misses = self._match(by_anchor, view)
            found = _disjoint(self._resolve(matches, misses, view))
            now = self.decisions.take(found, view)
            accepted = [c for c, yes in zip(found, now) if yes and self._importable(c)]
            # From the end of the graph to its start: a match that reads another match's anchor must
            # be replaced before the readers of that anchor are redirected. Otherwise it would keep
            # reading the old anchor.
            accepted.sort(key=lambda c: view.order[c.match.anchor], reverse=True)
            # Make the records before the nodes are replaced.
            recorded: list[_Accepted] = []
            for c in accepted:
                with self._guarded(c.pattern, c.match.anchor):
                    recorded.append(_Accepted(c.pattern, c.match, _record(c, view)))
            before = layouts(self.graph) if recorded else []
            self._done = self._replace(recorded)
            if self._done:
                keep_layouts(self.graph, before)
                if torch.is_grad_enabled():
                    keep_apart(self.graph)
            self.decisions.watch(self.graph)
        self.rewrites = [c.record for c in reversed(self._done)]
        if self.trace:
            self.applied = [
                Applied(
                    c.record,
                    tuple(n.name for n in c.match.matched_nodes),
                    c.inserted,
                    tuple(getattr(c.match, "sparse", ())),
                )
                for c in reversed(self._done)
            ]
        # Drop a miss at a node that another pattern rewrites, or would rewrite if that were faster.
        pending = [c for c, yes in zip(found, now) if not yes]
        matched_nodes = {node for c in (*self._done, *pending) for node in c.nodes}
        # Of patterns that decline the same node for the same reason, keep the one with the last anchor, as `_disjoint`
        # keeps the larger match.
        declined: dict[tuple[fx.Node | None, str], str] = {}
        for name, miss, anchor in misses:
            at = miss.node or anchor
            if anchor in matched_nodes or of_the_entmax_package(at):
                continue
            if declined.setdefault((at, miss.reason), name) == name:
                self.near_misses.append(near_miss(name, miss, anchor))

    def erase(self) -> None:
        """Erase the replaced nodes that are dead now. Nothing may fail after this, because it cannot be undone."""
        matched_nodes = {node for c in self._done for node in c.nodes}
        for node in reversed(self.graph.nodes):
            dead = not node.users and node.op != "placeholder"  # Dynamo's inputs must all stay
            if dead and (node in matched_nodes or _is_getitem_of(node, matched_nodes)):
                self.graph.erase_node(node)

    def give_up(self, patterns: Iterable[Pattern], error: Exception) -> None:
        """Leave the graph as it was: the pass itself failed."""
        nodes, sizes = self._start
        nodes.restore()
        sizes.restore()
        log.debug("the pass failed and left the graph as it was", exc_info=error)
        _note_failure("the pass", error)
        reason = f"the pass failed, please report it: {described(error)}"
        self.rewrites, self.applied, self.checks = [], [], []
        self.decisions = Decisions({})
        self.near_misses = [near_miss(p.name, Miss(reason)) for p in patterns]

    @staticmethod
    def _asked(patterns: Sequence[Pattern], view: GraphView) -> dict[str, list[Pattern]]:
        """Return the patterns that may match or nearly match in the graph, by the names of their anchors in it."""
        names = view.names
        by_anchor: defaultdict[str, list[Pattern]] = defaultdict(list)
        for pattern in patterns:
            if not names.isdisjoint(getattr(pattern, "signs", names)):
                for name in pattern.anchors & {*names, "output"}:
                    by_anchor[name].append(pattern)
        return by_anchor

    def _match(
        self, by_anchor: dict[str, list[Pattern]], view: GraphView
    ) -> tuple[list[_Candidate], list[tuple[str, Miss, fx.Node | None]]]:
        candidates: list[_Candidate] = []
        misses: list[tuple[str, Miss, fx.Node | None]] = []
        for node in reversed(self.graph.nodes):
            if node.op == "placeholder":
                continue
            name = "output" if node.op == "output" else view.name_of(node)
            for pattern in by_anchor.get(name or "", ()):
                found: Match | Miss | None = None
                with self._guarded(pattern, node, quiet=node in view.transforms):
                    result = pattern.match(node, view)
                    if not isinstance(result, Miss | None):
                        assert result.anchor in result.matched_nodes, (
                            "matched_nodes lacks the anchor"
                        )
                        found = unrewritable(result, view, self.hooked) or result
                    elif node not in view.transforms:
                        found = result
                if isinstance(found, Miss):
                    misses.append((pattern.name, found, node))
                elif found is not None:
                    candidates.append(_Candidate(pattern, found))
                if self._sizes.changed():
                    # Only a rewrite may rely on a guard that its match has added.
                    if isinstance(found, Miss | None):
                        self._sizes.restore()
                    else:
                        self._sizes = compat.ShapeState(self._env)
        return candidates, misses

    def _resolve(
        self,
        candidates: list[_Candidate],
        misses: list[tuple[str, Miss, fx.Node | None]],
        view: GraphView,
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
                    # No anchor, so that the miss is kept even if another pattern rewrites the node.
                    misses += [(pattern.name, miss, None) for miss in missed]
            accepted += mine
        return accepted

    def _importable(self, candidate: _Candidate) -> bool:
        """Whether the kernels of a match's operator can be imported; if not, record a near miss."""
        miss = without_kernels(candidate.match)
        if miss is not None:
            self.near_misses.append(near_miss(candidate.pattern.name, miss))
        return miss is None

    def _replace(self, candidates: list[_Accepted]) -> list[_Accepted]:
        """Insert the operators; returns the candidates that were replaced, in the order given.

        Replaces all candidates at once; if that fails, one after the other, leaving out those that fail.
        """
        if not candidates:
            return []
        before, at = self._before, None
        try:
            for candidate in candidates:
                at = candidate
                self._put_in(candidate)
            self._try_out(before)
            return candidates
        except Exception as error:
            if not self._undo(before):
                # The other matches refer to erased nodes.
                assert at is not None
                self._failed(at.pattern, error, at.match.anchor, "replacing it raised")
                return []
        self.checks = []
        done = []
        for candidate in candidates:
            before = Snapshot(self.graph)
            try:
                self._put_in(candidate)
                self._try_out(before)
            except Exception as error:
                pattern, anchor = candidate.pattern, candidate.match.anchor
                self._failed(pattern, error, anchor, "replacing it raised")
                if not self._undo(before):
                    break
            else:
                self._sizes = compat.ShapeState(self._env)
                done.append(candidate)
        return done

    def _put_in(self, candidate: _Accepted) -> None:
        started = time.perf_counter()
        present = {n.name for n in self.graph.nodes} if self.trace else set()
        with (
            self._verified(candidate),
            copying_what_is_written(self._view, list(candidate.nodes)),
            keeping_shape(candidate.match.anchor),
        ):
            candidate.match.replace()
        if self.trace:
            new = tuple(n.name for n in self.graph.nodes if n.name not in present)
            candidate.inserted = new
        self.pattern_ms[candidate.pattern.name] += (time.perf_counter() - started) * 1e3

    def _try_out(self, before: Snapshot) -> None:
        """Raise now what the rewritten graph would raise later in this compile."""
        self.graph.lint()
        rehearse(before.new_nodes(), self._env)

    def _verified(self, candidate: _Accepted) -> contextlib.AbstractContextManager[None]:
        """Have a replacement checked when it first runs, if `verify` is set."""
        if self.verify is None:
            return contextlib.nullcontext()
        from .verify.replacing import checked_at_first_run  # which defines an operator

        return checked_at_first_run(
            self.graph, candidate.match, candidate.record, self.verify, self.checks
        )

    @contextlib.contextmanager
    def _guarded(self, pattern: Pattern, node: fx.Node, quiet: bool = False) -> Iterator[None]:
        """Time a pattern. If it raises, restore the graph and record a near miss; the pattern stays enabled."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not self._undo(self._before):
                self._before = Snapshot(self.graph)
            # A data-dependent size is not reported here: the node may not belong to the pattern's family at all.
            if not quiet and not compat.is_data_dependent(error):
                self._failed(pattern, error, node, "the pattern raised")
        finally:
            self.pattern_ms[pattern.name] += (time.perf_counter() - started) * 1e3

    def _undo(self, nodes: Snapshot) -> bool:
        """Restore the graph, and the sizes as of the last accepted match; returns False if a node had been erased."""
        intact = nodes.restore()
        self._sizes.restore()
        return intact

    def _failed(self, pattern: Pattern, error: Exception, node: fx.Node, what: str) -> None:
        """Record that a match was given up because of an error."""
        if compat.is_data_dependent(error):
            reason = f"it depends on a size that only the data decide: {described(error)}"
        else:
            reason = f"{what}: {described(error)}"
            _note_failure(pattern.name, error)
        self.near_misses.append(near_miss(pattern.name, Miss(reason), node))
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        if (key := (pattern.name, type(error), frame.f_code, line)) not in self._logged:
            self._logged.add(key)
            log.debug("%s: %s", pattern.name, what, exc_info=error)


failures: deque[str] = deque(maxlen=100)
"""The errors of patterns, inserted operators and the report in this process; for tests and bug reports."""


def _note_failure(who: str, error: Exception) -> None:
    failures.append(f"{who}: {described(error)}")


def _disjoint(candidates: list[_Candidate]) -> list[_Candidate]:
    """Return the matches to keep: where matches of different patterns share nodes, the larger one, such as an attention
    block over the entmax in it."""
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


def _is_getitem_of(node: fx.Node, matched_nodes: set[fx.Node]) -> bool:
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and node.args[0] in matched_nodes
    )


def _record(candidate: _Candidate, view: GraphView) -> Rewrite:
    match = candidate.match
    saved = match.bytes_saved
    source = source_of(match.anchor, *reversed(match.matched_nodes))
    return Rewrite(
        pattern=candidate.pattern.name,
        stage=STAGE,
        location=source.location,
        op=match.op,
        replaced=tuple(
            view.name_of(n) or target_name(n.target) or str(n.target) for n in match.matched_nodes
        ),
        inputs=tuple(_shape_and_dtype(n) for n in match.inputs if isinstance(n, fx.Node)),
        bytes_saved=saved if type(saved) is int else None,
        note=str(match.note),
        source=source.text,
    )


def near_miss(pattern: str, miss: Miss, anchor: fx.Node | None = None) -> NearMiss:
    """Return the report's record of a miss, at the line of its node or of the anchor."""
    if anchor is None and miss.node is None:
        return NearMiss(pattern, STAGE, "?", miss.reason)
    source = source_of(miss.node, anchor)
    return NearMiss(pattern, STAGE, source.location, miss.reason, source.text)


def _shape_and_dtype(node: fx.Node) -> tuple[Shape, Any]:
    value = fake(node)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return (), None
    return tuple(size if type(size) is int else str(size) for size in value.shape), value.dtype
