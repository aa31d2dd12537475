"""Every spelling of "multiply and add up into scores": over an axis, or by row ids, segments, bags or prefix sums."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, flat, fresh
from ...graph.contraction import contraction, lettered
from ...graph.emit import Emitter, Make
from ...graph.fakes import same_size, static_size
from ...graph.indices import items_of, listed
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.values import is_parameter
from ...graph.view import GraphView
from ..chains.family import may_be_above
from .additions import ADDITIONS, accumulator_of, addition, check_one_row_each
from .contributions import Contributions
from .gathers import LOOKUPS, Gather, gather_of, is_transposed, table_gradient
from .scored import Scores
from .ways import OfPairs, OfRows, contributions, contributions_among, multiplied


def scores_of(view: GraphView, node: fx.Node) -> Scores | None:
    """The node as scores; None if nothing is gathered above it. Raises NoMatch if it is nearly a match."""
    call = view.call(node)
    read = _READERS.get(call.name)
    if read is None or not view.is_tensor(node):
        return None
    if not may_be_above(view, (node, *node.all_input_nodes), SIGNS):
        return None
    found = read(view, node, call)
    if found is None:
        return None
    if not found.w.has_weights:
        if found.w.gather.features or is_parameter(view, found.w.gather.source):
            return None  # embeddings, or messages along the edges of a graph
        raise NoMatch("there are no document weights: the gathered entries are only added up", node)
    return found


def _sum(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    x, dim = call["input"], call.get("dim")
    if not view.is_tensor(x):
        return None
    axes = fresh(view.shape(x))
    n = len(axes)
    reduced = {d % n for d in (range(n) if dim is None else listed(dim))}
    ones = [()] if call.get("keepdim", False) else []
    out = [kept for a, axis in enumerate(axes) for kept in (ones if a in reduced else [axis])]
    try:
        w = contributions(view, x, axes, node, out=out)
    except OfRows as rows:
        raise _dense(rows, reduced == {n - 1}) from None
    return None if w is None else _padded(node, w, out)


def _dense(rows: OfRows, summed: bool) -> NoMatch:
    """The reason for rows with separate factors: dense retrieval if features are summed, else nothing to report."""
    return NoMatch(rows.reason, rows.node) if summed and not isinstance(rows, OfPairs) else rows


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
    # An axis of size 1 does not get the atoms of its letter, which has another size in another operand.
    axes = [
        [axis and by_letter[letter] for letter, axis in zip(own, shape)]
        for own, shape in zip(letters, shapes)
    ]
    # Contributions have all axes of the other operands. Columns times a matrix with further axes are a linear.
    within = [
        (x, own)
        for x, own in zip(operands, axes)
        if all(not axis or axis in own for other in axes for axis in other)
    ]
    out_axes = [by_letter[letter] for letter in out]
    among = contributions_among(view, within, node, out=out_axes)
    if among is None:
        return None
    mine, w = among
    for other, shape in zip(operands, axes):
        if shape is within[mine][1]:
            continue
        try:
            w = multiplied(view, w, "mul", other, shape, node)
        except OfRows as rows:
            kept = {a for axis in out_axes for a in flat(axis)}
            raise _dense(rows, not {*w.queries} <= kept) from None
    return _padded(node, w, out_axes)


def _padded(node: fx.Node, w: Contributions, out: Sequence[Axis]) -> Scores | None:
    """A sum with a result of the axes `out`. The documents are the atoms of the entries that it keeps."""
    kept = [a for axis in out for a in flat(axis)]
    docs = tuple(a for a in kept if a not in w.queries)
    if not {*w.queries} <= {*kept}:
        if len(w.gather.queries) > 1:
            return None
        raise NoMatch("it adds up over the queries", node)
    if len(docs) == len(w.entries):
        return None  # a single entry is a product
    return Scores(node=node, w=w, axes=tuple(out), queries=w.queries, docs=docs)


def _added(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    added = addition(view, node, call)
    if added is None:
        src = call.get("src") if call.name == "scatter_add" else None
        unknown = view.is_tensor(src) and None in map(static_size, view.shape(src))
        # scatter_add only reads the part of src that has an index.
        if unknown and _are_contributions(view, src, fresh(view.shape(src)), node):
            raise NoMatch("nothing says that there are as many rows as contributions", node)
        return None
    if added.how != "sum":
        if added.how is not None and _are_contributions(
            view, added.source.node, added.source.axes, node
        ):
            raise NoMatch(f"scatter with {added.how!r}: only sums are inner products", node)
        return None
    w = contributions(view, added.source.node, added.source.axes, node)
    if w is None or (w.gather.features and not w.has_weights):
        return None  # messages along the edges of a graph
    queries, rows = {*w.queries}, added.rows
    if not w.same_for_all(view, rows):
        raise NoMatch("the rows differ from query to query", node)
    if not queries <= {*added.others}:
        if len(added.axes) == 1 < len(added.source.axes):
            return None  # all of them in one accumulator
        raise NoMatch("it adds up over the queries", node)
    if len(added.others) > len(queries):
        if not queries and len(added.source.axes) == 2:
            raise NoMatch("rows of features are added up, not weights of queries", node)
        raise NoMatch("the contributions have more than one axis beside the queries", node)
    check_one_row_each(view, node, added)
    whole, part = accumulator_of(view, node, call)
    if not isinstance(added.scale, (int, float)):
        raise NoMatch("the contributions are scaled by a number that is not known", node)
    return Scores(
        node=node, w=w.scaled(added.scale), axes=added.axes,
        queries=w.queries, docs=(added.docs,), entries=w.entries,
        rows=lambda e: w.placed(e, rows, [w.entries]), reads=((rows.node, node),),
        accumulator=whole, into=part,
    )  # fmt: skip


def _are_contributions(view: GraphView, x: fx.Node, axes: Sequence[Axis], node: fx.Node) -> bool:
    """Whether gathered weights are at the root of a source, even in a form that is not supported."""
    try:
        w = contributions(view, x, axes, node)
        return w is not None and (w.has_weights or not w.gather.features)
    except NoMatch:
        return True


def _bincount(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """bincount(rows, weights, minlength=N)[:N]: rows beyond N are counted and cut off."""
    if not view.is_tensor(call.get("weights")):
        return None
    axes = fresh(view.shape(call["weights"]))
    w = contributions(view, call["weights"], axes, node)
    if w is None or len(axes) != 1:
        return None
    rows, N = call["input"], call.get("minlength", 0)
    readers = list(view.readers(node))
    cut = view.call(readers[0] if len(readers) == 1 else None)
    exact = cut.name == "getitem" and cut["index"] in (slice(N), slice(0, N))
    if not isinstance(N, int) or not exact:
        raise NoMatch("the number of documents depends on the rows: cut it with [:minlength]", node)
    below: Callable[[Emitter, fx.Node], fx.Node] = lambda e, t: e.call(torch.lt, t, N)
    docs = (Atom(N),)
    return Scores(
        node=readers[0], axes=(docs,), queries=(), docs=docs, entries=flat(axes[0]),
        w=w.then(node).times("keep", Placed(rows, node, tuple(axes)), below),
        rows=lambda e: e.call(torch.where, below(e, rows), rows, 0), reads=((rows, node),),
    )  # fmt: skip


def _segment_reduce(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    data = call["data"]
    axes = fresh(view.shape(data))
    w = contributions(view, data, axes, node)
    if w is None:
        return None
    if call["reduce"] != "sum":
        raise NoMatch(f"segments are reduced by {call['reduce']!r}, not added up", node)
    if call.get("initial") not in (None, 0, 0.0):
        raise NoMatch(f"the segments' sums start at {call['initial']}, not at zero", node)
    lengths, offsets = call.get("lengths"), call.get("offsets")
    given = offsets if lengths is None else lengths
    if (
        call.get("indices") is not None
        or not view.is_tensor(given)
        or len(view.shape(given)) != 1
        or call.get("axis", 0) != 0
    ):
        raise NoMatch("the segments are laid out in a way that is not followed", node)

    def starts(e: Emitter) -> fx.Node:
        if lengths is None:
            return offsets
        ends = e.method("cumsum", lengths, 0)
        return e.call(torch.nn.functional.pad, ends, (1, 0))

    rule = "segments" if lengths is None else "lengths"
    return _segments(view, node, w, axes, 0, starts, rule, ((given, node),))


def _segments(
    view: GraphView,
    node: fx.Node,
    w: Contributions,
    axes: Sequence[Axis],
    axis: int,
    offsets: Make,
    rule: str,
    reads: tuple[tuple[fx.Node, fx.Node], ...],
) -> Scores:
    """Sums of neighbouring entries. `axis` is that of the entries in the contributions, and that of the documents in
    the result."""
    others = {a for at, one in enumerate(axes) if at != axis for a in flat(one)}
    if others != {*w.queries}:
        raise NoMatch("the segments are laid out in a way that is not followed", node)
    docs = (Atom(view.shape(node)[axis]),)
    return Scores(
        node=node, w=w, axes=(*axes[:axis], docs, *axes[axis + 1 :]), queries=w.queries, docs=docs,
        entries=flat(axes[axis]), offsets=offsets, rule=rule, reads=reads,
    )  # fmt: skip


def _embedding_bag(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    ids, table, offsets = call["input"], call["weight"], call.get("offsets")
    if node.target is torch.embedding_bag or not view.is_tensor(table):
        return None
    size = view.shape(table)
    if len(size) != 2 or not view.is_tensor(ids):
        return None
    values = call.get("per_sample_weights")
    known = is_transposed(view, table) or same_size(size[1], 1)
    if not known and is_parameter(view, table):
        return None
    if call.get("mode") != "sum" or values is None:
        if known:
            raise NoMatch("bags are not weighted sums", node)
        return None
    if call.get("max_norm") is not None or call.get("padding_idx") is not None:
        raise NoMatch("the bags renormalise or skip entries", node)
    entries, queries = fresh(view.shape(ids)), fresh(size[1:])
    n = len(entries)
    gather = Gather(
        node, table, ids, 0, (None, n), tuple(range(n)), (n,), not known, table_gradient(call)
    )
    w = Contributions(gather, (*entries, *queries), (node,))
    w = multiplied(view, w, "mul", values, entries, node)
    if n == 2:
        axes = (entries[0], *queries)
        return Scores(node=node, w=w, axes=axes, queries=w.queries, docs=flat(entries[0]))
    if not view.is_tensor(offsets):
        return None

    def starts(e: Emitter) -> fx.Node:
        if call.get("include_last_offset", False):
            return offsets
        last = e.method("new_full", offsets, (1,), e.size(ids, 0))
        return e.call(torch.cat, (offsets, last))

    return _segments(view, node, w, w.axes, 0, starts, "bags", ((offsets, node),))


def _differences(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """sums[offsets].diff(), or the same as a difference of slices of sums[offsets] or of the offsets, where `sums` is 0
    followed by the prefix sums of the contributions."""
    if call.name == "diff":
        sides, axis = [call["input"]], call.get("dim", -1) % len(view.shape(node))
        plain = (call.get("n", 1), call.get("prepend"), call.get("append")) == (1, None, None)
        whole = call["input"]
    else:
        sides, axis, plain = [*call.both_ways[0]], 0, call.get("alpha", 1) == 1
        whole = _neighbours(view, *sides)
    found = [gather_of(view, x) for x in ([whole] if whole is not None else sides)]
    looked_up = [at for at in found if at is not None and at.gradient is None and not at.part]
    if not plain or len(looked_up) < len(found) or len({at.source for at in looked_up}) > 1:
        return None
    at = looked_up[0]
    offsets, reader = at.index, at.node
    if whole is None:
        axis, reader = at.dim, offsets
        offsets = _neighbours(view, *(at.index for at in looked_up))
    if offsets is None or axis != at.dim or len(view.shape(offsets)) != 1:
        return None
    sums = at.source
    prefix, made = _behind_a_zero(view, sums, axis, at.node)
    running = view.call(prefix)
    if running.name != "cumsum":
        return None
    axes = fresh(view.shape(prefix))
    w = contributions(view, running["input"], axes, prefix)
    if w is None:
        return None
    if running["dim"] % len(axes) != axis:
        raise NoMatch("it adds up over the queries", prefix)
    for n in (prefix, sums, *made, at.node, *sides):
        w = w.then(n)

    def from_the_front(e: Emitter) -> fx.Node:
        """The offsets without negative numbers, which count from the end in an index, but not in an offset."""
        size: Any = view.shape(sums)[axis]
        if not isinstance(size, int):
            size = e.call(operator.add, e.method("numel", w.ids(e, [w.entries])), 1)
        negative = e.call(operator.lt, offsets, 0)
        return e.call(torch.where, negative, e.call(operator.add, offsets, size), offsets)

    reads = ((offsets, reader),)
    return _segments(view, node, w, axes, axis, from_the_front, "differences", reads)


def _neighbours(view: GraphView, ends: Any, starts: Any) -> fx.Node | None:
    """x, if the arguments are x[1:] and x[:-1]; else None."""
    a, b = view.call(ends), view.call(starts)
    ahead, behind = a.get("index") == slice(1, None), b.get("index")
    if not ahead or behind not in (slice(None, -1), slice(0, -1)):
        return None
    return a["input"] if a["input"] is b["input"] else None


def _behind_a_zero(
    view: GraphView, sums: fx.Node, axis: int, reader: fx.Node
) -> tuple[Any, tuple[fx.Node, ...]]:
    """(x, nodes that assign it), where `sums` is cat([0, x], axis), or x padded by one zero at the front of that axis,
    or zeros to which x is assigned after the first entry. (None, ()) for other tensors."""
    seen, ndim = view.value(sums, reader), len(view.shape(sums))
    call = view.call(seen)
    if seen is None:
        return None, ()
    match call.name:
        case "setitem" if call["input"] is sums and view.const(sums) == 0:
            rest = (*[slice(None)] * axis, slice(1, None))
            if view.value(sums, seen) is sums and items_of(call["index"]) == rest:
                return call["value"], (seen,)
        case "cat" if seen is sums and len(call["tensors"]) == 2:
            zero, x = call["tensors"]
            first = view.const(zero, sums) == 0 and same_size(view.shape(zero)[axis], 1)
            if first and call.get("dim", 0) % ndim == axis:
                return x, ()
        case "pad" if seen is sums and not call.get("value"):
            front = [0, 0] * (ndim - 1 - axis) + [1]  # of the last axis first
            pads = list(call["pad"])
            if pads == front + [0] * (len(pads) - len(front)):
                return call["input"], ()
    return None, ()


_READERS: dict[str, Callable[[GraphView, fx.Node, Call], Scores | None]] = {
    **dict.fromkeys("matmul mm bmm vecdot einsum".split(), _product),
    "sum": _sum,
    **dict.fromkeys(("sub", "diff"), _differences),
    **dict.fromkeys(ADDITIONS, _added),
    "bincount": _bincount,
    "segment_reduce": _segment_reduce,
    "embedding_bag": _embedding_bag,
}
ANCHORS = frozenset(_READERS)
SIGNS = LOOKUPS | {"embedding_bag"}  # one of these is above all scores
