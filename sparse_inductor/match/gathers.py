"""Every spelling of "look entries up along one axis of a table": indexing, take, index_select, gather, embedding.

A gather of query weights is `query[b, ids[i]]`, with `ids` of any shape and at most one batch axis.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .emit import Emitter
from .graph import GraphView, same_size
from .indices import expanded_index
from .names import Call
from .values import counting, uniform
from .vocabulary import COPIES, REORDERS

__all__ = ["Gather", "gather_of", "is_transposed", "rows_of", "table_gradient"]

Make = Callable[[Emitter], fx.Node]


@dataclasses.dataclass(frozen=True)
class Gather:
    """node[*before, *ids.shape, *after] = table, looked up by `ids` along one axis.

    table: builds the table as [V] or [B, V]; ids: builds the ids. batch: the axis of `node` that is
    the table's batch axis, or None. features: the table was [V, B] as written and nothing says that
    it is a transposed batch of queries. source, index: the nodes that hold both, which must not
    change before they are read again. gradient: why the table's gradient is not what indexing gives it, if so.
    """

    node: fx.Node
    source: fx.Node
    index: fx.Node
    table: Make
    ids: Make
    batch: int | None
    features: bool = False
    gradient: str | None = None


def gather_of(view: GraphView, node: Any) -> Gather | None:
    """The node as a gather with at most one batch axis, or None."""
    call = view.call(node)
    read = None if call is None else _READERS.get(call.name)
    if call is None or call.inplace or read is None or not view.is_tensor(node):
        return None
    return read(view, node, call)


def rows_of(view: GraphView, node: Any) -> Gather | None:
    """The node as whole rows of a table: node[*ids.shape, ...] = table[ids]. Nothing in it is a batch axis."""
    call = view.call(node)
    if call is None or call.inplace or not view.is_tensor(node):
        return None
    table, ids = call.get("input"), None
    match call.name:
        case "getitem":
            index = call["index"]
            ids = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        case "index" if len(call["indices"]) == 1:
            ids = call["indices"][0]
        case "index_select" if call["dim"] == 0:
            ids = call["index"]
        case "take" if view.is_tensor(table) and len(view.shape(table)) == 1:
            ids = call["index"]
        case "embedding" if node.target is not torch.embedding and call.get("max_norm") is None:
            table, ids = call["weight"], call["input"]
    if not (view.is_tensor(table) and _are_ids(view, ids)):
        return None
    return Gather(node, table, ids, lambda e: table, lambda e: ids, None)


def _lookup(
    view: GraphView, node: fx.Node, table: Any, axis: int, ids: Any, other: Any = slice(None)
) -> Gather | None:
    """table[:, ids] for a table of one or two axes; `other` is taken of the other one."""
    if not (view.is_tensor(table) and _are_ids(view, ids)):
        return None
    ndim, axis = len(view.shape(table)), axis % 2
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


def _getitem(view: GraphView, node: fx.Node, call: Call) -> Gather | None:
    table = call["input"]
    if not view.is_tensor(table):
        return None
    index = call["index"] if call.name == "getitem" else call["indices"]
    if call.name == "index":
        index = tuple(slice(None) if i is None else i for i in index)
    elif isinstance(index, list):
        index = tuple(index)
    items = expanded_index(index, len(view.shape(table)))
    if items is None:
        return None
    at = [a for a, i in enumerate(items) if isinstance(i, fx.Node)]
    others = [i for i in items if not isinstance(i, fx.Node)]
    if at == [0, 1] and len(items) == 2:
        return _row_by_row(view, node, table, *items)
    if len(at) != 1 or len(others) > 1:
        return None
    other = others[0] if others else slice(None)
    return _lookup(view, node, table, at[0], items[at[0]], other) if _basic(other) else None


def _basic(item: Any) -> bool:
    """Whether an item of an index is a number or a slice, of sizes that are known."""
    if isinstance(item, slice):
        return all(isinstance(i, (int, type(None))) for i in (item.start, item.stop, item.step))
    return isinstance(item, int) and not isinstance(item, bool)


def _row_by_row(view: GraphView, node: fx.Node, table: Any, row: Any, ids: Any) -> Gather | None:
    """table[[[0]], [[1]], ...], ids]: the same ids in every row."""
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


def _index_select(view: GraphView, node: fx.Node, call: Call) -> Gather | None:
    return _lookup(view, node, call["input"], call["dim"], call["index"])


def _take(view: GraphView, node: fx.Node, call: Call) -> Gather | None:
    table = call["input"]
    if not view.is_tensor(table) or len(view.shape(table)) != 1:
        return None
    return _lookup(view, node, table, 0, call["index"])


def _embedding(view: GraphView, node: fx.Node, call: Call) -> Gather | None:
    ids, table = call["input"], call["weight"]
    if node.target is torch.embedding:  # torch.embedding(weight, indices)
        ids, table = table, ids
    if call.get("max_norm") is not None:
        return None
    found = _lookup(view, node, table, 0, ids)
    return None if found is None else dataclasses.replace(found, gradient=table_gradient(call))


def table_gradient(call: Call) -> str | None:
    """Why the gradient of an embedding's table is not that of indexing it; None where it is."""
    if call.get("padding_idx") is not None:
        return "padding_idx keeps the gradient of one entry out"
    if call.get("scale_grad_by_freq"):
        return "scale_grad_by_freq divides the gradient by how often an entry is read"
    return "the gradient is asked for as a sparse tensor" if call.get("sparse") else None


def _gather(view: GraphView, node: fx.Node, call: Call) -> Gather | None:
    """torch.gather: along every other axis either the table or the index repeats itself."""
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
        return index if batch is None else e.method("select", index, batch, 0)

    features = batch is not None and batch > dim and not is_transposed(view, table)
    return Gather(node, table, index, make_table, make_ids, batch, features)


_READERS: dict[str, Callable[[GraphView, fx.Node, Call], Gather | None]] = {
    "getitem": _getitem,
    "index": _getitem,
    "index_select": _index_select,
    "take": _take,
    "embedding": _embedding,
    "gather": _gather,
    "take_along_dim": _gather,
}
