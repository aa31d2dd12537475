"""Fake values of nodes and their sizes; nothing here adds a guard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import compat, layers


def fake(node: Any) -> Any:
    """The fake value of a node (tensor, tuple, SymInt ...), or None."""
    if not isinstance(node, fx.Node):
        return None
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def attribute(node: Any) -> Any:
    """What a get_attr node reads of the graph's module; None for anything else, and where there is nothing."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def evaluated(node: fx.Node) -> Any:
    """What a call gives on the fake values of its arguments; autograd records nothing of it.

    The layer that launches nothing computes it: kernels are compiled where the rewritten graph is traced.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), fake)
    mode = next((t.fake_mode for t in tensors_in((args, kwargs)) if hasattr(t, "fake_mode")), None)
    here = layers.at(layers.Layer.ATEN)
    with mode or contextlib.nullcontext(), compat.symbolic_sizes(), torch.no_grad(), here:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def complete(graph: fx.Graph) -> bool:
    """Give calls without a fake value the one that they have: a pass of Inductor's that ran before, as the one that
    moves functions in front of a concatenation, leaves them without. Gives whether there were any."""
    found = False
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or fake(node) is not None:
            continue
        inputs = [fake(n) for n in node.all_input_nodes]
        if not inputs or not all(isinstance(t, torch.Tensor) for t in inputs):
            continue
        with contextlib.suppress(Exception):  # it stays unknown, which does no harm
            value = evaluated(node)
            if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
                require_grad(value)
            node.meta["example_value"] = value
            found = True
    return found


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal on every run."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a is b or bool(statically_known_true(a == b))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal on every run."""
    return len(a) == len(b) and all(map(same_size, a, b))


def static_size(size: Any) -> int | None:
    """The number a size is on every run, or None."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def bounds(size: Any) -> tuple[int | float, int | float]:
    """The least and the largest that a symbolic size may be."""
    found = size.node.shape_env.bound_sympy(size.node.expr)
    least = int(found.lower) if found.lower.is_Integer else 0
    return least, int(found.upper) if found.upper.is_Integer else math.inf


def expected(size: Any) -> int:
    """The number a size had when the graph was captured; 1 where it had none yet, or several (of a nested tensor)."""
    if isinstance(size, int):
        return size
    known = size.node.has_hint() and not isinstance(size.node.hint, torch.SymInt)
    return int(size.node.hint) if known else 1


def expected_elements(sizes: Iterable[Any]) -> int:
    """How many elements a tensor of these sizes had when the graph was captured."""
    return math.prod(map(expected, sizes))


def bytes_of(node: Any) -> int | None:
    """The size of a node's tensor in bytes; None where it is not the same on every run."""
    t = fake(node)
    known = all(isinstance(s, int) for s in t.shape)
    return math.prod(t.shape) * t.dtype.itemsize if known else None


def memory_order(value: Any) -> list[int] | None:
    """The dimensions of a dense tensor from the widest stride to the narrowest; None for any other value."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    order: list[int] = []
    left = [d for d in range(value.dim()) if not same_size(value.shape[d], 1)]
    single = [d for d in range(value.dim()) if d not in left]
    expected: Any = 1
    while left:
        # The last that fits, so that a contiguous tensor has its own order.
        fits = [d for d in left if same_size(value.stride(d), expected)]
        if not fits:
            return None
        order.insert(0, fits[-1])
        left.remove(fits[-1])
        expected = expected * value.shape[fits[-1]]
    return single + order


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, or of a structure of values."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for v in x:
            yield from tensors_in(v)
    elif isinstance(x, dict):
        yield from tensors_in(tuple(x.values()))


def require_grad(value: Any) -> None:
    """Mark the fake values of a call that autograd records: a region that torch traces apart (nested_compile_region)
    takes results that require no gradient for not differentiable."""
    for t in tensors_in(value):
        if t.dtype.is_floating_point and not t.requires_grad:
            t.requires_grad_()
