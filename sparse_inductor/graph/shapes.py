"""Following one axis through views: the same view, taken of a tensor that has another size on that axis.

A `Move` carries the linear input of a linear's output (D in the place of V) and per-row operands (1 in the place of V)
through a view, slice or permutation that the user applied to the output itself.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .emit import Emitter
from .indices import expanded_index, listed
from .names import Call
from .no_match import NoMatch
from .view import GraphView, fake, same_size, same_sizes, static_size
from .vocabulary import PARTS


class Combined(NoMatch):
    """Two values that both come from linears meet here: these epilogues."""

    def __init__(self, reason: str, node: fx.Node, epilogues: tuple[Any, ...]):
        super().__init__(reason, node)
        self.epilogues = epilogues


@dataclasses.dataclass(frozen=True)
class Move:
    """A view op on a tensor whose axis `v_dim` is V.

    v_dim, origin: the axis after the move, and for every axis after it the axis before it it came from, or None.
    apply(e, t, row): take the move of `t`; `row` says that t is a per-row operand, 1 on the V axis and perhaps
    on others. columns: the entries of V that are kept, a slice or an index tensor, if the move drops some.
    """

    v_dim: int
    origin: tuple[int | None, ...]
    apply: Callable[[Emitter, fx.Node, bool], fx.Node]
    columns: slice | fx.Node | None = None


def _permutation(perm: Sequence[int], v: int) -> Move:
    perm = tuple(perm)
    return Move(perm.index(v), perm, lambda e, t, row: e.method("permute", t, perm))


def _index(node: fx.Node, shape: tuple, items: list[Any], v: int) -> Move:
    """Basic indexing, one item an axis of `shape` with None for new axes; tensors only where alone and before V."""
    axis, new_v, columns = 0, None, None
    origin: list[int | None] = []
    kept: list[Any] = []
    for item in items:
        if item is None:
            origin.append(None)
            kept.append(None)
            continue
        if axis == v:
            if isinstance(item, fx.Node) and isinstance(fake(item), torch.Tensor):
                alone = all(i == slice(None) for i in items if i is not item and i is not None)
                if fake(item).dim() != 1 or fake(item).dtype == torch.bool or not alone:
                    raise NoMatch(
                        "gathers outputs of the linear in a way that is not followed", node
                    )
                columns = item
            elif not isinstance(item, slice):
                raise NoMatch("picks single outputs of the linear", node)
            elif item != slice(None):
                columns = item
            new_v = len(origin)
            origin.append(axis)
            kept.append(slice(None))
        else:
            if isinstance(item, slice):
                origin.append(axis)
            elif isinstance(item, fx.Node) and isinstance(fake(item), torch.Tensor):
                raise NoMatch("gathers rows by a tensor index before the reduction", node)
            elif isinstance(item, (list, tuple, bool)):
                raise NoMatch("gathers rows by a list before the reduction", node)
            kept.append(item)
        axis += 1
    assert new_v is not None

    def apply(e: Emitter, t: fx.Node, row: bool) -> fx.Node:
        index: list[Any] = []
        a = 0
        for item in kept:
            if item is None:
                index.append(None)
                continue
            single = row and same_size(fake(t).shape[a], 1) and not same_size(shape[a], 1)
            index.append(item if not single else slice(None) if isinstance(item, slice) else 0)
            a += 1
        if all(i == slice(None) for i in index):
            return t
        return e.call(operator.getitem, t, tuple(index))

    return Move(new_v, tuple(origin), apply, columns)


def _expand_index(index: Any, ndim: int, node: fx.Node) -> list[Any]:
    items = expanded_index(index, ndim)
    if items is None:
        raise NoMatch("has an index that the walk does not understand", node)
    return items


def _view(node: fx.Node, args: Sequence[Any], before: tuple, after: tuple, v: int) -> Move:
    """reshape: V must survive as an axis of its own."""
    n = len(after)
    last = v == len(before) - 1 and n and same_size(after[-1], before[v])
    kept = n - 1 if last else kept_axis(before, v, after)
    if kept is None:
        raise NoMatch("reshapes the linear's output axis away", node)
    new_v = kept
    if len(args) != n or not all(isinstance(a, (int, fx.Node)) for a in args):
        raise NoMatch("has a shape that the walk does not understand", node)
    # Axes on either side that did not change keep their identity.
    head = 0
    while head < min(v, new_v) and same_size(before[head], after[head]):
        head += 1
    tail = 1
    while tail <= min(len(before) - 1 - v, n - 1 - new_v) and same_size(
        before[-tail], after[-tail]
    ):
        tail += 1
    origin = tuple(
        v if p == new_v else p if p < head else len(before) - (n - p) if n - p < tail else None
        for p in range(n)
    )

    def apply(e: Emitter, t: fx.Node, row: bool) -> fx.Node:
        shape = fake(t).shape
        if not all(same_size(s, b) for a, (s, b) in enumerate(zip(shape, before)) if a != v):
            raise NoMatch("broadcasts a per-token operand through a reshape", node)
        width = static_size(shape[v])
        if width is None:
            width = e.method("size", t, v)
        return e.method("reshape", t, (*args[:new_v], width, *args[new_v + 1 :]))

    return Move(new_v, origin, apply)


def kept_axis(before: Sequence[Any], axis: int, after: Sequence[Any]) -> int | None:
    """Where an axis of a reshaped tensor is: as many elements before it and after it."""

    def split(sizes: Sequence[Any], at: int) -> tuple[Any, ...]:
        return math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])

    wanted = split(before, axis)
    return next((p for p in range(len(after)) if same_sizes(split(after, p), wanted)), None)


def _squeeze(node: fx.Node, before: tuple, dims: Sequence[int], v: int) -> Move:
    if v in dims:
        raise NoMatch("squeezes the linear's output axis", node)
    gone = sorted((d for d in dims if same_size(before[d], 1)), reverse=True)

    def apply(e: Emitter, t: fx.Node, row: bool) -> fx.Node:
        for d in gone:
            t = e.method("squeeze", t, d)
        return t

    origin = tuple(a for a in range(len(before)) if a not in gone)
    return Move(origin.index(v), origin, apply)


def _pieces(call: Call, which: int, node: fx.Node, ndim: int) -> list[Any]:
    """The basic index of one output of split, chunk, tensor_split or unbind."""
    dim = call.get("dim", 0) % ndim
    items: list[Any] = [slice(None)] * ndim
    if call.name == "unbind":
        items[dim] = which
        return items
    if not all(isinstance(piece.shape[dim], int) for piece in fake(node.args[0])):
        raise NoMatch(f"{call.name} has pieces of unknown size", node)
    items[dim] = piece_of(node.args[0], dim, which)
    return items


def piece_of(pieces: fx.Node, dim: int, which: int) -> slice:
    """The part of an axis that one of its pieces is, of sizes that may be symbols."""
    sizes = [piece.shape[dim] for piece in fake(pieces)]
    return slice(sum(sizes[:which]), sum(sizes[: which + 1]))


def order_of(call: Call, n: int) -> list[int] | None:
    """Of n axes, which one each axis of the result is, where the op only puts them in another order; else None."""
    order = list(range(n))
    match call.name:
        case "permute":
            return [d % n for d in call["dims"]]
        case "T":
            return order[::-1]
        case "transpose" | "t" | "mT":
            if n >= 2:
                i, j = -2, -1
                if call.name == "transpose":
                    i, j = call["dim0"], call["dim1"]
                order[i], order[j] = order[j], order[i]
            return order
        case "movedim":
            source, target = call["source"], call["destination"]
            source = [s % n for s in listed(source)]
            target = [t % n for t in listed(target)]
            rest = iter(d for d in order if d not in source)
            placed = dict(zip(target, source))
            return [placed[p] if p in placed else next(rest) for p in range(n)]
    return None


def move(view: GraphView, node: fx.Node, call: Call, v: int) -> Move:
    """The move of a shape op whose input has V on axis `v`. Raises NoMatch where V does not survive."""
    before = view.shape(call["input"]) if view.is_tensor(call["input"]) else ()
    after, n = view.shape(node), len(before)
    order = order_of(call, n)
    if order is not None:
        return _permutation(order, v)
    match call.name:
        case "unsqueeze":
            at = call["dim"] % (n + 1)
            return _index(node, before, [*[slice(None)] * at, None, *[slice(None)] * (n - at)], v)
        case "squeeze":
            dims = call.get("dim")
            units = [d for d in range(n) if same_size(before[d], 1)]
            dims = units if dims is None else [d % n for d in listed(dims)]
            return _squeeze(node, before, dims, v)
        case "view":
            return _view(node, call.get("shape", ()), before, after, v)
        case "view_as":
            return _view(node, [static_size(s) for s in after], before, after, v)
        case "flatten":
            return _view(node, _flatten_args(call, before, v, node), before, after, v)
        case "unflatten":
            d, sizes = call["dim"] % n, call["sizes"]  # a tuple, or a node that is one
            if d == v:
                raise NoMatch("splits the linear's output axis", node)
            origin = (*range(d), *[None] * (len(after) - n + 1), *range(d + 1, n))
            apply = lambda e, t, row: e.method("unflatten", t, d, sizes)
            return Move(origin.index(v), origin, apply)
        case "expand" | "expand_as":
            return _expand(node, call, before, after, v)
        case "narrow":
            start, length = call["start"], call["length"]
            stop = start + length if isinstance(start, int) and isinstance(length, int) else None
            if stop is None:
                raise NoMatch("narrows by sizes that are not known", node)
            return _index(node, before, _only(call["dim"] % n, slice(start, stop), n), v)
        case "slice":
            part = slice(call.get("start"), call.get("end"), call.get("step", 1))
            return _index(node, before, _only(call.get("dim", 0) % n, part, n), v)
        case "select":
            return _index(node, before, _only(call["dim"] % n, call["index"], n), v)
        case "index_select":
            d, index = call["dim"] % n, call["index"]
            if d == v:
                return _index(node, before, _only(d, index, n), v)

            def apply(e: Emitter, t: fx.Node, row: bool) -> fx.Node:
                single = row and same_size(fake(t).shape[d], 1) and not same_size(before[d], 1)
                return t if single else e.method("index_select", t, d, index)

            return Move(v, tuple(range(n)), apply)
        case "getitem":
            producer = view.call(call["input"])
            if not view.is_tensor(call["input"]):
                if producer is None or producer.name not in PARTS:
                    raise NoMatch("takes one of several results", node)
                before = view.shape(producer["input"])
                items = _pieces(producer, call["index"], node, len(before))
                return _index(node, before, items, v)
            return _index(node, before, _expand_index(call["index"], n, node), v)
    raise NoMatch(f"{call.name} before the reduction is not followed", node)


def _only(dim: int, item: Any, n: int) -> list[Any]:
    return [item if d == dim else slice(None) for d in range(n)]


def _flatten_args(call: Call, before: tuple, v: int, node: fx.Node) -> list[Any]:
    n = len(before)
    a, b = call.get("start_dim", 0) % n, call.get("end_dim", -1) % n
    if a <= v <= b and a != b:
        raise NoMatch("flattens the linear's output axis", node)
    sizes = [*before[:a], -1, *before[b + 1 :]] if a != b else list(before)
    if not all(isinstance(s, int) for d, s in enumerate(sizes) if d != v - (b - a) * (b < v)):
        raise NoMatch("flattens sizes that are not known", node)
    return sizes


def _expand(node: fx.Node, call: Call, before: tuple, after: tuple, v: int) -> Move:
    new = len(after) - len(before)
    origin = (*[None] * new, *range(len(before)))
    if all(same_size(a, b) for a, b in zip(after[new:], before)) and new == 0:
        return Move(v, origin, lambda e, t, row: t)
    if call.name == "expand_as":
        raise NoMatch("expands the linear's result", node)
    sizes = [-1 if p == v + new else s for p, s in enumerate(call["sizes"])]
    return Move(v + new, origin, lambda e, t, row: e.method("expand", t, tuple(sizes)))
