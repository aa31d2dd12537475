"""Popular neurons: those that an operator takes for all rows, because most rows that it would gather for have them.

What a block costs is told as a share: so many elements, all alike and gathered, would take as long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Neurons up to which the most active ones are told apart: one program counts through all of them.
_MOST_COUNTED = 1 << 15
# Elements of 16 bits in the largest load.
ALIGNED = 8
STEP = 128
"""Popular neurons are a multiple of this: a tile of a matrix product."""


class Apart(NamedTuple):
    """When an operator is faster with popular neurons, and what they cost, as shares.

    below: the cost below which it is. each: a neuron for every row, over a gathered element. once: that there are any.
    """

    below: float
    each: float
    once: float


def may_take_popular(dtype: torch.dtype, neurons: int, inputs: int, stats: bool) -> bool:
    """Whether a Hopper GPU takes popular neurons of such a block by products over all tokens."""
    multiples = not (neurons % ALIGNED or inputs % ALIGNED)
    return dtype.itemsize == 2 and multiples and not stats and neurons <= _MOST_COUNTED


def cheapest(active: torch.Tensor, rows: int, apart: Apart) -> torch.Tensor:
    """The popular neurons with which the block costs least; none where that is the most of them.

    active: [2, N], of two samples of so many rows, in how many each neuron was active. The first sample says which
    neurons are popular, the second what is left: in one sample the most active ones seem more so than they are.
    """
    first, second = (active.double() / rows).unbind()
    order = first.argsort(descending=True)
    numbers = torch.arange(STEP, len(order) // 2 + 1, STEP, device=active.device)
    if not len(numbers):
        return order[:0]
    left = second.sum() - second[order].cumsum(0)[numbers - 1]
    return order[: int(numbers[(left + apart.each * numbers).argmin()])]


def cost(active: torch.Tensor, rows: int, apart: Apart | None, popular: torch.Tensor) -> float:
    """What the block costs with these popular neurons; without any the share that is active.

    active: [N], of a sample of so many rows that says nothing of who is popular.
    """
    frequencies = active.double() / rows
    gathered = float(frequencies.sum() - frequencies[popular].sum())
    if apart is not None and len(popular):
        return (gathered + apart.each * len(popular)) / len(active) + apart.once
    return gathered / len(active)
