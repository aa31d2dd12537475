"""Keeps the strides of a graph's results, and keeps the results separate tensors: callers can observe both.

Operators return contiguous tensors. If the graph returns the result of a replaced operation that had another order of
dimensions in memory (for example documents first, then transposed), the result is copied into that order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from . import compat
from .graph.fakes import fake, memory_order
from .graph.indices import listed
from .graph.names import target_name
from .graph.vocabulary import COPIES, VIEWS


def layouts(graph: fx.Graph) -> list[list[int] | None]:
    """Return, for each result of the graph, the order of its dimensions in memory, outermost first; None if unknown."""
    return [
        memory_order(fake(n)) if isinstance(n, fx.Node) else None
        for n in listed(graph.output_node().args[0])
    ]


def keep_layouts(graph: fx.Graph, before: list[list[int] | None]) -> None:
    """Restore the orders of dimensions (`layouts`) that the results of the graph had before the rewriting."""
    output = graph.output_node()
    done: dict[fx.Node, fx.Node] = {}
    for node, order in zip(listed(graph.output_node().args[0]), before, strict=True):
        if not isinstance(node, fx.Node) or order is None or node in done:
            continue
        now = memory_order(_actual(node))
        if now is not None and now != order:
            done[node] = _laid_out(graph, output, node, order)
    if done:
        output.args = fx.map_arg(output.args, lambda n: done.get(n, n))


def _laid_out(graph: fx.Graph, output: fx.Node, node: fx.Node, order: list[int]) -> fx.Node:
    back = [order.index(d) for d in range(len(order))]
    value = _actual(node)
    for method, *arguments in (("permute", order), ("contiguous",), ("permute", back)):
        with graph.inserting_before(output):
            new = graph.call_method(method, (node, *arguments))
        value = getattr(value, method)(*arguments)
        new.meta = {**node.meta, "example_value": value}
        node = new
    return node


# For each compile, the returned calls of each operator in all its graphs: AOTAutograd inlines a checkpointed body.
_returned: WeakKeyDictionary[object, Counter[Any]] = WeakKeyDictionary()


def keep_apart(graph: fx.Graph) -> None:
    """Make calls of an operator with returned results distinct, by inserting pairs of views that cancel.

    AOTAutograd merges calls that are equal up to `detach()`, `view(-1).view(shape)`, `* 1` and the like, except for
    functions with a single tensor result that is returned. In training the operators here have several results, and one
    tensor in place of two returned results would receive the gradients of both.
    """
    made = {_made_by(n) for n in listed(graph.output_node().args[0]) if isinstance(n, fx.Node)}
    compile = compat.current_compile()
    number = Counter[Any]() if compile is None else _returned.setdefault(compile, Counter())
    for node in list(graph.nodes):
        if node not in made or getattr(node.target, "namespace", "") != "sparse_inductor":
            continue
        first = fake(node.args[0])
        if isinstance(first, torch.Tensor):  # verify's operator takes a list and a number
            left = number[node.target]
            number[node.target] += 1
            while left:
                left, axis = divmod(left - 1, first.dim() + 1)
                node.args = (_seen_anew(graph, node, axis), *node.args[1:])


def _seen_anew(graph: fx.Graph, node: fx.Node, axis: int) -> fx.Node:
    """Return the first argument of a call, passed through two views that cancel."""
    given: Any = node.args[0]
    for method in ("unsqueeze", "squeeze"):
        value = getattr(fake(given), method)(axis)
        with graph.inserting_before(node):
            new = graph.call_method(method, (given, axis))
        new.meta = {**given.meta, "example_value": value}
        given = new
    return given


def _made_by(node: fx.Node) -> fx.Node:
    """Return the node whose result a node views or copies."""
    while target_name(node.target) in _SHOWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


_SHOWS = VIEWS | COPIES | frozenset("getattr reshape detach _get_data_attr to float".split())
_MOVES = frozenset(("t", "transpose", "permute", "swapaxes", "movedim", "T", "mT"))


def _actual(node: fx.Node) -> Any:
    """Return the fake value of a node with its current strides; those recorded for a transposed result are outdated."""
    name = target_name(node.target)
    if name == "getattr" and node.args[1] in _MOVES:
        return getattr(_actual(node.args[0]), node.args[1])
    moves = name in _MOVES and node.op in ("call_method", "call_function")
    if not moves or not node.args or node.all_input_nodes != [node.args[0]] or node.kwargs:
        return fake(node)
    moved = getattr(_actual(node.args[0]), name)
    return moved if isinstance(moved, torch.Tensor) else moved(*node.args[1:])
