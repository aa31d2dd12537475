"""An explanation as one self-contained HTML page with its styles, drawings and the user's source."""

from __future__ import annotations

import dataclasses
import linecache
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..graph_run import Applied
from ..notices import bytes_text
from ..reporting.findings import NearMiss, Rewrite, tensor_text
from ..reporting.graphs import GraphNode
from ..reporting.records import found_of
from ..reporting.source import Source
from .drawing import draw, fold, subgraph

if TYPE_CHECKING:
    from .explain import ExplainedGraph, Explanation

TEMPLATE = Path(__file__).with_name("page.html.jinja")
AROUND = 2  # lines of source before and after a marked one
APART = 8  # gaps of at least this many lines between the shown ones are left out
WHOLE = 40  # graphs with at most this many operations are drawn without folding
DEPTH = 6  # components of a module's path to group by: "model.bert.encoder.layer.0.attention"
FOLDS = 80  # boxes of a folded graph; if there are more, modules are combined


def render(explanation: Explanation, title: str) -> str:
    """Return the page as text."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    report = explanation.report
    saved = sum(r.bytes_saved or 0 for r in report.rewrites)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        explanation=explanation,
        report=report,
        saved=bytes_text(saved) if saved else "",
        operations=sum(len(g.nodes_before) for g in explanation.graphs),
        rewrites=list(_rewrites(explanation)),
        misses=[
            {"miss": miss, "excerpts": _miss_excerpts(miss, explanation)}
            for miss in dict.fromkeys(report.near_misses)
        ],
        wrong=[c for c in report.checks if c.verdict == "differs"],
        graphs=[_graph(at, graph, explanation) for at, graph in enumerate(explanation.graphs)],
        versions=f"sparse_inductor {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        slowest=sorted(report.pattern_ms.items(), key=lambda item: -item[1]),
    )


# --- Rewrites -------------------------------------------------------------------------------------


def _rewrites(explanation: Explanation) -> Iterator[dict[str, Any]]:
    """Yield the contents of each rewrite's card; identical rewrites of the same line share one card."""
    cards: dict[Rewrite, dict[str, Any]] = {}
    for graph in explanation.graphs:
        for applied in graph.applied:
            rewrite = applied.rewrite
            if rewrite in cards:
                cards[rewrite]["times"] += 1
            else:
                cards[rewrite] = {"times": 1, **_card(applied, graph)}
    for rewrite, card in cards.items():
        checks, densities = found_of(explanation.report, rewrite)
        yield {
            **card,
            "checks": list(dict.fromkeys(checks)),
            "wrong": any(c.verdict == "differs" for c in checks),
            "densities": list(dict.fromkeys(densities)),
        }


def _card(applied: Applied, graph: ExplainedGraph) -> dict[str, Any]:
    rewrite = applied.rewrite
    before = subgraph(graph.nodes_before, applied.replaced, "replaced")
    after = subgraph(graph.nodes_after, applied.inserted, "inserted")
    replaced = set(applied.replaced)
    sources = [n.source for n in graph.nodes_before if n.name in replaced]
    return {
        "rewrite": rewrite,
        "inputs": [tensor_text(shape, dtype) for shape, dtype in rewrite.inputs],
        "saved": bytes_text(rewrite.bytes_saved) if rewrite.bytes_saved else "",
        "before": draw(before, f"{len(applied.replaced)} operations that were replaced"),
        "after": draw(after, f"what stands there now: {rewrite.op}") if applied.inserted else "",
        "excerpts": _excerpts(sources, "replaced"),
    }


# --- Source ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of an excerpt; number 0 stands for lines that are left out."""

    number: int
    text: str
    mark: str = ""
    note: str = ""


def _miss_excerpts(miss: NearMiss, explanation: Explanation) -> list[tuple[str, list[Line]]]:
    for graph in explanation.graphs:
        for node in graph.nodes_before:
            if node.source.location == miss.location and node.source.path:
                return _excerpts([node.source], "near", miss.reason)
    return []


def _excerpts(sources: Iterable[Source], mark: str, note: str = "") -> list[tuple[str, list[Line]]]:
    """Return (path, lines) of each file with the lines of `sources` marked; `note` belongs to the last marked line."""
    marked: dict[str, set[int]] = {}
    for source in sources:
        number = source.location.rpartition(":")[2]
        if source.path and number.isdigit():
            marked.setdefault(source.path, set()).add(int(number))
    return [
        (path, _lines(path, numbers, mark, note))
        for path, numbers in marked.items()
        if linecache.getlines(path)
    ]


def _lines(path: str, numbers: set[int], mark: str, note: str) -> list[Line]:
    text = linecache.getlines(path)
    shown: list[Line] = []
    last = 0
    for number in sorted(numbers):
        if number > len(text):
            continue
        first = max(1, number - AROUND)
        if last and first > last + APART:
            shown.append(Line(0, "⋯"))
        else:
            first = last + 1 if last else first
        for at in range(max(first, last + 1), number + 1):
            here = at in numbers
            said = note if here and at == max(numbers) else ""
            shown.append(Line(at, text[at - 1].rstrip("\n"), mark if here else "", said))
        last = number
    shown += [
        Line(at, text[at - 1].rstrip("\n"))
        for at in range(last + 1, min(last + AROUND, len(text)) + 1)
    ]
    while shown and not shown[-1].text.strip():
        shown.pop()
    while shown and not shown[0].text.strip():
        shown.pop(0)
    indent = min(
        (len(x.text) - len(x.text.lstrip()) for x in shown if x.number and x.text.strip()),
        default=0,
    )
    return [dataclasses.replace(x, text=x.text[indent:] if x.number else x.text) for x in shown]


# --- Whole graphs ---------------------------------------------------------------------------------


def _graph(at: int, graph: ExplainedGraph, explanation: Explanation) -> dict[str, Any]:
    marked = {name: "inserted" for applied in graph.applied for name in applied.inserted}
    places = {miss.location for miss in explanation.report.near_misses}
    for node in graph.nodes_after:
        if node.kind == "call" and node.source.location in places and node.name not in marked:
            marked[node.name] = "near"
    calls = [n for n in graph.nodes_after if n.kind == "call"]
    if len(calls) <= WHOLE:
        marked = {n.name: marked.get(n.name, "call") for n in calls}
    for depth in range(DEPTH, -1, -1):
        boxes, folds = fold(graph.nodes_after, marked, _grouping(depth), f"#graph-{at}-fold-")
        if len(boxes) <= FOLDS + len(marked) or not depth:
            break
    changed = [(_kind(line), line) for line in graph.short_diff.splitlines()[2:]]
    return {
        "operations": sum(n.kind == "call" for n in graph.nodes_before),
        "after": len(calls),
        "drawing": draw(boxes, f"graph {at} after rewriting") if boxes else "",
        "folds": folds,
        "diff": changed,
    }


def _grouping(depth: int) -> Any:
    def group(node: GraphNode) -> str:
        return ".".join(node.module.split(".")[:depth])

    return group


def _kind(line: str) -> str:
    return {"+": "added", "-": "removed", "@": "place"}.get(line[:1], "")
