"""Inserting nodes with fake values, so that later passes find the same metadata as on nodes from Dynamo."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import compat
from .fakes import (
    evaluated,
    fake,
    memory_order,
    require_grad,
    same_size,
    static_size,
    tensors_in,
)
from .modes import modes_of
from .names import canonical, name_of
from .view import GraphView

_MADE_AGAIN = 8


def own_operator(name: str) -> Callable[..., Any]:
    """Return an operator of this package, by its name with or without the namespace. The first call defines all of
    them, because few programs need any."""
    importlib.import_module(f"{__package__.partition('.')[0]}.ops")
    packet = getattr(torch.ops.sparse_inductor, name.rpartition(":")[2])
    overload: Callable[..., Any] = packet.default
    return overload


class Emitter:
    """Inserts calls before `anchor`. A new node takes the anchor's source location."""

    def __init__(self, anchor: fx.Node):
        self._graph = anchor.graph
        self._anchor = anchor
        self.inserted: list[fx.Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(self._anchor):
            return self._annotate(self._graph.call_function(target, args, kwargs))

    def declared(self, make: Callable[[], Any], target: Callable[..., Any], *args: Any) -> fx.Node:
        """Insert a call whose fake value `make` creates, which is cheaper than running the target on fake tensors."""
        with self._graph.inserting_before(self._anchor):
            return self._annotate(self._graph.call_function(target, args), make)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        if name == "select" and static_size(fake(args[0]).shape[args[1]]) == 0:
            # torch 2.11 does not raise on a fake tensor.
            raise IndexError("select() of an empty axis")
        with self._graph.inserting_before(self._anchor):
            return self._annotate(self._graph.call_method(name, args, kwargs))

    def again(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> fx.Node:
        """Insert a copy of a call, with arguments replaced as `new` maps them."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: new.get(a, a))
        if node.op == "call_method":
            return self.method(str(node.target), *args, **kwargs)
        assert callable(node.target)
        return self.call(node.target, *args, **kwargs)

    def attribute(self, name: str, value: Any) -> fx.Node:
        """Insert a read of an attribute of the graph's module."""
        with self._graph.inserting_before(self._anchor):
            node = self._graph.get_attr(name)
        self.inserted.append(node)
        node.meta["example_value"] = value
        return node

    def size(self, t: fx.Node, dim: int) -> int | fx.Node:
        """Return a size of t: a constant if it is known, else a node that reads it."""
        size = fake(t).shape[dim]
        return size if isinstance(size, int) else self.method("size", t, dim)

    def given_size(self, size: Any) -> fx.Node | None:
        """Return a node that reads a symbolic size from an input of the graph, or None if no input has it."""
        for node in self._graph.find_nodes(op="placeholder"):
            value = fake(node)
            if isinstance(value, torch.SymInt) and same_size(value, size):
                return node
            for dim, one in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if same_size(one, size):
                    return self.method("size", node, dim)
        return None

    def permuted(self, t: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Insert t.permute(dims), or return t itself if they are in order."""
        if list(dims) == sorted(dims):
            return t
        return self.method("permute", self.dense_gradient(t), tuple(dims))

    def cast(self, t: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Insert t.to(dtype), or return t itself if it has that dtype."""
        return t if fake(t).dtype == dtype else self.method("to", t, dtype)

    def laid_out(self, t: fx.Node, like: torch.Tensor) -> fx.Node:
        """Bring t into the memory layout of another tensor of its shape, because a later view may depend on it."""
        order = memory_order(like)
        if order is None or memory_order(fake(t)) == order:
            return t
        return self._permuted_back(self.method("contiguous", self.permuted(t, order)), order)

    def dense_gradient(self, t: fx.Node) -> fx.Node:
        """Return t, or if it is an input of the graph that gets a gradient, t reshaped there and back: the gradient
        then has the memory layout of t, although t is permuted or concatenated with other tensors."""
        value = fake(t)
        seen = t.op in ("placeholder", "get_attr") and value.requires_grad and self._recorded
        order = memory_order(value)
        # A view of a DTensor may communicate.
        if not seen or order is None or is_traceable_wrapper_subclass(value):
            return t
        dense = t if order == sorted(order) else self.method("permute", t, tuple(order))
        dense = self.method("view_as", self.method("flatten", dense), dense)
        return self._permuted_back(dense, order)

    def _permuted_back(self, t: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Insert the inverse of a permutation by `dims`."""
        return self.permuted(t, [dims.index(d) for d in range(len(dims))])

    def __enter__(self) -> Emitter:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all inserted nodes: a `with` block only tries something out. No other node may use them."""
        for node in reversed(self.inserted):
            self._graph.erase_node(node)

    def _annotate(self, node: fx.Node, make: Callable[[], Any] | None = None) -> fx.Node:
        self.inserted.append(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self._anchor.meta:
                node.meta[key] = self._anchor.meta[key]
        inputs = [t for n in node.all_input_nodes for t in tensors_in(fake(n))]
        if make is None:
            value = evaluated(node)
        else:
            mode = next((t.fake_mode for t in inputs if hasattr(t, "fake_mode")), None)
            with mode or contextlib.nullcontext(), torch.no_grad():
                value = make()
        needs_grad = name_of(node) != "detach" and any(t.requires_grad for t in inputs)
        if needs_grad and self._recorded:
            require_grad(value)
        node.meta["example_value"] = value
        if (entry := self._entry) is not None and _is_view(value):
            before = {n: _written_from(n, entry) for n in node.all_input_nodes}
            if all(n < entry for n in before.values()):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), before.__getitem__)
                entry.prepend(node)
        return node

    @functools.cached_property
    def _entry(self) -> fx.Node | None:
        """The node by which the graph enters the inference mode of the anchor, in which AOTAutograd takes no views of
        tensors from outside; None if the anchor is in none."""
        node = self._anchor
        while modes_of(node).inference:
            node = node.prev
        return None if node is self._anchor else node

    @functools.cached_property
    def _recorded(self) -> bool:
        """Whether autograd records what runs at the anchor."""
        return modes_of(self._anchor).records


def _is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and compat.is_view(value)


def _written_from(node: fx.Node, entry: fx.Node) -> fx.Node:
    """Return the tensor from before `entry` that a chain of writes in place after it returns, or the node itself."""
    start = node
    while not node < entry and (call := canonical(node)) is not None and call.inplace:
        if not isinstance(call["input"], fx.Node):
            break
        node = call["input"]
    return node if node < entry else start


Make = Callable[[Emitter], fx.Node]


def made_again(
    view: GraphView, node: fx.Node, before: fx.Node
) -> tuple[list[fx.Node], Make] | None:
    """Return the inputs of `node` that are computed before another node, and a function that recomputes `node` from
    them. None if that takes more than a few operations, or an operation that cannot be repeated."""
    leaves: list[fx.Node] = []
    made: list[fx.Node] = []
    queue = [node]
    while queue:
        n = queue.pop()
        if view.effects.writers_to(n):
            return None
        if view.order[n] < view.order[before]:
            leaves.append(n)
            continue
        call = view.call(n)
        if not call or call.drops or not view.is_tensor(n):
            return None
        # Autocast does not change a call with fp32 operands and an fp32 result.
        dtypes = {view.dtype(t) for t in (n, *n.all_input_nodes) if view.is_tensor(t)}
        same = not view.autocasts(n) or dtypes == {torch.float32}
        if not same or view.records(n) != view.records(before):
            return None
        made.append(n)
        queue += n.all_input_nodes
        if len(made) > _MADE_AGAIN:
            return None

    def make(e: Emitter) -> fx.Node:
        new: dict[fx.Node, fx.Node] = {}
        for n in view.in_order({*made}):
            new[n] = e.again(n, new)
        return new.get(node, node)

    return list(dict.fromkeys(leaves)), make


def same_made(
    view: GraphView, makes: Sequence[Any], at: Sequence[fx.Node], anchor: fx.Node
) -> bool:
    """Whether two functions of an emitter insert equal nodes, reading values as the two nodes in `at` see them."""
    with Emitter(anchor) as e:
        x, y = (make(e) for make in makes)
        return _same(view, x, y, {*e.inserted}, at)


def _same(view: GraphView, x: Any, y: Any, new: set[fx.Node], at: Sequence[fx.Node]) -> bool:
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(_same(view, s, t, new, at) for s, t in zip(x, y))
    if isinstance(x, slice) and isinstance(y, slice):
        x, y = (x.start, x.stop, x.step), (y.start, y.stop, y.step)
        return _same(view, x, y, new, at)
    made = [isinstance(t, fx.Node) and t in new for t in (x, y)]
    if any(made):
        if not all(made) or (x.op, x.target, x.kwargs) != (y.op, y.target, y.kwargs):
            return False
        return _same(view, x.args, y.args, new, at)
    if isinstance(x, fx.Node) and isinstance(y, fx.Node):
        return view.same_read(x, at[0], y, at[1])
    return type(x) is type(y) and x == y
