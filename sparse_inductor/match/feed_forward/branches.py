"""A product of branches: the value f(x W1) * g(x W2) * ... that ends in a node, one epilogue a factor.

`walk_back` follows one linear map through an elementwise chain; `branches` also passes the products of two such
chains and carries what comes after a product to its factors; `merged` joins factors of the same linear map:
relu(u) * u is one branch with the program relu | square.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import fx

from ...epilogue.steps import Program, Step
from ...epilogue.zero_threshold import zero_threshold
from ...graph.emit import Emitter
from ...graph.gemm import Linear
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.parts import detour
from ...graph.scalars import RECTIFIERS, constant_factor
from ...graph.selection import Assigned, selections
from ...graph.shapes import Combined
from ...graph.values import rounds
from ...graph.view import GraphView, fake, same_sizes
from ...graph.vocabulary import COMPARISONS, NEGATIONS, SHAPE_OPS
from ..chains.backward_walk import walk_back
from ..chains.chain import Chain
from ..chains.comparisons import is_comparison
from ..chains.epilogue_chain import Element, EpilogueChain, Term
from .indicators import indicator, keeping, lone

_DEPTH = 8  # products and their wrappings on one path


@dataclasses.dataclass
class Branch:
    """One factor: a chain from a linear map, with the factors of the same map joined into `program`."""

    chain: Chain
    program: Program
    nodes: list[fx.Node]
    reads: list[tuple[fx.Node, fx.Node]]

    @property
    def linear(self) -> Linear:
        return self.chain.linear


def branches(
    view: GraphView, node: fx.Node, reader: fx.Node, depth: int = 0
) -> list[EpilogueChain]:
    """The epilogues whose product is the value `reader` sees of `node`. Raises NoMatch with what is in the way."""
    seen = view.value(node, reader)
    call = None if seen is None else view.call(seen)
    try:
        epilogue = walk_back(view, node, reader)
    except NoMatch as first:
        if seen is None or call is None or depth > _DEPTH:
            raise
        return _parts(view, seen, call, depth, first)
    if seen is not None and call is not None and call.name == "mul" and depth <= _DEPTH:
        operands = call["input"], call["other"]
        factors = [t.operand for t in epilogue.elements[-1].terms if isinstance(t, Term)]
        if all(_full(view, t, seen) for t in operands) and any(t in factors for t in operands):
            # `walk_back` takes a factor for any tensor if it cannot pass it, as it cannot pass a product: x * x * x.
            with contextlib.suppress(NoMatch):
                return _product_of(view, seen, operands, depth)
    return [epilogue]


def _product_of(
    view: GraphView, seen: fx.Node, operands: tuple[fx.Node, fx.Node], depth: int
) -> list[EpilogueChain]:
    """The epilogues of both operands, which are of the product's shape. Raises NoMatch."""
    found: list[EpilogueChain] = []
    for t, other in (operands, operands[::-1]):
        if is_comparison(view, t):
            found.append(indicator(view, t, factor=other))
        else:
            found += branches(view, t, seen, depth + 1)
    return [s.then(Element(seen)) for s in found]


