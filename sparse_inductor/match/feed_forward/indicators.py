"""A comparison as a branch of a product: [z > t] is 1 where it holds and 0 elsewhere; t is a number per neuron.

JumpReLU is [z > t] * relu(z); the gate of a gated sparse autoencoder is [z + b > 0]. The comparison is expressed as one
of z - t with 0, so that the thresholds become part of the bias of the linear map. It is itself a program of steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...epilogue.steps import Program, Step, render
from ...graph.no_match import NoMatch, first_match
from ...graph.view import GraphView
from ...graph.vocabulary import COMPARISONS, SPREADS
from ..chains.backward_walk import walk_back
from ..chains.comparisons import COMPARED, unwrapped
from ..chains.epilogue_chain import Element, EpilogueChain, Term

# x >= t is computed as x - t > -_LEAST. At a tie this holds whether or not denormals are flushed.
_LEAST = 2.0**-126
# The exponential of this number is 0 in every precision.
_NOTHING = -1000.0
_ONE = (Step("clamp_max", (0.0,)), Step("exp"))
# By `negate`: for a NaN, x > t is false, and the negation of x <= t is true.
_KEEPS = ("above", "threshold")


def indicator(
    view: GraphView, node: fx.Node, negate: bool = False, factor: fx.Node | None = None
) -> EpilogueChain:
    """The epilogue of a comparison (with `negate`, of its negation). Raises NoMatch if it compares no linear map.

    factor: the other factor of the product. relu(z) * [relu(z) > t] is relu(z) * [z > t] for every t.
    """
    node, extra, negated = unwrapped(view, node)
    call, negate = view.call(node), negate ^ negated
    if call.name not in COMPARISONS:
        raise NoMatch("the condition compares nothing", node)
    large, small, ties = call.ordered(negate)
    steps = (Step(_KEEPS[negate], (-_LEAST if ties else 0.0, _NOTHING)), *_ONE)

    def less(side: tuple[Any, Any, float]) -> EpilogueChain:
        z, other, sign = side
        epilogue = _compared(view, node, z, factor if sign == 1 else None)
        terms: list[Step | Term] = [] if sign == 1 else [Step("mul", (-1.0,))]
        if (c := view.const(other, node)) is None:
            terms.append(Term("add", other, prepare=-sign))
        elif c:
            terms.append(Step("add", (-sign * c,)))
        return epilogue.then(Element(node, (*terms, *steps), extra=tuple(extra)))

    return first_match(less, ((large, small, 1.0), (small, large, -1.0)))


def _compared(view: GraphView, node: fx.Node, z: Any, factor: fx.Node | None) -> EpilogueChain:
    """The epilogue of one side of a comparison, which must have the shape of the comparison. If it is a relu that does
    not change the product with `factor`, the epilogue of the relu's input."""
    if not (view.is_tensor(z) and view.same_shape(z, node)):
        raise NoMatch("a comparison of what is no linear map", node)
    z, passed = view.behind(z, COMPARED)
    reader, call = [node, *passed][-1], view.call(z)
    if call.name in SPREADS:
        raise NoMatch("a comparison of one number per token", node)
    if call.name == "relu" and factor is not None:
        seen, theirs = view.value(z, reader), view.value(factor, node)
        if seen is z and theirs is not None and view.same_value(z, theirs):
            passed.append(z)
            reader, z = z, call["input"]
    epilogue = walk_back(view, z, reader)
    return epilogue.then(Element(passed[0], extra=tuple(passed[1:]))) if passed else epilogue


def lone(program: Program) -> float | None:
    """The number above which a program is 1, if it consists of a comparison only; None for other programs."""
    if len(program) == 3 and is_flat(program):
        return program[0].consts[0]
    if len(program) == 4 and program[0].fn == "add" and lone(program[1:]) == 0.0:
        return -program[0].consts[0]  # x - t > 0 holds exactly where x > t does
    return None


def keeping(epilogue: EpilogueChain) -> Step:
    """The step that makes every value finite that the comparison of an `indicator` drops, and leaves every value
    unchanged that it keeps. NaN is among the dropped values if the comparison is false for it."""
    first = next(t for t in epilogue.elements[-1].terms if isinstance(t, Step) and t.fn in _KEEPS)
    return Step(first.fn, (-math.inf, 0.0))


def is_flat(program: Program) -> bool:
    """Whether a program contains a comparison, which passes no gradient."""
    return any(
        program[at + 1 : at + 3] == _ONE and step.fn in _KEEPS and step.consts[1] == _NOTHING
        for at, step in enumerate(program)
    )


def compared_dtype(view: GraphView, node: fx.Node) -> torch.dtype:
    """The dtype in which a comparison compares its operands."""
    call = view.call(node)
    sides = [view.dtype(t) for t in (call["input"], call["other"]) if view.is_tensor(t)]
    return torch.promote_types(sides[0], sides[-1])


def said(program: Program) -> str:
    """A program as text for the user. Bounds look the same whatever gradient they have at a NaN or at a tie, where it
    depends on the torch version."""
    text = render(tuple(map(_bound, program)))
    for keeps in _KEEPS:
        for at, what in ((0.0, "is above 0"), (-_LEAST, "is at least 0")):
            text = text.replace(render((Step(keeps, (at, _NOTHING)), *_ONE)), what)
    return text


_GATES = {"gate_above": "threshold", "gate_at_least": "fill_below"}


def _bound(step: Step) -> Step:
    step = Step(_GATES.get(step.fn, step.fn), step.consts, step.row)
    if step.fn == "threshold" and step.consts[0] == step.consts[1]:
        return Step("clamp_min", step.consts[:1])
    return Step("clamp_max", step.consts) if step.fn == "cap" else step
