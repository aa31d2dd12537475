"""Compiling what a call launches side by side, before it is made for the first time.

Triton compiles a kernel at its first launch, one after the other, and spends most of that second or more in programs of
their own: ptxas, and the C compiler for what launches it. Which kernels a call launches depends on its arguments'
layouts alone, so the call is gone through once without launches and arithmetic, to see them all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ... import compat
from . import launch as launches

log = logging.getLogger(__name__)


def compile_ahead(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Compiles the kernels that fn(*args) launches; whatever fails fails again, and is raised, in the call itself.

    fn decides by nothing but its arguments' layouts. What it asks the GPU for ends the search: kernels up to there are
    compiled.
    """
    if torch.cuda.is_current_stream_capturing():  # loading a kernel would end the capture
        return
    with launches.collected() as jobs:
        try:
            with _NothingComputed():
                fn(*args)
        except Exception as error:
            log.debug("%s was not gone through to its end: %s", fn.__qualname__, error)
    if len(jobs) < 2:
        return
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            if failure := done.exception():
                log.debug("a kernel was not compiled ahead: %s", failure)


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
