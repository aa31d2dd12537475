"""What stands between a linear and a reduction, as the backward walk finds it; sums of such linears.

W x + V t is one linear map, of [W V] and of x with t behind it. An adapter adds one to what a layer has: LoRA computes
W x + s B (A x), where t is A x.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import fx

from ...epilogue.steps import Step
from ...graph.emit import Emitter
from ...graph.gemm import Linear
from ...graph.names import Call
from ...graph.selection import Assigned
from ...graph.view import GraphView, fake


@dataclasses.dataclass(frozen=True)
class Fill:
    """The operand that puts `value`, known only at run time, where `mask` is false (true, if `negate`): 0 elsewhere."""

    mask: fx.Node
    value: fx.Node
    negate: bool

    def nodes(self) -> list[fx.Node]:
        return [self.mask, self.value]


@dataclasses.dataclass(frozen=True)
class Normalised:
    """What batch normalisation with statistics from elsewhere multiplies axis 1 by, or (`shift`) adds to it."""

    mean: fx.Node
    variance: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    shift: bool

    def nodes(self) -> list[fx.Node]:
        found = (self.mean, self.variance, self.weight, self.bias)
        return [n for n in found if n is not None]

    def emit(self, e: Emitter) -> fx.Node:
        """[V]"""
        factor = e.call(torch.rsqrt, e.call(operator.add, self.variance, self.eps))
        if self.weight is not None:
            factor = e.call(operator.mul, factor, self.weight)
        if not self.shift:
            return factor
        shift = e.call(operator.mul, e.call(operator.neg, self.mean), factor)
        return shift if self.bias is None else e.call(operator.add, shift, self.bias)


@dataclasses.dataclass(frozen=True)
class Term:
    """A step with an operand that is a node of the user's graph: y + r, y * r, or y where r, else a constant.

    prepare: what to do to the operand first: "reciprocal", "not", or a factor.
    """

    fn: str
    operand: fx.Node | Assigned | Fill | Normalised
    const: tuple[float, ...] = ()
    prepare: str | float | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """What the operand is made of."""
        return [self.operand] if isinstance(self.operand, fx.Node) else self.operand.nodes()


@dataclasses.dataclass(frozen=True)
class Element:
    """One thing between the linear and the reduction, and the nodes that do it."""

    node: fx.Node
    terms: tuple[Step | Term, ...] = ()
    shape_op: Call | None = None
    extra: tuple[fx.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class EpilogueChain:
    """The path from a linear (all its readings) to a value, linear first."""

    linears: tuple[Linear, ...]
    elements: tuple[Element, ...]

    @property
    def factors(self) -> tuple[EpilogueChain, ...]:
        """The epilogues whose product the value is."""
        return (self,)

    def then(self, element: Element) -> EpilogueChain:
        return EpilogueChain(self.linears, (*self.elements, element))


Make = Callable[[Emitter], fx.Node]


def summed(
    node: fx.Node, summands: Sequence[tuple[EpilogueChain, float]], view: GraphView
) -> list[Linear]:
    """The readings of a sum of epilogues, each times a number, as a linear map: none where one is more than scaled."""
    scales, nodes = [], []
    for epilogue, number in summands:
        steps = [term for element in epilogue.elements for term in element.terms]
        moved = any(element.shape_op is not None for element in epilogue.elements)
        if (
            moved
            or len(epilogue.factors) > 1
            or not all(isinstance(s, Step) and s.fn == "mul" for s in steps)
        ):
            return []
        scales.append(math.prod((s.consts[0] for s in steps if isinstance(s, Step)), start=number))
        nodes += [n for element in epilogue.elements for n in (*element.extra, element.node)]
    found = []
    for readings in product(*(epilogue.linears for epilogue, _ in summands)):
        axes = {(r.v_dim, len(view.shape(r.node))) for r in readings}
        if len(axes) == 1 and all(r.v_axes == 1 for r in readings):
            parts = [p.times(scale) for r, scale in zip(readings, scales) for p in r.summands]
            within = [n for r in readings for n in (*r.within, r.node)]
            found.append(_joined(node, parts, (*within, *nodes)))
    return found


def _joined(node: fx.Node, parts: Sequence[Linear], within: tuple[fx.Node, ...]) -> Linear:
    dtype, v_dim = fake(node).dtype, parts[0].v_dim

    def beside(makes: Sequence[Make], dim: int, e: Emitter) -> fx.Node:
        return e.call(torch.cat, [e.cast(make(e), dtype) for make in makes], dim)

    def sum_of_biases(e: Emitter) -> fx.Node:
        add = functools.partial(e.call, operator.add)
        return functools.reduce(add, [p.emit_bias(e) for p in biases])

    biases = [p for p in parts if p.bias is not None]
    return Linear(
        node,
        parts[0].source,
        parts[0].weight_source,
        v_dim,
        functools.partial(beside, [p.linear_input for p in parts], v_dim),
        functools.partial(beside, [p.weight for p in parts], 1),
        biases[0].bias if biases else None,
        within,
        sum_of_biases if biases else None,
        parts=tuple(parts),
    )
