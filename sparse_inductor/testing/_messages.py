"""Messages of failing assertions: the nearest miss, the rewrites, and the graph with its changes."""

from __future__ import annotations

from collections.abc import Iterable

from ..explanation.explain import Explanation
from ..pattern import Pattern
from ..reporting.findings import rewrite_text
from ..reporting.records import Report

# The most lines of a graph that are shown. A graph of a test has a few dozen lines, that of a model thousands.
LINES = 120


def failure(headline: str, details: Iterable[str], explanation: Explanation) -> str:
    """Compose the message of a failure: the headline, details, graph breaks and graphs."""
    breaks = (f"graph break at {b.location}: {b.why}" for b in explanation.graph_breaks)
    parts = [headline, *details, *breaks]
    if not explanation.graphs:
        parts.append("torch.compile captured no graph of this function")
    for at, graph in enumerate(explanation.graphs):
        title = "graph" if len(explanation.graphs) == 1 else f"graph {at}"
        parts.append(f"{title}:\n{_cut(map(str, graph.nodes_before))}")
        if graph.short_diff:
            parts.append(f"changed in it:\n{_cut(graph.short_diff.splitlines())}")
    return "\n\n".join(parts)


def nearest(explanation: Explanation, pattern: Pattern) -> str:
    """Describe the near misses of a pattern or, if there are none, the subgraphs for which it searches."""
    misses = [m for m in explanation.report.near_misses if m.pattern == pattern.name]
    if misses:
        lines = [f"nearest miss of {pattern.name}:"]
        for miss in misses:
            lines.append(f"  {miss.location}  {miss.source}".rstrip())
            lines.append(f"      because {miss.reason}")
        return "\n".join(lines)
    anchors = ", ".join(sorted(pattern.anchors))
    return (
        f"nothing here resembles {pattern.name}: no near miss was reported. It looks for a "
        f"subgraph that ends in one of: {anchors}"
    )


def shown_rewrites(source: Explanation | Report, patterns: Iterable[str]) -> str:
    """List the rewrites of the given patterns in the wording of the report."""
    report = source.report if isinstance(source, Explanation) else source
    names = set(patterns)
    found = [r for r in report.rewrites if r.pattern in names]
    return "\n".join(["rewritten:", *(f"  {r.pattern}\n{rewrite_text(r)}" for r in found)])


def _cut(lines: Iterable[str]) -> str:
    listed = list(lines)
    if len(listed) > LINES:
        listed[LINES:] = [f"... {len(listed) - LINES} more lines"]
    return "\n".join(f"  {line}" for line in listed)
