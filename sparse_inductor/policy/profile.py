"""Profiles: the measured densities of the blocks of one compiled graph, which determine the blocks to rewrite.

A watched block runs as written. An added operator counts the active elements of a sample of rows into the block's
counters, at some calls (`counting`). At each call, a guard of the compiled code asks the profile whether this version
of the code is still the right one (`Profile.accepts`). The guard also reads the counters, at the calls in `LOOKS` and
at every `RECHECK`-th call. If a decision changes, the guard fails at the next call, Dynamo recompiles the frame, and
the pass finds the profile again. Dynamo keeps the earlier cache entry and reuses it when its guard holds again.

A rewritten block is not counted. Instead, the code as written runs for two calls after every `RECHECK` calls.

Decisions do not change where the program forbids recompilation (`set_stance`, `error_on_recompile`), or where Dynamo
already holds half of the cache entries that `recompile_limit` allows for the frame. Cache entries compiled because of a
profile do not count towards that limit, so the program's own shapes can use all of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph.emit import Emitter
from ..graph.fakes import fake
from ..pattern import Sparse
from ..reporting.findings import Pending
from . import counting
from .popular import Apart, cheapest, cost

LOOKS = (4, 32, 256)
RECHECK = 1024
COUNTED = 8
"""Calls, evenly spaced, that are counted before the counters are read."""
MARGIN = 1.25
"""A rewritten block runs as written again when its cost reaches this many times the break-even share."""
MOST_CHANGES = 4
"""A block stays as written once its decision has changed this often."""


@dataclasses.dataclass(eq=False)
class Site:
    """One watched block: its location, its break-even share, and the last counts.

    apart: the costs of popular elements, if the operator can compute some for all rows; each element of a row is then
    counted separately, in two halves of the sample. share: the active share of the elements. cost: the active share
    that would take equally long without `popular` elements.
    """

    pattern: str
    location: str
    source: str
    what: str
    row: int | None
    below: float
    apart: Apart | None = None
    share: float | None = None
    cost: float = 0.0
    popular: torch.Tensor | None = None
    rewritten: bool = False
    changes: int = 0

    @property
    def counters(self) -> int:
        """The number of counters: 1 for all elements together, or two for each element of a row."""
        return 1 if self.apart is None or not self.row else 2 * self.row

    @property
    def version(self) -> int | None:
        """The version to run: None for as written, else the number of popular elements of the operator."""
        return (0 if self.popular is None else len(self.popular)) if self.rewritten else None

    @property
    def limit(self) -> float:
        """The cost below which the operator is faster."""
        return self.below if self.apart is None or self.popular is None else self.apart.below

    def decide(self, active: torch.Tensor, total: int) -> None:
        """Update the decision. active: [counters], the numbers of active elements, each out of `total`."""
        if not total or not len(active):  # nothing ran
            return
        self.share = self.cost = int(active.sum()) / (total * len(active))
        if self.apart is not None:
            self._take_apart(active.view(2, -1), total, self.apart)
        limit = self.limit * (MARGIN if self.rewritten else 1.0)
        wanted = self.cost < limit and self.changes < MOST_CHANGES
        self.changes += wanted != self.rewritten
        self.rewritten = wanted

    def _take_apart(self, active: torch.Tensor, rows: int, apart: Apart) -> None:
        """Choose the popular elements and update the cost. active: [2, N], each counted in `rows` rows."""
        popular = self.popular
        # For a rewritten block only one call was counted: too few rows to choose the popular elements again.
        if not self.rewritten:
            popular, self.popular = cheapest(active, rows, apart), None
        if popular is not None:
            found = cost(active[1], rows, apart, popular)
            if self.rewritten or found < min(self.cost, apart.below):
                self.cost, self.popular = found, popular

    def finding(self, looked: str) -> Pending:
        """Return the report's entry for the block while it runs as written; `looked`: when the counters were read."""
        return Pending(
            self.pattern, self.location, self.share, self.limit, self._why(looked), self.source
        )

    def _why(self, looked: str) -> str:
        of = self.what if self.row is None else f"{self.row:,} {self.what}"
        pays = f"pays below {self.limit:.2%} here"
        if self.share is None:
            return f"{of} not counted yet; {pays}"
        if self.changes >= MOST_CHANGES:
            pays += f", and has changed {self.changes} times"
        share = f"{self.share:.2%} of {of} active"
        if self.popular is not None:
            share += (
                f", which cost {self.cost:.2%} with the {len(self.popular):,} most popular apart"
            )
        return f"{share}; {pays}; {looked}"


Version = tuple[int | None, ...]
"""For each watched block, None if it runs as written, else the number of popular neurons of its operator."""


