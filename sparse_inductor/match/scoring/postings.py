"""Scoring by posting lists: the lists of a query's terms are scattered into one accumulator per query.

    acc[b, docs[p]] += values[p] * weight      for every position p of a list of query b

with one accumulator [N], one row per query [B, N], or all of them concatenated [B * N].
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, above, flat
from ...graph.emit import Emitter, own_operator
from ...graph.fakes import fake, same_size
from ...graph.names import Call
from ...graph.no_match import NoMatch, if_matched
from ...graph.values import progression
from ...graph.view import GraphView
from ...graph.vocabulary import COPIES, VIEWS
from .additions import accumulator_of, addition, check_one_row_each, names_of
from .gathers import Gather, rows_of
from .scored import Scored
from .ways import contributions

# Operations on documents after the look-up, which would have to be applied to the lists instead.
_CHANGES = frozenset("where masked_fill clamp clamp_min clamp_max minimum maximum".split())
Lists = tuple[fx.Node, fx.Node, fx.Node | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Postings(Scored):
    """Scores by posting lists. found: the look-up of the documents, at the same positions as the values in `w`."""

    found: Gather
    earlier: tuple[Postings, ...] = ()

    layout = "posting lists"

    def lists(self, e: Emitter) -> Lists:
        """The indices of the lists [B, T], the weights of their entries [B, T, ...], and the mask of the entries that
        count, or None."""
        ids = self.found.ids(self.w.axes)
        terms = tuple(a for axis in ids.axes for a in flat(axis) if a not in self.queries)
        of_lists = [self.queries, terms]
        rest = [flat(a) for at, a in enumerate(self.w.axes) if at not in self.found.ids_axes]
        return self.w.placed(e, ids, of_lists), *self.w.weights(e, [*of_lists, *rest])

    def emit(self, e: Emitter, k: Any = None) -> fx.Node:
        positions, weights, mask = _joined(e, [p.lists(e) for p in (*self.earlier, self)])
        dtype = fake(self.node).dtype
        if dtype == torch.float64:
            weights = e.cast(weights, dtype)
        args = (positions, weights, mask, self.found.source, self.w.gather.source, self.num_docs)
        if k is None:
            return e.call(own_operator("sparse_scores_postings"), *args, dtype)
        return e.call(own_operator("sparse_scores_postings_topk"), *args, k, dtype)


def _joined(e: Emitter, parts: Sequence[Lists]) -> Lists:
    """The lists of several accumulations, concatenated."""
    if len(parts) == 1:
        return parts[0]
    positions = e.call(torch.cat, [p for p, _, _ in parts], 1)
    tail = next((fake(w).shape[2:] for _, w, _ in parts if not _is_number(w)), ())
    full = []
    for p, w, _ in parts:
        if _is_number(w):  # lists without query weights
            ones = e.call(torch.ones_like, p, dtype=fake(w).dtype)
            for _ in range(2, fake(w).dim()):
                ones = e.method("unsqueeze", ones, -1)
            w = e.call(operator.mul, ones, w)
            w = e.method("expand", w, (-1, -1, *tail)) if tail else w
        full.append(w)
    weights = e.call(torch.cat, full, 1)
    if all(mask is None for _, _, mask in parts):
        return positions, weights, None
    keep = [
        e.call(torch.ones_like, w, dtype=torch.bool) if mask is None else mask
        for w, (_, _, mask) in zip(full, parts)
    ]
    return positions, weights, e.call(torch.cat, keep, 1)


def _is_number(w: fx.Node) -> bool:
    return all(same_size(s, 1) for s in fake(w).shape)


def postings_of(view: GraphView, node: fx.Node) -> Postings | None:
    """The accumulation as posting lists, or None. Raises NoMatch if it is nearly a match."""
    call = view.call(node)
    added = addition(view, node, call) if view.is_tensor(node) else None
    if added is None or added.how != "sum":
        return None
    if not isinstance(added.scale, (int, float)) or added.axes[-1] != (added.docs,):
        return None
    docs = _documents(view, added.rows)
    if docs is None:
        return None
    found = docs.found
    # With several axes, the look-up is of lists of documents, not of edges of a graph; BM25S has weights of 1.
    several = max(len(view.shape(found.source)), len(view.shape(found.index))) > 1
    learns = view.needs_grad(added.source.node)
    if learns and (docs.obstacle is not None or not several):
        return None

    def same_lists(view: GraphView, node: Any) -> Gather | None:
        other = rows_of(view, node)
        return other if other is not None and view.same_value(other.index, found.index) else None

    what = "the weights, be they of documents or of a query's terms"
    no_gradient = NoMatch(f"posting lists have no gradient for {what}", node)
    try:
        w = contributions(view, added.source.node, added.source.axes, node, same_lists)
    except NoMatch as reason:
        raise (no_gradient if learns else reason) from None
    if w is None or not (w.has_weights or several):
        return None
    if learns:
        raise no_gradient
    if docs.obstacle is not None:
        raise docs.obstacle
    if [*map(flat, docs.axes)] != [*map(flat, w.axes)]:
        return None
    if view.dtype(w.gather.source) == torch.bool:
        raise NoMatch("the values of the posting lists are torch.bool", w.gather.node)
    before = _earlier(view, node, call) if docs.shift is None else None
    whole, part = accumulator_of(view, node, call, filled=before is not None)
    lists = Postings(
        node=node, w=w.scaled(added.scale), axes=added.axes,
        queries=added.others, docs=(added.docs,), found=found, inner=(found.node, *docs.path),
        reads=((found.source, found.node), (found.index, found.node)),
        accumulator=whole, into=part,
    )  # fmt: skip
    if docs.shift is not None:
        return _end_to_end(view, lists, docs.shift)
    if not isinstance(lists.num_docs, int):
        raise NoMatch("the number of documents is not known", node)
    check_one_row_each(view, node, added)
    looked_up = {a for at in found.ids_axes for a in flat(w.axes[at])}
    if not {*lists.queries} <= looked_up:
        raise NoMatch("merges the posting lists of several queries", node)
    return lists if before is None else _after(view, call, lists, before)


class _Documents(NamedTuple):
    """The origin of the rows of an accumulator: documents that are looked up, perhaps plus a shift.

    axes: those of the look-up. path: the nodes in between. obstacle: why the rows are not the documents of the lists.
    """

    found: Gather
    axes: Sequence[Axis]
    path: tuple[fx.Node, ...] = ()
    shift: Any = None
    obstacle: NoMatch | None = None


def _documents(view: GraphView, rows: Placed, shift: Any = None) -> _Documents | None:
    """The documents that rows come from; None for other rows. shift: the tensor that is added to them further down."""
    x, axes = rows.node, rows.axes
    if (found := rows_of(view, x)) is not None:
        return _Documents(found, axes, shift=shift)
    call = view.call(x)
    if not call or call.inplace or view.value(x, rows.reader) is not x:
        return None
    obstacle: NoMatch | None = None
    if call.name == "add" and call.get("alpha", 1) == 1 and shift is None:
        ways = [(s, by) for s, by in call.both_ways if view.same_shape(s, x)]
    elif call.name in COPIES | VIEWS | _CHANGES | {"cast"}:
        sides = (call.get("input"), call.get("other"))
        ways = [(s, shift) for s in sides if view.const(s) is None]
    else:
        return None
    if call.name in _CHANGES:
        why = "the documents are changed after they were looked up: change the lists"
        obstacle = NoMatch(why, x)
    elif call.name in VIEWS:
        try:
            axes = tuple(above(view, x, call, axes))
        except NoMatch as reshape:
            obstacle = reshape
    ways = [(side, by) for side, by in ways if view.is_tensor(side)]
    inner = (_documents(view, Placed(side, x, axes), by) for side, by in ways)
    below = next((way for way in inner if way is not None), None)
    return below and below._replace(path=(x, *below.path), obstacle=obstacle or below.obstacle)


def _end_to_end(view: GraphView, lists: Postings, shift: Any) -> Postings:
    """Lists with documents that are shifted by query, in concatenated accumulators that a view splits up afterwards."""
    node = lists.node
    if lists.into is not None:
        raise NoMatch("the accumulators of several queries are a part of another tensor", node)
    later = [r for name in lists.accumulator for r in view.readers(name)]
    readers = [*view.readers(node), *(r for r in later if view.order[r] > view.order[node])]
    split = readers[0] if len(readers) == 1 else None
    size = () if split is None else view.shape(split)
    found = view.shape(lists.found.node)
    if (
        split is None
        or view.name_of(split) not in ("view", "unflatten")
        or len(size) != 2
        or not same_size(size[0], found[0])
        or not isinstance(size[1], int)
    ):
        raise NoMatch("the accumulators of several queries are not split up by query", node)
    steps = progression(view, shift, node)
    first = steps is not None and (
        steps.axis == len(found) == len(view.shape(shift)) or same_size(size[0], 1)
    )
    if steps is None or not first or steps.start != 0 or not same_size(steps.step, size[1]):
        raise NoMatch("the documents are shifted in a way that is not followed", node)
    queries, docs = flat(lists.w.axes[0]), (Atom(size[1]),)
    inner = (*lists.inner, node, *lists.accumulator)
    return dataclasses.replace(
        lists, node=split, axes=(queries, docs), queries=queries, docs=docs, inner=inner,
        accumulator=(),
    )  # fmt: skip


def _earlier(view: GraphView, node: fx.Node, call: Call) -> Postings | None:
    """The posting lists that the accumulator already contains when `node` adds to it; None for other contents."""
    held = call["input"]
    seen = view.value(held, node) if view.is_tensor(held) else None
    found = None if seen is None else if_matched(postings_of, view, seen)
    return found if found is not None and found.node is seen else None


def _after(view: GraphView, call: Call, found: Postings, before: Postings) -> Postings:
    """`found`, added to an accumulator that `before` has filled."""
    same = (
        len(before.queries) == len(found.queries)
        and before.num_docs == found.num_docs
        and view.same_value(before.found.source, found.found.source)
        and view.same_value(before.w.gather.source, found.w.gather.source)
    )
    if not same or (before.accumulator and not call.inplace):
        raise NoMatch("the accumulator does not start at zero", found.node)
    names: tuple[fx.Node, ...] = ()
    if call.inplace:
        names = names_of(view, (*before.accumulator, before.node)[0], found.node)
    earlier = (*before.earlier, dataclasses.replace(before, earlier=()))
    return dataclasses.replace(found, accumulator=names, earlier=earlier)
