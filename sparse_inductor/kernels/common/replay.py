"""Replay of an operator's call: from the third call on, it is repeated without the Python code that plans it.

Checks, planning, allocations and views take 0.1 to 0.5 ms of host time per call, more than the kernels of a small
batch. None of this depends on the values of the tensors, so the second call with the same shapes, strides, dtypes,
alignments and options is recorded as a plan: its allocations, launches and ATen calls. Later calls repeat the plan with
the addresses of the new tensors. Memory that is not returned comes from one allocation, in which tensors with disjoint
lifetimes share memory (`placement`). A single call of a C function makes all launches and matrix products between two
other ATen calls (`launches`).

A call that does anything else (reads a number from the GPU, uses another stream or a tensor from an earlier call) is
not recorded and always runs its Python code; so does a call that needs more than `MOST_SCRATCH`.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import compat
from . import launch as launching
from .ahead import compile_ahead
from .plan import Plan, Unplannable
from .recording import Recording

log = logging.getLogger(__name__)

# Maximum number of plans, of some kilobytes each. When it is reached, all plans are dropped.
MOST_PLANS = 1024

# Keyed by operator and everything that its launches depend on. Values: a plan, _ONCE after the first call, or None if
# the call is not replayable.
_plans: dict[Hashable, Any] = {}
_ONCE = object()
_one_at_a_time = threading.Lock()


def forget() -> None:
    """Drop all plans."""
    for plan in _plans.values():
        if type(plan) is Plan:
            plan.current = False
    _plans.clear()


def replayed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the device function of an operator, whose calls are then replayed.

    Its arguments are tensors, None, numbers, strings, dtypes and lists of these; it returns new tensors, None, or
    tuples and lists of them. Its control flow may depend only on the arguments' layouts and `compat.launch_settings`.
    """

    last: tuple[list[Hashable], Any] = [], None

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        nonlocal last
        key, inputs, addresses = _described(args)
        if not inputs:
            return fn(*args)
        before = last
        if before[0] == key and before[1].current:  # usual: the layers of a model have equal shapes
            plan = before[1]
        else:
            settled = (fn, *key)
            plan = _plans.get(settled)
            if type(plan) is not Plan:
                return _first(fn, args, settled, plan, inputs)
            last = key, plan
        if launching.profiler_attached():
            return fn(*args)
        return _again(plan, inputs, addresses, fn, args)

    return call


def _again(
    plan: Plan, inputs: Sequence[Tensor], addresses: list[int], fn: Callable[..., Any], args: Any
) -> Any:
    """Return the result of a planned call fn(*args). If memory does not suffice for all scratch at once, run the Python
    code, which allocates one tensor at a time."""
    try:
        return plan.run(inputs, addresses)
    except torch.OutOfMemoryError:
        pass
    return fn(*args)


def _first(
    fn: Callable[..., Any],
    args: Any,
    key: Hashable,
    found: Any,
    inputs: list[Tensor],
) -> Any:
    """Make a call that has no plan. found: _ONCE if this is the second call, which is recorded."""
    if found is _ONCE:
        return _record(fn, args, key, inputs)
    if key not in _plans:
        if len(_plans) >= MOST_PLANS:
            forget()
        _plans[key] = _ONCE
        if inputs[0].is_cuda:
            compile_ahead(fn, args)
    return fn(*args)


def _described(args: Sequence[Any]) -> tuple[list[Hashable], list[Tensor], list[int]]:
    """Return (everything that the launches depend on, the tensors, their addresses)."""
    key: list[Hashable] = [compat.launch_settings()]
    inputs: list[Tensor] = []
    addresses: list[int] = []
    _describe(args, key, inputs, addresses)
    if inputs:
        key += inputs[0].get_device(), _shared(addresses)
    return key, inputs, addresses


def _shared(addresses: list[int]) -> tuple[int, ...]:
    """Return for each input the index of the first input at the same address, such as a weight that is passed twice; ()
    if all addresses differ."""
    there = [a for a in addresses if a]
    return tuple(map(addresses.index, addresses)) if len({*there}) < len(there) else ()


def _describe(
    args: Sequence[Any], key: list[Hashable], inputs: list[Tensor], addresses: list[int]
) -> None:
    """Append what the launches depend on to `key`, the tensors to `inputs` and their addresses to `addresses`."""
    for a in args:
        if isinstance(a, Tensor):
            address = a.data_ptr()
            key += a.shape, a.stride(), a.dtype, address & 15
            inputs.append(a)
            addresses.append(address)
        elif a.__class__ is list or a.__class__ is tuple:
            key.append(len(a))
            _describe(a, key, inputs, addresses)
        else:
            key.append(a)


class Site:
    """A call site in generated code, where only the tensors' addresses and values differ from call to call.

    fn: as for `replayed`. kept: trailing arguments that are the same at every call, including tensors' addresses. Once
    the site has a plan, it does not look it up again and checks only the alignment of the addresses, aliasing, and the
    launch settings.
    """

    def __init__(self, fn: Callable[..., Any], kept: Sequence[Any] = ()) -> None:
        self._fn, self._usual = fn, replayed(fn)
        self._kept, self._kept_tensors = tuple(kept), _tensors_in(kept)
        self._kept_addresses = [t.data_ptr() for t in self._kept_tensors]
        self._plan: Plan | None = None
        self._hopeful = True  # until the call turns out not to be replayable
        self._tensors: Callable[[Any], Sequence[Tensor]] = _tensors_in
        self._settings: Any = None
        self._shared: tuple[int, ...] = ()

    def __call__(self, *args: Any) -> Any:
        plan = self._plan
        if plan is not None and plan.current and compat.launch_settings() == self._settings:
            inputs = self._tensors(args)
            addresses = [t.data_ptr() for t in inputs]
            together = functools.reduce(operator.or_, addresses, 0)
            addresses += self._kept_addresses
            alike = not together & 15 and (not self._shared or _shared(addresses) == self._shared)
            if alike and not launching.profiler_attached():
                tensors = (*inputs, *self._kept_tensors)
                return _again(plan, tensors, addresses, self._fn, (*args, *self._kept))
        out = self._usual(*args, *self._kept)
        if self._hopeful:
            self._look_up(args)
        return out

    def _look_up(self, args: Any) -> None:
        key, inputs, addresses = _described((*args, *self._kept))
        if not inputs or any(address & 15 for address in addresses):
            return
        plan = _plans.get((self._fn, *key), _ONCE)
        self._hopeful = plan is not None
        if type(plan) is Plan:
            places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
            if places and not any(isinstance(a, (list, tuple)) for a in args):
                together = slice(places[0], places[-1] + 1)
                self._tensors = operator.itemgetter(
                    *([together] if len(args[together]) == len(places) else places)
                )
            self._plan, self._settings, self._shared = plan, key[0], _shared(addresses)


def _tensors_in(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among arguments, in the order of `_describe`."""
    found: list[Tensor] = []
    for a in args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += _tensors_in(a)
    return found


def _record(fn: Callable[..., Any], args: Any, key: Hashable, inputs: list[Tensor]) -> Any:
    """Make the call and store its plan, or None if it is not replayable."""
    if not _one_at_a_time.acquire(blocking=False):
        return fn(*args)
    try:
        recording = Recording(inputs)
        with recording, launching.observing(recording.launched, recording.unknown):
            result = fn(*args)
        try:
            _plans[key] = recording.plan(result)
        except Unplannable as why:
            _plans[key] = None
            log.debug("%s is not replayable: %s", fn.__qualname__, str(why))
        return result
    finally:
        _one_at_a_time.release()
