"""Tensors that an operator saves for its backward and that the program writes to afterwards.

Autograd refuses a backward whose saved tensors were written to. The operations of a program save less than an operator
in their place, or something else: what is written to is copied. AOTAutograd has made the write functional by the time
that Inductor drops the copy. What the graph returns, its caller may write to: that takes an operation that is left in.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from .. import compat
from .contraction import contraction
from .emit import Emitter
from .fakes import fake, memory_order, require_grad, tensors_in
from .memory import storages
from .names import is_operator
from .view import GraphView

SAVE_THEIR_RESULT = ("sparse_inductor::entmax", "sparse_inductor::entmax_attention")


@contextlib.contextmanager
def copying_what_is_written(view: GraphView, nodes: Sequence[fx.Node]) -> Iterator[None]:
    """In the block, `nodes` of the graph are replaced by an operator. What it saves, or a product that makes its
    operands, and somebody writes to after them, is copied: inputs in front of the operator, its result behind it."""
    present = set(view.graph.nodes)
    written = _Written(view, nodes)
    yield
    new = [n for n in view.graph.nodes if n not in present]
    recorded = [n for n in new if any(t.requires_grad for t in tensors_in(fake(n)))]
    ops = [n for n in recorded if is_operator(n)]
    for op in (n for n in recorded if is_operator(n) or view.name_of(n) in ("mul", "div")):
        for node in op.all_input_nodes:
            if written.later(node):
                with view.graph.inserting_before(op):
                    copy = _copy(node)
            elif written.by_the_caller(node):
                copy = _apart(Emitter(op), node)
            else:
                continue
            op.replace_input_with(node, copy)
    if any(compat.schema(op.target).name in SAVE_THEIR_RESULT for op in ops) and written.result:
        for node in new:
            readers = [u for u in node.users if u not in new]
            if readers and isinstance(fake(node), torch.Tensor):
                with view.graph.inserting_after(node):
                    copy = _copy(node)
                for reader in readers:
                    reader.replace_input_with(node, copy)


def for_the_caller(view: GraphView, e: Emitter, node: fx.Node, result: fx.Node) -> fx.Node:
    """`result`, which an operator saves and which replaces `node`, apart from what it saves if the graph returns it."""
    wanted = fake(node).requires_grad and view.effects.returned(node)
    return _apart(e, result) if wanted else result


def _apart(e: Emitter, t: fx.Node) -> fx.Node:
    """t in memory of its own: no pass takes two changes of sign for a copy, as some do for `- 0.0` and `* 1.0`."""
    return e.call(operator.neg, e.call(operator.neg, t))


class _Written:
    """What is written to after some nodes of a graph."""

    def __init__(self, view: GraphView, nodes: Sequence[fx.Node]) -> None:
        self._view, self._nodes = view, set(nodes)
        self._first = min(view.order[n] for n in nodes)

    @functools.cached_property
    def _saved(self) -> frozenset[int]:
        return storages([fake(t) for t in _saved_by(self._view, self._nodes)])

    def later(self, node: fx.Node) -> bool:
        """Whether somebody else writes to its memory."""
        return any(
            w not in self._nodes and self._view.order[w] > self._first
            for w in self._view.effects.writers_to(node)
        )

    def by_the_caller(self, node: fx.Node) -> bool:
        """Whether the caller may write to it: the graph made and returns its memory, which the nodes do not save. What
        is without a gradient is little but masks."""
        value, effects = fake(node), self._view.effects
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return False
        if node.op in ("placeholder", "get_attr") or storages(value) & self._saved:
            return False
        return effects.returned(node) and effects.sharing(node) is not None

    @property
    def result(self) -> bool:
        """Whether somebody else writes to what the nodes make."""
        return any(map(self.later, self._nodes))


def _saved_by(view: GraphView, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """What products among the nodes save: a factor, for the gradient of the other. Of one in gaps they save a copy."""
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


def _copy(node: fx.Node) -> fx.Node:
    copy = node.graph.call_method("clone", (node,))
    value = fake(node)
    with getattr(value, "fake_mode", contextlib.nullcontext()), torch.no_grad():
        cloned = value.clone()
    if value.requires_grad:
        require_grad(cloned)
    copy.meta = {**node.meta, "example_value": cloned}
    return copy
