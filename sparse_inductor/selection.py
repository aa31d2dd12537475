"""A selection of patterns, what came of it, and whether that is what `strict=True` asks for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

from torch import fx

from . import compat
from .fingerprint import fingerprint, package_hash
from .graph_run import near_miss
from .pattern import Miss, Pattern, registered, unknown_pattern
from .policy.worth import Policy, policies
from .reporting.findings import count_text
from .reporting.records import report
from .rewrite import Outcome, RewritePass

DEFAULT_POLICY = "auto"
SKIP_VARIABLE = "SPARSE_INDUCTOR_SKIP"

Names = str | Iterable[str] | None


class StrictError(RuntimeError):
    """`strict=True`, and a pattern that had to match did not."""


@dataclasses.dataclass(eq=False)
class Session:
    """A selection of patterns and what came of it."""

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
        """The session that `enable` takes these for. Raises what it raises."""
        known = registered()
        package_hash()  # now, as near to the import of the sources as it gets
        named = _names(only, "only", known)
        skipped = _names(skip, "skip", known) | _names(
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
        """Whether another session asks for the same."""
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
        """Rewrite a graph. A strict session raises here what it cannot raise later
        (`fail_at_end_of_graph`), or what is already certain."""
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
        """Note why a graph with an entmax call, whose compile begins anew, is left as it is."""
        found = near_miss("entmax", miss)
        report().begin_anew(found, compat.current_compile())
        self._note(Outcome((), (found,)))

    def _note(self, outcome: Outcome) -> None:
        self.graphs += 1
        self.matched |= {r.pattern for r in outcome.rewrites} | outcome.as_written
        for miss in outcome.near_misses:
            self.nearly.setdefault(
                miss.pattern, f"nearly matched at {miss.location}, but {miss.reason}"
            )

    def _missing(self) -> dict[str, str]:
        """The patterns that had to match and did not, each with what is known about it."""
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
        """Raise StrictError where a strict session lacks a match."""
        missing = self._missing() if self.strict else {}
        if missing:
            lines = "\n".join(f"  {name}: {why}" for name, why in missing.items())
            what = "these patterns never matched" if self.only else "no pattern matched"
            raise StrictError(f"sparse_inductor, strict=True: {what}:\n{lines}")

    def key(self) -> str | None:
        """What of the session decides how a graph is compiled; None if that cannot be told, or if
        what is compiled holds what only this process knows."""
        if self.verify:
            return None
        return fingerprint(self.patterns.values())


def _names(value: Names, argument: str, known: dict[str, Pattern]) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, Iterable):
        raise TypeError(f"{argument} takes pattern names, got {value!r}")
    listed = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"{argument} takes pattern names, got {name!r}")
    names = frozenset(n for n in listed if n)
    for name in sorted(names - known.keys()):
        raise unknown_pattern(argument, name, known)
    return names
