"""Finds contributions.

A walk goes up from a tensor, with axes made of atoms (`graph.axes`), to the gather of query weights at its root. The
operations on the way are then read from there down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from ...graph.axes import Axis, Placed, above, flat, last_axes
from ...graph.contraction import Operand, contraction
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.selection import SELECTIONS, Assigned, Selection, selections
from ...graph.values import check_cast, is_parameter, made_of_parameters
from ...graph.view import GraphView
from ...graph.vocabulary import SAME_VALUES, VIEWS
from ..chains.family import may_be_above
from .contributions import Axes, Contributions
from .gathers import LOOKUPS, Gather, gather_of, rows_of

Read = Callable[[GraphView, Any], Gather | None]

ROWS = "rows of features are gathered and added up; nothing says that they are weights of queries"
_REACH = 24  # nodes between a reduction and its gather; programs have at most ten
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
        case name if name in SAME_VALUES | VIEWS:
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
            _factor if step.how else _passed if step.call.name in SAME_VALUES | VIEWS else _function
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
        gathered = view.dtype(w.gather.node)
        floats = (gathered,) if gathered.is_floating_point else ()
        check_cast(view, node, "the contributions", *floats)
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
    placed = Placed(other, reader, tuple(last_axes(view.shape(other), axes)))
    if not w.same_for_all(view, placed):
        raise _varies(view, w, other, reader)
    if view.needs_grad(other):
        memory = is_parameter(view, w.gather.source) and not made_of_parameters(view, other)
        if w.gather.features or memory:
            raise NoMatch(ROWS, reader)
        raise NoMatch(
            "the document weights are learnt, and the operator has no gradient for them", reader
        )
    return w.times(how, placed)


def _varies(view: GraphView, w: Contributions, operand: fx.Node, reader: fx.Node) -> NoMatch:
    """Why a factor that differs from query to query is not supported."""
    if not w.gather.features:
        return NoMatch("the document weights differ from query to query", reader)
    original, passed = view.behind(operand, VIEWS | SAME_VALUES)
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
