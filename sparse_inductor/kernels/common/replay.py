"""Replay of an operator's call: from the third call on, it is repeated without the Python code that plans it.

Checks, plans, allocations and views take 0.1 to 0.5 ms of host time per call, more than the kernels of a small batch.
None of it depends on the values of the tensors. So the second call with the same shapes, strides, dtypes, alignments
and options is recorded as a plan: its allocations, launches and ATen calls. Later calls repeat the plan with the
addresses of the new tensors. Memory that is not returned comes from one allocation, in which tensors with disjoint
lifetimes share memory (`placement`), and one C function makes all launches and matrix products between two other ATen
calls (`launches`).

A call that does anything else (reads a number from the GPU, uses another stream or a tensor from an earlier call) is
not recorded and always runs its Python code; so does a call that needs more than `MOST_SCRATCH`.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ... import compat
from ...compat.triton import KernelLaunch, kernel_launch, kernel_parameters
from . import launch as launching
from .ahead import compile_ahead
from .launches import Address, LaunchList, Parameter, TensorMap, View, available
from .placement import placed

log = logging.getLogger(__name__)

# Most bytes of memory that a replayed call allocates and does not return. It holds them until its end.
MOST_SCRATCH = 1536 * 2**20
# Most plans, some kilobytes each; a program of more shapes starts over.
MOST_PLANS = 1024
# Alignment of scratch memory in bytes: kernels align their own buffers up to this. Results, and tensors that ATen is
# given, are allocated separately.
_PAGE = 1024

_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

_ZEROS = {
    _aten.zero_.default,
    _aten.zeros.default,
    _aten.zeros_like.default,
    _aten.new_zeros.default,
}
# Matrix products that the C function makes, with their names in `launches`.
_PRODUCTS = {
    _aten.mm.default: "mm_out",
    _aten.mm.out: "mm_out",
    _aten.mm.dtype: "mm_dtype_out",
    _aten.mm.dtype_out: "mm_dtype_out",
    _aten.addmm.default: "addmm_out",
    _aten.addmm.out: "addmm_out",
    _aten.addmm_.default: "addmm_out",
}
# Operators whose results depend on dtypes alone, which are part of a plan's key.
_OF_DTYPES = {_aten.promote_types.default, _aten.can_cast.default}
_SIZES_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

# By operator and everything that its launches depend on: a plan, _ONCE after the first call, None if not replayable.
_plans: dict[Hashable, Any] = {}
_ONCE = object()
_one_at_a_time = threading.Lock()


def forget() -> None:
    """Drop all plans."""
    for plan in _plans.values():
        if type(plan) is _Plan:
            plan.current = False
    _plans.clear()


def replayed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the device function of an operator, whose calls are then replayed.

    Its arguments are tensors, None, numbers, strings, dtypes and lists of these; it returns new tensors, None, or
    tuples and lists of them. Its control flow may depend on the arguments' layouts and `compat.launch_settings` alone.
    """

    last: tuple[list[Hashable], Any] = [], None

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        nonlocal last
        key, inputs, addresses = _described(args)
        if not inputs:
            return fn(*args)
        before = last
        if before[0] == key and before[1].current:  # the layers of a model are alike
            plan = before[1]
        else:
            settled = (fn, *key)
            plan = _plans.get(settled)
            if type(plan) is not _Plan:
                return _first(fn, args, settled, plan, inputs)
            last = key, plan
        if launching.profiler_attached():
            return fn(*args)
        return _again(plan, inputs, addresses, fn, args)

    return call


def _again(
    plan: _Plan, inputs: Sequence[Tensor], addresses: list[int], fn: Callable[..., Any], args: Any
) -> Any:
    """The result of a planned call fn(*args). Where there is no memory for all of its scratch at once, the Python code
    runs, which allocates tensor by tensor."""
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
    """A call without a plan. found: _ONCE if it is the second call, which is recorded."""
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
    """(everything that the launches depend on, the tensors, their addresses)."""
    key: list[Hashable] = [compat.launch_settings()]
    inputs: list[Tensor] = []
    addresses: list[int] = []
    _describe(args, key, inputs, addresses)
    if inputs:
        key += inputs[0].get_device(), _shared(addresses)
    return key, inputs, addresses


