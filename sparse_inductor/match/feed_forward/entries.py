"""Activations of an autoencoder: the entries of a top-k and zeros elsewhere, and other activations.

The former are written as `zeros_like(x).scatter_(-1, indices, values)`, `scatter`, `scatter_add`, or
`f[rows, indices] = values`, perhaps followed by an operation that keeps zeros, such as a rectifier. The top-k is of
each row, or of the flattened batch; then the zeros are flat, and a view has the rows again. Nothing about the values of
other activations is proved, because the products for mostly zero tensors are exact for any tensor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import fx

from ...graph.emit import Emitter
from ...graph.fakes import expected, expected_elements, fake, never_larger, same_sizes
from ...graph.gemm import Linear, linears
from ...graph.indices import sole
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.scalars import constant_factor
from ...graph.search import reached
from ...graph.values import counting, only_along
from ...graph.view import GraphView, label
from ...graph.vocabulary import COPIES, REGROUPS, SAME_VALUES
from .block import RECTIFIER_CALLS

# Elementwise operations of one argument that map 0 to 0.
KEEPS_ZEROS = COPIES | frozenset("relu abs square tanh".split())
SCATTERS = frozenset("scatter scatter_add setitem index_put".split())
_LONGEST = 8


@dataclasses.dataclass(frozen=True)
class Entries:
    """values, indices [..., k] of each row of a tensor, as `scatter` reads them. base: the zeros.

    after: the operations that are then applied to the tensor, in order. They are followed by `scaled`: products and
    quotients with one number per column. views: those of `after` that bring a flat tensor into its shape; if there are
    any, values and indices are [k] and of the flat tensor.
    """

    values: fx.Node
    indices: fx.Node
    scatter: fx.Node
    base: fx.Node
    after: tuple[fx.Node, ...]
    scaled: tuple[tuple[fx.Node, fx.Node], ...] = ()
    """Each product with its factor, the last one first."""
    views: frozenset[fx.Node] = frozenset()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that build the tensor from its entries, last one first."""
        return (*(n for n, _ in self.scaled), *reversed(self.after), self.scatter, self.base)


def is_last(view: GraphView, node: fx.Node, dim: object) -> bool:
    """Whether a dimension of a tensor is its last one."""
    n = len(view.shape(node))
    return isinstance(dim, int) and n > 0 and dim % n == n - 1


def entries(view: GraphView, source: fx.Node, reader: fx.Node) -> Entries | None:
    """The entries of the value that `reader` sees of a tensor; None if nothing is scattered. Raises NoMatch if the rest
    may be non-zero, or if a row may have two entries in one column."""
    after: list[fx.Node] = []
    views: set[fx.Node] = set()
    scaled: list[tuple[fx.Node, fx.Node]] = []
    node: fx.Node | None = view.value(source, reader)
    while node is not None and len(after) < _LONGEST:
        call = view.call(node)
        if call.name in SCATTERS:
            if views and len(view.shape(node)) != 1:
                return None
            found = _scattered(view, node, call, tuple(reversed(after)))
            if found is None:
                return None
            return dataclasses.replace(found, scaled=tuple(scaled), views=frozenset(views))
        if call.name in REGROUPS and not call.inplace:
            views.add(node)
            after.append(node)
            node = view.value(call["input"], node)
            continue
        alone = len(node.all_input_nodes) == 1  # any other operand is a literal number
        by = constant_factor(view, node) if alone else None
        if by is None and call.name in ("mul", "div") and not after and not call.inplace:
            product = by_column(view, node)
            if product is None:
                return None
            scaled.append((node, product[1]))
            node = view.value(product[0], node)
            continue
        keeps = call.name in KEEPS_ZEROS and view.is_tensor(call["input"])
        if by is not None:
            keeps = math.isfinite(by[1])
        if not keeps or call.inplace:
            return None
        after.append(node)
        node = view.value(node.all_input_nodes[0], node)
    return None


