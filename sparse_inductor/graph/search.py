"""Searches of graphs and expressions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import fx

At = TypeVar("At")  # a node, or a tuple with one


def reached(
    start: Iterable[At], step: Callable[[At], Iterable[At]], most: float = math.inf
) -> Iterator[At]:
    """Yield the nodes reachable from `start`, breadth first, each once. `step` returns the successors of a node."""
    queue, seen = deque(start), set[At]()
    while queue and len(seen) < most:
        node = queue.popleft()
        if node not in seen:
            seen.add(node)
            yield node
            queue += step(node)


def taken_apart(whole: At, apart: Callable[[At], Sequence[At]], most: int = 32) -> list[At]:
    """Return the parts of `whole` in order. `apart` returns the parts of one of them, or none.

    Stops once there are more than `most` parts, because nested expressions such as `k & k` double their number at each
    level.
    """
    found: list[At] = []
    left = [whole]
    while left and len(found) + len(left) <= most:
        one = left.pop(0)
        parts = apart(one)
        found += [] if parts else [one]
        left[:0] = parts
    return found + left


def made_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the node and all nodes that it is computed from."""
    return reached([node], lambda n: n.all_input_nodes)
