"""Conditions that compare a value with a number: relu, threshold and clamp written with a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...epilogue.ranges import prove
from ...epilogue.steps import Step, value_at
from ...graph.no_match import NoMatch
from ...graph.search import taken_apart
from ...graph.view import GraphView, label
from ...graph.vocabulary import COMPARISONS, COPIES, NEGATIONS
from .epilogue_chain import Element, EpilogueChain, Term

COMPARED = COPIES | {"detach"}  # detach does not matter here: a comparison propagates no gradient


class Edge(NamedTuple):
    """A condition that holds for values on one side of the number `at`: above it if `above`, else below it.

    ties: it also holds for values equal to `at`. nan: it also holds for NaN. nodes: the nodes that compute it.
    """

    at: float
    above: bool
    ties: bool
    nan: bool
    nodes: tuple[fx.Node, ...]


def _compared(
    view: GraphView, node: fx.Node, condition: Any, mine: fx.Node, negate: bool
) -> Edge | None:
    """How `condition` (with `negate`, its negation) compares the value `mine` with a constant.

    None if it is not such a comparison. Raises NoMatch if it compares `mine` with anything but a constant.
    """
    condition, wrapped, negated = unwrapped(view, condition)
    call = view.call(condition)
    if call.name not in COMPARISONS:
        return None
    negate ^= negated
    large, small, ties = call.ordered(negate)
    for operand, other, above in ((large, small, True), (small, large, False)):
        if not view.is_tensor(operand):
            continue
        theirs = view.value(operand, condition)
        if theirs is None:
            continue
        original, copies = view.behind(theirs, COMPARED)
        same = view.same_value(mine, theirs) or view.same_value(
            view.behind(mine, COMPARED)[0], original
        )
        if not same:
            continue
        at = view.const(other, node)
        if at is None:
            what = label(other) if isinstance(other, fx.Node) else "it"
            raise NoMatch(f"the threshold ({what}) is a tensor, not a number", node)
        return Edge(at, above, ties, negate, (*wrapped, condition, *copies))
    return None


def is_comparison(view: GraphView, condition: Any) -> bool:
    """Whether a condition is a comparison or the negation of one."""
    return view.call(unwrapped(view, condition)[0]).name in COMPARISONS


def unwrapped(view: GraphView, condition: Any) -> tuple[Any, list[fx.Node], bool]:
    """A condition without its negations, copies and casts; these nodes, last one first; and whether they negate it."""
    condition, wrapped = view.behind(condition, NEGATIONS | COMPARED | {"cast"})
    return condition, wrapped, sum(view.name_of(n) in NEGATIONS for n in wrapped) % 2 == 1


# A value that is kept where it, or a value that it was computed from, is above a number is a threshold, as in
# where(z > 0, log1p(z), 0): (f(z) where z > t, else c) equals f(z where z > t, else k) if f(k) = c.

# The operation that combines two conditions: with "and_" a value is kept where both hold, and with "or_" (`negate`) it
# is replaced where either holds.
_BOTH = {False: "and_", True: "or_"}


def kept(
    view: GraphView,
    node: fx.Node,
    up: Callable[[fx.Node], EpilogueChain],
    x: Any,
    keep: Any,
    negate: bool,
    c: float,
    factor: bool = False,
) -> EpilogueChain | None:
    """The epilogue of `node`, which keeps `x` where the condition `keep` holds and is `c` elsewhere.

    None unless `keep` compares `x`, or a value that `x` was computed from, with a number. It may also contain masks.
    up: returns the epilogue of `x`. negate: `keep` marks the values to replace instead. factor: `x` is multiplied by 1
    where it is kept and by 0 elsewhere, so that it has to be finite there.
    """
    parts, nodes = _conditions(view, keep, node, negate)
    # A comparison of one number per token is an ordinary mask.
    each = any(is_comparison(view, p) and view.same_shape(p, x) for p in parts)
    if not (view.is_tensor(x) and each):
        return None
    epilogue, through, masks = up(x), False, []
    if len(epilogue.factors) > 1:
        return None
    for part in parts:
        found = _gated(view, node, epilogue, part, negate, c, factor)
        if found is None:
            way = "not" if negate else None
            masks.append(Term("mul", part) if factor else Term("where", part, (c,), way))
        else:
            epilogue, through = found, True
    if not through:
        return None
    return epilogue.then(Element(node, (*masks,), extra=nodes)) if nodes else epilogue


def _conditions(
    view: GraphView, x: Any, node: fx.Node, negate: bool
) -> tuple[list[Any], tuple[fx.Node, ...]]:
    """The conditions that `x`, as `node` reads it, combines, and the nodes that combine them. A value is kept where all
    of them hold (with `negate`: where none holds)."""
    nodes: list[fx.Node] = []

    def sides(one: Any) -> list[Any]:
        found, combined = _combined(view, one, node, negate)
        nodes.extend(combined)
        return found

    return taken_apart(x, sides), tuple(nodes)


def _combined(
    view: GraphView, x: Any, node: fx.Node, negate: bool
) -> tuple[list[Any], list[fx.Node]]:
    """The two conditions that `x` combines, and the nodes that combine them; empty if `x` is no such combination."""
    below, copies = view.behind(x, COMPARED | {"cast"})
    call = view.call(below)
    if call.inplace or call.name != _BOTH[negate]:
        return [], []
    sides = [call["input"], call["other"]]
    for side in sides:
        whole = view.is_tensor(side) and view.dtype(side) == torch.bool
        if not whole or view.value(side, below) is not side:
            return [], []
        if view.effects.changes(side, below, node):
            return [], []  # it changes before the operator would read it
    return sides, [*copies, below]


def _gated(
    view: GraphView,
    node: fx.Node,
    epilogue: EpilogueChain,
    condition: Any,
    negate: bool,
    c: float,
    factor: bool,
) -> EpilogueChain | None:
    """The epilogue of `node`, which is the result of `epilogue` where `condition` holds for a value on it, else `c`.

    None if `condition` does not compare a value on the epilogue with a number. Raises NoMatch if it does but is not a
    threshold.
    """
    elements = epilogue.elements
    after: tuple[Step, ...] = ()
    for i in range(len(elements), -1, -1):
        below = elements[i - 1].node if i else epilogue.linears[0].node
        found = _compared(view, node, condition, below, negate)
        if found is not None:
            step = _threshold(found, after, c, factor, node)
            if factor and prove(after).direction != 1:
                raise NoMatch("multiplies by 0 what may be no number", node)
            for later in after if view.needs_grad(below) else ():
                # These are NaN on an interval, and so is their gradient, even where the result is replaced.
                if later.fn == "sqrt" or (later.fn == "pow" and later.consts[0] % 1):
                    raise NoMatch(f"{later} has no gradient where its result is not kept", node)
            nodes = (*(n for e in elements[i:] for n in (*e.extra, e.node)), *found.nodes)
            # One element, because the values between its steps no longer equal those of the graph. A second comparison
            # may only use values before this threshold.
            whole = Element(node, (step, *after), extra=nodes)
            return EpilogueChain(epilogue.linears, (*elements[:i], whole))
        terms = elements[i - 1].terms if i else ()
        steps = tuple(t for t in terms if isinstance(t, Step))
        if not i or elements[i - 1].shape_op is not None or len(steps) != len(terms):
            return None
        after = (*steps, *after)
    return None


def _threshold(edge: Edge, after: Sequence[Step], c: float, factor: bool, node: fx.Node) -> Step:
    """The step to apply before the steps `after` so that their result is `c` where the comparison does not hold. Raises
    NoMatch if there is none."""
    if not edge.above:
        if after or factor or edge.at != c:
            raise NoMatch("keeps the small values and replaces the large ones", node)
        if not edge.nan:
            raise NoMatch(f"makes NaN {c:g}", node)
        return Step("fill_above", (c, c)) if edge.ties else Step("cap", (c,))
    starts = (k for k in (0.0, edge.at, c) if math.isfinite(k) and value_at(after, k) == c)
    start = next(starts, None) if after else c
    if start is None:
        raise NoMatch(f"fills in {c:g}, which the values that it keeps do not start from", node)
    if factor:  # NaN times 0 or 1 is NaN, whatever the comparison returns for NaN
        steps = "gate_above", "gate_at_least"
    else:
        steps = ("threshold", "fill_below") if edge.nan else ("above", "at_least")
    return Step(steps[edge.ties], (edge.at, start))