def _shared(addresses: list[int]) -> tuple[int, ...]:
    """For each input the index of the first one at the same address (as of a weight that is given twice); () if all
    addresses differ."""
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

    fn: as for `replayed`. kept: trailing arguments that are the same at every call, tensors' addresses included.
    Once there is a plan, the plan is not looked up again: only the alignment of the addresses, aliasing, and the launch
    settings are checked.
    """

    def __init__(self, fn: Callable[..., Any], kept: Sequence[Any] = ()) -> None:
        self._fn, self._usual = fn, replayed(fn)
        self._kept, self._kept_tensors = tuple(kept), _tensors_in(kept)
        self._kept_addresses = [t.data_ptr() for t in self._kept_tensors]
        self._plan: _Plan | None = None
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
        if type(plan) is _Plan:
            places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
            if places and not any(isinstance(a, (list, tuple)) for a in args):
                together = slice(places[0], places[-1] + 1)
                self._tensors = operator.itemgetter(
                    *([together] if len(args[together]) == len(places) else places)
                )
            self._plan, self._settings, self._shared = plan, key[0], _shared(addresses)


def _tensors_in(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, in the order of `_describe`."""
    found: list[Tensor] = []
    for a in args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += _tensors_in(a)
    return found


# --- Recording --------------------------------------------------------------------------------------------------------


class _Unplannable(Exception):
    """The call is not replayable; the message says why."""


def _unplannable(why: str) -> Any:
    raise _Unplannable(why)


def _record(fn: Callable[..., Any], args: Any, key: Hashable, inputs: list[Tensor]) -> Any:
    """Make the call and store its plan, or None if it is not replayable."""
    if not _one_at_a_time.acquire(blocking=False):
        return fn(*args)
    try:
        recording = _Recording(inputs)
        with recording, launching.observing(recording.launched, recording.unknown):
            result = fn(*args)
        try:
            _plans[key] = recording.plan(result)
        except _Unplannable as why:
            _plans[key] = None
            log.debug("%s is not replayable: %s", fn.__qualname__, str(why))
        return result
    finally:
        _one_at_a_time.release()


class _Made(NamedTuple):
    """A tensor that the call makes, and may free: its storage, which is not kept alive, its address, and the bytes of
    the storage and of the tensor."""

    storage: weakref.ref[Any]
    address: int
    room: int
    size: int
    layout: tuple[Any, ...]


