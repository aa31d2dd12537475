"""Sums of linear maps as one map: their inputs and their weights are concatenated along D."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from ...graph.emit import Emitter
from ...graph.fakes import fake
from ...graph.gemm import Linear
from .chain import Chain


class Joined(NamedTuple):
    """The linear maps of some chains as maps of one concatenated input.

    inputs: for every input, the index of the summand of each chain's linear map that takes it, or None.
    """

    chains: tuple[Chain, ...]
    inputs: tuple[tuple[int | None, ...], ...]

    def emit(
        self, e: Emitter, dtype: torch.dtype
    ) -> tuple[fx.Node, list[tuple[fx.Node, fx.Node | None]]]:
        """The input in the shape of the frame, and the weight [V, D] and bias of every chain. The bias is not cast."""
        tokens = [e.cast(self._input(e, at), dtype) for at in self.inputs]
        axis = self.chains[0].v_dim
        sizes = [fake(t).shape[axis] for t in tokens]
        pairs = []
        for which, chain in enumerate(self.chains):
            weights, bias = chain.weights_and_bias(e)
            rows, columns = fake(weights[0]).shape[0], []
            for at, size in zip(self.inputs, sizes):
                i = at[which]
                w = e.method("new_zeros", weights[0], (rows, size)) if i is None else weights[i]
                columns.append(e.cast(w, dtype))
            pairs.append((_side_by_side(e, columns, 1), bias))
        return _side_by_side(e, tokens, axis), pairs

    def _input(self, e: Emitter, at: Sequence[int | None]) -> fx.Node:
        chain, i = next((c, i) for c, i in zip(self.chains, at) if i is not None)
        return chain.linear_input(e, part=chain.linear.summands[i])

    @property
    def parts(self) -> list[Linear]:
        """The maps that are copied by the concatenation: none if there is one input."""
        several = len(self.inputs) > 1
        return [p for c in self.chains for p in c.linear.summands] if several else []


def _side_by_side(e: Emitter, tensors: Sequence[fx.Node], axis: int) -> fx.Node:
    if len(tensors) == 1:
        return tensors[0]
    return e.call(torch.cat, [e.dense_gradient(t) for t in tensors], axis)


def joined_summands(chain: Chain) -> Joined:
    """The summands of one chain's linear map, each with its own input."""
    return Joined((chain,), tuple((i,) for i in range(len(chain.linear.summands))))