class Profile:
    """The watched blocks of one graph. `version` is the version of the code to run."""

    def __init__(
        self, sites: Sequence[Site], device: torch.device, code: types.CodeType | None = None
    ) -> None:
        self.sites = tuple(sites)
        with torch.inference_mode(False):
            # [active elements or total elements, counter], one tensor for all blocks: each graph input costs host time.
            number = sum(site.counters for site in self.sites)
            self.counters = torch.zeros(2, number, dtype=torch.int64, device=device)
        self._code = code
        self._written: Version = (None,) * len(self.sites)
        self.version: Version = self._written
        self.calls = 0
        self.looked_at = 0
        self._wanted: Version = self._written
        self._recount = 0
        self._compiled: set[Version] = set()
        self._within: weakref.WeakKeyDictionary[Any, Version] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._plan()

    def begins(self, version: Version) -> None:
        """Record the call for which code of this version is compiled."""
        with self._lock:
            self._compiled.add(version)
            self._stay(compat.checkpoint_under_way(), version)
            counting.call.due = self.calls % self._every == 0

    def has_others(self, version: Version) -> bool:
        """Whether all code compiled so far has other versions, so that this one is an additional cache entry."""
        return bool(self._compiled) and version not in self._compiled

    def _stay(self, checkpoint: Any, version: Version) -> None:
        if checkpoint is not None:
            self._within[checkpoint] = version

    def accepts(self, version: Version) -> bool:
        """Whether code of this version is to run now; called by its guard.

        At the calls in `LOOKS` and every `RECHECK` calls, read the counts of the previous calls. If blocks are
        rewritten, the next two calls run as written, and the second reads the counts of the first. A decision takes
        effect at the next call, because Dynamo evaluates the guards of its cache entries in an unspecified order. A
        checkpoint uses one version in its forward and its recomputation, which have to save the same tensors.
        """
        with self._lock:
            checkpoint = compat.checkpoint_under_way()
            if checkpoint is not None and checkpoint in self._within:
                return version == self._within[checkpoint]
            if self._wanted != self.version and self._may_run(self._wanted):
                self.version = self._wanted
            if version != self.version:
                return False
            self._stay(checkpoint, version)
            self.calls += 1
            due = self.calls == self._next
            if due:
                self._plan()
            if self._recount:
                self._recount -= 1
                if not self._recount:
                    self._look()
            elif due and compat.may_recompile(self._code):
                if self.version != self._written:
                    self._recount, self._wanted = 2, self._written
                else:
                    self._look()
            counting.call.due = bool(self._recount) or self.calls % self._every == 0
            return True

    def _may_run(self, version: Version) -> bool:
        return version in self._compiled or compat.may_recompile(self._code)

    def _plan(self) -> None:
        """Determine the call at which the counters are read next, and which calls are counted until then."""
        looks = (call for call in LOOKS if call > self.calls)
        self._next = next(looks, (self.calls // RECHECK + 1) * RECHECK)
        # An odd interval, because programs often alternate with an even period.
        self._every = (self._next - self.calls) // COUNTED | 1

    def _look(self) -> None:
        """Read the counters, which synchronises with the device, and decide."""
        if self.counters.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        with compat.outside_modes():
            found = self.counters.cpu().split([site.counters for site in self.sites], 1)
            for site, (active, total) in zip(self.sites, found):
                site.decide(active, int(total[0]))
            self.counters.zero_()
        self.looked_at = self.calls
        self._wanted = tuple(site.version for site in self.sites)

    def pending(self) -> list[Pending]:
        """The blocks that run as written."""
        return [
            s.finding(f"looked at after {self.looked_at:,} calls")
            for s in self.sites
            if not s.rewritten
        ]


class Kept:
    """Keeps a profile alive while compiled code refers to it.

    If Dynamo drops that code, a later compilation starts with empty counters.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.name = str(next(_numbers))
        counters[self.name] = profile.counters
        weakref.finalize(self, counters.pop, self.name, None)


_numbers = itertools.count()
_kept: weakref.WeakValueDictionary[Hashable, Kept] = weakref.WeakValueDictionary()
counters: dict[str, torch.Tensor] = {}
"""The counters of each profile, by the name that the guards of its graphs use."""
BUFFER = "sparse_inductor_counters"
"""The name of the counters in a graph: the same in every process, so that Inductor's caches recognise the graph."""


def profile_of(sites: Sequence[Site], inputs: Hashable, device: torch.device) -> Kept:
    """Return the profile of these blocks in the code that Dynamo compiles: the existing profile, if it is still kept.

    inputs: a key that distinguishes this code from cache entries for other arguments.
    """
    code, frame = compat.current_code(), compat.current_frame()
    blocks = tuple((s.pattern, s.location, s.row, s.counters) for s in sites)
    key = (compat.resets(), code, frame, inputs, device, blocks)
    found = _kept.get(key)
    if found is None or code is None:
        found = _kept[key] = Kept(Profile(sites, device, code))
    return found


def watch(
    graph: fx.Graph, kept: Kept, version: Version, watched: Sequence[tuple[Site, Sparse]]
) -> None:
    """Add counters for these sites to the graph of a version, and a guard that asks the profile before the code runs.

    Must be called while Dynamo compiles the graph's frame.
    """
    profile = kept.profile
    compiled = False

    def holds() -> bool:
        nonlocal compiled
        # While it compiles, Dynamo evaluates the new guards several times to measure how long they take.
        compiled = compiled or compat.current_compile() is None
        if compiled:
            return kept.profile.accepts(version)
        profile.begins(version)
        return True

    counting.install()
    compat.add_guard(
        holds, f"sparse_inductor: version {version}", counts=not profile.has_others(version)
    )
    if not watched:
        return
    kept_as = (__name__, "counters", kept.name)
    compat.add_buffer(graph.owning_module, BUFFER, profile.counters, kept_as)
    of, end, like = dict(watched), 0, profile.counters
    for site in profile.sites:
        first, end = end, end + site.counters
        if site not in of:  # it is rewritten
            continue
        sparse = of[site]
        e, t = Emitter(sparse.node.next), sparse.node
        if sparse.result is not None:
            t = e.call(operator.getitem, t, sparse.result)
        reader = sparse.reader
        if reader is not None and fake(reader).dtype.itemsize < fake(t).dtype.itemsize:
            # Counting writes the tensor to memory. Cast it first, as autocast does for the product that reads it.
            cast = e.cast(t, fake(reader).dtype)
            reader.replace_input_with(t, cast)
            t = cast
        with fake(t).fake_mode:
            buffer = e.attribute(
                BUFFER, torch.empty(like.shape, dtype=like.dtype, device=like.device)
            )
        t = e.method("detach", t)
        where = buffer, first, site.counters, sparse.dim, sparse.positive
        e.declared(lambda: None, counting.operator, t, *where)
