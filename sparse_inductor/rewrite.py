"""The pass: calls every enabled pattern for its anchors, replaces the matches, and records the results.

`graph_run` contains the work on a single graph.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from . import compat
from .graph_run import Applied, GraphRun, failures
from .notices import described, warn
from .pattern import Pattern, Sparse
from .policy.profile import Site
from .reporting import records
from .reporting.findings import NearMiss, Rewrite
from .reporting.records import Report

__all__ = ["Outcome", "RewritePass", "failures"]

log = logging.getLogger("sparse_inductor")


class Outcome(NamedTuple):
    """The results for one graph; `applied` only if the pass traces."""

    rewrites: tuple[Rewrite, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    applied: tuple[Applied, ...] = ()
    as_written: frozenset[str] = frozenset()
    """Patterns with a match that runs as written because of the policy."""
    watched: tuple[tuple[Site, Sparse], ...] = ()
    """Those of these matches that depend on the data, with the tensors in which elements are to be counted."""


class RewritePass:
    """A pass over one `fx.Graph`, for Inductor's `pre_grad_custom_pass` slot or for calling
    directly.

    `report` receives the records; the default is the process-wide report. `verify` has every rewrite checked when it
    first runs (see `verify/session.py`). `trace` records the nodes of every rewrite, and adds no counters to the graph.
    `policy`: the choice for each pattern name (see `choices.py`), "always" for absent names.
    """

    def __init__(
        self,
        patterns: Iterable[Pattern],
        report: Report | None = None,
        verify: bool = False,
        trace: bool = False,
        policy: Mapping[str, str] | None = None,
    ) -> None:
        self._patterns = tuple(patterns)
        self._report = records.report() if report is None else report
        self._verify = verify
        self._trace = trace
        self._policy = policy or {}

    def __call__(self, graph: fx.Graph) -> None:
        self.run(graph)

    # Inductor deep-copies its configuration; a copied pass would write into a copy of the report.
    def __deepcopy__(self, memo: dict[int, Any]) -> RewritePass:
        return self

    def run(self, graph: fx.Graph) -> Outcome:
        """Rewrite the graph in place; never raises because of a pattern."""
        with compat.unobserved() as hooked:
            return self._run(graph, hooked)

    def _run(self, graph: fx.Graph, hooked: bool) -> Outcome:
        started = time.perf_counter()
        run = GraphRun(
            graph, self._report if self._verify else None, self._trace, self._policy, hooked
        )
        before = _text(graph) if log.isEnabledFor(logging.DEBUG) else ""
        try:
            run.execute(self._patterns)
            self._tell(run, started)
            run.erase()
        except Exception as error:
            run.give_up(self._patterns, error)
            try:
                self._tell(run, started)
            except Exception as again:
                log.debug("the report failed, too: %s", described(again))
        if before and run.rewrites:
            log.debug("graph before:\n%s\ngraph after:\n%s", before, _text(graph))
        decided = run.decisions
        return Outcome(
            tuple(run.rewrites),
            tuple(run.near_misses),
            tuple(run.applied),
            decided.as_written,
            tuple(decided.watched) if self._trace else (),
        )

    def _tell(self, run: GraphRun, started: float) -> None:
        pass_ms = (time.perf_counter() - started) * 1e3
        compile = compat.current_compile()
        new = self._report.unseen(run.near_misses, compile)
        records.log_graph(run.rewrites, new, pass_ms, run.pattern_ms)
        for name, times in Counter(r.pattern for r in run.rewrites).items():
            compat.count(f"sparse_inductor_{name}", times)
        if run.rewrites and compat.compiling_ahead():
            warn(_in_a_package(run.rewrites))
        self._report.add(run.rewrites, run.near_misses, pass_ms, run.pattern_ms, compile)
        profile = run.decisions.profile
        live = None if profile is None else profile.pending
        self._report.add_pending(run.decisions.pending, live)
        for check in run.checks:
            self._report.add_check(check)


def _in_a_package(rewrites: Sequence[Rewrite]) -> str:
    """Return a message about the requirements of a package made by AOTInductor."""
    operators = ", ".join(sorted({r.op for r in rewrites}))
    names = ", ".join(sorted({repr(r.pattern) for r in rewrites}))
    return (
        f"the AOTInductor package calls {operators}, which are Python operators: a process that loads it has to "
        "import sparse_inductor.ops first, and a C++ program without Python cannot run it. "
        f"skip=[{names}] leaves {'them' if ',' in names else 'it'} out."
    )


def _text(graph: fx.Graph) -> str:
    try:
        return compat.graph_text(graph)
    except Exception as error:  # printing may run the user's code
        return f"(a graph that cannot be printed: {described(error)})"
