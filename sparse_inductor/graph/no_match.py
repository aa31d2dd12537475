"""Why a graph does not match, and the base of patterns that say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