def _parts(
    view: GraphView, seen: fx.Node, call: Call, depth: int, first: NoMatch
) -> list[EpilogueChain]:
    """The epilogues whose product a value is that `walk_back` does not see as one, for the reason `first`."""

    def up(x: Any) -> list[EpilogueChain]:
        if call.name not in SHAPE_OPS and not view.same_shape(x, seen):
            raise first
        return branches(view, x, seen, depth + 1)

    name = call.name
    x = call.get("input")
    if (scaled := constant_factor(view, seen)) is not None and scaled[1]:
        return _times(up(scaled[0]), seen, Step("mul", (scaled[1],)))
    if name == "mul":
        other = call["other"]
        full = [_full(view, t, seen) for t in (x, other)]
        if all(full):
            try:
                return _product_of(view, seen, (x, other), depth)
            except NoMatch as inner:
                raise inner if isinstance(first, Combined) else first from None
        if any(full) and all(
            map(view.is_tensor, (x, other))
        ):  # a factor of every neuron, or of every token
            product, factor = (x, other) if full[0] else (other, x)
            return _times(up(product), seen, Term("mul", factor))
    elif name == "square":
        return [s.then(Element(seen, (Step("square"),))) for s in up(x)]
    elif name == "pow":
        c = view.const(call["other"], seen)
        if c is not None and c == int(c) and c > 0:
            steps = (Step("square") if c == 2 else Step("pow", (c,)),)
            return [s.then(Element(seen, steps)) for s in up(x)]
    elif view.kept(call) is not None:
        return [s.then(Element(seen)) for s in up(x)]
    elif name == "cast":
        if (
            view.is_tensor(x)
            and view.dtype(seen).is_floating_point
            and fake(seen).device == fake(x).device
        ):
            found = up(x)
            if any(rounds(view.dtype(seen), view.dtype(s.linears[0].node)) for s in found):
                raise NoMatch(f"the values are rounded to {view.dtype(seen)}", seen)
            return [s.then(Element(seen)) for s in found]
    elif name == "dropout":
        raise NoMatch("dropout is active here", seen)
    elif (around := detour(view, seen, call)) is not None:
        found = branches(view, around.tensor, (seen, *around.passed)[-1], depth + 1)
        last = Element(seen, shape_op=around.shape_op, extra=around.passed)
        return [s.then(last) for s in found]
    elif name in SHAPE_OPS and view.is_tensor(x):
        return [s.then(Element(seen, shape_op=call)) for s in up(x)]
    elif name in COMPARISONS | NEGATIONS:
        with contextlib.suppress(NoMatch):
            return [indicator(view, seen)]
    else:
        x, mask = _kept(view, call, seen) or (x, None)
        whole = x if call.name == "setitem" else seen  # an assignment has no value
        if mask is not None and _full(view, mask.operand, whole):
            with contextlib.suppress(NoMatch):
                return _selected(view, seen, x, mask, up(x))
        try:
            product = up(x) if view.is_tensor(x) else []
        except NoMatch:
            raise first from None
        if len(product) > 1 and mask is not None:
            return _times(product, seen, mask)
        if len(product) > 1:
            what = "an assignment" if name == "setitem" else name
            raise NoMatch(f"{what} after the product of two projections", seen)
    raise first


def _kept(view: GraphView, call: Call, node: fx.Node) -> tuple[fx.Node, Term] | None:
    """(x, mask) where a call is x where a mask says so and 0 elsewhere, or where it does not; None for others."""
    for found in selections(view, call):
        if view.is_tensor(found.x) and view.const(found.other, node) == 0:
            negate = found.negate and not isinstance(found.keep, Assigned)
            return found.x, Term("where", found.keep, (0.0,), "not" if negate else None)
    return None


def _selected(
    view: GraphView, node: fx.Node, x: fx.Node, mask: Term, kept: list[EpilogueChain]
) -> list[EpilogueChain]:
    """The epilogues of x where a comparison says so and 0 elsewhere, those of x being `kept`. Raises NoMatch."""
    epilogue = indicator(view, mask.operand, mask.prepare == "not", x)
    own = epilogue.linears[0].node
    found = [epilogue.then(Element(node))]
    for one in kept:
        # What is compared itself may be no number where it is dropped, and 0 times that is none.
        terms = (keeping(epilogue),) if one.linears[0].node is own else ()
        found.append(one.then(Element(node, terms)))
    return found


def _full(view: GraphView, x: Any, node: fx.Node) -> bool:
    """Whether an operand has the shape of the result, so that nothing is broadcast."""
    return view.is_tensor(x) and same_sizes(view.shape(x), view.shape(node))


def _times(
    epilogues: list[EpilogueChain], node: fx.Node, factor: Step | Term
) -> list[EpilogueChain]:
    """A product with a further factor, which its first epilogue takes."""
    first, *rest = epilogues
    return [first.then(Element(node, (factor,))), *(s.then(Element(node)) for s in rest)]


def merged(view: GraphView, chains: list[Chain], anchor: fx.Node) -> list[Branch]:
    """One branch a linear map of the same tokens. Raises NoMatch where its factors have no common program."""
    found: list[Branch] = []
    for chain in chains:
        for branch in found:
            if same_map(view, branch.chain, chain, anchor):
                branch.program = _product(branch.program, chain.program, chain.linear.node)
                branch.nodes += chain.nodes
                branch.reads += chain.reads
                break
        else:
            found.append(Branch(chain, chain.program, list(chain.nodes), list(chain.reads)))
    return found


