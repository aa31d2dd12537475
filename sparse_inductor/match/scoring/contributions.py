"""Contributions: gathered query weights times document weights, and how the operator's documents are made of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...graph.emit import Emitter
from ...graph.no_match import NoMatch
from ...graph.values import extreme, uniform
from ...graph.view import GraphView, fake, same_size, same_sizes
from ...graph.vocabulary import COPIES, VIEWS
from .gathers import Gather

Make = Callable[[Emitter], fx.Node]


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
    make: Make | None = None

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
                raise NoMatch("the document weights broadcast over sizes that are not known")
            t = e.method("expand", t, tuple(sizes))
        return reshaped(e, t, entries)


def merged(shape: Sequence[Any], lead: int) -> tuple[Any, ...]:
    """A shape whose first axes, one more than `lead`, are one."""
    return (math.prod(shape[: lead + 1]), *shape[lead + 1 :])


def reshaped(e: Emitter, t: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """`t` in another shape of which at most one size is unknown."""
    have = tuple(fake(t).shape)
    if same_sizes(have, shape):
        return t
    sizes = [s if isinstance(s, int) else -1 for s in shape]
    if sizes.count(-1) > 1:
        raise NoMatch("reshapes by more than one size that is not known")
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

    def __post_init__(self) -> None:
        scale = 1.0
        for f in self.factors:
            if not isinstance(f.operand, fx.Node):
                divided = 1 / f.operand if f.operand else math.inf
                scale *= f.operand if f.how == "mul" else divided
        if extreme(scale):
            raise NoMatch(f"the products are scaled by {scale:g}", self.node)

    @property
    def entries(self) -> tuple[Any, ...]:
        return tuple(s for a, s in enumerate(self.shape) if a != self.batch)

    @property
    def lead(self) -> int:
        """How many axes the shape has less than `node`, since the queries' are one."""
        return self.gather.lead

    def alike(self, shape: Sequence[Any]) -> bool:
        """Whether a tensor of a shape has that of the contributions."""
        return same_sizes(merged(shape, self.lead), self.shape)

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

    def times(
        self, view: GraphView, node: fx.Node, how: str, operand: Any, make: Make | None = None
    ) -> Weighted:
        """One node further, which multiplies by a factor; see `Factor`."""
        reads = self.reads
        if isinstance(operand, fx.Node):
            if self.lead and len(sizes := view.shape(operand)) >= len(self.shape):
                if any(not same_size(s, 1) for s in sizes[: 1 - len(self.shape)]):
                    raise NoMatch("the document weights differ from query to query", node)
                raise NoMatch(SEVERAL, node)
            apart = self.batch is not None and make is None
            from_end = len(self.shape) - (self.batch or 0) if apart else None
            check_shared(view, self, operand, node, from_end)
            reads = (*reads, (operand, node))
        factor = Factor(how, operand, self.shape, self.batch, make)
        return self.then(node, factors=(*self.factors, factor), reads=reads)

    def query(self, e: Emitter) -> fx.Node:
        """The query weights [V] or [B, V]."""
        t = self.gather.table(e)
        # Counts are cast after they were looked up, and what is narrower where it is computed in double precision.
        if not fake(t).dtype.is_floating_point or self.dtype == torch.float64:
            t = e.cast(t, self.dtype)
        inner = self.gather.node
        for n in self.of_one:
            t, inner = e.again(n, {inner: t}), n
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


SEVERAL = "queries on several axes: make one of them before (flatten), and several of the scores' (unflatten)"
ROWS = "rows of features are gathered and added up; nothing says that they are weights of queries"


class OfRows(NoMatch):
    """Whole rows of a table were looked up, and each of their features has a factor of its own: an embedding."""


def check_shared(
    view: GraphView, w: Weighted, operand: fx.Node, reader: fx.Node, from_end: int | None
) -> None:
    """A factor must be the same for every query, whose axis is `from_end` from the end, and need no gradient."""
    if from_end is not None and not uniform(view, operand, from_end, reader):
        original, passed = view.behind(operand, VIEWS | COPIES | {"cast"})
        looked_up = next((n for n in (*passed, original) if _by_query(view, n)), None)
        if w.gather.features and looked_up is not None:
            raise NoMatch(
                "every query has documents of its own: the operator takes one collection", looked_up
            )
        if w.gather.features:
            raise OfRows(
                "whole rows are looked up and multiplied by a vector each: a product of dense vectors, not of terms",
                reader,
            )
        raise NoMatch("the document weights differ from query to query", reader)
    if view.needs_grad(operand):
        if w.gather.features:
            raise NoMatch(ROWS, reader)
        raise NoMatch(
            "the document weights are learnt, and the operator has no gradient for them", reader
        )


def _by_query(view: GraphView, node: Any) -> bool:
    """Whether a look-up has an index of each row's own: gather, or an index of rows and columns."""
    call = view.call(node)
    index = call.get("index") if call is not None else None
    pairs = isinstance(index, tuple) and sum(map(view.is_tensor, index)) > 1
    return pairs or (call is not None and call.name in ("gather", "take_along_dim"))


def times_lettered(
    view: GraphView, node: fx.Node, w: Weighted, xs: Sequence[str], other: Any, ys: Sequence[str]
) -> Weighted | None:
    """Contributions with the axes `xs`, times an operand with the axes `ys`."""
    sizes = dict(zip(ys, view.shape(other)))
    extra = [c for c in ys if c not in xs]
    if len(set(ys)) != len(ys):
        return None
    if any(not same_size(sizes[c], 1) for c in extra):
        if w.gather.features:
            return None  # rows that were looked up, through a linear
        raise NoMatch(
            "a product with a matrix: the document weights have an axis of their own", node
        )
    if any(
        same_size(w.shape[xs.index(c)], 1) and not same_size(sizes[c], 1) for c in ys if c in xs
    ):
        return None  # the gathered weights are the ones that repeat themselves
    shared = None if w.batch is None or xs[w.batch] not in ys else xs[w.batch]
    check_shared(view, w, other, node, None if shared is None else len(ys) - ys.index(shared))

    def aligned(e: Emitter) -> fx.Node:
        t, have = other, list(ys)
        for c in [*extra, *([] if w.batch is None else [xs[w.batch]])]:
            if c in have:
                t = e.method("select", t, have.index(c), 0)
                have.remove(c)
        order = [have.index(c) for c in xs if c in have]
        t = e.permuted(t, order)
        for at, c in enumerate(xs):
            if c not in have:
                t = e.method("unsqueeze", t, at)
        return t

    factor = Factor("mul", other, w.shape, w.batch, aligned)
    reads = (*w.reads, (other, node))
    return dataclasses.replace(w, factors=(*w.factors, factor), reads=reads)
