"""Axes followed upwards through views, merged and split ones included.

An axis is a tuple of atoms, outermost first: () has one element, (b, h) is two axes merged to one. If the walk upwards
finds a view that merged several axes, an atom is split in place, so that every holder of the atom sees its parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from .fakes import same_size, same_sizes
from .indices import expanded_index
from .names import Call, stored
from .no_match import NoMatch, changed, if_matched
from .shapes import order_of
from .values import rounds
from .view import GraphView, label
from .vocabulary import COPIES, VIEWS


class Atom:
    """One axis, or several axes if `parts` is set."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Any):
        self.size = size
        self.parts: tuple[Atom, ...] | None = None


Axis = tuple[Atom, ...]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A tensor and its axes: an operand, or a tensor such as a mask or bias that is combined with the scores.

    For the latter: factor: its constant factor. negate: a mask marks dropped elements, not kept ones. fill: for a mask
    among the biases, the number that it adds to dropped elements. floor: the least number that is added. assigned: the
    index of the dropped elements, into a tensor with `axes`; `node` is then the assignment.
    """

    node: fx.Node
    reader: fx.Node
    axes: tuple[Axis, ...]
    factor: float = 1.0
    negate: bool = False
    divides: bool = False
    fill: float | None = None
    times: tuple[Placed, ...] = ()  # tensors that it is multiplied by, after `factor`
    floor: float | None = None
    assigned: tuple[Any, ...] | None = None

    @property
    def reads(self) -> list[tuple[fx.Node, fx.Node]]:
        """The tensors that are read, each with its reader."""
        nodes: list[fx.Node] = [] if self.assigned is not None else [self.tensor]
        fx.map_arg(self.assigned, nodes.append)
        return [(node, self.reader) for node in nodes]

    @property
    def tensor(self) -> fx.Node:
        """The tensor that is read."""
        return stored(self.node)

    @property
    def atoms(self) -> list[Atom]:
        return [atom for axis in self.axes for atom in flat(axis)]


def fresh(shape: Sequence[Any]) -> list[Axis]:
    """Return new axes for a tensor."""
    return [() if same_size(s, 1) else (Atom(s),) for s in shape]


def flat(axis: Axis) -> Axis:
    """Return the atoms of an axis, with split atoms replaced by their parts."""
    found: list[Atom] = []
    for atom in axis:
        found += [atom] if atom.parts is None else flat(atom.parts)
    return tuple(found)


def last_axes(shape: Sequence[Any], axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes of a tensor of this shape that broadcasts to a tensor with `axes`."""
    last = axes[len(axes) - len(shape) :]
    return [() if same_size(size, 1) else axis for size, axis in zip(shape, last)]


def beside(
    view: GraphView, node: fx.Node, axes: Sequence[Axis], reader: fx.Node, **fields: Any
) -> Placed:
    """Return a tensor that broadcasts to one with `axes`, as `reader` sees it. Raises NoMatch."""
    seen = view.value(node, reader)
    if seen is None:
        raise changed(view, node, reader)
    shape = view.shape(seen)
    if len(shape) > len(axes):
        raise NoMatch("an operand has more axes than the scores", reader)
    return Placed(seen, reader, tuple(last_axes(shape, axes)), **fields)


