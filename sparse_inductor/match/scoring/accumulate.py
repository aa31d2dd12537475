"""Every spelling of "add contributions up into scores" by row ids, segments, bags or prefix sums."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...graph.emit import Emitter
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.values import counting, uniform
from ...graph.view import GraphView, same_size
from . import sums
from .contributions import Factor, Weighted
from .gathers import Gather, gather_of, is_transposed, table_gradient
from .scored import Scores, accumulator_of, addition, check_rows, check_zero, part_of
from .weighted import weighted

Make = Callable[[Emitter], fx.Node]


def scores_of(view: GraphView, node: fx.Node) -> Scores | None:
    """The node as scores; None where nothing is gathered above it. Raises NoMatch where it nearly is."""
    call = view.call(node)
    read = None if call is None else _READERS.get(call.name)
    if call is None or read is None or not view.is_tensor(node):
        return None
    found = read(view, node, call)
    if found is None:
        return None
    if not found.w.has_weights:
        if found.features:
            return None  # embeddings, or messages along the edges of a graph
        raise NoMatch("there are no document weights: the gathered entries are only added up", node)
    return found


def _accumulated(
    view: GraphView, node: fx.Node, call: Call, source: Any, rows: Any, axis: int, make: Make
) -> Scores | None:
    """Contributions `source` with their entries on one axis, added to `rows` along `axis` of the accumulator."""
    w = weighted(view, source, node)
    if w is None:
        return None
    if len(view.shape(rows)) > 1 and len(view.shape(node)) == 1:  # all of them in one accumulator
        if w.batch is not None:
            return None
    elif len(w.entries) != 1:
        if w.batch is None and len(w.shape) == 2:
            raise NoMatch("rows of features are added up, not weights of queries", node)
        raise NoMatch("the contributions have more than one axis beside the queries", node)
    if w.batch == axis:
        raise NoMatch("it adds up over the queries", node)
    if w.batch is not None:
        check_rows(view.shape(node)[w.batch], w.shape[w.batch], node)
    check_zero(view, call["input"], node)
    return Scores(
        node, w, view.shape(node)[axis], w.batch, rows=make, reads=((rows, node),),
        accumulator=accumulator_of(view, call), into=part_of(view, call),
    )  # fmt: skip


def _added(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    added = addition(view, node, call)
    if added is None:
        return None
    rows, source, axis = added.rows, added.source, added.axis
    if added.how != "sum":
        if added.how is not None and _are_contributions(view, source, node):
            raise NoMatch(f"scatter with {added.how!r}: only sums are inner products", node)
        return None
    own, given = len(view.shape(rows)), len(view.shape(source))
    make: Make = lambda e: rows
    if added.queries is not None:
        every = counting(view, added.queries, node) == 2 and uniform(view, rows, 2, node)
        if not every or given != 2:
            return None
        make = lambda e: e.method("select", rows, 0, 0) if own == 2 else rows
    elif call.name.startswith("scatter"):
        if own > 2 or not view.same_shape(rows, source):
            return None
        if own == 2:
            if weighted(view, source, node) is None:
                return None
            if not uniform(view, rows, 1 + axis, node):
                raise NoMatch("the rows differ from query to query", node)
            make = lambda e: e.method("select", rows, 1 - axis, 0)
    elif view.dtype(rows) == torch.bool:
        return None
    elif given > 1 and len(view.shape(node)) == 1:
        if own != given:
            return None
        make = lambda e: e.method("reshape", rows, (-1,))
    found = _accumulated(view, node, call, source, rows, axis, make)
    if found is None or added.scale == 1:
        return found
    if not isinstance(added.scale, (int, float)):
        raise NoMatch("the contributions are scaled by a number that is not known", node)
    return dataclasses.replace(found, w=found.w.scaled(added.scale))


def _are_contributions(view: GraphView, x: Any, node: fx.Node) -> bool:
    """Whether gathered weights are at the root of `x`, in a form that is followed or not."""
    try:
        return weighted(view, x, node) is not None
    except NoMatch:
        return True


def _bincount(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """bincount(rows, weights, minlength=N)[:N]: rows beyond N are counted and cut off."""
    if not view.is_tensor(call.get("weights")):
        return None
    w = weighted(view, call["weights"], node)
    if w is None or len(w.shape) != 1:
        return None
    rows, N = call["input"], call.get("minlength", 0)
    readers = list(view.readers(node))
    cut = view.call(readers[0]) if len(readers) == 1 else None
    exact = cut is not None and cut.name == "getitem" and cut["index"] in (slice(N), slice(0, N))
    if not isinstance(N, int) or not exact:
        raise NoMatch("the number of documents depends on the rows: cut it with [:minlength]", node)
    inside = lambda e: e.call(torch.lt, rows, N)
    factor = Factor("keep", rows, w.shape, None, inside)
    w = w.then(node, factors=(*w.factors, factor))
    make = lambda e: e.call(torch.where, inside(e), rows, 0)
    return Scores(readers[0], w, N, None, rows=make, reads=((rows, node),))


def _segment_reduce(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    w = weighted(view, call["data"], node)
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
        or w.batch == 0
        or len(w.entries) != 1
    ):
        raise NoMatch("the segments are laid out in a way that is not followed", node)

    def starts(e: Emitter) -> fx.Node:
        if lengths is None:
            return offsets
        ends = e.method("cumsum", lengths, 0)
        return e.call(torch.nn.functional.pad, ends, (1, 0))

    N = view.shape(node)[0]
    rule = "segments" if lengths is None else "lengths"
    return Scores(node, w, N, w.batch, offsets=starts, rule=rule, reads=((given, node),))


def _embedding_bag(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    ids, table, offsets = call["input"], call["weight"], call.get("offsets")
    if node.target is torch.embedding_bag or not view.is_tensor(table):
        return None
    shape = view.shape(table)
    if len(shape) != 2 or not view.is_tensor(ids):
        return None
    values = call.get("per_sample_weights")
    known = is_transposed(view, table) or same_size(shape[1], 1)
    if call.get("mode") != "sum" or values is None:
        if known:
            raise NoMatch("bags are not weighted sums", node)
        return None
    if call.get("max_norm") is not None or call.get("padding_idx") is not None:
        raise NoMatch("the bags renormalise or skip entries", node)
    if view.needs_grad(values):
        raise NoMatch(
            "the document weights are learnt, and the operator has no gradient for them", node
        )
    entries = view.shape(ids)
    gather = Gather(
        node, table, ids, lambda e: e.method("t", table), lambda e: ids, len(entries), not known,
        table_gradient(call),
    )  # fmt: skip
    full = (*entries, shape[1])
    factor = Factor("mul", values, full, len(entries), lambda e: e.method("unsqueeze", values, -1))
    w = Weighted(
        node, gather, full, len(entries), (factor,),
        reads=((table, node), (ids, node), (values, node)),
    )  # fmt: skip
    if len(entries) == 2:
        return Scores(node, w, entries[0], 1, kept=(0, 2))
    if not view.is_tensor(offsets):
        return None

    def starts(e: Emitter) -> fx.Node:
        if call.get("include_last_offset", False):
            return offsets
        last = e.method("new_full", offsets, (1,), e.size(ids, 0))
        return e.call(torch.cat, (offsets, last))

    reads = ((offsets, node),)
    return Scores(node, w, view.shape(node)[0], 1, offsets=starts, rule="bags", reads=reads)


def _differences(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """sums[offsets[1:]] - sums[offsets[:-1]], sums being 0 and then the prefix sums of the contributions."""
    ends, starts = (gather_of(view, call[side]) for side in ("input", "other"))
    if (
        ends is None
        or starts is None
        or call.get("alpha", 1) != 1
        or ends.source is not starts.source
        or starts.gradient is not None
    ):
        return None
    offsets = _cut(view, ends.index, (slice(1, None),))
    same = _cut(view, starts.index, (slice(None, -1), slice(0, -1)))
    if offsets is None or same is not offsets:
        return None
    return _segments(view, node, ends, offsets, ends.index, (call["input"], call["other"]))


def _diff(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """sums[offsets].diff()"""
    at = gather_of(view, call["input"])
    if (
        at is None
        or call.get("n", 1) != 1
        or (call.get("prepend"), call.get("append")) != (None,) * 2
    ):
        return None
    ndim = len(view.shape(node))
    if call.get("dim", -1) % ndim != (0 if at.batch != 0 else 1):
        return None
    return _segments(view, node, at, at.index, at.node, (at.node,))


def _segments(
    view: GraphView,
    node: fx.Node,
    at: Gather,
    offsets: fx.Node,
    reader: fx.Node,
    within: Sequence[fx.Node],
) -> Scores | None:
    """Differences between prefix sums that were looked up at `offsets`, which `reader` reads."""
    if at.gradient is not None or len(view.shape(offsets)) != 1:
        return None
    sums, axis = at.source, 1 if at.batch == 0 else 0
    prefix, made = _behind_a_zero(view, sums, axis, at.node)
    running = view.call(prefix)
    if running is None or running.name != "cumsum":
        return None
    w = weighted(view, running["input"], prefix)
    if w is None or len(w.entries) != 1 or w.batch != at.batch:
        return None
    if running["dim"] % len(w.shape) != axis:
        raise NoMatch("it adds up over the queries", prefix)
    for n in (prefix, sums, *made, *within):
        w = w.then(n)
    N = view.shape(node)[axis]
    reads = ((offsets, reader),)

    def from_the_front(e: Emitter) -> fx.Node:
        """An index counts from the end where it is negative, an offset does not."""
        entries = (
            w.entries[0] if isinstance(w.entries[0], int) else e.method("numel", w.gather.ids(e))
        )
        last = entries + 1 if isinstance(entries, int) else e.call(operator.add, entries, 1)
        negative = e.call(operator.lt, offsets, 0)
        return e.call(torch.where, negative, e.call(operator.add, offsets, last), offsets)

    rule = "differences"
    return Scores(node, w, N, w.batch, offsets=from_the_front, rule=rule, reads=reads)


def _behind_a_zero(
    view: GraphView, sums: fx.Node, axis: int, reader: fx.Node
) -> tuple[Any, tuple[fx.Node, ...]]:
    """x of cat([0, x], axis), of x padded by one zero at the front of that axis, or assigned behind one; and what
    assigned it."""
    seen = view.value(sums, reader)
    padded, ndim = view.call(seen), len(view.shape(sums))
    nothing: tuple[Any, tuple[fx.Node, ...]] = None, ()
    if padded is None or seen is None:
        return nothing
    if padded.name == "setitem" and view.const(padded["input"]) == 0:
        rest = (slice(1, None),) if axis == 0 else (slice(None), slice(1, None))
        index = padded["index"] if isinstance(padded["index"], tuple) else (padded["index"],)
        whole = padded["input"] is sums and view.value(sums, seen) is sums and index == rest
        return (padded["value"], (seen,)) if whole else nothing
    if seen is not sums:
        return nothing
    if padded.name == "cat" and len(padded["tensors"]) == 2:
        zero, x = padded["tensors"]
        first = view.const(zero, sums) == 0 and same_size(view.shape(zero)[axis], 1)
        return (x, ()) if first and padded.get("dim", 0) % ndim == axis else nothing
    if padded.name == "pad" and not padded.get("value"):
        front = [0, 0] * (ndim - 1 - axis) + [1]  # of the last axis first
        pads = list(padded["pad"])
        return (padded["input"], ()) if pads == front + [0] * (len(pads) - len(front)) else nothing
    return nothing


def _cut(view: GraphView, x: Any, cuts: Sequence[slice]) -> fx.Node | None:
    call = view.call(x)
    if call is None or call.name != "getitem" or call["index"] not in cuts:
        return None
    return call["input"]


_READERS: dict[str, Callable[[GraphView, fx.Node, Call], Scores | None]] = {
    **sums.READERS,
    "sub": _differences,
    "diff": _diff,
    **dict.fromkeys("index_add index_put put scatter scatter_add scatter_reduce".split(), _added),
    "bincount": _bincount,
    "segment_reduce": _segment_reduce,
    "embedding_bag": _embedding_bag,
}
ANCHORS = frozenset(_READERS)
