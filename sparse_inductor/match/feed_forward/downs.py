"""The down projections of a block as one operand of the operator, and the split of its result."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from ...graph.emit import Emitter
from ...graph.fakes import fake, memory_order
from ...graph.gemm import Linear
from ..chains.terms import combined, widened
from .block import Reading


class Downs(NamedTuple):
    """The block's own projection, and others that read its activations, such as the first one of an adapter."""

    reading: Reading
    others: Sequence[Linear]

    def weight(self, e: Emitter, dtype: torch.dtype) -> fx.Node:
        """All weights [D, N], times the factors of the neurons (as in (IA)^3), and 0 for masked neurons."""
        weight = self._stacked(e, [e.cast(d.weight(e), dtype) for d in self._all])
        for chain, term in self.reading.factors:
            t = chain.vector(e, term, fake(weight).shape[1])
            weight = combined(e, weight, term, t if term.fn == "where" else widened(e, t))
        return e.cast(weight, dtype)

    def bias(self, e: Emitter, dtype: torch.dtype) -> fx.Node | None:
        """The bias [D] of the block's own projection, and zeros for the others."""
        bias = self.reading.down.emit_bias(e)
        if bias is None:
            return None
        zeros = [e.method("new_zeros", bias, (d.outputs,), dtype=dtype) for d in self.others]
        biases = [e.cast(bias, dtype), *zeros]
        return e.call(torch.cat, biases) if self.others else biases[0]

    def apart(self, e: Emitter, y: fx.Node) -> list[fx.Node]:
        """The results of all projections, that of the block's own projection first."""
        if not self.others:
            return [y]
        axis, first, parts = self.reading.down.v_dim, 0, []
        for down in self._all:
            part = e.method("narrow", y, axis, first, down.outputs)
            if memory_order(fake(part)) is not None:  # one row, which `laid_out` would not copy
                part = e.method("clone", part, memory_format=torch.contiguous_format)
            parts.append(part)
            first += down.outputs
        return parts

    def scaled(self, e: Emitter, y: fx.Node, order: list[int], bias: fx.Node | None) -> fx.Node:
        """The operator's result without bias, times the postponed per-token factors, plus the bias:
        (p * h) W^T = p * (h W^T)."""
        down, tokens = self.reading.down, self.reading.tokens
        if not tokens:
            return y
        dtype = fake(y).dtype
        for chain, term in tokens:
            t = chain.token_operand(e, term)
            if down.order is not None:
                t = e.permuted(t, down.order)
            y = combined(e, y, term, e.permuted(t, order))
        y = e.cast(y, dtype)
        return y if bias is None else e.call(operator.add, y, bias)

    @property
    def _all(self) -> tuple[Linear, ...]:
        return (self.reading.down, *self.others)

    def _stacked(self, e: Emitter, weights: list[fx.Node]) -> fx.Node:
        """Weights concatenated along their outputs, in the memory layout of the first one."""
        weight = weights[0]
        if len(weights) == 1:
            return weight
        if fake(weight).stride(0) != 1:
            return e.call(torch.cat, weights)
        columns = [e.method("t", e.dense_gradient(w)) for w in weights]
        return e.method("t", e.call(torch.cat, columns, 1))
