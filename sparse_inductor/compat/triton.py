"""Triton's private parts: what is launched, how, and what is compiled on the way.

Nothing here asks for a version. A function looks for what it needs, or tries it, and says so where it is missing; its
caller then does without, with the same results. docs/compatibility.md lists the places, what happens without each, and
its test.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "DirectLaunch",
    "LaunchSeen",
    "direct_launch",
    "interprets",
    "launch_hooks_set",
    "launches_seen",
    "load",
]

LaunchSeen = Callable[[Any, tuple[int, ...], int, Sequence[Any]], None]
"""Called after a launch with (compiled kernel, grid, stream, what its parameters were given, constants too)."""

# What a compiled kernel's `run` takes in front of the parameters: grid, stream, function, metadata twice, two hooks.
_BEFORE = 9


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def launch_hooks_set() -> bool:
    """Whether somebody (a profiler) has asked Triton to call a function at each launch."""
    import triton

    hooks = (getattr(triton.knobs.runtime, f"launch_{at}_hook", None) for at in ("enter", "exit"))
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def load(compiled: Any) -> None:
    """Loads a compiled kernel onto the current GPU, which its first launch would do, and raises what that would raise;
    where Triton has no such function, nothing is loaded."""
    function = getattr(compiled, "_init_handles", None)
    if function is not None:
        function()


@contextlib.contextmanager
def launches_seen(see: LaunchSeen, unseen: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """Have `see` called after each launch of this thread in the block, whoever makes it; gives their number so far.

    `unseen` is called with the reason where this Triton launches in a way that is not known here: then, and wherever
    the number has not risen, a launch was made that nobody was told of.
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


class DirectLaunch(NamedTuple):
    """`launch(grid x, y, z, stream, *more, *arguments)`; encoded: by parameter, what takes a tensor descriptor to the
    arguments that stand for it, where the launch would do so anew each time."""

    launch: Callable[..., None]
    more: tuple[Any, ...]
    encoded: Mapping[int, Callable[[Any], Sequence[Any]]]


def direct_launch(compiled: Any) -> DirectLaunch | None:
    """What a compiled kernel's `run` calls in the end, with what it puts in front of the arguments; None where `run`
    does more than that, or hands the arguments on in another form.

    `run` itself is asked, by a copy whose launch function launches nothing.
    """
    run = compiled.run
    # A kernel that needs scratch memory gets it allocated at each launch.
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if scratch != [0, 0] or not hasattr(run, "launch"):
        return None
    grid, stream, first, last = (1, 1, 1), object(), object(), object()
    calls: list[tuple[Any, ...]] = []
    asked = copy.copy(run)
    asked.launch = lambda *given: calls.append(given)
    metadata = compiled.packed_metadata
    try:
        asked(*grid, stream, compiled.function, metadata, None, None, None, first, last)
    except Exception:
        return None
    if len(calls) != 1 or calls[0][:3] != grid:
        return None
    _, _, _, given, *more = calls[0]
    if given is not stream or len(more) < 2 or more[-2] is not first or more[-1] is not last:
        return None
    launch, encoded = _encoders(run.launch)
    return DirectLaunch(launch, tuple(more[:-2]), encoded)


def _encoders(
    launcher: Callable[..., None],
) -> tuple[Callable[..., None], dict[int, Callable[[Any], Sequence[Any]]]]:
    """What the launcher of a kernel with tensor descriptors calls once they are encoded, which takes the host longer
    than the launch, and what encodes them; another launcher is as it is."""
    if not inspect.isfunction(launcher):
        return launcher, {}
    held = inspect.getclosurevars(launcher)
    encode = held.globals.get("make_tensordesc_arg")
    try:
        direct, places, kinds = (
            held.nonlocals[name] for name in ("launcher", "tensordesc_indices", "tensordesc_meta")
        )
    except KeyError:
        return launcher, {}
    if encode is None:
        return launcher, {}
    return direct, {i: functools.partial(encode, metadata=m) for i, m in zip(sorted(places), kinds)}