class _Recording(TorchDispatchMode):
    """Records the steps of a call, in order.

    An address is an offset from a base. While recording, the bases are the inputs, then the tensors that the call
    makes; in a finished plan the inputs, the tensors that are allocated one by one, the scratch memory, then the
    tensors that ATen operators return.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._inputs = inputs
        self._device = inputs[0].device
        self._stream = compat.raw_stream(self._device)
        self._made: list[_Made] = []
        self._last_at: dict[int, int] = {}  # the last one of them by the address of its storage
        self._results: set[int] = set()  # which of them an ATen operator returned
        self._passed: set[int] = set()  # which of them an ATen operator was given
        self._divided: set[int] = set()  # which of them were used from a later element on
        self._steps: list[_Step] = []
        here = all(t.device == self._device or t.is_pinned() for t in inputs)
        self._why = "" if here else "several devices"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._why and not func.is_view:
            try:
                if func in _ALLOCATES:
                    self._keep(out)
                else:
                    self._called(func, args, kwargs, out)
            except _Unplannable as why:
                self._give_up(f"{func}: {why}")
        return out

    def _keep(self, t: Tensor) -> None:
        if t.device != self._device:
            raise _Unplannable(f"a tensor on {t.device}")
        storage = t.untyped_storage()
        self._last_at[storage.data_ptr()] = len(self._made)
        sizes = storage.nbytes(), _bytes(t)
        self._made.append(_Made(weakref.ref(storage), t.data_ptr(), *sizes, _layout(t)))

    def _called(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func in _OF_DTYPES:
            return
        if compat.raw_stream(self._device) != self._stream:
            raise _Unplannable("ATen on another stream")
        if func.namespace != "aten" or not _SIZES_FROM_DATA.isdisjoint(func.tags):
            raise _Unplannable("what it returns is not known beforehand")
        if func in _ZEROS and self._device.type == "cuda" and out.is_contiguous() and out.numel():
            if not self._known(out):
                self._keep(out)
            view = self._view(out)
            self._steps.append(_Zeros(view.at, _bytes(out)))
            return
        product = _PRODUCTS.get(func)
        if product and kwargs.keys() <= {"out"} and self._multiplies(product, args, out):
            return
        named = {name: self._views(v) for name, v in kwargs.items()}
        new: list[int] = []
        call = _Call(func, self._views(args), named, new, isinstance(out, (tuple, list)))
        results = out if isinstance(out, (tuple, list)) else (out,)
        for i, t in enumerate(results):
            if not isinstance(t, Tensor):
                raise _Unplannable("a number: what follows may depend on it")
            if not self._known(t):
                self._results.add(len(self._made))
                self._keep(t)
                new.append(i)
        self._steps.append(call)

    def _multiplies(self, name: str, args: Any, out: Tensor) -> bool:
        """Record a matrix product as a step of the C function; False if that cannot make it."""
        if not available() or compat.product_functions(self._device.type, name) is None:
            return False
        if not self._known(out):
            self._keep(out)
        operands = [self._view(t) for t in (out, *args) if isinstance(t, Tensor)]
        self._steps.append(_Product(name, operands))
        return True

    def _views(self, args: Any) -> Any:
        if isinstance(args, Tensor):
            view = self._view(args)
            self._passed.add(view.at.base - len(self._inputs))
            return view
        if isinstance(args, (tuple, list)):
            return [self._views(a) for a in args]
        return args

    def _view(self, t: Tensor) -> View:
        at = self._locate(t) or _unplannable("an empty tensor")
        return View(at, tuple(t.shape), tuple(t.stride()), t.dtype)

    def _give_up(self, why: str) -> None:
        self._why = why
        self._made.clear()
        self._last_at.clear()
        self._steps.clear()

    def unknown(self, why: str) -> None:
        """Give up recording: a launch may have been missed."""
        if not self._why:
            self._give_up(why)

    def launched(
        self, compiled: Any, grid: tuple[int, ...], stream: int, args: Sequence[Any]
    ) -> None:
        """Record a launch."""
        if self._why:
            return
        try:
            if stream != self._stream:
                raise _Unplannable("another stream")
            kernel = kernel_launch(compiled, grid)
            given = [self._placed(a) for a in kernel_parameters(compiled, args)]
            self._steps.append(_Launch(kernel, given))
        except (
            Exception
        ) as why:  # the launch itself has been made: an error here ends the recording only
            self._give_up(f"{compiled.name}: {why}")

    def _placed(self, a: Any) -> Parameter:
        """A launch's argument, with an address instead of a tensor."""
        if isinstance(a, tuple):
            base, like = a
            return TensorMap(self._locate(base) or _unplannable("an empty descriptor"), like)
        if isinstance(a, Tensor):
            return self._locate(a) or 0  # an empty tensor's address
        if not isinstance(a, (int, float)):
            raise _Unplannable(f"an argument of type {type(a).__name__}")
        return a

    def _known(self, t: Tensor) -> bool:
        storage = t.untyped_storage().data_ptr()
        given = any(storage == x.untyped_storage().data_ptr() for x in self._inputs)
        return given or self._made_at(storage) is not None

    def _made_at(self, storage: int) -> int | None:
        """Which tensor made during the call has the storage at this address; None for one that has been freed."""
        i = self._last_at.get(storage)
        return None if i is None or self._made[i].storage() is None else i

    def _locate(self, t: Tensor) -> Address | None:
        """The address of the tensor's first element; None for an empty tensor."""
        address = t.data_ptr()
        if address == 0:
            return None
        storage = t.untyped_storage().data_ptr()
        i = self._made_at(storage)
        if i is not None:
            offset = address - self._made[i].address
            if offset:
                self._divided.add(i)
            return Address(len(self._inputs) + i, offset)
        given = [i for i, x in enumerate(self._inputs) if x.untyped_storage().data_ptr() == storage]
        if len({self._inputs[i].data_ptr() for i in given}) > 1:
            # Inputs that share a storage in this call may not in the next one.
            given = [i for i in given if self._inputs[i].data_ptr() == address]
        if not given:
            raise _Unplannable("a tensor from elsewhere")
        # Any of the inputs at this address: which inputs share one is part of the plan's key.
        return Address(given[0], address - self._inputs[given[0]].data_ptr())

    def plan(self, result: Any) -> _Plan:
        """The plan of the recorded call, which returned `result`. Raises _Unplannable."""
        if self._why or not self._steps:
            raise _Unplannable(self._why or "nothing is launched")
        returned: list[View | None] = []
        shape = self._returned(result, returned)
        count = len(self._inputs)
        own = [v.at.base - count for v in returned if v is not None]
        if len(set(own)) != len(own):
            raise _Unplannable("two results share memory")
        allocated = [i for i in own if i not in self._results]
        # ATen takes tensors: a view of the scratch memory takes more host time than an allocation.
        single = {i for i in self._passed if i >= 0 and self._made[i].room == self._made[i].size}
        allocated += sorted(single - self._results - self._divided - {*allocated})
        results = sorted(self._results)
        one_by_one = {*allocated, *results}
        lifetimes = _lifetimes(self._steps)
        scratch = [b for b in lifetimes if b >= count and b - count not in one_by_one]
        parts = [self._made[b - count] for b in scratch]
        offsets, size = placed(
            [t.room for t in parts],
            [t.address % _PAGE for t in parts],
            [lifetimes[b] for b in scratch],
            _PAGE,
        )
        at = {b: Address(count + len(allocated), offset) for b, offset in zip(scratch, offsets)}
        at |= {count + i: Address(count + n, 0) for n, i in enumerate(allocated)}
        first = count + len(allocated) + 1
        at |= {count + i: Address(first + n, 0) for n, i in enumerate(results)}
        size_of_all = size + sum(self._made[i].room for i in one_by_one - {*own})
        if size_of_all > MOST_SCRATCH:
            raise _Unplannable(f"{size_of_all} bytes of scratch memory")

        def moved(place: Address) -> Address:
            to = at.get(place.base, Address(place.base, 0))
            return Address(to.base, to.offset + place.offset)

        views = [None if v is None else v._replace(at=moved(v.at)) for v in returned]
        owned = {v.at.base: v for v in views if v is not None}
        made = [
            owned[count + n][1:] if i in own else self._made[i].layout
            for n, i in enumerate(allocated)
        ]
        bases = [*map(_layout, self._inputs), *made, None]
        bases += [self._made[i].layout for i in results]
        layouts = _Layouts(count, len(made), size, bases)
        steps = _moved(self._steps, moved)
        return _Plan(self._device, layouts, steps, _built(shape, views, layouts))

    def _returned(self, result: Any, found: list[View | None]) -> Any:
        """The result with tensors replaced by their index in `found`, which has None for an empty tensor."""
        if isinstance(result, (tuple, list)):
            return type(result)(self._returned(r, found) for r in result)
        if result is None:
            return None
        if not result.numel():
            found.append(None)
            return _Empty((tuple(result.shape), tuple(result.stride()), result.dtype))
        view = self._view(result)
        if view.at.base < len(self._inputs) or view.at.offset:
            raise _Unplannable("a result is a part of another tensor")
        if result.untyped_storage().nbytes() > _bytes(result):
            raise _Unplannable("a result is a part of what was made")
        found.append(view)
        return _Number(len(found) - 1)


