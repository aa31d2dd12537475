"""Decides by policy which matches of one graph are rewritten now, and adds counters to the graph for the others."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from .. import compat
from ..graph.fakes import fake, static_size, tensors_in
from ..graph.view import GraphView
from ..pattern import Match, Pattern, Sparse
from ..reporting.findings import Pending
from ..reporting.source import Source, source_of
from ..snapshot import Snapshot
from .profile import Kept, Profile, Site, Version, profile_of, watch
from .worth import Worth

log = logging.getLogger("sparse_inductor")


class _Candidate(Protocol):
    @property
    def pattern(self) -> Pattern: ...
    @property
    def match(self) -> Match: ...


class Decisions:
    """The decisions about one graph.

    The report shows `pending` and `profile`. dry: add no counters to the graph (for `explain`, which reads the values
    itself); `watched` then lists the blocks that would have been counted.
    """

    def __init__(self, policy: Mapping[str, str], dry: bool = False) -> None:
        self._policy = policy
        self._dry = dry
        self.watched: list[tuple[Site, Sparse]] = []
        self.pending: list[Pending] = []
        self._kept: Kept | None = None
        self._version: Version = ()

    @property
    def as_written(self) -> frozenset[str]:
        """Names of the patterns with a match that runs as written."""
        return frozenset({p.pattern for p in self.pending} | {s.pattern for s, _ in self.watched})

    @property
    def profile(self) -> Profile | None:
        return None if self._kept is None else self._kept.profile

    def take(self, candidates: Sequence[_Candidate], view: GraphView) -> list[bool]:
        """Decide for each candidate whether it is rewritten now; its profile decides if its worth depends on data."""
        now = [False] * len(candidates)
        sites: list[tuple[int, Site, Sparse]] = []
        where = _countable(view.graph) if "auto" in self._policy.values() else ""
        for at, candidate in enumerate(candidates):
            worth = self._worth(candidate, view)
            if worth.below >= 1:
                now[at] = True
                continue
            sparse = next(iter(getattr(candidate.match, "sparse", ())), None)
            source = source_of(candidate.match.anchor, *reversed(candidate.match.matched_nodes))
            if worth.below > 0 and sparse is not None and (self._dry or not where):
                sites.append((at, _site(candidate, worth, sparse, source), sparse))
                continue
            reason = worth.reason
            if worth.below > 0:
                pays = f"pays below {worth.below:.2%} active here"
                reason = f"{pays}, and nothing can be counted {where or 'of it'}"
            self.pending.append(
                Pending(
                    candidate.pattern.name, source.location, None, worth.below, reason, source.text
                )
            )
        if self._dry:
            self.watched = [(site, sparse) for _, site, sparse in sites]
        elif sites:
            device = next(tensors_in(fake(candidates[sites[0][0]].match.anchor))).device
            self._kept = profile_of([site for _, site, _ in sites], _inputs(view.graph), device)
            profile = self._kept.profile
            # Read once: a guard of another thread may change it while this thread compiles.
            self._version = profile.version
            for (at, _, sparse), site, version in zip(sites, profile.sites, self._version):
                now[at] = version is not None
                if version is None:
                    self.watched.append((site, sparse))
                elif site.apart is not None:
                    match: Any = candidates[at].match
                    match.popular = version
        return now

    def _worth(self, candidate: _Candidate, view: GraphView) -> Worth:
        choice = self._policy.get(candidate.pattern.name, "always")
        if choice != "auto":
            return Worth(float(choice == "always"), f"the policy is {choice!r}")
        ask = getattr(candidate.pattern, "worth", None)
        if ask is None:
            return Worth(1.0)
        try:
            return ask(candidate.match, view)
        except Exception as error:
            log.debug("nothing is known about the gain of a match", exc_info=error)
            return Worth(0.0, f"its size cannot be told ({type(error).__name__}: {error})")

    def watch(self, graph: fx.Graph) -> None:
        """Add counters for blocks that run as written, and a guard that asks the profile. Failures are only logged."""
        if self._kept is None:
            return
        before = Snapshot(graph)
        try:
            watch(graph, self._kept, self._version, self.watched)
            graph.lint()
        except Exception as error:
            before.restore()
            log.debug("nothing is counted in this graph", exc_info=error)


def _countable(graph: fx.Graph) -> str:
    """Return a phrase that says where nothing can be counted; empty if this graph can count."""
    if compat.current_code() is None:
        return "in what is exported or compiled without Dynamo"
    if compat.graph_end(graph.owning_module) is None:  # a body runs again in the backward
        return "within a checkpoint or another function that the graph calls"
    # Counts differ between ranks, and a rank that recompiles alone waits for the others.
    if compat.ranks_compile_alike():
        return "where the ranks of a distributed job have to compile the same graphs"
    return ""


def _inputs(graph: fx.Graph) -> tuple[Hashable, ...]:
    """Return a key that distinguishes the cache entries of one frame that Dynamo compiles for different arguments."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes + tuple(
        (t.dtype, t.requires_grad, tuple(map(static_size, t.shape)))
        for n in graph.find_nodes(op="placeholder")
        if isinstance(t := fake(n), torch.Tensor)
    )


def _site(candidate: _Candidate, worth: Worth, sparse: Sparse, source: Source) -> Site:
    value = fake(sparse.node)
    value = value if sparse.result is None else value[sparse.result]
    row = static_size(value.shape[sparse.dim])
    apart = None if row is None else worth.apart
    return Site(
        candidate.pattern.name, source.location, source.text, sparse.what, row, worth.below, apart
    )
