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
from ...graph.contraction import Contraction, Operand, contraction
from ...graph.effects import reached
from ...graph.indices import sole
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.scalars import constant_factor
from ...graph.selection import selections
from ...graph.values import extreme
from ...graph.view import GraphView
from ...graph.vocabulary import VIEWS
from .form import own_sum
from .masks import conjuncts, moderate, zero_or_one
from .transform import Transform, transform

_REACH = 12
_NEAR = 6  # nodes looked at for an entmax above an operation that changes probabilities
_FLOOR = 0.5  # a sum of one is above it whatever its rounding
_NEVER = -1e9  # no score is as low: a key that got this has no probability beside any that did not


@dataclasses.dataclass
class Probabilities:
    """The entmax that an operand is, and what lies between.

    axes: those of the entmax's result. nodes: what lies between, the operand's node first. again: masks that drop
    probabilities, which the scores' own have to be, unless they drop whole rows. factors: what the rows are multiplied
    by, none of which may vary with the keys.
    """

    found: Transform
    axes: Sequence[Axis]
    nodes: list[fx.Node]
    again: list[Placed]
    factors: list[Placed | float]

    def by_rows(
        self, view: GraphView, keys: Sequence[Atom]
    ) -> tuple[list[Placed | float], list[Placed]]:
        """(what rows are multiplied by, masks of whole rows among it; the masks of `again` that vary with the keys).
        Raises NoMatch where a factor does."""

        def varies(p: Placed) -> bool:
            return any(atom in keys for atom in p.atoms)

        for factor in self.factors:
            if isinstance(factor, Placed) and varies(factor):
                raise _changed_by(view, factor.reader)
        rows = [p for p in self.again if not varies(p)]
        return [*self.factors, *rows], [p for p in self.again if varies(p)]


def read_probabilities(
    view: GraphView, p: Operand, axes: Sequence[Axis], told: bool = True
) -> Probabilities | None:
    """The entmax that an operand is, through what does not change its values; None if it is none.

    Raises NoMatch. told: whether one that is changed on the way is worth a reason, as it is not of what a linear of
    the model reads.
    """
    node: fx.Node | None = p.node
    nodes: list[fx.Node] = []
    again: list[Placed] = []
    factors: list[Placed | float] = []
    sums: list[_Sum] = []
    for _ in range(_REACH):
        if node is None or not view.is_tensor(node):
            return None
        found = transform(view, node)
        if found is not None:
            for total in sums:
                if flat(total.axis) != flat(axes[found.dim]):
                    raise _changed_by(view, total.node)
            return Probabilities(found, axes, nodes, again, factors)
        call = view.call(node)
        if call is None:
            return None
        x = _identity_input(view, call)
        if x is None and (one := _own_sum(view, node, call, axes)) is not None:
            sums.append(one)
            nodes += one.nodes
            x = one.of
        if x is None and (dropped := _dropped(view, node, call)) is not None:
            x, mask, negate, reader = dropped
            if any(not total.guarded for total in sums):
                x = None  # a row that this empties is divided by zero
            elif negate and _is_nan_of(view, mask, x):
                nodes.append(mask)
            else:
                again.append(beside(view, mask, axes, reader, negate=negate))
        # A quotient by the rows' sums takes out again what they were multiplied by.
        if x is None and not sums and (scaled := _multiplied(view, node, call, axes)) is not None:
            x, factor = scaled
            factors.append(factor)
            scale = math.prod(f for f in factors if isinstance(f, float))
            if extreme(scale):
                raise NoMatch(f"the probabilities are multiplied by {scale:g}", node)
        if call.name not in VIEWS and not view.same_shape(x, node):
            x = None
        if not view.is_tensor(x):
            if told and _entmax_above(view, node) is not None:
                raise _changed_by(view, node)
            return None
        if call.name in VIEWS:
            try:
                axes = above(view, node, call, axes)
            except NoMatch:
                if not told or _entmax_above(view, node) is None:
                    return None
                raise
        nodes.append(node)
        node = view.value(x, node)
    return None


def check_again(
    view: GraphView,
    found: Transform,
    again: Sequence[Placed],
    masks: Sequence[Placed],
    biases: Sequence[Placed],
    fill: float | None,
    unless: bool,
) -> None:
    """Raise NoMatch unless the masks of `again` drop just the keys that the scores' masks drop.

    Then they change rows without a key only, to zeros, which is what the operator gives for a fill of -inf. unless:
    the scores have masks that win over these.
    """
    extra = unless or any(b.fill is not None for b in biases)
    one = [part for mask in masks for part in conjuncts(view, mask)]
    two = [part for mask in again for part in conjuncts(view, mask)]
    alike = all(any(_same(view, a, b) for b in two) for a in one) and all(
        any(_same(view, a, b) for a in one) for b in two
    )
    lowest = torch.finfo(view.dtype(found.source)).min
    if extra or not alike or fill is None or not (fill <= _NEVER or fill == lowest):
        raise _changed_by(view, again[0].reader)
    if fill != -math.inf and not all(moderate(view, b) for b in biases):
        raise NoMatch(
            "probabilities are masked once more; keys that a bias makes as low as the mask does share theirs",
            again[0].reader,
        )


def _same(view: GraphView, a: Placed, b: Placed) -> bool:
    def where(mask: Placed) -> list[Axis]:
        axes = [flat(axis) for axis in mask.axes]
        while axes and not axes[0]:
            axes.pop(0)
        return axes

    alike = view.same_value(a.node, b.node) or view.same_value(b.node, a.node)
    return alike and a.negate == b.negate and where(a) == where(b)


