"""Sessions: a selection of patterns, the results of its use, and the check of `strict=True`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from torch import fx

from . import compat
from .choices import Names, Policy, pattern_names, policies
from .fingerprint import fingerprint, package_hash
from .graph_run import near_miss
from .notices import count_text
from .pattern import Miss, Pattern, registered
from .reporting.records import report
from .rewrite import Outcome, RewritePass

DEFAULT_POLICY = "auto"
SKIP_VARIABLE = "SPARSE_INDUCTOR_SKIP"


class StrictError(RuntimeError):
    """Raised with `strict=True` if a required pattern did not match."""


@dataclasses.dataclass(eq=False)
class Session:
    """A selection of patterns and the results of its use."""

    patterns: dict[str, Pattern]
    only: frozenset[str]
    strict: bool
    verify: bool = False
    policy: dict[str, str] = dataclasses.field(default_factory=dict)
    matched: set[str] = dataclasses.field(default_factory=set)
    nearly: dict[str, str] = dataclasses.field(default_factory=dict)
    graphs: int = 0

    @classmethod
    def of(
        cls,
        only: Names,
        skip: Names,
        strict: bool = False,
        policy: Policy | None = None,
        verify: bool = False,
    ) -> Session:
        """Return the session for these arguments of `enable`. Raises the errors of `enable`."""
        known = registered()
        package_hash()  # as soon as possible after the import of the sources
        named = pattern_names(only, "only", known)
        skipped = pattern_names(skip, "skip", known) | pattern_names(
            os.environ.get(SKIP_VARIABLE), SKIP_VARIABLE, known
        )
        wanted = set(known) if only is None else named
        return cls(
            {n: p for n, p in known.items() if n in wanted - skipped},
            named - skipped,
            bool(strict),
            bool(verify),
            policies(policy, known, DEFAULT_POLICY),
        )

    def same_as(self, other: Session | None) -> bool:
        """Whether another session has the same settings."""
        return (
            other is not None
            and self.only == other.only
            and self.strict == other.strict
            and self.verify == other.verify
            and self.policy == other.policy
            and self.patterns.keys() == other.patterns.keys()
            and all(self.patterns[name] is other.patterns[name] for name in self.patterns)
        )

    def run(self, graph: fx.Graph, fail_at_end_of_graph: bool) -> None:
        """Rewrite a graph.

        If the graph does not end in a graph break, a strict session that lacks a required match raises StrictError here
        if it cannot do so later (`fail_at_end_of_graph`), or if a pattern without a match nearly matched in this graph.
        """
        outcome = RewritePass(self.patterns.values(), verify=self.verify, policy=self.policy).run(
            graph
        )
        self._note(outcome)
        if not self.strict:
            return
        end = compat.graph_end(graph.owning_module)
        if end is None or end.broke:
            return  # the rest of the program is still to come
        if fail_at_end_of_graph or self._missing().keys() & {
            m.pattern for m in outcome.near_misses
        }:
            self.check_strict()

    def leave(self, miss: Miss) -> None:
        """Record why a graph with an entmax call is not rewritten; its compile restarts."""
        found = near_miss("entmax", miss)
        report().begin_anew([found], compat.current_compile())
        self._note(Outcome((), (found,)))

    def begin_anew(self, keep: Sequence[str]) -> None:
        """Remove the records of a compile that restarts, except blocks of these patterns, which it will not read."""
        report().begin_anew((), compat.current_compile(), keep)

    def _note(self, outcome: Outcome) -> None:
        self.graphs += 1
        self.matched |= {r.pattern for r in outcome.rewrites} | outcome.as_written
        for miss in outcome.near_misses:
            self.nearly.setdefault(
                miss.pattern, f"nearly matched at {miss.location}, but {miss.reason}"
            )

    def _missing(self) -> dict[str, str]:
        """Return the required patterns that did not match, each with the reason as far as it is known."""
        if self.only:
            names = self.only - self.matched
        else:
            names = frozenset() if self.matched else frozenset(self.patterns)
        if self.graphs:
            otherwise = (
                f"nothing resembles it in what was compiled ({count_text(self.graphs, 'graph')})"
            )
        else:
            otherwise = "nothing was compiled"
        return {name: self.nearly.get(name, otherwise) for name in sorted(names)}

    def check_strict(self) -> None:
        """Raise StrictError if a strict session lacks a required match."""
        missing = self._missing() if self.strict else {}
        if missing:
            lines = "\n".join(f"  {name}: {why}" for name, why in missing.items())
            what = "these patterns never matched" if self.only else "no pattern matched"
            raise StrictError(f"sparse_inductor, strict=True: {what}:\n{lines}")

    def key(self) -> str | None:
        """Return the session's part of Inductor's cache keys; None, which disables caching, if it cannot be determined,
        or if compiled code refers to objects of this process (`verify`)."""
        if self.verify:
            return None
        return fingerprint(self.patterns.values())
