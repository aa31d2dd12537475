"""Provable properties of an operand, and the nodes that belong to a match."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import compat
from .fakes import bounds, fake, same_size, same_sizes, static_size
from .indices import Taken, only_slices, taken
from .names import Call
from .no_match import NoMatch, once
from .search import reached
from .shapes import order_of
from .view import CONSTANT_LIKE, GraphView
from .vocabulary import COMPARISONS, NEGATIONS, REGROUPS, REORDERS, SAME_VALUES, SPREADS, VIEWS

_OF_A_PARAMETER = VIEWS | SAME_VALUES | {"mul"}


def is_parameter(view: GraphView, node: fx.Node) -> bool:
    """Whether a tensor is a module's parameter (or a view or cast of one) rather than an activation."""
    original, _ = view.behind(node, _OF_A_PARAMETER)
    if not isinstance(original, fx.Node) or original.op != "placeholder":
        return isinstance(original, fx.Node) and original.op == "get_attr"
    return compat.marked_as_parameter(fake(original)) or "parameters" in original.name


def made_of_parameters(view: GraphView, node: fx.Node) -> bool:
    """Whether a tensor is computed from parameters alone."""
    return node in _made_of_parameters(view)


@once
def _made_of_parameters(view: GraphView) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in view.graph.nodes:
        inputs = node.all_input_nodes
        if found.issuperset(inputs) if inputs else is_parameter(view, node):
            found.add(node)
    return found


_NOT_NEGATIVE = frozenset(
    "relu sigmoid exp softplus softmax square abs norm vector_norm linalg_norm".split()
)


def not_negative(view: GraphView, x: fx.Node, reader: fx.Node) -> bool:
    """Whether a tensor is a mask (bool, or cast from one) or the result of a function that is never negative."""
    original, passed = view.behind(view.value(x, reader), VIEWS | SAME_VALUES)
    values = [n for n in (*passed, original) if view.is_tensor(n)]
    masks = any(view.dtype(n) == torch.bool for n in values)
    return masks or (original in values and view.name_of(original) in _NOT_NEGATIVE)


def rounds(dtype: torch.dtype, computed: torch.dtype) -> bool:
    """Whether a cast of a value `computed` in one dtype to `dtype` loses precision or range."""
    to, of = torch.finfo(dtype), torch.finfo(computed)
    return to.eps > of.eps or to.max < of.max


def check_cast(view: GraphView, node: fx.Node, what: str, *computed: torch.dtype) -> None:
    """Raises NoMatch where a cast changes values, which are `computed` in some dtypes, or moves them elsewhere."""
    x = view.call(node)["input"]
    if not view.is_tensor(x):
        raise NoMatch(f"{what} are no tensor", node)
    dtype = view.dtype(node)
    if not dtype.is_floating_point:
        raise NoMatch(f"{what} become {dtype}", node)
    if fake(node).device != fake(x).device:
        raise NoMatch(f"{what} move to another device", node)
    if any(rounds(dtype, one) for one in computed):
        raise NoMatch(f"{what} are rounded to {dtype}", node)


def drowns(number: float, dtype: torch.dtype) -> bool:
    """Whether a sum with a number rounds the other operand, as `x + 12582912 - 12582912` does to whole numbers."""
    return dtype.is_floating_point and abs(number) * torch.finfo(dtype).eps > 0.1


def extreme(number: float) -> bool:
    """Whether a product with a number may overflow or underflow although the product with all numbers of the program
    does not, as in `x * 1e30 * 1e30 * 1e-60`."""
    return number != 0 and not 2.0**-64 <= abs(number) <= 2.0**64


ELEMENTWISE = (
    COMPARISONS
    | NEGATIONS
    | SAME_VALUES
    | frozenset(
        "add sub rsub mul div div_floor div_trunc neg eq ne and_ or_ xor where relu clamp maximum minimum log exp abs "
        "sigmoid masked_fill".split()
    )
)

REPEATS = SPREADS | {"repeat", "tile", "repeat_interleave"}


def uniform(view: GraphView, x: Any, from_end: int, reader: fx.Node) -> bool:
    """Whether a tensor is provably constant along an axis (counted from the end), by expansion or by computation."""
    made = functools.cache(lambda at: _made_uniform(view, *at))
    asked = reached([(x, from_end, reader)], lambda at: made(at) or ())
    return all(made(at) is not None for at in asked)


def _made_uniform(
    view: GraphView, x: Any, from_end: int, reader: fx.Node
) -> list[tuple[Any, int, fx.Node]] | None:
    """Return the operands that must be uniform for `x` to be uniform, each with its axis, counted from the end, and its
    reader; None where `x` may not be uniform."""
    if not view.is_tensor(x):
        return []
    axis = len(view.shape(x)) - from_end
    if axis < 0 or same_size(view.shape(x)[axis], 1):
        return []
    x = view.value(x, reader)
    call = view.call(x)
    if not call or call.inplace:
        return None
    if view.const(x) is not None:
        return []
    if call.name in REPEATS and (call.name != "repeat_interleave" or call.get("dim") is not None):
        return [(call["input"], from_end, x)]
    if (above := _axis_above(view, x, call, axis)) is not None:
        return [(call["input"], len(view.shape(call["input"])) - above, x)]
    if call.name in ELEMENTWISE:
        return [
            (a, from_end, x)
            for k, a in call.args.items()
            if isinstance(a, fx.Node) and not (call.name == "cast" and k != "input")
        ] or None
    return None


