"""A product of branches: the value f(x W1) * g(x W2) * ... of a node, with one epilogue per factor.

`walk_back` follows one linear map through an elementwise chain. `branches` also passes products of two such chains, and
moves the operations after a product into its factors. `merged` joins factors of the same linear map: relu(u) * u is
one branch with the program relu | square.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

from torch import fx

from ...epilogue.steps import Program, Step
from ...epilogue.zero_threshold import zero_threshold
from ...graph.emit import same_made
from ...graph.names import name_of
from ...graph.no_match import NoMatch
from ...graph.scalars import RECTIFIER_STEPS
from ...graph.selection import Selection
from ...graph.view import GraphView
from ...graph.vocabulary import COMPARISONS, NEGATIONS
from ..chains.backward_walk import BackwardWalk, walk_back
from ..chains.chain import Chain, scales
from ..chains.comparisons import is_comparison, kept
from ..chains.epilogue_chain import Element, EpilogueChain, Term
from .indicators import indicator, keeping, lone


def branches(view: GraphView, node: fx.Node, reader: fx.Node) -> tuple[EpilogueChain, ...]:
    """The epilogues that are multiplied to give the value of `node` that `reader` sees. Raises NoMatch for the first
    node that cannot be passed."""
    return walk_back(view, node, reader, walk=_Walk).factors


@dataclasses.dataclass(frozen=True)
class _Product(EpilogueChain):
    """A value that is the product of several epilogues."""

    parts: tuple[EpilogueChain, ...] = ()

    @property
    def factors(self) -> tuple[EpilogueChain, ...]:
        return self.parts

    def then(self, element: Element) -> EpilogueChain:
        """Append an element: a factor to the first part, a power to every part. Raises NoMatch for any other step."""
        first, *rest = self.parts
        if all(map(_is_power, element.terms)):
            return _product_of([p.then(element) for p in self.parts])
        if not all(map(_is_factor, element.terms)):
            name = name_of(element.node)
            what = "an assignment" if name == "setitem" else name
            raise NoMatch(f"{what} after the product of two projections", element.node)
        bare = dataclasses.replace(element, terms=())
        return _product_of([first.then(element), *(p.then(bare) for p in rest)])


def _product_of(parts: Sequence[EpilogueChain]) -> EpilogueChain:
    return _Product(tuple(linear for p in parts for linear in p.linears), (), tuple(parts))


def _is_power(term: Step | Term) -> bool:
    if isinstance(term, Term) or term.fn != "pow":
        return term == Step("square")
    return term.consts[0] > 0 and term.consts[0].is_integer()


def _is_factor(term: Step | Term) -> bool:
    if isinstance(term, Step):
        return term.fn == "mul" and term.consts[0] != 0
    return scales(term)


class _Walk(BackwardWalk):
    """The walk through products of two epilogues, and comparisons of one."""

    def epilogue(self) -> EpilogueChain:
        if self.call.name in COMPARISONS | NEGATIONS:
            with contextlib.suppress(NoMatch):
                return indicator(self.view, self.node)
        return super().epilogue()

    def _mul(self) -> EpilogueChain:
        a, b = self.call["input"], self.call["other"]
        if a is b:
            return super()._mul()  # the square of any number of factors
        first: NoMatch | None = None
        try:
            if (found := self._gates(a, b)) is not None:
                return found
        except NoMatch as reason:  # a comparison with a tensor, which is a separate factor
            first = reason
        if self.is_full(a) and self.is_full(b):
            with contextlib.suppress(NoMatch):
                pair = (self._factor(a, b), self._factor(b, a))
                return _product_of([p.then(Element(self.node)) for e in pair for p in e.factors])
        if first is not None:
            raise first
        return self._times(a, b)

    def _factor(self, x: fx.Node, other: fx.Node) -> EpilogueChain:
        return indicator(self.view, x, factor=other) if is_comparison(self.view, x) else self.up(x)

    def _selected(self) -> EpilogueChain:
        one = self._selection()
        whole = isinstance(one.keep, fx.Node) and self.view.same_shape(one.keep, one.x)
        if not whole or self.const(one.other) != 0:
            return super()._selected()
        x, first = self.up(one.x), None
        try:
            gate = kept(self.view, self.node, self.up, one.x, one.keep, one.negate, 0.0)
            if gate is not None:
                return gate
        except NoMatch as reason:  # a comparison with a tensor, which is a separate factor
            first = reason
        with contextlib.suppress(NoMatch):
            return self._where(one, x)
        if first is not None:
            raise first
        mask = Term("where", one.keep, (0.0,), "not" if one.negate else None)
        return x.then(Element(self.node, (mask,)))

    def _where(self, one: Selection, x: EpilogueChain) -> EpilogueChain:
        """The value with the epilogue `x` where a comparison holds, and 0 elsewhere."""
        condition = indicator(self.view, one.keep, one.negate, one.x)
        own = condition.linears[0].node
        found = [condition.then(Element(self.node))]
        for p in x.factors:
            # The compared value may be infinite or NaN where it is dropped, and 0 times that is NaN.
            terms = (keeping(condition),) if p.linears[0].node is own else ()
            found.append(p.then(Element(self.node, terms)))
        return _product_of(found)


def merged(view: GraphView, chains: list[Chain], anchor: fx.Node) -> list[Chain]:
    """One chain per linear map of the same tokens, with the program of the product of its factors. Raises NoMatch if
    there is no such program."""
    found: list[Chain] = []
    for chain in chains:
        same = next((one for one in found if same_map(view, one, chain, anchor)), None)
        if same is None:
            found.append(chain)
            continue
        same.steps = [*_product(same.program, chain.program, chain.linear.node)]
        same.nodes += chain.nodes
        same.reads += chain.reads
    return found


def same_map(view: GraphView, a: Chain, b: Chain, anchor: fx.Node) -> bool:
    """Whether two chains come from one linear map of the same tokens, select the same columns of its result, and have
    the same bias and scale."""
    if a.linear.node is not b.linear.node or a.v_dim != b.v_dim or len(a.folded) != len(b.folded):
        return False
    if not all(_same_fold(view, p, q) for p, q in zip(a.folded, b.folded)):
        return False
    kept = ([m.columns for m in chain.moves if m.columns is not None] for chain in (a, b))
    n = len(a.linear.summands)
    same = next(kept) == next(kept) and n == len(b.linear.summands)
    return same and all(same_summand(view, (a, i), (b, i), anchor) for i in range(n))


def _same_fold(
    view: GraphView, a: tuple[Term, fx.Node, float], b: tuple[Term, fx.Node, float]
) -> bool:
    """Whether two terms with their readers change a weight and its bias in the same way."""
    (s, s_reader, s_scale), (t, t_reader, t_scale) = a, b
    if dataclasses.replace(s, operand=t.operand) != t or s_scale != t_scale:
        return False
    if not (isinstance(s.operand, fx.Node) and isinstance(t.operand, fx.Node)):
        return s.operand == t.operand
    return view.same_read(s.operand, s_reader, t.operand, t_reader)


def _product(p: Program, q: Program, node: fx.Node) -> Program:
    """The program of p(x) * q(x), if one of them is a power of a rectified value or a comparison. The other factor of a
    comparison must be 0 where that does not hold, or it must map 0 to 0, so that a threshold can precede it."""
    for a, b in ((p, q), (q, p)):
        above, zero = lone(a), zero_threshold(b)
        if above is not None and zero is not None and zero >= above:
            return b
        if (
            above is not None
            and zero_threshold((rectified := Step("threshold", (above, 0.0)), *b)) == above
        ):
            return (rectified, *b)
        for at, step in enumerate(a):
            if step not in RECTIFIER_STEPS:
                continue
            mine = _power(a[at + 1 :])
            # The other factor does not matter where the rectifier gives 0, so it need not have it.
            both = b[: at + 1] == a[: at + 1]
            rest = b[at + both :] if b[:at] == a[:at] else None
            if rest is not None and mine is not None and (theirs := _power(rest)) is not None:
                # A clamp passes no gradient to a NaN, but the other factor may.
                rectifier = step if both and step.fn == "clamp_min" else Step("relu")
                exponent, factor = mine[0] + theirs[0], mine[1] * theirs[1]
                power = Step("square") if exponent == 2 else Step("pow", (float(exponent),))
                scale = () if factor == 1 else (Step("mul", (factor,)),)
                return (*a[:at], rectifier, power, *scale)
    raise NoMatch("multiplies two functions of one projection", node)


def _power(program: Program) -> tuple[float, float] | None:
    """(p, c) if the program is c * x**p for x > 0, else None."""
    p, c = 1.0, 1.0
    for step in program:
        if step.fn == "square":
            p, c = 2 * p, c * c
        elif step.fn == "pow":
            p, c = step.consts[0] * p, c ** step.consts[0]
        elif step.fn == "mul":
            c *= step.consts[0]
        elif step not in RECTIFIER_STEPS:
            return None
    return p, c


def same_summand(
    view: GraphView, first: tuple[Chain, int], second: tuple[Chain, int], anchor: fx.Node
) -> bool:
    """Whether two summands, each given by a chain and an index, multiply the same tokens in the same layout."""
    sides = (first, second)
    makes = [functools.partial(c.linear_input, part=c.linear.summands[i]) for c, i in sides]
    return same_made(view, makes, [c.linear.node for c, _ in sides], anchor)
