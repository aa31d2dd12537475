"""Reads a feed-forward block from the input of its down projection: gate, up, and the factors of their product."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import fx

from ...epilogue.functions import FUNCTIONS
from ...epilogue.ranges import undefined
from ...epilogue.zero_threshold import zero_threshold
from ...graph.contraction import lettered
from ...graph.fakes import expected_elements, fake, static_size
from ...graph.gemm import Linear, linears
from ...graph.mesh import is_distributed
from ...graph.no_match import NoMatch, if_matched, matches
from ...graph.scalars import RECTIFIERS, sums
from ...graph.search import reached
from ...graph.view import GraphView
from ...graph.vocabulary import COMPARISONS
from ..chains.chain import Chain
from ..chains.epilogue_chain import EpilogueChain, Term
from ..chains.family import above, may_be_above, producers_of
from ..chains.joined import Joined, joined_summands
from ..entmax.transform import is_entmax
from .branches import branches, merged, same_map, same_summand
from .indicators import is_flat, lone, said

# Operations that reduce, mix tokens, or keep only some of the values: a block does not extend above them.
_OTHERS = frozenset(
    "scatter amax max_dim amin min_dim aminmax sum mean max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "scaled_dot_product_attention".split()
)
RECTIFIER_CALLS = frozenset(
    (
        *"clamp clamp_min maximum where sign heaviside gt ge lt le prelu".split(),
        "autograd_function_apply",
        *(name for name, function in FUNCTIONS.items() if function.kind == "rectifier"),
    )
)
# Every block, and everything that resembles one, contains one of these.
SIGNS = RECTIFIERS | RECTIFIER_CALLS


class Factor(NamedTuple):
    """A per-neuron or per-token factor, or a mask that fills in 0, and the chain that it follows."""

    chain: Chain
    term: Term


@dataclasses.dataclass
class Reading:
    """One way to read the graph above a matmul as a block.

    factors: per-neuron factors after the rectifier, which are folded into the weight of `down`. tokens: per-token
    factors and masks after the rectifier, which are applied after `down`.
    """

    down: Linear
    gate: Chain
    up: Chain | None
    factors: list[Factor]
    tokens: list[Factor]

    @property
    def branches(self) -> tuple[Chain, ...]:
        return (self.gate,) if self.up is None else (self.gate, self.up)

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the projections, followed by their weights."""
        parts = [p for b in self.branches for p in b.linear.summands]
        sources = [t for p in parts for t in (p.source, *p.also)]
        return [*sources, *(p.weight_source for p in parts)]


def read_block(view: GraphView, down: Linear, value: fx.Node, reader: fx.Node) -> Reading:
    """The gate and up branches of a value. Raises NoMatch."""
    found, factors, tokens = _branches(view, value, reader, down.d_dim)
    thresholds = [zero_threshold(b.program) for b in found]
    _check_tokens(view, found, tokens)
    for branch in found if len(found) > 1 else ():
        if (step := undefined(branch.program)) is not None:  # 0 times NaN or infinity is NaN
            raise NoMatch(f"multiplies by 0 what may be no number: {step}", value)
    if all(c is None for c in thresholds):
        for source in (s for token in tokens for s in token.term.nodes):
            if above(view, source) & RECTIFIER_CALLS:
                raise NoMatch("rectifies a factor of every token, none of every neuron", source)
        raise NoMatch("no factor is known to be zero below some number: " + _programs(found), value)
    if len(found) > 2:
        for node in (n for b in found if is_flat(b.program) for n in b.nodes):
            if view.name_of(node) in COMPARISONS:
                what = "a comparison with a tensor is a factor of its own"
                raise NoMatch(f"{what}: {len(found)} factors, and the operator takes two", node)
        own = len({b.linear.node for b in found}) == len(found)
        what = "projections" if own else "factors, some of one projection with other thresholds"
        raise NoMatch(f"a product of {len(found)} {what}", value)
    at = next(i for i, c in enumerate(thresholds) if c is not None)
    at = next(
        (i for i, b in enumerate(found) if is_flat(b.program) and thresholds[i] is not None), at
    )
    rest = [b for i, b in enumerate(found) if i != at]
    return Reading(down, found[at], rest[0] if rest else None, factors, tokens)


def thresholds_of(reading: Reading) -> Term | None:
    """The per-neuron thresholds t of a block that keeps a projection unchanged where it is above them, as in JumpReLU:
    z * [z > t]. None for other blocks."""
    gate, up = reading.gate, reading.up
    if up is None or gate.linear.node is not up.linear.node or lone(gate.program) != 0.0:
        return None
    terms = [[(term, scale) for term, _, scale in chain.folded] for chain in (gate, up)]
    last, scale = terms[0][-1] if terms[0] else (None, 1.0)
    same = terms[0][:-1] == terms[1] and (gate.moves, gate.rows) == (up.moves, up.rows)
    if last is None or last.fn != "add" or (last.prepare, scale) != (-1.0, 1.0) or not same:
        return None
    return dataclasses.replace(last, prepare=None)


