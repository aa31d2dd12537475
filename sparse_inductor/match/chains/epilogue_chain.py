"""The operations between a linear and a reduction, as the backward walk finds them; sums and stacks of such linears.

W x + V t is one linear map, with the weight [W V] and the input [x t]. Adapters make such sums: LoRA computes
W x + s B (A x), where t is A x.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...epilogue.steps import Step
from ...graph.emit import Emitter, Make, same_made
from ...graph.fakes import fake, same_size
from ...graph.gemm import Linear
from ...graph.names import Call
from ...graph.parts import parts_of
from ...graph.selection import Assigned
from ...graph.values import extreme
from ...graph.view import GraphView

# With a smaller factor, weights of about 0.01 lose digits in fp16: its smallest normal number is 2**-14.
_LEAST_IN_FP16 = 2.0**-8


class Fill(NamedTuple):
    """An operand that is `value`, known only at run time, where `mask` is false (with `negate`: true), and 0
    elsewhere."""

    mask: fx.Node
    value: fx.Node
    negate: bool

    def nodes(self) -> list[fx.Node]:
        return [self.mask, self.value]


class Normalised(NamedTuple):
    """The factor that batch normalisation with given statistics applies to axis 1, or (`shift`) the term it adds."""

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
        """The factor or term, of shape [V]."""
        factor = e.call(torch.rsqrt, e.call(operator.add, self.variance, self.eps))
        if self.weight is not None:
            factor = e.call(operator.mul, factor, self.weight)
        if not self.shift:
            return factor
        shift = e.call(operator.mul, e.call(operator.neg, self.mean), factor)
        return shift if self.bias is None else e.call(operator.add, shift, self.bias)


@dataclasses.dataclass(frozen=True)
class Term:
    """A step with an operand r from the user's graph: y + r, y * r, or y where r holds and a constant elsewhere.

    prepare: the operation to apply to the operand first: "reciprocal", "not", or a factor.
    """

    fn: str
    operand: fx.Node | Assigned | Fill | Normalised
    const: tuple[float, ...] = ()
    prepare: str | float | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that the operand consists of."""
        return [self.operand] if isinstance(self.operand, fx.Node) else self.operand.nodes()


@dataclasses.dataclass(frozen=True)
class Element:
    """One operation between the linear and the reduction, and the nodes that compute it."""

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
        """The epilogues that are multiplied to give the value."""
        return (self,)

    @property
    def steps(self) -> list[Step] | None:
        """The steps of the epilogue; None if it also has operands, views or several factors."""
        terms = [t for e in self.elements for t in (*e.terms, e.shape_op) if t is not None]
        steps = [t for t in terms if isinstance(t, Step)]
        return steps if len(steps) == len(terms) and len(self.factors) == 1 else None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(n for e in self.elements for n in (*e.extra, e.node))

    def then(self, element: Element) -> EpilogueChain:
        return EpilogueChain(self.linears, (*self.elements, element))


def summed(
    node: fx.Node, summands: Sequence[tuple[EpilogueChain, float]], view: GraphView
) -> list[Linear]:
    """The readings, as one linear map, of a sum of epilogues that are each multiplied by a number. Empty if an epilogue
    does more than scale its linear."""
    nodes = [n for epilogue, _ in summands for n in epilogue.nodes]
    scales = []
    for epilogue, number in summands:
        if epilogue.steps is None:
            return []
        steps = [s for s in epilogue.steps if s != Step("add", (0.0,))]  # sum() starts with 0
        if any(s.fn != "mul" for s in steps):
            return []
        scale = math.prod((s.consts[0] for s in steps), start=number)
        if extreme(scale) or (
            view.dtype(node) == torch.float16 and 0 < abs(scale) < _LEAST_IN_FP16
        ):
            return []
        scales.append(scale)
    found = []
    for readings in itertools.product(*(epilogue.linears for epilogue, _ in summands)):
        axes = {(r.v_dim, len(view.shape(r.node))) for r in readings}
        if len(axes) == 1 and all(r.v_axes == 1 for r in readings):
            # A residual stream has many summands. Each is examined only if the sum is part of a match.
            parts: tuple[Linear, ...] = ()
            within: tuple[fx.Node, ...] = ()
            for r, scale in zip(readings, scales):
                parts += r.summands if scale == 1 else tuple(p.times(scale) for p in r.summands)
                within += (*r.within, r.node)
            found.append(_joined(node, parts, (*within, *nodes)))
    return found


