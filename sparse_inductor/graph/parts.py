"""Parts of an axis, and pairs of calls that cancel, such as a cat that is split again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from .axes import Atom, regrouped
from .fakes import same_size, static_size
from .indices import taken
from .names import Call
from .no_match import if_matched
from .shapes import order_of
from .view import GraphView
from .vocabulary import COPIES, PICKS, REGROUPS


class Part(NamedTuple):
    """A part of one axis of x: an entry (`which` is a number), neighbouring entries (a slice), or several parts in a
    given order (a list). passed: the nodes that select it from x."""

    x: fx.Node
    dim: int
    which: Any
    passed: tuple[fx.Node, ...]


def part_of(view: GraphView, call: Call) -> Part | None:
    """Return the part of one axis that a call selects, an entry or neighbouring entries; None for any other call."""
    found = taken(view, call)
    if found is None or None in found.items:
        return None
    parts = [(d, i) for d, i in enumerate(found.items) if i != slice(None)]
    if len(parts) != 1:
        return None
    dim, which = parts[0]
    if isinstance(which, slice) and which.step in (None, 1):
        size = view.shape(found.x)[dim]
        start = 0 if which.start is None else which.start
        stop = size if which.stop is None else which.stop
        if any(isinstance(b, fx.Node) for b in (start, stop)):
            return None
        if isinstance(size, int) and type(start) is int and type(stop) is int:
            start, stop, _ = slice(start, stop).indices(size)
        return Part(found.x, dim, slice(start, stop), found.passed)
    return Part(found.x, dim, which, found.passed) if type(which) is int else None


def entry_of_axis(view: GraphView, call: Call) -> Part | None:
    """As `part_of`, for a single entry."""
    found = part_of(view, call)
    return found if found is not None and isinstance(found.which, int) else None


def parts_of(view: GraphView, tensors: Sequence[tuple[Any, fx.Node]]) -> Part | None:
    """Return the parts that tensors, each with its reader, are; None if they are not of one axis of one tensor."""
    found: list[Part] = []
    for t, reader in tensors:
        part = part_of(view, view.call(t)) if view.value(t, reader) is t else None
        seen = None if part is None else view.value(part.x, [t, *part.passed][-1])
        if part is None or seen is None:
            return None
        found.append(part._replace(x=seen, passed=(t, *part.passed)))
    if len({(part.x, part.dim) for part in found}) != 1:
        return None
    passed = tuple(dict.fromkeys(n for part in found for n in part.passed))
    return Part(found[0].x, found[0].dim, [part.which for part in found], passed)


def entries_of(view: GraphView, tensors: Sequence[tuple[Any, fx.Node]]) -> Part | None:
    """As `parts_of`, where each part is one entry, counted from the start, and the size of the axis is known."""
    found = parts_of(view, tensors)
    size = None if found is None else static_size(view.shape(found.x)[found.dim])
    if found is None or size is None or not all(isinstance(i, int) for i in found.which):
        return None
    return found._replace(which=[i % size for i in found.which])


class Detour(NamedTuple):
    """A call returns `tensor` itself, or a view of it (`shape_op`): the nodes in `passed` cancel."""

    tensor: fx.Node
    passed: tuple[fx.Node, ...]
    shape_op: Call | None = None


_DETOURS = REGROUPS | COPIES | PICKS | {"stack"}


def detour(view: GraphView, node: fx.Node, call: Call) -> Detour | None:
    """Find calls above a node that cancel together with its own call; None if there are none."""
    if call.name not in _DETOURS:
        return None
    for find in (_undone, _untaken, _split_and_taken, _restacked):
        if (found := find(view, node, call)) is not None:
            return found
    return None


def _split_and_taken(view: GraphView, node: fx.Node, call: Call) -> Detour | None:
    """Return an entry of one half of an axis that was split in two, as a strided slice of the whole axis.

    `z.view(B, S, 2, N)[:, :, 0]` is `z[..., :N]`; `z.unflatten(-1, (N, 2)).unbind(-1)[1]` is `z[..., 1::2]`. The axes
    may be permuted in between, as in `.permute(2, 0, 1, 3)[0]`.
    """
    entry = entry_of_axis(view, call)
    if entry is None:
        return None
    x, dim, index, extra = entry
    split = view.call(x)
    while view.value(x, extra[-1] if extra else node) is x:
        order = order_of(split, len(view.shape(x)))
        if split.name not in COPIES and order is None:
            break
        if order is not None:
            left = [d for after, d in enumerate(order) if after != dim]
            if left != sorted(left):
                return None
            dim = order[dim]
        extra, x = (*extra, x), split["input"]
        split = view.call(x)
    if split.name not in ("view", "unflatten"):
        return None
    if view.value(x, extra[-1] if extra else node) is not x or not view.is_tensor(split["input"]):
        return None
    before, after = view.shape(split["input"]), view.shape(x)
    atoms = [Atom(size) for size in after]
    axes = if_matched(regrouped, before, after, [(atom,) for atom in atoms], x) or []
    axis = next((d for d, axis in enumerate(axes) if len(axis) == 2 and atoms[dim] in axis), None)
    if axis is None or len(after) != len(before) + 1:
        return None
    outer, inner = axes[axis]
    if not all(type(a.size) is int for a in (outer, inner)):
        return None
    at, size = index % after[dim], inner.size
    rows = slice(at * size, (at + 1) * size, 1)
    rows = rows if atoms[dim] is outer else slice(at, before[axis], size)
    part = {"dim": axis, "start": rows.start, "end": rows.stop, "step": rows.step}
    return Detour(split["input"], (*extra, x), Call("slice", {"input": split["input"], **part}))


def _untaken(view: GraphView, node: fx.Node, call: Call) -> Detour | None:
    """Return the tensor that is selected from a stack or cat: `torch.stack((g, u))[0]` and
    `torch.cat((g, u), -1).chunk(2, -1)[0]` are g."""
    part = part_of(view, call)
    if part is None:
        return None
    x, dim, which, extra = part
    joint = view.call(x)
    reader = extra[-1] if extra else node
    if joint.name not in ("cat", "stack") or view.value(x, reader) is not x:
        return None
    tensors = joint["tensors"]
    if joint.get("dim", 0) % len(view.shape(x)) != dim or not isinstance(tensors, (tuple, list)):
        return None
    if not all(view.is_tensor(t) and view.dtype(t) == view.dtype(x) for t in tensors):
        return None
    if len({len(view.shape(t)) for t in tensors}) != 1:
        return None  # cat also takes empty tensors with one axis
    if isinstance(which, int):
        if joint.name == "cat":
            return None
        return Detour(tensors[which], (*extra, x))
    start: Any = 0
    for t in tensors:
        stop = start + (1 if joint.name == "stack" else view.shape(t)[dim])
        if same_size(which.start, start) and same_size(which.stop, stop):
            put = Call("unsqueeze", {"input": t, "dim": dim}) if joint.name == "stack" else None
            return Detour(t, (*extra, x), put)
        start = stop
    return None


def _restacked(view: GraphView, node: fx.Node, call: Call) -> Detour | None:
    """Return a stack of all entries of an axis in order as the tensor with this axis moved: `torch.stack(x.unbind(1))`
    is x.movedim(1, 0)."""
    if call.name != "stack" or not isinstance(call["tensors"], (tuple, list)):
        return None
    entries = entries_of(view, [(t, node) for t in call["tensors"]])
    if entries is None:
        return None
    x, dim, which, passed = entries
    if not same_size(view.shape(x)[dim], len(which)) or which != [*range(len(which))]:
        return None
    placed = {"input": x, "source": dim, "destination": call.get("dim", 0)}
    return Detour(x, passed, Call("movedim", placed))


def _undone(view: GraphView, node: fx.Node, call: Call) -> Detour | None:
    """Return the tensor whose shape a reshape restores after earlier reshapes:
    `h.unflatten(-1, (4, -1)).flatten(-2)` is h."""
    extra: tuple[fx.Node, ...] = ()
    reader = node
    while call.name in REGROUPS | COPIES and not call.inplace:
        x = call["input"]
        if not view.is_tensor(x) or view.value(x, reader) is not x:
            return None
        if view.same_shape(x, node):
            return Detour(x, extra)
        extra, reader, call = (*extra, x), x, view.call(x)
    return None
