"""Readers of an activation that want a statistic of it alone: the sum or mean of |a|, of [a != 0] or of [a == 0]."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from .declines import Decline
from .emit import Emitter
from .graph import GraphView, fake, label, same_size
from .names import Call
from .vocabulary import COPIES

__all__ = ["Statistic", "statistics"]


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A reduction over (at least) the neurons of |a|, or of [a != 0].

    node: the reduction. source: the activation it is of. norm: 1 for |a|, 0 for [a != 0], -1 for [a == 0]. dims: the
    axes reduced. detached: whether a gradient is cut on the way.
    """

    node: fx.Node
    source: fx.Node
    nodes: tuple[fx.Node, ...]
    norm: int
    dims: tuple[int, ...]
    keepdim: bool
    mean: bool
    detached: bool

    def emit(self, e: Emitter, per_token: fx.Node, axis: int, neurons: Any) -> fx.Node:
        """The user's result from one number a token, whose axes are the activation's without `axis`."""
        result = fake(self.node)
        t = e.method("detach", per_token) if self.detached else per_token
        if self.norm == -1:
            t = e.call(torch.sub, neurons, t)
        if self.mean:
            t = e.call(torch.div, t, neurons)
        rest = tuple(d - (d > axis) for d in self.dims if d != axis)
        if rest:
            t = e.method("mean" if self.mean else "sum", t, rest)
        if self.keepdim:
            for d in sorted(self.dims):
                t = e.method("unsqueeze", t, d)
        return e.cast(t, result.dtype)


def statistics(
    view: GraphView, source: fx.Node, reader: fx.Node, positive: bool, axis: int
) -> list[Statistic]:
    """The statistics that a reader of the activation `source` leads to, `axis` being the neurons'.

    positive: the activation is nowhere negative. Raises Decline where the reader wants more than that.
    """
    return _Reader(view, source, positive, axis).follow(source, reader, (), None, False)


class _Reader:
    def __init__(self, view: GraphView, source: fx.Node, positive: bool, axis: int):
        self.view, self.source, self.positive, self.axis = view, source, positive, axis

    def follow(
        self,
        x: fx.Node,
        node: fx.Node,
        passed: tuple[fx.Node, ...],
        norm: int | None,
        detached: bool,
    ) -> list[Statistic]:
        """norm is None while the value is still the activation."""
        call = self.view.call(node)
        if call is None or call.inplace or self.view.value(x, node) is not x:
            raise self._decline(node)
        name = call.name
        if name in ("sum", "mean"):
            return [self._reduction(node, call, passed, norm, name == "mean", detached)]
        if norm is None and name == "count_nonzero":
            return [self._reduction(node, call, passed, 0, False, True)]
        if norm is None and name in ("norm", "vector_norm") and call.get("p") in (1, 1.0):
            return [self._reduction(node, call, passed, 1, False, detached)]
        if norm is None and name == "l1_loss" and self._loss_against_zeros(x, node, call):
            mean = call.get("reduction", "mean") == "mean"
            return [self._reduction(node, call, passed, 1, mean, detached)]
        if name == "abs":
            norm = 1 if norm is None else norm
        elif name in ("ne", "gt", "eq", "le") and norm is None:
            if self.view.const(call["other"], node) != 0 or call["input"] is not x:
                raise self._decline(node)
            if name in ("gt", "le") and not self.positive:
                raise self._decline(node)
            norm, detached = (0 if name in ("ne", "gt") else -1), True
        elif name == "bool" and norm is None:
            norm, detached = 0, True
        elif name == "detach":
            detached = True
        elif name == "cast" and call["input"] is x:
            dtype = self.view.dtype(node)
            if norm is None and dtype == torch.bool:
                norm, detached = 0, True
            elif norm in (None, 1) and not dtype.is_floating_point:
                raise self._decline(node)
        elif name not in COPIES:
            raise self._decline(node)
        found: list[Statistic] = []
        for reader in self.view.readers(node):
            found += self.follow(node, reader, (*passed, node), norm, detached)
        return found

    def _loss_against_zeros(self, x: fx.Node, node: fx.Node, call: Call) -> bool:
        """Whether l1_loss is the mean or sum of |x|."""
        a, b = call["input"], call["target"]
        zeros = b if a is x else a
        usual = all(call.get(old) is None for old in ("size_average", "reduce", "weight"))
        whole = self.view.is_tensor(zeros) and self.view.same_shape(zeros, x)
        reduced = call.get("reduction", "mean") in ("mean", "sum")
        return usual and reduced and whole and self.view.const(zeros, node) == 0

    def _reduction(self, node, call, passed, norm, mean, detached) -> Statistic:
        if norm is None:
            if not self.positive:
                raise self._decline(node)
            norm = 1
        ndim = len(self.view.shape(self.source))
        dim = call.get("dim")
        dims = tuple(range(ndim)) if dim is None or dim == () else dim
        dims = tuple(d % ndim for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))
        if self.axis not in dims:
            raise Decline("a statistic of every neuron over the tokens needs the activations", node)
        size = self.view.shape(self.source)[self.axis]
        if not isinstance(size, int) or same_size(size, 0):
            raise self._decline(node)
        detached = detached or not self.view.requires_grad(
            node
        )  # under no_grad, or of what is frozen
        return Statistic(
            node, self.source, passed, norm, dims, bool(call.get("keepdim")), mean, detached
        )

    def _decline(self, node: fx.Node) -> Decline:
        if node.op == "output":
            return Decline("the activations are also returned", self.source)
        return Decline(f"the activations are also read by {label(node)}", node)
