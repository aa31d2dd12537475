"""Placement in one allocation of tensors that are not all used at the same time."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def placed(
    sizes: Sequence[int],
    residues: Sequence[int],
    lifetimes: Sequence[tuple[int, int]],
    alignment: int,
) -> tuple[list[int], int]:
    """Return (offset of each tensor, total size in bytes).

    residues: required offsets modulo `alignment`. lifetimes: first and last step that uses each tensor. Tensors are
    placed from the largest to the smallest, each at the lowest offset that is free during its lifetime.
    """
    offsets = [0] * len(sizes)
    taken: list[tuple[int, int, int]] = []  # (begin, end, tensor), sorted
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = residues[i]
        first, last = lifetimes[i]
        for begin, end, other in taken:
            before, after = lifetimes[other]
            if after < first or last < before:
                continue
            if at + sizes[i] <= begin:
                break
            at = max(at, end + (residues[i] - end) % alignment)
        offsets[i] = at
        bisect.insort(taken, (at, at + sizes[i], i))
    return offsets, max((end for _, end, _ in taken), default=0)
