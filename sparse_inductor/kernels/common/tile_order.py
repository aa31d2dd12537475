"""The order in which programs take the tiles of a product, in Triton and in Gluon alike."""

from __future__ import annotations

import triton
import triton.language as tl

# Row tiles that share their column tiles in turn, so that both operands stay in L2: 4 MiB of rows of K = 2 048, 6.5 of
# 208 tokens each.
GROUP = 8


@triton.jit
def tile_at(t, tiles_m, tiles_n, GROUP: tl.constexpr = GROUP):
    """(row tile, column tile)."""
    group = t // (GROUP * tiles_n)
    r = t % (GROUP * tiles_n)
    size = tl.minimum(GROUP, tiles_m - group * GROUP)
    return group * GROUP + r % size, r // size
