"""Tensor parallelism in a graph: the calls that torch's hooks insert after a linear.

`ColwiseParallel` turns a linear into `to_local(redistribute(linear(x, weight, bias), placements))` on DTensors. If the
placements are already as wanted, `redistribute` does nothing. If nothing is communicated, the local part of the linear
is the linear of the local parts, and the operator works on this process's columns. `RowwiseParallel` begins with
`linear(from_local(x), weight, bias)`, a sum over the processes: the operator computes the summand of this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .. import compat
from .fakes import fake
from .view import GraphView


def is_distributed(t: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


def local_part(x: torch.Tensor, sums: tuple[bool, ...]) -> torch.Tensor:
    """Return this process's part of a DTensor. Over the mesh dimensions in `sums`, its gradient is one summand."""
    from torch.distributed.tensor import Partial

    placements = [Partial() if s else p for s, p in zip(sums, x.placements)]
    return x.to_local(grad_placements=placements)


def summand(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the DTensor, on the mesh of `like`, that is the sum of x over the processes."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = like.device_mesh
    return DTensor.from_local(x, mesh, [Partial()] * mesh.ndim, run_check=False)


def shared_bias(bias: torch.Tensor) -> torch.Tensor:
    """Return the summand of each process for a replicated bias: the bias divided by the number of processes."""
    from torch.distributed.tensor import Partial

    mesh = bias.device_mesh
    return bias.to_local(grad_placements=[Partial()] * mesh.ndim) / mesh.size()


def redistributed(node: fx.Node, source: fx.Node) -> bool:
    """Whether `redistribute` changes the placements and so may communicate."""
    before, after = _placements(source), _placements(node)
    return before is None or before != after


def settled(view: GraphView, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Return the DTensor whose part `to_local` takes, and the redistributions after it, which do nothing; None if one
    does something, or if the call specifies the placements of the gradient."""
    if compat.hidden_arguments(node).get("grad_placements") is not None:
        return None
    call = view.call(node)
    if call.get("grad_placements") is not None:
        return None
    x, between = call["input"], []
    while (inner := view.call(x)).name == "redistribute":
        if redistributed(x, inner["input"]):
            return None
        between.append(x)
        x = inner["input"]
    return x, tuple(between)


def spread_alike(
    out: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> tuple[tuple[bool, ...], tuple[bool, ...]] | None:
    """Return None if `out = linear(x, weight, bias)` needs communication. Otherwise return, for each mesh dimension,
    whether the gradient of x is a summand, and whether the gradients of weight and bias are."""
    placements = [_placements(t) for t in (out, x, weight)]
    of_bias = None if bias is None else _placements(bias)
    if any(p is None for p in placements) or (bias is not None and of_bias is None):
        return None
    columns = fake(out).dim() - 1
    of_x, of_weight = [], []
    for at, (o, i, w) in enumerate(zip(*placements)):
        b = w if of_bias is None else of_bias[at]
        by_column = o.is_shard(columns) and i.is_replicate() and w.is_shard(0) and b.is_shard(0)
        by_row = o.is_shard() and not o.is_shard(columns) and i == o
        if not by_column and not ((by_row or o == i) and w.is_replicate() and b.is_replicate()):
            return None
        if o.is_partial():
            return None
        of_x.append(by_column)
        of_weight.append(by_row)
    return tuple(of_x), tuple(of_weight)


def spread_by_row(
    view: GraphView, out: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> fx.Node | None:
    """Return the local tensor from which `from_local` creates x, if `out = linear(x, weight, bias)` sums over a sharded
    axis: each process has columns of the weight and computes one summand (`RowwiseParallel`). Else None."""
    call = view.call(x)
    if call.name != "from_local" or call.get("shape") is not None:
        return None
    last = fake(x).dim() - 1
    placements = [_placements(t) for t in (out, x, weight)]
    if any(p is None for p in placements):
        return None
    for o, i, w in zip(*placements):
        if not (o.is_partial() and i.is_shard(last) and w.is_shard(1)):
            return None
    of_bias = () if bias is None else _placements(bias)
    if of_bias is None or not all(p.is_replicate() for p in of_bias):
        return None
    return call["input"]


def _placements(node: fx.Node) -> tuple[Any, ...] | None:
    return getattr(fake(node), "placements", None)
