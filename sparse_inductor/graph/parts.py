"""Parts of an axis, and what is put together only to be taken apart again, or the other way round.

Each function names the tensor that such a detour leads to, and the nodes that are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .indices import expanded_index
from .names import Call
from .shapes import order_of, piece_of
from .view import GraphView, fake, same_size, same_sizes, static_size
from .vocabulary import COPIES, PARTS, REGROUPS


def entry_of_axis(
    view: GraphView, call: Call
) -> tuple[fx.Node, int, int, tuple[fx.Node, ...]] | None:
    """(x, dim, index, nodes passed over) where a call takes one entry of one axis of x and all of the others: select,
    an index of one number, one result of unbind. None for anything else."""
    extra: tuple[fx.Node, ...] = ()
    x = call.get("input")
    if call.name == "getitem" and not view.is_tensor(x):
        pieces = view.call(x)
        if pieces is None or pieces.name != "unbind":
            return None
        index, dim, extra = call["index"], pieces.get("dim", 0), (x,)
        x = pieces["input"]
    elif call.name == "select":
        index, dim = call["index"], call["dim"]
    elif call.name == "getitem":
        items = expanded_index(call["index"], len(view.shape(x)))
        if items is None or None in items:
            return None
        picked = [(d, i) for d, i in enumerate(items) if i != slice(None)]
        if len(picked) != 1 or type(picked[0][1]) is not int:
            return None
        dim, index = picked[0]
    else:
        return None
    return (x, dim % len(view.shape(x)), index, extra) if type(index) is int else None


def part_of_axis(
    view: GraphView, node: fx.Node, call: Call
) -> tuple[Call, tuple[fx.Node, ...]] | None:
    """An axis split in two and one entry of one half taken, as the strided slice of the axis that it is.

    `z.view(B, S, 2, N)[:, :, 0]` is `z[..., :N]`; `z.unflatten(-1, (N, 2)).unbind(-1)[1]` is `z[..., 1::2]`; the halves
    may be brought to another place before, as by `.permute(2, 0, 1, 3)[0]`. Returns the slice and the nodes passed
    over, the nearest first; None for anything else.
    """
    entry = entry_of_axis(view, call)
    if entry is None:
        return None
    x, dim, index, extra = entry
    split = view.call(x)
    while split is not None and view.value(x, extra[-1] if extra else node) is x:
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
    if split is None or split.name not in ("view", "unflatten"):
        return None
    if view.value(x, extra[-1] if extra else node) is not x or not view.is_tensor(split["input"]):
        return None
    before, after = view.shape(split["input"]), view.shape(x)
    if len(after) != len(before) + 1:
        return None
    for axis in (dim, dim - 1):  # the axis that was split: its halves are `axis` and `axis + 1` now
        if not 0 <= axis < len(before):
            continue
        halves = after[axis], after[axis + 1]
        rest = (*after[:axis], *after[axis + 2 :])
        others = (*before[:axis], *before[axis + 1 :])
        if not all(type(s) is int for s in (*halves, before[axis])) or before[axis] == 1:
            continue
        if halves[0] * halves[1] != before[axis] or not same_sizes(rest, others):
            continue
        at = index % after[dim]
        if dim == axis:
            part = {"start": at * halves[1], "end": (at + 1) * halves[1], "step": 1}
        else:
            part = {"start": at, "end": before[axis], "step": halves[1]}
        return Call("slice", {"input": split["input"], "dim": axis, **part}), (*extra, x)
    return None


def _part(
    view: GraphView, call: Call
) -> tuple[fx.Node, int, int | slice, tuple[fx.Node, ...]] | None:
    """(x, dim, which, nodes passed over) where a call takes an entry or neighbouring ones of one axis of x."""
    if (entry := entry_of_axis(view, call)) is not None:
        return entry
    x, start, stop = call.get("input"), None, None
    extra: tuple[fx.Node, ...] = ()
    if call.name == "getitem" and not view.is_tensor(x):
        pieces = view.call(x)
        if pieces is None or pieces.name not in PARTS or type(call["index"]) is not int:
            return None
        extra, x, dim = (x,), pieces["input"], pieces.get("dim", 0)
        piece = piece_of(extra[0], dim, call["index"] % len(fake(extra[0])))
        start, stop = piece.start, piece.stop
    elif call.name == "getitem":
        items = expanded_index(call["index"], len(view.shape(x))) or ()
        parts = [(d, i) for d, i in enumerate(items) if i != slice(None)]
        if len(parts) != 1 or not isinstance(part := parts[0][1], slice):
            return None
        dim, start, stop = parts[0][0], part.start, part.stop
        if part.step not in (None, 1):
            return None
    elif call.name == "narrow":
        dim, start, length = call["dim"], call["start"], call["length"]
        if type(start) is not int or type(length) is not int:
            return None
        stop = start + length
    else:
        return None
    n = len(view.shape(x))
    size = view.shape(x)[dim % n]
    start, stop = 0 if start is None else start, size if stop is None else stop
    if any(isinstance(b, fx.Node) for b in (start, stop)):
        return None
    if isinstance(size, int) and type(start) is int and type(stop) is int:
        start, stop, _ = slice(start, stop).indices(size)
    return x, dim % n, slice(start, stop), extra


def untaken(
    view: GraphView, node: fx.Node, call: Call
) -> tuple[fx.Node, tuple[fx.Node, ...], Call | None] | None:
    """(x, nodes passed over, the view of x that it is) where a call takes out of a stack or cat one of the tensors that
    were put into it: `torch.stack((g, u))[0]` and `torch.cat((g, u), -1).chunk(2, -1)[0]` are g. None for others."""
    part = _part(view, call)
    if part is None:
        return None
    x, dim, which, extra = part
    joint = view.call(x)
    reader = extra[-1] if extra else node
    if joint is None or joint.name not in ("cat", "stack") or view.value(x, reader) is not x:
        return None
    tensors = joint["tensors"]
    if joint.get("dim", 0) % len(view.shape(x)) != dim or not isinstance(tensors, (tuple, list)):
        return None
    if not all(view.is_tensor(t) and view.dtype(t) == view.dtype(x) for t in tensors):
        return None
    if len({len(view.shape(t)) for t in tensors}) != 1:
        return None  # cat takes empty tensors of one axis beside all others
    if isinstance(which, int):
        if joint.name == "cat":
            return None
        return tensors[which], (*extra, x), None
    start: Any = 0
    for t in tensors:
        stop = start + (1 if joint.name == "stack" else view.shape(t)[dim])
        if same_size(which.start, start) and same_size(which.stop, stop):
            put = Call("unsqueeze", {"input": t, "dim": dim}) if joint.name == "stack" else None
            return t, (*extra, x), put
        start = stop
    return None


def entries_of(
    view: GraphView, tensors: Sequence[tuple[Any, fx.Node]]
) -> tuple[fx.Node, int, list[int], tuple[fx.Node, ...]] | None:
    """(x, dim, which, nodes passed over) where tensors, each with its reader, are entries of one axis of x."""
    found: list[tuple[fx.Node, int, int, tuple[fx.Node, ...]]] = []
    for t, reader in tensors:
        call = view.call(t)
        entry = (
            None if call is None or view.value(t, reader) is not t else entry_of_axis(view, call)
        )
        if entry is None:
            return None
        x, dim, index, extra = entry
        seen = view.value(x, extra[-1] if extra else t)
        size = static_size(view.shape(x)[dim])
        if seen is None or size is None:
            return None
        found.append((seen, dim, index % size, (t, *extra)))
    if len({f[:2] for f in found}) != 1:
        return None
    passed = tuple(dict.fromkeys(n for *_, extra in found for n in extra))
    return *found[0][:2], [f[2] for f in found], passed


def restacked(
    view: GraphView, node: fx.Node, call: Call
) -> tuple[Call, tuple[fx.Node, ...]] | None:
    """A stack of all entries of an axis, in their order, as the tensor itself with this axis in another place, and the
    nodes passed over: `torch.stack(x.unbind(1))` is x.movedim(1, 0). None for other calls."""
    if call.name != "stack" or not isinstance(call["tensors"], (tuple, list)):
        return None
    entries = entries_of(view, [(t, node) for t in call["tensors"]])
    if entries is None:
        return None
    x, dim, which, passed = entries
    if not same_size(view.shape(x)[dim], len(which)) or which != [*range(len(which))]:
        return None
    placed = {"input": x, "source": dim, "destination": call.get("dim", 0)}
    return Call("movedim", placed), passed


def undone(
    view: GraphView, node: fx.Node, call: Call
) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """A tensor that a reshape, together with those above it, gives its own shape again, and the nodes passed over, the
    nearest first: `h.unflatten(-1, (4, -1)).flatten(-2)` is h. None for other views."""
    extra: tuple[fx.Node, ...] = ()
    reader = node
    while call.name in REGROUPS | COPIES and not call.inplace:
        x = call["input"]
        if not view.is_tensor(x) or view.value(x, reader) is not x:
            return None
        if view.same_shape(x, node):
            return x, extra
        above = view.call(x)
        if above is None:
            return None
        extra, reader, call = (*extra, x), x, above
    return None
