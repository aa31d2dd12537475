"""Profiles: what the blocks of one compiled graph were seen to compute, and which of them are rewritten for it.

A watched block runs as written. Beside it the graph counts the active elements of a sample of rows, which takes one
kernel of Inductor's a block, and adds the counts of all blocks to `Profile.counters` at its end, in one more: a single
sum would take two kernels, and a third to write it into its place. A guard of the compiled code asks the
profile at each call whether the code is still the one to run (`Profile.accepts`), which is where the counters are read,
at the calls in `LOOKS` and at every `RECHECK`-th. Where that changes what is rewritten, the guard fails, Dynamo
compiles the frame anew, and the pass finds the profile again. Code compiled before is kept by Dynamo and used again
without compiling when its guard holds again.

A rewritten block is not counted; every `RECHECK` calls the code as written runs once instead.

Nothing changes where the program says that it must not be compiled anew (`set_stance`, `error_on_recompile`), or where
Dynamo holds half as many versions of the frame as it keeps: what is left belongs to the program's own shapes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import threading
import types
import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import fx

from .. import compat
from ..graph.emit import Emitter
from ..graph.fakes import expected, fake, static_size, tensors_in
from ..pattern import Sparse
from ..reporting.findings import Pending
from .popular import Apart, cheapest, cost

__all__ = ["Kept", "Profile", "Site", "counters_for", "counts_of", "profile_of", "watch"]

ROWS = 16
"""Rows of a call that are counted, at least: enough to tell 0.5 % of thousands of neurons from 1 %. Twice as many where
popular ones are told apart, by the calls up to a look together."""
LOOKS = (4, 32, 256)
RECHECK = 1024
MARGIN = 1.25
"""A rewritten block goes back where this many times the break-even share is active."""
MOST_CHANGES = 4
"""A block that has changed its mind this often stays as written."""
ELEMENT = 1 << 32
"""A counter is the number of active elements, and this many times the number of all: two sums that one kernel writes.
A row of 10,000 neurons can be counted 200,000 times between two looks."""


@dataclasses.dataclass(eq=False)
class Site:
    """One watched block: where it is, when its operator is faster, what was counted last.

    apart: where popular elements of a row may be taken for all rows. counters: how many numbers are counted in: one for
    each row of the sample, or, with `apart`, one for each element of a row, of either half of the sample. share: of the
    elements that were active; cost: the share that would take as long without `popular` ones.
    """

    pattern: str
    location: str
    source: str
    what: str
    row: int | None
    below: float
    apart: Apart | None = None
    counters: int = 1
    share: float | None = None
    cost: float = 0.0
    popular: torch.Tensor | None = None
    rewritten: bool = False
    changes: int = 0

    @property
    def version(self) -> int | None:
        """What runs: None as written, or how many are taken as popular."""
        return (0 if self.popular is None else len(self.popular)) if self.rewritten else None

    @property
    def limit(self) -> float:
        """The cost below which the operator is faster."""
        return self.below if self.apart is None or self.popular is None else self.apart.below

    def decide(self, active: torch.Tensor, total: torch.Tensor) -> None:
        """Take note of counts, [counters] each; `version` is what follows from them."""
        if not total.all() or (active > total).any():  # nothing ran, or more than the counters hold
            return
        share = int(active.sum()) / int(total.sum())
        self.share = self.cost = share
        if self.apart is not None and len(active) > 1:
            self._take_apart(active.view(2, -1), total.view(2, -1), self.apart)
        limit = self.limit * (MARGIN if self.rewritten else 1.0)
        wanted = self.cost < limit and self.changes < MOST_CHANGES
        self.changes += wanted != self.rewritten
        self.rewritten = wanted

    def _take_apart(self, active: torch.Tensor, rows: torch.Tensor, apart: Apart) -> None:
        """Decide whether popular elements are, and at what cost; active, rows: [2, N], of two samples."""
        popular = self.popular
        # Of a rewritten block a single call was counted: too few rows to tell anew who is popular.
        if not self.rewritten:
            popular, self.popular = cheapest(active, rows, apart), None
        if popular is not None:
            found = cost(active[1], rows[1], apart, popular)
            if self.rewritten or found < min(self.cost, apart.below):
                self.cost, self.popular = found, popular

    def finding(self, looked: str) -> Pending:
        """What the report says of the block while it runs as written; `looked`: when the count was read."""
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
"""Of each watched block: None as written, or rewritten with so many popular neurons."""


class Profile:
    """The watched blocks of one graph. `version` is that of the code to run."""

    def __init__(
        self, sites: Sequence[Site], device: torch.device, code: types.CodeType | None = None
    ) -> None:
        self.sites = tuple(sites)
        with torch.inference_mode(False):
            counters = sum(site.counters for site in self.sites)
            self.counters = torch.zeros(counters, dtype=torch.int64, device=device)
            self._before = torch.zeros(counters, dtype=torch.int64, device="cpu")
        self._code = code
        self._written: Version = (None,) * len(self.sites)
        self.version: Version = self._written
        self.calls = 0
        self.looked_at = 0
        self._recount: str | None = None
        self._lock = threading.Lock()

    def accepts(self, version: Version) -> bool:
        """Whether code of this version is the one to run now: what its guard asks.

        A call that is due for a look reads what the calls before it counted. Where blocks are rewritten, it runs as
        written instead, and the next call reads what it counted.
        """
        with self._lock:
            if version != self.version:
                return False
            self.calls += 1
            if self._recount == "running":
                self._recount = None
                self._look()
            elif self._recount == "due":
                self._recount = "running"
            elif self._due() and compat.may_recompile(self._code):
                if self.version != self._written:
                    self._recount, self.version = "due", self._written
                else:
                    self._look()
            return version == self.version

    def _due(self) -> bool:
        return self.calls in LOOKS or self.calls % RECHECK == 0

    def _look(self) -> None:
        """Read the counters, which waits for the device, and decide."""
        if self.counters.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        with compat.outside_modes():
            now = self.counters.to("cpu", copy=True)
            added = (now - self._before).split([site.counters for site in self.sites])
            for site, counts in zip(self.sites, added):
                site.decide(counts % ELEMENT, counts // ELEMENT)
        self._before, self.looked_at = now, self.calls
        self.version = tuple(site.version for site in self.sites)

    def pending(self) -> list[Pending]:
        """The blocks that run as written."""
        return [
            s.finding(f"looked at after {self.looked_at:,} calls")
            for s in self.sites
            if not s.rewritten
        ]


class Kept:
    """A profile as long as code asks it: what Dynamo forgets begins anew when it is compiled again."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.name = str(next(_numbers))
        counters[self.name] = profile.counters
        weakref.finalize(self, counters.pop, self.name, None)


