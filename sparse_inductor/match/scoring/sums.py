"""Every spelling of "multiply and add up over an axis": sums, einsum, matrix products, vecdot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...graph.contraction import contraction, lettered
from ...graph.indices import listed
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.view import GraphView, same_size
from .contributions import SEVERAL, OfRows, Weighted, times_lettered
from .gathers import queries_of
from .scored import Scores
from .weighted import gathered_among, preference, weighted

Letters = Sequence[str]


def _sum(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    try:
        w = weighted(view, call["input"], node, queries_of)
    except OfRows as rows:
        raise _dense(rows) if call.get("dim") in (-1, [-1], (-1,)) else rows from None
    return None if w is None else _summed(node, w, call.get("dim"), call.get("keepdim", False))


def _dense(rows: OfRows) -> NoMatch:
    """Why a product of rows with vectors that is summed up is no scoring."""
    return NoMatch(rows.reason, rows.node)


def _summed(node: fx.Node, w: Weighted, dim: Any, keepdim: bool) -> Scores | None:
    n = len(w.shape) + w.lead
    dims = range(n) if dim is None else listed(dim)
    reduced = {d % n - w.lead for d in dims}
    if w.lead and min(reduced) <= 0:
        return None
    n -= w.lead
    kept = tuple(a for a in range(n) if a not in reduced)
    return _reduction(node, w, kept, sorted(reduced) if keepdim else ())


def _reduction(
    node: fx.Node, w: Weighted, kept: tuple[int, ...], units: Sequence[int] = ()
) -> Scores | None:
    """units: the places of the result that have size 1 beside the kept axes."""
    if w.batch is not None and w.batch not in kept:
        if not same_size(w.shape[w.batch], 1):
            raise NoMatch("it adds up over the queries", node)
        w = w.of_one_query()
    docs = [a for a in kept if a != w.batch]
    if not docs:
        return None  # a single document: a dot product
    if all(same_size(s, 1) for a, s in enumerate(w.shape) if a not in kept):
        return None
    order: list[int | None] = list(kept)
    for place in units:
        order.insert(place, None)
    batch = None if w.batch is None else order.index(w.batch)
    return Scores(node, w, math.prod(w.shape[a] for a in docs), batch, kept)


def _labelled(
    view: GraphView,
    node: fx.Node,
    operands: Sequence[Any],
    letters: Sequence[Letters],
    out: Letters,
) -> Scores | None:
    """A product of operands with lettered axes, summed over the letters that `out` lacks."""
    found = gathered_among(operands, lambda x: weighted(view, x, node, queries_of))
    if not found:
        return None
    mine, w = min(found, key=lambda f: preference(view, f[1]))
    xs = letters[mine]
    if len(set(xs)) != len(xs) or len(xs) != len(w.shape) + w.lead:
        return None
    if w.lead:
        queries = xs[: w.lead + 1]
        others = {c for i, ys in enumerate(letters) if i != mine for c in ys}
        if others & {*queries} or not {*queries} <= {*out}:
            return None
        if list(out[: w.lead + 1]) != list(queries):
            raise NoMatch(SEVERAL, node)
        xs, out = xs[w.lead :], out[w.lead :]
    for i, other in enumerate(operands):
        if i == mine:
            continue
        try:
            timed = times_lettered(view, node, w, xs, other, letters[i])
        except OfRows as rows:
            raise rows if w.batch is None or xs[w.batch] in out else _dense(rows) from None
        if timed is None:
            return None
        w = timed
    kept = tuple(xs.index(c) for c in out if c in xs)
    units = [p for p, c in enumerate(out) if c not in xs]
    return _reduction(node, w, kept, units)


def _einsum(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    found = lettered(view, call)
    return None if found is None else _labelled(view, node, *found)


def _product(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """A product of two tensors, whatever it is called."""
    found = contraction(view, node)
    if found is None or found.bias is not None or found.scale != 1:
        return None
    operands = [o.node for o in found.operands]
    # An axis of one element that is broadcast stands for itself.
    letters = [
        [c if c is not None else f"{i}.{at}" for at, c in enumerate(o.axes)]
        for i, o in enumerate(found.operands)
    ]
    return _labelled(view, node, operands, letters, [c for c in found.axes if c is not None])


READERS: dict[str, Callable[[GraphView, fx.Node, Call], Scores | None]] = {
    **dict.fromkeys("matmul mm bmm vecdot".split(), _product),
    "einsum": _einsum,
    "sum": _sum,
}
