"""A launch cache for Triton kernels, and compilation in the background.

At each launch Triton binds and classifies the arguments and compares every global that the kernel reads. This takes
half of the launch's host time, and a GPU without queued work waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import PriorityQueue
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...compat.triton import (
    LaunchSeen,
    alone_until_ir,
    build_launcher,
    hash_compiler,
    launch_hooks_set,
    launches_seen,
    load,
    mock_tensor,
    settle_cache_key,
)

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], Mapping[str, Hashable], int], None]
"""The function with which a host function launches its kernels: `launch`, or `captured` while a graph is traced."""

# Compiled kernels, keyed by everything that their code depends on, and by exact numbers, which is faster to look up.
_compiled: dict[Hashable, Any] = {}
_seen: dict[Hashable, Any] = {}
# Keyed by the types of arguments: (indices of tensors, indices of tuples and descriptors, a getter of the rest).
_Sorts = tuple[list[int], list[int], Callable[[tuple[Any, ...]], Any]]
_sorts: dict[tuple[type, ...], _Sorts] = {}
# Background compilations, until a launch takes their result.
_under_way: dict[Hashable, Future[Any]] = {}
# Compilations that no thread has started yet, in the order in which they will start. Starting one requires `_turn`.
_waiting: PriorityQueue[tuple[bool, int, Job, Future[Any]]] = PriorityQueue()
_numbers, _turn = itertools.count(), threading.Lock()
# Kernels that are compiled before others, by id: JITFunctions with the same source have the same hash.
_compiled_first: set[int] = set()
# Maximum number of entries, of a few hundred bytes each. When it is reached, the cache is cleared.
_MOST_SEEN = 16384
_NUMBERS = (int, float, type(None))


class _Observer(NamedTuple):
    """An observed thread, a function that returns the number of launches seen, and a callback for a missed one."""

    thread: int
    seen: Callable[[], int]
    on_unknown: Callable[[str], None]


class Job(NamedTuple):
    """A kernel to be compiled for a launch. args: the launch's arguments with mock tensors."""

    key: Hashable
    kernel: Any
    grid: tuple[int, ...]
    args: list[Any]
    named: dict[str, Any]
    device: int

    def compiled(self) -> Any:
        """Compile the kernel and its launcher into Triton's cache. Nothing is loaded, so that another thread may
        capture a CUDA graph at the same time."""
        with torch.cuda.device(self.device):
            settle_cache_key(self.kernel)
            compiled = self.kernel.warmup(*self.args, grid=self.grid, **self.named)
            build_launcher(compiled)
        return compiled

    def keep(self) -> None:
        """Compile the kernel, or wait until it is compiled, and load it."""
        begun = _under_way.pop(self.key, None)
        compiled = self.compiled() if begun is None else begun.result()
        with torch.cuda.device(self.device):
            load(compiled)
        _compiled[self.key] = compiled


class _Here(threading.local):
    """Per-thread state. jobs: collects kernels instead of launching them, unless it is None."""

    jobs: dict[Hashable, Job] | None = None


_here = _Here()
_observer: _Observer | None = None


def _kind(argument: Any) -> Hashable:
    """Return the properties of an argument that compiled code depends on, such as its type, divisibility by 16, and
    whether an integer is 1."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, (bool, float)):
        return type(argument), argument is True  # a bool is an integer that may be 1
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31, argument < 2**63
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    if argument is None:
        return None
    # A tensor descriptor; the kernel determines its block shape and layout.
    return argument.base.dtype


def _exact(argument: Any) -> Hashable:
    """As `_kind`, but numbers in a tuple stand for themselves, because they are faster to look up than their kinds."""
    if not isinstance(argument, tuple):
        return _kind(argument)
    kept = [a if a.__class__ in _NUMBERS else _exact(a) for a in argument]
    return tuple(kept), tuple(map(type, argument))


def _sorted(args: tuple[Any, ...]) -> _Sorts:
    tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    plain = [i for i, a in enumerate(args) if a is None or isinstance(a, (int, float))]
    others = sorted({*range(len(args))} - {*tensors, *plain})
    return tensors, others, operator.itemgetter(*plain) if plain else lambda args: None


def _on_device_of(args: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """Make the GPU of `args` current: Triton compiles for the current one and launches on its stream."""
    for a in args:
        t = a if isinstance(a, Tensor) else getattr(a, "base", None)
        if t is not None and t.is_cuda:
            return torch.cuda.device(t.device)
    return contextlib.nullcontext()


class NoAddresses(TorchFunctionMode):
    """A mode in which every tensor, even a fake one, reports an address that is a multiple of 16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 0 if func is Tensor.data_ptr else func(*args, **(kwargs or {}))


