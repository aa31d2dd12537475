"""Gathered query weights times document weights, through views, masks and casts.

`contributions` walks up from a tensor, with axes made of atoms (`graph.axes`), to the gather at its root, and then
reads the operations from there down. Everything that does not depend on the gather is a factor: it stays in the graph
and becomes part of the document weights. The other operand of a product with a sum is an ordinary factor.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, above, flat
from ...graph.contraction import Operand, contraction
from ...graph.emit import Emitter
from ...graph.layout import at_first, laid_out
from ...graph.names import Call, stored
from ...graph.no_match import NoMatch
from ...graph.selection import SELECTIONS, Assigned, Selection, selections
from ...graph.values import extreme, is_parameter, rounds, uniform
from ...graph.view import GraphView, fake, same_size
from ...graph.vocabulary import COPIES, VIEWS
from ..chains.family import may_be_above
from .gathers import LOOKUPS, VOCABULARY, Gather, gather_of, rows_of

Axes = tuple[Axis, ...]
Groups = Sequence[Sequence[Atom]]
Read = Callable[[GraphView, Any], Gather | None]

ROWS = "rows of features are gathered and added up; nothing says that they are weights of queries"
_REACH = 24  # nodes between a reduction and its gather; programs have at most ten
_PASSED = COPIES | {"cast", "detach"}
# Functions with a backward that maps a gradient of 0 to 0 for every weight. The operator's gradient is 0 for a weight
# that no document uses.
_KEEPS_ZERO = frozenset("relu clamp clamp_min clamp_max add sub rsub mul div".split())
_OF_ONE_WEIGHT = frozenset(
    "relu log log1p log2 log10 exp expm1 sqrt square tanh sigmoid abs neg pow clamp clamp_min "
    "clamp_max add sub rsub div mul reciprocal nan_to_num softplus".split()
)


class OfRows(NoMatch):
    """Whole rows of a table are looked up, and each feature has a separate factor. This is an embedding unless the
    products are summed over the features."""


class OfPairs(OfRows):
    """Both factors are rows that are looked up, such as the ends of an edge, or a user and an item."""


class Factor(NamedTuple):
    """An operand that multiplies or divides contributions, or a mask that keeps or drops them.

    made: a function to apply to the operand first, once it has the axes of the contributions.
    """

    how: str  # "mul", "div", "keep", "drop"
    operand: Placed
    made: Callable[[Emitter, fx.Node], fx.Node] = lambda e, t: t


@dataclasses.dataclass(frozen=True)
class Contributions:
    """Gathered weights, after the functions `of_one`, times the factors and a number. axes: those of the gather."""

    gather: Gather
    axes: Axes
    nodes: tuple[fx.Node, ...]
    factors: tuple[Factor, ...] = ()
    of_one: tuple[fx.Node, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if extreme(self.scale):
            raise NoMatch(f"the products are scaled by {self.scale:g}", self.nodes[-1])

    @property
    def queries(self) -> tuple[Atom, ...]:
        return tuple(a for at in self.gather.queries for a in flat(self.axes[at]))

    @property
    def entries(self) -> tuple[Atom, ...]:
        """All atoms but those of the queries, in their order."""
        places = (at for at in range(len(self.axes)) if at not in self.gather.queries)
        return tuple(a for at in places for a in flat(self.axes[at]))

    @property
    def operands(self) -> list[Placed]:
        """The operands of the factors, and the ids."""
        return [*(f.operand for f in self.factors), self.gather.ids(self.axes)]

    def same_for_all(self, view: GraphView, t: Placed) -> bool:
        """Whether a tensor is the same for all queries. Raises NoMatch if the axes of the queries are not known."""
        queries = {*self.queries}
        for from_end, axis in enumerate(reversed(t.axes), 1):
            if queries.isdisjoint(flat(axis)):
                continue
            if not {*flat(axis)} <= queries:
                raise NoMatch("merges queries and documents into one axis", t.reader)
            if not uniform(view, t.node, from_end, t.reader):
                return False
        return True

    @property
    def sized(self) -> list[Placed]:
        """The tensors from which sizes may be read."""
        whole = not (self.gather.part or self.gather.repeated)
        return [*self.operands, *([self.gather.whole_table(self.axes)] if whole else [])]

    @property
    def reads(self) -> list[tuple[fx.Node, fx.Node]]:
        """The nodes that are read, each with its reader."""
        return [
            (self.gather.source, self.gather.node),
            *(r for t in self.operands for r in t.reads),
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the contributions."""
        dtype: torch.dtype = fake(stored(self.nodes[-1])).dtype
        return dtype

    @property
    def masked(self) -> bool:
        """Whether some contributions do not count."""
        return any(f.how in ("keep", "drop") for f in self.factors)

    @property
    def has_weights(self) -> bool:
        return any(f.how in ("mul", "div") for f in self.factors)

    def then(self, node: fx.Node, **changes: Any) -> Contributions:
        """The contributions after a further node."""
        return dataclasses.replace(self, nodes=(*self.nodes, node), **changes)

    def times(self, *factor: Any) -> Contributions:
        """The contributions with a further `Factor`."""
        return dataclasses.replace(self, factors=(*self.factors, Factor(*factor)))

    def scaled(self, number: float) -> Contributions:
        return dataclasses.replace(self, scale=self.scale * number)

    # Emission

    def query(self, e: Emitter) -> fx.Node:
        """The query weights [V] or [B, V]."""
        table = at_first(e, self.gather.table(e, self.axes), self.entries)
        groups = [self.queries, (VOCABULARY,)] if self.queries else [(VOCABULARY,)]
        t = laid_out(e, table, groups)
        # Integers are cast after the look-up, as are narrower weights if the program computes in float64.
        if not fake(t).dtype.is_floating_point or self.dtype == torch.float64:
            t = e.cast(t, self.dtype)
        inner = self.gather.node
        for n in self.of_one:
            t, inner = e.again(n, {inner: t}), n
        return t

    def ids(self, e: Emitter, groups: Groups) -> fx.Node:
        ids = self.placed(e, self.gather.ids(self.axes), groups)
        if self.gather.wraps:
            size = e.size(self.gather.source, self.gather.dim)
            ids = e.call(torch.remainder, ids, size)
        return ids

    def placed(self, e: Emitter, t: Placed, groups: Groups) -> fx.Node:
        """A tensor that is the same for all queries, with all elements of the groups of entries."""
        return laid_out(e, at_first(e, t, self.queries), groups, full=True, sized=self.sized)

    def weights(self, e: Emitter, groups: Groups) -> tuple[fx.Node, fx.Node | None]:
        """The factors as one tensor of document weights, and the mask of contributions that count (None: all)."""
        # A product of factors, a quotient or a count may exceed the range of 16 bits.
        dtype = torch.promote_types(self.dtype, torch.float32)
        alone = [f.how for f in self.factors if f.how in ("mul", "div")] == ["mul"]
        weights: Any = self.scale
        keep: fx.Node | None = None
        for how, operand, made in self.factors:
            t = made(e, self.placed(e, operand, groups))
            if how in ("keep", "drop"):
                t = t if fake(t).dtype == torch.bool else e.call(torch.ne, t, 0)
                t = e.call(torch.logical_not, t) if how == "drop" else t
                keep = t if keep is None else e.call(torch.logical_and, keep, t)
            elif alone and self.scale == 1 and fake(t).dtype.is_floating_point:
                weights = t
            else:
                t = e.cast(t, dtype)
                first = how == "mul" and isinstance(weights, float) and weights == 1
                apply = operator.mul if how == "mul" else operator.truediv
                weights = t if first else e.call(apply, weights, t)
        if not isinstance(weights, fx.Node):
            ones = (1,) * len(groups)
            weights = e.method("new_full", self.gather.source, ones, weights, dtype=dtype)
        return weights, keep


