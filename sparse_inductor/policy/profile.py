"""Profiles: what the blocks of one compiled graph were seen to compute, and which of them are rewritten for it.

A watched block runs as written. An operator beside it adds the active elements of a sample of rows to the block's
counters, at some calls (`counting`). A guard of the compiled code asks the profile at each call whether the code is
still the one to run (`Profile.accepts`), which is where the counters are read, at the calls in `LOOKS` and at every
`RECHECK`-th. Where that changes what is rewritten, the guard fails at the next call, Dynamo compiles the frame anew,
and the pass finds the profile again. Code compiled before is kept by Dynamo and used again without compiling when its
guard holds again.

A rewritten block is not counted; every `RECHECK` calls the code as written runs twice instead.

Nothing changes where the program says that it must not be compiled anew (`set_stance`, `error_on_recompile`), or where
Dynamo holds half as many versions of the frame as it keeps. The program's own shapes may have them all: what is
compiled because of a profile does not count.
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
"""Calls that are counted before a look, evenly spaced."""
MARGIN = 1.25
"""A rewritten block goes back where this many times the break-even share is active."""
MOST_CHANGES = 4
"""A block that has changed its mind this often stays as written."""


@dataclasses.dataclass(eq=False)
class Site:
    """One watched block: where it is, when its operator is faster, what was counted last.

    apart: where popular elements of a row may be taken for all rows, each of which is counted then, in either half of
    the sample. share: of the elements that were active; cost: the share that would take as long without `popular` ones.
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
        """How many elements, or groups of them, are counted each for itself."""
        return 1 if self.apart is None or not self.row else 2 * self.row

    @property
    def version(self) -> int | None:
        """What runs: None as written, or how many are taken as popular."""
        return (0 if self.popular is None else len(self.popular)) if self.rewritten else None

    @property
    def limit(self) -> float:
        """The cost below which the operator is faster."""
        return self.below if self.apart is None or self.popular is None else self.apart.below

    def decide(self, active: torch.Tensor, total: int) -> None:
        """Take note of the numbers of active elements, [counters], of `total` each; `version` is what follows."""
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
        """Decide whether popular elements are, and at what cost; active: [2, N], of so many rows each."""
        popular = self.popular
        # Of a rewritten block few calls were counted: too few rows to tell anew who is popular.
        if not self.rewritten:
            popular, self.popular = cheapest(active, rows, apart), None
        if popular is not None:
            found = cost(active[1], rows, apart, popular)
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
            # Active elements, and of how many, of all blocks: each tensor that a graph is given costs the host.
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

    def begins(self) -> None:
        """Take note of the call that code of the current version is compiled for."""
        with self._lock:
            self._compiled.add(self.version)
            self._stay(compat.checkpoint_under_way())
            counting.call.due = self.calls % self._every == 0

    def has_others(self) -> bool:
        """Whether code was compiled, none of it of the current version, which is then one more than the program has."""
        return bool(self._compiled) and self.version not in self._compiled

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
        """Say when the next look is due, and which calls are counted until then."""
        looks = (call for call in LOOKS if call > self.calls)
        self._next = next(looks, (self.calls // RECHECK + 1) * RECHECK)
        # Odd, for what programs do in turn is often even.
        self._every = (self._next - self.calls) // COUNTED | 1

    def _look(self) -> None:
        """Read the counters, which waits for the device, and decide."""
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
"""Their name in a graph: the same in every process, so that Inductor's caches find the graph again."""


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

    counting.install()
    compat.add_guard(holds, f"sparse_inductor: version {version}", counts=not profile.has_others())
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
            # What is counted is written: let it be what autocast makes of it, which the product reads.
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