def _identity_input(view: GraphView, call: Call) -> Any:
    """The input of an operation that keeps every value; None where it is none."""
    quiet = (
        call.name == "cast"
        or call.name in VIEWS
        or view.kept(call) is not None
        or (call.name == "nan_to_num" and view.const(call.get("nan", 0.0)) == 0)
    )
    return call.get("input") if quiet else None


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A division by the values' own sum over `axis`. guarded: an empty row is divided by a small number instead."""

    node: fx.Node
    of: fx.Node
    axis: Axis
    nodes: list[fx.Node]
    guarded: bool


def _own_sum(view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]) -> _Sum | None:
    """The values that a node divides by their sum over one axis; None where it does not."""
    if call.name not in ("div", "normalize") or (found := own_sum(view, node, call)) is None:
        return None
    x, nodes = found
    if not nodes:
        dim, own_guard = call.get("dim", 1), len(node.args) > 3 or "eps" in node.kwargs
        fixed = isinstance(dim, int) and not own_guard
        return None if not fixed else _Sum(node, x, axes[dim % len(axes)], nodes, True)
    *guards, total = nodes
    summed = view.call(total)
    assert summed is not None
    dim = sole(summed.get("dim"))
    along = summed.get("keepdim") is True and isinstance(dim, int)
    if not along or len(view.shape(total)) != len(axes):
        return None
    if not all(_guards(view, guard, view.dtype(node)) for guard in guards):
        return None
    return _Sum(node, x, axes[dim % len(axes)], nodes, bool(guards))


def _guards(view: GraphView, node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node changes a sum of zero alone: what it adds is lost in a sum of one, or its floor is below that."""
    call = view.call(node)
    if call is not None and call.name in ("clamp_min", "clamp") and call.get("max") is None:
        low = view.const(call["min"], node)
        return low is not None and 0 < low <= _FLOOR
    if call is not None and call.name == "add" and call.get("alpha", 1) == 1:
        small = view.const(call["other"], node)
        return small is not None and 0 < small <= _lost(dtype)
    return False


def _lost(dtype: torch.dtype) -> float:
    """The most that may be added to one so that a division by the sum shows no more than rounding."""
    return min(10 * torch.finfo(dtype).eps, 1.1e-6)


def _is_nan_of(view: GraphView, mask: fx.Node, x: Any) -> bool:
    """Whether a mask is isnan(x): the operator gives no NaN where rows have no keys."""
    call = view.call(mask)
    return call is not None and call.name == "isnan" and view.same_value(call["input"], x)


def _dropped(
    view: GraphView, node: fx.Node, call: Call
) -> tuple[Any, fx.Node, bool, fx.Node] | None:
    """(probabilities, mask, whether it says what to drop, who reads it) where an operation puts 0 in the place of
    some."""
    x, mask, negate, reader = None, None, False, node
    for found in selections(view, call):
        if view.const(found.other, node) == 0:
            x, mask, negate = found.x, found.keep, found.negate
            break
    if call.name == "mul":
        for a, b in call.both_ways:
            binary = zero_or_one(view, b, node) if view.is_tensor(a) else None
            if binary is not None:
                x, (mask, positive, reader) = a, binary
                negate = not positive
                break
    if mask is None or not view.is_tensor(mask) or view.dtype(mask) != torch.bool:
        return None
    return None if view.value(mask, reader) is None else (x, mask, negate, reader)


def _multiplied(
    view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]
) -> tuple[Any, Placed | float] | None:
    """(probabilities, factor) of a product or quotient with a number, or with a tensor that may lack their keys."""
    if (by := constant_factor(view, node)) is not None:
        return by if by[1] > 0 else None
    if call.name not in ("mul", "div") or call.get("rounding_mode") is not None:
        return None
    divides = call.name == "div"
    for x, other in call.both_ways[: 1 if divides else 2]:
        full = view.is_tensor(x) and view.same_shape(x, node)
        if not (full and view.is_tensor(other)) or _entmax_above(view, x) is None:
            continue
        if _entmax_above(view, other) is not None:  # the rows' own sums, say
            return None
        return x, beside(view, other, axes, node, divides=divides)
    return None


def _changed_by(view: GraphView, node: fx.Node) -> NoMatch:
    name = view.name_of(node) or "an operation"
    if name == "dropout":
        return NoMatch("dropout is active between the probabilities and the values", node)
    return NoMatch(f"{name} changes the probabilities before they weigh the values", node)


def _entmax_above(view: GraphView, node: fx.Node) -> fx.Node | None:
    """An entmax that a few operations turn into `node`; no product is crossed, but for one of heads."""

    def up(n: fx.Node) -> list[fx.Node]:
        if view.call(n) is None:
            return []
        product = contraction(view, n)
        above = n.all_input_nodes if product is None else _mixed(view, product)
        return [m for m in above if view.is_tensor(m)]

    for one in reached([node], up, _NEAR):
        try:
            if transform(view, one) is not None:
                return one
        except NoMatch:
            return None
    return None


def _mixed(view: GraphView, product: Contraction) -> list[fx.Node]:
    """The operands of a product that are probabilities and still are of the same keys after it, as where heads are
    mixed: those that weigh values are gone."""
    found = ((o, transform(view, o.node)) for o in product.operands)
    return [o.node for o, t in found if t is not None and o.axes[t.dim] in product.axes]
