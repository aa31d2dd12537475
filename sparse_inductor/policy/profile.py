"""Profiles: what the blocks of one compiled graph were seen to compute, and which of them are rewritten for it.

A watched block runs as written. Beside it the graph adds the active elements of a sample of rows to the block's
counters, in one kernel of Inductor's: a single sum would take two, and a third to write it into its place. A guard of
the compiled code asks the profile at each call whether the code is still the one to run (`Profile.accepts`), which is
where the counters are read, at the calls in `LOOKS` and at every `RECHECK`-th. Where that changes what is rewritten,
the guard fails at the next call, Dynamo compiles the frame anew, and the pass finds the profile again. Code compiled
before is kept by Dynamo and used again without compiling when its guard holds again.

A rewritten block is not counted; every `RECHECK` calls the code as written runs twice instead.

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
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph.emit import Emitter
from ..graph.fakes import fake, static_size, tensors_in
from ..pattern import Sparse
from ..reporting.findings import Pending
from .popular import Apart, cheapest, cost

ROWS = 16
"""Rows of a call that are counted: enough to tell 0.5 % of thousands of neurons from 1 %. Twice as many where popular
ones are told apart, by the calls up to a look together."""
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
        # Nothing ran, or more than the counters hold.
        if not len(total) or not total.all() or (active > total).any():
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
        # Of a rewritten block few calls were counted: too few rows to tell anew who is popular.
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
            sizes = [site.counters for site in self.sites]
            self.counters = [torch.zeros(n, dtype=torch.int64, device=device) for n in sizes]
            self._before = torch.zeros(sum(sizes), dtype=torch.int64, device="cpu")
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

    def begins(self) -> None:
        """Take note of the call that code of the current version is compiled for."""
        with self._lock:
            self._compiled.add(self.version)
            self._stay(compat.checkpoint_under_way())

    def _stay(self, checkpoint: Any) -> None:
        if checkpoint is not None:
            self._within[checkpoint] = self.version

    def accepts(self, version: Version) -> bool:
        """Whether code of this version is the one to run now: what its guard asks.

        A call that is due for a look reads what the calls before it counted. Where blocks are rewritten, the next two
        run as written, and the second reads what the first counted. What is decided holds from the next call on: Dynamo
        asks the versions that it has one after the other, in an order of its own. A checkpoint runs one version, in its
        forward and when it computes that again: their saved tensors have to be the same.
        """
        with self._lock:
            checkpoint = compat.checkpoint_under_way()
            if checkpoint is not None and checkpoint in self._within:
                return version == self._within[checkpoint]
            if self._wanted != self.version and self._may_run(self._wanted):
                self.version = self._wanted
            if version != self.version:
                return False
            self._stay(checkpoint)
            self.calls += 1
            if self._recount:
                self._recount -= 1
                if not self._recount:
                    self._look()
            elif self._due() and compat.may_recompile(self._code):
                if self.version != self._written:
                    self._recount, self._wanted = 2, self._written
                else:
                    self._look()
            return True

    def _may_run(self, version: Version) -> bool:
        return version in self._compiled or compat.may_recompile(self._code)

    def _due(self) -> bool:
        return self.calls in LOOKS or self.calls % RECHECK == 0

    def _look(self) -> None:
        """Read the counters, which waits for the device, and decide."""
        if self.counters[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        with compat.outside_modes():
            now = torch.cat(self.counters).cpu()
            added = (now - self._before).split([site.counters for site in self.sites])
            for site, counts in zip(self.sites, added):
                site.decide(counts % ELEMENT, counts // ELEMENT)
        self._before, self.looked_at = now, self.calls
        self._wanted = tuple(site.version for site in self.sites)

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
        self.names = [str(next(_numbers)) for _ in profile.sites]
        for name, tensor in zip(self.names, profile.counters):
            counters[name] = tensor
            weakref.finalize(self, counters.pop, name, None)


_numbers = itertools.count()
_kept: weakref.WeakValueDictionary[Hashable, Kept] = weakref.WeakValueDictionary()
counters: dict[str, torch.Tensor] = {}
"""What graphs count into, by the name that their guards know it under."""
BUFFER = "sparse_inductor_counters"
"""Their name in a graph, before a block's number: the same in every process, so that Inductor's caches find the graph
again."""


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
        if compiled:
            return kept.profile.accepts(version)
        kept.profile.begins()
        return True

    compat.add_guard(holds, f"sparse_inductor: version {version}")
    of = dict(watched)
    for number, (site, counters) in enumerate(zip(profile.sites, profile.counters)):
        if site not in of:  # it is rewritten
            continue
        mode = next(tensors_in(fake(of[site].node))).fake_mode
        with mode:
            counts = _count(site, of[site])
        name = f"{BUFFER}_{number}"
        kept_as = (__name__, "counters", kept.names[number])
        compat.add_buffer(graph.owning_module, name, counters, kept_as)
        e = Emitter(next(iter(graph.find_nodes(op="output"))))
        e.method("add_", e.attribute(name, mode.from_tensor(counters)), counts)


def counters_for(sparse: Sparse, apart: Apart | None) -> int:
    """How many counters `_count` needs."""
    if apart is not None:
        return 2 * _value(sparse).shape[sparse.dim]
    return _rows_counted(_value(sparse), sparse.dim)


def _value(sparse: Sparse) -> torch.Tensor:
    value = fake(sparse.node)
    return value if sparse.result is None else value[sparse.result]


def _rows_counted(value: torch.Tensor, dim: int) -> int:
    """`ROWS`, or all there are where they are known to be fewer."""
    sizes = [static_size(size) for d, size in enumerate(value.shape) if d != dim % value.dim()]
    return ROWS if None in sizes else min(ROWS, math.prod(size or 0 for size in sizes))


def _count(site: Site, sparse: Sparse) -> fx.Node:
    """Count the active elements of some rows, evenly spaced, and all elements of these: what the counters add up."""
    e, t = Emitter(sparse.node.next), sparse.node
    if sparse.result is not None:
        t = e.call(operator.getitem, t, sparse.result)
    row = e.size(t, sparse.dim)
    rows = e.method("reshape", e.method("movedim", t, sparse.dim, -1), -1, row)
    number = _rows_counted(_value(sparse), sparse.dim) if site.apart is None else 2 * ROWS
    numbers = e.call(torch.arange, number, device=fake(t).device)
    spaced = e.call(operator.mul, numbers, e.size(rows, 0))
    active = e.call(torch.gt if sparse.positive else torch.ne, rows, 0)
    counted = e.call(operator.add, active, ELEMENT)
    if not static_size(fake(rows).shape[0]):
        # Where there are no rows, one of zeros behind the last is read.
        counted = e.call(torch.nn.functional.pad, counted, (0, 0, 0, 1))
    counted = e.call(operator.getitem, counted, e.call(operator.floordiv, spaced, number))
    if site.apart is None:
        return e.method("sum", counted, 1)
    halves = e.method("view", counted, ROWS, 2, row)
    return e.method("flatten", e.method("sum", halves, 0))


def counts_of(active: torch.Tensor, site: Site, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(active, total) as `Site.decide` takes them, of all elements of a tensor that a graph has computed."""
    if site.apart is None or active.numel() < 2 * active.shape[dim]:
        return active.sum().view(1), active.new_full((1,), active.numel(), dtype=torch.int64)
    rows = active.movedim(dim, -1).flatten(0, -2)
    halves = rows[::2], rows[1::2]
    counts = torch.cat([half.sum(0) for half in halves])
    return counts, torch.cat([counts.new_full(half.shape[1:], len(half)) for half in halves])
