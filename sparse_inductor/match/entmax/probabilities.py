"""Attention probabilities, from the product with the values up to the entmax that computes them.

Between the two a program may change the layout, apply operations that change no value, and drop again the keys that the
mask of the scores has dropped: `p.masked_fill(mask, 0)`, which only changes rows without a key. It may divide by the
sums of the rows, which are one, or zero if such a mask has dropped the whole row. It may also multiply by one number
per row or head (a mask of queries, a head mask), which can equally be done after the product with the values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, above, beside, flat
from ...graph.contraction import Operand, contraction
from ...graph.indices import sole
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.scalars import constant_factor, sums
from ...graph.search import reached
from ...graph.values import extreme
from ...graph.view import GraphView, label
from ...graph.vocabulary import VIEWS
from .form import own_sum
from .masks import conjuncts, masked, moderate
from .scores import Scores
from .transform import Transform, transform

_REACH = 12
_NEAR = 6  # nodes searched for an entmax above an operation that changes probabilities
_FLOOR = 0.5  # a rounded sum of one is always above this
_NEVER = -1e9  # no score is this low, so a key with this fill has probability 0 beside any other


@dataclasses.dataclass
class Probabilities:
    """The operations between an operand and the entmax that it comes from, read upwards.

    axes: the axes of the node that has been reached, finally of the entmax's result. nodes: the nodes in between, that
    of the operand first. again: the masks that drop probabilities, each with the node that applies it; unless they drop
    whole rows, they must be the masks of the scores. scale, factors: the number and the tensors that rows are
    multiplied by; no tensor may vary with the keys. sums: the divisions of the values by their sum, each with the axis
    that is summed, and whether an empty row is divided by a small number instead of zero.
    """

    view: GraphView
    axes: Sequence[Axis]
    found: Transform = dataclasses.field(init=False)
    nodes: list[fx.Node] = dataclasses.field(default_factory=list)
    again: list[tuple[Placed, fx.Node]] = dataclasses.field(default_factory=list)
    scale: float = 1.0
    factors: list[Placed] = dataclasses.field(default_factory=list)
    sums: list[tuple[fx.Node, Axis, bool]] = dataclasses.field(default_factory=list)

    def by_rows(self, keys: Sequence[Atom]) -> tuple[list[Placed], list[tuple[Placed, fx.Node]]]:
        """(the tensors that rows are multiplied by, including masks of whole rows; the masks of `again` that vary with
        the keys). Raises NoMatch if a factor varies with the keys."""

        def varies(p: Placed) -> bool:
            return any(atom in keys for atom in p.atoms)

        for factor in self.factors:
            if varies(factor):
                raise _changed_by(self.view, factor.reader)
        rows = [p for p, _ in self.again if not varies(p)]
        return [*self.factors, *rows], [one for one in self.again if varies(one[0])]

    def check_again(self, again: Sequence[tuple[Placed, fx.Node]], scores: Scores) -> None:
        """Raise NoMatch unless the masks of `again` drop exactly the keys that the masks of the scores drop.

        In that case they only change rows without a key, to zeros, like the operator with a fill of -inf.
        """
        view, (_, at), fill = self.view, again[0], scores.fill
        more = [p for p, _ in again]
        one, two = ([p for m in some for p in conjuncts(view, m)] for some in (scores.masks, more))
        alike = all(any(_same(view, a, b) for b in two) for a in one) and all(
            any(_same(view, a, b) for a in one) for b in two
        )
        extra = scores.unless or any(b.fill is not None for b in scores.biases)
        lowest = torch.finfo(view.dtype(self.found.source)).min
        if extra or not alike or fill is None or not (fill <= _NEVER or fill == lowest):
            raise _changed_by(view, at)
        if fill != -math.inf and not all(moderate(view, b) for b in scores.biases):
            reason = "keys that a bias makes as low as the mask does share theirs"
            raise NoMatch(f"probabilities are masked once more; {reason}", at)

    def before(self, node: fx.Node, call: Call) -> Any:
        """The probabilities that an operation keeps, except for the changes that this method records; None for other
        operations."""
        view = self.view
        if (
            call.name == "cast"
            or call.name in VIEWS
            or view.kept(call) is not None
            or (call.name == "nan_to_num" and view.const(call.get("nan", 0.0)) == 0)
        ):
            return call["input"]
        if (x := self._divided(node, call)) is not None:
            return x
        for one, reader in masked(view, node, call):
            if view.const(one.other, node) != 0 or view.value(one.keep, reader) is None:
                continue
            if not all(guarded for *_, guarded in self.sums):
                return None  # a row that this mask empties is divided by zero
            isnan = view.call(one.keep)
            if one.negate and isnan.name == "isnan" and view.same_value(isnan["input"], one.x):
                self.nodes.append(one.keep)  # the operator gives no NaN where rows have no keys
            else:
                mask = beside(view, one.keep, self.axes, reader, negate=one.negate)
                self.again.append((mask, node))
            return one.x
        if self.sums:
            return None  # a later division by the rows' sums would cancel a factor
        if (by := constant_factor(view, node)) is not None and by[1] > 0:
            self.scale *= by[1]
            return None if extreme(self.scale) else by[0]
        x, factor = _multiplied(view, node, call, self.axes) or (None, None)
        self.factors += [] if factor is None else [factor]
        return x

    def _divided(self, node: fx.Node, call: Call) -> fx.Node | None:
        """The values that a node divides by their sum over one axis; None for other nodes."""
        if (found := own_sum(self.view, node, call)) is None:
            return None
        x, nodes = found
        if nodes:
            *guards, total = nodes
            summed = self.view.call(total)
            dim = sole(summed.get("dim")) if summed.get("keepdim") is True else None
            guarded = bool(guards)
            if not all(_guards(self.view, guard, self.view.dtype(node)) for guard in guards):
                return None
        else:
            own_guard = len(node.args) > 3 or "eps" in node.kwargs
            dim, guarded = None if own_guard else call.get("dim", 1), True
        if not isinstance(dim, int):
            return None
        self.nodes += nodes
        self.sums.append((node, self.axes[dim % len(self.axes)], guarded))
        return x


def read_probabilities(
    view: GraphView, p: Operand, axes: Sequence[Axis], told: bool = True
) -> Probabilities | None:
    """The entmax that an operand comes from, through operations that do not change its values; None if there is none.

    Raises NoMatch. told: whether to report an entmax with values that are changed on the way. This is not useful for
    the input of a linear layer.
    """
    node: fx.Node | None = p.node
    read = Probabilities(view, axes)
    for _ in range(_REACH):
        if node is None or not view.is_tensor(node):
            return None
        found = transform(view, node)
        if found is not None:
            for at, axis, _ in read.sums:
                if flat(axis) != flat(read.axes[found.dim]):
                    raise _changed_by(view, at)
            read.found = found
            return read
        call = view.call(node)
        x = read.before(node, call) if call else None
        try:
            if not view.is_tensor(x) or (call.name not in VIEWS and not view.same_shape(x, node)):
                raise _changed_by(view, node)
            if call.name in VIEWS:
                read.axes = above(view, node, call, read.axes)
        except NoMatch:
            if not (told and _entmax_above(view, node)):
                return None
            raise
        read.nodes.append(node)
        node = view.value(x, node)
    return None


def _same(view: GraphView, a: Placed, b: Placed) -> bool:
    def where(mask: Placed) -> list[Axis]:
        axes = [flat(axis) for axis in mask.axes]
        while axes and not axes[0]:
            axes.pop(0)
        return axes

    alike = view.same_value(a.node, b.node) or view.same_value(b.node, a.node)
    return alike and a.negate == b.negate and where(a) == where(b)


def _guards(view: GraphView, node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node only changes a sum of zero: the number that it adds is lost in a sum of one, or its lower bound is
    below one."""
    call = view.call(node)
    if call.name in ("clamp_min", "clamp") and call.get("max") is None:
        low = view.const(call["min"], node)
        return low is not None and 0 < low <= _FLOOR
    # Adding at most this number to a sum of one is within rounding.
    least = min(10 * torch.finfo(dtype).eps, 1.1e-6)
    added = (
        (view.const(c, node), factor) for (_, own), (c, factor) in sums(view, node) if own == 1
    )
    return any(c is not None and 0 < c * factor <= least for c, factor in added)


