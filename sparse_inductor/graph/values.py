"""What is provable about an operand, and which nodes belong to a match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .. import compat
from .indices import only_slices
from .view import CONSTANT_LIKE, GraphView, fake, same_size
from .vocabulary import COMPARISONS, COPIES, NEGATIONS, SPREADS, VIEWS

__all__ = [
    "counting",
    "drowns",
    "is_parameter",
    "matched_nodes",
    "not_negative",
    "rounds",
    "uniform",
]

_OF_A_PARAMETER = VIEWS | COPIES | {"cast", "detach", "mul"}


def is_parameter(view: GraphView, node: fx.Node) -> bool:
    """Whether a tensor is a module's parameter (or a view or cast of one) rather than an activation."""
    original, _ = view.behind(node, _OF_A_PARAMETER)
    if not isinstance(original, fx.Node) or original.op != "placeholder":
        return isinstance(original, fx.Node) and original.op == "get_attr"
    return compat.marked_as_parameter(fake(original)) or "parameters" in original.name


_NOT_NEGATIVE = frozenset("relu sigmoid exp softplus softmax square abs norm vector_norm".split())


def not_negative(view: GraphView, x: fx.Node) -> bool:
    """Whether a tensor is a mask (bool, or cast from one) or the result of a function that is never negative."""
    original, passed = view.behind(x, VIEWS | COPIES | {"cast"})
    masks = (view.is_tensor(n) and view.dtype(n) == torch.bool for n in (*passed, original))
    return any(masks) or view.name_of(original) in _NOT_NEGATIVE


def rounds(dtype: torch.dtype, computed: torch.dtype) -> bool:
    """Whether a cast to a precision takes something from what was computed in another one."""
    to, of = torch.finfo(dtype), torch.finfo(computed)
    return to.eps > of.eps or to.max < of.max


def drowns(number: float, dtype: torch.dtype) -> bool:
    """Whether a sum with a number rounds the other operand, as `x + 12582912 - 12582912` does to whole numbers."""
    return dtype.is_floating_point and abs(number) * torch.finfo(dtype).eps > 0.1


_ELEMENTWISE = (
    COMPARISONS
    | NEGATIONS
    | COPIES
    | frozenset(
        "cast add sub rsub mul div neg eq ne and_ or_ xor where detach relu clamp maximum minimum log exp abs sigmoid "
        "masked_fill".split()
    )
)


def uniform(view: GraphView, x: Any, from_end: int, reader: fx.Node) -> bool:
    """Whether a tensor is provably the same all along an axis (counted from the end), expanded or computed so."""
    if not view.is_tensor(x):
        return True
    shape = view.shape(x)
    if len(shape) < from_end or same_size(shape[-from_end], 1):
        return True
    x = view.value(x, reader)
    call = view.call(x)
    if call is None or call.inplace:
        return False
    if view.const(x, reader) is not None:
        return True
    if call.name in ("expand", "expand_as", "repeat", "tile"):
        inner = view.shape(call["input"])
        return (
            len(inner) < from_end
            or same_size(inner[-from_end], 1)
            or (
                same_size(inner[-from_end], shape[-from_end])
                and uniform(view, call["input"], from_end, x)
            )
        )
    if call.name in _ELEMENTWISE:
        tensors = [
            a
            for k, a in call.args.items()
            if isinstance(a, fx.Node) and not (call.name == "cast" and k != "input")
        ]
        return bool(tensors) and all(uniform(view, a, from_end, x) for a in tensors)
    return False


_PUTS_ONES = COPIES | {"view", "unsqueeze", "getitem", "select", "squeeze", "cast"}


def counting(view: GraphView, x: Any, reader: fx.Node) -> int | None:
    """The axis, counted from the end, along which a tensor is provably 0, 1, 2, ..., and the same along all others."""
    if not view.is_tensor(x) or view.value(x, reader) is not x:
        return None
    result = view.shape(x)
    x, _ = view.behind(x, SPREADS | {"repeat"})
    shape, call = view.shape(x), view.call(x)
    wide = [a for a in range(len(shape)) if not same_size(shape[a], 1)]
    if len(wide) != 1 or not same_size(result[wide[0] - len(shape)], shape[wide[0]]):
        return None
    while call is not None and call.name in _PUTS_ONES and not call.inplace:
        inner = call["input"]
        if not view.is_tensor(inner) or sum(not same_size(s, 1) for s in view.shape(inner)) != 1:
            return None
        if not any(same_size(shape[wide[0]], s) for s in view.shape(inner)):
            return None  # a part of it
        if call.name == "getitem" and not only_slices(call["index"]):
            return None  # in another order
        x, call = inner, view.call(inner)
    from_zero = len(x.args) == 1 or (len(x.args) == 2 and x.args[0] == 0)
    return len(shape) - wide[0] if x.target is torch.arange and from_zero else None


def matched_nodes(view: GraphView, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes in graph order, with those that only read the shape or dtype of one of them and serve no one else."""
    taken = set(nodes)
    grown = True
    while grown:
        grown = False
        for node in list(taken):
            for user in node.users:
                if (
                    user not in taken
                    and user.users
                    and view.name_of(user) in CONSTANT_LIKE
                    and all(u in taken for u in user.users)
                ):
                    taken.add(user)
                    grown = True
    return tuple(sorted(taken, key=view.order.__getitem__))