_numbers = itertools.count()
_kept: weakref.WeakValueDictionary[Hashable, Kept] = weakref.WeakValueDictionary()
counters: dict[str, torch.Tensor] = {}
"""What graphs count into, by the name that their guards know it under."""
BUFFER = "sparse_inductor_counters"
"""Its name in a graph: the same in every process, so that Inductor's caches find the graph again."""


def profile_of(sites: Sequence[Site], inputs: Hashable, device: torch.device) -> Kept:
    """The profile of these blocks in the code that Dynamo compiles: the one that it has asked before, if it has.

    inputs: what tells this version of the code from others that are kept for other arguments.
    """
    code, frame = compat.current_code(), compat.current_frame()
    blocks = tuple((s.pattern, s.location, s.row, s.counters) for s in sites)
    key = (compat.resets(), code, frame, inputs, device, blocks)
    found = _kept.get(key)
    if found is None or code is None:
        found = _kept[key] = Kept(Profile(sites, device, code))
    return found


def watch(graph: fx.Graph, kept: Kept, watched: Sequence[tuple[Site, Sparse]]) -> None:
    """Have the graph count for each of these sites, and its code ask the profile before it runs.

    Must be called while Dynamo compiles the graph's frame.
    """
    profile = kept.profile
    version = profile.version
    compiled = False

    def holds() -> bool:
        nonlocal compiled
        # Dynamo asks several times about the call that it compiles the code for, to see how long that takes.
        compiled = compiled or compat.current_compile() is None
        return kept.profile.accepts(version) if compiled else True

    compat.add_guard(holds, f"sparse_inductor: version {version}")
    if not watched:
        return
    compat.add_buffer(
        graph.owning_module, BUFFER, profile.counters, (__name__, "counters", kept.name)
    )
    counts = {site: _count(site, sparse) for site, sparse in watched}
    e = Emitter(next(iter(graph.find_nodes(op="output"))))
    mode = next(tensors_in(fake(watched[0][1].node))).fake_mode
    buffer = e.attribute(BUFFER, mode.from_tensor(profile.counters))
    nothing = {"dtype": torch.int64, "device": profile.counters.device}
    for site in profile.sites:
        if site not in counts:  # it is rewritten
            counts[site] = e.call(torch.zeros, site.counters, **nothing)
    e.method("add_", buffer, e.call(torch.cat, [counts[site] for site in profile.sites]))


