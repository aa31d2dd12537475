"""The order in which programs compute the tiles of a product, for Triton and Gluon kernels."""

from __future__ import annotations

import triton
import triton.language as tl

# Row tiles per group: a group's programs iterate over the same column tiles, so that both operands stay in L2 (4 MiB of
# rows with K = 2 048).
GROUP = 8


@triton.jit
def tile_at(t, tiles_m, tiles_n, GROUP: tl.constexpr = GROUP):
    """Return (row tile, column tile) of the t-th tile."""
    group = t // (GROUP * tiles_n)
    r = t % (GROUP * tiles_n)
    size = tl.minimum(GROUP, tiles_m - group * GROUP)
    return group * GROUP + r % size, r // size
