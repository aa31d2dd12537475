"""Access to Triton's private parts: compilation, caches, and launches.

Nothing here checks a version. Each function looks for the attributes that it needs, or tries to use them, and reports
if they are missing. Its caller then works without them, with the same results. docs/compatibility.md lists these
places, the behaviour without each of them, and the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import functools
import inspect
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

LaunchSeen = Callable[[Any, tuple[int, ...], int, Sequence[Any]], None]
"""Called after a launch with (compiled kernel, grid, stream, arguments of all its parameters, constants included)."""

# The arguments of a compiled kernel's `run` before the parameters: grid (3), stream, function, metadata (2), hooks (2).
_BEFORE = 9
# Bytes of a tensor map.
_TENSOR_MAP = 128


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def launch_hooks_set() -> bool:
    """Whether Triton has a launch hook, for example of a profiler."""
    import triton

    runtime = triton.knobs.runtime
    enter = getattr(runtime, "launch_enter_hook", None)
    leave = getattr(runtime, "launch_exit_hook", None)
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def load(compiled: Any) -> None:
    """Loads a compiled kernel onto the current GPU, as its first launch would, and raises the same errors. If Triton
    has no function for this, nothing is loaded."""
    function = getattr(compiled, "_init_handles", None)
    if function is not None:
        function()


def build_launcher(compiled: Any) -> None:
    """Builds the launcher of a compiled kernel, in any thread, where Triton compiles launchers in C (up to 3.7). The
    launcher is cached on disk for `load`. Errors are ignored here, because `load` raises them again."""
    import triton

    with contextlib.suppress(Exception):
        _keep_modules_apart()
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


@functools.cache
def _keep_modules_apart() -> None:
    """Makes Triton create a separate module object each time it loads an extension module.

    The launchers of Triton 3.6 all have the same module name, and Python keeps one module per name. A thread could
    therefore get the module that another thread has just loaded.
    """
    from triton.runtime import build

    usual, loading = build._load_module_from_path, threading.Lock()

    def alone(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with loading:
            own.__dict__.update(vars(usual(name, path)))
        return own

    build._load_module_from_path = alone


def mock_tensor(dtype: Any) -> Any:
    """Returns a placeholder for a tensor with a 16-byte aligned address, to compile a kernel without running it."""
    from triton.runtime.jit import MockTensor

    return MockTensor(dtype)


def compiled_kernel(
    cubin: bytes, name: str, arch: int, signature: Sequence[str], options: Mapping[str, Any]
) -> Any:
    """Returns the kernel `name` of a binary, for Triton to load and launch; options: those of Triton's compiler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel, make_backend

    target = GPUTarget("cuda", arch, 32)
    scratch = {
        f"{kind}_scratch_{what}": n
        for kind in ("global", "profile")
        for what, n in (("size", 0), ("align", 1))
    }
    metadata = {
        **vars(make_backend(target).parse_options(dict(options))), **scratch, "target": vars(target), "name": name,
        "shared": 0,
    }  # fmt: skip
    function = SimpleNamespace(launch_metadata=None, arg_names=())
    source = SimpleNamespace(signature=dict(enumerate(signature)), constants={}, fn=function)
    with tempfile.TemporaryDirectory() as folder:
        files = {suffix: Path(folder, f"{name}.{suffix}") for suffix in ("cubin", "json")}
        files["cubin"].write_bytes(cubin)
        files["json"].write_text(json.dumps(metadata, default=vars))
        return CompiledKernel(source, {path.name: str(path) for path in files.values()}, name)


def cached(key: str, name: str, make: Callable[[], bytes]) -> bytes:
    """Returns the result of `make`, cached in Triton's cache. key: 64 hexadecimal digits."""
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(key)
    path = cache.get_file(name)
    return Path(path or cache.put(make(), name)).read_bytes()


class _Here(threading.local):
    """The lock that this thread holds until it has built a kernel's IR."""

    turn: threading.Lock | None = None


_here = _Here()


@contextlib.contextmanager
def alone_until_ir(turn: threading.Lock) -> Iterator[None]:
    """Holds `turn` in the block until this thread has built a kernel's IR from Python, which needs the GIL; the passes
    and ptxas, which follow, do not. If Triton lacks the function that builds the IR, `turn` is not held."""
    if _end_turns_with_ir():
        turn.acquire()
        _here.turn = turn
    try:
        yield
    finally:
        _end_turn()


def _end_turn() -> None:
    turn, _here.turn = _here.turn, None
    if turn is not None:
        turn.release()


@functools.cache
def _end_turns_with_ir() -> bool:
    """Makes Triton release a thread's `turn` when it has built a kernel's IR; returns whether that is possible."""
    from triton.compiler import code_generator

    usual = getattr(code_generator, "ast_to_ttir", None)
    if usual is None:
        return False

    @functools.wraps(usual)
    def built(*args: Any, **named: Any) -> Any:
        try:
            return usual(*args, **named)
        finally:
            _end_turn()

    code_generator.ast_to_ttir = built
    return True


_hashing = threading.Lock()


def settle_cache_key(function: Any) -> None:
    """Makes Triton's cache key of a function the same in every process, so that processes share compiled kernels.

    Up to Triton 3.7 the key depends on whether the functions that it calls have been hashed before, and therefore on
    the order of the kernels. So the called functions are hashed first.
    """
    if getattr(function, "hash", "") is None:
        with _hashing:
            _hash_called_first(function, set())