def _check_tokens(view: GraphView, found: Sequence[Chain], tokens: Sequence[Factor]) -> None:
    """Raise NoMatch if a per-token factor is computed from the activations that it scales."""
    own = {b.linear.node for b in found}
    first = min(view.order[n] for n in own)
    for source in (s for token in tokens for s in token.term.nodes):
        up = lambda n: n.all_input_nodes if view.order[n] > first else ()
        if not own.isdisjoint(reached([source], up)):
            raise NoMatch("a factor of every token made of the activations: a norm", source)


def _programs(found: Sequence[Chain]) -> str:
    return ", ".join(said(b.program) or "a projection as it is" for b in found)


def _branches(
    view: GraphView, value: fx.Node, reader: fx.Node, neurons: int
) -> tuple[list[Chain], list[Factor], list[Factor]]:
    """The branches of a product, and the per-neuron and the per-token factors that follow them."""
    chains = [_chain(view, s, neurons) for s in branches(view, value, reader)]
    rows = [row for c in chains for row in c.rows]
    if rows:
        term = "threshold" if view.name_of(rows[0].node) in COMPARISONS else "term"
        what = f"a {term} of every token" if rows[0].term.fn == "add" else "a number filled in"
        raise NoMatch(f"{what} between the projections", rows[0].node)
    found = merged(view, chains, reader)
    parts = [(c, c.factors(value)) for c in chains]
    factors, tokens = ([Factor(c, t) for c, part in parts for t in part[i]] for i in (0, 1))
    if any(is_distributed(fake(s)) for token in tokens for s in token.term.nodes):
        raise NoMatch("a factor of every token that is a DTensor", value)
    return found, factors, tokens


def _chain(view: GraphView, epilogue: EpilogueChain, neurons: int) -> Chain:
    """The chain with its outputs along the axis of the neurons, if either operand may be the weight."""
    read = lambda linear: Chain(view, epilogue, linear, linear_after=True)
    found = [*matches(read, epilogue.linears)]
    return next((c for c in found if c.v_dim == neurons), found[0])


def activation(
    view: GraphView, reading: Reading, source: fx.Node, reader: fx.Node
) -> tuple[str, bool]:
    """The activation of a matched block that `source` equals: ("gate" or "hidden", whether only the zeros agree).
    Raises NoMatch if it equals none."""
    other = read_block(view, reading.down, source, reader)
    gate = reading.gate
    if other.factors or other.tokens:
        raise NoMatch("scaled activations", source)
    if not same_map(view, other.gate, gate, reader):
        raise NoMatch("another branch, or other tokens of it", source)
    if other.up is not None:
        same = reading.up is not None and (
            (other.gate.program, other.up.program) == (gate.program, reading.up.program)
            and same_map(view, other.up, reading.up, reader)
        )
        if not same:
            raise NoMatch("another product", source)
        return "hidden", False
    if zero_threshold(other.gate.program) != zero_threshold(gate.program):
        raise NoMatch("another rectifier", source)
    return "gate", other.gate.program != gate.program


def is_activation(view: GraphView, value: fx.Node, reader: fx.Node) -> bool:
    """Whether the value that `reader` sees of a tensor can be the input of a block's down projection, that is, whether
    it consists of rectified projections."""
    found = if_matched(_branches, view, value, reader, fake(value).dim() - 1)
    return found is not None and any(zero_threshold(b.program) is not None for b in found[0])


def resembles(view: GraphView, source: fx.Node, reader: fx.Node) -> bool:
    """Whether the value that `reader` sees of a tensor comes from a linear and a rectifier, so that a reason is
    reported if it is no block."""
    if not may_be_above(view, [source], RECTIFIER_CALLS):
        return False
    sources = producers_of(view, source, reader)
    activations = expected_elements(view.shape(source))

    def counts(n: fx.Node) -> bool:
        """Whether a node may be a rectifier. A comparison of fewer elements, such as a padding mask, is none."""
        mask = view.name_of(n) in COMPARISONS and view.is_tensor(n)
        return not mask or expected_elements(view.shape(n)) >= activations

    def activates(n: fx.Node) -> bool:
        """As `counts`, without probabilities: a rectifier in them or above them weights tokens, features or experts."""
        weighs = view.name_of(n) == "softmax" or is_entmax(view, n)
        return counts(n) and not weighs

    def found(which: Callable[[fx.Node], bool]) -> set[str]:
        return set[str]().union(*(above(view, s, _OTHERS, which) for s in sources if which(s)))

    if found(activates).isdisjoint(RECTIFIER_CALLS - {"where"}):
        return False
    return not found(counts).isdisjoint(("linear", "batched linear"))


