"""Gathered query weights times document weights, through views, masks and casts.

`weighted` walks up from a tensor of contributions to the gather at its root and collects what it is
multiplied by. Everything that does not depend on the gather is a factor: it stays in the graph and
becomes part of the document weights.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .contraction import lettered
from .declines import Decline
from .emit import Emitter
from .gathers import Gather, gather_of
from .graph import GraphView, fake, same_size, same_sizes
from .indices import only_new_axes
from .names import Call
from .selection import SELECTIONS, Assigned, selections, trailing_mask
from .shapes import order_of
from .values import is_parameter, rounds, uniform
from .vocabulary import COPIES, VIEWS

__all__ = [
    "Factor",
    "OfRows",
    "Weighted",
    "check_shared",
    "kept_axis",
    "preference",
    "reshaped",
    "weighted",
]

Read = Callable[[GraphView, Any], Gather | None]

_REACH = 24  # nodes between a reduction and its gather; nobody writes more than ten

# Those of them whose backward makes 0 of 0 whatever the weight: the operator's gradient of one that no document has.
_KEEPS_ZERO = frozenset("relu clamp clamp_min clamp_max add sub rsub mul div".split())
_OF_ONE_WEIGHT = frozenset(
    "relu log log1p log2 log10 exp expm1 sqrt square tanh sigmoid abs neg pow clamp clamp_min "
    "clamp_max add sub rsub div mul reciprocal nan_to_num softplus".split()
)


@dataclasses.dataclass(frozen=True)
class Factor:
    """What the contributions are multiplied by, divided by, or kept where it is true.

    shape: of the contributions at this point, batch: their batch axis. make: builds the operand,
    which broadcasts to `shape`; a number is itself.
    """

    how: str  # "mul", "div", "keep", "drop"
    operand: fx.Node | float
    shape: tuple[Any, ...]
    batch: int | None
    make: Callable[[Emitter], fx.Node] | None = None

    @property
    def entries(self) -> tuple[Any, ...]:
        return tuple(s for a, s in enumerate(self.shape) if a != self.batch)

    def build(self, e: Emitter, entries: Sequence[Any]) -> fx.Node | float:
        """The operand with the batch axis gone and the shape `entries`."""
        if not isinstance(self.operand, fx.Node):
            return self.operand
        t = self.operand if self.make is None else self.make(e)
        n = len(self.shape)
        if self.batch is not None:
            axis = fake(t).dim() - (n - self.batch)
            if axis >= 0:
                t = e.method("select", t, axis, 0)
        mine = self.entries
        have = tuple(fake(t).shape)
        if not same_sizes(have, mine):
            pad = len(mine) - len(have)
            sizes = [
                -1 if a >= pad and same_size(have[a - pad], s) else s for a, s in enumerate(mine)
            ]
            if not all(isinstance(s, int) for s in sizes):
                raise Decline("the document weights broadcast over sizes that are not known")
            t = e.method("expand", t, tuple(sizes))
        return reshaped(e, t, entries)


def reshaped(e: Emitter, t: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """`t` in another shape of which at most one size is unknown."""
    have = tuple(fake(t).shape)
    if same_sizes(have, shape):
        return t
    sizes = [s if isinstance(s, int) else -1 for s in shape]
    if sizes.count(-1) > 1:
        raise Decline("reshapes by more than one size that is not known")
    return e.method("reshape", t, tuple(sizes))


@dataclasses.dataclass(frozen=True)
class Weighted:
    """A tensor of contributions: node = gathered weights, through `of_one`, times the factors.

    shape, batch: of `node`, and its batch axis (None for a single query). The entries, all axes but
    the batch axis in order, flattened, are the gather's ids, flattened.
    """

    node: fx.Node
    gather: Gather
    shape: tuple[Any, ...]
    batch: int | None
    factors: tuple[Factor, ...] = ()
    of_one: tuple[fx.Node, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    reads: tuple[tuple[fx.Node, fx.Node], ...] = ()

    @property
    def entries(self) -> tuple[Any, ...]:
        return tuple(s for a, s in enumerate(self.shape) if a != self.batch)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the contributions; an assignment to them has no value of its own."""
        values = (fake(n) for n in (self.node, *reversed(self.nodes)))
        return next(v.dtype for v in values if isinstance(v, torch.Tensor))

    @property
    def masked(self) -> bool:
        """Whether some contributions do not count."""
        return any(f.how in ("keep", "drop") for f in self.factors)

    @property
    def has_weights(self) -> bool:
        return any(f.how in ("mul", "div") and isinstance(f.operand, fx.Node) for f in self.factors)

    def then(self, node: fx.Node, **changes: Any) -> Weighted:
        """One node further."""
        return dataclasses.replace(self, node=node, nodes=(*self.nodes, node), **changes)

    def of_one_query(self) -> Weighted:
        """The same, where the batch axis has size 1: it is no axis of the queries any more."""
        table = self.gather.table
        gather = dataclasses.replace(
            self.gather, table=lambda e: e.method("select", table(e), 0, 0), batch=None
        )
        return dataclasses.replace(self, gather=gather, batch=None)

    def scaled(self, factor: float) -> Weighted:
        """All contributions times a number, which is no node."""
        if factor == 1:
            return self
        one = Factor("mul", float(factor), self.shape, self.batch)
        return dataclasses.replace(self, factors=(*self.factors, one))

    def times(self, view: GraphView, node: fx.Node, factor: Factor, reader: fx.Node) -> Weighted:
        """With one more factor, read by `reader`."""
        reads = self.reads
        if isinstance(factor.operand, fx.Node):
            from_end = None
            if factor.batch is not None and factor.make is None:
                from_end = len(factor.shape) - factor.batch
            check_shared(view, self, factor.operand, reader, from_end)
            reads = (*reads, (factor.operand, reader))
        return self.then(node, factors=(*self.factors, factor), reads=reads)

    def query(self, e: Emitter) -> fx.Node:
        """The query weights [V] or [B, V]."""
        t = self.gather.table(e)
        if not fake(t).dtype.is_floating_point or self.dtype == torch.float64:
            t = e.cast(
                t, self.dtype
            )  # counts, cast after they were looked up; or it computes in fp64
        inner = self.gather.node
        for n in self.of_one:
            swap = lambda a, inner=inner, t=t: t if a is inner else a
            args, kwargs = fx.map_arg((n.args, n.kwargs), swap)
            insert = e.method if n.op == "call_method" else e.call
            t, inner = insert(n.target, *args, **kwargs), n
        return t

    def weights(self, e: Emitter, shape: Sequence[Any]) -> tuple[fx.Node, fx.Node | None]:
        """The factors as one tensor of document weights, and where the contributions count (None: everywhere)."""
        # Their product, a quotient, a count may have no place in 16 bits.
        dtype = torch.promote_types(self.dtype, torch.float32)
        scales = [f for f in self.factors if f.how in ("mul", "div")]
        alone = len(scales) == 1 and scales[0].how == "mul"
        weights: fx.Node | float | None = None
        keep: fx.Node | None = None
        for f in self.factors:
            t = f.build(e, shape)
            if f.how in ("keep", "drop"):
                assert isinstance(t, fx.Node)
                t = t if fake(t).dtype == torch.bool else e.call(torch.ne, t, 0)
                t = e.call(torch.logical_not, t) if f.how == "drop" else t
                keep = t if keep is None else e.call(torch.logical_and, keep, t)
                continue
            if isinstance(t, fx.Node) and not (alone and fake(t).dtype.is_floating_point):
                t = e.cast(t, dtype)
            apply = operator.mul if f.how == "mul" else operator.truediv
            if weights is None:
                weights = t if f.how == "mul" else _applied(e, operator.truediv, 1.0, t)
            else:
                weights = _applied(e, apply, weights, t)
        if not isinstance(weights, fx.Node):
            one = 1.0 if weights is None else weights
            weights = e.method("new_full", self.gather.source, (1,) * len(shape), one, dtype=dtype)
        return weights, keep

    def documents(self, e: Emitter, V: Any) -> tuple[fx.Node, fx.Node]:
        """ids and values, both in the shape of the entries; V is the id of what counts nothing."""
        ids = reshaped(e, self.gather.ids(e), self.entries)
        values, keep = self.weights(e, self.entries)
        if keep is not None:
            ids = e.call(torch.where, keep, ids, V)
            values = e.call(torch.where, keep, values, 0)
        return ids, values