def by_column(view: GraphView, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(tensor, vector) of a sum, product or quotient of a tensor with a vector along its last dimension."""
    call = view.call(node)
    if view.const(call.get("alpha", 1)) != 1:
        return None
    shape = view.shape(node)
    for tensor, vector in call.both_ways[: 1 if call.name == "div" else 2]:
        if not (view.is_tensor(tensor) and view.is_tensor(vector)):
            return None
        if view.same_shape(tensor, node) and only_along(view, vector, shape, len(shape) - 1):
            return tensor, vector
    return None


class Shift(NamedTuple):
    """The input of a linear as a tensor minus a vector, where only the vector needs a gradient. That gradient is a sum
    over the rows, so the gradients of the individual rows need not be computed."""

    difference: fx.Node
    tensor: fx.Node
    vector: fx.Node

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        return (self.tensor, self.difference), (self.vector, self.difference)


def shifted(e: Emitter, x: fx.Node, shift: Shift | None) -> tuple[fx.Node, fx.Node | None]:
    """The tensor that an operator takes for the input x of a linear, and the vector [D] that it subtracts, or None."""
    if shift is None or x is not shift.difference:
        return x, None
    vector = shift.vector
    return shift.tensor, e.method("flatten", vector) if fake(vector).dim() != 1 else vector


def shift_of(view: GraphView, node: fx.Node, scores: fx.Node, anchor: fx.Node) -> Shift | None:
    """The input of a linear as a shift; None if it is none."""
    call = view.call(node)
    if call.name != "sub" or call.inplace:
        return None
    found = by_column(view, node)
    if found is None or found[0] is not call["input"]:
        return None
    x, vector = found
    dtypes = {fake(t).dtype for t in (node, x, vector, scores)}
    wanted = all(map(view.needs_grad, (node, vector))) and not view.needs_grad(x)
    there = not any(view.effects.changes(t, node, anchor) for t in (x, vector))
    return Shift(node, x, vector) if wanted and there and len(dtypes) == 1 else None


def _scattered(
    view: GraphView, node: fx.Node, call: Call, after: tuple[fx.Node, ...]
) -> Entries | None:
    base = call["input"]
    if call.name in ("scatter", "scatter_add"):
        values, indices = call["src"], call["index"]
        along = is_last(view, base, call["dim"])
    else:
        found = _assigned(view, node, call)
        if found is None:
            return None
        values, indices = found
        along = True
    zero = view.const(base, node) == 0
    top = topk_of(view, indices, node) if isinstance(indices, fx.Node) else None
    if top is None:
        if not (zero and along):
            return None
        if isinstance(indices, fx.Node) and indices.op == "placeholder":
            raise NoMatch(
                "the indices come from outside this graph, so they may repeat: a topk in front of a graph break, say, "
                "as one whose k is a tensor causes",
                node,
            )
        raise NoMatch(
            "the indices are not those of a topk along the last axis: they may repeat", node
        )
    if not along:
        raise NoMatch("is scattered along another axis than the decoder sums over", node)
    if call.get("reduce") is not None or call.get("accumulate"):
        raise NoMatch(f"{label(node)} combines what it scatters with what is there", node)
    if not view.is_tensor(values):
        raise NoMatch("a number is scattered, no values", node)
    if not view.same_shape(values, indices):
        raise NoMatch("the values that are scattered are not one for each index", node)
    if not zero:
        raise NoMatch("what the entries are scattered into is not zero", node)
    rows, given = view.shape(base)[:-1], view.shape(indices)[:-1]
    if not same_sizes(rows, given):
        raise NoMatch("only some rows have entries", node)
    ranked, size = (view.shape(t)[-1] for t in (view.call(top)["input"], base))
    if not never_larger(ranked, size):
        raise NoMatch("the topk may return indices that are out of range here", node)
    return Entries(values, indices, node, base, after)


def _assigned(view: GraphView, node: fx.Node, call: Call) -> tuple[fx.Node, fx.Node] | None:
    """(values, indices) of `f[rows, indices] = values` where rows are 0, 1, 2, ..., of two dimensions, or of
    `f[indices] = values` for a vector f."""
    index = call["index"] if call.name == "setitem" else call["indices"]
    values = call["value"] if call.name == "setitem" else call["values"]
    if len(view.shape(call["input"])) == 1:
        only = sole(index)
        return (values, only) if view.is_tensor(only) else None
    if not isinstance(index, (tuple, list)) or len(index) != 2:
        return None
    rows, indices = index
    if not (
        view.is_tensor(rows) and view.is_tensor(indices) and len(view.shape(call["input"])) == 2
    ):
        return None
    if counting(view, rows, node) != 2 or len(view.shape(rows)) != 2:
        return None
    return values, indices


def topk_of(view: GraphView, indices: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The topk along its last dimension that returns the indices that `reader` sees in a tensor; else None."""
    node, passed = view.behind(view.value(indices, reader), SAME_VALUES)
    call = view.call(node)
    if call.name != "getitem" or call["index"] != 1:
        return None
    top = view.call(call["input"])
    if top.name != "topk" or not is_last(view, top["input"], top.get("dim", -1)):
        return None
    if any(fake(n).dtype not in (torch.int64, torch.int32) for n in passed):
        return None  # indices may repeat after a cast to fewer bits
    return call["input"]


_KEEPING = frozenset(
    "scatter scatter_add setitem index_put autograd_function_apply topk kthvalue sort".split()
)
ACTIVATES = RECTIFIER_CALLS | _KEEPING
_FURTHEST = 48
# From this number of neurons per decoder output on, they are taken for a dictionary with few active entries. A
# feed-forward block has four per output; if its activations have other readers, that is reported as a reason.
_WIDE = 7


class Activated(NamedTuple):
    """Activations and the operations that compute them. encoders: the linears that these start from. nodes: all nodes
    from there to the decoder, which is not included."""

    encoders: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]


