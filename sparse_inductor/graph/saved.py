"""Tensors that an operator saves for its backward and that the program writes to afterwards.

Autograd raises in a backward if a saved tensor was written to. An operator may save more tensors than the operations
that it replaces, or others, so those that are written to afterwards are copied for it. Inductor drops such a copy, but
only after AOTAutograd has made the write functional. The caller may also write to a tensor that the graph returns. That
one needs a copy that no pass removes.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from .. import compat
from ..facts import facts_of
from .contraction import contraction
from .emit import Emitter
from .fakes import fake, has_gradient, memory_order
from .memory import storages
from .names import is_operator
from .view import GraphView


@contextlib.contextmanager
def copying_what_is_written(view: GraphView, nodes: Sequence[fx.Node]) -> Iterator[None]:
    """Copy the tensors that are written to after an operator has saved them. The block replaces `nodes` of the graph by
    the operator and products that compute its operands, which save tensors as well. Inputs are copied before the
    operator or product, the operator's result after it."""
    present = set(view.graph.nodes)
    written = _Written(view, nodes)
    yield
    new = [n for n in view.graph.nodes if n not in present]
    recorded = [n for n in new if has_gradient(n)]
    ops = [n for n in recorded if is_operator(n)]
    for op in (n for n in recorded if is_operator(n) or view.name_of(n) in ("mul", "div")):
        for node in op.all_input_nodes:
            if written.later(node):
                copy = Emitter(op).method("clone", node)
            elif written.by_the_caller(node):
                copy = _apart(Emitter(op), node)
            else:
                continue
            op.replace_input_with(node, copy)
    if written.result and any(facts_of(compat.schema(op.target).name).saves_result for op in ops):
        for node in new:
            readers = [u for u in node.users if u not in new]
            if readers and isinstance(fake(node), torch.Tensor):
                copy = Emitter(node.next).method("clone", node)
                for reader in readers:
                    reader.replace_input_with(node, copy)


def for_the_caller(view: GraphView, e: Emitter, node: fx.Node, result: fx.Node) -> fx.Node:
    """Return `result`, which an operator saves and which replaces `node`, or a copy of it if the graph returns it."""
    wanted = fake(node).requires_grad and view.effects.returned(node)
    return _apart(e, result) if wanted else result


def _apart(e: Emitter, t: fx.Node) -> fx.Node:
    """Copy t by negating it twice, which no pass removes. Some passes remove `- 0.0` and `* 1.0`."""
    return e.call(operator.neg, e.call(operator.neg, t))


class _Written:
    """The writes after some nodes of a graph."""

    def __init__(self, view: GraphView, nodes: Sequence[fx.Node]) -> None:
        self._view, self._nodes = view, set(nodes)
        self._first = min(view.order[n] for n in nodes)

    @functools.cached_property
    def _saved(self) -> frozenset[int]:
        return storages([fake(t) for t in _saved_by(self._view, self._nodes)])

    def later(self, node: fx.Node) -> bool:
        """Whether another node of the program writes to the memory of `node` after the first of these nodes."""
        order = self._view.order  # without the nodes of the replacement, which may write as well
        return any(
            w not in self._nodes and order.get(w, self._first) > self._first
            for w in self._view.effects.writers_to(node)
        )

    def by_the_caller(self, node: fx.Node) -> bool:
        """Whether the caller may write to `node`: the graph creates and returns its memory, and the nodes do not save
        it. Tensors without a gradient are ignored, because they are mostly masks."""
        value, effects = fake(node), self._view.effects
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return False
        if node.op in ("placeholder", "get_attr") or storages(value) & self._saved:
            return False
        return effects.returned(node) and effects.sharing(node) is not None

    @property
    def result(self) -> bool:
        """Whether another node writes to a result of these nodes."""
        return any(map(self.later, self._nodes))


def _saved_by(view: GraphView, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the tensors that products among the nodes save: each contiguous factor whose other factor needs a gradient.
    Of a non-contiguous factor they save a copy, which is not yielded."""
    for node in nodes:
        product, call = contraction(view, node), view.call(node)
        if product is not None:
            pairs = [(product.a.node, product.b.node), (product.b.node, product.a.node)]
        elif call.name == "mul":
            pairs = [pair for pair in call.both_ways if all(map(view.is_tensor, pair))]
        else:
            continue
        for saved, other in pairs:
            order = memory_order(fake(saved))
            if view.needs_grad(other) and order == list(range(len(view.shape(saved)))):
                yield saved
