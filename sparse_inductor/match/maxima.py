"""Maxima over an axis, however they are written: amax, max, a top-1, a pooling over everything."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from .graph import GraphView, same_size
from .names import Call

__all__ = ["Reduction", "maximum"]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A maximum (or minimum) over one axis.

    values, positions: which of the node's results they are; None where the node is the values, or has no positions.
    """

    source: fx.Node
    dim: int
    keepdim: bool = False
    values: int | None = None
    positions: int | None = None
    minimum: bool = False
    even: bool = False  # those that share the maximum share its gradient; else it is the first's
    span: int = 1  # neighbouring axes reduced together, `dim` being the first
    within: tuple[fx.Node, ...] = ()  # what else it is made of


def maximum(view: GraphView, node: fx.Node) -> Reduction | None:
    """The maximum (or minimum) that a node is; None where it is none, or one of windows."""
    call = view.call(node)
    if call is None or not view.is_tensor(call.get("input")):
        return None
    source = call["input"]
    shape = view.shape(source)
    ndim, dim, keepdim = len(shape), call.get("dim"), bool(call.get("keepdim", False))
    span = 1
    if isinstance(dim, (tuple, list)):
        dims = sorted(d % ndim for d in dim)
        together = (
            dims
            and dims == list(range(dims[0], dims[0] + len(dims)))
            and (len(dims) == 1 or not keepdim)
        )
        dim, span = (dims[0], len(dims)) if together else (None, 1)
    match call.name:
        case "amax" | "amin" if isinstance(dim, int):
            minimum = call.name == "amin"
            return Reduction(source, dim % ndim, keepdim, minimum=minimum, even=True, span=span)
        case "max_dim" | "min_dim" if isinstance(dim, int):
            return Reduction(source, dim % ndim, keepdim, 0, 1, call.name == "min_dim")
        case "aminmax" if isinstance(dim, int) and not any(
            u.args[1] == 0 and u.users for u in node.users
        ):
            return Reduction(source, dim % ndim, keepdim, 1, even=True)
        case "gather" | "take_along_dim" if isinstance(dim, int):
            within = _where_largest(view, node, source, call["index"], dim % ndim)
            return None if within is None else Reduction(source, dim % ndim, True, within=within)
        case "topk" if call["k"] == 1:
            return Reduction(
                source, call.get("dim", -1) % ndim, True, 0, 1, not call.get("largest", True)
            )
        case "adaptive_max_pool1d" if _only(call["output_size"]) == 1 and not call.get(
            "return_indices"
        ):
            return Reduction(source, ndim - 1, True)
        case "max_pool1d" if same_size(_only(call["kernel_size"]), shape[-1]) and not call.get(
            "return_indices"
        ):
            padded = _only(call.get("padding", 0)) != 0 or _only(call.get("dilation", 1)) != 1
            return None if padded else Reduction(source, ndim - 1, True)
    return None


def _where_largest(
    view: GraphView, node: fx.Node, source: fx.Node, index: Any, dim: int
) -> tuple[fx.Node, ...] | None:
    """What makes an index that says where along `dim` the largest values of `source` are; None where none does."""
    ndim, nodes, keepdim = len(view.shape(source)), [], True
    call = view.call(index)
    if call is not None and _puts_axis(call, ndim) == dim:
        nodes.append(index)
        keepdim, index = False, call["input"]
        call = view.call(index)
    if call is None or call.name != "argmax" or not isinstance(call.get("dim"), int):
        return None
    if call["dim"] % ndim != dim or bool(call.get("keepdim", False)) != keepdim:
        return None
    same = view.value(call["input"], index) is view.value(source, node)
    return (*nodes, index) if same else None


def _puts_axis(call: Call, ndim: int) -> int | None:
    """Where a view of `ndim` axes has one that its input lacks."""
    if call.name == "unsqueeze":
        return call["dim"] % ndim
    index = call.get("index")
    if call.name != "getitem" or not isinstance(index, tuple) or index.count(None) != 1:
        return None
    return index.index(None) if all(i in (None, slice(None)) for i in index) else None


def _only(x: Any) -> Any:
    return x[0] if isinstance(x, (tuple, list)) and len(x) == 1 else x
