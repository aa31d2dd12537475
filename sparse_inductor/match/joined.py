"""Branches whose linear maps may be sums: one input for all of them, and the weight of each for it.

f(W x + V t) * g(U x)  is of  [x t], with the weights [W V] and [U 0]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import fx

from .branches import same_summand
from .chain import Chain
from .declines import Decline
from .emit import Emitter
from .gemm import Linear
from .graph import GraphView, fake, static_size

__all__ = ["Joined", "check_joined", "joined"]

# Weights are joined for so many tokens of inference (1.33x where few neurons are active, 0.91x where half of them are;
# about 0.8x at a quarter of them), or where they are so small that only launches count.
_TOKENS, _BYTES = 8192, 1 << 20


@dataclasses.dataclass(frozen=True)
class Joined:
    """inputs: of every input, which summand of each chain's linear map takes it; None where none does."""

    chains: tuple[Chain, ...]
    inputs: tuple[tuple[int | None, ...], ...]

    def emit(
        self, e: Emitter, dtype: torch.dtype
    ) -> tuple[fx.Node, list[tuple[fx.Node, fx.Node | None]]]:
        """The input in the shape of the frame, and of every chain the weight [V, D] and the bias."""
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
            weight = columns[0] if len(columns) == 1 else e.call(torch.cat, columns, 1)
            pairs.append((weight, None if bias is None else e.cast(bias, dtype)))
        x = tokens[0] if len(tokens) == 1 else e.call(torch.cat, tokens, axis)
        return x, pairs

    def _input(self, e: Emitter, at: Sequence[int | None]) -> fx.Node:
        chain, i = next((c, i) for c, i in zip(self.chains, at) if i is not None)
        return chain.stand_in(e, part=chain.linear.summands[i])

    @property
    def parts(self) -> list[Linear]:
        """What is copied to stand beside others: nothing where there is one input."""
        several = len(self.inputs) > 1
        return [p for c in self.chains for p in c.linear.summands] if several else []


def joined(view: GraphView, gate: Chain, up: Chain | None, anchor: fx.Node) -> Joined | None:
    """The two branches, `up` maybe missing, as maps of one input; None where they have no input in common."""
    of_gate = range(len(gate.linear.summands))
    if up is None:
        return Joined((gate,), tuple((i,) for i in of_gate))
    left = list(range(len(up.linear.summands)))
    inputs: list[tuple[int | None, int | None]] = []
    for i in of_gate:
        j = next((j for j in left if same_summand(view, (gate, i), (up, j), anchor)), None)
        inputs.append((i, j))
        left = [k for k in left if k != j]
    if all(None in at for at in inputs):
        return None
    return Joined((gate, up), (*inputs, *((None, j) for j in left)))


def check_joined(
    view: GraphView, groups: Sequence[Sequence[Linear]], down: Linear, node: fx.Node
) -> None:
    """Raises Decline where weights of one group would have to be joined at every call of the block that ends in `node`,
    and that would take too long."""
    groups = [g for g in groups if len(g) > 1]
    weights = [p.weight_source for g in groups for p in g]
    sizes = [static_size(n) for w in weights for n in fake(w).shape]
    if None in sizes:
        raise Decline("weights of a size that is not known would be joined", node)
    size = sum(fake(w).numel() for w in weights) * fake(node).dtype.itemsize
    if size <= _BYTES:
        return
    what = f"{size >> 20} MiB of weights would be joined at every call"
    if any(map(view.learns, weights)):
        # What stays as it is gets a gradient, too: 1.34x where few neurons are active, 0.75x where half of them are.
        raise Decline(f"a sum of linear maps that learn: {what}, and get gradients", node)
    tokens = [n for d, n in enumerate(view.shape(down.source)) if d != down.d_dim]
    known = all(isinstance(n, int) for n in tokens)
    if not known or math.prod(tokens) < _TOKENS:
        few = f"{math.prod(tokens)}" if known else "a number of"
        raise Decline(f"{what}, too many for {few} tokens: merge the adapters", node)
