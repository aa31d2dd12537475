"""Every spelling of "look entries up along one axis of a table": indexing, take, index_select, gather, embedding.

A gather of query weights is `query[b, ids[i]]`, with `ids` of any shape and at most one batch axis.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from ...graph.emit import Emitter
from ...graph.indices import expanded_index
from ...graph.names import Call
from ...graph.values import counting, uniform
from ...graph.view import GraphView, same_size
from ...graph.vocabulary import COPIES, REORDERS

Make = Callable[[Emitter], fx.Node]


@dataclasses.dataclass(frozen=True)
class Gather:
    """node[*before, *ids.shape, *after] = table, looked up by `ids` along one axis.

    table: builds the table as [V] or [B, V]; ids: builds the ids. batch: the axis of `node` that is
    the table's batch axis, or None. features: the table was [V, B] as written and nothing says that
    it is a transposed batch of queries. source, index: the nodes that hold both, which must not
    change before they are read again. gradient: why the table's gradient is not what indexing gives it, if so. lead:
    how many axes of queries of `node` the table has merged into its batch axis, beside that one.
    """

    node: fx.Node
    source: fx.Node
    index: fx.Node
    table: Make
    ids: Make
    batch: int | None
    features: bool = False
    gradient: str | None = None
    lead: int = 0


def gather_of(view: GraphView, node: Any) -> Gather | None:
    """The node as a gather with at most one batch axis, or None."""
    call = view.call(node)
    if call is None or call.inplace or not view.is_tensor(node):
        return None
    if call.name in ("gather", "take_along_dim"):
        return _gather(view, node, call)
    if call.name in ("getitem", "index") and (rows := _row_by_row(view, node, call)) is not None:
        return rows
    found = _indexed(view, node)
    if found is None or len(found.others) > 1 or not all(map(_basic, found.others)):
        return None
    gather = _lookup(view, node, found.table, found.axis, found.ids, *found.others)
    return gather and dataclasses.replace(gather, gradient=found.gradient)


def queries_of(view: GraphView, node: Any) -> Gather | None:
    """The node as a gather; the queries may be on several axes, which are merged then."""
    found = _indexed(view, node)
    ndim = 0 if found is None else len(view.shape(found.table))
    whole = found is not None and all(i == slice(None) for i in found.others)
    if found is None or ndim < 3 or found.axis != ndim - 1 or not whole:
        return gather_of(view, node)
    table = lambda e: e.method("flatten", found.table, 0, ndim - 2)
    return Gather(node, found.table, found.ids, table, lambda e: found.ids, 0, lead=ndim - 2)


def rows_of(view: GraphView, node: Any) -> Gather | None:
    """The node as whole rows of a table: node[*ids.shape, ...] = table[ids]. Nothing in it is a batch axis."""
    found = _indexed(view, node)
    if found is None or found.axis != 0 or any(i != slice(None) for i in found.others):
        return None
    return Gather(
        node, found.table, found.ids, lambda e: found.table, lambda e: found.ids, None,
        gradient=found.gradient,
    )  # fmt: skip


class _Indexed(NamedTuple):
    """table[..., ids, ...], `ids` along one axis, and what is taken of the others in their order. gradient: see
    `Gather`."""

    table: fx.Node
    axis: int
    ids: fx.Node
    others: tuple[Any, ...]
    gradient: str | None


def _indexed(view: GraphView, node: Any) -> _Indexed | None:
    call = view.call(node)
    if call is None or call.inplace or not view.is_tensor(node):
        return None
    table, axis, others = call.get("input"), 0, ()
    match call.name:
        case "getitem" | "index" if view.is_tensor(table):
            items = _items(view, call, table)
            at = [a for a, i in enumerate(items) if isinstance(i, fx.Node)]
            if len(at) != 1:
                return None
            axis, ids = at[0], items[at[0]]
            others = tuple(i for i in items if i is not ids)
        case "index_select":
            axis, ids = call["dim"], call["index"]
        case "take" if view.is_tensor(table) and len(view.shape(table)) == 1:
            ids = call["index"]
        case "embedding" if call.get("max_norm") is None:
            table, ids = call["weight"], call["input"]
        case _:
            return None
    if not (view.is_tensor(table) and _are_ids(view, ids)):
        return None
    return _Indexed(table, axis % len(view.shape(table)), ids, others, table_gradient(call))


def _items(view: GraphView, call: Call, table: fx.Node) -> list[Any]:
    """The items of an index, one an axis of the table; none where it has too many."""
    index = call["index" if call.name == "getitem" else "indices"]
    if call.name == "index":
        index = tuple(slice(None) if i is None else i for i in index)
    elif isinstance(index, list):
        index = tuple(index)
    return expanded_index(index, len(view.shape(table))) or []


def _lookup(
    view: GraphView,
    node: fx.Node,
    table: fx.Node,
    axis: int,
    ids: fx.Node,
    other: Any = slice(None),
) -> Gather | None:
    """table[:, ids] for a table of one or two axes; `other` is taken of the other one."""
    ndim = len(view.shape(table))
    if ndim == 1:
        return Gather(node, table, ids, lambda e: table, lambda e: ids, None)
    if ndim != 2:
        return None
    if isinstance(other, int):
        one = lambda e: e.method("select", table, 1 - axis, other)
        return Gather(node, table, ids, one, lambda e: ids, None)

    def part(e: Emitter) -> fx.Node:
        items = (other, slice(None)) if axis == 1 else (slice(None), other)
        return table if other == slice(None) else e.call(operator.getitem, table, items)

    if axis == 1:
        return Gather(node, table, ids, part, lambda e: ids, 0)
    at = len(view.shape(ids))
    features = not (is_transposed(view, table) or same_size(view.shape(node)[at], 1))
    return Gather(
        node, table, ids, lambda e: e.method("t", part(e)), lambda e: ids, at, features
    )  # fmt: skip


def _are_ids(view: GraphView, ids: Any) -> bool:
    return view.is_tensor(ids) and view.dtype(ids) in (torch.int64, torch.int32)


def is_transposed(view: GraphView, node: fx.Node) -> bool:
    """Whether a matrix is written as the transpose of another one."""
    original, _ = view.behind(node, COPIES | {"cast", "detach"})
    return view.name_of(original) in REORDERS


def _basic(item: Any) -> bool:
    """Whether an item of an index is a number or a slice, of sizes that are known."""
    if isinstance(item, slice):
        return all(isinstance(i, (int, type(None))) for i in (item.start, item.stop, item.step))
    return isinstance(item, int) and not isinstance(item, bool)


def _row_by_row(view: GraphView, node: fx.Node, call: Call) -> Gather | None:
    """table[[[0]], [[1]], ...], ids]: the same ids in every row."""
    table = call["input"]
    items = _items(view, call, table) if view.is_tensor(table) else []
    if len(items) != 2 or not all(isinstance(i, fx.Node) for i in items):
        return None
    row, ids = items
    if not _are_ids(view, ids) or view.value(ids, node) is None:
        return None
    shape, from_end = view.shape(node), counting(view, row, node)
    if from_end is None or not uniform(view, ids, from_end, node):
        return None
    batch = len(shape) - from_end
    if not same_size(shape[batch], view.shape(table)[0]):
        return None
    own = len(view.shape(ids))
    if own < len(shape) - (batch == 0):
        return None  # the rows have axes that the ids lack

    def make_ids(e: Emitter) -> fx.Node:
        return e.method("select", ids, own - from_end, 0) if own >= from_end else ids

    left = [s for a, s in enumerate(view.shape(ids)) if a != own - from_end]
    if not all(map(same_size, left, (s for a, s in enumerate(shape) if a != batch))):
        return None
    return Gather(node, table, ids, lambda e: table, make_ids, batch)


def table_gradient(call: Call) -> str | None:
    """Why the gradient of the table is not that of indexing it, as an embedding's may be; None where it is."""
    if call.get("padding_idx") is not None:
        return "padding_idx keeps the gradient of one entry out"
    if call.get("scale_grad_by_freq"):
        return "scale_grad_by_freq divides the gradient by how often an entry is read"
    sparse = call.get("sparse") or call.get("sparse_grad")
    return "the gradient is asked for as a sparse tensor" if sparse else None


