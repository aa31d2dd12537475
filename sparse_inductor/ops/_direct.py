"""Direct calls of operators from the code that Inductor generates, bypassing the dispatcher.

The dispatcher unpacks an operator's arguments, checks for autograd, modes and subclasses, and packs the arguments
again, twice for an implementation in Python. This takes more host time than the rest of a replayed call. A compiled
graph has no autograd, modes or subclasses to check for, so the generated module creates one `site` per call, under a
unique name:

    sparse_inductor_relu_ffn_buf5 = site('relu_ffn', 'cuda', True)
    ...
    buf5 = sparse_inductor_relu_ffn_buf5(buf4, arg3_1, None, ..., 'relu', '', False, False)

C++ wrappers and AOTInductor packages call the operator through the dispatcher.
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
    """Make Inductor generate direct calls for every operator from now on."""
    for name in functions:
        compat.call_extern_kernels(f"torch.ops.sparse_inductor.{name}.default", _made)


def _made(node: Any) -> tuple[str, str, str] | None:
    """(import statement, name, expression) that create the site for an operator's node in Inductor's graph; None if the
    node must call the operator."""
    device = node.get_device()
    if device is None or device.type not in ("cpu", "cuda"):
        return None
    schema = compat.schema(node.op_overload)
    # Arguments that the call omits are passed by name, with the schema's defaults.
    passed, named = compat.arguments_of_node(node)
    if [*named] != [a.name for a in schema.arguments[passed : passed + len(named)]]:
        return None
    op = schema.name.rpartition("::")[2]
    call = f"sparse_inductor_site({op!r}, {device.type!r}, {compat.settled_inputs(node)})"
    place = f"sparse_inductor_{op}_{node.get_name()}"
    return f"from {__name__} import site as sparse_inductor_site", place, call


def site(name: str, device: str, settled: bool) -> Callable[..., Any]:
    """The function that computes an operator at one call site of a generated module. settled: all sizes and strides are
    known at this site.

    Arguments by name follow the positional ones in the schema's order. While a profiler or a mode observes operators,
    the function calls the operator itself.
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
