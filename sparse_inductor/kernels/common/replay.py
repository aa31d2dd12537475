"""An operator's call that has been made before, made again without the Python that plans it.

Between a call and its kernels lie checks, plans, allocations and views: 0.1 to 0.5 ms of the host's time, which is more
than the kernels of a small batch take. None of it depends on what the tensors hold. So the second call with the same
shapes, strides, dtypes, alignments and options is recorded, as what it allocates, launches and calls of ATen; from the
third on that is done again with the new tensors' addresses, out of one allocation for all that is not returned.

A call that does anything else on the way (reads a number off the GPU, uses another stream than those of `SideStream` or
a tensor of its own from before) is not recorded and goes its usual way; so does one with more than `MOST_SCRATCH` to
allocate, whose kernels take longer than the host. Of operators that use several streams the host has the most to
do, and next to nothing is freed on the way: for them there are limits of their own.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ... import compat
from . import launch as launches
from .ahead import compile_ahead

__all__ = ["Site", "forget", "replayed"]

log = logging.getLogger(__name__)

# Bytes that are not returned: what is freed on the way is not used again in a replayed call.
MOST_SCRATCH = 64 * 2**20
MOST_SCRATCH_MULTISTREAM = 1024 * 2**20
# Bytes that the recorded call may keep until its end, once.
MOST_KEPT = 256 * 2**20
MOST_KEPT_MULTISTREAM = 2048 * 2**20
# Programs of many shapes start over here: some kilobytes each.
MOST_PLANS = 1024
# What addresses may have in common with those recorded: kernels align their own buffers up to this, but for what they
# return or give to ATen, which is allocated alone.
_PAGE = 1024

_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

# Numbers that follow from what a plan is looked up by.
_OF_DTYPES = {_aten.promote_types.default, _aten.can_cast.default}
_SIZES_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

# By operator and all that its launches depend on: a plan; _ONCE after one call; None where there is no plan.
_plans: dict[Hashable, Any] = {}
_ONCE = object()
_one_at_a_time = threading.Lock()


def forget() -> None:
    """Drop all plans."""
    for plan in _plans.values():
        if type(plan) is _Plan:
            plan.current = False
    _plans.clear()


def replayed(fn: Callable[..., Any], multistream: bool = False) -> Callable[..., Any]:
    """Decorates the device function of an operator: arguments are tensors, None, numbers, strings, dtypes and lists
    of these; it returns new tensors, None, or tuples and lists of them, and decides by nothing but the arguments'
    layouts and `compat.launch_settings`. multistream: it launches on several streams."""

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
                return _first(fn, args, settled, plan, inputs, multistream)
            last = key, plan
        return fn(*args) if launches.profiler_attached() else plan.run(inputs, addresses)

    return call


def _first(
    fn: Callable[..., Any],
    args: Any,
    key: Hashable,
    found: Any,
    inputs: list[Tensor],
    multistream: bool,
) -> Any:
    """A call that there is no plan for: found is _ONCE where it is the second one."""
    if found is _ONCE:
        return _record(fn, args, key, inputs, multistream)
    if key not in _plans:
        if len(_plans) >= MOST_PLANS:
            forget()
        _plans[key] = _ONCE
        if inputs[0].is_cuda:
            compile_ahead(fn, args)
    return fn(*args)


def _described(args: Sequence[Any]) -> tuple[list[Hashable], list[Tensor], list[int]]:
    """All that the launches depend on, the tensors and their addresses."""
    key: list[Hashable] = [compat.launch_settings()]
    inputs: list[Tensor] = []
    addresses: list[int] = []
    _describe(args, key, inputs, addresses)
    if inputs:
        key.append(inputs[0].get_device())
    return key, inputs, addresses


def _describe(
    args: Sequence[Any], key: list[Hashable], inputs: list[Tensor], addresses: list[int]
) -> None:
    """Appends what launches depend on to `key`, and the tensors and their addresses to the others."""
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
    """A call in generated code, whose arguments never differ but in the tensors' addresses and what they hold.

    fn, multistream: what `replayed` takes. Once there is a plan it is looked up no more: only the addresses' alignment
    is, and what else a plan depends on.
    """

    def __init__(self, fn: Callable[..., Any], multistream: bool = False) -> None:
        self._fn, self._usual = fn, replayed(fn, multistream)
        self._plan: _Plan | None = None
        self._hopeful = True  # until there turns out to be no plan
        self._tensors: Callable[[Any], Sequence[Tensor]] = tuple
        self._settings: Any = None

    def __call__(self, *args: Any) -> Any:
        plan = self._plan
        if plan is not None and plan.current and compat.launch_settings() == self._settings:
            inputs = self._tensors(args)
            addresses = [t.data_ptr() for t in inputs]
            together = 0
            for address in addresses:
                together |= address
            if not together & 15 and not launches.profiler_attached():
                return plan.run(inputs, addresses)
        out = self._usual(*args)
        if self._hopeful:
            self._look_up(args)
        return out

    def _look_up(self, args: Any) -> None:
        key, inputs, addresses = _described(args)
        if not inputs or any(address & 15 for address in addresses):
            return
        plan = _plans.get((self._fn, *key), _ONCE)
        self._hopeful = plan is not None
        if type(plan) is _Plan:
            # Lists in the arguments are not longer in the next call either.
            places = ", ".join(_places(args, "args"))
            self._tensors = eval(f"lambda args: ({places},)")
            self._plan, self._settings = plan, key[0]


def _places(args: Sequence[Any], name: str) -> list[str]:
    """Where the tensors are, in the order of `_describe`."""
    found: list[str] = []
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            found.append(f"{name}[{i}]")
        elif isinstance(a, (list, tuple)):
            found += _places(a, f"{name}[{i}]")
    return found


# --- Recording --------------------------------------------------------------------------------------------------------


class _Unplannable(Exception):
    """The call does what a plan cannot repeat; the message says what."""


class _At(NamedTuple):
    """A place in memory: bytes after the beginning of a base. The bases are the inputs, then what the call makes; in a
    finished plan the inputs, what it allocates to return, its scratch memory, then what ATen operators returned."""

    base: int
    offset: int


class _View(NamedTuple):
    """A tensor somewhere."""

    at: _At
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _record(
    fn: Callable[..., Any], args: Any, key: Hashable, inputs: list[Tensor], multistream: bool
) -> Any:
    """Make the call and keep its plan, or that it has none."""
    if not _one_at_a_time.acquire(blocking=False):
        return fn(*args)
    try:
        recording = _Recording(inputs, multistream)
        with recording, launches.observing(recording.launched, recording.event, recording.unknown):
            result = fn(*args)
        try:
            _plans[key] = recording.plan(result)
        except _Unplannable as why:
            _plans[key] = None
            log.debug("%s is planned anew at each call: %s", fn.__qualname__, str(why))
        return result
    finally:
        _one_at_a_time.release()


class _Recording(TorchDispatchMode):
    """What a call does, in order."""

    def __init__(self, inputs: list[Tensor], multistream: bool) -> None:
        super().__init__()
        self._inputs = inputs
        self._most_kept = MOST_KEPT_MULTISTREAM if multistream else MOST_KEPT
        self._most_scratch = MOST_SCRATCH_MULTISTREAM if multistream else MOST_SCRATCH
        self._device = inputs[0].device
        # Streams by handle, the current one's first, and events that they wait for.
        self._numbers = {compat.raw_stream(self._device): 0}
        self._streams: list[torch.cuda.Stream] = []
        self._events: list[torch.cuda.Event] = []
        self._made: list[Tensor] = []  # kept, so that no address is given out twice
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
        self._made.append(t)
        if t.device != self._device:
            raise _Unplannable(f"a tensor on {t.device}")
        if sum(map(_storage_bytes, self._made)) > self._most_kept:
            raise _Unplannable("too much memory")

    def _called(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func in _OF_DTYPES:
            return
        if self._stream(compat.raw_stream(self._device)):
            raise _Unplannable("ATen on another stream")
        if func.namespace != "aten" or not _SIZES_FROM_DATA.isdisjoint(func.tags):
            raise _Unplannable("what it returns is not known beforehand")
        named = {name: self._views(v) for name, v in kwargs.items()}
        call = _Call(func, self._views(args), named)
        results = out if isinstance(out, (tuple, list)) else (out,)
        for i, t in enumerate(results):
            if not isinstance(t, Tensor):
                raise _Unplannable("a number: what follows may depend on it")
            if not self._known(t):
                self._results.add(len(self._made))
                self._keep(t)
                call.new.append(i)
        self._steps.append(call)

    def _views(self, args: Any) -> Any:
        if isinstance(args, Tensor):
            view = self._view(args)
            self._passed.add(view.at.base - len(self._inputs))
            return view
        if isinstance(args, (tuple, list)):
            return [self._views(a) for a in args]
        return args

    def _view(self, t: Tensor) -> _View:
        at = self._locate(t)
        if at is None:
            raise _Unplannable("an empty tensor")
        return _View(at, tuple(t.shape), tuple(t.stride()), t.dtype)

    def _give_up(self, why: str) -> None:
        self._why = why
        self._made.clear()
        self._steps.clear()

    def unknown(self, why: str) -> None:
        """There may have been a launch that is not among the steps."""
        if not self._why:
            self._give_up(why)

    def _stream(self, handle: int) -> int:
        number = self._numbers.get(handle)
        if number is None:
            raise _Unplannable("another stream")
        return number

    def launched(
        self, compiled: Any, grid: tuple[int, ...], stream: int, args: Sequence[Any]
    ) -> None:
        """The next launch."""
        if self._why:
            return
        try:
            number = self._stream(stream)
            self._steps.append(_Launch(compiled, grid, args, self._locate, number))
        except _Unplannable as why:
            self._give_up(f"{compiled.name}: {why}")

    def event(self, what: str, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """An event is recorded in a stream, or a stream waits for it, which is how a second one begins."""
        if self._why:
            return
        known = [i for i, e in enumerate(self._events) if e is event]
        try:
            if what == "record":
                number, known = self._stream(stream.cuda_stream), [len(self._events)]
                self._events.append(event)
            elif not known:
                raise _Unplannable("an event from elsewhere")
            elif stream.cuda_stream not in self._numbers:
                number = self._numbers[stream.cuda_stream] = len(self._numbers)
                self._streams.append(stream)
            else:
                number = self._stream(stream.cuda_stream)
            self._steps.append(_Event(what, known[0], number))
        except _Unplannable as why:
            self._give_up(str(why))

    def _known(self, t: Tensor) -> bool:
        storage = t.untyped_storage().data_ptr()
        return any(storage == x.untyped_storage().data_ptr() for x in (*self._inputs, *self._made))

    def _locate(self, t: Tensor) -> _At | None:
        """Where the tensor's first element is; None for an empty one."""
        address = t.data_ptr()
        if address == 0:
            return None
        storage = t.untyped_storage().data_ptr()
        for i, made in enumerate(self._made):
            if made.untyped_storage().data_ptr() == storage:
                if address != made.data_ptr():
                    self._divided.add(i)
                return _At(len(self._inputs) + i, address - made.data_ptr())
        given = [i for i, x in enumerate(self._inputs) if x.untyped_storage().data_ptr() == storage]
        if len(given) > 1:  # inputs that share a storage today may not do so in the next call
            given = [i for i in given if self._inputs[i].data_ptr() == address]
        if len(given) != 1:
            raise _Unplannable("a tensor from elsewhere")
        return _At(given[0], address - self._inputs[given[0]].data_ptr())

    def plan(self, result: Any) -> _Plan:
        """What was recorded, of a call that returned `result`."""
        if self._why or not self._steps:
            raise _Unplannable(self._why or "nothing is launched")
        returned: list[_View | None] = []
        shape = self._returned(result, returned)
        count = len(self._inputs)
        own = [v.at.base - count for v in returned if v is not None]
        if len(set(own)) != len(own):
            raise _Unplannable("two results share memory")
        allocated = [i for i in own if i not in self._results]
        # ATen wants tensors: a part of the scratch memory as one costs the host more than an allocation.
        single = {
            i
            for i in self._passed
            if i >= 0 and _storage_bytes(self._made[i]) == _bytes(self._made[i])
        }
        allocated += sorted(single - self._results - self._divided - {*allocated})
        bases: dict[int, _At] = {}
        size = kept = 0
        for i, t in enumerate(self._made):
            if i in self._results:
                place = sorted(self._results).index(i)
                bases[count + i] = _At(count + len(allocated) + 1 + place, 0)
                kept += _storage_bytes(t)
            elif i in allocated:
                bases[count + i] = _At(count + allocated.index(i), 0)
                kept += _storage_bytes(t) if i not in own else 0
            else:
                size += (t.data_ptr() - size) % _PAGE
                bases[count + i] = _At(count + len(allocated), size)
                size += _storage_bytes(t)
        if size + kept > self._most_scratch:
            raise _Unplannable(f"{size + kept} bytes of scratch memory")

        def moved(at: _At) -> _At:
            to = bases.get(at.base, _At(at.base, 0))
            return _At(to.base, to.offset + at.offset)

        for step in self._steps:
            step.move(moved)
        views = [None if v is None else v._replace(at=moved(v.at)) for v in returned]
        owned = {v.at.base: v for v in views if v is not None}
        made = [
            owned[count + n][1:] if i in own else _layout(self._made[i])
            for n, i in enumerate(allocated)
        ]
        given = [_layout(t) for t in self._inputs]
        results = [_layout(self._made[i]) for i in sorted(self._results)]
        writer = _Writer(self._device, given, made, size, results, self._streams)
        return _Plan(writer.function(self._steps, views, shape))

    def _returned(self, result: Any, found: list[_View | None]) -> Any:
        """The result with its tensors replaced by their numbers in `found`, where an empty one is None."""
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
        if _storage_bytes(result) > _bytes(result):
            raise _Unplannable("a result is a part of what was made")
        found.append(view)
        return _Number(len(found) - 1)


