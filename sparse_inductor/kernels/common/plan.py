"""Plans: the steps of a recorded call, which are repeated with the addresses of other tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from ...compat.triton import KernelLaunch
from . import launches
from .launches import Address, LaunchList, Parameter, View

# Alignment of scratch memory in bytes. Tensors keep their recorded addresses modulo this, because kernels may align
# parts of a buffer. Results and the arguments of ATen calls are allocated separately.
PAGE = 1024


class Unplannable(Exception):
    """The call is not replayable; the message says why."""


def unplannable(why: str) -> Any:
    raise Unplannable(why)


class Number(int):
    """Index of a returned tensor."""


class Empty(tuple):
    """Layout of a returned tensor that is empty."""


class Launch(NamedTuple):
    kernel: KernelLaunch
    parameters: list[Parameter]


class Zeros(NamedTuple):
    """A memset to zero of `size` bytes."""

    at: Address
    size: int


class Call(NamedTuple):
    """An ATen call. new: indices of the results that it allocates. several: it returns a tuple or list."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    new: list[int]
    several: bool


class Product(NamedTuple):
    """A matrix product; the first operand is the result."""

    name: str
    operands: list[View]


Step = Launch | Zeros | Product | Call


def relocated(a: Any, moved: Callable[[Address], Address]) -> Any:
    """Return steps, or a part of them, with every address replaced by moved(address)."""
    if isinstance(a, Address):
        return moved(a)
    if isinstance(a, KernelLaunch):
        return a
    if isinstance(a, dict):
        return {name: relocated(v, moved) for name, v in a.items()}
    if isinstance(a, tuple) and type(a) not in (tuple, torch.Size):  # a named one
        return type(a)(*(relocated(e, moved) for e in a))
    if type(a) in (list, tuple):
        return type(a)(relocated(e, moved) for e in a)
    return a


class Layouts(NamedTuple):
    """The device, the numbers of inputs and of allocated tensors, the bytes of scratch memory, and `of`: the layout of
    the tensor at each base (see `recording.Recording`)."""

    device: torch.device
    inputs: int
    allocated: int
    scratch: int
    of: list[Any]


class Plan:
    """A recorded call: `run(inputs, addresses)` repeats it.

    result: builds the return value from the tensors at all bases.
    """

    def __init__(
        self, layouts: Layouts, steps: Sequence[Step], result: Callable[[list[Any]], Any]
    ) -> None:
        self.current = True  # until `forget`
        self._result = result
        device, inputs, allocated, self._scratch, of = layouts
        self._device = device
        self._allocated = of[inputs : inputs + allocated]
        self._results = len(of) - inputs - allocated - 1
        self._empty = compat.allocator(device)
        self._handle = compat.stream_getter(device)
        self._index = device.index if device.type == "cuda" else None
        self._calls = any(isinstance(step, Call) for step in steps)
        self._parts = self._written(steps, layouts)

    def _written(
        self, steps: Sequence[Step], layouts: Layouts
    ) -> list[Callable[[list[Any], list[int]], None]]:
        """Return the steps as callables: one for each series of launches, one for each ATen call."""
        calls = [step for step in steps if isinstance(step, Call)]
        new = layouts.inputs + layouts.allocated + 1
        made = None
        if len(calls) < len(steps):
            library = launches.available() or unplannable("launches cannot be made again here")
            made = LaunchList(library, len(layouts.of) + 1)
        parts: list[Callable[[list[Any], list[int]], None]] = []
        first = 0
        for step in (*steps, None):
            if step is None or isinstance(step, Call):
                if made is not None and len(made) > first:
                    parts.append(made.part(first, len(made)))
                    first = len(made)
                if step is not None:
                    parts.append(_Again(step, layouts, new))
                    new += len(step.new)
                continue
            assert made is not None
            if isinstance(step, Zeros):
                made.zeros(step.at, step.size)
            elif isinstance(step, Product):
                made.product(self._device, *step) or unplannable("a product without memory")
            elif not made.launch(step.kernel, step.parameters):
                raise Unplannable(f"{step.kernel.kernel.name} has other parameters")
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
            scratch = self._empty((self._scratch + PAGE,), (1,), torch.uint8)
            start = -(-scratch.data_ptr() // PAGE) * PAGE
        tensors.append(scratch)
        words += (start, *[0] * self._results, self._handle())
        for part in self._parts:
            part(tensors, words)
        return self._result(tensors)


class _Again:
    """Repeats an ATen call. first: the base of the first tensor that it allocates."""

    def __init__(self, call: Call, layouts: Layouts, first: int) -> None:
        self._func, self._new, self._several, self._first = call.func, call.new, call.several, first
        self._given = built((call.args, tuple(call.kwargs.values())), None, layouts)
        self._names = tuple(call.kwargs)

    def __call__(self, tensors: list[Any], words: list[int]) -> None:
        args, named = self._given(tensors)
        out = self._func(*args, **dict(zip(self._names, named)))
        for base, i in enumerate(self._new, self._first):
            t = out[i] if self._several else out
            tensors.append(t)
            words[base] = t.data_ptr()


def built(
    shape: Any, views: Sequence[View | None] | None, layouts: Layouts
) -> Callable[[list[Any]], Any]:
    """Return a function that takes the tensors at the bases and returns `shape`, a nested structure, with its views
    replaced by tensors. If `views` is given, `shape` contains indices into it instead of views."""
    if views is not None and type(shape) is Number:
        shape = views[shape]
    kind = type(shape)
    if kind is View:
        return _seen(shape, layouts)
    if kind is Empty:
        empty = compat.allocator(layouts.device)
        return lambda tensors: empty(*shape)
    if kind not in (list, tuple) or (views is None and not _has_views(shape)):
        return lambda tensors: shape
    parts = [built(s, views, layouts) for s in shape]
    return lambda tensors: kind([part(tensors) for part in parts])


def _has_views(args: Any) -> bool:
    if isinstance(args, View):
        return True
    return type(args) in (list, tuple) and any(map(_has_views, args))


def _seen(view: View, layouts: Layouts) -> Callable[[list[Any]], Tensor]:
    """Return a function that takes the tensors at the bases and returns the view."""
    (base, offset), size, stride, dtype = view
    if layouts.of[base] == (size, stride, dtype) and not offset:
        return operator.itemgetter(base)
    last = sum((n - 1) * s for n, s in zip(size, stride))
    end = offset + (last + 1) * dtype.itemsize

    def of_scratch(tensors: list[Any]) -> Tensor:
        t = tensors[base]
        start = -t.data_ptr() % PAGE
        return t[start + offset : start + end].view(dtype).as_strided(size, stride)

    def of_tensor(tensors: list[Any]) -> Tensor:
        t = tensors[base]
        if t.dtype != dtype:
            t = t.view(-1).view(dtype)  # an allocated tensor is dense
        return t.as_strided(size, stride, t.storage_offset() + offset // dtype.itemsize)

    return of_scratch if layouts.of[base] is None else of_tensor


def layout_of(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), tuple(t.stride()), t.dtype


def bytes_of(t: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size()