def counters_for(sparse: Sparse, apart: Apart | None) -> int:
    """How many counters `_count` needs; without `apart` one for all rows where their number is symbolic."""
    value = _value(sparse)
    sizes = [size for size in map(static_size, value.shape) if size is not None]
    if apart is not None:
        return 2 * value.shape[sparse.dim]
    if len(sizes) < value.dim():
        return 1
    axis, every = _sample(sparse, ROWS)
    sizes[sparse.dim] = 1
    if axis is not None:
        sizes[axis] = -(-sizes[axis] // every)
    return math.prod(sizes)


def _value(sparse: Sparse) -> torch.Tensor:
    value = fake(sparse.node)
    return value if sparse.result is None else value[sparse.result]


def _sample(sparse: Sparse, most: int) -> tuple[int | None, int]:
    """(axis, n): every n-th row along the axis is counted, `most` of all or some more; all rows where the axis is
    None."""
    sizes = [expected(size) for size in _value(sparse).shape]
    rows = math.prod(sizes) // max(1, sizes[sparse.dim])
    others = [d for d in range(len(sizes)) if d != sparse.dim % len(sizes)]
    if not others or rows <= most:
        return None, 1
    axis = max(others, key=sizes.__getitem__)
    return axis, min(rows // most, sizes[axis])


def _count(site: Site, sparse: Sparse) -> fx.Node:
    """Count the active elements of a sample of rows, and all elements of it; the result is added to the counters."""
    e, t = Emitter(sparse.node.next), sparse.node
    if sparse.result is not None:
        t = e.call(operator.getitem, t, sparse.result)
    axis, every = _sample(sparse, ROWS if site.apart is None else 2 * ROWS)
    if axis is not None:
        t = e.call(operator.getitem, t, (slice(None),) * axis + (slice(None, None, every),))
    active = e.call(torch.gt if sparse.positive else torch.ne, t, 0)
    if site.apart is not None:
        rows = e.method("reshape", e.method("movedim", active, sparse.dim, -1), -1, site.row)
        halves = [e.call(operator.getitem, rows, slice(i, None, 2)) for i in range(2)]
        return e.call(torch.cat, [_sums(e, half, 0) for half in halves])
    if all(static_size(size) is not None for size in fake(t).shape):
        return e.method("flatten", _sums(e, active, sparse.dim))
    active = e.method("reshape", e.method("sum", active), 1)
    elements = e.call(operator.mul, e.method("numel", t), ELEMENT)
    return e.call(operator.add, active, elements)


def _sums(e: Emitter, active: fx.Node, dim: int) -> fx.Node:
    """The active elements along a dimension, and how many they all are, as counters have them."""
    elements = e.call(operator.mul, e.method("size", active, dim), ELEMENT)
    return e.call(operator.add, e.method("sum", active, dim), elements)


def counts_of(active: torch.Tensor, site: Site, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(active, total) as `Site.decide` takes them, of all elements of a tensor that a graph has computed."""
    if site.apart is None or active.numel() < 2 * active.shape[dim]:
        return active.sum().view(1), active.new_full((1,), active.numel(), dtype=torch.int64)
    rows = active.movedim(dim, -1).flatten(0, -2)
    halves = rows[::2], rows[1::2]
    counts = torch.cat([half.sum(0) for half in halves])
    return counts, torch.cat([counts.new_full(half.shape[1:], len(half)) for half in halves])
