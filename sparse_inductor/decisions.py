"""Decides by policy which matches of one graph are rewritten now, and has the graph count for the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from . import compat
from .findings import Pending
from .match.fakes import fake, static_size, tensors_in
from .pattern import Match, Pattern, Sparse
from .policy import Worth
from .profile import Profile, Site, profile_of, watch
from .snapshot import Snapshot
from .source import Source, source_of

__all__ = ["Decisions"]

log = logging.getLogger("sparse_inductor")


class _Candidate(Protocol):
    @property
    def pattern(self) -> Pattern: ...
    @property
    def match(self) -> Match: ...


class Decisions:
    """What is decided about one graph; `pending` and `profile` are what the report is told of it."""

    def __init__(self, policy: Mapping[str, str]) -> None:
        self._policy = policy
        self._watched: list[tuple[int, Sparse]] = []
        self.pending: list[Pending] = []
        self.profile: Profile | None = None

    def take(self, candidates: Sequence[_Candidate], view: Any) -> list[bool]:
        """Whether each is rewritten now. Those that depend on what runs are so if their profile says that they gain."""
        now = [False] * len(candidates)
        sites: list[tuple[int, Site, Sparse]] = []
        frame = compat.current_frame() if "auto" in self._policy.values() else None
        for at, candidate in enumerate(candidates):
            worth = self._worth(candidate, view)
            if worth.below >= 1:
                now[at] = True
                continue
            sparse = next(iter(getattr(candidate.match, "sparse", ())), None)
            source = source_of(candidate.match.anchor, *reversed(candidate.match.swallowed))
            if worth.below > 0 and sparse is not None and frame is not None:
                sites.append((at, _site(candidate, worth, sparse, source), sparse))
                continue
            reason = worth.reason
            if worth.below > 0:
                reason += "; nothing can be counted here (exported, or not compiled by Dynamo)"
            self.pending.append(
                Pending(
                    candidate.pattern.name, source.location, None, worth.below, reason, source.text
                )
            )
        if sites:
            value = next(tensors_in(fake(candidates[sites[0][0]].match.anchor)))
            self.profile = profile_of([site for _, site, _ in sites], frame, value.device)
            for index, (at, _, sparse) in enumerate(sites):
                now[at] = self.profile.version[index]
                if not now[at]:
                    self._watched.append((index, sparse))
        return now

    def _worth(self, candidate: _Candidate, view: Any) -> Worth:
        choice = self._policy.get(candidate.pattern.name, "always")
        if choice != "auto":
            return Worth(float(choice == "always"), f"the policy is {choice!r}")
        ask = getattr(candidate.pattern, "worth", None)
        return Worth(1.0) if ask is None else ask(candidate.match, view)

    def watch(self, graph: fx.Graph) -> None:
        """Have the graph count where blocks run as written, and its code ask the profile; both are optional."""
        if self.profile is None:
            return
        before = Snapshot(graph)
        try:
            watch(graph, self.profile, self._watched)
            graph.lint()
        except Exception as error:
            before.restore()
            log.debug("nothing is counted in this graph", exc_info=error)


def _site(candidate: _Candidate, worth: Worth, sparse: Sparse, source: Source) -> Site:
    value = fake(sparse.node)
    value = value if sparse.result is None else value[sparse.result]
    return Site(
        candidate.pattern.name, source.location, source.text, sparse.what,
        static_size(value.shape[sparse.dim]), worth.below,
    )  # fmt: skip