def _applied(e: Emitter, apply: Callable[..., Any], a: Any, b: Any) -> Any:
    return e.call(apply, a, b) if isinstance(a, fx.Node) or isinstance(b, fx.Node) else apply(a, b)


ROWS = "rows of features are gathered and added up; nothing says that they are weights of queries"


class OfRows(Decline):
    """Whole rows of a table were looked up, and each of their features has a factor of its own: an embedding."""


def check_shared(
    view: GraphView, w: Weighted, operand: fx.Node, reader: fx.Node, from_end: int | None
) -> None:
    """A factor must be the same for every query, whose axis is `from_end` from the end, and need no gradient."""
    if from_end is not None and not uniform(view, operand, from_end, reader):
        if w.gather.features:
            raise OfRows(
                "whole rows are looked up and multiplied by a vector each: a product of dense vectors, not of terms",
                reader,
            )
        raise Decline("the document weights differ from query to query", reader)
    if view.learns(operand):
        if w.gather.features:
            raise Decline(ROWS, reader)
        raise Decline(
            "the document weights are learnt, and the operator has no gradient for them", reader
        )


def weighted(
    view: GraphView, node: Any, reader: fx.Node, read: Read = gather_of, reach: int = _REACH
) -> Weighted | None:
    """`node`, as `reader` sees it, as contributions; None where no gather is at its root.

    `read` says what counts as a gather. Raises Decline where there is one, and what follows it cannot be moved into
    the operator.
    """
    if not view.is_tensor(node) or reach == 0:
        return None
    seen = view.value(node, reader)
    if seen is None:
        return None
    node = seen
    found = read(view, node)
    if found is not None:
        w = Weighted(node, found, view.shape(node), found.batch, nodes=(node,))
        reads = ((found.source, node), (found.index, node))
        return dataclasses.replace(w, reads=reads)
    call = view.call(node)
    if call is None:
        return None
    if call.name in ("mul", "div", "true_divide"):
        return _product(view, node, call, read, reach - 1)
    if call.name in SELECTIONS:
        return _masked(view, node, call, read, reach - 1)
    if call.name == "einsum":
        return _lettered(view, node, call, read, reach - 1)
    inner = call.get("input")
    if call.name in COPIES | {"cast", "detach"}:
        return _through(view, node, call, read, reach - 1)
    if call.name in VIEWS:
        below = weighted(view, inner, node, read, reach - 1)
        return None if below is None else _viewed(view, below, node, call)
    if call.name in _OF_ONE_WEIGHT:
        return _function(view, node, call, read, reach - 1)
    return None


