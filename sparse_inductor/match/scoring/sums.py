"""Every spelling of "multiply and add up over an axis": sums, einsum, matrix products, vecdot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...graph.axes import Axis, flat, fresh
from ...graph.contraction import contraction, lettered
from ...graph.indices import listed
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.view import GraphView
from .contributions import Contributions, OfRows, contributions, contributions_among, multiplied
from .scored import Scores


def _sum(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    x, dim = call["input"], call.get("dim")
    if not view.is_tensor(x):
        return None
    axes = fresh(view.shape(x))
    n = len(axes)
    reduced = {d % n for d in (range(n) if dim is None else listed(dim))}
    try:
        w = contributions(view, x, axes, node)
    except OfRows as rows:
        raise rows.of_dense_vectors() if reduced == {n - 1} else rows from None
    ones = [()] if call.get("keepdim", False) else []
    out = [kept for a, axis in enumerate(axes) for kept in (ones if a in reduced else [axis])]
    return None if w is None else _padded(node, w, out)


def _product(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """A product of operands with lettered axes, summed over the letters that the result lacks."""
    operands: Sequence[Any]
    letters: Sequence[Sequence[str | None]]
    if call.name == "einsum":
        found = lettered(view, call)
        if found is None:
            return None
        operands, letters, out = found[0], [*map(list, found[1])], list(found[2])
    else:
        product = contraction(view, node)
        if product is None or product.bias is not None or product.scale != 1:
            return None
        operands = [o.node for o in product.operands]
        letters = [o.axes for o in product.operands]
        out = [c for c in product.axes if c is not None]
    if any(len({*own} - {None}) != len(own) - own.count(None) for own in letters):
        return None  # a diagonal
    shapes = [fresh(view.shape(x)) for x in operands]
    by_letter: dict[str | None, Axis] = {}
    for own, shape in zip(letters, shapes):
        for letter, axis in zip(own, shape):
            by_letter[letter] = by_letter.get(letter, ()) or axis
    # An axis of one element is none of its letter, which has more elements in another operand.
    axes = [
        [axis and by_letter[letter] for letter, axis in zip(own, shape)]
        for own, shape in zip(letters, shapes)
    ]
    among = contributions_among(view, list(zip(operands, axes)), node)
    if among is None:
        return None
    mine, w = among
    out_axes = [by_letter[letter] for letter in out]
    for i, other in enumerate(operands):
        if i == mine:
            continue
        more = [c for c, axis in zip(letters[i], axes[i]) if axis and axis not in axes[mine]]
        if more and (w.gather.features or any(c in letters[mine] for c in more)):
            return None  # rows that were looked up, through a linear; or gathered weights that repeat themselves
        if more:
            raise NoMatch(
                "a product with a matrix: the document weights have an axis of their own", node
            )
        try:
            w = multiplied(view, w, "mul", other, axes[i], node)
        except OfRows as rows:
            kept = {a for axis in out_axes for a in flat(axis)}
            raise rows if {*w.queries} <= kept else rows.of_dense_vectors() from None
    return _padded(node, w, out_axes)


def _padded(node: fx.Node, w: Contributions, out: Sequence[Axis]) -> Scores | None:
    """A sum whose result has the axes `out`: what it keeps of the entries are the documents."""
    kept = [a for axis in out for a in flat(axis)]
    docs = tuple(a for a in kept if a not in w.queries)
    if not {*w.queries} <= {*kept}:
        if len(w.gather.queries) > 1:
            return None
        raise NoMatch("it adds up over the queries", node)
    if not docs or len(docs) == len(w.entries):
        return None  # a single document is a dot product, a single entry a product
    return Scores(node=node, w=w, axes=tuple(out), queries=w.queries, docs=docs)


READERS: dict[str, Callable[[GraphView, fx.Node, Call], Scores | None]] = {
    **dict.fromkeys("matmul mm bmm vecdot einsum".split(), _product),
    "sum": _sum,
}
