"""Maxima over an axis, however they are written: amax, max, a top-1, a pooling over everything."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from .graph import GraphView, same_size

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
    span: int = 1  # neighbouring axes reduced together, `dim` being the first


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
            return Reduction(source, dim % ndim, keepdim, minimum=call.name == "amin", span=span)
        case "max_dim" | "min_dim" if isinstance(dim, int):
            return Reduction(source, dim % ndim, keepdim, 0, 1, call.name == "min_dim")
        case "aminmax" if isinstance(dim, int) and not any(
            u.args[1] == 0 and u.users for u in node.users
        ):
            return Reduction(source, dim % ndim, keepdim, 1)
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


def _only(x: Any) -> Any:
    return x[0] if isinstance(x, (tuple, list)) and len(x) == 1 else x
