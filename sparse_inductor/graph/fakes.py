"""Fake values of nodes and their sizes. No function here adds a guard."""

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
    """Return the fake value of a node (tensor, tuple, SymInt ...), or None."""
    if not isinstance(node, fx.Node):
        return None
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def attribute(node: Any) -> Any:
    """Return the attribute that a get_attr node reads; None for any other node, and for a missing attribute."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def evaluated(node: fx.Node) -> Any:
    """Return the result of a call on the fake values of its arguments, without recording by autograd.

    Operators of this package run in the ATen layer, which launches no kernels: these are compiled when the rewritten
    graph is traced.
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
    """Add missing fake values of calls. Returns whether it added any.

    Earlier passes of Inductor, such as the one that moves functions before a concatenation, insert calls without one.
    """
    found = False
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or fake(node) is not None:
            continue
        inputs = [fake(n) for n in node.all_input_nodes]
        if not inputs or not all(isinstance(t, torch.Tensor) for t in inputs):
            continue
        with contextlib.suppress(Exception):  # the value may stay unknown
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


def never_larger(a: Any, b: Any) -> bool:
    """Whether a size is at most another one on every run."""
    return bool(statically_known_true(a <= b))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal on every run."""
    return len(a) == len(b) and all(map(same_size, a, b))


def static_size(size: Any) -> int | None:
    """Return the value of a size that is the same on every run, or None."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def bounds(size: Any) -> tuple[int | float, int | float]:
    """Return the lower and upper bound of a symbolic size."""
    found = size.node.shape_env.bound_sympy(size.node.expr)
    least = int(found.lower) if found.lower.is_Integer else 0
    return least, int(found.upper) if found.upper.is_Integer else math.inf


def expected(size: Any) -> int:
    """Return the value of a size when the graph was captured; 1 if it had none yet, or if the size of a nested tensor
    has several."""
    if isinstance(size, int):
        return size
    known = size.node.has_hint() and not isinstance(size.node.hint, torch.SymInt)
    return int(size.node.hint) if known else 1


def expected_elements(sizes: Iterable[Any]) -> int:
    """Return the number of elements of a tensor of these sizes when the graph was captured."""
    return math.prod(map(expected, sizes))


def bytes_of(node: Any) -> int | None:
    """Return the size of a node's tensor in bytes; None if it differs between runs."""
    t = fake(node)
    known = all(isinstance(s, int) for s in t.shape)
    return math.prod(t.shape) * t.dtype.itemsize if known else None


def memory_order(value: Any) -> list[int] | None:
    """Return the dimensions of a dense tensor from the largest stride to the smallest; None for any other value."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    order: list[int] = []
    left = [d for d in range(value.dim()) if not same_size(value.shape[d], 1)]
    single = [d for d in range(value.dim()) if d not in left]
    expected: Any = 1
    while left:
        # Take the last that fits, so that the order of a contiguous tensor is 0, 1, 2, ....
        fits = [d for d in left if same_size(value.stride(d), expected)]
        if not fits:
            return None
        order.insert(0, fits[-1])
        left.remove(fits[-1])
        expected = expected * value.shape[fits[-1]]
    return single + order


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value or of a nested structure of values."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for v in x:
            yield from tensors_in(v)
    elif isinstance(x, dict):
        yield from tensors_in(tuple(x.values()))


def has_gradient(node: fx.Node) -> bool:
    """Whether autograd records a result of a node."""
    return any(t.requires_grad for t in tensors_in(fake(node)))


def require_grad(value: Any) -> None:
    """Set requires_grad on the fake values of a call that autograd records. A separately traced region
    (nested_compile_region) treats results that require no gradient as not differentiable."""
    for t in tensors_in(value):
        if t.dtype.is_floating_point and not t.requires_grad:
            t.requires_grad_()