def same_map(view: GraphView, a: Chain, b: Chain, anchor: fx.Node) -> bool:
    """Whether two chains come from one linear map of the same tokens, the same columns of its result, and have the
    same bias and scale."""
    if a.linear.node is not b.linear.node or a.v_dim != b.v_dim or len(a.folded) != len(b.folded):
        return False
    if not all(_same_fold(view, p, q) for p, q in zip(a.folded, b.folded)):
        return False
    kept = ([m.columns for m in chain.moves if m.columns is not None] for chain in (a, b))
    return next(kept) == next(kept) and same_input(view, a, b, anchor)


def _same_fold(
    view: GraphView, a: tuple[Term, fx.Node, float], b: tuple[Term, fx.Node, float]
) -> bool:
    """Whether two terms with their readers do the same to a weight and its bias."""
    (s, s_reader, s_scale), (t, t_reader, t_scale) = a, b
    if dataclasses.replace(s, operand=t.operand) != t or s_scale != t_scale:
        return False
    if not (isinstance(s.operand, fx.Node) and isinstance(t.operand, fx.Node)):
        return s.operand == t.operand
    return view.same_read(s.operand, s_reader, t.operand, t_reader)


def _product(p: Program, q: Program, node: fx.Node) -> Program:
    """p(x) * q(x), where one of them is a power of a rectified value, or a comparison: then the other one is 0 where
    that does not hold, or made of 0 there and 0 for it."""
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
            if step not in RECTIFIERS:
                continue
            mine = _power(a[at + 1 :])
            # Where the rectifier gives 0 the other factor does not matter, so it may lack it.
            both = b[: at + 1] == a[: at + 1]
            rest = b[at + both :] if b[:at] == a[:at] else None
            if rest is not None and mine is not None and (theirs := _power(rest)) is not None:
                # A clamp alone passes no NaN on where it is given one; the other factor may.
                rectifier = step if both and step.fn == "clamp_min" else Step("relu")
                exponent, factor = mine[0] + theirs[0], mine[1] * theirs[1]
                power = Step("square") if exponent == 2 else Step("pow", (float(exponent),))
                scale = () if factor == 1 else (Step("mul", (factor,)),)
                return (*a[:at], rectifier, power, *scale)
    raise NoMatch("multiplies two functions of one projection", node)


def _power(program: Program) -> tuple[float, float] | None:
    """(p, c) where the program is c * x**p for x > 0."""
    p, c = 1.0, 1.0
    for step in program:
        if step.fn == "square":
            p, c = 2 * p, c * c
        elif step.fn == "pow":
            p, c = step.consts[0] * p, c ** step.consts[0]
        elif step.fn == "mul":
            c *= step.consts[0]
        elif step not in RECTIFIERS:
            return None
    return p, c


def same_input(view: GraphView, a: Chain, b: Chain, anchor: fx.Node) -> bool:
    """Whether two branches multiply the same tokens, moved about in the same way."""
    n = len(a.linear.summands)
    return n == len(b.linear.summands) and all(
        same_summand(view, (a, i), (b, i), anchor) for i in range(n)
    )


def same_summand(
    view: GraphView, first: tuple[Chain, int], second: tuple[Chain, int], anchor: fx.Node
) -> bool:
    """The same of a summand of each one's linear map."""
    (a, i), (b, j) = first, second
    with Emitter(anchor) as e:
        x = a.linear_input(e, part=a.linear.summands[i])
        y = b.linear_input(e, part=b.linear.summands[j])
        return _same(view, x, y, set(e.inserted), a, b)


def _same(view: GraphView, x: Any, y: Any, new: set[fx.Node], a: Chain, b: Chain) -> bool:
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(_same(view, s, t, new, a, b) for s, t in zip(x, y))
    if isinstance(x, slice) and isinstance(y, slice):
        x, y = (x.start, x.stop, x.step), (y.start, y.stop, y.step)
        return _same(view, x, y, new, a, b)
    made = [isinstance(t, fx.Node) and t in new for t in (x, y)]
    if any(made):
        if not all(made) or (x.op, x.target) != (y.op, y.target):
            return False
        return _same(view, x.args, y.args, new, a, b)
    if isinstance(x, fx.Node) and isinstance(y, fx.Node):
        return view.same_read(x, a.linear.node, y, b.linear.node)
    return type(x) is type(y) and x == y