def _axis_above(view: GraphView, x: fx.Node, call: Call, axis: int) -> int | None:
    """Return the axis of a view's input that becomes `axis` of its result. None for calls other than reordering axes,
    adding axes of size 1, and slicing."""
    if (order := order_of(call, len(view.shape(x)))) is not None:
        return order[axis]
    part = taken(view, call)
    if (
        part is None
        or part.passed
        or not all(i is None or isinstance(i, slice) for i in part.items)
    ):
        return None
    return part.origin[axis]


def only_along(view: GraphView, t: fx.Node, shape: Sequence[Any], axis: int) -> bool:
    """Whether a tensor that broadcasts to a shape has the full size along one axis, and size 1 along the others."""
    sizes = view.shape(t)
    at = axis - (len(shape) - len(sizes))
    wanted = [shape[axis] if d == at else 1 for d in range(len(sizes))]
    return at >= 0 and same_sizes(sizes, wanted)


_MOVES = SAME_VALUES | REORDERS | REGROUPS
# Dtypes that hold every position exactly. In 16-bit floats positions from 257 or 2,049 on are rounded; 8 bits wrap.
_EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)


class Progression(NamedTuple):
    """The values start, start + step, start + 2 step, ... along one axis, constant along all others.

    axis: counted from the end; None where the tensor has a single number.
    """

    axis: int | None
    start: Any
    step: Any


def progression(view: GraphView, x: Any, reader: fx.Node) -> Progression | None:
    """Return the progression that `reader` provably sees in a tensor, else None. It may be an arange that is reshaped,
    sliced, multiplied by integers, and shifted by integers."""
    if not view.is_tensor(x) or view.value(x, reader) is not x:
        return None
    result = view.shape(x)
    x, _ = view.behind(x, SPREADS | {"repeat"})
    shape = view.shape(x)
    wide = _wide(shape)
    if len(wide) > 1 or any(not same_size(result[a - len(shape)], shape[a]) for a in wide):
        return None
    axis = len(shape) - wide[0] if wide else None
    start, step, skipped = 0, 1, 0
    while (call := view.call(x)) and not call.inplace and view.dtype(x) in _EXACT:
        if call.name == "arange":
            first, by = (0, 1) if call.get("end") is None else (call["start"], call.get("step", 1))
            first, by = integer(view, first, x), integer(view, by, x)
            if first is None or by is None:
                return None
            return Progression(axis, start + step * (first + by * skipped), step * by)
        inner, other = call.get("input"), call.get("other")
        if call.name in ("add", "mul") and not view.is_tensor(inner):
            inner, other = other, inner
        if not view.is_tensor(inner) or view.value(inner, x) is not inner:
            return None
        part = taken(view, call)
        if part is None and not _alike(view.shape(inner), view.shape(x)):
            return None
        if call.name in ("add", "sub", "mul"):
            number = integer(view, other, x)
            if number is None or call.get("alpha", 1) != 1:
                return None
            if call.name == "mul":
                step = step * number
            else:
                start = start + step * (number if call.name == "add" else -number)
        elif part is not None:
            more = _skipped(view, part)
            if more is None:
                return None
            skipped = skipped + more
        elif call.name not in _MOVES:
            return None
        x = inner
    return None


def _wide(shape: Sequence[Any]) -> list[int]:
    return [a for a, size in enumerate(shape) if not same_size(size, 1)]


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal up to axes of size 1, with at most one axis of another size."""
    of_a, of_b = ([s[i] for i in _wide(s)] for s in (a, b))
    return len(of_a) < 2 and same_sizes(of_a, of_b)


def _skipped(view: GraphView, part: Taken) -> Any:
    """Return the number of entries before a slice of step 1 of the only axis with several entries; None for other
    parts."""
    wide = _wide(view.shape(part.x))
    if len(wide) > 1 or not only_slices(tuple(part.items)):
        return None
    own = [i for i in part.items if i is not None]
    item = own[wide[0]] if wide else slice(None)
    if not isinstance(item, slice) or item.step not in (None, 1):
        return None
    first = integer(view, item.start or 0, part.x)
    known = isinstance(first, int) or (first is not None and bounds(first)[0] >= 0)
    return first if known and not (isinstance(first, int) and first < 0) else None


def integer(view: GraphView, x: Any, reader: fx.Node) -> Any:
    """Return the integer, perhaps a SymInt, that an argument is; else None."""
    if isinstance(x, fx.Node) and not view.is_tensor(x):
        x = fake(x)
    if isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
        known = static_size(x)
        return x if known is None else known
    number = view.const(x, reader)
    return int(number) if number is not None and number.is_integer() else None


def counting(view: GraphView, x: Any, reader: fx.Node) -> int | None:
    """Return the axis, counted from the end, along which a tensor is provably 0, 1, 2, ..., if it is constant along the
    others; else None."""
    found = progression(view, x, reader)
    return None if found is None or found[1:] != (0, 1) else found.axis


def matched_nodes(view: GraphView, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the nodes in graph order, and with them nodes that read only their shape or dtype for their use alone."""
    taken = set(nodes)
    queue = [*taken]
    while queue:
        for user in queue.pop().users:
            serves = view.name_of(user) in CONSTANT_LIKE and user.users and user not in taken
            if serves and taken.issuperset(user.users):
                taken.add(user)
                queue += [user, *(n for n in user.all_input_nodes if n in taken)]
    return view.in_order(taken)
