"""Running a case with only the feed-forward pattern on, and asking the report about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import sparse_inductor
from support import Compiled, Outcome

PATTERN = "relu_ffn"


@contextlib.contextmanager
def only_relu_ffn() -> Iterator[Any]:
    """Nothing compiled before, the one pattern on, an empty report."""
    torch._dynamo.reset()
    sparse_inductor.enable(only=[PATTERN])
    report = sparse_inductor.report()
    report.clear()
    try:
        yield report
    finally:
        sparse_inductor.disable()
        torch._dynamo.reset()


def rewrites(report: Any) -> list[Any]:
    return [r for r in report.rewrites if r.pattern == PATTERN]


def near_misses(report: Any) -> list[Any]:
    return [m for m in report.near_misses if m.pattern == PATTERN]


def assert_recognised(case: Any, outcome: Outcome, report: Any, hidden_numel: int) -> None:
    """The report, and for a rewrite the graph, are what the case expects."""
    found, near = rewrites(report), near_misses(report)
    if case.expect == "rewrite":
        said = "; ".join(m.reason for m in near) or "nothing"
        assert len(found) >= case.rewrites, (
            f"{len(found)} of {case.rewrites} rewritten, report says: {said}"
        )
        if isinstance(outcome.compiled, Compiled):
            assert outcome.compiled.calls(PATTERN) >= case.rewrites, "the op is not in the graph"
            left = outcome.compiled.matmuls(hidden_numel)
            assert not left, f"hidden activations are still computed: {left}"
    elif case.expect in ("no_rewrite", "out_of_graph"):
        assert not found, f"rewritten although: {case.why}"
    if case.explained and not found:
        assert any(m.reason.strip() for m in near), "a near miss of the family without a reason"
