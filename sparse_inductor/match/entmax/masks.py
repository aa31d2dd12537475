"""The structure of masks: conjunctions, causal triangles, and additive masks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...graph.axes import Axis, Placed, above, beside, flat, last_axes
from ...graph.fakes import fake, same_size
from ...graph.names import Call, stored
from ...graph.no_match import if_matched, remembered
from ...graph.scalars import constant_factor, sums
from ...graph.search import reached, taken_apart
from ...graph.selection import Selection, selections
from ...graph.trial import Untestable, region, run
from ...graph.values import integer, progression
from ...graph.view import GraphView, rounded
from ...graph.vocabulary import COMPARISONS, NEGATIONS, SAME_VALUES, VIEWS

_ABOVE = 32  # nodes above a bias that are examined
_MAX_STEPS = 32  # operations on a boolean that are followed
_MAX_EVALUATED = 1 << 22  # entries of a constant mask that is computed and examined: some ms


def conjuncts(view: GraphView, mask: Placed) -> list[Placed]:
    """The masks that must all keep a key for `mask` to keep it, above negations, comparisons with zero and views.
    `a & b` is two masks, and so is the negation of `a | b`."""
    return taken_apart(mask, functools.partial(_apart, view))


def _apart(view: GraphView, mask: Placed) -> list[Placed]:
    """The masks that a mask consists of, one operation further up; empty if the operation cannot be passed."""
    node, negate, axes = mask.node, mask.negate, mask.axes
    call = view.call(node)
    of = [call.get("input")]
    if call.inplace:
        return []
    boolean = view.dtype(node) == torch.bool
    moves = view.is_tensor(of[0]) and fake(node).device != fake(of[0]).device
    of_zero = call.name in ("eq", "ne") and view.const(call["other"], node) == 0
    if call.name in VIEWS and view.is_tensor(of[0]):
        moved = if_matched(above, view, node, call, axes)
        if moved is None:
            return []
        axes = tuple(moved)
    elif boolean and not moves and (of_zero or call.name in NEGATIONS | {"cast"}):
        negate ^= call.name == "eq" or call.name in NEGATIONS
    elif boolean and call.name == ("or_" if negate else "and_"):
        of.append(call["other"])
    else:
        return []
    if any(not view.is_tensor(x) or view.value(x, node) is None for x in of):
        return []
    return [beside(view, x, axes, node, negate=negate) for x in of]


def is_triangle(view: GraphView, mask: Placed, queries: tuple, keys: tuple) -> bool:
    """Whether a mask keeps exactly the keys j <= i + Lk - Lq, whatever other axes it has."""
    if [*map(flat, mask.axes[-2:])] != [queries, keys]:
        return False
    if _triangle(view, mask):
        return True
    keep = _kept(view, mask)  # a constant mask is computed and examined
    if keep is None:
        return False
    rows, columns = keep.shape[-2:]
    return bool((keep == torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)).all())


def keeps_all(view: GraphView, mask: Placed) -> bool:
    """Whether a mask provably keeps every key. One that separates packed documents by their positions does so if the
    positions never restart."""
    node, _ = view.behind(mask.node, SAME_VALUES)
    call = view.call(node)
    if call.name == "eq" and not mask.negate:
        sides = [_computed(view, x, node) for x in call.both_ways[0]]
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
    along = square and all(flat(part.axes[-1]) == flat(mask.axes[-1]) for part in parts)
    if along and all(_triangle(view, part) for part in parts):
        return True
    keep = _kept(view, mask)
    return keep is not None and bool(keep.any(-1).all())


def _triangle(view: GraphView, mask: Placed) -> bool:
    """Whether a mask is a causal triangle in one of the spellings that allow symbolic sizes."""
    node, _ = view.behind(mask.node, SAME_VALUES)
    call, shape = view.call(node), view.shape(node)
    offset = shape[-1] - shape[-2]
    if positive := call.name == "gt" and view.const(call["other"], node) == 0:
        node, _ = view.behind(view.value(call["input"], node), SAME_VALUES)
        call = view.call(node)
    if call.name in ("tril", "triu"):
        filled = view.const(call["input"], node)
        diagonal = integer(view, call.get("diagonal", 0), node)
        if not filled or diagonal is None or (positive and filled < 0):
            return False
        wanted = offset if call.name == "tril" else offset + 1
        return mask.negate == (call.name == "triu") and same_size(diagonal, wanted)
    if positive or call.name not in COMPARISONS:
        return False
    # key position <= query position
    large, small, ties = call.ordered(mask.negate)
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
    value = _computed(view, node, reader)  # transformers gathers the positions of every sequence
    if value is None or value.is_floating_point() or value.dim() < 2 or not value.numel():
        return None
    for axis in (1, 2):
        lines = value.movedim(-axis, -1).flatten(0, -2)
        length, first = lines.shape[1], int(lines[0, 0])
        if length > 1 and bool((lines == torch.arange(first, first + length)).all()):
            return axis, first
    return None


def _kept(view: GraphView, mask: Placed) -> torch.Tensor | None:
    """The keys that a constant mask keeps; None for other masks."""
    value = _computed(view, mask.node, mask.reader)
    return None if value is None else (value != 0) != mask.negate


def as_mask(view: GraphView, bias: Placed) -> Placed | None:
    """A bias that is 0 where keys are kept and one large negative number elsewhere, as a mask with that `fill`."""
    if bias.fill is not None or bias.times:
        return bias if bias.fill is not None else None
    found = choice(view, bias.node, bias.reader, bias.axes, numbers=True)
    if found is None or 0 not in (found.on, found.off):
        return None
    fill = (found.on + found.off) * bias.factor
    if not fill <= -1e30:
        return None
    fill = fill if bias.floor is None else max(fill, bias.floor)
    return beside(view, found.mask, found.axes, found.reader, negate=found.off == 0, fill=fill)


def moderate(view: GraphView, bias: Placed) -> bool:
    """Whether a bias is known not to be a mask: it is a constant without large numbers, or is computed from learnt
    tensors."""
    value = _computed(view, bias.node, bias.reader)
    if value is not None and value.is_floating_point():
        return bool((value.double().abs() * abs(bias.factor) < 1e4).all())

    def read(node: fx.Node) -> list[fx.Node | None]:
        return [view.value(n, node) for n in node.all_input_nodes]

    def above(node: fx.Node) -> list[fx.Node]:
        return [n for n in read(node) if n is not None and view.is_tensor(n)]

    def may_be_learnt(node: fx.Node) -> bool:
        given = not node.all_input_nodes and view.dtype(node).is_floating_point
        numbers = view.dtype(node) != torch.bool and not (given and not view.requires_grad(node))
        return numbers and None not in read(node)

    seen = [*reached([bias.node], above, _ABOVE + 1)]
    learnt = len(seen) <= _ABOVE and all(map(may_be_learnt, seen))
    return learnt and any(map(view.requires_grad, seen))


class Choice(NamedTuple):
    """The number `on` where a mask is true or non-zero, and `off` elsewhere. reader: the node that reads the mask.
    axes: those of the tensor to which it broadcasts."""

    mask: fx.Node
    reader: fx.Node
    axes: Sequence[Axis]
    on: float
    off: float

    @property
    def is_binary(self) -> bool:
        return {self.on, self.off} == {0, 1}


def choice(
    view: GraphView,
    x: Any,
    reader: fx.Node,
    axes: Sequence[Axis] = (),
    numbers: bool = False,
    most: int = _MAX_STEPS,
) -> Choice | None:
    """The value that `reader` sees of a tensor as one of two numbers, depending on a boolean: a selection between
    constants, or the boolean itself, times a number and plus another one. None for other tensors.

    axes: those of the tensor; without them no view is followed. numbers: whether a constant tensor is computed to see
    its values. most: the number of operations that are followed.
    """
    if view.is_tensor(x) and view.dtype(x) == torch.bool:
        return Choice(x, reader, axes, 1.0, 0.0)
    node = view.value(x, reader) if isinstance(x, fx.Node) else None
    if not most or node is None or not view.is_tensor(stored(node)):
        return None
    call, tensor = view.call(node), view.is_tensor(node)
    found = _chosen(view, node, call, axes, numbers, most - 1) if tensor else None
    return found or (_constant(view, node, reader, axes) if numbers else None)


def _chosen(
    view: GraphView, node: fx.Node, call: Call, axes: Sequence[Axis], numbers: bool, most: int
) -> Choice | None:
    for one in _by_booleans(view, node, call):
        a, b = view.const(one.x, node), view.const(one.other, node)
        if a is None or b is None:
            return None
        a, b = (rounded(c, view.dtype(node)) for c in ((b, a) if one.negate else (a, b)))
        return Choice(one.keep, node, axes, a, b)
    if call.name == "triu" and (fill := view.const(call["input"], node)) is not None:
        return Choice(node, node, axes, fill, 0.0)  # not boolean, but non-zero where it drops keys
    x, scale, term = call.get("input"), 1.0, 0.0
    if (by := constant_factor(view, node)) is not None:
        x, scale = by
    elif ways := sums(view, node):
        (x, scale), (number, factor) = ways[view.const(ways[0][1][0], node) is None]
        if (c := view.const(number, node)) is None:
            return None
        term = c * factor
    elif call.name in VIEWS and axes and view.is_tensor(x):
        moved = if_matched(above, view, node, call, axes)
        if moved is None:
            return None
        axes = moved
    elif call.name not in SAME_VALUES:
        return None
    if call.name not in VIEWS and axes and view.is_tensor(x):  # x may be broadcast here
        axes = last_axes(view.shape(x), axes)
    inner = choice(view, x, node, axes, numbers, most) if math.isfinite(scale) else None
    if inner is None:
        return None
    on, off = (rounded(c * scale + term, view.dtype(node)) for c in (inner.on, inner.off))
    return inner._replace(on=on, off=off)


def _constant(
    view: GraphView, node: fx.Node, reader: fx.Node, axes: Sequence[Axis]
) -> Choice | None:
    """A constant tensor with equal non-zero entries, as a choice; None for other tensors."""
    value = _computed(view, node, reader)
    others = None if value is None else value[value != 0]
    if others is None or not others.numel() or not (others == others[0]).all():
        return None
    return Choice(node, reader, axes, float(others[0]), 0.0)


def masked(view: GraphView, node: fx.Node, call: Call) -> Iterator[tuple[Selection, fx.Node]]:
    """The ways to read a call as values where a boolean keeps them and other values elsewhere, each with the reader of
    the boolean: selections, and products with a tensor of zeros and ones."""
    yield from ((one, node) for one in _by_booleans(view, node, call))
    for x, other in call.both_ways if call.name == "mul" else ():
        found = choice(view, other, node)
        if found is not None and found.is_binary:
            yield Selection(x, found.mask, 0.0, negate=found.on == 0), found.reader


def _by_booleans(view: GraphView, node: fx.Node, call: Call) -> list[Selection]:
    ways = selections(view, call) if view.is_tensor(node) else []
    return [s for s in ways if view.is_tensor(s.keep) and view.dtype(s.keep) == torch.bool]


def mixed(
    view: GraphView, node: fx.Node, kept: fx.Node, dropped: fx.Node
) -> tuple[fx.Node, fx.Node, float] | None:
    """(scores, mask, fill) of scores * mask + fill * (1 - mask), as in GPT, given the two terms that a node adds."""
    call = view.call(kept)
    rest = choice(view, dropped, node, numbers=True) if call.name == "mul" else None
    for x, m in call.both_ways if rest is not None else ():
        keep = choice(view, m, kept, numbers=True)
        if rest is None or keep is None or not keep.is_binary:
            continue
        zero, fill = (rest.on, rest.off) if keep.on == 1 else (rest.off, rest.on)
        if zero == 0 and view.same_read(keep.mask, keep.reader, rest.mask, rest.reader):
            return x, m, fill
    return None


def _computed(view: GraphView, node: Any, reader: fx.Node) -> torch.Tensor | None:
    """The value of a constant tensor that `reader` reads, if it is small enough to compute here."""
    seen = view.value(node, reader) if view.is_tensor(node) else None
    return None if seen is None else _evaluated(view, seen)


@remembered
def _evaluated(view: GraphView, node: fx.Node) -> torch.Tensor | None:
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
