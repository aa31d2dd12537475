"""Why a graph does not match."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from torch import fx

from ..pattern import Miss
from .view import GraphView, label


class NoMatch(Exception):
    """The walk cannot go on: `reason` in the user's terms, `node` the line to blame."""

    def __init__(self, reason: str, node: fx.Node | None = None):
        super().__init__(reason)
        self.reason, self.node = reason, node

    def miss(self, anchor: fx.Node) -> Miss:
        """The near miss that it is; blames the anchor where no other line is to blame."""
        return Miss(self.reason, self.node or anchor)


def changed(
    view: GraphView, node: fx.Node, reader: fx.Node, what: str = "", it: str = "it"
) -> NoMatch:
    """Why what `reader` sees of a node, called `what`, is the value of none: who writes to it, and how."""
    writer, target = view.effects.last_write(node, reader)
    how = f"by {label(writer)}" if target is node else f"through a view of {it}"
    return NoMatch(f"{what or label(node) + ' is'} changed in place {how}", writer)


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
N = TypeVar("N", bound=fx.Node | None)


def if_matched(read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """What a function gives; None where it raises NoMatch."""
    try:
        return read(*args, **kwargs)
    except NoMatch:
        return None


def matches(read: Callable[[T], R], ways: Iterable[T]) -> Iterator[R]:
    """What `read` gives for those of several ways for which it does not raise NoMatch.

    Raises the first reason where it does for all of them; one about real work beats "an input of the graph".
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
    """The first of these."""
    return next(matches(read, ways))


def remembered(find: Callable[[GraphView, N], R]) -> Callable[[GraphView, N], R]:
    """A question about a node of a view that is answered once, be it by NoMatch: patterns ask it of the same nodes."""

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
    """The same of a question about the whole graph."""
    ask = remembered(lambda view, _: find(view))
    return functools.wraps(find)(lambda view: ask(view, None))
