"""Turning the rewriting on and off: for the process, for a block, or for one `torch.compile` call.

Two passes go into Inductor's slots. `_RewriteSlot` (pre_grad_custom_pass) does the work. It runs
before the look-up in Inductor's caches, so the report is complete on a warm cache and the key is
computed on the rewritten graph; torch then leaves the pass's own uuid out of the key. `_CacheKey`
(post_grad_custom_pre_pass) does nothing but put it back: its uuid holds the package's sources, the
enabled patterns and the options.

Both stand beside the passes the user has in these slots and read the current session when they are
called, so a reference that outlives `disable()` is inert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from . import compat
from .fingerprint import fingerprint, package_hash
from .pattern import Pattern, registered
from .rewrite import Outcome, RewritePass, broken
from .slots import CustomGraphPass, Slot, passes_of, slot_value

__all__ = ["StrictError", "disable", "enable", "enabled", "options"]

log = logging.getLogger("sparse_inductor")

SKIP_VARIABLE = "SPARSE_INDUCTOR_SKIP"
REWRITE_SLOT = "pre_grad_custom_pass"
KEY_SLOT = "post_grad_custom_pre_pass"
TIMING = "pre_grad_pass_timing"

Names = str | Iterable[str] | None


class StrictError(RuntimeError):
    """`strict=True`, and a pattern that had to match did not."""


# --- The public functions -------------------------------------------------------------------------


def enable(
    only: Names = None, skip: Names = None, strict: bool = False, verify: bool = False
) -> None:
    """Rewrite what `torch.compile` compiles from now on, in the whole process.

    `only` and `skip` are pattern names (one, or several); so is the environment variable
    `SPARSE_INDUCTOR_SKIP` ("name,name"). Calling it again with the same arguments does nothing,
    with others it changes the selection. Your own passes in Inductor's slots keep running, in their
    order, before this one.

    `strict=True` raises `StrictError` when a pattern named in `only` never matched (without `only`:
    when none matched at all): from `disable()` or the end of `enabled()`, and earlier, out of the
    compile, as soon as a whole graph was compiled in which such a pattern nearly matched and
    nothing did.

    `verify=True` checks every rewrite when it first runs: values and gradients beside those of the
    operations as written, both against an fp64 reference. A rewrite that is wrong is not used, its
    pattern is switched off for the process, a warning is logged, and the report says what differed.
    It costs memory and time (see `sparse_inductor/verify.py`) and Inductor's caches.

    Raises ValueError for a name that is not a pattern, TypeError for something that is not a name.
    Warns when something was compiled before: that code stays as it is until
    `torch._dynamo.reset()`.
    """
    _switch(_Session.of(only, skip, strict, verify))


def disable() -> None:
    """Stop rewriting and put Inductor's configuration back exactly as `enable()` found it.

    Passes that you added to the slots in between stay there. What has been compiled stays as it is.
    Without a preceding `enable()` this does nothing.

    Raises `StrictError` if the session was strict and a pattern that had to match did not.
    """
    before = _state.session
    _switch(None)
    if before is not None:
        before.check_strict()


@contextlib.contextmanager
def enabled(
    only: Names = None, skip: Names = None, strict: bool = False, verify: bool = False
) -> Iterator[None]:
    """`enable()` for a block; afterwards whatever was on before is on again, nested blocks
    included.

    Takes what `enable` takes and raises what it raises. Only what is *compiled* within the block is
    rewritten: `torch.compile` compiles at the first call.
    """
    session = _Session.of(only, skip, strict, verify)
    outer = _state.session
    _switch(session, keep_equal=False)
    try:
        yield
    finally:
        if outer is not None:
            outer.matched |= session.matched
        _switch(outer, warn=False)
    session.check_strict()  # not after an exception: that one is the news


def options(
    only: Names = None, skip: Names = None, strict: bool = False, verify: bool = False
) -> dict[str, Any]:
    """Options that rewrite what one `torch.compile` call compiles:

        torch.compile(model, options=sparse_inductor.options())

    For that call they decide alone, whether or not a session is enabled. Takes what `enable` takes
    and raises what it raises; `strict=True` raises out of the compile, at the end of the first
    graph that does not end in a graph break, if the required patterns have not matched by then.
    Your own passes that are in Inductor's slots when this is called keep running. Combine with
    further options by `{**sparse_inductor.options(), "max_autotune": True}`.

    A pattern's process-wide switches (`setup`) are not thrown: use `enable()` where a pattern needs
    them.
    """
    session = _Session.of(only, skip, strict, verify)
    chosen = {
        REWRITE_SLOT: slot_value([*users_passes(REWRITE_SLOT), _RewriteSlot(session)]),
        KEY_SLOT: slot_value([*users_passes(KEY_SLOT), _CacheKey(session)]),
    }
    if compat.has_setting(TIMING) and compat.setting(TIMING) != "late":
        chosen[TIMING] = "early"
    return chosen


def current_patterns() -> list[Pattern]:
    """The patterns of the enabled session; without one, all that `enable()` would turn on."""
    session = _state.session or _Session.of(None, None)
    return list(session.patterns.values())


@contextlib.contextmanager
def prepared(patterns: Iterable[Pattern]) -> Iterator[None]:
    """The process-wide switches of `patterns` thrown for a block, unless a session has thrown them
    already."""
    done = _state.session.patterns if _state.session else {}
    with contextlib.ExitStack() as stack:
        for pattern in patterns:
            if pattern.name not in done:
                _set_up(pattern, stack)
        yield


# --- A session ------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Session:
    """A selection of patterns and what came of it."""

    patterns: dict[str, Pattern]
    only: frozenset[str]
    strict: bool
    verify: bool = False
    matched: set[str] = dataclasses.field(default_factory=set)
    nearly: dict[str, str] = dataclasses.field(default_factory=dict)
    graphs: int = 0

    @classmethod
    def of(cls, only: Names, skip: Names, strict: bool = False, verify: bool = False) -> _Session:
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
        )

    def same_as(self, other: _Session | None) -> bool:
        return (
            other is not None
            and self.only == other.only
            and self.strict == other.strict
            and self.verify == other.verify
            and self.patterns.keys() == other.patterns.keys()
            and all(self.patterns[name] is other.patterns[name] for name in self.patterns)
        )

    def run(self, graph: fx.Graph, fail_at_end_of_graph: bool) -> None:
        """Rewrite a graph. A strict session raises here what it cannot raise later
        (`fail_at_end_of_graph`), or what is already certain."""
        outcome = RewritePass(self.patterns.values(), verify=self.verify).run(graph)
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

    def _note(self, outcome: Outcome) -> None:
        self.graphs += 1
        self.matched |= {r.pattern for r in outcome.rewrites}
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
            otherwise = f"nothing resembles it in what was compiled ({self.graphs} graphs)"
        else:
            otherwise = "nothing was compiled"
        return {name: self.nearly.get(name, otherwise) for name in sorted(names)}

    def check_strict(self) -> None:
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
        return fingerprint(p for name, p in self.patterns.items() if name not in broken)


def _names(value: Names, argument: str, known: dict[str, Pattern]) -> frozenset[str]:
    if value is None:
        return frozenset()
    listed = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"{argument} takes pattern names, got {name!r}")
    names = frozenset(n for n in listed if n)
    for name in sorted(names - known.keys()):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        raise ValueError(
            f"{argument}: there is no pattern {name!r}{hint} known patterns: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return names


# --- The passes in the slots ----------------------------------------------------------------------


class _OurPass(CustomGraphPass):
    """A pass of ours; `session` is its own for `options()`, and None for whatever session is
    enabled."""

    def __init__(self, session: _Session | None = None) -> None:
        self._session = session

    def uuid(self) -> str | None:
        """The cache key of the session; a constant when there is none."""
        session = self._session or _state.session
        return "sparse_inductor: off" if session is None else session.key()

    # Inductor deep-copies and prints its configuration; a copy would be a second pass beside this
    # one.
    def __deepcopy__(self, memo: dict[int, Any]) -> _OurPass:
        return self

    def __repr__(self) -> str:
        return f"<sparse_inductor {type(self).__name__.strip('_')}>"

    # Dynamo recompiles for a backend that is not equal to the one before; equal options must not
    # cause that.
    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = self._session, other._session
        return mine is theirs or (mine is not None and not mine.strict and mine.same_as(theirs))

    def __hash__(self) -> int:
        return hash((type(self), self._session is None))


class _RewriteSlot(_OurPass):
    """Rewrites a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        session = self._session or _state.session
        if session is not None:
            session.run(graph, fail_at_end_of_graph=session is self._session)


