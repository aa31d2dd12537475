"""The base of patterns: `_match` raises NoMatch where a graph nearly matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..pattern import Example, Miss
from .checks import without_outside_readers
from .no_match import NoMatch
from .view import GraphView, Unknown, label


class Recogniser:
    """Everything that a pattern needs, except its names and `_match`."""

    examples: Sequence[Example] = ()
    near_misses: Sequence[Example] = ()

    def match(self, node: fx.Node, view: GraphView) -> Any:
        """Return the match that ends in `node`, a near miss, or None."""
        try:
            return self._match(node, view)
        except Unknown:
            return None
        except NoMatch as decline:
            return decline.miss(node)

    def _match(self, node: fx.Node, view: GraphView) -> Any:
        raise NotImplementedError

    def resolve(self, matches: Sequence[Any], view: GraphView) -> tuple[list[Any], list[Miss]]:
        """Return the matches whose nodes are not read elsewhere, and misses for the rest. Matches may share nodes."""
        return without_outside_readers(matches, view, self.called)

    def called(self, match: Any, node: fx.Node) -> str:
        """Return the words, in a miss, for the result of a matched node that is read elsewhere."""
        return f"the result of {label(node)} is"
