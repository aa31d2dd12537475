"""Why a graph does not match."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from torch import fx

from ..pattern import Miss
from .view import GraphView, label


class NoMatch(Exception):
    """A graph does not match. `reason` is in the user's terms; `node` gives the source line to report."""

    def __init__(self, reason: str, node: fx.Node | None = None):
        super().__init__(reason)
        self.reason, self.node = reason, node

    def miss(self, anchor: fx.Node) -> Miss:
        """Return it as a near miss, at the anchor where no other node is given."""
        return Miss(self.reason, self.node or anchor)


def changed(
    view: GraphView, node: fx.Node, reader: fx.Node, what: str = "", it: str = "it"
) -> NoMatch:
    """Return the reason why no single node has the value that `reader` sees of `node`: a write in place.

    what: the name of the value in the message.
    """
    writer, target = view.effects.last_write(node, reader)
    how = f"by {label(writer)}" if target is node else f"through a view of {it}"
    return NoMatch(f"{what or label(node) + ' is'} changed in place {how}", writer)


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
N = TypeVar("N", bound=fx.Node | None)


def if_matched(read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Return the result of a function, or None where it raises NoMatch."""
    try:
        return read(*args, **kwargs)
    except NoMatch:
        return None


def matches(read: Callable[[T], R], ways: Iterable[T]) -> Iterator[R]:
    """Yield the results of `read` for those of several ways for which it does not raise NoMatch.

    If it raises for all of them, raises the first reason, but prefers any other to "an input of the graph".
    """
    first: NoMatch | None = None
    matched = False
    for way in ways:
        try:
            found = read(way)
        except NoMatch as reason:
            if first is None or "input of the graph" in first.reason:
                first = reason
        else:
            matched = True
            yield found
    if first is not None and not matched:
        raise first


def first_match(read: Callable[[T], R], ways: Iterable[T]) -> R:
    """Return the first result of `matches`."""
    return next(matches(read, ways))


def remembered(find: Callable[[GraphView, N], R]) -> Callable[[GraphView, N], R]:
    """Cache a function of a view and a node, NoMatch included. Several patterns ask about the same nodes."""

    @functools.wraps(find)
    def ask(view: GraphView, node: N) -> R:
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


def once(find: Callable[[GraphView], R]) -> Callable[[GraphView], R]:
    """Cache a function of a view alone."""
    ask = remembered(lambda view, _: find(view))
    return functools.wraps(find)(lambda view: ask(view, None))
