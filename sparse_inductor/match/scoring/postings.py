"""Scoring by posting lists: the lists of the query's own terms, scattered into one accumulator a query.

    acc[b, docs[p]] += values[p] * weight      for every position p of a list of query b

with one accumulator [N], one row a query [B, N], or all of them end to end [B * N].
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.emit import Emitter, own_operator
from ...graph.indices import only_new_axes
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.shapes import kept_axis
from ...graph.values import counting, progression
from ...graph.view import GraphView, fake, same_size
from ...graph.vocabulary import COPIES, REGROUPS
from .contributions import Weighted, reshaped
from .gathers import Gather, rows_of
from .scored import accumulator_of, addition, check_rows, check_zero, part_of
from .weighted import weighted

_OF_DOCS = frozenset("where masked_fill clamp clamp_min clamp_max minimum maximum cast".split())
_VIEWS = REGROUPS | COPIES | {"cast", "getitem"}


@dataclasses.dataclass(frozen=True)
class Postings:
    """node[b, n], the sums over posting lists. `docs` looks the documents up where `w` looks the values up.

    shape: of the postings, [B, T, ...], where lists were looked up as [B * T, ...], or one for each query. earlier:
    lists that the same accumulator holds already, as in a loop over the terms.
    """

    node: fx.Node
    w: Weighted
    docs: Gather
    num_docs: int
    batch: int | None
    inner: tuple[fx.Node, ...]
    reads: tuple[tuple[fx.Node, fx.Node], ...]
    accumulator: fx.Node | None
    shape: tuple[Any, ...] | None = None
    earlier: tuple[Postings, ...] = ()
    into: fx.Node | None = None

    layout = "posting lists"
    features = False

    @property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        before = (n for p in self.earlier for n in p.matched_nodes)
        return (*before, *self.w.nodes, *self.inner, self.node)

    @property
    def inputs(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """What is read, and by whom."""
        before = (read for p in self.earlier for read in p.inputs)
        return (*before, *self.w.reads, *self.reads)

    def lists(self, e: Emitter) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Which lists these are [B, T], the weights of their entries [B, T, ...], and which of those count."""
        shape = self.shape or tuple(fake(self.w.gather.node).shape)
        weights, mask = self.w.weights(e, shape)
        positions = self.docs.ids(e)
        if self.shape is not None:
            positions = reshaped(e, positions, shape[:2])
        if self.batch is None:
            positions, weights = (e.method("unsqueeze", t, 0) for t in (positions, weights))
            mask = None if mask is None else e.method("unsqueeze", mask, 0)
        return positions, weights, mask

    def emit(self, e: Emitter, k: Any = None) -> fx.Node:
        """Call the operator: scores [N] or [B, N], or with `k` (values, ids)."""
        positions, weights, mask = self.lists(e)
        if self.earlier:
            parts = [*(p.lists(e) for p in self.earlier), (positions, weights, mask)]
            positions, weights, mask = _joined(e, parts)
        dtype = fake(self.node).dtype
        if dtype == torch.float64:
            weights = e.cast(weights, dtype)
        args = (positions, weights, mask, self.docs.source, self.w.gather.source, self.num_docs)
        if k is None:
            return e.call(own_operator("sparse_scores_postings"), *args, dtype)
        return e.call(own_operator("sparse_scores_postings_topk"), *args, k, dtype)

    def shaped(self, e: Emitter, scores: fx.Node) -> fx.Node:
        """[B, N] in the shape of the user's result."""
        return reshaped(e, scores, tuple(fake(self.node).shape))


