"""How the products for Hopper GPUs (`hopper_projection`, `splade_head.hopper`) take the steps over their features."""

from __future__ import annotations

# An accumulator that is carried over a loop edge is waited for, so steps are unrolled: all of them where they are few
# (the 12 of the SPLADE head's D = 768 take the compiler 6 s), else so many at a time. At K = 2 048 that costs a feed-
# forward block's gates a quarter of a per cent; all 32 steps took the compiler seven times as long.
MOST, AT_A_TIME = 16, 8


def unrolled(steps: int) -> tuple[int, int]:
    """(steps to take, steps of them that are unrolled): at least `steps`; those past the last multiply zeros."""
    if steps <= MOST:
        return steps, steps
    rounds = -(-steps // AT_A_TIME)
    each = -(-steps // rounds)
    return rounds * each, each
