"""One entry of a product with a stack of weights: einsum("bsd,edv->ebsv", x, w)[i] is the linear map x @ w[i].

Gate and up projections are often kept as one parameter [2, D, V], multiplied at once and taken apart afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from .contraction import Operand, contraction
from .emit import Emitter
from .gemm import Linear
from .graph import GraphView
from .shapes import entry_of_axis
from .values import uniform

__all__ = ["entry_of_stack"]

Make = Callable[[Emitter], fx.Node]


def entry_of_stack(view: GraphView, node: fx.Node) -> Linear | None:
    """The linear map that a node is, if it takes one of several that are computed together; else None."""
    call = view.call(node)
    entry = None if call is None else entry_of_axis(view, node, call)
    if entry is None:
        return None
    stack, dim, index, between = entry
    reader = between[-1] if between else node
    product = contraction(view, stack) if view.value(stack, reader) is stack else None
    if product is None or product.bias is not None or product.scale != 1:
        return None
    letter = product.axes[dim]
    out = [c for at, c in enumerate(product.axes) if at != dim]
    for x, w in ((product.a, product.b), (product.b, product.a)):
        if letter is None or letter not in w.axes or x.written or w.written:
            continue
        take_x, x_axes = _entry_of(view, x, letter, index)
        take_w, w_axes = _entry_of(view, w, letter, index)
        reduced = [c for c in w_axes if c in x_axes and c not in out]
        kept = [c for c in w_axes if c not in x_axes and c in out]
        if len(w_axes) != 2 or len(reduced) != 1 or len(kept) != 1:
            continue
        order = [reduced[0] if c == kept[0] else c for c in out if c is not None]
        if len(order) != len(out) or sorted(order) != sorted(x_axes):
            continue
        weight_order = [w_axes.index(c) for c in (kept[0], reduced[0])]
        within = tuple(dict.fromkeys((*product.nodes, stack, *reversed(between))))
        return Linear(
            node,
            x.node,
            w.node,
            out.index(kept[0]),
            _permuted(take_x, [x_axes.index(c) for c in order]),
            _permuted(take_w, weight_order),
            within=within,
        )
    return None


def _entry_of(view: GraphView, o: Operand, letter: str, index: int) -> tuple[Make, list[str]]:
    """What makes one entry of an operand, axes of one element taken off, and the letters that it has left."""
    at = [d for d, c in enumerate(o.axes) if c == letter]
    if at and uniform(view, o.node, len(o.axes) - at[0], o.reader):
        index = 0  # repeated for every entry
    single = [d for d, c in enumerate(o.axes) if c is None]

    def take(e: Emitter) -> fx.Node:
        t = o.node
        for d in sorted((*at, *single), reverse=True):
            t = e.method("select", t, d, index if d in at else 0)
        return t

    return take, [c for c in o.axes if c is not None and c != letter]


def _permuted(make: Make, order: list[int]) -> Make:
    return lambda e: e.permuted(make(e), order)
