"""Every way to replace some elements by another value: where, masked_fill, and assignments to a part.

A product with a mask is not one of them: it turns infinities into NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import fx

from .fakes import same_size
from .indices import items_of
from .names import Call
from .view import GraphView

SELECTIONS = frozenset("where masked_fill setitem index_put index_fill".split())


@dataclasses.dataclass(frozen=True)
class Assigned:
    """The elements that an assignment `x[index] = value` writes. All others are kept."""

    index: Any

    def nodes(self) -> list[fx.Node]:
        """Return the nodes in the index."""
        found: list[fx.Node] = []
        fx.map_arg(self.items(), found.append)
        return found

    def items(self) -> list[Any]:
        return list(items_of(self.index))

    def by_axis(self, view: GraphView, ndim: int) -> list[tuple[Any, range]]:
        """Return every item of the index with the axes, out of `ndim`, that it covers."""
        spans = [(i, _span(view, i)) for i in self.items()]
        rest = ndim - sum(n for i, n in spans if i is not Ellipsis)
        out, axis = [], 0
        for item, n in spans:
            n = rest if item is Ellipsis else n
            out.append((item, range(axis, axis + n)))
            axis += n
        return out


class Selection(NamedTuple):
    """x where `keep` is true (with `negate`: where it is not), and `other` elsewhere.

    keep: a tensor that broadcasts to x, or the elements that an assignment writes (with `negate`).
    """

    x: Any
    keep: Any
    other: Any
    negate: bool = False


def selections(view: GraphView, call: Call) -> list[Selection]:
    """Return the readings of a call as a selection: two for where(), none for unrelated calls."""
    match call.name:
        case "where" if call.get("other") is not None:
            condition, a, b = call["condition"], call["input"], call["other"]
            return [Selection(a, condition, b), Selection(b, condition, a, negate=True)]
        case "masked_fill":
            return [Selection(call["input"], call["mask"], call["value"], negate=True)]
        case "setitem":
            index = call["index"]
        case "index_put" if not call.get("accumulate", False):
            index = tuple(slice(None) if i is None else i for i in call["indices"])
        case "index_fill":
            index = (slice(None),) * (call["dim"] % len(view.shape(call["input"]))) + (
                call["index"],
            )
        case _:
            return []
    x, value = call["input"], call.get("value", call.get("values"))
    mask = _mask(view, x, index, value)
    return [Selection(x, Assigned(index) if mask is None else mask, value, negate=True)]


def _mask(view: GraphView, x: Any, index: Any, value: Any) -> fx.Node | None:
    """Return the boolean tensor of an index that covers all earlier axes: `x[mask]`, `x[..., mask]`, `x[:, mask]`. None
    for other indices, and for a value with more than one element."""
    *before, mask = items_of(index)
    if not (view.is_tensor(mask) and view.dtype(mask) == torch.bool):
        return None
    if view.is_tensor(value) and not all(same_size(s, 1) for s in view.shape(value)):
        return None
    left = len(view.shape(x)) - len(view.shape(mask))
    every = before == [Ellipsis] or (len(before) == left and all(i == slice(None) for i in before))
    return mask if left >= 0 and every else None


def _span(view: GraphView, item: Any) -> int:
    if isinstance(item, fx.Node) and view.is_tensor(item) and view.dtype(item) == torch.bool:
        return len(view.shape(item))
    return 0 if item is None else 1
