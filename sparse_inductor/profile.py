"""Profiles: what the blocks of one compiled graph were seen to compute, and which of them are rewritten for it.

A watched block runs as written. Beside it the graph counts the active elements of a sample of rows into a tensor of
`Profile.counters`, in operations that Inductor fuses and launches as its own. A guard of the compiled code asks the
profile at each call whether the code is still the one to run (`Profile.accepts`), which is where the counters are read,
at the calls in `LOOKS` and at every `RECHECK`-th. Where that changes what is rewritten, the guard fails, Dynamo
compiles the frame anew, and the pass finds the profile again. Code compiled before is kept by Dynamo and used again
without compiling when its guard holds again.

A rewritten block is not counted; every `RECHECK` calls the code as written runs once instead.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import threading
from collections.abc import Hashable, Sequence

import torch
from torch import fx

from . import compat
from .findings import Pending
from .match.emit import Emitter
from .match.fakes import expected, fake, tensors_in
from .pattern import Sparse

__all__ = ["Profile", "Site", "profile_of", "watch"]

ROWS = 64
"""Rows of a call that are counted, at least: enough to tell 1 % of thousands of neurons from 2 %."""
LOOKS = (4, 32, 256)
RECHECK = 1024
MARGIN = 1.25
"""A rewritten block goes back where this many times the break-even share is active."""
MOST_CHANGES = 4
"""A block that has changed its mind this often stays as written: Dynamo keeps eight versions of a frame."""


@dataclasses.dataclass
class Site:
    """One watched block: where it is, when its operator is faster, what was counted last."""

    pattern: str
    location: str
    source: str
    what: str
    row: int | None
    below: float
    share: float | None = None
    rewritten: bool = False
    changes: int = 0

    def decide(self, active: int, total: int) -> None:
        """Take note of a count; `rewritten` is what follows from it."""
        if not total:
            return
        self.share = active / total
        limit = self.below * (MARGIN if self.rewritten else 1.0)
        wanted = self.share < limit and self.changes < MOST_CHANGES
        self.changes += wanted != self.rewritten
        self.rewritten = wanted

    def finding(self, calls: int) -> Pending:
        """What the report says of the block while it runs as written."""
        return Pending(
            self.pattern, self.location, self.share, self.below, self._why(calls), self.source
        )

    def _why(self, calls: int) -> str:
        of = self.what if self.row is None else f"{self.row:,} {self.what}"
        pays = f"pays below {self.below:.2%} here"
        if self.share is None:
            return f"{of} not counted yet; {pays}"
        if self.changes >= MOST_CHANGES:
            pays += f", and has changed {self.changes} times"
        return f"{self.share:.2%} of {of} active; {pays}; looked at after {calls:,} calls"


class Profile:
    """The watched blocks of one graph. `version` says for each whether the code to run has it rewritten."""

    def __init__(self, sites: Sequence[Site], device: torch.device) -> None:
        self.sites = tuple(sites)
        self.counters = torch.zeros(len(self.sites), 2, dtype=torch.int64, device=device)
        self.version = self._written = (False,) * len(self.sites)
        self.calls = 0
        self.looked_at = 0
        self._recount: str | None = None
        self._before = [[0, 0] for _ in self.sites]
        self._lock = threading.Lock()

    def accepts(self, version: tuple[bool, ...]) -> bool:
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
            elif self.calls in LOOKS or self.calls % RECHECK == 0:
                if any(self.version):
                    self._recount, self.version = "due", self._written
                else:
                    self._look()
            return version == self.version

    def _look(self) -> None:
        """Read the counters, which waits for the device, and decide."""
        now = compat.read_outside_modes(self.counters)
        if now is None:
            return
        for site, old, new in zip(self.sites, self._before, now):
            site.decide(new[0] - old[0], new[1] - old[1])
        self._before, self.looked_at = now, self.calls
        self.version = tuple(site.rewritten for site in self.sites)

    def pending(self) -> list[Pending]:
        """The blocks that run as written."""
        return [s.finding(self.looked_at) for s in self.sites if not s.rewritten]


_profiles: dict[Hashable, Profile] = {}
counters: dict[str, torch.Tensor] = {}
"""What graphs count into, by the name that their guards know it under."""


def profile_of(sites: Sequence[Site], frame: Hashable, device: torch.device) -> Profile:
    """The profile of these blocks in this frame: the one that the frame had before, if it was compiled before."""
    key = (frame, device, tuple((s.pattern, s.location, s.row) for s in sites))
    if key not in _profiles:
        _profiles[key] = Profile(sites, device)
    return _profiles[key]


def watch(graph: fx.Graph, profile: Profile, watched: Sequence[tuple[int, Sparse]]) -> None:
    """Have the graph count, for each (index of a site, its tensor), and its code ask `profile` before it runs.

    Must be called while Dynamo compiles the graph's frame.
    """
    version = profile.version
    compat.add_guard(lambda: profile.accepts(version), f"sparse_inductor: version {version}")
    if not watched:
        return
    name = f"sparse_inductor_counters_{len(counters)}"
    counters[name] = profile.counters
    compat.add_buffer(graph.owning_module, name, profile.counters, (__name__, "counters"))
    for index, sparse in watched:
        e = Emitter(sparse.node.next)
        mode = next(tensors_in(fake(sparse.node))).fake_mode
        buffer = e.attribute(name, mode.from_tensor(profile.counters))
        _count(e, sparse, e.method("select", buffer, 0, index))


def _count(e: Emitter, sparse: Sparse, row: fx.Node) -> None:
    """Add the active elements of a sample of rows, and all elements of it, to a tensor of two numbers."""
    t = sparse.node
    if sparse.result is not None:
        t = e.call(operator.getitem, t, sparse.result)
    sizes = [expected(size) for size in fake(t).shape]
    rows = math.prod(sizes) // max(1, sizes[sparse.dim])
    others = [d for d in range(len(sizes)) if d != sparse.dim % len(sizes)]
    if others and rows > ROWS:
        axis = max(others, key=sizes.__getitem__)
        every = slice(None, None, min(rows // ROWS, sizes[axis]))
        t = e.call(operator.getitem, t, (slice(None),) * axis + (every,))
    active = e.call(torch.gt if sparse.positive else torch.ne, t, 0)
    for at, number in enumerate((e.method("sum", active), e.method("numel", t))):
        e.method("add_", e.method("select", row, 0, at), number)
