"""What a mask is made of: conjunctions, causal triangles, and masks that are added."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ...graph.axes import Axis, Placed, above, beside, flat
from ...graph.fakes import same_size, same_sizes
from ...graph.indices import only_slices
from ...graph.names import Call
from ...graph.no_match import if_matched, remembered
from ...graph.scalars import constant_factor
from ...graph.selection import Selection, selections
from ...graph.trial import Untestable, region, run
from ...graph.values import integer, progression
from ...graph.view import GraphView, rounded
from ...graph.vocabulary import COMPARISONS, COPIES, NEGATIONS, VIEWS

_ABOVE = 32  # nodes that a bias is made of that are looked at
_MAX_EVALUATED = 1 << 22  # entries of a constant mask that is computed to see what it is: some ms


def conjuncts(view: GraphView, mask: Placed) -> list[Placed]:
    """The masks that all have to keep a key: `a & b` is two, and so is the negation of `a | b`."""
    call = view.call(mask.node)
    if call.inplace:
        return [mask]
    of, negate, axes = [call.get("input")], mask.negate, mask.axes
    if call.name in NEGATIONS:
        negate = not negate
    elif call.name == ("or_" if negate else "and_"):
        of.append(call["other"])
    elif call.name in VIEWS and view.name_of(of[0]) in NEGATIONS | {"and_", "or_"}:
        moved = if_matched(above, view, mask.node, call, axes)
        if moved is None:
            return [mask]
        axes = tuple(moved)
    else:
        return [mask]
    for x in of:
        boolean = view.is_tensor(x) and view.dtype(x) == torch.bool
        if not boolean or view.value(x, mask.node) is None:
            return [mask]
    inner = [beside(view, x, axes, mask.node, negate=negate) for x in of]
    return [part for one in inner for part in conjuncts(view, one)]


def is_triangle(view: GraphView, mask: Placed, queries: tuple, keys: tuple) -> bool:
    """Whether a mask keeps exactly the keys j <= i + Lk - Lq, of whatever it has besides."""
    if len(mask.axes) < 2:
        return False
    if flat(mask.axes[-2]) != queries or flat(mask.axes[-1]) != keys:
        return False
    if _triangle(view, mask.node, mask.negate):
        return True
    keep = _kept(view, mask)  # made of nothing but numbers: computed, and looked at
    if keep is None:
        return False
    rows, columns = keep.shape[-2:]
    return bool((keep == torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)).all())


def keeps_all(view: GraphView, mask: Placed) -> bool:
    """Whether a mask provably keeps every key, as one does that tells the documents of a sequence apart by positions
    that count through."""
    node, _ = view.original(mask.node, COPIES | {"cast"})
    call = view.call(node)
    if call.name == "eq" and not mask.negate:
        sides = [_computed(view, x) if view.is_tensor(x) else None for x in call.both_ways[0]]
        if all(side is not None and side.numel() for side in sides):
            one = torch.cat([side.flatten() for side in sides if side is not None])
            return bool((one == one[0]).all())
    keep = _kept(view, mask)
    return keep is not None and bool(keep.all())


def keeps_a_key(view: GraphView, mask: Placed) -> bool:
    """Whether a mask provably keeps a key, the last axis, in every row."""
    if not mask.axes or not flat(mask.axes[-1]):
        return False
    parts = [part for part in conjuncts(view, mask) if not keeps_all(view, part)]
    shapes = [view.shape(part.node) for part in parts]
    square = all(len(s) > 1 and same_size(s[-1], s[-2]) for s in shapes)
    if square and all(_triangle(view, part.node, part.negate) for part in parts):
        return True
    keep = _kept(view, mask)
    return keep is not None and bool(keep.any(-1).all())


def _triangle(view: GraphView, node: fx.Node, negate: bool) -> bool:
    """The spellings whose sizes need not be numbers."""
    node, _ = view.original(node, COPIES | {"cast"})
    call = view.call(node)
    shape = view.shape(node)
    offset = shape[-1] - shape[-2] if len(shape) >= 2 else 0
    x = view.value(call["input"], node) if view.is_tensor(call.get("input")) else None
    match call.name:
        case "invert" | "logical_not" if x is not None:
            return _triangle(view, x, not negate)
        case "eq" | "ne" | "gt" if x is not None and view.const(call["other"], node) == 0:
            return _triangle(view, x, negate ^ (call.name == "eq"))
        case "unsqueeze" | "view" | "getitem" | "expand" | "expand_as" if x is not None:
            inner = view.shape(x)
            kept = len(inner) >= 2 and same_sizes(inner[-2:], shape[-2:])
            ordered = call.name != "getitem" or only_slices(call["index"])
            return kept and ordered and _triangle(view, x, negate)
        case "tril" | "triu":
            filled = view.const(call["input"], node)
            diagonal = integer(view, call.get("diagonal", 0), node)
            if filled is None or filled == 0 or diagonal is None:
                return False
            wanted = offset if call.name == "tril" else offset + 1
            return negate == (call.name == "triu") and same_size(diagonal, wanted)
        case name if name in COMPARISONS:
            return _compared(view, node, call, negate, offset)
    return False


def _compared(view: GraphView, node: fx.Node, call: Call, negate: bool, offset: Any) -> bool:
    """key position <= query position"""
    large, small, ties = call.ordered(negate)
    queries, keys = (_positions(view, x, node) for x in (large, small))
    if queries is None or keys is None or (queries[0], keys[0]) != (2, 1):
        return False
    # j + start_k <= i + start_q, or < one more
    return same_size(queries[1] - keys[1] - (0 if ties else 1), offset)


def _positions(view: GraphView, node: Any, reader: fx.Node) -> tuple[int, Any] | None:
    """(axis from the end, first position) of numbers that count along one axis and are the same along the others."""
    if not view.is_tensor(node):
        return None
    found = progression(view, node, reader)
    if found is not None and found.step == 1 and found.axis is not None:
        return found.axis, found.start
    return _of_numbers(view, node)


def _of_numbers(view: GraphView, node: fx.Node) -> tuple[int, int] | None:
    """Such numbers, computed: transformers gathers the positions of every sequence."""
    value = _computed(view, node)
    if value is None or value.is_floating_point() or value.dim() < 2 or not value.numel():
        return None
    for axis in (1, 2):
        lines = value.movedim(-axis, -1).flatten(0, -2)
        length, first = lines.shape[1], int(lines[0, 0])
        if length > 1 and bool((lines == torch.arange(first, first + length)).all()):
            return axis, first
    return None


def _kept(view: GraphView, mask: Placed) -> torch.Tensor | None:
    """Where a mask that is made of nothing but numbers keeps keys."""
    value = _computed(view, mask.node)
    return None if value is None else (value != 0) != mask.negate


def as_mask(view: GraphView, bias: Placed) -> Placed | None:
    """A bias that is 0 where keys are kept and one large negative number elsewhere, as a mask with that `fill`."""
    if bias.fill is not None or bias.times:
        return bias if bias.fill is not None else None
    found = _masked_zeros(view, bias.node, bias.axes) or _constant(view, bias)
    if found is None or found.fill is None or not found.fill * bias.factor <= -1e30:
        return None
    fill = found.fill * bias.factor
    return dataclasses.replace(found, fill=fill if bias.floor is None else max(fill, bias.floor))


def moderate(view: GraphView, bias: Placed) -> bool:
    """Whether a bias is known to be no mask: it is made of numbers that are not large, or of what is learnt."""
    value = _computed(view, bias.node)
    if value is not None and value.is_floating_point():
        return bool((value.double().abs() * abs(bias.factor) < 1e4).all())
    queue, seen = [bias.node], set[fx.Node]()
    while queue and len(seen) <= _ABOVE:
        node = queue.pop()
        if node in seen or not view.is_tensor(node):
            continue
        seen.add(node)
        values = [view.value(n, node) for n in node.all_input_nodes]
        if None in values:
            return False
        queue += values
        given = not node.all_input_nodes and view.dtype(node).is_floating_point
        if view.dtype(node) == torch.bool or (given and not view.requires_grad(node)):
            return False
    return not queue and any(map(view.requires_grad, seen))


def _constant(view: GraphView, bias: Placed) -> Placed | None:
    """A bias made of nothing but numbers, of which there are two, before it is multiplied by its factor."""
    value = _computed(view, bias.node)
    if value is None or not value.is_floating_point():
        return None
    two = bool(((value == 0) | (value == value.min())).all())
    fill = rounded(float(value.min()), view.dtype(bias.node))
    return Placed(bias.node, bias.reader, bias.axes, negate=True, fill=fill) if two else None


def _masked_zeros(view: GraphView, node: fx.Node, axes: Sequence[Axis]) -> Placed | None:
    """The mask that a node is which is 0 where keys are kept and one number, its fill, elsewhere."""
    call = view.call(node)
    if (mask := _zeros_where(view, node, call, axes)) is not None:
        return mask
    x, by = call.get("input"), 1.0
    if (scaled := constant_factor(view, node)) is not None:
        x, by = scaled
    elif call.name in VIEWS and view.is_tensor(x):
        moved = if_matched(above, view, node, call, axes)
        if moved is None:
            return None
        axes = moved
    elif call.name not in COPIES and not (
        call.name == "cast" and view.is_tensor(x) and view.dtype(x).is_floating_point
    ):
        return None
    seen = view.value(x, node)
    found = None if seen is None or not math.isfinite(by) else _masked_zeros(view, seen, axes)
    if found is None or found.fill is None:
        return None
    return dataclasses.replace(found, fill=rounded(found.fill * by, view.dtype(node)))


def _zeros_where(view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis]) -> Placed | None:
    """The mask of what puts zeros into a number, or a number into zeros."""
    if call.name == "triu" and (fill := view.const(call["input"], node)) is not None:
        # triu(full(-inf), 1): the node itself is not boolean, but says where it drops
        return beside(view, node, axes, node, negate=True, fill=fill)
    for one, reader in masked(view, node, call):
        fill = view.const(one.other, node)
        if fill is None or view.const(one.x, node) != 0:
            continue
        if call.name != "mul" or math.isfinite(fill):  # 0 * -inf is NaN
            fill = rounded(fill, view.dtype(node))
            return beside(view, one.keep, axes, reader, negate=one.negate, fill=fill)
    return None


def masked(view: GraphView, node: fx.Node, call: Call) -> Iterator[tuple[Selection, fx.Node]]:
    """The ways to read a call as values where a boolean keeps them and others elsewhere, each with who reads the
    boolean: selections, and products with what is zero or one."""
    for one in selections(view, call) if view.is_tensor(node) else ():
        if view.is_tensor(one.keep) and view.dtype(one.keep) == torch.bool:
            yield one, node
    for x, other in call.both_ways if call.name == "mul" else ():
        if (binary := zero_or_one(view, other, node)) is not None:
            mask, positive, reader = binary
            yield Selection(x, mask, 0.0, negate=not positive), reader
            yield Selection(0.0, mask, x, negate=positive), reader


def mixed(
    view: GraphView, kept: fx.Node, dropped: fx.Node
) -> tuple[fx.Node, fx.Node, float] | None:
    """(scores, mask, fill) of scores * mask + fill * (1 - mask), given the two terms: GPT's way to mask."""
    call, other = view.call(kept), view.call(dropped)
    if not call.name == other.name == "mul":
        return None
    rest, fill = constant_factor(view, dropped) or (None, 0.0)
    mask = None if rest is None else _inverted(view, rest)
    for x, m in call.both_ways if mask is not None else ():
        if isinstance(m, fx.Node) and view.same_value(m, mask) and _is_binary(view, m, kept):
            return x, m, fill
    return None


