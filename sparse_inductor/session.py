"""Turning the rewriting on and off: for the process, for a block, or for one `torch.compile` call.

Two passes go into Inductor's slots. `_RewriteSlot` (pre_grad_custom_pass) does the work. It runs
before the look-up in Inductor's caches, so the report is complete on a warm cache and the key is
computed on the rewritten graph; torch then leaves the pass's own uuid out of the key. `_CacheKey`
(post_grad_custom_pre_pass) adds it to the key again: its uuid is a hash of the package's sources, the
enabled patterns and the environment's switches (`fingerprint`). The policy is not part of it: what it
decides is in the graph.

Both are installed beside the user's passes in these slots. They read the current session when they
are called, so a reference that outlives `disable()` has no effect.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from . import compat
from .choices import Names, Policy
from .facts import JOINING
from .joined import joined_in_vain, why_in_parts
from .notices import warn
from .pattern import Pattern
from .selection import Session, StrictError
from .slots import CustomGraphPass, Slot, passes_of, slot_value

__all__ = ["StrictError", "disable", "enable", "enabled", "options"]

REWRITE_SLOT = "pre_grad_custom_pass"
KEY_SLOT = "post_grad_custom_pre_pass"
TIMING = "pre_grad_pass_timing"


# --- The public functions -------------------------------------------------------------------------


def enable(
    only: Names = None,
    skip: Names = None,
    strict: bool = False,
    policy: Policy | None = None,
    verify: bool = False,
) -> None:
    """Rewrite the programs that `torch.compile` compiles from now on, in the whole process; nothing else changes.

    `only` and `skip` are one or several pattern names. The environment variable `SPARSE_INDUCTOR_SKIP` ("name,name")
    names further patterns to skip. A second call with the same arguments has no effect; with other arguments it changes
    the selection. Your own passes in Inductor's slots keep running, in their order, before this one.

    `strict=True` raises `StrictError` if a pattern named in `only` never matched (without `only`: if no pattern
    matched). `disable()` or the end of `enabled()` raises it. A compile raises it earlier if such a pattern has not
    matched so far and nearly matches in a graph that does not end in a graph break.

    `policy` selects the recognised blocks to rewrite. "auto", the default, rewrites a block if its operator is faster
    at this size on this device (`sparse_inductor/policy/break_even.py`). If that depends on the data, the block first
    runs as written while its active elements are counted (`report().pending`, `sparse_inductor/policy/profile.py`).
    "always" rewrites all blocks when they are compiled, "never" none. A dict maps pattern names to these choices. The
    environment variable `SPARSE_INDUCTOR_POLICY` is the default if it is set. Under "auto", Dynamo recompiles a frame
    when a decision changes.

    `verify=True` checks every rewrite when it first runs: it compares values and gradients with those of the operations
    as written, both against an fp64 reference. A wrong rewrite is not used: a warning is logged, the report describes
    the difference, and other rewrites are not affected. The check costs memory and time (see
    `sparse_inductor/verify/session.py`) and disables Inductor's caches.

    Raises ValueError for an unknown pattern name or policy, TypeError for a value that is not a name. Warns if anything
    was compiled before: that code stays as it is until `torch._dynamo.reset()`.
    """
    _switch(Session.of(only, skip, strict, policy, verify))


def disable() -> None:
    """Stop rewriting and put Inductor's configuration back exactly as `enable()` found it.

    Passes that you added in between stay in the slots. Compiled code stays as it is. Without a
    preceding `enable()` this does nothing.

    Raises `StrictError` if the session was strict and a pattern that had to match did not.
    """
    before = _state.session
    _switch(None)
    if before is not None:
        before.check_strict()


@contextlib.contextmanager
def enabled(
    only: Names = None,
    skip: Names = None,
    strict: bool = False,
    policy: Policy | None = None,
    verify: bool = False,
) -> Iterator[None]:
    """Call `enable()` for a block and restore the previous session afterwards; blocks can be nested.

    Takes the arguments of `enable` and raises its errors. Only programs *compiled* within the block
    are rewritten: `torch.compile` compiles at the first call. The block is one of the process: of
    blocks that overlap in several threads, the last that was entered and has not ended counts.
    """
    session = Session.of(only, skip, strict, policy, verify)
    with _state.lock:
        outer, blocks = _state.session, _state.blocks
        _switch(session, keep_equal=False, stacklevel=5)  # entered through contextlib
        blocks[session] = outer
    try:
        yield
    finally:
        with _state.lock:
            last = [*blocks][-1] is session
            outer = blocks.pop(session)
            if outer is not None:
                outer.matched |= session.matched
            for other, before in blocks.items():
                if before is session:
                    blocks[other] = outer
            if last:  # else a block of another thread lasts, which this one must not end
                _switch(outer, keep_equal=False, stacklevel=None)
    session.check_strict()  # not after an exception, which is more important


def options(
    only: Names = None,
    skip: Names = None,
    strict: bool = False,
    policy: Policy | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Return options that enable rewriting for one `torch.compile` call:

        torch.compile(model, options=sparse_inductor.options())

    They override an enabled session for that call. Takes the arguments of `enable` and raises its
    errors; `strict=True` raises during the compile, at the end of the first graph that does not end
    in a graph break, if the required patterns have not matched by then. Your own passes that are in
    Inductor's slots when this is called keep running. Combine with further options by
    `{**sparse_inductor.options(), "max_autotune": True}`.

    The `setup` of patterns, which configures Dynamo (for the functions of the entmax package), is
    not called: use `enable()` for these patterns.
    """
    session = Session.of(only, skip, strict, policy, verify)
    chosen = {
        REWRITE_SLOT: slot_value([*users_passes(REWRITE_SLOT), _RewriteSlot(session)]),
        KEY_SLOT: slot_value([*users_passes(KEY_SLOT), _CacheKey(session)]),
    }
    if compat.has_setting(TIMING) and compat.setting(TIMING) != "late":
        chosen[TIMING] = "early"
    return chosen