# The way from a tensor up to the gather at its root


class _Step(NamedTuple):
    """A node on the way, and its operand `x`, with which the way continues. how: the effect of the operand `other`, if
    there is one: a factor ("mul", "div") or a selection ("keep", "drop")."""

    node: fx.Node
    call: Call
    x: Any
    how: str = ""
    other: Any = None


class _Way(NamedTuple):
    """The way from a tensor up to the gather at its root."""

    gather: Gather
    steps: tuple[_Step, ...] = ()

    def preference(self, view: GraphView) -> tuple[bool, ...]:
        """A sort key by which the gather of the query comes before that of the documents. The query is not gathered by
        rows, has a separate axis, needs a gradient, and is no parameter or buffer."""
        source = self.gather.source
        kept = is_parameter(view, source) or "buffers" in source.name
        features, single = self.gather.features, not self.gather.queries
        return features, single, not view.requires_grad(source), kept

    def spread(self, view: GraphView) -> bool:
        """Whether a factor has more axes than what it multiplies, which no operator takes."""
        return any(s.how and not view.same_shape(s.x, s.node) for s in self.steps)


def _ways(
    view: GraphView, node: Any, reader: fx.Node, read: Read, reach: int = _REACH
) -> Iterator[_Way]:
    """Every way from `node`, as `reader` sees it, up to a gather according to `read`."""
    seen = view.value(node, reader) if view.is_tensor(node) and reach else None
    if seen is None or not may_be_above(view, [seen], LOOKUPS):
        return
    gather = read(view, seen)
    if gather is not None:
        yield _Way(gather)
        return
    for step in _steps(view, seen):
        for way in _ways(view, step.x, seen, read, reach - 1):
            yield _Way(way.gather, (step, *way.steps))


