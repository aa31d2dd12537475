"""Why a graph does not match, and the base of patterns that say so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import fx

from ..pattern import Example, Miss
from .view import GraphView, Unknown


class NoMatch(Exception):
    """The walk cannot go on: `reason` in the user's terms, `node` the line to blame."""

    def __init__(self, reason: str, node: fx.Node | None = None):
        super().__init__(reason)
        self.reason, self.node = reason, node

    def miss(self, anchor: fx.Node) -> Miss:
        """The near miss that it is; blames the anchor where no other line is to blame."""
        return Miss(self.reason, self.node or anchor)


R = TypeVar("R")


def remembered(find: Callable[[GraphView, fx.Node], R]) -> Callable[[GraphView, fx.Node], R]:
    """A question about a node of a view that is answered once, be it by NoMatch: patterns ask it of the same nodes."""

    @functools.wraps(find)
    def ask(view: GraphView, node: fx.Node) -> R:
        known = view.remembered.setdefault(find, {})
        if node not in known:
            try:
                known[node] = find(view, node)
            except NoMatch as reason:
                known[node] = reason
        found = known[node]
        if isinstance(found, NoMatch):
            raise found.with_traceback(None)
        answer: R = found
        return answer

    return ask


class Recogniser:
    """Base of a pattern: `_match` raises NoMatch where a graph nearly matches."""

    examples: Sequence[Example] = ()
    near_misses: Sequence[Example] = ()

    def match(self, node: fx.Node, view: GraphView) -> Any:
        """The match that ends in `node`, a near miss, or None."""
        try:
            return self._match(node, view)
        except Unknown:
            return None
        except NoMatch as decline:
            return decline.miss(node)

    def _match(self, node: fx.Node, view: GraphView) -> Any:
        raise NotImplementedError