def _layout(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), tuple(t.stride()), t.dtype


def _bytes(t: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size()


class _Number(int):
    """Index of a returned tensor."""


class _Empty(tuple):
    """Layout of a returned tensor that is empty."""


class _Launch(NamedTuple):
    kernel: KernelLaunch
    parameters: list[Parameter]


class _Zeros(NamedTuple):
    """A memset to zero of `size` bytes."""

    at: Address
    size: int


class _Call(NamedTuple):
    """An ATen call. new: indices of the results that it allocates. several: it returns a tuple or list."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    new: list[int]
    several: bool


class _Product(NamedTuple):
    """A matrix product; the first operand is the result."""

    name: str
    operands: list[View]


_Step = _Launch | _Zeros | _Product | _Call


def _moved(a: Any, moved: Callable[[Address], Address]) -> Any:
    """Steps, or a part of them, with every address replaced by moved(address)."""
    if isinstance(a, Address):
        return moved(a)
    if isinstance(a, KernelLaunch):
        return a
    if isinstance(a, dict):
        return {name: _moved(v, moved) for name, v in a.items()}
    if isinstance(a, tuple) and type(a) not in (tuple, torch.Size):  # a named one
        return type(a)(*(_moved(e, moved) for e in a))
    if type(a) in (list, tuple):
        return type(a)(_moved(e, moved) for e in a)
    return a


def _lifetimes(steps: Sequence[_Step]) -> dict[int, tuple[int, int]]:
    """By base, the first and the last step that uses an address on it."""
    found: dict[int, tuple[int, int]] = {}
    for n, step in enumerate(steps):

        def use(place: Address, n: int = n) -> Address:
            found[place.base] = found.get(place.base, (n, n))[0], n
            return place

        _moved(step, use)
    return found


# --- Replaying --------------------------------------------------------------------------------------------------------


class _Layouts(NamedTuple):
    """Number of inputs and allocated tensors, bytes of scratch memory, and the layouts `of` the tensors at all
    bases."""

    inputs: int
    allocated: int
    scratch: int
    of: list[Any]


class _Plan:
    """A recorded call: `run(inputs, addresses)` repeats it.

    result: builds the return value from the tensors at all bases.
    """

    def __init__(
        self,
        device: torch.device,
        layouts: _Layouts,
        steps: Sequence[_Step],
        result: Callable[[list[Any]], Any],
    ) -> None:
        self.current = True  # until `forget`
        self._device, self._result = device, result
        inputs, allocated, self._scratch, of = layouts
        self._allocated = of[inputs : inputs + allocated]
        self._results = len(of) - inputs - allocated - 1
        self._empty = compat.allocator(device)
        self._handle = compat.stream_getter(device)
        self._index = device.index if device.type == "cuda" else None
        self._calls = any(isinstance(step, _Call) for step in steps)
        self._parts = self._written(steps, layouts)

    def _written(
        self, steps: Sequence[_Step], layouts: _Layouts
    ) -> list[Callable[[list[Any], list[int]], None]]:
        """The steps as callables: one for each run of launches, one for each ATen call."""
        calls = [step for step in steps if isinstance(step, _Call)]
        new = layouts.inputs + layouts.allocated + 1
        launches = None
        if len(calls) < len(steps):
            library = available() or _unplannable("launches cannot be made again here")
            launches = LaunchList(library, len(layouts.of) + 1)
        parts: list[Callable[[list[Any], list[int]], None]] = []
        first = 0
        for step in (*steps, None):
            if step is None or isinstance(step, _Call):
                if launches is not None and len(launches) > first:
                    parts.append(launches.part(first, len(launches)))
                    first = len(launches)
                if step is not None:
                    parts.append(_Again(step, layouts, new))
                    new += len(step.new)
                continue
            assert launches is not None
            if isinstance(step, _Zeros):
                launches.zeros(step.at, step.size)
            elif isinstance(step, _Product):
                launches.product(self._device, *step) or _unplannable("a product without memory")
            elif not launches.launch(step.kernel, step.parameters):
                raise _Unplannable(f"{step.kernel.kernel.name} has other parameters")
        return parts

    def run(self, inputs: Sequence[Tensor], addresses: list[int]) -> Any:
        if self._index is not None and compat.current_device() != self._index:
            with torch.cuda.device(self._device):
                return self.run(inputs, addresses)
        if self._calls and torch.is_autocast_enabled(self._device.type):
            # Autocast's casts are among the recorded steps.
            with torch.amp.autocast(self._device.type, enabled=False):
                return self._made(inputs, addresses)
        return self._made(inputs, addresses)

    def _made(self, inputs: Sequence[Tensor], words: list[int]) -> Any:
        tensors: list[Any] = [*inputs]
        for layout in self._allocated:
            t = self._empty(*layout)
            tensors.append(t)
            words.append(t.data_ptr())
        scratch, start = None, 0
        if self._scratch:
            scratch = self._empty((self._scratch + _PAGE,), (1,), torch.uint8)
            start = -(-scratch.data_ptr() // _PAGE) * _PAGE
        tensors.append(scratch)
        words += (start, *[0] * self._results, self._handle())
        for part in self._parts:
            part(tensors, words)
        return self._result(tensors)


class _Again:
    """Repeats an ATen call. first: the base of the first tensor that it allocates."""

    def __init__(self, call: _Call, layouts: _Layouts, first: int) -> None:
        self._func, self._new, self._several, self._first = call.func, call.new, call.several, first
        self._given = _built((call.args, tuple(call.kwargs.values())), None, layouts)
        self._names = tuple(call.kwargs)

    def __call__(self, tensors: list[Any], words: list[int]) -> None:
        args, named = self._given(tensors)
        out = self._func(*args, **dict(zip(self._names, named)))
        for base, i in enumerate(self._new, self._first):
            t = out[i] if self._several else out
            tensors.append(t)
            words[base] = t.data_ptr()


def _built(
    shape: Any, views: Sequence[View | None] | None, layouts: _Layouts
) -> Callable[[list[Any]], Any]:
    """A function from the tensors at the bases to `shape` with tensors in place of its views; if `views` is given, in
    place of its indices into that."""
    if views is not None and type(shape) is _Number:
        shape = views[shape]
    kind = type(shape)
    if kind is View:
        return _seen(shape, layouts)
    if kind is _Empty:
        size, stride, dtype = shape
        return lambda tensors: tensors[0].new_empty_strided(size, stride, dtype=dtype)
    if kind not in (list, tuple) or (views is None and not _has_views(shape)):
        return lambda tensors: shape
    parts = [_built(s, views, layouts) for s in shape]
    return lambda tensors: kind([part(tensors) for part in parts])


def _has_views(args: Any) -> bool:
    if isinstance(args, View):
        return True
    return type(args) in (list, tuple) and any(map(_has_views, args))


def _seen(view: View, layouts: _Layouts) -> Callable[[list[Any]], Tensor]:
    """A function from the tensors at the bases to the view."""
    (base, offset), size, stride, dtype = view
    if layouts.of[base] == (size, stride, dtype) and not offset:
        return operator.itemgetter(base)
    last = sum((n - 1) * s for n, s in zip(size, stride))
    end = offset + (last + 1) * dtype.itemsize

    def of_scratch(tensors: list[Any]) -> Tensor:
        t = tensors[base]
        start = -t.data_ptr() % _PAGE
        return t[start + offset : start + end].view(dtype).as_strided(size, stride)

    def of_tensor(tensors: list[Any]) -> Tensor:
        t = tensors[base]
        if t.dtype != dtype:
            t = t.view(-1).view(dtype)  # an allocated tensor is dense
        return t.as_strided(size, stride, t.storage_offset() + offset // dtype.itemsize)

    return of_scratch if layouts.of[base] is None else of_tensor
