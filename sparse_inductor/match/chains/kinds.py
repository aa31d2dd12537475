"""The kinds of operands in a chain: one number per token, per vocabulary entry, or per combination of both."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import fx

from ...graph.fakes import same_size
from ...graph.indices import is_full
from ...graph.no_match import NoMatch
from ...graph.selection import Assigned
from ...graph.values import uniform
from ...graph.view import GraphView, label
from .backward_walk import walk_back
from .comparisons import is_comparison, unwrapped
from .epilogue_chain import Fill, Normalised
from .family import above

Kind = Literal["row", "column", "entry"]


class Frame(NamedTuple):
    """The axes of a value of the chain: their number, and which of them is the vocabulary."""

    ndim: int
    v_dim: int


def kind_of(
    view: GraphView,
    operand: fx.Node | Assigned | Fill | Normalised,
    node: fx.Node,
    frame: Frame,
    linear_after: bool,
) -> Kind:
    """The kind of the operand that `node` combines with a value in `frame`.

    "row": one number per token. "column": one per vocabulary entry. "entry": one per sequence and vocabulary entry,
    provided that the axis of size 1 is the reduced one (see `Chain.tail_fits`). Raises NoMatch for any other operand.
    linear_after: see `Chain`.
    """
    if isinstance(operand, Assigned):
        return _assigned_kind(view, operand, node, frame)
    if isinstance(operand, Normalised):
        if frame.v_dim != 1:
            raise NoMatch("batch_norm of another axis than the linear's outputs", node)
        return "column"
    if isinstance(operand, Fill):
        if any(kind_of(view, n, node, frame, linear_after) != "row" for n in operand.nodes()):
            raise NoMatch("the masked value differs by output", node)
        return "row"
    if not view.is_tensor(operand):
        raise NoMatch("an operand is a number known only at run time", node)
    shape = view.shape(operand)
    if len(shape) > frame.ndim:
        raise NoMatch("an operand has more axes than the linear's result", node)
    at = frame.v_dim - (frame.ndim - len(shape))
    if at < 0 or same_size(shape[at], 1) or uniform(view, operand, len(shape) - at, node):
        return "row"
    if all(same_size(s, 1) for a, s in enumerate(shape) if a != at):
        return "column"
    if any(same_size(s, 1) for a, s in enumerate(shape) if a != at):
        return "entry"
    raise _unlike(view, operand, node, linear_after)


def _unlike(view: GraphView, operand: fx.Node, node: fx.Node, linear_after: bool) -> NoMatch:
    """Why an operand with the shape of the logits is not supported: the first node between it and its own linear that
    cannot be followed, if known."""
    if linear_after and "linear" in above(view, operand):
        followed, reader = [operand], node
        if is_comparison(view, operand):
            reader = unwrapped(view, operand)[0]
            if view.name_of(node) != "mul":
                return NoMatch(
                    f"a comparison ({label(reader)}) of another value says what is kept", reader
                )
            followed = [n for n in reader.all_input_nodes if "linear" in above(view, n)]
        for n in followed:
            try:
                walk_back(view, n, reader)
            except NoMatch as decline:
                if view.call(decline.node):
                    return decline
    return NoMatch(f"an operand ({label(operand)}) differs by token and by output", node)


def _assigned_kind(view: GraphView, operand: Assigned, node: fx.Node, frame: Frame) -> Kind:
    items = operand.by_axis(view, frame.ndim)
    touched = [a for item, axes in items for a in axes if not is_full(item)]
    if frame.v_dim not in touched:
        return "row"
    if touched == [frame.v_dim]:
        return "column"
    raise NoMatch("assigns to single elements of the linear's result", node)
