"""The items of an index, as in `x[...]`, and of arguments that may be one item or several."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from .fakes import fake, same_size
from .names import Call
from .view import GraphView
from .vocabulary import PARTS, PICKS


def listed(x: Any) -> list[Any]:
    """Return the items of a tuple or list, or a list with anything else as its only item."""
    return list(x) if isinstance(x, (tuple, list)) else [x]


def sole(x: Any) -> Any:
    """Return the item of a tuple or list of one, and anything else unchanged."""
    return x[0] if isinstance(x, (tuple, list)) and len(x) == 1 else x


def items_of(index: Any) -> tuple[Any, ...]:
    """Return the items of an index, which may be a single item."""
    return index if isinstance(index, tuple) else (index,)


def expanded_index(index: Any, ndim: int) -> list[Any] | None:
    """Return an index as one item for each of `ndim` axes (and None for new axes); None where it has too many."""
    items = list(items_of(index))
    missing = ndim - sum(i is not None and i is not Ellipsis for i in items)
    if missing < 0:
        return None
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    return items[:at] + [slice(None)] * missing + items[at + 1 :]


def is_full(item: Any) -> bool:
    """Whether an item selects its whole axis, or belongs to no axis."""
    return item is None or item is Ellipsis or (isinstance(item, slice) and item == slice(None))


def only_slices(index: Any) -> bool:
    """Whether an index consists of numbers and slices, and new axes, alone."""
    return all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in items_of(index))


class Taken(NamedTuple):
    """x[items], with one item for each axis of x, and None for new axes. passed: the node that splits x, if this is one
    of its pieces."""

    x: fx.Node
    items: list[Any]
    passed: tuple[fx.Node, ...] = ()

    @property
    def origin(self) -> tuple[int | None, ...]:
        """For each axis of the result its axis of x, or None if it is new, where items are numbers and slices."""
        axes = iter(range(len(self.items)))
        before = [None if item is None else next(axes) for item in self.items]
        return tuple(a for a, i in zip(before, self.items) if i is None or isinstance(i, slice))


_TAKES = PICKS | {"unsqueeze", "squeeze"}


def taken(view: GraphView, call: Call) -> Taken | None:
    """Return a call as an indexing of a tensor: it selects parts of some axes, or adds axes of size 1. None for other
    calls, and where sizes are not known."""
    if call.name not in _TAKES:
        return None
    x = call.get("input")
    if not view.is_tensor(x):
        return _piece(view, x, call) if call.name == "getitem" else None
    shape = view.shape(x)
    n = len(shape)
    match call.name:
        case "getitem":
            items = expanded_index(call["index"], n)
            return None if items is None else Taken(x, items)
        case "unsqueeze":
            at = call["dim"] % (n + 1)
            return Taken(x, [*[slice(None)] * at, None, *[slice(None)] * (n - at)])
        case "squeeze":
            dims = listed(call["dim"]) if call.get("dim") is not None else range(n)
            gone = [d % n for d in dims if n and same_size(shape[d], 1)]
            return Taken(x, [0 if d in gone else slice(None) for d in range(n)])
        case "index_select" if not view.shape(call["index"]):
            return None  # with a 0-d index it keeps an axis of size 1, unlike x[index]
        case "select" | "index_select":
            item = call["index"]
        case "narrow":
            start, length = call["start"], call["length"]
            if not (isinstance(start, int) and isinstance(length, int)) or start < 0:
                return None
            item = slice(start, start + length)
        case _:  # slice
            item = slice(call.get("start"), call.get("end"), call.get("step", 1))
    return Taken(x, _only(call.get("dim", 0) % n, item, n))


def _piece(view: GraphView, pieces: Any, call: Call) -> Taken | None:
    """Return one result of split, chunk, tensor_split or unbind as an indexing. Sizes may be symbols."""
    split = view.call(pieces)
    if split.name not in PARTS or type(call["index"]) is not int:
        return None
    x = split["input"]
    n, which = len(view.shape(x)), call["index"] % len(fake(pieces))
    dim = split.get("dim", 0) % n
    item: Any = which
    if split.name != "unbind":
        sizes = [piece.shape[dim] for piece in fake(pieces)]
        item = slice(sum(sizes[:which]), sum(sizes[: which + 1]))
    return Taken(x, _only(dim, item, n), (pieces,))


def _only(dim: int, item: Any, n: int) -> list[Any]:
    return [item if d == dim else slice(None) for d in range(n)]