def _general(
    kernel: Any,
    args: tuple[Any, ...],
    constants: Mapping[str, Hashable],
    num_warps: int,
    options: Mapping[str, Hashable],
    device: int,
) -> tuple[Hashable, ...]:
    """Return the key of everything that the compiled code of a launch depends on."""
    settled = (device, *constants.values(), *options.items())
    types = tuple(Tensor if isinstance(a, Tensor) else type(a) for a in args)
    return (id(kernel), num_warps, types, *map(_kind, args), settled)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: Mapping[str, Hashable],
    num_warps: int,
    **options: Hashable,
) -> None:
    """Run kernel[grid](*args, **constants, num_warps=num_warps, **options) on the device of args.

    args: tensors, tensor descriptors, integers, floats, None, and tuples of these; at least one is a tensor or a
    descriptor. constants: the kernel's last parameters, in their order. options: compiler options such as num_stages.
    """
    observer = _observer
    if observer is not None and observer.thread == threading.get_ident():
        before = observer.seen()
        with _on_device_of(args):
            compiled = kernel[grid](*args, **constants, num_warps=num_warps, **options)
        if compiled is not None and observer.seen() == before:
            observer.on_unknown("this Triton launches without CompiledKernel.run")
        return
    jobs = _here.jobs
    if jobs is not None:
        with _on_device_of(args):
            here = torch.cuda.current_device()
        job = _job(kernel, grid, args, constants, num_warps, options, here)
        if job.key not in _compiled:
            jobs[job.key] = job
        return
    types = tuple(map(type, args))
    sorts = _sorts.get(types)
    if sorts is None:
        sorts = _sorts[types] = _sorted(args)
    tensors, others, plain = sorts
    passed = list(args)
    key: list[Hashable] = [id(kernel), num_warps, types, plain(args)]
    device, pointers = -1, 0
    for i in tensors:
        tensor = args[i]
        device = tensor.get_device()
        passed[i] = pointer = tensor.data_ptr()
        pointers |= pointer
        key.append(tensor.dtype)
    for i in others:
        key.append(_exact(args[i]))
        if not isinstance(args[i], tuple):
            device = args[i].base.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, args, constants, num_warps, **options)
        return
    if pointers % 16:
        key.append(tuple(args[i].data_ptr() % 16 == 0 for i in tensors))
    exact = (*key, device, *constants.values(), *options.items())
    compiled = _seen.get(exact)
    if compiled is None:
        general = _general(kernel, args, constants, num_warps, options, device)
        compiled = _compiled.get(general)
        if compiled is None:
            # The key contains the values of constants, but only the kinds of arguments.
            constexprs = [
                p.name for p in getattr(kernel, "params", ())[: len(args)] if p.is_constexpr
            ]
            if constexprs:
                raise TypeError(f"{constexprs} are constants, but given among the arguments")
            settle_cache_key(kernel)
            _finish(general)
            compiled = kernel[grid](*args, **constants, num_warps=num_warps, **options)
            if compiled is not None:  # under the interpreter there is nothing to keep
                _compiled[general] = compiled
            return
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[exact] = compiled
    compiled[(*grid, 1, 1)[:3]](*passed, *constants.values())


def _job(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: Mapping[str, Hashable],
    num_warps: int,
    options: Mapping[str, Hashable],
    device: int,
) -> Job:
    """Return the compilation job of a launch."""
    key = _general(kernel, args, constants, num_warps, options, device)
    like = [*map(_without_memory, args)]
    return Job(key, kernel, grid, like, {**constants, "num_warps": num_warps, **options}, device)


