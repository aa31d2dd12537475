"""Batch normalisation with statistics from elsewhere: a factor and a term of every entry of axis 1."""

from __future__ import annotations

import dataclasses
import operator

import torch
import torch.nn.functional as F
from torch import fx

from .emit import Emitter
from .names import Call
from .no_match import NoMatch
from .scalars import number
from .view import GraphView


@dataclasses.dataclass(frozen=True)
class Normalised:
    """What batch normalisation with statistics from elsewhere multiplies axis 1 by, or (`shift`) adds to it."""

    mean: fx.Node
    variance: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    shift: bool

    def nodes(self) -> list[fx.Node]:
        found = (self.mean, self.variance, self.weight, self.bias)
        return [n for n in found if n is not None]

    def emit(self, e: Emitter) -> fx.Node:
        """[V]"""
        factor = e.call(torch.rsqrt, e.call(operator.add, self.variance, self.eps))
        if self.weight is not None:
            factor = e.call(operator.mul, factor, self.weight)
        if not self.shift:
            return factor
        shift = e.call(operator.mul, e.call(operator.neg, self.mean), factor)
        return shift if self.bias is None else e.call(operator.add, shift, self.bias)


def normalised(view: GraphView, node: fx.Node, call: Call) -> tuple[Normalised, Normalised]:
    """(what the values are multiplied by, what is added then). Raises NoMatch where it depends on the values."""
    if node.target is not F.batch_norm:  # torch's own takes its arguments in another order
        raise NoMatch("batch_norm that is not torch.nn.functional's", node)
    mean, variance = call["running_mean"], call["running_var"]
    if call.get("training", False) or mean is None or variance is None:
        raise NoMatch("batch_norm with the statistics of the batch itself", node)
    eps = number(view, node, call, "eps", 1e-5)
    of = mean, variance, call.get("weight"), call.get("bias"), eps
    return Normalised(*of, shift=False), Normalised(*of, shift=True)