def _through(view: GraphView, node: fx.Node, call: Call, read: Read, reach: int) -> Weighted | None:
    w = weighted(view, call["input"], node, read, reach)
    if w is None:
        return None
    if call.name == "detach" and view.learns(call["input"]):
        raise Decline("the contributions are detached", node)
    if call.name == "cast":
        if not view.dtype(node).is_floating_point:
            raise Decline(f"the contributions are cast to {view.dtype(node)}", node)
        if fake(node).device != fake(w.node).device:
            raise Decline("the contributions move to another device", node)
        gathered = view.dtype(w.gather.node)
        if gathered.is_floating_point and rounds(view.dtype(node), gathered):
            raise Decline(f"the contributions are rounded to {view.dtype(node)}", node)
    return w.then(node)


def _function(
    view: GraphView, node: fx.Node, call: Call, read: Read, reach: int
) -> Weighted | None:
    """A function of the gathered weight alone can be taken of the query before the gather."""
    tensors = [a for a in node.all_input_nodes if view.is_tensor(a)]
    if len(tensors) != 1 or call.get("input") is not tensors[0] or call.get("rounding_mode"):
        return None
    w = weighted(view, tensors[0], node, read, reach)
    if w is None:
        return None
    if call.name == "neg":
        return w.times(view, node, Factor("mul", -1.0, w.shape, w.batch), node)
    if w.gather.features and call.name not in _KEEPS_ZERO:
        return None  # the square of an embedding, say
    if w.has_weights or any(f.how in ("keep", "drop") for f in w.factors):
        raise Decline(f"{call.name} of the products: they are no terms of an inner product", node)
    if call.name not in _KEEPS_ZERO and view.learns(tensors[0]):
        raise Decline(
            f"{call.name} of the gathered weights alone: of the others its gradient may be no number",
            node,
        )
    if w.factors or call.inplace or w.node is not (w.of_one or (w.gather.node,))[-1]:
        return None  # scaled or reshaped before it: nobody has been seen to write this
    return w.then(node, of_one=(*w.of_one, node))


def _product(view: GraphView, node: fx.Node, call: Call, read: Read, reach: int) -> Weighted | None:
    if call.get("rounding_mode"):
        return None
    a, b = call["input"], call["other"]
    sides = [(a, b)] if call.name == "div" else [(a, b), (b, a)]
    found: list[tuple[Weighted, Any]] = []
    declined: Decline | None = None
    for mine, other in sides:
        try:
            w = weighted(view, mine, node, read, reach)
        except Decline as d:
            declined = declined or d
            continue
        if w is not None:
            found.append((w, other))
    if not found:
        if declined is not None:
            raise declined
        return None
    if len(found) == 2 and all(w.gather.features for w, _ in found):
        return None
    shape = view.shape(node)
    full = lambda w: same_sizes(shape, w.shape)
    w, other = min(found, key=lambda f: (not full(f[0]), *preference(view, f[0])))
    if not full(w):
        raise Decline("the document weights have more axes than the gathered query weights", node)
    if not view.dtype(node).is_floating_point:
        raise Decline(f"the products are {view.dtype(node)}, which overflow as they do", node)
    how = "div" if call.name == "div" else "mul"
    if not view.is_tensor(other):
        const = view.const(other, node)
        if const is None:
            raise Decline("the products are scaled by a number that is not known", node)
        return w.times(view, node, Factor(how, const, w.shape, w.batch), node)
    written = view.value(other, node)
    if written is not None and view.is_tensor(written):  # an assignment has no value of its own
        other = written
    return w.times(view, node, Factor(how, other, w.shape, w.batch), node)