def _is_binary(view: GraphView, m: fx.Node, reader: fx.Node) -> bool:
    """Whether a tensor provably holds 0 and 1 only."""
    if zero_or_one(view, m, reader) is not None:
        return True
    seen = view.value(m, reader)
    constant = None if seen is None else _computed(view, seen)
    return constant is not None and bool(((constant == 0) | (constant == 1)).all())


@remembered
def _computed(view: GraphView, node: fx.Node) -> torch.Tensor | None:
    """The value of a tensor that is made of nothing but numbers, if it is small enough to compute here."""
    shape = view.shape(node)
    if not all(isinstance(s, int) for s in shape) or math.prod(shape) > _MAX_EVALUATED:
        return None
    piece = region(view, node, ())
    if piece is None:
        return None
    try:
        return run(view, piece, {}, None, exact=True)
    except Untestable:
        return None


def zero_or_one(view: GraphView, x: Any, reader: fx.Node) -> tuple[fx.Node, bool, fx.Node] | None:
    """(mask, whether 1 stands where it is true, who reads it) of what is boolean, a cast of that, or one minus it."""
    if not view.is_tensor(x):
        return None
    if view.dtype(x) == torch.bool:
        return x, True, reader
    seen = view.value(x, reader)
    call = view.call(seen)
    if seen is None or call.inplace:
        return None
    if call.name == "cast":
        return zero_or_one(view, call["input"], seen)
    other = _inverted(view, seen)
    found = None if other is None else zero_or_one(view, other, seen)
    return None if found is None else (found[0], not found[1], found[2])


def _inverted(view: GraphView, node: fx.Node) -> fx.Node | None:
    """m of 1 - m."""
    call = view.call(node)
    if call.name not in ("sub", "rsub") or call.get("alpha", 1) != 1:
        return None
    one, other = call.both_ways[call.name == "rsub"]
    return other if view.const(one, node) == 1 and view.is_tensor(other) else None
