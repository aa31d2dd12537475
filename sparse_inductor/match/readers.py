"""Who else reads what a match would take away, and whether its inputs are still what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from ..pattern import Miss
from .graph import GraphView, label
from .shapes import SHAPE_OPS, Decline

__all__ = ["check_gradient", "check_memory", "without_outside_readers"]


class _Swallows(Protocol):
    anchor: fx.Node
    swallowed: tuple[fx.Node, ...]


M = TypeVar("M", bound=_Swallows)


def check_memory(
    view: GraphView,
    reads: Iterable[tuple[fx.Node, fx.Node]],
    nodes: Sequence[fx.Node],
    anchor: fx.Node,
    where: str,
    what: str,
) -> None:
    """Raises Decline if an operator that reads its inputs at the anchor would see other values than the user's code.

    reads: (input, the node that reads it). For the reasons, where: what lies between; what: the whole.
    """
    for source, reader in reads:
        if not view.effects.unchanged(source, reader, anchor):
            raise Decline(f"{label(source)} is changed in place {where}", reader)
    inside = set(nodes)
    for n in nodes:
        for target in view.effects.writers.get(n, ()):
            if view.effects.creator(target) not in inside:
                raise Decline(f"{label(target)} is written in place and lives on outside {what}", n)


def check_gradient(view: GraphView, sources: Iterable[fx.Node], through: Iterable[fx.Node]) -> None:
    """Raises Decline where a gradient that an operator gives its inputs is cut in the user's code."""
    if not torch.is_grad_enabled() or not any(view.requires_grad(s) for s in sources):
        return
    for node in through:
        if view.is_tensor(node) and not view.requires_grad(node):
            raise Decline(f"no gradient goes through {label(node)}: it is under no_grad", node)


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
            found = _outside_reader(view, m, inside)
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


def _outside_reader(
    view: GraphView, m: Any, inside: set[fx.Node]
) -> tuple[fx.Node, fx.Node] | None:
    for n in m.swallowed:
        if n is m.anchor:
            continue
        for reader in view.readers(n):
            if reader not in inside:
                return n, reader
    return None
