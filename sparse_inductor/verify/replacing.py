"""The step that `verify` adds to the pass: around each `match.replace()`, to have the replacement checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import fx

from ..pattern import Match
from ..reporting.findings import Check, Rewrite
from ..reporting.records import Report
from . import session
from .cut import CannotCut, Watch


@contextlib.contextmanager
def checked_at_first_run(
    graph: fx.Graph, match: Match, record: Rewrite, report: Report, unchecked: list[Check]
) -> Iterator[None]:
    """Have the replacement of a match, which the block inserts, checked when it first runs.

    The result is added to `report`; if it cannot be checked, the reason is appended to `unchecked`.
    """

    def leave(why: object) -> None:
        unchecked.append(check._replace(verdict="unchecked", detail=str(why)))

    check = Check(record.pattern, record.location, source=record.source)
    if apart := getattr(match, "apart", ""):
        leave(apart)
        yield
        return
    watch = None
    try:
        watch = Watch(graph, match.matched_nodes)
    except CannotCut as error:
        leave(error)
    yield
    if watch is not None:
        try:
            watch.finish()
        except CannotCut as error:
            watch.cancel()
            leave(error)
        else:
            session.guard(watch, check, report, getattr(match, "top", False))