def _joined(
    e: Emitter, parts: Sequence[tuple[fx.Node, fx.Node, fx.Node | None]]
) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """The lists of several accumulations as those of one."""
    positions = e.call(torch.cat, [p for p, _, _ in parts], 1)
    tail = next((fake(w).shape[2:] for _, w, _ in parts if not _is_number(w)), ())
    full = []
    for p, w, _ in parts:
        if _is_number(w):  # lists without weights of the query's
            ones = e.call(torch.ones_like, p, dtype=fake(w).dtype)
            ones = reshaped(e, ones, (*fake(p).shape, *[1] * len(fake(w).shape[2:])))
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
    """The accumulation as posting lists, or None. Raises NoMatch where it nearly is."""
    call = view.call(node)
    if call is None or not view.is_tensor(node):
        return None
    parts = _scattered(view, node, call)
    if parts is None:
        return None
    rows, source = parts
    path, inner = _peeled(view, rows, node)
    shift = None
    added = view.call(inner)
    if added is not None and added.name == "add" and added.get("alpha", 1) == 1:
        for docs_side, shift_side in added.both_ways:
            more, below = _peeled(view, docs_side, inner)
            if rows_of(view, below) is not None:
                path, shift, inner = [*path, inner, *more], shift_side, below
                break
    docs = rows_of(view, inner)
    if view.needs_grad(source):
        if docs is not None and len(view.shape(docs.source)) > 1:
            raise NoMatch("posting lists have no gradient for the weights of a query's terms", node)
        return None
    changed = docs is None
    docs = docs or _changed_after(view, inner)
    if docs is None:
        return None

    def same_lists(view: GraphView, node: Any) -> Gather | None:
        found = rows_of(view, node)
        return found if found is not None and view.same_value(found.index, docs.index) else None

    w = weighted(view, source, node, same_lists)
    if w is None or not (w.has_weights or _are_lists(view, docs)):
        return None
    w = w.scaled(call.get("alpha", 1))
    if changed:
        raise NoMatch(
            "the documents are changed after they were looked up: change the lists", inner
        )
    before = _earlier(view, node, call)
    if before is None:
        check_zero(view, call["input"], node)
    found = _placed(view, node, call, w, docs, rows, path, shift)
    if found is None:
        return None
    if before is not None:
        return _after(view, call, found, before)
    into = part_of(view, call)
    if into is not None and found.node is not node:
        raise NoMatch("the accumulators of several queries are a part of another tensor", node)
    return dataclasses.replace(found, into=into)


def _earlier(view: GraphView, node: fx.Node, call: Call) -> Postings | None:
    """The posting lists that the accumulator holds when `node` adds to it; None where it holds something else."""
    held = call["input"]
    seen = view.value(held, node) if view.is_tensor(held) else None
    try:
        found = None if seen is None else postings_of(view, seen)
    except NoMatch:
        return None
    return found if found is not None and found.node is seen else None


def _after(view: GraphView, call: Call, found: Postings, before: Postings) -> Postings:
    """`found`, added to an accumulator that `before` has filled."""
    same = (
        before.batch == found.batch
        and before.num_docs == found.num_docs
        and view.same_value(before.docs.source, found.docs.source)
        and view.same_value(before.w.gather.source, found.w.gather.source)
    )
    own = before.accumulator
    if not same or (own is not None and not call.inplace):
        raise NoMatch("the accumulator does not start at zero", found.node)
    target = (own or before.node) if call.inplace else None
    earlier = (*before.earlier, dataclasses.replace(before, earlier=()))
    return dataclasses.replace(found, accumulator=target, earlier=earlier)


def _changed_after(view: GraphView, x: Any) -> Gather | None:
    """The lists of documents that an elementwise function was taken of."""
    for _ in range(4):
        call = view.call(x)
        if call is None or call.name not in _OF_DOCS:
            return None
        sides = [call.get(side) for side in ("input", "other")]
        x = next((s for s in sides if view.is_tensor(s) and view.const(s) is None), None)
        if x is not None and (found := rows_of(view, x)) is not None:
            return found
    return None


def _are_lists(view: GraphView, docs: Gather) -> bool:
    """Whether lists of documents are looked up, and not a selection of edges: then weights of 1 are BM25S's."""
    return len(view.shape(docs.source)) > 1 or len(view.shape(docs.index)) > 1