class _CacheKey(_OurPass):
    """Its uuid takes part in the keys of Inductor's caches; what is compiled now calls operators directly."""

    def __call__(self, graph: fx.Graph) -> None:
        from .ops import _direct

        _direct.install()

    def uuid(self) -> str | None:
        key = super().uuid()
        # Passes that ran early are in no key either; those that say what they are can be added.
        for other in users_passes(REWRITE_SLOT):
            if (
                key is not None
                and isinstance(other, CustomGraphPass)
                and (uuid := other.uuid()) is not None
            ):
                key += f"|{uuid!r}"
        return key


def users_passes(slot: str = REWRITE_SLOT) -> list[Any]:
    """The passes in a slot that are not ours."""
    return [p for p in passes_of(compat.setting(slot)) if not isinstance(p, _OurPass)]


# --- What is installed ----------------------------------------------------------------------------


class _State:
    """What is on in this process. Only `_switch` changes it, under the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: _Session | None = None
        self.slots = (Slot(REWRITE_SLOT, _RewriteSlot()), Slot(KEY_SLOT, _CacheKey()))
        self.timing: compat.SavedSetting | None = None
        self.teardowns = contextlib.ExitStack()


_state = _State()


def _switch(session: _Session | None, warn: bool = True, keep_equal: bool = True) -> None:
    """Make `session` the one that is on (None: off); `keep_equal` leaves one that is equal in its
    place."""
    with _state.lock:
        if session is not None and keep_equal and session.same_as(_state.session):
            _install()  # again: the user may have overwritten a slot
            return
        _state.teardowns.close()
        if session is None:
            _state.session = None
            _uninstall()
            return
        _state.session = None  # a setup that raises leaves nothing on
        try:
            for pattern in session.patterns.values():
                _set_up(pattern, _state.teardowns)
            _install()
        except BaseException:
            _state.teardowns.close()
            _uninstall()
            raise
        _state.session = session
    if warn:
        _warn_of_the_past()


def _install() -> None:
    for slot in _state.slots:
        slot.install()
    # "late" is a choice that the user made: the key then holds the pass's own uuid, and the report
    # of a graph that comes from a warm cache stays empty.
    if compat.has_setting(TIMING) and compat.setting(TIMING) == "default":
        _state.timing = _state.timing or compat.save_setting(TIMING)
        compat.set_setting(TIMING, "early", default="early")


def _uninstall() -> None:
    for slot in _state.slots:
        slot.remove()
    if _state.timing is not None:
        compat.restore_setting(_state.timing, override=compat.setting(TIMING) == "early")
        _state.timing = None


def _set_up(pattern: Pattern, teardowns: contextlib.ExitStack) -> None:
    setup: Callable[[], Callable[[], None]] | None = getattr(pattern, "setup", None)
    if setup is not None:
        teardowns.callback(setup())


def _warn_of_the_past() -> None:
    if not compat.runs_pre_grad_passes():
        warnings.warn(
            "torch._inductor.config.use_pre_grad_passes is False: "
            "sparse_inductor can rewrite nothing",
            stacklevel=4,
        )
    if compat.anything_compiled():
        warnings.warn(
            "sparse_inductor was enabled after something had been compiled: that code stays as it "
            "is. Call torch._dynamo.reset() to have it compiled again, or enable before the first call.",
            stacklevel=4,
        )
