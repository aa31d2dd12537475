"""The walk from a reduction up to the linear that feeds it, which collects the steps and operands between the two.

`walk_back` goes up through producers and records the operations that it passes. It does not yet know which axis is the
vocabulary; `chain.Chain` reads the epilogue that it returns from the linear down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import fx

from ... import compat
from ...epilogue.steps import Step
from ...graph.contraction import Letters, contraction
from ...graph.fakes import same_size
from ...graph.gemm import entry_of_stack, linears, why_not_linear
from ...graph.indices import listed, taken
from ...graph.mesh import redistributed
from ...graph.names import Call
from ...graph.no_match import NoMatch, changed, if_matched, matches
from ...graph.parts import detour
from ...graph.scalars import Scaled, number, scalar_steps, sums
from ...graph.selection import SELECTIONS, Assigned, Selection, selections
from ...graph.values import check_cast
from ...graph.view import GraphView, label
from ...graph.vocabulary import COMPARISONS, PARTS, SHAPE_OPS
from .comparisons import kept
from .epilogue_chain import (
    Element,
    EpilogueChain,
    Fill,
    Normalised,
    Term,
    rejoined,
    stacked,
    summed,
)

_MAX_DEPTH = 64
_MAX_LINEARS = 256  # each z = z + z doubles their number

_NOT_MONOTONE = {
    "abs", "sin", "cos", "gelu", "silu", "mish", "hardswish", "cosh", "tan",
}  # fmt: skip


class Spread(NoMatch):
    """The values of a linear are broadcast along a new axis, as in scores of pairs."""


def walk_back(
    view: GraphView,
    node: Any,
    reader: fx.Node,
    depth: int = 0,
    walk: type[BackwardWalk] | None = None,
) -> EpilogueChain:
    """The epilogue that ends in the value of `node` that `reader` sees. Raises NoMatch for the first node that cannot
    be passed.

    walk: the class that passes one node, if it passes more than `BackwardWalk` does.
    """
    walk = walk or BackwardWalk
    if not isinstance(node, fx.Node):
        raise NoMatch(f"{label(reader)} makes its values of the number {node}", reader)
    seen = view.value(node, reader)
    if seen is None:
        raise changed(view, node, reader)
    # Results are cached: a sum is walked up through both operands, and every linear on a residual stream walks up
    # through all sums before it.
    found, nearest = view.walked.get((walk, seen), (None, math.inf))
    if depth < nearest:
        if depth > _MAX_DEPTH:
            view.walks_cut += 1
            raise NoMatch("the chain of operations is too long", seen)
        cut = view.walks_cut
        try:
            found = _walk_back(view, seen, depth, walk)
            if sum(len(linear.summands) for linear in found.linears) > _MAX_LINEARS:
                raise NoMatch(f"more than {_MAX_LINEARS} linears are combined here", seen)
        except NoMatch as reason:
            found = reason
        # If this walk was cut off by the depth limit, a walk from a nearer reader may get further.
        view.walked[walk, seen] = found, depth if view.walks_cut > cut else -1
    elif nearest >= 0:
        view.walks_cut += 1
    if isinstance(found, NoMatch):
        raise found.with_traceback(None)
    return found


def _walk_back(
    view: GraphView, node: fx.Node, depth: int, walk: type[BackwardWalk]
) -> EpilogueChain:
    found = linears(view, node)
    if found is not None:
        if not found:
            raise NoMatch(why_not_linear(view, node), node)
        return EpilogueChain(tuple(found), ())
    if (one := entry_of_stack(view, node)) is not None:
        return EpilogueChain((one,), ())
    call = view.call(node)
    if not call:
        raise NoMatch(f"cannot see through {_describe(node)}", node)
    return walk(view, node, call, depth).epilogue()


def _describe(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "an input of the graph: no linear makes these values"
    return label(node)


class BackwardWalk:
    """One node of the backward walk."""

    def __init__(self, view: GraphView, node: fx.Node, call: Call, depth: int):
        self.view, self.node, self.call, self.depth = view, node, call, depth

    def up(self, x: fx.Node) -> EpilogueChain:
        if self.call.name not in SHAPE_OPS and not self.view.same_shape(x, self.node):
            raise self._spread()
        return self.at(x, self.node)

    def at(self, x: Any, reader: fx.Node) -> EpilogueChain:
        """The epilogue of the value of `x` that `reader`, a node further up, sees."""
        return walk_back(self.view, x, reader, self.depth + 1, type(self))

    def is_full(self, x: Any) -> bool:
        """Whether an operand has the shape of the result, so that nothing is broadcast."""
        return self.view.is_tensor(x) and self.view.same_shape(x, self.node)

    def const(self, x: Any) -> float | None:
        return self.view.const(x, self.node)

    def decline(self, reason: str) -> NoMatch:
        return NoMatch(reason, self.node)

    def _spread(self) -> Spread:
        what = f"{self.call.name} spreads the values over an axis that they lack"
        return Spread(what, self.node)

    def epilogue(self) -> EpilogueChain:
        call, node, view = self.call, self.node, self.view
        name = call.name
        if (same := view.kept(call)) is not None:
            return self.up(same).then(Element(node))
        if (steps := scalar_steps(view, node, call)) is not None:
            return self.up(call["input"]).then(Element(node, steps))
        if name == "cast":
            return self._cast()
        if name == "detach":
            raise self.decline("detach() cuts the gradient here")
        if name == "dropout":
            raise self.decline("dropout is active here")
        if name == "redistribute":
            if redistributed(node, call["input"]):
                raise self.decline("the values move over the device mesh here")
            return self.up(call["input"]).then(Element(node))
        if name in SHAPE_OPS and (shown := view.effects.shown(node)) is not None:
            part = taken(view, call)
            return self.at(shown, node).then(Element(node, extra=part.passed if part else ()))
        if (around := detour(view, node, call)) is not None:
            epilogue = self.at(around.tensor, (node, *around.passed)[-1])
            return epilogue.then(Element(node, shape_op=around.shape_op, extra=around.passed))
        if name in SHAPE_OPS:
            return self._shape()
        if name in _HANDLERS:
            passed: EpilogueChain = getattr(self, _HANDLERS[name])()
            return passed
        if name in _NOT_MONOTONE:
            self.up(call["input"])
            if view.dtype(call["input"]).is_complex:
                raise self.decline("the values are complex numbers")
            raise self.decline(f"{name} is not monotone, and no step of an operator")
        if name == "prelu":
            self.up(call["input"])
            raise self.decline("prelu is no step of an operator: its slope below 0 is a tensor")
        if name in COMPARISONS:
            raise self.decline(f"a comparison ({name}) is no step of an operator")
        src = call.get("src") if name == "scatter" else None
        if view.is_tensor(src) and same_size(view.shape(src)[call["dim"]], 1):
            raise self.decline(
                "every token has a weight for its own term alone: scatter_reduce of 'amax' into one row a text makes "
                "no rows of tokens"
            )
        if view.const(node) is not None:
            raise self.decline(f"{name} fills a tensor with one number, which comes from no linear")
        raise self.decline(f"{name} after the linear is no step of an operator")

    # Shape and dtype

    def _cast(self) -> EpilogueChain:
        check_cast(self.view, self.node, "the values")
        epilogue = self.up(self.call["input"])
        computed = (self.view.dtype(linear.node) for linear in epilogue.linears)
        check_cast(self.view, self.node, "the values", *computed)
        return epilogue.then(Element(self.node))

    def _shape(self) -> EpilogueChain:
        x = self.call["input"]
        if self.view.is_tensor(x):
            return self.up(x).then(Element(self.node, shape_op=self.call))
        parent = self.view.call(x)
        if parent.name == "autograd_function_apply":
            raise self.decline(
                "an autograd Function with a gradient of its own cannot be seen through"
            )
        if parent.name not in PARTS:
            raise self.decline(
                f"takes one of the results of {_describe(x) if isinstance(x, fx.Node) else x}"
            )
        epilogue = self.at(parent["input"], x)
        return epilogue.then(Element(self.node, shape_op=self.call, extra=(x,)))

    def _batch_norm(self) -> EpilogueChain:
        """batch_norm with given statistics: a factor and a term for every entry of axis 1."""
        call, node = self.call, self.node
        if node.target is not F.batch_norm:  # torch.batch_norm has another order of arguments
            raise self.decline("batch_norm that is not torch.nn.functional's")
        mean, variance = call["running_mean"], call["running_var"]
        if call.get("training", False) or mean is None or variance is None:
            raise self.decline("batch_norm with the statistics of the batch itself")
        eps = number(self.view, node, call, "eps", 1e-5)
        of = mean, variance, call.get("weight"), call.get("bias"), eps
        terms = Term("mul", Normalised(*of, shift=False)), Term("add", Normalised(*of, shift=True))
        return self.up(call["input"]).then(Element(node, terms))

    def _beside(self) -> EpilogueChain:
        """Results that are stacked or concatenated."""
        try:
            epilogues = [self.at(t, self.node) for t in listed(self.call["tensors"])]
        except NoMatch as reason:
            if self.view.call(reason.node):
                raise
            what = "an input of the graph, which no linear makes"
            raise self.decline(f"{self.call.name} puts the values beside {what}") from None
        given = self.view, self.node, self.call, epilogues
        if (found := stacked(*given) or rejoined(*given)) is None:
            raise self.decline(
                f"{self.call.name} after the linear is followed where all parts have the same weight, bias and steps, "
                "no operands and no views, and do not lie along the outputs"
            )
        return found

    # Two operands

    def _found(self, a: Any, b: Any) -> list[tuple[EpilogueChain, int]]:
        """The epilogues of two operands, each with its position. Operands without the shape of the result or without
        an epilogue are omitted."""
        full = [(x, at) for at, x in enumerate((a, b)) if self.is_full(x)]
        if not full:
            raise self._spread()
        return [*matches(lambda way: (self.at(way[0], self.node), way[1]), full)]

    def _pick(self, found: Sequence[tuple[EpilogueChain, int]]) -> tuple[EpilogueChain, int]:
        """The operand that carries the logits, as its epilogue and its position (0 or 1); found: the result of
        `_found`."""
        if len(found) > 1:
            one, other = ([linear.node for linear in e.linears] for e, _ in found)
            what = "functions of one linear" if one == other else "tensors that come from linears"
            raise self.decline(f"{self.call.name} combines two {what}")
        return found[0]

    def _arithmetic(self, a: Any, b: Any, terms: Callable[..., tuple]) -> EpilogueChain:
        """f(a, b) with the logits in one of the operands. `terms` returns the steps, given the position of the logits
        (0 or 1) and the other operand, as a number if it is a constant."""
        for at, (x, other) in enumerate(((a, b), (b, a))):
            if (c := self.const(other)) is not None:
                return self.up(x).then(Element(self.node, terms(at, c)))
        epilogue, at = self._pick(self._found(a, b))
        return epilogue.then(Element(self.node, terms(at, (b, a)[at])))

    def _sum(self) -> EpilogueChain:
        """A sum p * a + q * b."""
        ways = sums(self.view, self.node)
        if not ways:
            raise self.decline("alpha= is not a constant")
        (a, p), (b, q) = ways[0]

        def terms(at: int, other: Any) -> tuple:
            (_, own), (_, factor) = ways[at]
            scale = () if own == 1 else (Step("mul", (own,)),)
            if isinstance(other, float):
                return *scale, Step("add", (factor * other,))
            return *scale, Term("add", other, prepare=factor)

        if (rectified := self._rectified(ways)) is not None:
            return rectified
        if self.const(a) is not None or self.const(b) is not None:
            return self._arithmetic(a, b, terms)
        found = self._found(a, b)
        summands = tuple((epilogue, (p, q)[at]) for epilogue, at in found)
        if len(found) == 2 and (joint := summed(self.node, summands, self.view)):
            return EpilogueChain(tuple(joint), ())
        epilogue, at = self._pick(found)
        return epilogue.then(Element(self.node, terms(at, (b, a)[at])))

    def _rectified(self, ways: Sequence[tuple[Scaled, Scaled]]) -> EpilogueChain | None:
        """x + |x|, which is twice a rectifier, and x - min(x, 0). The gradient at 0 is the sum of both summands'
        gradients."""
        view, node = self.view, self.node
        for (x, p), (y, q) in ways:
            call = view.call(y)
            if p != 1 or not (q == -1 or (q == 1 and call.name == "abs")):
                continue
            tensors = view.is_tensor(x) and view.is_tensor(call.get("input")) and not call.inplace
            if not tensors or view.value(y, node) is not y:
                continue
            if not view.same_read(x, node, call["input"], y):
                continue
            steps: tuple[Step, ...] = ()
            if q == 1:
                halved = Step("maximum", (0.0,)) if view.needs_grad(x) else Step("relu")
                steps = (halved, Step("mul", (2.0,)))
            elif if_matched(scalar_steps, view, y, call) == (Step("clamp_max", (0.0,)),):
                flat = compat.clamp_has_a_slope_at_its_bounds()
                steps = (Step("relu") if flat else Step("fill_below", (0.0, 0.0)),)
            if steps:
                return self.up(x).then(Element(node, steps, extra=(y,)))
        return None

    def _mul(self) -> EpilogueChain:
        a, b = self.call["input"], self.call["other"]
        if a is b:
            return self.up(a).then(Element(self.node, (Step("square"),)))
        return self._gates(a, b) or self._times(a, b)

    def _times(self, a: Any, b: Any) -> EpilogueChain:
        return self._arithmetic(a, b, lambda at, other: (_factor(other),))

    def _gates(self, a: Any, b: Any) -> EpilogueChain | None:
        """x * (x > t), or x times a comparison of a value that x was computed from, possibly combined with a mask."""
        gate = lambda x, keep: kept(self.view, self.node, self.up, x, keep, False, 0.0, factor=True)
        return gate(a, b) or gate(b, a)

    def _einsum(self) -> EpilogueChain:
        """An einsum that sums over nothing: an elementwise product, once the axes of the logits are permuted so that
        the other operand broadcasts."""
        product = contraction(self.view, self.node)
        first = self.decline("einsum after the linear is not an elementwise step")
        if product is None:
            raise first
        for x, other in (product.operands, product.operands[::-1]):
            orders = _broadcasting(x.axes, other.axes, product.axes)
            if orders is None or x.written or other.written:
                continue
            try:
                epilogue = self.at(x.node, self.node)
            except NoMatch as reason:
                first = reason
                continue
            there, back = (Call("permute", {"input": x.node, "dims": dims}) for dims in orders)
            epilogue = epilogue.then(Element(self.node, (Term("mul", other.node),), there))
            return epilogue.then(Element(self.node, shape_op=back))
        raise first

    def _div(self) -> EpilogueChain:
        def terms(at: int, other: Any) -> tuple:
            if at == 1:
                return Step("pow", (-1.0,)), _factor(other)
            if other == 0:
                raise self.decline("division by zero")
            if isinstance(other, float):
                return (_factor(1 / other),)
            return (Term("mul", other, prepare="reciprocal"),)

        return self._arithmetic(self.call["input"], self.call["other"], terms)

    def _pow(self) -> EpilogueChain:
        p = self.const(self.call["other"])
        if p is None:
            raise self.decline("a power whose exponent is not a constant")
        known = {2.0: Step("square"), 0.5: Step("sqrt"), 1.0: Step("mul", (1.0,))}
        step = known.get(p, Step("pow", (p,)))
        return self.up(self.call["input"]).then(Element(self.node, (step,)))

    def _bound(self) -> EpilogueChain:
        """A maximum or minimum with a constant, or the smooth maximum logaddexp with 0."""

        def terms(at: int, other: Any) -> tuple:
            if not isinstance(other, float):
                raise self.decline(f"{self.call.name} with a tensor that is not a constant")
            if self.call.name == "logaddexp":
                if other != 0:
                    raise self.decline("logaddexp with another constant than 0")
                return (Step("softplus", (1.0, 40.0)),)  # exp(-40) is below the rounding of fp64
            return (Step(self.call.name, (other,)),)

        return self._arithmetic(self.call["input"], self.call["other"], terms)

    # Selection

    def _selected(self) -> EpilogueChain:
        """x where a mask holds, or where nothing is assigned; a constant, or one number per token, elsewhere."""
        one = self._selection()
        x, keep, c = one.x, one.keep, self.const(one.other)
        if isinstance(keep, Assigned):
            if c is None:
                raise self.decline("assigns a tensor into the linear's result")
            return self.up(x).then(Element(self.node, (Term("where", keep, (c,)),)))
        way = "not" if one.negate else None
        if c is None:
            # x where it is kept and 0 elsewhere, to which the other value is then added.
            fill = Term("add", Fill(keep, one.other, one.negate))
            return self.up(x).then(Element(self.node, (Term("where", keep, (0.0,), way), fill)))
        gate = kept(self.view, self.node, self.up, x, keep, one.negate, c)
        return gate or self.up(x).then(Element(self.node, (Term("where", keep, (c,), way),)))

    def _selection(self) -> Selection:
        """The reading of a selection that selects from the logits."""
        found = selections(self.view, self.call)
        if not found:
            raise self.decline("accumulates into the linear's result")
        if len(found) == 1:
            return found[0]
        constant = next((one for one in found if self.const(one.other) is not None), None)
        if constant is not None:
            return constant
        if not all(self.view.is_tensor(one.x) for one in found):
            raise self.decline(
                "where() chooses between a tensor and a number known only at run time"
            )
        return found[self._pick(self._found(found[0].x, found[1].x))[1]]


def _factor(other: Any) -> Step | Term:
    """A product with a number, or with a node."""
    return Step("mul", (other,)) if isinstance(other, float) else Term("mul", other)


def _broadcasting(
    mine: Letters, theirs: Letters, out: Letters
) -> tuple[list[int], list[int]] | None:
    """The permutation of an operand's axes after which the other operand broadcasts to it, and the permutation from
    there to the axes of the result. None if an axis would be summed over or added."""
    if None in mine or {*mine} != {*out} or len(mine) < len(theirs):
        return None
    if not {*theirs} - {None} <= {*mine}:
        return None
    free = iter([letter for letter in mine if letter not in theirs])
    wide = (*[None] * (len(mine) - len(theirs)), *theirs)
    order = [next(free) if letter is None else letter for letter in wide]
    return [mine.index(letter) for letter in order], [order.index(letter) for letter in out]


_HANDLERS: dict[str, str] = {
    **dict.fromkeys(("maximum", "minimum", "logaddexp"), "_bound"),
    **dict.fromkeys(SELECTIONS, "_selected"),
    **dict.fromkeys(("add", "sub", "rsub"), "_sum"),
    **dict.fromkeys(("cat", "stack"), "_beside"),
    **{name: "_" + name for name in "batch_norm einsum mul div pow".split()},
}
