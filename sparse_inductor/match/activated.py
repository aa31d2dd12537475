"""Activations that a program keeps: what lies between an encoder's product and a decoder that reads what is left of it.

Nothing is proved of it but where it is: products with what is mostly zeros are exact for any tensor.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from .fakes import expected
from .feed_forward import RECTIFIERS
from .gemm import Linear, linears
from .graph import GraphView, same_sizes

__all__ = ["Activated", "activated", "decoders_below"]

_KEEPING = frozenset("scatter scatter_add setitem index_put autograd_function_apply".split())
_LONGEST = 48
# Neurons for each output of the decoder, from which on they are taken for a dictionary of many, few of them active. A
# feed-forward block has four, and if its activations are read, a reason why it is none.
_WIDE = 7


@dataclasses.dataclass(frozen=True)
class Activated:
    """encoders: the linears at its upper end. nodes: all from there to the decoder, which is not among them."""

    encoders: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]


def activated(view: GraphView, down: Linear) -> Activated | None:
    """What `down` multiplies, where many neurons are rectified, or chosen from, and something else reads it on the way:
    a loss, or whoever is given it. What nobody reads is a block whose activations need not exist."""
    *rows, neurons = view.shape(down.source)
    if expected(neurons) < _WIDE * expected(down.outputs):
        return None
    encoders: list[fx.Node] = []
    nodes: set[fx.Node] = set()
    names: set[str | None] = set()
    stack = [view.value(down.source, down.node)]
    while stack:
        node = stack.pop()
        if node is None or node in nodes or node.op in ("placeholder", "get_attr"):
            continue
        if len(nodes) == _LONGEST:
            return None
        readings = linears(view, node)
        if readings is None:
            nodes.add(node)
            names.add(view.name_of(node))
            stack += [view.value(n, node) for n in node.all_input_nodes]
        elif readings and same_sizes(view.shape(node)[:-1], rows):
            nodes.add(node)
            encoders.append(node)
    if not encoders or not names & (RECTIFIERS | _KEEPING):
        return None
    inside = {*nodes, down.node}
    read = any(reader not in inside for n in nodes for reader in view.readers(n))
    return Activated(tuple(encoders), frozenset(nodes)) if read or names & _KEEPING else None


def decoders_below(view: GraphView, node: fx.Node) -> list[fx.Node]:
    """The products that are reached from a linear without crossing another."""
    found: list[fx.Node] = []
    seen = {node}
    stack = [*node.users]
    while stack and len(seen) <= _LONGEST:
        user = stack.pop()
        if user in seen or user.op == "output":
            continue
        seen.add(user)
        if linears(view, user) is None:
            stack += user.users
        else:
            found.append(user)
    return found
