"""Additions to an accumulator, in every spelling of index_add and scatter_add, and its previous contents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, flat, fresh
from ...graph.fakes import fake, same_size, static_size
from ...graph.memory import same_geometry
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.values import counting
from ...graph.view import GraphView
from ...graph.vocabulary import REGROUPS, SAME_VALUES

_CLEARS = frozenset(("zero", "fill"))
_PARTS = frozenset("getitem select narrow".split())
_ALIASES = SAME_VALUES | REGROUPS
_SUMS = frozenset("index_add index_put scatter_add scatter_reduce".split())
ADDITIONS = _SUMS | {"put", "scatter"}


class Addition(NamedTuple):
    """node[..., rows, ...] += source * scale, along the axis that consists of the atom `docs`.

    source, rows: the tensors with their axes; `rows` broadcasts to the source. axes: those of the node; all but the one
    of the documents are axes of the source. how: "sum", or another reduction of elements with the same row.
    """

    source: Placed
    rows: Placed
    axes: tuple[Axis, ...]
    docs: Atom
    how: str | None = "sum"
    scale: Any = 1

    @property
    def others(self) -> tuple[Atom, ...]:
        """The atoms of the accumulator's other axes."""
        return tuple(a for axis in self.axes for a in flat(axis) if a is not self.docs)


def addition(view: GraphView, node: fx.Node, call: Call) -> Addition | None:
    """The scatter, index_add or accumulating index_put that a node is; None for anything else."""
    ndim, axis, how, queries = len(view.shape(node)), call.get("dim"), "sum", None
    match call.name:
        case "index_add":
            rows, source = call["index"], call["source"]
        case "scatter_add" | "scatter" | "scatter_reduce":
            rows, source, how = call["index"], call["src"], call.get("reduce")
            how = "sum" if call.name == "scatter_add" or how == "add" else how
        case "put" if call.get("accumulate") and ndim == 1:
            rows, source, axis = call["index"], call["source"], 0
        case "index_put" if call.get("accumulate") and isinstance(call["indices"], (tuple, list)):
            at = [a for a, i in enumerate(call["indices"]) if i is not None]
            if len(at) != 1 and not at == [0, 1] == [*range(ndim)]:
                return None
            rows, source, axis = call["indices"][at[-1]], call["values"], at[-1]
            queries = call["indices"][0] if len(at) > 1 else None
        case _:
            return None
    if axis is None or not (view.is_tensor(rows) and view.is_tensor(source)):
        return None
    if view.dtype(rows) == torch.bool:
        return None
    axis, n = axis % ndim, len(view.shape(rows))
    docs, axes = Atom(view.shape(node)[axis]), fresh(view.shape(source))
    if call.name.startswith("scatter"):  # each element has a row
        first, into = 0, [*axes[:axis], (docs,), *axes[axis + 1 :]]
        fits = view.same_shape(rows, source)
    elif queries is None:  # the axes of `rows` replace one axis
        first, into = axis, [*axes[:axis], (docs,), *axes[axis + n :]]
        fits = _broadcasts(view, rows, axes[axis : axis + n])
    else:  # queries that count along one axis of the source
        place = counting(view, queries, node) or 0
        first, into = len(axes) - n, [*axes[-place:][:1], (docs,)]
        fits = place > 0 and _broadcasts(view, queries, axes) and _broadcasts(view, rows, axes)
    if not fits or len(into) != ndim:
        return None
    of_rows = tuple(() if same_size(s, 1) else a for s, a in zip(view.shape(rows), axes[first:]))
    return Addition(
        Placed(source, node, tuple(axes)), Placed(rows, node, of_rows), tuple(into), docs, how,
        call.get("alpha", 1),
    )  # fmt: skip


def _broadcasts(view: GraphView, t: fx.Node, axes: Sequence[Axis]) -> bool:
    """Whether a tensor broadcasts to some axes, as far as sizes are known; PyTorch checks the others."""
    sizes = view.shape(t)
    for size, axis in zip(reversed(sizes), reversed(axes)):
        want = math.prod(atom.size for atom in axis)
        known = static_size(size) is not None and static_size(want) is not None
        if not (same_size(size, 1) or same_size(size, want) or (axis and not known)):
            return False
    return len(sizes) <= len(axes)


def check_one_row_each(view: GraphView, node: fx.Node, added: Addition) -> None:
    """Raise NoMatch unless the accumulator has one row for each query of the source."""
    for axis, size in zip(added.axes, view.shape(node)):
        if axis == (added.docs,) or same_size(size, math.prod(a.size for a in axis)):
            continue
        if static_size(size) is None or any(static_size(a.size) is None for a in axis):
            raise NoMatch(
                "nothing says that the accumulator has as many rows as there are queries", node
            )
        raise NoMatch("the accumulator has rows that belong to no query", node)


def accumulator_of(
    view: GraphView, node: fx.Node, call: Call, filled: bool = False
) -> tuple[tuple[fx.Node, ...], fx.Node | None]:
    """The target of an accumulation in place: (all nodes that name the whole tensor, None), or ((), a part of a tensor
    of zeros) as in `scores[i].index_add_(...)`.

    Raises NoMatch unless the target is zero before (or `filled`) and does not outlive the program.
    """
    held = call["input"]
    made = view.effects.creator(held) if isinstance(held, fx.Node) else None
    if call.inplace and view.name_of(held) in _PARTS and made is not None and view.const(made) == 0:
        return (), held  # the scores are added to its contents
    if not filled:
        _check_zero(view, held, node)
        if made is not None and call.inplace and made.op in ("placeholder", "get_attr"):
            raise NoMatch("the accumulator is the caller's, who keeps the scores in it", node)
    return names_of(view, held, node) if call.inplace else (), None


def _check_zero(view: GraphView, held: Any, node: fx.Node) -> None:
    seen = view.value(held, node) if isinstance(held, fx.Node) else None
    call = view.call(seen)
    cleared = call.inplace and call.name in _CLEARS
    filler = call.get("value", 0) if cleared else held
    if view.const(filler, seen if cleared else node) != 0:
        if call.name in _SUMS:
            raise NoMatch("the accumulator holds other sums already: add all up at once", node)
        raise NoMatch("the accumulator does not start at zero", node)


def names_of(view: GraphView, node: fx.Node, before: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes before `before` that are the same tensor as `node`: the tensor before it was cleared, as in
    `empty(N).zero_()`, or before a conversion without effect, as in `zeros(N).to(device)`, and its other names."""
    while (x := _other_name(view, node)) is not None:
        node = x
    names = [node]
    for name in names:
        users = (user for user in name.users if view.order[user] < view.order[before])
        names += [user for user in users if _other_name(view, user) is name]
    return tuple(names)


def _other_name(view: GraphView, node: fx.Node) -> fx.Node | None:
    """The input of a node that is another name of all of it: the input cleared in place, or an alias with the same
    geometry or without other readers of the input. None for other nodes."""
    call = view.call(node)
    x: Any = call.get("input")
    if not view.is_tensor(x):
        return None
    if call.inplace:
        return x if call.name in _CLEARS else None
    if call.name not in _ALIASES or view.effects.creator(node) is not view.effects.creator(x):
        return None  # a copy
    alone = len(x.users) == 1 and same_size(fake(node).numel(), fake(x).numel())
    return x if alone or same_geometry(node, x) else None
