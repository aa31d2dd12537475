"""A feed-forward block read from the tensor that its down projection takes: gate, up, and what scales their product."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from ..epilogue.cut import cut
from ..epilogue.ranges import undefined
from .branches import Branch, branches, merged, same_map
from .chain import Chain
from .contraction import all_lettered
from .declines import Decline
from .family import above
from .gemm import Linear
from .graph import GraphView, fake
from .indicators import is_flat, said
from .mesh import is_distributed
from .spine import Spine, Term

__all__ = [
    "RECTIFIERS", "Factor", "Reading", "activation", "is_activation", "product_in_einsum", "read_block", "resembles",
]  # fmt: skip


# What makes one number of many, or of all tokens: what comes after it is no block of what came before.
_OTHERS = frozenset(
    "amax max_dim amin min_dim aminmax sum mean max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "scaled_dot_product_attention".split()
)
RECTIFIERS = frozenset(
    (
        "relu relu6 threshold clamp clamp_min maximum where leaky_relu sign heaviside gt ge lt le "
        "autograd_function_apply"
    ).split()
)


class Factor(NamedTuple):
    """A factor, or a mask that leaves zeros, of every neuron or of every token, and the chain that it follows."""

    chain: Chain
    term: Term

    @property
    def sources(self) -> list[fx.Node]:
        operand = self.term.operand
        return [operand] if isinstance(operand, fx.Node) else operand.nodes()


@dataclasses.dataclass
class Reading:
    """One way to read the graph above a matmul as a block. `factors`, of every neuron after the rectifier, go into the
    weight of `down`; `tokens`, factors and masks of every token there, wait until after it."""

    down: Linear
    gate: Branch
    up: Branch | None
    factors: list[Factor]
    tokens: list[Factor]

    @property
    def branches(self) -> tuple[Branch, ...]:
        return (self.gate,) if self.up is None else (self.gate, self.up)


def read_block(view: GraphView, down: Linear, value: fx.Node, reader: fx.Node) -> Reading:
    """The gate and up branches of a value. Raises Decline."""
    found, factors, tokens = _branches(view, value, reader, down.d_dim)
    cuts = [cut(b.program) for b in found]
    _check_tokens(view, found, tokens)
    for branch in found if len(found) > 1 else ():
        _check_defined(branch, value)
    if all(c is None for c in cuts):
        for source in (s for token in tokens for s in token.sources):
            if above(view, source) & RECTIFIERS:
                raise Decline("rectifies a factor of every token, none of every neuron", source)
        raise Decline("no factor is zero below some number: " + _programs(found), value)
    if len(found) > 2:
        raise Decline(f"a product of {len(found)} projections", value)
    at = next(i for i, c in enumerate(cuts) if c is not None)
    at = next((i for i, b in enumerate(found) if is_flat(b.program) and cuts[i] is not None), at)
    rest = [b for i, b in enumerate(found) if i != at]
    return Reading(down, found[at], rest[0] if rest else None, factors, tokens)


def _check_tokens(view: GraphView, found: Sequence[Branch], tokens: Sequence[Factor]) -> None:
    """Raises Decline where a token's factor is made of the activations that it scales."""
    own = {b.linear.node for b in found}
    first = min(view.order[n] for n in own)
    for source in (s for token in tokens for s in token.sources):
        queue, seen = [source], set(own)
        while queue:
            node = queue.pop()
            if node in own:
                raise Decline("a factor of every token made of the activations: a norm", source)
            if node not in seen and view.order[node] > first:
                seen.add(node)
                queue += node.all_input_nodes


def _check_defined(branch: Branch, value: fx.Node) -> None:
    """Raises Decline where a factor may be no number: 0 times it is none, either."""
    if (step := undefined(branch.program)) is not None:
        raise Decline(f"multiplies by 0 what may be no number: {step}", value)


def _programs(found: Sequence[Branch]) -> str:
    return ", ".join(said(b.program) or "a projection as it is" for b in found)


def _branches(
    view: GraphView, value: fx.Node, reader: fx.Node, neurons: int
) -> tuple[list[Branch], list[Factor], list[Factor]]:
    """The branches whose product a value is, and the factors of every neuron and of every token that follow them."""
    chains = [_chain(view, s, neurons) for s in branches(view, value, reader)]
    rows = [row for c in chains for row in c.rows]
    if rows:
        what = "a term of every token" if rows[0].term.fn == "add" else "a number filled in"
        raise Decline(f"{what} between the projections", rows[0].node)
    found = merged(view, chains, reader)
    parts = [(c, c.factors(value)) for c in chains]
    factors, tokens = ([Factor(c, t) for c, part in parts for t in part[i]] for i in (0, 1))
    if any(is_distributed(fake(s)) for token in tokens for s in token.sources):
        raise Decline("a factor of every token that is a DTensor", value)
    return found, factors, tokens


def _chain(view: GraphView, spine: Spine, neurons: int) -> Chain:
    """The chain whose outputs are on the axis of the neurons, where either operand may be the weight."""
    first: Decline | None = None
    found: list[Chain] = []
    for linear in spine.linears:
        try:
            found.append(Chain(view, spine, linear, linear_after=True))
        except Decline as e:
            first = first or e
    if first is not None and not found:
        raise first
    return next((c for c in found if c.v_dim == neurons), found[0])


def activation(
    view: GraphView, reading: Reading, source: fx.Node, reader: fx.Node
) -> tuple[str, bool]:
    """Which activation a swallowed node is: ("gate" or "hidden", whether only its zeros are the same)."""
    other = read_block(view, reading.down, source, reader)
    gate = reading.gate
    if other.factors or other.tokens:
        raise Decline("scaled activations", source)
    if not same_map(view, other.gate.chain, gate.chain, reader):
        raise Decline("another branch, or other tokens of it", source)
    if other.up is not None:
        same = reading.up is not None and (
            (other.gate.program, other.up.program) == (gate.program, reading.up.program)
            and same_map(view, other.up.chain, reading.up.chain, reader)
        )
        if not same:
            raise Decline("another product", source)
        return "hidden", False
    if cut(other.gate.program) != cut(gate.program):
        raise Decline("another rectifier", source)
    return "gate", other.gate.program != gate.program


def is_activation(view: GraphView, value: fx.Node, reader: fx.Node) -> bool:
    """Whether what `reader` sees of a tensor is what a block's down projection takes: rectified projections."""
    try:
        found, _, _ = _branches(view, value, reader, fake(value).dim() - 1)
    except Decline:
        return False
    return any(cut(b.program) is not None for b in found)


def resembles(view: GraphView, source: fx.Node, reader: fx.Node) -> bool:
    """Whether what `reader` sees of a tensor comes from a linear and a rectifier: worth a reason where it is no
    block."""
    seen = view.value(source, reader)
    # An assignment is no tensor: what it assigns to, and where.
    sources = [source] if seen is None or view.is_tensor(seen) else seen.all_input_nodes
    found = set[str]().union(*(above(view, s, _OTHERS) for s in sources))
    return "linear" in found and bool(found & RECTIFIERS)


def product_in_einsum(view: GraphView, node: fx.Node) -> str | None:
    """Why an einsum of more than two tensors, one of which is rectified, is no block; None for others."""
    call = view.call(node)
    found = all_lettered(view, call) if call is not None and call.name == "einsum" else None
    operands = found[0] if found else ()
    if len(operands) < 3 or not any(resembles(view, t, node) for t in operands):
        return None
    return f"an einsum of {len(operands)} tensors: a product and a projection in one"