def _steps(view: GraphView, node: fx.Node) -> Sequence[_Step]:
    """The possible steps up from a node. If the node is contributions, so is the operand of one of the steps."""
    call = view.call(node)
    if call.get("rounding_mode"):
        return ()
    match call.name:
        case "mul":
            return [_Step(node, call, x, "mul", y) for x, y in dict.fromkeys(call.both_ways)]
        case "div":
            return (_Step(node, call, call["input"], "div", call["other"]),)
        case "einsum":  # without a sum: bnl,nl->bnl, or btp,bt->btp
            product = contraction(view, node)
            if product is None or product.summed:
                return ()
            both = product.operands, product.operands[::-1]
            return [_Step(node, call, x.node, "mul", y) for x, y in both if x.axes == product.axes]
        case name if name in SELECTIONS:
            ways = sorted(selections(view, call), key=lambda s: view.const(s.other, node) != 0)
            return [_Step(node, call, s.x, "drop" if s.negate else "keep", s) for s in ways[:1]]
        case name if name in _PASSED | VIEWS:
            return (_Step(node, call, call["input"]),)
    tensors = [a for a in node.all_input_nodes if view.is_tensor(a)]
    alone = call.name in _OF_ONE_WEIGHT and tensors == [call.get("input")]
    return (_Step(node, call, tensors[0]),) if alone else ()


def contributions(
    view: GraphView,
    node: Any,
    axes: Sequence[Axis],
    reader: fx.Node,
    read: Read = gather_of,
    out: Sequence[Axis] | None = None,
) -> Contributions | None:
    """`node` with the given axes, as `reader` sees it, as contributions; None if it has no gather at its root, or if
    the axes `out` of a sum are those of the queries alone: a single document, whose score is a dot product.

    `read` returns the gather of a node, if it is one. Raises NoMatch if there is a gather, but the operations after it
    cannot be moved into the operator.
    """
    found = contributions_among(view, [(node, axes)], reader, read, out)
    return None if found is None else found[1]


def contributions_among(
    view: GraphView,
    operands: Sequence[tuple[Any, Sequence[Axis]]],
    reader: fx.Node,
    read: Read = gather_of,
    out: Sequence[Axis] | None = None,
) -> tuple[int, Contributions] | None:
    """The index of the operand of a product that is contributions, and these; see `contributions`."""
    ways = [(i, way) for i, (x, _) in enumerate(operands) for way in _ways(view, x, reader, read)]
    ways = [found for found in ways if not found[1].spread(view)] or ways
    for i, way in sorted(ways, key=lambda found: found[1].preference(view)):
        w = _read(view, way, tuple(operands[i][1]), out)
        if w is not None:
            return i, w
    return None


def _read(
    view: GraphView, way: _Way, axes: Axes, out: Sequence[Axis] | None
) -> Contributions | None:
    """The contributions that the operations of a way, from the gather down, compute. axes: those at its lower end."""
    with_axes = []
    for step in way.steps:
        with_axes.append((step, axes))
        try:
            if step.how and not view.same_shape(step.x, step.node):
                what = "the document weights have" if step.how in ("mul", "div") else "the mask has"
                raise NoMatch(f"{what} more axes than the gathered query weights", step.node)
            if step.call.name in VIEWS:
                axes = tuple(above(view, step.node, step.call, axes))
        except NoMatch:
            if way.gather.features or is_parameter(view, way.gather.source):
                return None  # views of an embedding, say
            raise
    gathered = Contributions(way.gather, axes, (way.gather.node,))
    if out is not None and {a for o in out for a in flat(o)} == {*gathered.queries}:
        return None
    w: Contributions | None = gathered
    for step, axes in reversed(with_axes):
        follow = (
            _factor if step.how else _passed if step.call.name in _PASSED | VIEWS else _function
        )
        w = None if w is None else follow(view, w, step, axes)
    return w