@functools.cache
def hash_compiler() -> None:
    """Hashes Triton's files, as Triton does before it compiles. Otherwise each of several compiling threads would do
    so, and wait for the GIL after each of hundreds of reads."""
    from torch.utils import _triton

    with contextlib.suppress(Exception):
        _triton.triton_hash_with_backend()


def _hash_called_first(function: Any, above: set[int]) -> None:
    """Hashes the functions that `function` calls, then `function`. above: ids of its callers, to stop at recursion."""
    if getattr(function, "hash", "") is not None or id(function) in above:
        return
    for instruction in dis.get_instructions(function.fn):
        if instruction.opname == "LOAD_GLOBAL":
            called = function.fn.__globals__.get(instruction.argval)
            _hash_called_first(called, {*above, id(function)})
    function.cache_key  # noqa: B018


@contextlib.contextmanager
def launches_seen(see: LaunchSeen, unseen: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """Calls `see` after each launch of this thread in the block, by any code; yields a function that returns the number
    of launches so far.

    `unseen` is called with the reason if this Triton launches in an unknown way. In that case, or if the number has not
    increased after a launch, `see` was not called for it.
    """
    import triton

    kind: Any = getattr(getattr(triton, "compiler", None), "CompiledKernel", None)
    usual: Any = getattr(kind, "run", None)
    seen, thread = 0, threading.get_ident()
    if not hasattr(usual, "__get__") or inspect.isfunction(usual):
        unseen("this Triton has no CompiledKernel.run to be told of launches by")
        yield lambda: seen
        return

    def run(compiled: Any) -> Any:
        launcher = usual.__get__(compiled)
        if threading.get_ident() != thread:
            return launcher

        def telling(*given: Any) -> None:
            nonlocal seen
            launcher(*given)
            seen += 1
            known = len(given) >= _BEFORE and given[4] is compiled.function
            if known and given[5] is compiled.packed_metadata:
                see(compiled, given[:3], given[3], given[_BEFORE:])
            else:
                unseen("this Triton gives a launch its arguments in another order")

        return telling

    kind.run = property(run)
    try:
        yield lambda: seen
    finally:
        kind.run = usual


class KernelLaunch(NamedTuple):
    """A compiled kernel and its launch configuration: grid, threads and bytes of shared memory per program, programs
    per cluster, whether it is a cooperative launch, and whether it may start before the previous kernel has ended."""

    kernel: Any
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int
    cooperative: bool
    early: bool


def kernel_launch(compiled: Any, grid: tuple[int, ...]) -> KernelLaunch:
    """Returns how Triton launches a kernel.

    Raises ValueError or AttributeError if Triton does more than launch it, or launches it in an unknown way.
    """
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ValueError("scratch memory is allocated at each launch")
    if getattr(metadata, "instrumentation_mode", ""):
        raise ValueError("instrumented")
    cluster = getattr(metadata, "num_ctas", 1)
    if cluster > 8 or metadata.shared > 228 * 1024:
        raise ValueError("a launch with attributes of its own")
    x, y, z = (*grid, 1, 1)[:3]
    return KernelLaunch(
        compiled, (x, y, z), 32 * metadata.num_warps, metadata.shared, cluster,
        bool(metadata.launch_cooperative_grid), bool(metadata.launch_pdl),
    )  # fmt: skip


def kernel_parameters(compiled: Any, args: Sequence[Any]) -> Iterator[Any]:
    """Yields the parameters that a kernel receives for its arguments: without constants, and with tuples flattened. A
    tensor descriptor becomes (base tensor, bytes of its tensor map), followed by its sizes and strides."""
    kinds = [*compiled.src.signature.values()]
    if len(kinds) != len(args):
        raise ValueError("arguments that its signature does not name")
    described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for kind, a in _flat(kinds, args):
        if kind.startswith("tensordesc"):
            tensor_map, *numbers = _encoded(a, next(described, None))
            yield a.base, tensor_map
            yield from numbers
        elif kind != "constexpr":
            yield 0 if a is None else a


def _flat(kinds: Sequence[Any], args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for kind, a in zip(kinds, args, strict=True):
        if isinstance(kind, (tuple, list)):
            yield from _flat(kind, a)
        else:
            yield kind, a


def _encoded(descriptor: Any, metadata: Any) -> tuple[Any, ...]:
    """Returns a descriptor's tensor map, sizes and strides, as Triton passes them to a kernel."""
    from triton.backends.nvidia import driver

    if metadata is None:
        raise ValueError("a tensor descriptor without a tensor map")
    encode: Any = driver.make_tensordesc_arg
    # Since Triton 3.7 it has another parameter, which is not used.
    more = len(inspect.signature(encode).parameters) - 2
    tensor_map, *numbers = encode(descriptor, metadata, *[None] * more)
    # The tensor map is at the end of the object.
    at = id(tensor_map) + type(tensor_map).__basicsize__ - _TENSOR_MAP
    return ctypes.string_at(at, _TENSOR_MAP), *numbers


def headers() -> Path:
    """Returns the folder of the CUDA driver's headers that Triton ships."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "include"
