"""A graph's results keep their strides: whoever called the compiled function can see them.

Operators return contiguous tensors. Where a replaced operation's result was laid out otherwise (documents first, say,
and then transposed) and is returned as it is, it is copied into that order of dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .graph.fakes import fake, same_size

__all__ = ["keep_layouts", "layouts"]


def layouts(graph: fx.Graph) -> list[list[int] | None]:
    """For each result of the graph the order of its dimensions in memory, outermost first; None where that is not
    known."""
    return [_order(fake(n)) if isinstance(n, fx.Node) else None for n in _results(graph)]


def keep_layouts(graph: fx.Graph, before: list[list[int] | None]) -> None:
    """Give the results of the graph the orders that they had."""
    output = _output(graph)
    done: dict[fx.Node, fx.Node] = {}
    for node, order in zip(_results(graph), before, strict=True):
        if not isinstance(node, fx.Node) or order is None or node in done:
            continue
        now = _order(_actual(node))
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


_MOVES = frozenset(("t", "transpose", "permute", "swapaxes", "movedim", "T", "mT"))


def _actual(node: fx.Node) -> Any:
    """The fake value of a node as it is now: transposed by the program, it still has the strides that it had."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "getattr" and node.args[1] in _MOVES:
        return getattr(_actual(node.args[0]), node.args[1])
    moves = name in _MOVES and node.op in ("call_method", "call_function")
    if not moves or not node.args or node.all_input_nodes != [node.args[0]] or node.kwargs:
        return fake(node)
    moved = getattr(_actual(node.args[0]), name)
    return moved if isinstance(moved, torch.Tensor) else moved(*node.args[1:])


def _order(value: Any) -> list[int] | None:
    """The order of dimensions of a tensor that is a permuted contiguous one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    expected: Any = 1
    order: list[int] = []
    left = [d for d in range(value.dim()) if not same_size(value.shape[d], 1)]
    single = [d for d in range(value.dim()) if d not in left]
    while left:
        # The last that fits, so that a contiguous tensor has its own order.
        fits = [d for d in left if same_size(value.stride(d), expected)]
        if not fits:
            return None
        order.insert(0, fits[-1])
        left.remove(fits[-1])
        expected = expected * value.shape[fits[-1]]
    return single + order


def _output(graph: fx.Graph) -> fx.Node:
    return next(n for n in reversed(graph.nodes) if n.op == "output")


def _results(graph: fx.Graph) -> list[Any]:
    found = _output(graph).args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]
