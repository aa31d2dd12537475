"""Which nodes write memory, and which value of a tensor a reader sees.

A Dynamo graph is not functional: `x.relu_()` or `x[~mask] = 0` as a statement changes what later readers of the
node `x` get. Storage identity of the fake tensors says what aliases what.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .fakes import fake, same_size
from .names import INPLACE_OPERATORS, name_of, trailing_inplace

__all__ = ["Effects", "same_geometry"]


def _storage(node: fx.Node) -> int | None:
    value = fake(node)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def same_geometry(a: fx.Node, b: fx.Node) -> bool:
    x, y = fake(a), fake(b)
    if (
        x.dim() != y.dim()
        or x.dtype != y.dtype
        or not same_size(x.storage_offset(), y.storage_offset())
    ):
        return False
    return all(map(same_size, x.shape, y.shape)) and all(map(same_size, x.stride(), y.stride()))


@functools.lru_cache(maxsize=4096)
def _writes_first(op: str, target: Any) -> bool:
    """Whether the name alone says that the first argument is written: `x.relu_()`, `x += y`, `x[i] = v`."""
    name = target if op == "call_method" else getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":
        return name == "setitem" or name in INPLACE_OPERATORS
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


# Functions of torch.nn.functional that write arguments in the middle: which, and what asks for it.
_WRITES: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.batch_norm: ("training", ("running_mean", "running_var")),
    F.instance_norm: ("use_input_stats", ("running_mean", "running_var")),
    F.embedding: ("max_norm", ("weight",)),
    F.embedding_bag: ("max_norm", ("weight",)),
}


def written(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory this call writes."""
    if node.op not in ("call_function", "call_method"):
        return []
    target, args, kwargs = node.target, node.args, node.kwargs
    out: list[Any] = []
    if isinstance(target, torch._ops.OpOverload):
        out += _by_schema(target, args, kwargs)
    elif isinstance(target, torch._ops.OpOverloadPacket):
        for name in target.overloads():
            out += _by_schema(getattr(target, name), args, kwargs)
    elif isinstance(target, torch._ops.HigherOrderOperator):
        if (
            "mutation" in target.name()
        ):  # a Triton kernel of the user's: which pointers it stores to is not known
            out += node.all_input_nodes
    elif target in _WRITES:
        bound = inspect.signature(target).bind(*args, **kwargs)
        bound.apply_defaults()
        when, names = _WRITES[target]
        if bound.arguments[when] not in (False, None):
            out += [bound.arguments[name] for name in names]
    else:
        at = trailing_inplace(getattr(target, "__name__", ""), args)
        last = at is not None and args[at] is True
        if last or _writes_first(node.op, target) or kwargs.get("inplace") is True:
            out.append(args[0] if args else kwargs.get("input"))
        out.append(kwargs.get("out"))
    flat = [a for x in out for a in (x if isinstance(x, (list, tuple)) else [x])]
    return list(dict.fromkeys(a for a in flat if isinstance(a, fx.Node)))


def _by_schema(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [
        args[i] if i < len(args) else kwargs.get(arg.name)
        for i, arg in enumerate(target._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    ]


def _is_result(writer: fx.Node, target: fx.Node) -> bool:
    """Whether what a call returns is what it wrote: not so for `out=(values, indices)` and lists of tensors."""
    value = fake(writer)
    if value is None:
        return name_of(writer) == "setitem"
    first = writer.args[0] if writer.args else writer.kwargs.get("input")
    return isinstance(value, torch.Tensor) and target in (first, writer.kwargs.get("out"))


class Effects:
    """Writes of a graph, by storage. Storages are looked up only in graphs that write at all."""

    def __init__(self, graph: fx.Graph, order: dict[fx.Node, int]):
        self._graph, self._order = graph, order
        self.writers = {n: targets for n in graph.nodes if (targets := written(n))}

    @functools.cached_property
    def _writes(self) -> dict[int, list[tuple[fx.Node, fx.Node]]]:
        writes: dict[int, list[tuple[fx.Node, fx.Node]]] = {}
        for node, targets in self.writers.items():
            for target in targets:
                key = _storage(target)
                if key is not None:
                    writes.setdefault(key, []).append((node, target))
        return writes

    @functools.cached_property
    def _creator(self) -> dict[int, fx.Node]:
        creator: dict[int, fx.Node] = {}
        for node in self._graph.nodes:
            key = _storage(node)
            if key is not None:
                creator.setdefault(key, node)
        return creator

    def _between(self, node: fx.Node, after: int, before: int) -> list[tuple[fx.Node, fx.Node]]:
        if not self.writers:
            return []
        key = _storage(node)
        events = self._writes.get(key, ()) if key is not None else ()
        return [e for e in events if after < self._order[e[0]] < before]

    def value(self, node: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The node whose result `reader` sees when it reads `node`: the last whole write, or the node itself.

        None where the last write went through a view of other shape, so that no single node is the value.
        """
        events = self._between(node, self._order[node], self._order[reader])
        if not events:
            return node
        writer, target = events[-1]
        return writer if _is_result(writer, target) and same_geometry(target, node) else None

    def unchanged(self, node: fx.Node, since: fx.Node, until: fx.Node) -> bool:
        """Whether nothing writes the memory of `node` between two points of the graph."""
        return not self._between(node, self._order[since], self._order[until])

    def creator(self, node: fx.Node) -> fx.Node | None:
        """The node that first held the memory of `node`."""
        key = _storage(node)
        return None if key is None else self._creator.get(key)