def _gather(view: GraphView, node: fx.Node, call: Call) -> Gather | None:
    """torch.gather, and take_along_dim, which takes the remainder of any number: along every other axis either the
    table or the index repeats itself."""
    table, index = call["input"], call["index"]
    if not (view.is_tensor(table) and _are_ids(view, index)) or call.get("dim") is None:
        return None
    n = len(view.shape(table))
    if len(view.shape(index)) != n:
        return None
    dim = call["dim"] % n
    batch: int | None = None
    repeated = []  # axes along which the table is the same
    for axis in range(n):
        if axis == dim:
            continue
        if n > 1 and uniform(view, table, n - axis, node):
            repeated.append(axis)
        elif batch is None and uniform(view, index, n - axis, node):
            if not same_size(view.shape(node)[axis], view.shape(table)[axis]):
                return None  # rows of the table beyond the index's are dropped
            batch = axis
        else:
            return None

    def make_table(e: Emitter) -> fx.Node:
        t = table
        for axis in reversed(repeated):
            t = e.method("select", t, axis, 0)
        return e.method("t", t) if batch is not None and batch > dim else t

    def make_ids(e: Emitter) -> fx.Node:
        ids = index if batch is None else e.method("select", index, batch, 0)
        wraps = call.name == "take_along_dim"
        return e.call(torch.remainder, ids, e.size(table, dim)) if wraps else ids

    features = batch is not None and batch > dim and not is_transposed(view, table)
    return Gather(
        node, table, index, make_table, make_ids, batch, features, gradient=table_gradient(call)
    )
