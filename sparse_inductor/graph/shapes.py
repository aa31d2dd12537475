"""Following one axis through views, and applying the same view to a tensor that has another size on that axis.

A `Move` carries the linear input of a linear's output (D in the place of V) and per-row operands (1 in the place of V)
through a view, slice or permutation that the user applied to the output itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .emit import Emitter
from .fakes import fake, same_size, same_sizes, static_size
from .indices import Taken, listed, taken
from .names import Call
from .no_match import NoMatch
from .view import GraphView, label


class OutputsReshaped(NoMatch):
    """The outputs of a linear are no axis of their own after a reshape. The last axis has a part of them, or all."""


class Move(NamedTuple):
    """A view op on a tensor whose axis `v_dim` is V.

    v_dim: the V axis after the move. origin: for every axis after the move, the axis from which it came, or None.
    apply(e, t): apply the move to `t`, which has another size on the V axis and, if it is a per-row operand, may have
    size 1 on others. columns: the kept entries of V (a slice, a list or an index tensor), if the move drops some.
    """

    v_dim: int
    origin: tuple[int | None, ...]
    apply: Callable[[Emitter, fx.Node], fx.Node]
    columns: slice | list[int] | fx.Node | None = None


def _index(node: fx.Node, shape: tuple, part: Taken, v: int) -> Move:
    """Return the move of an indexing by numbers and slices, or by one vector and slices."""
    items = [item for item in part.items if item is not None]
    columns = items[v]
    tensors = [i for i in items if isinstance(i, list) or isinstance(fake(i), torch.Tensor)]
    vectors = [t for t in tensors if _is_vector(t)]
    slices = sum(isinstance(item, slice) for item in items)
    if tensors and (len(tensors), len(vectors), slices) != (1, 1, len(items) - 1):
        what = "outputs of the linear" if columns in tensors else "rows"
        raise NoMatch(f"gathers {what} in a way that is not followed", node)
    if any(isinstance(item, (tuple, bool)) for item in items if item is not columns):
        raise NoMatch("gathers rows in a way that is not followed", node)
    if not (vectors == [columns] or isinstance(columns, slice)):
        raise NoMatch("picks single outputs of the linear", node)
    kept = [*part.items]
    kept[[d for d, item in enumerate(kept) if item is not None][v]] = slice(None)
    if any(isinstance(i, slice) and isinstance(i.stop, torch.SymInt) for i in part.items):
        raise NoMatch(f"{label(part.passed[0])} has pieces of unknown size", node)
    origin = Taken(part.x, [slice(None) if i in tensors else i for i in kept]).origin

    def apply(e: Emitter, t: fx.Node) -> fx.Node:
        index: list[Any] = []
        a = 0
        for item in kept:
            if item is None:
                index.append(None)
                continue
            single = same_size(fake(t).shape[a], 1) and not same_size(shape[a], 1)
            index.append(item if not single else 0 if isinstance(item, int) else slice(None))
            a += 1
        if all(i == slice(None) for i in index):
            return t
        return e.call(operator.getitem, t, tuple(index))

    columns = None if columns == slice(None) else columns
    return Move(origin.index(v), origin, apply, columns)


def _is_vector(index: Any) -> bool:
    """Whether an index is a list of numbers, or a tensor of them with one axis."""
    if isinstance(index, list):
        return all(type(i) is int for i in index)
    return fake(index).dim() == 1 and fake(index).dtype != torch.bool


def reshaped(
    node: fx.Node, before: tuple, after: tuple, v: int, args: Sequence[Any] | None = None
) -> Move:
    """Return the move of a reshape, in which V must remain a separate axis. args: the sizes in the program, if any."""
    n = len(after)
    last = v == len(before) - 1 and n and same_size(after[-1], before[v])
    kept = n - 1 if last else kept_axis(before, v, after)
    if kept is None:
        raise OutputsReshaped("splits the linear's output axis or merges it with another", node)
    new_v = kept
    # Unchanged axes at both ends are identified with those before.
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
    if args is None:
        known = [0 if o is not None else static_size(s) for o, s in zip(origin, after)]
        args = [-1 if size is None and known.count(None) == 1 else size for size in known]
    if len(args) != n or not all(isinstance(a, (int, fx.Node)) for a in args):
        raise NoMatch("has a shape that the walk does not understand", node)

    def apply(e: Emitter, t: fx.Node) -> fx.Node:
        single = [
            a not in origin and not same_size(s, b)
            for a, (s, b) in enumerate(zip(fake(t).shape, before))
        ]
        if any(single):
            sizes = [static_size(b) if one else -1 for one, b in zip(single, before)]
            if None in sizes:
                raise NoMatch(
                    "a reshape broadcasts a per-token operand to a size that is not known", node
                )
            t = e.method("expand", t, tuple(sizes))
        sizes = [size if o is None else e.size(t, o) for size, o in zip(args, origin)]
        return e.method("reshape", t, tuple(sizes))

    return Move(new_v, origin, apply)


def kept_axis(before: Sequence[Any], axis: int, after: Sequence[Any]) -> int | None:
    """Return the place of an axis after a reshape: the products of the sizes before and after it stay the same."""

    def split(sizes: Sequence[Any], at: int) -> tuple[Any, ...]:
        return math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])

    wanted = split(before, axis)
    return next((p for p in range(len(after)) if same_sizes(split(after, p), wanted)), None)


def order_of(call: Call, n: int) -> list[int] | None:
    """Return, for each axis of the result, the axis of the input, if a call only reorders n axes; else None."""
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
    """Return the move of a shape op whose input has V on axis `v`. Raises NoMatch where V does not survive."""
    before = view.shape(call["input"]) if view.is_tensor(call["input"]) else ()
    after, n = view.shape(node), len(before)
    order = order_of(call, n)
    if order is not None:
        dims = tuple(order)
        return Move(dims.index(v), dims, lambda e, t: e.permuted(t, dims))
    if (part := taken(view, call)) is not None:
        return _index(node, view.shape(part.x), part, v)
    match call.name:
        case "view":
            return reshaped(node, before, after, v, call.get("shape", ()))
        case "view_as" | "flatten":
            return reshaped(node, before, after, v)
        case "unflatten":
            d, sizes = call["dim"] % n, call["sizes"]  # a tuple, or a node that is one
            if d == v:
                raise OutputsReshaped("splits the linear's output axis", node)
            origin = (*range(d), *[None] * (len(after) - n + 1), *range(d + 1, n))
            apply = lambda e, t: e.method("unflatten", t, d, sizes)
            return Move(origin.index(v), origin, apply)
        case "expand" | "expand_as":
            return _expand(node, call, before, after, v)
        case "narrow":
            raise NoMatch("narrows by sizes that are not known, or from the end", node)
    raise NoMatch(f"{call.name} after the linear is not followed", node)


def _expand(node: fx.Node, call: Call, before: tuple, after: tuple, v: int) -> Move:
    new = len(after) - len(before)
    origin = (*[None] * new, *range(len(before)))
    if all(same_size(a, b) for a, b in zip(after[new:], before)) and new == 0:
        return Move(v, origin, lambda e, t: t)
    if call.name == "expand_as":
        raise NoMatch("expands the linear's result", node)
    sizes = [-1 if p == v + new else s for p, s in enumerate(call["sizes"])]
    return Move(v + new, origin, lambda e, t: e.method("expand", t, tuple(sizes)))
