"""Tensor parallelism in a graph: what torch's hooks put between a linear and what follows it.

`ColwiseParallel` makes of a linear   to_local(redistribute(linear(x, weight, bias), placements))   on DTensors. The
redistribution is none where the placements are already as wanted, and the local part of such a linear is the linear
of the local parts where nothing is communicated: the operator then works on this process's columns. `RowwiseParallel`
begins with   linear(from_local(x), weight, bias)   whose result is a sum over the processes: the operator makes the
summand of this one.
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
    """This process's part of a DTensor; over the dimensions of the mesh in `sums` its gradient is one summand."""
    from torch.distributed.tensor import Partial

    placements = [Partial() if s else p for s, p in zip(sums, x.placements)]
    return x.to_local(grad_placements=placements)


def summand(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The DTensor, on the mesh of `like`, of which each process has one summand."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = like.device_mesh
    return DTensor.from_local(x, mesh, [Partial()] * mesh.ndim, run_check=False)


def shared_bias(bias: torch.Tensor) -> torch.Tensor:
    """A replicated bias as a summand of each process."""
    from torch.distributed.tensor import Partial

    mesh = bias.device_mesh
    return bias.to_local(grad_placements=[Partial()] * mesh.ndim) / mesh.size()


def redistributed(node: fx.Node, source: fx.Node) -> bool:
    """Whether `redistribute` moves anything: not where the placements are already as wanted."""
    before, after = _placements(source), _placements(node)
    return before is None or before != after


def settled(view: GraphView, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The DTensor that `to_local` takes its part of, before redistributions that move nothing, with those; None where
    its gradient is placed in a way of its own."""
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
    """Whether `out = linear(x, weight, bias)` needs no communication; over which dimensions of the mesh the gradients
    of x, and those of weight and bias, are summands."""
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
    """The local tensor that `from_local` makes x of, where `out = linear(x, weight, bias)` sums over what is spread:
    each process has columns of the weight and makes a summand (`RowwiseParallel`)."""
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