def _placed(
    view: GraphView,
    node: fx.Node,
    call: Call,
    w: Weighted,
    docs: Gather,
    rows: fx.Node,
    path: list[fx.Node],
    shift: Any,
) -> Postings | None:
    """Which accumulator belongs to which query."""
    found, size = view.shape(docs.node), view.shape(node)
    reads = ((docs.source, docs.node), (docs.index, docs.node))
    inner = (docs.node, *path)
    target = accumulator_of(view, call)
    if shift is None and not isinstance(size[-1], int):
        raise NoMatch("the number of documents is not known", node)
    values = view.dtype(w.gather.source)
    if values == torch.bool:
        raise NoMatch(f"the values of the posting lists are {values}", w.gather.node)
    if len(size) == 2 and shift is None:
        check_rows(size[0], view.shape(rows)[0], node)
        B, flat = view.shape(rows)[0], view.shape(docs.index)
        if kept_axis(found, 0, view.shape(rows)) == 0 and kept_axis(w.shape, 0, found) == 0:
            one = (B, 1, *found[1:]) if len(flat) == 1 else None  # one list for each query
            return Postings(node, w, docs, size[1], 0, inner, reads, target, one)
        if len(flat) != 1 or not isinstance(B, int) or not isinstance(flat[0], int) or flat[0] % B:
            raise NoMatch("merges the posting lists of several queries", node)
        shape = (B, flat[0] // B, *found[1:])
        return Postings(node, w, docs, size[1], 0, inner, reads, target, shape)
    if len(size) != 1:
        return None
    if shift is None:
        return Postings(node, w, docs, size[0], None, inner, reads, target)
    readers = [*view.readers(node)] + (
        [r for r in view.readers(target) if view.order[r] > view.order[node]] if target else []
    )
    split = readers[0] if len(readers) == 1 else None
    if split is None or view.name_of(split) not in ("view", "unflatten"):
        raise NoMatch("the accumulators of several queries are not split up by query", node)
    shape = view.shape(split)
    if len(shape) != 2 or not same_size(shape[0], found[0]) or not isinstance(shape[1], int):
        raise NoMatch("the accumulators of several queries are not split up by query", node)
    steps = progression(view, shift, node)
    first = steps is not None and (
        steps.axis == len(found) == len(view.shape(shift)) or same_size(shape[0], 1)
    )
    if steps is None or not first or steps.start != 0 or not same_size(steps.step, shape[1]):
        raise NoMatch("the documents are shifted in a way that is not followed", node)
    more = (node, *(() if target is None else (target,)))
    return Postings(split, w, docs, shape[1], 0, (*inner, *more), reads, None)


def _scattered(view: GraphView, node: fx.Node, call: Call) -> tuple[fx.Node, fx.Node] | None:
    """The rows and the contributions of an accumulation along the last axis."""
    added = addition(view, node, call)
    if added is None or added.how != "sum" or not isinstance(added.scale, (int, float)):
        return None
    rows, source, queries = added.rows, added.source, added.queries
    # Of queries [B, ...] beside rows [B, ...] each is its own.
    if queries is not None and counting(view, queries, node) != len(view.shape(rows)):
        return None
    last = added.axis == len(view.shape(node)) - 1
    return (rows, source) if last and view.same_shape(rows, source) else None


def _peeled(view: GraphView, x: Any, reader: fx.Node) -> tuple[list[fx.Node], Any]:
    """The views on the way up from a tensor, and what they are views of."""
    path: list[fx.Node] = []
    while view.is_tensor(x) and rows_of(view, x) is None:
        call = view.call(x)
        if (
            call is None
            or call.inplace
            or call.name not in _VIEWS
            or view.value(x, reader) is not x
        ):
            break
        if not same_size(math.prod(view.shape(x)), math.prod(view.shape(call["input"]))):
            break
        if call.name == "getitem" and not only_new_axes(call["index"]):
            break
        path.append(x)
        reader, x = x, call["input"]
    return path, x