def _joined(node: fx.Node, parts: tuple[Linear, ...], within: tuple[fx.Node, ...]) -> Linear:
    """The sum of some maps. Its input and weight are those of the first map, so readers must use `summands`."""
    bias = next((p.bias for p in parts if p.bias is not None), None)

    def sum_of_biases(e: Emitter) -> fx.Node:
        add = functools.partial(e.call, operator.add)
        return functools.reduce(add, [p.emit_bias(e) for p in parts if p.bias is not None])

    return Linear(
        node,
        parts[0].source,
        parts[0].weight_source,
        parts[0].v_dim,
        parts[0].linear_input,
        parts[0].weight,
        bias,
        within,
        None if bias is None else sum_of_biases,
        parts=parts,
    )


def stacked(
    view: GraphView, node: fx.Node, call: Call, epilogues: Sequence[EpilogueChain]
) -> EpilogueChain | None:
    """The epilogue of a cat or stack of results of one linear map: the map is applied to the cat or stack of inputs.

    None if weights, biases or steps differ, or if the results are concatenated along the output axis.
    """
    dim, new = call.get("dim", 0) % len(view.shape(node)), call.name == "stack"
    put, steps, found = getattr(torch, call.name), epilogues[0].steps, []
    if steps is None or any(epilogue.steps != steps for epilogue in epilogues):
        return None
    for first in epilogues[0].linears:
        each = [[r for r in c.linears if _alike(view, node, first, r)] for c in epilogues]
        if not all(each) or (dim == first.v_dim and not new):
            continue
        readings = [alike[0] for alike in each]
        found.append(dataclasses.replace(
            first, node=node, order=None,
            v_dim=first.v_dim + (new and dim <= first.v_dim),
            linear_input=_beside(put, readings, dim, fake(node).dtype),
            within=tuple(n for r in readings for n in (*r.within, r.node)),
            also=tuple(t for r in readings for t in (r.source, *r.also)),
        ))  # fmt: skip
    nodes = tuple(n for epilogue in epilogues for n in epilogue.nodes)
    return EpilogueChain(tuple(found), (Element(node, (*steps,), extra=nodes),)) if found else None


def _beside(put: Callable[..., Any], readings: Sequence[Linear], dim: int, dtype: Any) -> Make:
    """Builds the cat or stack of the linear inputs of some maps."""
    return lambda e: e.call(put, [e.cast(r.linear_input(e), dtype) for r in readings], dim)


def rejoined(
    view: GraphView, node: fx.Node, call: Call, epilogues: Sequence[EpilogueChain]
) -> EpilogueChain | None:
    """The epilogue of a cat of consecutive slices of one tensor, each followed by the same steps: the epilogue of that
    tensor, and then the steps. Inductor produces this form when it moves pointwise functions before a cat. None for
    anything else."""
    cuts, nodes, ways = [], [], []
    for epilogue in epilogues:
        elements = epilogue.elements
        at = max((i for i, e in enumerate(elements) if e.shape_op is not None), default=None)
        if at is None:
            return None
        after = elements[at + 1 :]
        nodes += [n for e in elements[at:] for n in (*e.extra, e.node)]
        cuts.append((elements[at].node, after[0].node if after else node))
        ways.append((epilogue.linears, elements[:at], [t for e in after for t in e.terms]))
    (linears, before, steps), parts = ways[0], parts_of(view, cuts)
    alike = all(isinstance(t, Step) for t in steps) and all(way == ways[0] for way in ways)
    if parts is None or not alike:
        return None
    x, dim, which, _ = parts
    axis = call.get("dim", 0) % len(view.shape(node))
    if (call.name, axis) != ("cat", dim) or not all(isinstance(part, slice) for part in which):
        return None
    if not all(same_size(a.stop, b.start) for a, b in itertools.pairwise(which)):
        return None
    first, last = which[0].start, which[-1].stop
    whole = same_size(first, 0) and same_size(last, view.shape(x)[dim])
    taken = Call("slice", {"input": x, "dim": dim, "start": first, "end": last})
    element = Element(node, (*steps,), None if whole else taken, (*nodes,))
    return EpilogueChain(linears, (*before, element))


def _alike(view: GraphView, node: fx.Node, a: Linear, b: Linear) -> bool:
    """Whether two linear maps have the same weight, bias and output axis, and `b` has the dtype of `node`."""
    at, makes = (a.node, b.node), ((a.weight, b.weight), (a.emit_bias, b.emit_bias))
    same = a.v_dim == b.v_dim and view.same_read(a.weight_source, at[0], b.weight_source, at[1])
    plain = b.v_axes == 1 and not b.parts and view.dtype(b.node) == view.dtype(node)
    return same and plain and all(same_made(view, pair, at, node) for pair in makes)