def _factor(view: GraphView, w: Contributions, step: _Step, axes: Axes) -> Contributions:
    node, call, _, how, other = step
    if isinstance(other, Selection):  # contributions become 0 where a mask drops them
        if isinstance(other.keep, Assigned):
            raise NoMatch("a part of the contributions is assigned to", node)
        assigns = call.name not in ("where", "masked_fill")
        integers = assigns and not view.dtype(w.gather.node).is_floating_point
        if view.const(other.other, node) != 0 or integers:
            raise NoMatch("masked contributions are not 0", node)
        other = other.keep
    elif not view.dtype(node).is_floating_point:
        raise NoMatch(f"the products are {view.dtype(node)}, which overflow as they do", node)
    product = contraction(view, node) if isinstance(other, Operand) else None
    if product is not None:
        by_letter = dict(zip(product.axes, axes))
        other, axes = other.node, tuple(by_letter.get(letter, ()) for letter in other.axes)
    if view.is_tensor(other):
        return multiplied(view, w, how, other, axes, node).then(node)
    const = view.const(other, node)
    if const is None:
        raise NoMatch("the products are scaled by a number that is not known", node)
    if how == "div":
        const = 1 / const if const else math.inf
    return w.then(node).scaled(const)


def _passed(view: GraphView, w: Contributions, step: _Step, axes: Axes) -> Contributions:
    node, call, x = step[:3]
    if call.name == "detach" and view.needs_grad(x):
        raise NoMatch("the contributions are detached", node)
    if call.name == "cast":
        if not view.dtype(node).is_floating_point:
            raise NoMatch(f"the contributions are cast to {view.dtype(node)}", node)
        if fake(node).device != fake(x).device:
            raise NoMatch("the contributions move to another device", node)
        gathered = view.dtype(w.gather.node)
        if gathered.is_floating_point and rounds(view.dtype(node), gathered):
            raise NoMatch(f"the contributions are rounded to {view.dtype(node)}", node)
    return w.then(node)


def _function(view: GraphView, w: Contributions, step: _Step, axes: Axes) -> Contributions | None:
    """A function that only depends on the gathered weight can be applied to the query before the gather."""
    node, call, x = step[:3]
    if call.name == "neg":
        return w.then(node).scaled(-1)
    if w.gather.features and call.name not in _KEEPS_ZERO:
        return None  # the square of an embedding, say
    if w.has_weights or w.masked:
        raise NoMatch(f"{call.name} of the products: they are no terms of an inner product", node)
    if call.name not in _KEEPS_ZERO and view.needs_grad(x):
        raise NoMatch(
            f"{call.name} of the gathered weights alone: of the others its gradient may be no number",
            node,
        )
    if (
        w.factors
        or w.scale != 1
        or call.inplace
        or w.nodes[-1] is not (w.of_one or w.nodes[:1])[-1]
    ):
        return None  # scaled or reshaped before the function: not seen in any program
    return w.then(node, of_one=(*w.of_one, node))


# Factors


def multiplied(
    view: GraphView,
    w: Contributions,
    how: str,
    other: fx.Node,
    axes: Sequence[Axis],
    reader: fx.Node,
) -> Contributions:
    """Contributions with a tensor that broadcasts to `axes` as a further factor. Raises NoMatch unless the tensor is
    the same for every query and needs no gradient."""
    seen = view.value(other, reader)
    if seen is not None and view.is_tensor(seen):  # an assignment is not a tensor
        other = seen
    sizes = view.shape(other)
    own = axes[len(axes) - len(sizes) :]
    placed = Placed(other, reader, tuple(() if same_size(s, 1) else a for s, a in zip(sizes, own)))
    if not w.same_for_all(view, placed):
        raise _varies(view, w, other, reader)
    if view.needs_grad(other):
        if w.gather.features:
            raise NoMatch(ROWS, reader)
        raise NoMatch(
            "the document weights are learnt, and the operator has no gradient for them", reader
        )
    return w.times(how, placed)


def _varies(view: GraphView, w: Contributions, operand: fx.Node, reader: fx.Node) -> NoMatch:
    """Why a factor that differs from query to query is not supported."""
    if not w.gather.features:
        return NoMatch("the document weights differ from query to query", reader)
    original, passed = view.behind(operand, VIEWS | COPIES | {"cast"})
    looked_up = next((n for n in (*passed, original) if _by_query(view, n)), None)
    if looked_up is not None:
        return NoMatch(
            "every query has documents of its own: the operator takes one collection", looked_up
        )
    pairs = any(rows_of(view, n) is not None for n in (*passed, original))
    return (OfPairs if pairs else OfRows)(
        "whole rows are looked up and multiplied by a vector each: a product of dense vectors, not of terms",
        reader,
    )


def _by_query(view: GraphView, node: Any) -> bool:
    """Whether a look-up has separate indices for each row: gather, or an index of rows and columns."""
    call = view.call(node)
    index = call.get("index")
    pairs = isinstance(index, tuple) and sum(map(view.is_tensor, index)) > 1
    return pairs or call.name in ("gather", "take_along_dim")
