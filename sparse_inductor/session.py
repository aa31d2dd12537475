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
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from . import compat
from .joined import joined_in_vain, why_in_parts
from .notices import warn
from .pattern import Pattern
from .policy.worth import Policy
from .selection import Names, Session, StrictError
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
    """Rewrite what `torch.compile` compiles from now on, in the whole process; nothing else changes.

    `only` and `skip` are pattern names (one, or several); so is the environment variable
    `SPARSE_INDUCTOR_SKIP` ("name,name"). Calling it again with the same arguments does nothing,
    with others it changes the selection. Your own passes in Inductor's slots keep running, in their
    order, before this one.

    `strict=True` raises `StrictError` when a pattern named in `only` never matched (without `only`:
    when none matched at all): from `disable()` or the end of `enabled()`, and earlier, out of the
    compile, as soon as a whole graph was compiled in which such a pattern nearly matched and
    nothing did.

    `policy` says which recognised blocks are rewritten: "auto", the default, those whose operator is
    faster: at this size on this device (`sparse_inductor/policy/break_even.py`), and where that depends on the
    data, for what is counted while they run as written (`report().pending`, and
    `sparse_inductor/policy/profile.py`); "always" all of them, when they are compiled; "never" none; or a dict
    of pattern names to these. The environment variable `SPARSE_INDUCTOR_POLICY` is the default where
    it is set. Under "auto" Dynamo compiles a frame again when a decision changes.

    `verify=True` checks every rewrite when it first runs: values and gradients beside those of the
    operations as written, both against an fp64 reference. A rewrite that is wrong is not used, a
    warning is logged, and the report says what differed; other rewrites are not concerned.
    It costs memory and time (see `sparse_inductor/verify/session.py`) and Inductor's caches.

    Raises ValueError for a name that is not a pattern or an unknown policy, TypeError for something that is not a name.
    Warns when something was compiled before: that code stays as it is until
    `torch._dynamo.reset()`.
    """
    _switch(Session.of(only, skip, strict, policy, verify))


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
    only: Names = None,
    skip: Names = None,
    strict: bool = False,
    policy: Policy | None = None,
    verify: bool = False,
) -> Iterator[None]:
    """`enable()` for a block; afterwards whatever was on before is on again, nested blocks
    included.

    Takes what `enable` takes and raises what it raises. Only what is *compiled* within the block is
    rewritten: `torch.compile` compiles at the first call.
    """
    session = Session.of(only, skip, strict, policy, verify)
    outer = _state.session
    _switch(session, keep_equal=False)
    try:
        yield
    finally:
        if outer is not None:
            outer.matched |= session.matched
        _switch(outer, late=False)
    session.check_strict()  # not after an exception: that one is the news


def options(
    only: Names = None,
    skip: Names = None,
    strict: bool = False,
    policy: Policy | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Options that rewrite what one `torch.compile` call compiles:

        torch.compile(model, options=sparse_inductor.options())

    For that call they decide alone, whether or not a session is enabled. Takes what `enable` takes
    and raises what it raises; `strict=True` raises out of the compile, at the end of the first
    graph that does not end in a graph break, if the required patterns have not matched by then.
    Your own passes that are in Inductor's slots when this is called keep running. Combine with
    further options by `{**sparse_inductor.options(), "max_autotune": True}`.

    What Dynamo has to know for a pattern (`setup`: the entmax package's functions) is left alone:
    use `enable()` for those.
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
    """The patterns of the enabled session; without one, all that `enable()` would turn on."""
    session = _state.session or Session.of(None, None)
    return list(session.patterns.values())


def current_policy(policy: Policy | None = None) -> dict[str, str]:
    """The choice for each pattern: of `policy`, without one of the enabled session, without that the default."""
    if policy is None and _state.session is not None:
        return _state.session.policy
    return Session.of(None, None, policy=policy).policy


@contextlib.contextmanager
def prepared(patterns: Iterable[Pattern]) -> Iterator[None]:
    """What Dynamo has to know for `patterns` (their `setup`) said for a block, unless a session has
    said it already."""
    done = _state.session.patterns if _state.session else {}
    with contextlib.ExitStack() as stack:
        for pattern in patterns:
            if pattern.name not in done:
                _set_up(pattern, stack)
        yield


# --- The passes in the slots ----------------------------------------------------------------------


class _OurPass(CustomGraphPass):
    """A pass of ours; `session` is its own for `options()`, and None for whatever session is
    enabled."""

    def __init__(self, session: Session | None = None) -> None:
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
        if session is None:
            return
        if (miss := why_in_parts(graph)) is not None:
            session.leave(miss)
            compat.end_graph_where_dynamo_would(miss.reason)
        session.run(graph, fail_at_end_of_graph=session is self._session)
        if joined_in_vain(graph):
            compat.end_graph_where_dynamo_would("an entmax call is not rewritten")


class _CacheKey(_OurPass):
    """Its uuid takes part in the keys of Inductor's caches; what is compiled now calls operators directly."""

    def __call__(self, graph: fx.Graph) -> None:
        if f"{__package__}.ops" in sys.modules:
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
        self.session: Session | None = None
        self.slots = (Slot(REWRITE_SLOT, _RewriteSlot()), Slot(KEY_SLOT, _CacheKey()))
        self.timing: compat.SavedSetting | None = None
        self.teardowns = contextlib.ExitStack()


_state = _State()


def _switch(session: Session | None, late: bool = True, keep_equal: bool = True) -> None:
    """Make `session` the one that is on (None: off); `keep_equal` leaves one that is equal in its
    place, `late` says that it may be too late for some code."""
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
    if late:
        _warn_of_the_past(4 if keep_equal else 5)  # `enabled` is entered through contextlib


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
