"""Loop unrolling of the Hopper products (`relu_ffn.hopper`, `splade_head.hopper`) over their features."""

from __future__ import annotations

# A loop edge waits for the accumulator that it carries, so steps are unrolled: up to MOST steps all (the 12 steps of
# the SPLADE head's D = 768 compile in 6 s), more of them in rounds of at most AT_A_TIME. At K = 2 048 rounds make the
# gate projection 0.25 % slower; unrolling all 32 steps compiles seven times as long.
MOST, AT_A_TIME = 16, 8


def unrolled(steps: int) -> tuple[int, int]:
    """(number of steps, at least `steps`, steps per round). Steps behind the last one multiply zeros."""
    if steps <= MOST:
        return steps, steps
    rounds = -(-steps // AT_A_TIME)
    each = -(-steps // rounds)
    return rounds * each, each
