"""Recording of an operator's call: its allocations, launches and ATen calls as a plan."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ... import compat
from ...compat.triton import kernel_launch, kernel_parameters
from . import launches
from .launches import Address, Parameter, TensorMap, View
from .placement import placed
from .plan import (
    PAGE,
    Call,
    Empty,
    Launch,
    Layouts,
    Number,
    Plan,
    Product,
    Step,
    Unplannable,
    Zeros,
    built,
    bytes_of,
    layout_of,
    relocated,
    unplannable,
)

# Maximum bytes that a replayed call allocates and does not return. The call holds this memory until it ends.
MOST_SCRATCH = 1536 * 2**20

_aten = torch.ops.aten
ALLOCATES = {
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
# Matrix products that launches.c makes, with their names in `launches`.
_PRODUCTS = {
    _aten.mm.default: "mm_out",
    _aten.mm.out: "mm_out",
    _aten.mm.dtype: "mm_dtype_out",
    _aten.mm.dtype_out: "mm_dtype_out",
    _aten.addmm.default: "addmm_out",
    _aten.addmm.out: "addmm_out",
    _aten.addmm_.default: "addmm_out",
}
# Operators whose results depend only on dtypes, which are part of a plan's key.
_OF_DTYPES = {_aten.promote_types.default, _aten.can_cast.default}
_SIZES_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _Made(NamedTuple):
    """A tensor that the call makes and may free. storage: a weak reference. room, size: bytes of the storage and of the
    tensor."""

    storage: weakref.ref[Any]
    address: int
    room: int
    size: int
    layout: tuple[Any, ...]


class Recording(TorchDispatchMode):
    """A dispatch mode that records the steps of a call, in order.

    An address is an offset from a base. During recording the bases are the inputs, then the tensors that the call
    makes. In a finished plan they are the inputs, the tensors that are allocated individually, the scratch memory, then
    the tensors that ATen operators return.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._inputs = inputs
        self._device = inputs[0].device
        self._stream = compat.raw_stream(self._device)
        self._made: list[_Made] = []
        self._last_at: dict[int, int] = {}  # storage address: index of the latest tensor
        self._results: set[int] = set()  # indices of tensors that ATen operators returned
        self._passed: set[int] = set()  # indices of tensors passed to ATen operators
        self._divided: set[int] = set()  # indices of tensors used at a non-zero offset
        self._steps: list[Step] = []
        here = all(t.device == self._device or t.is_pinned() for t in inputs)
        self._why = "" if here else "several devices"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._why and not func.is_view:
            try:
                if func in ALLOCATES:
                    self._keep(out)
                else:
                    self._called(func, args, kwargs, out)
            except Unplannable as why:
                self._give_up(f"{func}: {why}")
        return out

    def _keep(self, t: Tensor) -> None:
        if t.device != self._device:
            raise Unplannable(f"a tensor on {t.device}")
        storage = t.untyped_storage()
        self._last_at[storage.data_ptr()] = len(self._made)
        sizes = storage.nbytes(), bytes_of(t)
        self._made.append(_Made(weakref.ref(storage), t.data_ptr(), *sizes, layout_of(t)))

    def _called(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func in _OF_DTYPES:
            return
        if compat.raw_stream(self._device) != self._stream:
            raise Unplannable("ATen on another stream")
        if func.namespace != "aten" or not _SIZES_FROM_DATA.isdisjoint(func.tags):
            raise Unplannable("what it returns is not known beforehand")
        if func in _ZEROS and self._device.type == "cuda" and out.is_contiguous() and out.numel():
            if not self._known(out):
                self._keep(out)
            view = self._view(out)
            self._steps.append(Zeros(view.at, bytes_of(out)))
            return
        product = _PRODUCTS.get(func)
        if product and kwargs.keys() <= {"out"} and self._multiplies(product, args, out):
            return
        named = {name: self._views(v) for name, v in kwargs.items()}
        new: list[int] = []
        call = Call(func, self._views(args), named, new, isinstance(out, (tuple, list)))
        results = out if isinstance(out, (tuple, list)) else (out,)
        for i, t in enumerate(results):
            if not isinstance(t, Tensor):
                raise Unplannable("a number: what follows may depend on it")
            if not self._known(t):
                self._results.add(len(self._made))
                self._keep(t)
                new.append(i)
        self._steps.append(call)

    def _multiplies(self, name: str, args: Any, out: Tensor) -> bool:
        """Record a matrix product as a step of launches.c. Return False if launches.c cannot make it."""
        if not launches.available() or compat.product_functions(self._device.type, name) is None:
            return False
        if not self._known(out):
            self._keep(out)
        operands = [self._view(t) for t in (out, *args) if isinstance(t, Tensor)]
        self._steps.append(Product(name, operands))
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
        at = self._locate(t) or unplannable("an empty tensor")
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
                raise Unplannable("another stream")
            kernel = kernel_launch(compiled, grid)
            given = [self._placed(a) for a in kernel_parameters(compiled, args)]
            self._steps.append(Launch(kernel, given))
        except Exception as why:  # the launch has been made: an error here only ends the recording
            self._give_up(f"{compiled.name}: {why}")

    def _placed(self, a: Any) -> Parameter:
        """Return a launch's argument, with an address instead of a tensor."""
        if isinstance(a, tuple):
            base, like = a
            return TensorMap(self._locate(base) or unplannable("an empty descriptor"), like)
        if isinstance(a, Tensor):
            return self._locate(a) or 0  # an empty tensor's address
        if not isinstance(a, (int, float)):
            raise Unplannable(f"an argument of type {type(a).__name__}")
        return a

    def _known(self, t: Tensor) -> bool:
        storage = t.untyped_storage().data_ptr()
        given = any(storage == x.untyped_storage().data_ptr() for x in self._inputs)
        return given or self._made_at(storage) is not None

    def _made_at(self, storage: int) -> int | None:
        """Return the index of the tensor that the call made in the storage at this address; None if it was freed."""
        i = self._last_at.get(storage)
        return None if i is None or self._made[i].storage() is None else i

    def _locate(self, t: Tensor) -> Address | None:
        """Return the address of the tensor's first element; None for an empty tensor."""
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
            raise Unplannable("a tensor from elsewhere")
        # Any input at this address will do, because the plan's key records which inputs share an address.
        return Address(given[0], address - self._inputs[given[0]].data_ptr())

    def plan(self, result: Any) -> Plan:
        """Return the plan of the recorded call, which returned `result`. Raises Unplannable."""
        if self._why or not self._steps:
            raise Unplannable(self._why or "nothing is launched")
        returned: list[View | None] = []
        shape = self._returned(result, returned)
        count = len(self._inputs)
        own = [v.at.base - count for v in returned if v is not None]
        if len(set(own)) != len(own):
            raise Unplannable("two results share memory")
        allocated = [i for i in own if i not in self._results]
        # ATen operators take tensors. Creating a view of the scratch memory takes more host time than an allocation.
        single = {i for i in self._passed if i >= 0 and self._made[i].room == self._made[i].size}
        allocated += sorted(single - self._results - self._divided - {*allocated})
        results = sorted(self._results)
        one_by_one = {*allocated, *results}
        in_use = lifetimes(self._steps)
        scratch = [b for b in in_use if b >= count and b - count not in one_by_one]
        parts = [self._made[b - count] for b in scratch]
        offsets, size = placed(
            [t.room for t in parts],
            [t.address % PAGE for t in parts],
            [in_use[b] for b in scratch],
            PAGE,
        )
        at = {b: Address(count + len(allocated), offset) for b, offset in zip(scratch, offsets)}
        at |= {count + i: Address(count + n, 0) for n, i in enumerate(allocated)}
        first = count + len(allocated) + 1
        at |= {count + i: Address(first + n, 0) for n, i in enumerate(results)}
        size_of_all = size + sum(self._made[i].room for i in one_by_one - {*own})
        if size_of_all > MOST_SCRATCH:
            raise Unplannable(f"{size_of_all} bytes of scratch memory")

        def moved(place: Address) -> Address:
            to = at.get(place.base, Address(place.base, 0))
            return Address(to.base, to.offset + place.offset)

        views = [None if v is None else v._replace(at=moved(v.at)) for v in returned]
        owned = {v.at.base: v for v in views if v is not None}
        made = [
            owned[count + n][1:] if i in own else self._made[i].layout
            for n, i in enumerate(allocated)
        ]
        bases = [*map(layout_of, self._inputs), *made, None]
        bases += [self._made[i].layout for i in results]
        layouts = Layouts(self._device, count, len(made), size, bases)
        steps = relocated(self._steps, moved)
        return Plan(layouts, steps, built(shape, views, layouts))

    def _returned(self, result: Any, found: list[View | None]) -> Any:
        """Return the result with tensors replaced by indices into `found`, which receives None for empty tensors."""
        if isinstance(result, (tuple, list)):
            return type(result)(self._returned(r, found) for r in result)
        if result is None:
            return None
        if not result.numel():
            found.append(None)
            return Empty((tuple(result.shape), tuple(result.stride()), result.dtype))
        view = self._view(result)
        if view.at.base < len(self._inputs) or view.at.offset:
            raise Unplannable("a result is a part of another tensor")
        if result.untyped_storage().nbytes() > bytes_of(result):
            raise Unplannable("a result is a part of what was made")
        found.append(view)
        return Number(len(found) - 1)


def lifetimes(steps: Sequence[Step]) -> dict[int, tuple[int, int]]:
    """Return for each base the first and the last step during which it is in use.

    A kernel with programmatic dependent launch may write to new memory while the preceding step runs, but only after
    all steps before that one have ended (`pdl`).
    """
    found: dict[int, tuple[int, int]] = {}
    for n, step in enumerate(steps):
        begin = n - 1 if isinstance(step, Launch) and step.kernel.early else n

        def use(place: Address, begin: int = begin, n: int = n) -> Address:
            found[place.base] = found.get(place.base, (begin, n))[0], n
            return place

        relocated(step, use)
    return found
