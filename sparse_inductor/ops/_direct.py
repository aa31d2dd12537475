"""Operators called from the code that Inductor generates, past the dispatcher.

The dispatcher takes an operator's arguments apart, looks for autograd, modes and subclasses, and puts them together
again, for Python twice: more of the host's time than all else that a replayed call does. In a compiled graph nobody is
there to be found. The generated module makes a `site` a call, under a name of its own:

    sparse_inductor_relu_ffn_buf5 = site('relu_ffn', 'cuda', True)
    ...
    buf5 = sparse_inductor_relu_ffn_buf5(buf4, arg3_1, None, ..., 'relu', '', False, False)

C++ wrappers and AOTInductor's packages call the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import compat
from ._dispatch import (
    functions,
    has_layers,
    layered,
    on_gpu,
    replays,
    sites,
    untracked,
)


@functools.cache
def install() -> None:
    """Have Inductor generate such calls for every operator from now on."""
    for name in functions:
        compat.call_extern_kernels(f"torch.ops.sparse_inductor.{name}.default", _made)


def _made(node: Any) -> tuple[str, str, str] | None:
    """For an operator's node in Inductor's graph, how to make what is called: import, name and expression."""
    device = node.get_device()
    if device is None or device.type not in ("cpu", "cuda"):
        return None
    schema = compat.schema(node.op_overload)
    # What a call leaves to the schema's defaults is passed by name.
    passed, named = compat.arguments_of_node(node)
    if [*named] != [a.name for a in schema.arguments[passed : passed + len(named)]]:
        return None
    op = schema.name.rpartition("::")[2]
    call = f"sparse_inductor_site({op!r}, {device.type!r}, {compat.settled_inputs(node)})"
    place = f"sparse_inductor_{op}_{node.get_name()}"
    return f"from {__name__} import site as sparse_inductor_site", place, call


def site(name: str, device: str, settled: bool) -> Callable[..., Any]:
    """What computes an operator at one place of a generated module; settled: all sizes and strides are known there.

    Arguments by name come in the schema's order, behind the others. A profiler and modes that look at every operator
    get to see the operator.
    """
    op, fn = getattr(torch.ops.sparse_inductor, name).default, functions[name]
    if settled and name in sites:
        run = sites[name]()
    elif device != "cuda":
        run = fn
    elif settled and has_layers(fn) and replays():
        from ..kernels.common.replay import Site

        run = layered(fn, Site(fn))
    else:
        run = on_gpu(fn)

    run = untracked(run)

    def call(*args: Any, **named: Any) -> Any:
        return op(*args, **named) if compat.observed() else run(*args, *named.values())

    return call
