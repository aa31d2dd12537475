"""Parallel compilation of a call's kernels before the first call.

Triton compiles each kernel at its first launch, one after the other. A kernel takes a second or more, most of it in
separate processes: ptxas, and the C compiler for the launcher. The kernels that a call launches depend only on the
layouts of its arguments, so the call's Python code is run once without launches and arithmetic to collect them. This
happens either while a compiler traces the call, so that the kernels are compiled in parallel with Inductor's own, or
right before the first call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ... import compat
from . import launch as launches

log = logging.getLogger(__name__)


# (function, layouts of its arguments) for which compilation has been started.
_begun: set[Hashable] = set()


def compile_while_traced(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Start compiling in the background the kernels that fn(*args) launches. args: fake tensors and plain values."""
    key = (fn, *map(_layout, args))
    if key not in _begun:
        _begun.add(key)
        launches.begin(_needed(fn, args, launches.NoAddresses()))


def compile_ahead(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Compile the kernels that fn(*args) launches, in parallel. Errors are raised later, by the call itself.

    The control flow of fn may depend only on its arguments' layouts. If fn reads a number from the GPU, only the
    kernels launched before that point are compiled.
    """
    if torch.cuda.is_current_stream_capturing():  # loading a kernel would end the capture
        return
    jobs = _needed(fn, args, _NothingComputed())
    if len(jobs) < 2:
        return
    launches.begin(jobs)
    for job in jobs:
        try:
            job.keep()
        except Exception as error:
            log.debug("a kernel was not compiled ahead: %s", error)


def _needed(
    fn: Callable[..., Any], args: Sequence[Any], mode: AbstractContextManager[Any]
) -> Collection[launches.Job]:
    """Return the compilation jobs of the kernels that fn(*args) launches and that are not compiled yet."""
    with launches.collected() as jobs:
        try:
            with mode:
                fn(*args)
        except Exception as error:
            log.debug("%s was not gone through to its end: %s", fn.__qualname__, error)
    return jobs


def _layout(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.device, argument.shape, argument.stride()
    return tuple(map(_layout, argument)) if isinstance(argument, list) else argument


class _DependsOnData(Exception):
    """The call reads a number from the GPU."""


class _NothingComputed(TorchDispatchMode):
    """A dispatch mode in which operations on a GPU only return uninitialised tensors with the right layouts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = [
            t.device
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and t.is_cuda
        ]
        if func.is_view or not devices:
            return func(*args, **kwargs)
        if compat.schema(func).is_mutable:
            return kwargs.get("out", args[0])
        if torch.Tag.data_dependent_output in func.tags:
            raise _DependsOnData(str(func))
        named = {name: v for name, v in kwargs.items() if name != "device"}
        given, named = pytree.tree_map_only(Tensor, _on_meta, (args, named))
        out = func(*given, **named)
        return pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device=devices[0]), out)


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
