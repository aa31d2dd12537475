"""Every spelling of "add contributions up into scores": sums, products, row ids, segments, bags.

Each reader turns an anchor node into `Scores`: whose contributions, and where the documents are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .emit import Emitter
from .gathers import Gather, gather_of, is_transposed
from .graph import GraphView, fake, same_size
from .names import Call
from .shapes import Decline
from .values import uniform
from .weighted import Factor, Weighted, reshaped, weighted

__all__ = ["ANCHORS", "Scores", "check_zero", "scores_of"]

Make = Callable[[Emitter], fx.Node]


@dataclasses.dataclass(frozen=True)
class Scores:
    """node[b, n] = sum of the contributions of document n to query b.

    kept: for a plain sum the axes of the contributions that stay, in the order of the result. rows,
    offsets: how the entries of the other layouts belong to documents. num_docs: a size, batch: the
    axis of the result that is the batch. fresh: the accumulator that was written, if any.
    """

    node: fx.Node
    w: Weighted
    num_docs: Any
    batch: int | None
    kept: tuple[int, ...] | None = None
    rows: Make | None = None
    offsets: Make | None = None
    reads: tuple[tuple[fx.Node, fx.Node], ...] = ()
    accumulator: fx.Node | None = None

    @property
    def swallowed(self) -> tuple[fx.Node, ...]:
        return (*self.w.nodes, self.node)

    @property
    def inputs(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """What is read, and by whom."""
        return (*self.w.reads, *self.reads)

    @property
    def features(self) -> bool:
        """Whether the columns may be features as well as queries."""
        return self.w.gather.features

    @property
    def layout(self) -> str:
        return "rows" if self.rows else "segments" if self.offsets else "padded documents"

    def emit(self, e: Emitter, k: Any = None) -> fx.Node:
        """Call the operator: scores [N] or [B, N], or with `k` (values, ids)."""
        query = self.w.query(e)
        V = fake(query).shape[-1]
        ids, values = self.documents(e, V if isinstance(V, int) else e.method("size", query, -1))
        rows = None if self.rows is None else self.rows(e)
        offsets = None if self.offsets is None else self.offsets(e)
        num_docs = self.num_docs
        if not isinstance(num_docs, int):
            if self.kept is None:
                raise Decline("the number of documents is not known", self.node)
            num_docs = -1  # of padded documents the operator sees it itself
        args = (query, ids, values, rows, offsets, num_docs)
        dtype, ops = fake(self.node).dtype, torch.ops.sparse_inductor
        if k is None:
            return e.call(ops.sparse_scores.default, *args, dtype)
        return e.call(ops.sparse_scores_topk.default, *args, k, dtype)

    def documents(self, e: Emitter, V: Any) -> tuple[fx.Node, fx.Node]:
        """ids and values: [N, L] for a plain sum, else [nnz]."""
        ids, values = self.w.documents(e, V)
        w = self.w
        if self.kept is None:
            return tuple(reshaped(e, t, (_total(w.entries),)) for t in (ids, values))
        axes = [a for a in range(len(w.shape)) if a != w.batch]
        kept = [a for a in self.kept if a != w.batch]
        order = [axes.index(a) for a in [*kept, *(a for a in axes if a not in kept)]]
        sizes = [w.entries[i] for i in order]
        shape = (_total(sizes[: len(kept)]), _total(sizes[len(kept) :]))
        out = []
        for t in (ids, values):
            t = t if order == sorted(order) else e.method("permute", t, tuple(order))
            out.append(reshaped(e, t, shape))
        return out[0], out[1]

    def shaped(self, e: Emitter, scores: fx.Node) -> fx.Node:
        """[N] or [B, N] in the shape of the user's result."""
        want = tuple(fake(self.node).shape)
        if self.batch is None:
            return reshaped(e, scores, want)
        docs = [s for a, s in enumerate(want) if a != self.batch]
        scores = reshaped(e, scores, (want[self.batch], *docs))
        if self.batch == 0:
            return scores
        order = [*range(1, self.batch + 1), 0, *range(self.batch + 1, len(want))]
        return e.method("permute", scores, tuple(order))


def _total(sizes: Sequence[Any]) -> Any:
    total: Any = 1
    for s in sizes:
        total = total * s
    return total


def scores_of(view: GraphView, node: fx.Node) -> Scores | None:
    """The node as scores; None where nothing is gathered above it. Raises Decline where it nearly is."""
    call = view.call(node)
    read = None if call is None else _READERS.get(call.name)
    if call is None or read is None or not view.is_tensor(node):
        return None
    found = read(view, node, call)
    if found is None:
        return None
    if not found.w.has_weights:
        raise Decline("there are no document weights: the gathered entries are only added up", node)
    return found


