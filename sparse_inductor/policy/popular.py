"""Popular neurons: neurons active in most rows, which an operator computes for all rows instead of gathering them.

The cost of a block is a share: the share of elements that, gathered one by one, would take equally long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# The largest number of neurons among which popular ones are found: a single program loops over all of them.
_MOST_COUNTED = 1 << 15
# Elements of 16 bits in the largest load.
ALIGNED = 8
STEP = 128
"""The number of popular neurons is a multiple of this, the size of a tile of a matrix product."""


class Apart(NamedTuple):
    """When an operator with popular neurons is faster, and what these neurons cost, as shares.

    below: the cost below which the operator is faster. each: the cost of one popular neuron, computed for every row,
    relative to gathering it for every row. once: the fixed cost of having any popular neurons.
    """

    below: float
    each: float
    once: float


def may_take_popular(dtype: torch.dtype, neurons: int, inputs: int, stats: bool) -> bool:
    """Whether a Hopper GPU can compute popular neurons of such a block by matrix products over all tokens."""
    multiples = not (neurons % ALIGNED or inputs % ALIGNED)
    return dtype.itemsize == 2 and multiples and not stats and neurons <= _MOST_COUNTED


def cheapest(active: torch.Tensor, rows: int, apart: Apart) -> torch.Tensor:
    """Return the popular neurons with which the block costs least; none if N is below 2 * STEP.

    active: [2, N], for two samples of `rows` rows each, the number of rows in which each neuron was active. The first
    sample ranks the neurons, the second estimates the cost: in the ranking sample, the most active neurons appear more
    active than they are.
    """
    first, second = (active.double() / rows).unbind()
    order = first.argsort(descending=True)
    numbers = torch.arange(STEP, len(order) // 2 + 1, STEP, device=active.device)
    if not len(numbers):
        return order[:0]
    left = second.sum() - second[order].cumsum(0)[numbers - 1]
    return order[: int(numbers[(left + apart.each * numbers).argmin()])]


def cost(active: torch.Tensor, rows: int, apart: Apart | None, popular: torch.Tensor) -> float:
    """Return the block's cost with these popular neurons; without any, the active share.

    active: [N], counted in a sample of `rows` rows that did not rank the neurons.
    """
    frequencies = active.double() / rows
    gathered = float(frequencies.sum() - frequencies[popular].sum())
    if apart is not None and len(popular):
        return (gathered + apart.each * len(popular)) / len(active) + apart.once
    return gathered / len(active)