def _without_memory(argument: Any) -> Any:
    """Return an argument for which Triton compiles the same kernel; a mock tensor replaces a 16-byte-aligned one."""
    if isinstance(argument, Tensor):
        return argument if argument.data_ptr() % 16 else mock_tensor(argument.dtype)
    if isinstance(argument, tuple):
        parts = map(_without_memory, argument)
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    return argument


def begin(jobs: Collection[Job]) -> None:
    """Compile kernels in background threads; a launch that needs one waits for it."""
    new = [job for job in jobs if job.key not in _under_way]
    if new:
        hash_compiler()
    for job in new:
        future = _under_way[job.key] = Future[Any]()
        _waiting.put((id(job.kernel) not in _compiled_first, next(_numbers), job, future))
    for _ in new:
        _workers().submit(_compile_next)


def _compile_next() -> None:
    """Compile the first waiting kernel.

    Only one thread at a time builds IR, which needs the GIL. If threads interleaved, all IRs would be finished late,
    and no thread could start the compiler's passes early.
    """
    with alone_until_ir(_turn):
        *_, job, future = _waiting.get()
        try:
            future.set_result(job.compiled())
        except BaseException as error:
            future.set_exception(error)


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1)


def _finish(key: Hashable) -> None:
    """Wait for a kernel's background compilation. An error is ignored here, because the launch raises it again."""
    begun = _under_way.pop(key, None)
    if begun is not None:
        begun.exception()


@contextlib.contextmanager
def collected() -> Iterator[Collection[Job]]:
    """Collect the jobs of new kernels that this thread would launch in the block, instead of launching anything."""
    before, _here.jobs = _here.jobs, {}
    try:
        yield _here.jobs.values()
    finally:
        _here.jobs = before


@contextlib.contextmanager
def observing(on_launch: LaunchSeen, on_unknown: Callable[[str], None]) -> Iterator[None]:
    """Call `on_launch` after each launch of a Triton kernel by this thread in the block, including launches by other
    code. `on_unknown` is called with a reason if a launch may have been missed. Only one block can be active at a time.
    Under Triton's interpreter neither callback is called."""
    global _observer
    with launches_seen(on_launch, on_unknown) as count:
        _observer = _Observer(threading.get_ident(), count, on_unknown)
        try:
            yield
        finally:
            _observer = None


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# Whether a profiler observes each launch.
profiler_attached = launch_hooks_set


def captured(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: Mapping[str, Hashable],
    num_warps: int,
) -> None:
    """Add the launch to the graph that is being traced, so that Inductor launches the kernel like its own kernels.

    Errors from compiling or loading the kernel are raised here: once Inductor makes the launch, no other layer
    (`layers`) can replace the kernel.
    """
    device = next(a.get_device() for a in args if isinstance(a, Tensor))
    with NoAddresses():
        _job(kernel, grid, args, constants, num_warps, {}, device).keep()
    torch.library.wrap_triton(kernel)[grid](*args, **constants, num_warps=num_warps)


def compiled_first(launched: Any) -> Any:
    """Decorates the kernel of an operator that takes the longest to compile, several seconds: it is compiled first."""
    _compiled_first.add(id(getattr(launched, "kernel", launched)))
    return launched


def relaunched(kernel: Any) -> Any:
    """Decorates a kernel: kernel[grid](*args, **constants, num_warps=...) goes through `launch`."""
    return _Relaunched(kernel) if isinstance(kernel, triton.JITFunction) else kernel


class _Relaunched:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        constant = [p.is_constexpr for p in kernel.params]
        self._names = kernel.arg_names
        self._plain = constant.index(True) if any(constant) else len(constant)
        if not all(constant[self._plain :]):
            raise TypeError(f"{kernel.__name__}: constants are the last parameters")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._run, grid)

    def _run(self, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **named: Any) -> None:
        args, given = args[: self._plain], args[self._plain :]
        constants = dict(zip(self._names[self._plain :], given))
        for name in self._names[len(args) + len(given) :]:
            constants[name] = named.pop(name)
        launch(self.kernel, grid, args, constants, num_warps, **named)