# Plain sums


def _sum(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    w = weighted(view, call["input"], node)
    return None if w is None else _summed(node, w, call.get("dim"), call.get("keepdim", False))


def _summed(node: fx.Node, w: Weighted, dim: Any, keepdim: bool) -> Scores | None:
    n = len(w.shape)
    dims = range(n) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    reduced = {d % n for d in dims}
    kept = tuple(a for a in range(n) if a not in reduced)
    return _reduction(node, w, kept, sorted(reduced) if keepdim else ())


def _reduction(
    node: fx.Node, w: Weighted, kept: tuple[int, ...], units: Sequence[int] = ()
) -> Scores | None:
    """units: the places of the result that have size 1 beside the kept axes."""
    if w.batch is not None and w.batch not in kept:
        raise Decline("it adds up over the queries", node)
    docs = [a for a in kept if a != w.batch]
    if not docs:
        return None  # a single document: a dot product
    if all(same_size(s, 1) for a, s in enumerate(w.shape) if a not in kept):
        return None
    order: list[int | None] = list(kept)
    for place in units:
        order.insert(place, None)
    batch = None if w.batch is None else order.index(w.batch)
    return Scores(node, w, _total([w.shape[a] for a in docs]), batch, kept)


def _labelled(
    view: GraphView, node: fx.Node, operands: Sequence[Any], letters: Sequence[str], out: str
) -> Scores | None:
    """A product of two operands with lettered axes, summed over the letters that `out` lacks."""
    found: list[tuple[Weighted, int]] = []
    declined: Decline | None = None
    for i in (0, 1):
        try:
            w = weighted(view, operands[i], node)
        except Decline as d:
            declined = declined or d
            continue
        if w is not None:
            found.append((w, i))
    if not found:
        if declined is not None:
            raise declined
        return None
    # The operand with a batch axis is the query's.
    w, mine = min(found, key=lambda f: f[0].batch is None)
    xs, ys, other = letters[mine], letters[1 - mine], operands[1 - mine]
    sizes = dict(zip(ys, view.shape(other)))
    extra = [c for c in ys if c not in xs]
    if len(set(xs)) != len(xs) or len(set(ys)) != len(ys) or len(xs) != len(w.shape):
        return None
    if any(not same_size(sizes[c], 1) for c in extra):
        raise Decline(
            "a product with a matrix: the document weights have an axis of their own", node
        )
    if w.batch is not None and xs[w.batch] in ys:
        from_end = len(ys) - ys.index(xs[w.batch])
        if not uniform(view, other, from_end, node):
            raise Decline("the document weights differ from query to query", node)

    def aligned(e: Emitter) -> fx.Node:
        t, have = other, list(ys)
        for c in [*extra, *([] if w.batch is None else [xs[w.batch]])]:
            if c in have:
                t = e.method("select", t, have.index(c), 0)
                have.remove(c)
        order = [have.index(c) for c in xs if c in have]
        t = t if order == sorted(order) else e.method("permute", t, tuple(order))
        for at, c in enumerate(xs):
            if c not in have:
                t = e.method("unsqueeze", t, at)
        return t

    factor = Factor("mul", other, w.shape, w.batch, aligned)
    product = dataclasses.replace(
        w,
        factors=(*w.factors, factor),
        reads=(*w.reads, (other, node)),
    )
    if torch.is_grad_enabled() and view.requires_grad(other):
        raise Decline(
            "the document weights are learnt, and the operator has no gradient for them", node
        )
    kept = tuple(xs.index(c) for c in out if c in xs)
    units = [p for p, c in enumerate(out) if c not in xs]
    return _reduction(node, product, kept, units)


def _einsum(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    operands, equation = call.get("operands", ()), call["equation"]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    if not arrow:
        joined = "".join(terms)
        out = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    return _labelled(view, node, operands, terms, out)


def _matmul(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    a, b = call["input"], call.get("other", call.get("weight"))
    if not (view.is_tensor(a) and view.is_tensor(b)):
        return None
    n, m = len(view.shape(a)), len(view.shape(b))
    if n < 2 and m < 2:
        return None
    batch = "abcdefgh"[: max(n, m) - 2] if max(n, m) > 2 else ""
    xs = batch[len(batch) - (n - 2) :] + "xz" if n > 1 else "z"
    ys = batch[len(batch) - (m - 2) :] + "zy" if m > 1 else "z"
    out = batch + ("x" if n > 1 else "") + ("y" if m > 1 else "")
    return _labelled(view, node, (a, b), (xs, ys), out)


def _vecdot(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    a, b = call["input"], call["other"]
    n, m = len(view.shape(a)), len(view.shape(b))
    if call.get("dim", -1) != -1:
        return None
    letters = "abcdefghijk"[: max(n, m)]
    out = letters[:-1]
    return _labelled(view, node, (a, b), (letters[-n:], letters[-m:]), out)


# Row ids


def check_zero(view: GraphView, accumulator: Any, node: fx.Node) -> None:
    """Raises Decline unless `node` accumulates into zeros."""
    seen = view.value(accumulator, node) if isinstance(accumulator, fx.Node) else None
    call = view.call(seen)
    if call is not None and call.inplace and call.name in ("zero", "fill"):
        filler = call["value"] if call.name == "fill" else 0
        if view.const(filler, seen) == 0:
            return
    if view.const(accumulator, node) != 0:
        raise Decline("the accumulator does not start at zero", node)


def _accumulated(
    view: GraphView, node: fx.Node, call: Call, source: Any, rows: Any, axis: int, make: Make
) -> Scores | None:
    """Contributions `source` with their entries on one axis, added to `rows` along `axis` of the accumulator."""
    w = weighted(view, source, node)
    if w is None:
        return None
    if len(w.entries) != 1:
        if w.batch is None and len(w.shape) == 2:
            raise Decline("rows of features are added up, not weights of queries", node)
        raise Decline("the contributions have more than one axis beside the queries", node)
    if w.batch == axis:
        raise Decline("it adds up over the queries", node)
    check_zero(view, call["input"], node)
    target = call["input"] if call.inplace else None
    reads = ((rows, node),)
    num_docs = view.shape(node)[axis]
    return Scores(node, w, num_docs, w.batch, rows=make, reads=reads, accumulator=target)


def _index_add(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    rows = call["index"]
    if not view.is_tensor(rows) or call["dim"] is None:
        return None
    found = _accumulated(
        view, node, call, call["source"], rows, call["dim"] % len(view.shape(node)), lambda e: rows
    )
    alpha = call.get("alpha", 1)
    if found is None or alpha == 1:
        return found
    if not isinstance(alpha, (int, float)):
        raise Decline("the contributions are scaled by a number that is not known", node)
    factor = Factor("mul", float(alpha), found.w.shape, found.w.batch)
    w = dataclasses.replace(found.w, factors=(*found.w.factors, factor))
    return dataclasses.replace(found, w=w)


def _index_put(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    if not call.get("accumulate", False) or not isinstance(call["indices"], (tuple, list)):
        return None
    at = [a for a, i in enumerate(call["indices"]) if i is not None]
    ndim = len(view.shape(node))
    if len(at) == 2 and ndim == 2 and at == [0, 1]:
        query, rows = call["indices"]
        if _counts(view, query, view.shape(node)[0], node) and uniform(view, rows, 2, node):
            make = lambda e: e.method("reshape", rows, (-1,))
            return _accumulated(view, node, call, call["values"], rows, 1, make)
        return None
    if len(at) != 1:
        return None
    rows = call["indices"][at[0]]
    if not view.is_tensor(rows) or view.dtype(rows) == torch.bool:
        return None
    values = call["values"]
    if ndim == 1 and view.is_tensor(values) and len(view.shape(values)) > 1:
        w = weighted(view, values, node)
        if w is None or w.batch is not None:
            return None
        if len(view.shape(rows)) != len(w.shape):
            return None
        check_zero(view, call["input"], node)
        return Scores(
            node, w, view.shape(node)[0], None, reads=((rows, node),),
            rows=lambda e: e.method("reshape", rows, (-1,)),
            accumulator=call["input"] if call.inplace else None,
        )  # fmt: skip
    return _accumulated(view, node, call, values, rows, at[0], lambda e: rows)


def _counts(view: GraphView, x: Any, size: Any, reader: fx.Node) -> bool:
    """Whether a tensor is arange(size) down a column: [size, 1]."""
    if not view.is_tensor(x):
        return False
    shape = view.shape(x)
    call = view.call(x)
    while call is not None and call.name in ("unsqueeze", "view", "getitem", "cast"):
        x = call["input"]
        call = view.call(x)
    column = len(shape) == 2 and same_size(shape[1], 1) and same_size(shape[0], size)
    return column and getattr(x, "target", None) is torch.arange and len(x.args) == 1


def _scatter(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    how = call.get("reduce")
    if call.name != "scatter_add" and how not in ("sum", "add"):
        if how is not None and weighted(view, call["src"], node) is not None:
            raise Decline(f"scatter with {how!r}: only sums are inner products", node)
        return None
    rows, source = call["index"], call["src"]
    if not (view.is_tensor(rows) and view.is_tensor(source)) or call["dim"] is None:
        return None
    shape = view.shape(source)
    axis = call["dim"] % len(shape)
    if not all(map(same_size, view.shape(rows), shape)):
        return None
    if len(shape) == 1:
        return _accumulated(view, node, call, source, rows, 0, lambda e: rows)
    if len(shape) != 2:
        return None
    w = weighted(view, source, node)
    if w is None:
        return None
    if not uniform(view, rows, len(shape) - (1 - axis), node):
        raise Decline("the rows differ from query to query", node)
    return _accumulated(
        view, node, call, source, rows, axis, lambda e: e.method("select", rows, 1 - axis, 0)
    )


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
        raise Decline("the number of documents depends on the rows: cut it with [:minlength]", node)
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
        raise Decline(f"segments are reduced by {call['reduce']!r}, not added up", node)
    lengths, offsets = call.get("lengths"), call.get("offsets")
    given = offsets if lengths is None else lengths
    if (
        call.get("indices") is not None
        or call.get("initial") not in (None, 0, 0.0)
        or not view.is_tensor(given)
        or len(view.shape(given)) != 1
        or call.get("axis", 0) != 0
        or w.batch == 0
        or len(w.entries) != 1
    ):
        raise Decline("the segments are laid out in a way that is not followed", node)

    def starts(e: Emitter) -> fx.Node:
        if lengths is None:
            return offsets
        ends = e.method("cumsum", lengths, 0)
        return e.call(torch.nn.functional.pad, ends, (1, 0))

    N = view.shape(node)[0]
    return Scores(node, w, N, w.batch, offsets=starts, reads=((given, node),))


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
            raise Decline("bags are not weighted sums", node)
        return None
    if call.get("max_norm") is not None or call.get("padding_idx") is not None:
        raise Decline("the bags renormalise or skip entries", node)
    if torch.is_grad_enabled() and view.requires_grad(values):
        raise Decline(
            "the document weights are learnt, and the operator has no gradient for them", node
        )
    entries = view.shape(ids)
    gather = Gather(
        node, table, ids, lambda e: e.method("t", table), lambda e: ids, len(entries), not known
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
        if not isinstance(entries[0], int):
            last = e.method("new_full", offsets, (1,), e.method("size", ids, 0))
        else:
            last = e.method("new_full", offsets, (1,), entries[0])
        return e.call(torch.cat, (offsets, last))

    return Scores(node, w, view.shape(node)[0], 1, offsets=starts, reads=((offsets, node),))


def _differences(view: GraphView, node: fx.Node, call: Call) -> Scores | None:
    """sums[offsets[1:]] - sums[offsets[:-1]], sums being 0 and then the prefix sums of the contributions."""
    ends, starts = (gather_of(view, call[side]) for side in ("input", "other"))
    if (
        ends is None
        or starts is None
        or call.get("alpha", 1) != 1
        or ends.source is not starts.source
    ):
        return None
    offsets = _cut(view, ends.index, (slice(1, None),))
    same = _cut(view, starts.index, (slice(None, -1), slice(0, -1)))
    if offsets is None or same is not offsets or len(view.shape(offsets)) != 1:
        return None
    sums = ends.source
    padded = view.call(sums)
    if padded is None or len(view.shape(sums)) != 1:
        return None
    prefix: Any = None
    if padded.name == "cat" and len(padded["tensors"]) == 2:
        zero, prefix = padded["tensors"]
        if view.const(zero, sums) != 0 or not same_size(view.shape(zero)[0], 1):
            return None
    elif padded.name == "pad" and tuple(padded["pad"]) == (1, 0) and not padded.get("value"):
        prefix = padded["input"]
    running = view.call(prefix)
    if running is None or running.name != "cumsum":
        return None
    w = weighted(view, running["input"], prefix)
    if w is None or len(w.entries) != 1 or w.batch is not None:
        return None
    for n in (prefix, sums, call["input"], call["other"]):
        w = w.then(n)
    N = view.shape(node)[0]
    return Scores(node, w, N, None, offsets=lambda e: offsets, reads=((offsets, ends.index),))


def _cut(view: GraphView, x: Any, cuts: Sequence[slice]) -> fx.Node | None:
    call = view.call(x)
    if call is None or call.name != "getitem" or call["index"] not in cuts:
        return None
    return call["input"]


_READERS: dict[str, Callable[[GraphView, fx.Node, Call], Scores | None]] = {
    "sum": _sum,
    "sub": _differences,
    "einsum": _einsum,
    "matmul": _matmul,
    "bmm": _matmul,
    "mm": _matmul,
    "vecdot": _vecdot,
    "index_add": _index_add,
    "index_put": _index_put,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter_reduce": _scatter,
    "bincount": _bincount,
    "segment_reduce": _segment_reduce,
    "embedding_bag": _embedding_bag,
}
ANCHORS = frozenset(_READERS)
