"""Compiling what a call launches side by side, before it is made for the first time.

Triton compiles a kernel at its first launch, one after the other, and spends most of that second or more in programs of
their own: ptxas, and the C compiler for what launches it. Which kernels a call launches depends on its arguments'
layouts alone, so the call is gone through once without launches and arithmetic, to see them all: where a compiler
traces it, so that they are compiled while Inductor compiles the rest, and where it is made.
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


# What is being compiled, or was: functions and the layouts of what they were given.
_begun: set[Hashable] = set()


def compile_while_traced(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Begins to compile the kernels that fn(*args) launches, in the background; args: fake tensors, plain values."""
    key = (fn, *map(_layout, args))
    if key not in _begun:
        _begun.add(key)
        launches.begin(_needed(fn, args, launches.NoAddresses()))


def compile_ahead(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Compiles the kernels that fn(*args) launches; whatever fails fails again, and is raised, in the call itself.

    fn decides by nothing but its arguments' layouts. What it asks the GPU for ends the search: kernels up to there are
    compiled.
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
    """What compiles the kernels that fn(*args) launches and that are new."""
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
    """The call asks for a number that is on the GPU."""


class _NothingComputed(TorchDispatchMode):
    """Results of operations on a GPU are memory of the right layout, which nobody has written to."""

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