def _multiplied(
    view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]
) -> tuple[Any, Placed] | None:
    """(probabilities, factor) of a product or quotient with a tensor, which need not have the axis of the keys."""
    if call.name not in ("mul", "div"):
        return None
    divides = call.name == "div"
    for x, other in call.both_ways[: 1 if divides else 2]:
        full = view.is_tensor(x) and view.same_shape(x, node)
        if not (full and view.is_tensor(other) and _entmax_above(view, x)):
            continue
        if _entmax_above(view, other):  # the rows' own sums, say
            return None
        return x, beside(view, other, axes, node, divides=divides)
    return None


def _changed_by(view: GraphView, node: fx.Node) -> NoMatch:
    name = view.name_of(node)
    if not name:
        return NoMatch(f"{label(node)} is between the probabilities and the values", node)
    if name == "dropout":
        return NoMatch("dropout is active between the probabilities and the values", node)
    return NoMatch(f"{name} changes the probabilities before they weigh the values", node)


def _entmax_above(view: GraphView, node: fx.Node) -> bool:
    """Whether `node` comes from an entmax through a few operations. No product is crossed, except one of heads."""

    def up(n: fx.Node) -> list[fx.Node]:
        product = contraction(view, n)
        if product is None:
            return [m for m in n.all_input_nodes if view.is_tensor(m)]
        # A product that mixes heads keeps the axis of the keys; one that weights the values does not.
        found = ((o, transform(view, o.node)) for o in product.operands)
        return [o.node for o, t in found if t is not None and o.axes[t.dim] in product.axes]

    try:
        return any(transform(view, one) is not None for one in reached([node], up, _NEAR))
    except NoMatch:
        return False