def current_patterns() -> list[Pattern]:
    """Return the patterns of the enabled session; without one, all patterns that `enable()` would turn on."""
    session = _state.session or Session.of(None, None)
    return list(session.patterns.values())


def current_policy(policy: Policy | None = None) -> dict[str, str]:
    """Return the choice for each pattern: that of `policy` if given, else of the enabled session, else the default."""
    if policy is None and _state.session is not None:
        return _state.session.policy
    return Session.of(None, None, policy=policy).policy


@contextlib.contextmanager
def prepared(patterns: Iterable[Pattern]) -> Iterator[None]:
    """Configure Dynamo for `patterns` (their `setup`) for a block, unless the enabled session has done so."""
    done = _state.session.patterns if _state.session else {}
    with contextlib.ExitStack() as stack:
        for pattern in patterns:
            if pattern.name not in done:
                _set_up(pattern, stack)
        yield


# --- The passes in the slots ----------------------------------------------------------------------


class _OurPass(CustomGraphPass):
    """A pass of this package; `session` is set by `options()`, and None stands for the enabled session."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def uuid(self) -> str | None:
        """Return the cache key of the session; a constant if there is no session."""
        session = self._session or _state.session
        return "sparse_inductor: off" if session is None else session.key()

    # Inductor deep-copies and prints its configuration; a copy would be a second pass beside this
    # one.
    def __deepcopy__(self, memo: dict[int, Any]) -> _OurPass:
        return self

    def __repr__(self) -> str:
        return f"<sparse_inductor {type(self).__name__.strip('_')}>"

    # Dynamo recompiles if the backend is not equal to the previous one; equal options must not cause
    # that.
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
        if session is None:
            return
        if (miss := why_in_parts(graph)) is not None:
            session.leave(miss)
            compat.end_graph_where_dynamo_would(miss.reason)
        session.run(graph, fail_at_end_of_graph=session is self._session)
        if joined_in_vain(graph):
            session.begin_anew(keep=JOINING)
            compat.end_graph_where_dynamo_would("an entmax call is not rewritten")


class _CacheKey(_OurPass):
    """Adds its uuid to the keys of Inductor's caches, and makes the compiled code call operators directly."""

    def __call__(self, graph: fx.Graph) -> None:
        if f"{__package__}.ops" in sys.modules:
            from .ops import _direct

            _direct.install()

    def uuid(self) -> str | None:
        key = super().uuid()
        # The user's early passes are not in the key either; add those that have a uuid.
        for other in users_passes(REWRITE_SLOT):
            if (
                key is not None
                and isinstance(other, CustomGraphPass)
                and (uuid := other.uuid()) is not None
            ):
                key += f"|{uuid!r}"
        return key


def users_passes(slot: str = REWRITE_SLOT) -> list[Any]:
    """Return the passes in a slot that do not belong to this package."""
    return [p for p in passes_of(compat.setting(slot)) if not isinstance(p, _OurPass)]


# --- What is installed ----------------------------------------------------------------------------


class _State:
    """The session of this process and what it has installed. Only `_switch` changes it, under the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: Session | None = None
        # The blocks of `enabled`, in the order in which they were entered, and the session before each.
        self.blocks: dict[Session, Session | None] = {}
        self.slots = (Slot(REWRITE_SLOT, _RewriteSlot()), Slot(KEY_SLOT, _CacheKey()))
        self.timing: compat.SavedSetting | None = None
        self.teardowns = contextlib.ExitStack()


_state = _State()


def _switch(session: Session | None, keep_equal: bool = True, stacklevel: int | None = 4) -> None:
    """Enable `session`, or disable the enabled one (None). `keep_equal`: keep the enabled session if it is equal.
    `stacklevel`: that of the warning if code was compiled before; None for no warning."""
    with _state.lock:
        if session is not None and keep_equal and session.same_as(_state.session):
            _install()  # again: the user may have overwritten a slot
            return
        _state.teardowns.close()
        if session is None:
            _state.session = None
            _uninstall()
            return
        _state.session = None  # if a setup raises, no session is enabled
        try:
            for pattern in session.patterns.values():
                _set_up(pattern, _state.teardowns)
            _install()
        except BaseException:
            _state.teardowns.close()
            _uninstall()
            raise
        _state.session = session
    if stacklevel is not None:
        _warn_of_the_past(stacklevel)


def _install() -> None:
    for slot in _state.slots:
        slot.install()
    # Keep "late", which only the user can have set: the key then holds the pass's own uuid, and graphs
    # from a warm cache are missing in the report.
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


def _warn_of_the_past(stacklevel: int) -> None:
    if not compat.runs_pre_grad_passes():
        warn(
            "sparse_inductor cannot rewrite anything while torch._inductor.config.use_pre_grad_passes "
            "is False",
            stacklevel=stacklevel,
        )
    if compat.anything_compiled():
        warn(
            "sparse_inductor was enabled after something had been compiled: that code stays as it "
            "is. Call torch._dynamo.reset() to have it compiled again, or enable before the first call.",
            stacklevel=stacklevel,
        )