def activated(view: GraphView, down: Linear) -> Activated | None:
    """The input of `down`, if it is selected from many neurons, or rectifies many neurons and is also read elsewhere,
    by a loss or by the caller. Rectified activations without another reader are those of a feed-forward block, where
    they need not exist in memory."""
    *sizes, neurons = view.shape(down.source)
    rows = expected_elements(sizes)
    if expected(neurons) < _WIDE * expected(down.outputs):
        return None
    encoders: list[fx.Node] = []
    nodes: set[fx.Node] = set()
    names: set[str | None] = set()
    stack = [view.value(down.source, down.node)]
    while stack:
        node = stack.pop()
        if node is None or node in nodes or node.op in ("placeholder", "get_attr"):
            continue
        if len(nodes) == _FURTHEST:
            return None
        readings = linears(view, node)
        if readings is None:
            nodes.add(node)
            names.add(view.name_of(node))
            stack += [view.value(n, node) for n in node.all_input_nodes]
        elif readings and expected_elements(view.shape(node)[:-1]) == rows:
            nodes.add(node)
            encoders.append(node)
    if not encoders or not names & ACTIVATES:
        return None
    inside = {*nodes, down.node}
    read = any(reader not in inside for n in nodes for reader in view.readers(n))
    return Activated(tuple(encoders), frozenset(nodes)) if read or names & _KEEPING else None


def decoders_below(view: GraphView, node: fx.Node) -> list[fx.Node]:
    """The products that are reached from a linear without crossing another product."""
    down = lambda n: n.users if n is node or linears(view, n) is None else ()
    below = reached([node], down, _FURTHEST)
    return [n for n in below if n is not node and linears(view, n) is not None]


def sizes_of(
    activations: fx.Node, other: fx.Node, computed: fx.Node, learnt: bool
) -> dict[str, int]:
    """The quantities that determine the break-even points of a product of activations [..., N] and `other` [..., D]."""
    neurons = expected(fake(activations).shape[-1])
    return {
        "tokens": expected_elements(fake(activations).shape) // max(1, neurons),
        "neurons": neurons,
        "width": expected(fake(other).shape[-1]),
        "bits": 8 * fake(computed).dtype.itemsize,
        "training": learnt,
    }


def ratio_of(activations: fx.Node, k: int | torch.SymInt, whole: bool) -> dict[str, int]:
    """The further quantities for break-even points if k activations of each row, or of the whole tensor, are entries:
    activations / k, whether k is symbolic, and whether they are those of the whole tensor."""
    among = expected_elements(fake(activations).shape[0 if whole else -1 :])
    changing = not isinstance(k, int)
    return {"ratio": among // max(1, expected(k)), "changing": changing, "batch": whole}
