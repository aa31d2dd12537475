"""Attention probabilities, from where they weigh the values up to the entmax that makes them.

Between the two a program may change the layout, do what changes no value, and drop once more what the scores' mask
dropped already: `p.masked_fill(mask, 0)`, which alters rows without a key only. It may divide by the rows' sums, which
are one, or zero where such a mask has dropped the whole row. And it may multiply by what has one number a row or head
(a mask of queries, a head mask), which does as well behind the product with the values.
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
from ...graph.effects import reached
from ...graph.indices import sole
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.scalars import constant_factor, sums
from ...graph.values import extreme
from ...graph.view import GraphView, label
from ...graph.vocabulary import VIEWS
from .form import own_sum
from .masks import conjuncts, masked, moderate
from .transform import Transform, transform

_REACH = 12
_NEAR = 6  # nodes looked at for an entmax above an operation that changes probabilities
_FLOOR = 0.5  # a sum of one is above it whatever its rounding
_NEVER = -1e9  # no score is as low: a key that got this has no probability beside any that did not


@dataclasses.dataclass
class Probabilities:
    """What lies between an operand and the entmax that it is, read upwards.

    axes: those of what has been reached, the entmax's result in the end. nodes: what lies between, the operand's node
    first. again: masks that drop probabilities, which the scores' own have to be, unless they drop whole rows; each
    with the node that drops them. scale, factors: what the rows are multiplied by, no tensor of which may vary with the
    keys. sums: the divisions by the values' own sum, each with the axis that is summed, and whether an empty row is
    divided by a small number instead of zero.
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
        """(the tensors that rows are multiplied by, masks of whole rows among them; the masks of `again` that vary with
        the keys). Raises NoMatch where a factor does."""

        def varies(p: Placed) -> bool:
            return any(atom in keys for atom in p.atoms)

        for factor in self.factors:
            if varies(factor):
                raise _changed_by(self.view, factor.reader)
        rows = [p for p, _ in self.again if not varies(p)]
        return [*self.factors, *rows], [one for one in self.again if varies(one[0])]

    def check_again(
        self,
        again: Sequence[tuple[Placed, fx.Node]],
        masks: Sequence[Placed],
        biases: Sequence[Placed],
        fill: float | None,
        unless: bool,
    ) -> None:
        """Raise NoMatch unless the masks of `again` drop just the keys that the scores' masks drop.

        Then they change rows without a key only, to zeros, which is what the operator gives for a fill of -inf. unless:
        the scores have masks that win over these.
        """
        view, (_, at) = self.view, again[0]
        more = [p for p, _ in again]
        one, two = ([p for m in some for p in conjuncts(view, m)] for some in (masks, more))
        alike = all(any(_same(view, a, b) for b in two) for a in one) and all(
            any(_same(view, a, b) for a in one) for b in two
        )
        extra = unless or any(b.fill is not None for b in biases)
        lowest = torch.finfo(view.dtype(self.found.source)).min
        if extra or not alike or fill is None or not (fill <= _NEVER or fill == lowest):
            raise _changed_by(view, at)
        if fill != -math.inf and not all(moderate(view, b) for b in biases):
            reason = "keys that a bias makes as low as the mask does share theirs"
            raise NoMatch(f"probabilities are masked once more; {reason}", at)

    def before(self, node: fx.Node, call: Call) -> Any:
        """The probabilities that an operation keeps, but for what is noted here; None for other operations."""
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
                return None  # a row that this empties is divided by zero
            isnan = view.call(one.keep)
            if one.negate and isnan.name == "isnan" and view.same_value(isnan["input"], one.x):
                self.nodes.append(one.keep)  # the operator gives no NaN where rows have no keys
            else:
                mask = beside(view, one.keep, self.axes, reader, negate=one.negate)
                self.again.append((mask, node))
            return one.x
        if self.sums:
            return None  # a quotient by the rows' sums takes out again what they were multiplied by
        if (by := constant_factor(view, node)) is not None and by[1] > 0:
            self.scale *= by[1]
            return None if extreme(self.scale) else by[0]
        x, factor = _multiplied(view, node, call, self.axes) or (None, None)
        self.factors += [] if factor is None else [factor]
        return x

    def _divided(self, node: fx.Node, call: Call) -> fx.Node | None:
        """The values that a node divides by their sum over one axis; None where it does not."""
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
    """The entmax that an operand is, through what does not change its values; None if it is none.

    Raises NoMatch. told: whether one that is changed on the way is worth a reason, as it is not of what a linear of
    the model reads.
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
    """Whether a node changes a sum of zero alone: what it adds is lost in a sum of one, or its floor is below that."""
    call = view.call(node)
    if call.name in ("clamp_min", "clamp") and call.get("max") is None:
        low = view.const(call["min"], node)
        return low is not None and 0 < low <= _FLOOR
    # A sum of one shows no more of what is added than rounding.
    least = min(10 * torch.finfo(dtype).eps, 1.1e-6)
    added = (
        (view.const(c, node), factor) for (_, own), (c, factor) in sums(view, node) if own == 1
    )
    return any(c is not None and 0 < c * factor <= least for c, factor in added)


def _multiplied(
    view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]
) -> tuple[Any, Placed] | None:
    """(probabilities, factor) of a product or quotient with a tensor that may lack their keys."""
    if call.name not in ("mul", "div") or call.get("rounding_mode") is not None:
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
    """Whether a few operations turn an entmax into `node`; no product is crossed, but for one of heads."""

    def up(n: fx.Node) -> list[fx.Node]:
        product = contraction(view, n)
        if product is None:
            return [m for m in n.all_input_nodes if view.is_tensor(m)]
        # Where heads are mixed, probabilities are of the same keys after it: those that weigh values are gone.
        found = ((o, transform(view, o.node)) for o in product.operands)
        return [o.node for o, t in found if t is not None and o.axes[t.dim] in product.axes]

    try:
        return any(transform(view, one) is not None for one in reached([node], up, _NEAR))
    except NoMatch:
        return False