def preference(view: GraphView, w: Weighted) -> tuple[bool, ...]:
    """The query is no gather of rows, has a batch axis, or gradients, or is no buffer; the documents are the other."""
    source = w.gather.source
    kept = is_parameter(view, source) or "buffers" in source.name
    return w.gather.features, w.batch is None, not view.requires_grad(source), kept


def _masked(view: GraphView, node: fx.Node, call: Call, read: Read, reach: int) -> Weighted | None:
    """The contributions where a mask says so, else 0."""
    ways = selections(view, call)
    found = next((one for one in ways if view.const(one.other, node) == 0), next(iter(ways), None))
    w = None if found is None else weighted(view, found.x, node, read, reach)
    if found is None or w is None:
        return None
    mask = found.keep
    if isinstance(mask, Assigned):
        mask = trailing_mask(view, found.x, mask)
    if mask is None:
        raise Decline("a part of the contributions is assigned to", node)
    assigns = call.name not in ("where", "masked_fill")
    if view.const(found.other, node) != 0 or (
        assigns and not view.dtype(w.gather.node).is_floating_point
    ):
        raise Decline("masked contributions are not 0", node)
    if not (assigns or same_sizes(view.shape(node), w.shape)):
        raise Decline("the mask has more axes than the contributions", node)
    how = "drop" if found.negate else "keep"
    return w.times(view, node, Factor(how, mask, w.shape, w.batch), node)


def _lettered(
    view: GraphView, node: fx.Node, call: Call, read: Read, reach: int
) -> Weighted | None:
    """An einsum that only multiplies: bnl,nl->bnl, or btp,bt->btp."""
    product = lettered(view, call)
    if product is None:
        return None
    operands, letters, out = product
    for i in (0, 1):
        mine, theirs, other = letters[i], letters[1 - i], operands[1 - i]
        ordered = "".join(c for c in out if c in theirs) == theirs
        if mine != out or len(set(out)) != len(out) or not ordered or not theirs:
            continue
        w = weighted(view, operands[i], node, read, reach)
        if w is None or not same_sizes(w.shape, view.shape(node)):
            continue
        factor = Factor("mul", other, w.shape, w.batch)
        if not out.endswith(theirs):
            if w.batch is not None and out[w.batch] in theirs:
                raise Decline("the document weights differ from query to query", node)
            at = tuple(slice(None) if c in theirs else None for c in out)
            spread = lambda e, other=other, at=at: e.call(operator.getitem, other, at)
            factor = dataclasses.replace(factor, make=spread)
        return w.times(view, node, factor, node)
    return None


def _viewed(view: GraphView, w: Weighted, node: fx.Node, call: Call) -> Weighted:
    """A view keeps the entries in their order and the batch axis apart from them."""
    before, after = w.shape, view.shape(node)
    n = len(before)
    order = order_of(call, n)
    if order is not None:
        entries = [a for a in order if a != w.batch]
        if [a for a in entries if not same_size(before[a], 1)] != [
            a for a in sorted(entries) if not same_size(before[a], 1)
        ]:
            raise Decline("reorders the contributions", node)
        batch = None if w.batch is None else order.index(w.batch)
        return w.then(node, shape=after, batch=batch)
    if call.name == "getitem" and not only_new_axes(call["index"]):
        raise Decline("takes a part of the contributions", node)
    if not same_size(math.prod(before), math.prod(after)):
        raise Decline("expands or reshapes the contributions by sizes that are not known", node)
    if w.batch is None:
        return w.then(node, shape=after)
    batch = kept_axis(before, w.batch, after)
    if batch is None and same_size(before[w.batch], 1):
        return w.of_one_query().then(node, shape=after)
    if batch is None:
        raise Decline("merges queries and documents into one axis", node)
    return w.then(node, shape=after, batch=batch)


def kept_axis(before: Sequence[Any], axis: int, after: Sequence[Any]) -> int | None:
    """Where an axis of a reshaped tensor is: as many elements before it and after it."""
    left, right = math.prod(before[:axis]), math.prod(before[axis + 1 :])
    for p, size in enumerate(after):
        if (
            same_size(size, before[axis])
            and same_size(math.prod(after[:p]), left)
            and same_size(math.prod(after[p + 1 :]), right)
        ):
            return p
    return None
