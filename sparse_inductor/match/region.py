"""What a match may swallow: nobody else reads it, and nothing it reads is written meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from .graph import GraphView, label
from .shapes import Decline

__all__ = ["check_memory", "outside_readers"]


def outside_readers(
    view: GraphView,
    nodes: Iterable[fx.Node],
    inside: Collection[fx.Node],
    ends: Collection[fx.Node],
) -> list[tuple[fx.Node, fx.Node]]:
    """(node, reader) for every reader that is not `inside` of a swallowed node that is not one of `ends`."""
    return [
        (n, reader)
        for n in nodes
        if n not in ends
        for reader in view.readers(n)
        if reader not in inside
    ]


def check_memory(
    view: GraphView,
    reads: Iterable[tuple[fx.Node, fx.Node]],
    nodes: Collection[fx.Node],
    at: fx.Node,
    what: str,
) -> None:
    """Raises Decline unless an operator that reads its inputs at `at` sees what the user's nodes saw.

    reads: (tensor, the node that reads it). nodes: what is swallowed.
    """
    for source, reader in reads:
        first, last = sorted((reader, at), key=view.order.__getitem__)
        if not view.effects.unchanged(source, first, last):
            raise Decline(f"{label(source)} is changed in place within the {what}", reader)
    for n in nodes:
        for target in view.effects.writers.get(n, ()):
            if view.effects.creator(target) not in nodes:
                raise Decline(
                    f"{label(target)} is written in place and lives on outside the {what}", n
                )
    places = [view.order[n] for n in nodes]
    for n in view.graph.nodes:
        if min(places) < view.order[n] < max(places) and "set_grad_enabled" in n.name:
            raise Decline(f"grad mode changes within the {what}", n)