def _storage_bytes(t: Tensor) -> int:
    return t.untyped_storage().nbytes()


def _layout(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), tuple(t.stride()), t.dtype


def _bytes(t: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size()


class _Number(int):
    """Which tensor of those that are returned."""


class _Empty(tuple):
    """The layout of an empty tensor that is returned."""


# --- Replaying --------------------------------------------------------------------------------------------------------


class _Plan:
    """`run(inputs, addresses)` makes the call; inputs and their addresses are lists."""

    def __init__(self, run: Callable[[Sequence[Tensor], list[int]], Any]) -> None:
        self.run = run
        self.current = True  # until `forget`


class _Writer:
    """Writes a plan's function: what has no loop and looks nothing up costs the host the launches and little more.

    Bases are tensors t0, t1, ... that begin at addresses b0, b1, ...: the inputs, what is allocated, scratch memory of
    so many bytes, what ATen operators return. given, allocated, results: their layouts. streams: those
    beside the current one, stream0; their handles are handle0, handle1, ...
    """

    def __init__(
        self,
        device: torch.device,
        given: list[Any],
        allocated: list[Any],
        scratch: int,
        results: list[Any],
        streams: Sequence[torch.cuda.Stream],
    ) -> None:
        self._device, self._beside = device, range(1, len(streams) + 1)
        self._names: dict[str, Any] = {
            "empty": compat.allocator(device),
            "view": _view_of,
            "piece": _piece_of,
            "handle_of": compat.stream_getter(device),
            "stream_of": functools.partial(torch.cuda.current_stream, device),
            "event": torch.cuda.Event,
            "join": _join,
        }
        for i, stream in enumerate(streams, 1):
            self._names |= {f"stream{i}": stream, f"handle{i}": stream.cuda_stream}
        self._inputs, self._allocated, self._size = len(given), allocated, scratch
        self._layouts = dict(enumerate([*given, *allocated, None, *results]))
        self._scratch = len(given) + len(allocated)
        self._results = self._scratch + 1

    def function(
        self, steps: Sequence[_Step], views: Sequence[_View | None], shape: Any
    ) -> Callable[[Sequence[Tensor], list[int]], Any]:
        """The function of these steps that returns `shape`."""
        calls = any(isinstance(step, _Call) for step in steps)
        given = range(self._inputs)
        lines = [f"{_listed('b', given)} = addresses"]
        if calls:
            lines.append(f"{_listed('t', given)} = inputs")
        for i, layout in enumerate(self._allocated, self._inputs):
            lines += [f"t{i} = empty({self._all(layout)})", f"b{i} = t{i}.data_ptr()"]
        if self._size:
            # It begins at a multiple of _PAGE within its allocation.
            i = self._scratch
            layout = (self._size + _PAGE,), (1,), torch.uint8
            lines += [
                f"t{i} = empty({self._all(layout)})",
                f"b{i} = -(-t{i}.data_ptr() // {_PAGE}) * {_PAGE}",
            ]
        lines.append("handle0 = handle_of()")
        if any(isinstance(step, _Event) for step in steps):
            lines.append("stream0 = stream_of()")
        work = [line for step in steps for line in step.written(self)]
        if self._beside:
            # What the other streams use is not freed before they are done, where a call ends by an error either.
            lines += ["try:", *(f"    {line}" for line in work)]
            work = [
                "except BaseException:",
                f"    join(stream0, {_listed('stream', self._beside)})",
                "    raise",
            ]
        lines += work
        lines.append(f"return {self._returned(shape, views)}")
        body = "".join(f"    {line}\n" for line in lines)
        exec(f"def run(inputs, addresses):\n{body}", self._names)
        run = self._names["run"]
        device, current_device = self._device, compat.current_device
        if not calls and device.type != "cuda":
            return run

        def guarded(inputs: Sequence[Tensor], addresses: list[int]) -> Any:
            if not torch.is_autocast_enabled(device.type):
                return run(inputs, addresses)
            # Autocast had its say when the call was recorded.
            with torch.amp.autocast(device.type, enabled=False):
                return run(inputs, addresses)

        made = guarded if calls else run
        if device.type != "cuda":
            return made

        def on_device(inputs: Sequence[Tensor], addresses: list[int]) -> Any:
            if current_device() == device.index:
                return made(inputs, addresses)
            with torch.cuda.device(device):
                return made(inputs, addresses)

        return on_device

    def named(self, value: Any) -> str:
        """The value as an expression."""
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
            return f"({''.join(f'{self.named(v)}, ' for v in value)})"
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def _all(self, values: Sequence[Any]) -> str:
        return ", ".join(map(self.named, values))

    def address(self, at: _At) -> str:
        """The address as an expression."""
        return f"b{at.base} + {at.offset}" if at.offset else f"b{at.base}"

    def tensor(self, view: _View) -> str:
        """A tensor that is seen so, as an expression."""
        (base, offset), *layout = view
        if base == self._scratch:
            start = f"b{base} - t{base}.data_ptr() + {offset}"
            return f"piece(t{base}, {start}, {self._all(layout)})"
        if self._layouts[base] == tuple(layout) and not offset:
            return f"t{base}"
        return f"view(t{base}, {offset}, {self._all(layout)})"

    def result(self) -> str:
        """The number of the next tensor that an ATen operator makes."""
        self._results += 1
        return str(self._results - 1)

    def _returned(self, shape: Any, views: Sequence[_View | None]) -> str:
        kind = type(shape)
        if kind is _Number:
            view = views[shape]
            assert view is not None
            return self.tensor(view)
        if kind is _Empty:
            return f"empty({self._all(shape)})"
        if shape is None:
            return "None"
        parts = "".join(f"{self._returned(s, views)}, " for s in shape)
        return f"[{parts}]" if kind is list else f"({parts})"


def _listed(letter: str, numbers: Sequence[int]) -> str:
    return "".join(f"{letter}{i}, " for i in numbers)


def _join(stream: torch.cuda.Stream, *others: torch.cuda.Stream) -> None:
    for other in others:
        stream.wait_event(other.record_event())


def _view_of(t: Tensor, offset: int, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    if t.dtype != dtype:
        t = t.view(-1).view(dtype)  # what has been allocated is dense
    return t.as_strided(size, stride, t.storage_offset() + offset // dtype.itemsize)


def _piece_of(scratch: Tensor, start: int, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    last = sum((n - 1) * s for n, s in zip(size, stride))
    end = start + (last + 1) * dtype.itemsize
    return scratch[start:end].view(dtype).as_strided(size, stride)


class _Call:
    """An ATen operator's call; `new` are those of its results that it allocated."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self.new: list[int] = []

    def move(self, moved: Callable[[_At], _At]) -> None:
        """Where things are in the plan."""
        self._args = _moved(self._args, moved)
        self._kwargs = {name: _moved(v, moved) for name, v in self._kwargs.items()}

    def written(self, writer: _Writer) -> list[str]:
        """The call as lines of code."""

        def expression(a: Any) -> str:
            if isinstance(a, _View):
                return writer.tensor(a)
            if isinstance(a, list):
                return f"[{', '.join(map(expression, a))}]"
            return writer.named(a)

        given = [*map(expression, self._args)]
        given += [f"{name}={expression(v)}" for name, v in self._kwargs.items()]
        lines = [f"out = {writer.named(self._func)}({', '.join(given)})"]
        several = len(compat.schema(self._func).returns) > 1
        for i in self.new:
            n = writer.result()
            lines += [f"t{n} = out[{i}]" if several else f"t{n} = out", f"b{n} = t{n}.data_ptr()"]
        return lines


# These are no functions within others that call themselves: such a one and its closure hold each other, and what else
# the closure holds, a call's tensors, until Python looks for cycles. Memory would be held, and Inductor's CUDA graphs
# take tensors for alive that are not.


def _placed(a: Any, locate: Callable[[Tensor], _At | None]) -> Any:
    """A launch's argument with places instead of tensors."""
    if isinstance(a, Tensor):
        return locate(a) or 0  # an empty tensor's address
    if isinstance(a, tuple):  # by name or not
        return tuple(_placed(e, locate) for e in a)
    if hasattr(a, "block_shape"):
        at = locate(a.base)
        if at is None:
            raise _Unplannable("an empty descriptor")
        return _Descriptors(a, at)
    return a


def _moved(a: Any, moved: Callable[[_At], _At]) -> Any:
    """Places that are elsewhere, in an argument of a launch or of an ATen operator."""
    if isinstance(a, _At):
        return moved(a)
    if isinstance(a, _View):
        return a._replace(at=moved(a.at))
    if isinstance(a, _Descriptors):
        a.at = moved(a.at)
    if type(a) in (list, tuple):
        return type(a)(_moved(e, moved) for e in a)
    return a


class _Launch:
    """A launch: its arguments, of which some are addresses and some hold addresses."""

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        locate: Callable[[Tensor], _At | None],
        stream: int,
    ) -> None:
        self._compiled, self._grid, self._stream = compiled, grid, stream
        self._args = [_placed(a, locate) for a in args]

    def move(self, moved: Callable[[_At], _At]) -> None:
        """Where things are in the plan."""
        self._args = [_moved(a, moved) for a in self._args]

    def written(self, writer: _Writer) -> list[str]:
        """The launch as a line of code."""

        def expression(a: Any) -> str:
            if isinstance(a, _At):
                return writer.address(a)
            if isinstance(a, _Descriptors):
                return f"{writer.named(a.from_address)}({writer.address(a.at)})"
            if type(a) is tuple:
                return f"({''.join(f'{expression(e)}, ' for e in a)})"
            return writer.named(a)

        launch, first, more, encoded = launches.bound(self._compiled, self._grid)
        given = [*map(writer.named, first), f"handle{self._stream}", *map(writer.named, more)]
        for i, a in enumerate(self._args):
            if i in encoded and isinstance(a, _Descriptors):
                a.encode = encoded[i]
                given.append(f"*{expression(a)}")
            else:
                given.append(expression(a))
        return [f"{writer.named(launch)}({', '.join(given)})"]


class _Event(NamedTuple):
    """An event that is recorded in a stream, or that a stream waits for: of each call its own, as calls of several
    threads may be under way."""

    what: str
    number: int
    stream: int

    def move(self, moved: Callable[[_At], _At]) -> None:
        """It has no place in memory."""

    def written(self, writer: _Writer) -> list[str]:
        """As lines of code."""
        if self.what == "wait":
            return [f"e{self.number}.wait(stream{self.stream})"]
        return [f"e{self.number} = event()", f"e{self.number}.record(stream{self.stream})"]


_Step = _Launch | _Call | _Event


class _Descriptors:
    """A tensor descriptor at other addresses; the allocator hands out the same few."""

    MOST = 64

    def __init__(self, like: Any, at: _At) -> None:
        self.at = at
        self.encode: Callable[[Any], Any] = lambda descriptor: descriptor
        self._like = copy.copy(like)
        self._like.base = None
        self._dtype = like.base.dtype
        self._kept: dict[int, Any] = {}

    def from_address(self, address: int) -> Any:
        """The descriptor of what is there, encoded."""
        found = self._kept.get(address)
        if found is None:
            if len(self._kept) >= self.MOST:
                self._kept.clear()
            made = copy.copy(self._like)
            made.base = _Address(address, self._dtype)
            found = self._kept[address] = self.encode(made)
        return found


class _Address:
    """As much of a tensor as a descriptor's launch looks at."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address
