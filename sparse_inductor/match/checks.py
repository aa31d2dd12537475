"""What has to hold for a match: who else reads what it would take away, whether its inputs are still what they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import fx

from ..pattern import Miss
from .graph import GraphView, fake, label
from .shapes import SHAPE_OPS, Decline

__all__ = [
    "check_device",
    "check_grad_mode",
    "check_gradient",
    "check_memory",
    "outside_no_grad",
    "outside_readers",
    "without_outside_readers",
]

_DEVICES = ("cpu", "cuda")


class _Swallows(Protocol):
    anchor: fx.Node
    swallowed: tuple[fx.Node, ...]


M = TypeVar("M", bound=_Swallows)


def check_device(node: fx.Node) -> None:
    """Raises Decline where a node's result is on a device that the operators do not run on."""
    if fake(node).device.type not in _DEVICES:
        raise Decline(f"there is no operator for {fake(node).device}", node)


def check_memory(
    view: GraphView,
    reads: Iterable[tuple[fx.Node, fx.Node]],
    nodes: Collection[fx.Node],
    at: fx.Node,
    where: str,
    what: str,
) -> None:
    """Raises Decline if an operator that reads its inputs at a node would see other values than the user's code.

    reads: (input, the node that reads it). nodes: what is swallowed. For the reasons, where: what lies between; what:
    the whole.
    """
    for source, reader in reads:
        first, last = sorted((reader, at), key=view.order.__getitem__)
        if not view.effects.unchanged(source, first, last):
            raise Decline(f"{label(source)} is changed in place {where}", reader)
    inside = set(nodes)
    for n in nodes:
        for target in view.effects.writers.get(n, ()):
            if view.effects.creator(target) not in inside:
                raise Decline(f"{label(target)} is written in place and lives on outside {what}", n)


def check_gradient(
    view: GraphView, sources: Iterable[fx.Node], through: Collection[fx.Node], at: fx.Node
) -> None:
    """Raises Decline where a gradient that an operator at a place gives its inputs is cut in the user's code."""
    if not any(map(view.learns, sources)):
        return
    if not any(map(view.requires_grad, through)) and _records_nothing(view, at):
        return
    for node in through:
        if view.is_tensor(node) and not view.requires_grad(node):
            raise Decline(f"no gradient goes through {label(node)}: it is under no_grad", node)


def _modes(view: GraphView) -> list[fx.Node]:
    """Where gradients are turned on or off."""
    return [n for n in view.graph.nodes if "set_grad_enabled" in n.name]


def _records_nothing(view: GraphView, at: fx.Node) -> bool:
    """Whether a region without gradients that began in the graph goes on at a place of it."""
    before = [n for n in _modes(view) if view.order[n] < view.order[at]]
    return bool(before) and before[-1].args == (False,)


def check_grad_mode(view: GraphView, first: int, last: int, where: str) -> None:
    """Raises Decline where the user's code turns gradients on or off between two places of the graph."""
    for n in _modes(view):
        if first < view.order[n] < last:
            raise Decline(f"grad mode changes {where}", n)


def outside_no_grad(
    view: GraphView, nodes: Collection[fx.Node], at: fx.Node, where: str
) -> fx.Node:
    """Where an operator goes in that is to stand at `at`: before the region without gradients that `at` is in.

    Raises Decline where one of the nodes that it takes the place of is in such a region and others are not.
    """
    places = [view.order[n] for n in nodes]
    place, off = at, None
    for n in view.graph.nodes:
        if n is at:
            place = at if off is None else off
        if not min(places) <= view.order[n] <= max(places):
            continue
        if "set_grad_enabled" in n.name:
            if off is None and n.args != (False,):
                raise Decline(f"grad mode changes {where}", n)
            off = (off or n) if n.args == (False,) else None
        elif off is not None and n in nodes:
            raise Decline(f"grad mode changes {where}", n)
    return place


def outside_readers(
    view: GraphView,
    nodes: Iterable[fx.Node],
    inside: Collection[fx.Node],
    ends: Collection[fx.Node],
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(node, reader) for every reader that is not `inside` of a swallowed node that is not one of `ends`."""
    for n in nodes:
        if n not in ends:
            yield from ((n, reader) for reader in view.readers(n) if reader not in inside)


def without_outside_readers(
    matches: Sequence[M], view: GraphView, name: Callable[[M, fx.Node], str]
) -> tuple[list[M], list[Miss]]:
    """Matches whose swallowed nodes nobody else reads, and misses for the rest.

    Matches may share nodes. `name(match, node)` is what the user calls the result of a node ("the scores are"). A
    miss points at the reader, or at the node where that is returned as it is.
    """
    accepted, misses = list(matches), []
    while True:
        inside = {n for m in accepted for n in m.swallowed}
        kept = []
        for m in accepted:
            found = next(outside_readers(view, m.swallowed, inside, {m.anchor}), None)
            if found is None:
                kept.append(m)
                continue
            node, reader = found
            at = node if reader.op == "output" else reader
            while view.name_of(reader) in SHAPE_OPS and len(reader.users) == 1:
                reader = next(iter(reader.users))  # the view is not what the user asks about
            how = "returned" if reader.op == "output" else f"read by {label(reader)}"
            misses.append(Miss(f"{name(m, node)} also {how}", at))
        if len(kept) == len(accepted):
            return kept, misses
        accepted = kept