def product_in_einsum(view: GraphView, node: fx.Node) -> str | None:
    """Why an einsum of more than two tensors is no block, if one of them is rectified; None for other nodes."""
    call = view.call(node)
    found = lettered(view, call) if call.name == "einsum" else None
    operands = found[0] if found else ()
    if len(operands) < 3 or not any(resembles(view, t, node) for t in operands):
        return None
    return f"an einsum of {len(operands)} tensors: a product and a projection in one"


# The linear maps of branches may be sums: f(W x + V t) * g(U x) takes [x t], with the weights [W V] and [U 0].

# In inference, weights are joined for at least this number of tokens: 1.33x with few active neurons, 0.91x with half of
# them active, and about 0.8x at a quarter of this number. Weights of at most `_BYTES` are always joined, because only
# the number of launches matters for them.
_TOKENS, _BYTES = 8192, 1 << 20


def joined(view: GraphView, gate: Chain, up: Chain | None, anchor: fx.Node) -> Joined | None:
    """The two branches (`up` may be None) as maps of one input; None if they have no input in common."""
    if up is None:
        return joined_summands(gate)
    left = list(range(len(up.linear.summands)))
    inputs: list[tuple[int | None, int | None]] = []
    for i in range(len(gate.linear.summands)):
        j = next((j for j in left if same_summand(view, (gate, i), (up, j), anchor)), None)
        inputs.append((i, j))
        left = [k for k in left if k != j]
    if all(None in at for at in inputs):
        return None
    return Joined((gate, up), (*inputs, *((None, j) for j in left)))


def check_joined(view: GraphView, groups: Sequence[Sequence[Linear]], down: Linear) -> None:
    """Raise NoMatch if the weights of a group would have to be joined at every call of the block that ends in `down`,
    and that would take too long."""
    node = down.node
    groups = [g for g in groups if len(g) > 1]
    weights = [p.weight_source for g in groups for p in g]
    sizes = [static_size(n) for w in weights for n in fake(w).shape]
    if None in sizes:
        raise NoMatch("weights of a size that is not known would be joined", node)
    size = sum(fake(w).numel() for w in weights) * fake(node).dtype.itemsize
    if size <= _BYTES:
        return
    what = f"{size >> 20} MiB of weights would be joined at every call"
    if any(map(view.needs_grad, weights)):
        # Frozen parts of a joined weight get a gradient, too: 1.34x with few active neurons, 0.75x with half of them
        # active.
        raise NoMatch(f"a sum of linear maps that learn: {what}, and get gradients", node)
    tokens = [n for d, n in enumerate(view.shape(down.source)) if d != down.d_dim]
    known = all(isinstance(n, int) for n in tokens)
    if not known or math.prod(tokens) < _TOKENS:
        few = f"{math.prod(tokens)}" if known else "a number of"
        raise NoMatch(f"{what}, too many for {few} tokens: merge the adapters", node)


def residual_sum(view: GraphView, reading: Reading) -> tuple[fx.Node, fx.Node] | None:
    """(sum, residual) if, in inference, the result of a block of a single token is only read by a sum with a residual.

    The operator adds the residual itself, at a lower cost than a separate kernel. For more tokens, Inductor fuses the
    sum with the operations after it.
    """
    down, node = reading.down, reading.down.node
    sizes = view.shape(node)
    plain = down.order is None and not down.also and not reading.tokens
    alone = all(isinstance(n, int) for n in sizes) and math.prod(sizes[:-1]) == 1
    if not (plain and alone and down.v_dim == len(sizes) - 1 and len(node.users) == 1):
        return None
    end = next(iter(node.users))
    added = [t for (t, p), (_, q) in sums(view, end) if p == q == 1 and t is not node]
    residual = added[0] if added else None
    if not isinstance(residual, fx.Node) or not view.is_tensor(residual):
        return None
    same = view.same_shape(residual, node) and view.same_shape(end, node)
    same = same and view.dtype(residual) == view.dtype(node) == view.dtype(end)
    written = view.effects.writers.get(end)
    # A residual that is a product may be another block, which ends in the same sum.
    if not same or written or linears(view, residual):
        return None
    read = [residual, *reading.inputs, down.weight_source]
    return None if any(map(view.needs_grad, read)) else (end, residual)