def above(view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes of a view's input, given those of its result. Raises NoMatch."""
    before, n = view.shape(call["input"]), len(axes)
    order = order_of(call, n)
    if order is not None:
        return [axes[order.index(d)] for d in range(n)]
    match call.name:
        case "getitem":
            return _indexed(view, node, call, axes)
        case "expand" | "expand_as":
            after = view.shape(node)
            if same_sizes(before, after):
                return list(axes)
            raise NoMatch(f"the result of {label(call['input'])} is broadcast", node)
        case _:
            return regrouped(before, view.shape(node), axes, node)


def before(view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes of the input of a view, a copy, or a cast without rounding. Raises NoMatch for other calls."""
    dtype, wider = view.dtype(call["input"]), view.dtype(node)
    floats = dtype.is_floating_point and wider.is_floating_point
    if call.name in COPIES or (call.name == "cast" and floats and not rounds(wider, dtype)):
        return list(axes)
    if call.name in VIEWS:
        return above(view, node, call, axes)
    raise NoMatch("its values are others", node)


def originals(
    view: GraphView,
    node: fx.Node,
    axes: Sequence[Axis],
    reader: fx.Node,
    step: Callable[..., list[Axis]] = before,
    memory: bool = False,
) -> Iterator[tuple[fx.Node, list[Axis], fx.Node]]:
    """Yield a tensor and, going up, the tensors from which it takes its values, each with its axes and its reader.

    step: returns the axes of a call's input, or raises NoMatch to end the walk. memory: the last tensor may be one that
    is partly written in place, such as a cache, so that its reader does not see the result of its node.
    """
    yield node, list(axes), reader
    while view.value(node, reader) is node:
        call = view.call(node)
        x = call.get("input")
        if call.inplace or not view.is_tensor(x):
            return
        before = if_matched(step, view, node, call, axes)
        if before is None:
            return
        axes, seen = before, view.value(x, node)
        known = seen is not None and view.is_tensor(seen)
        if known or memory:
            yield (seen if known else x), list(axes), node
        if not known:
            return
        reader, node = node, seen


def _indexed(view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]) -> list[Axis]:
    """As `above`, for indexing that only adds or drops axes of size 1."""
    shape = view.shape(call["input"])
    before: list[Axis] = []
    items = expanded_index(call["index"], len(shape)) or ()
    left = iter(zip(axes, view.shape(node)))
    for item in items:
        if type(item) is int and same_size(shape[len(before)], 1):
            before.append(())
            continue
        axis, size = next(left, ((), None))
        if item is None:
            continue
        start = isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1)
        if not (start and same_size(shape[len(before)], size)):
            raise NoMatch(f"a part of the result of {label(call['input'])} is taken", node)
        before.append(axis)
    if len(before) != len(shape):
        raise NoMatch(f"a part of the result of {label(call['input'])} is taken", node)
    return before


def regrouped(before: tuple, after: tuple, axes: Sequence[Axis], node: fx.Node) -> list[Axis]:
    """As `above`, for a reshape. Ignores axes of size 1, and matches the others from both ends, then by products."""
    result: list[Axis] = [()] * len(before)
    b = [i for i, s in enumerate(before) if not same_size(s, 1)]
    a = [i for i, s in enumerate(after) if not same_size(s, 1)]
    while b and a and same_size(before[b[0]], after[a[0]]):
        result[b.pop(0)] = axes[a.pop(0)]
    while b and a and same_size(before[b[-1]], after[a[-1]]):
        result[b.pop()] = axes[a.pop()]
    while b or a:
        p, q = 1, 1
        while not same_size(_product(before, b[:p]), _product(after, a[:q])):
            left, right = _product(before, b[:p]), _product(after, a[:q])
            if isinstance(left, int) and isinstance(right, int):
                p, q = (p + 1, q) if left < right else (p, q + 1)
            elif len(a) == 1:
                p += 1
            else:
                q += 1
            if p > len(b) or q > len(a):
                raise NoMatch("a reshape that cannot be followed", node)
        if not b or not a:
            raise NoMatch("a reshape that cannot be followed", node)
        _group(result, [before[i] for i in b[:p]], b[:p], [axes[i] for i in a[:q]], node)
        b, a = b[p:], a[q:]
    return result


def _product(shape: tuple, which: Sequence[int]) -> Any:
    return math.prod(shape[i] for i in which)


def _part(size: Any, have: Any, more: Any) -> int | None:
    """Return size // have if an axis of size `more` can be split into that and another factor; else None."""
    if not all(isinstance(s, int) for s in (size, have, more)) or size % have:
        return None
    left = size // have
    return left if 1 < left < more and more % left == 0 else None


def _group(
    result: list[Axis], sizes: list[Any], where: list[int], axes: list[Axis], node: fx.Node
) -> None:
    """Distribute the atoms of `axes` over the input's axes `where`, which have `sizes`."""
    atoms = [atom for axis in axes for atom in flat(axis)]
    if len(where) > 1 and len(atoms) == 1:
        atoms[0].parts = tuple(Atom(s) for s in sizes)
        atoms = list(atoms[0].parts)
    for at, size in zip(where, sizes):
        taken: list[Atom] = []
        while atoms and not (taken and same_size(math.prod(t.size for t in taken), size)):
            atom = atoms.pop(0)
            left = _part(size, math.prod(t.size for t in taken), atom.size)
            if left is not None:  # its first part belongs to this axis, the rest to the next
                atom.parts = Atom(left), Atom(atom.size // left)
                atom, rest = atom.parts
                atoms.insert(0, rest)
            taken.append(atom)
        if not same_size(math.prod(t.size for t in taken), size):
            raise NoMatch("a reshape that cannot be followed", node)
        result[at] = tuple(taken)
    if atoms:
        raise NoMatch("a reshape that cannot be followed", node)
