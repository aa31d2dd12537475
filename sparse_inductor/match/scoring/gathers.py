"""Every spelling of "look entries up along one axis of a table": indexing, take, index_select, gather, embedding.

A gather of query weights is `query[b, ids[i]]`, with `ids` of any shape.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed
from ...graph.emit import Emitter
from ...graph.fakes import fake, same_size
from ...graph.indices import expanded_index, is_full
from ...graph.names import Call
from ...graph.values import counting, is_parameter, uniform
from ...graph.view import GraphView
from ...graph.vocabulary import REORDERS, SAME_VALUES

LOOKUPS = frozenset("index index_select gather take_along_dim take embedding".split())
VOCABULARY = Atom(0)  # the axis of the table that is looked up


@dataclasses.dataclass(frozen=True)
class Gather:
    """node[...] = source[..., index[...], ...], looked up along the axis `dim`.

    table_axes: for each axis of the table, the axis of `node` that it becomes; None for the one that is looked up. The
    table is the `part` of the source that is selected first, at position 0 of the axes `repeated`, along which it is
    constant. ids_axes: for each axis of the index, the axis of `node` that it becomes. queries: the axes of `node` that
    the table has, and that the index does not have or along which it is constant. features: the axis of the queries
    comes after the ids, like the features of looked-up rows, and the table is not known to be a transposed batch of
    queries. gradient: why the table's gradient differs from that of indexing, if it does. wraps: ids are taken modulo
    the size of the axis.
    """

    node: fx.Node
    source: fx.Node
    index: fx.Node
    dim: int
    table_axes: tuple[int | None, ...]
    ids_axes: tuple[int, ...]
    queries: tuple[int, ...]
    features: bool = False
    gradient: str | None = None
    part: tuple[Any, ...] = ()
    repeated: tuple[int, ...] = ()
    wraps: bool = False

    def ids(self, axes: tuple[Axis, ...]) -> Placed:
        """The index, given the axes of `node`."""
        sizes = fake(self.index).shape
        own = (() if same_size(s, 1) else axes[o] for s, o in zip(sizes, self.ids_axes))
        return Placed(self.index, self.node, tuple(own))

    def table(self, e: Emitter, axes: tuple[Axis, ...]) -> Placed:
        """The table, given the axes of `node`."""
        t = e.call(operator.getitem, self.source, self.part) if self.part else self.source
        for axis in reversed(self.repeated):
            t = e.method("select", t, axis, 0)
        return dataclasses.replace(self.whole_table(axes), node=t)

    def whole_table(self, axes: tuple[Axis, ...]) -> Placed:
        """The source, if it is the table itself."""
        own = tuple((VOCABULARY,) if o is None else axes[o] for o in self.table_axes)
        return Placed(self.source, self.node, own)


def gather_of(view: GraphView, node: Any) -> Gather | None:
    """The node as a gather of query weights, or None. Queries on several axes come before the ids."""
    found = _lookup(view, node)
    if found is None:
        return None
    if len(found.queries) > 1:
        return None if found.part or found.table_axes[-1] is not None else found
    if not found.queries:
        return found
    places = found.table_axes
    behind = places.index(found.queries[0]) > places.index(None)
    single = same_size(view.shape(node)[found.queries[0]], 1)
    features = behind and not single and not is_transposed(view, found.source)
    if features and is_parameter(view, found.source):
        return None  # rows of an embedding, which is common
    return dataclasses.replace(found, features=features)


def rows_of(view: GraphView, node: Any, columns: bool = False) -> Gather | None:
    """The node as whole rows of a table: node[*ids.shape, ...] = table[ids]. It has no axis of queries.

    columns: also as whole columns of a matrix: node[:, *ids.shape] = table[:, ids].
    """
    found = _lookup(view, node)
    if found is None or found.part:
        return None
    if found.dim != 0 and not (columns and found.table_axes == (0, None)):
        return None
    whole = len(found.ids_axes) + len(found.table_axes) - 1 == len(view.shape(node))
    return dataclasses.replace(found, queries=()) if whole and not found.repeated else None


def _lookup(view: GraphView, node: Any) -> Gather | None:
    call = view.call(node)
    if call.inplace or not view.is_tensor(node):
        return None
    table, items = _items(view, call)
    ids = [i for i in items if isinstance(i, fx.Node)]
    if not ids or not view.is_tensor(table):
        return None
    several = len(ids) > 1 or call.name in _ALONG_ALL_AXES
    return (_along_all if several else _along_one)(view, node, call, table, items)


_ALONG_ALL_AXES = frozenset(("gather", "take_along_dim"))


def _items(view: GraphView, call: Call) -> tuple[Any, list[Any]]:
    """A table and its index: one item per axis, and None for new axes. For gather and take_along_dim, the items of the
    other axes are None."""
    table, axis = call.get("input"), 0
    other: slice | None = slice(None)
    match call.name:
        case "getitem" | "index" if view.is_tensor(table):
            index = call["index" if call.name == "getitem" else "indices"]
            if call.name == "index":
                index = tuple(slice(None) if i is None else i for i in index)
            elif isinstance(index, list):
                index = tuple(index)
            return table, expanded_index(index, len(view.shape(table))) or []
        case "index_select" if view.shape(call["index"]):
            axis, ids = call["dim"], call["index"]
        case "gather" | "take_along_dim" if call.get("dim") is not None:
            axis, ids, other = call["dim"], call["index"], None
        case "take" if view.is_tensor(table) and len(view.shape(table)) == 1:
            ids = call["index"]
        case "embedding" if call.get("max_norm") is None:
            table, ids = call["weight"], call["input"]
        case _:
            return table, []
    if not view.is_tensor(table):
        return table, []
    n = len(view.shape(table))
    return table, [ids if a == axis % n else other for a in range(n)]


def _along_one(
    view: GraphView, node: fx.Node, call: Call, table: fx.Node, items: list[Any]
) -> Gather | None:
    """A look-up with a tensor along one axis, and slices or single positions along the others."""
    ids = next(i for i in items if isinstance(i, fx.Node))
    if not _are_ids(view, ids) or not all(
        i is ids or i is None or type(i) in (int, slice) for i in items
    ):
        return None
    part = tuple(slice(None) if i is ids else i for i in items if i is not None)
    part = () if all(map(is_full, part)) else part
    table_axes: list[int | None] = []
    ids_axes: tuple[int, ...] = ()
    at = 0
    for item in items:
        if item is ids:
            table_axes.append(None)
            ids_axes = tuple(range(at, at + len(view.shape(ids))))
            at += len(ids_axes)
        elif not isinstance(item, int):
            table_axes += [] if item is None else [at]
            at += 1
    dim = [i for i in items if i is not None].index(ids)
    queries = tuple(o for o in table_axes if o is not None)
    return Gather(
        node, table, ids, dim, tuple(table_axes), ids_axes, queries,
        gradient=table_gradient(call), part=part,
    )  # fmt: skip


def _along_all(
    view: GraphView, node: fx.Node, call: Call, table: fx.Node, items: list[Any]
) -> Gather | None:
    """table[0, 1, ..., ids, ...]: the index of every other axis of the table counts 0, 1, ... along some axis of the
    node. Along that axis the table is constant, or the ids are; in the latter case it is an axis of queries."""
    n, shape, sizes = len(items), view.shape(node), view.shape(table)
    if call.name in _ALONG_ALL_AXES:
        counts = [n - axis if item is None else None for axis, item in enumerate(items)]
    elif all(isinstance(item, fx.Node) for item in items):
        counts = [counting(view, item, node) for item in items]
    else:
        return None
    dim = next((d for d in reversed(range(n)) if None not in counts[:d] + counts[d + 1 :]), None)
    if dim is None or not _are_ids(view, ids := items[dim]) or view.value(ids, node) is None:
        return None
    table_axes: list[int | None] = []
    repeated = []
    for axis, count in enumerate(counts):
        if axis == dim or count is None:
            table_axes.append(None)
        elif uniform(view, table, n - axis, node):
            repeated.append(axis)
        elif same_size(shape[-count], sizes[axis]) and uniform(view, ids, count, node):
            table_axes.append(len(shape) - count)
        else:
            return None
    queries = tuple(o for o in table_axes if o is not None)
    if len(queries) > 1:
        return None
    ids_axes = tuple(range(len(shape) - len(view.shape(ids)), len(shape)))
    return Gather(
        node, table, ids, dim, tuple(table_axes), ids_axes, queries,
        gradient=table_gradient(call), repeated=tuple(repeated),
        wraps=call.name == "take_along_dim",
    )  # fmt: skip


def _are_ids(view: GraphView, ids: Any) -> bool:
    return view.is_tensor(ids) and view.dtype(ids) in (torch.int64, torch.int32)


def is_transposed(view: GraphView, node: fx.Node) -> bool:
    """Whether a matrix is the transpose of another one in the program."""
    original, _ = view.behind(node, SAME_VALUES)
    return view.name_of(original) in REORDERS


def table_gradient(call: Call) -> str | None:
    """Why the gradient of the table is not that of indexing, as is possible for an embedding; None if it is."""
    if call.get("padding_idx") is not None:
        return "padding_idx keeps the gradient of one entry out"
    if call.get("scale_grad_by_freq"):
        return "scale_grad_by_freq divides the gradient by how often an entry is read"
    sparse = call.get("sparse") or call.get("sparse_grad")
    return "the gradient is asked for as a sparse tensor" if sparse else None
