"""Draws graphs as SVG, in layers from inputs to results: boxes with two lines of text, and curves between them.

The layout is simple on purpose: drawings have a few dozen boxes, because all other nodes are folded (`fold`).
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from ..reporting.graphs import GraphNode

CHARACTER = 7.0  # width of the title's characters at 12 px, in the widest of the fonts asked for
SMALL = 6.1  # width of the second line's characters at 10.5 px
HEIGHT, GAP_X, GAP_Y, MARGIN = 38, 14, 26, 6
LONGEST = 30  # characters of a line; the box's tooltip has the whole text
SWEEPS = 8


@dataclasses.dataclass(frozen=True)
class Box:
    """A box of a drawing. `kind` is its style: input, call, output, context, replaced, inserted, near or fold."""

    name: str
    title: str
    detail: str
    inputs: tuple[str, ...]
    kind: str
    tooltip: str = ""
    link: str = ""


def subgraph(
    nodes: Sequence[GraphNode], inside: Sequence[str], kind: str, most: int = 40
) -> list[Box]:
    """Return boxes for the nodes named in `inside`, the nodes that they read, and their readers.

    If there are more than `most` nodes, the middle ones share one box.
    """
    by_name = {n.name: n for n in nodes}
    members = [n for n in nodes if n.name in set(inside)]
    names = {n.name for n in members}
    read = {i for n in members for i in n.inputs if i in by_name} - names
    readers = [n for n in nodes if n.name not in names and names & set(n.inputs)]
    boxes = [
        _box(by_name[i], "input" if by_name[i].kind == "input" else "context")
        for i in by_name
        if i in read
    ]
    boxes += [_box(n, kind) for n in members]
    for reader in readers:
        shown = _box(reader, "output" if reader.kind == "output" else "context")
        inputs = tuple(i for i in reader.inputs if i in names)
        boxes.append(dataclasses.replace(shown, inputs=inputs))
    known = {b.name for b in boxes}
    boxes = [
        dataclasses.replace(
            b, inputs=() if b.name in read else tuple(i for i in b.inputs if i in known)
        )
        for b in boxes
    ]
    middle = members[most // 2 : len(members) - most // 2] if len(members) > most else []
    return merge(boxes, [n.name for n in middle], _counted(middle)) if middle else boxes


def fold(
    nodes: Sequence[GraphNode],
    marked: dict[str, str],
    group_of: Callable[[GraphNode], str],
    link: str,
) -> tuple[list[Box], list[tuple[str, list[GraphNode]]]]:
    """Make boxes of a whole graph without its inputs, folding all nodes that are not in `marked` (name -> kind).

    Consecutive nodes of one group share a fold, so that folding creates no cycles. Returns the boxes, and for each fold
    its title and nodes; a fold's box links to `link` + its number.
    """
    calls = [n for n in nodes if n.kind != "input"]
    runs: list[tuple[str, list[GraphNode]]] = []
    for node in calls:
        group = f"\0{node.name}" if node.name in marked or node.kind == "output" else group_of(node)
        if runs and runs[-1][0] == group:
            runs[-1][1].append(node)
        else:
            runs.append((group, [node]))
    boxes: list[Box] = []
    folds: list[tuple[str, list[GraphNode]]] = []
    owner: dict[str, str] = {}
    for group, members in runs:
        first = members[0]
        if len(members) == 1:
            box = _box(first, marked.get(first.name, first.kind))
        else:
            box = Box(
                f"fold {len(folds)}", group or "outside of modules", _operations(len(members)), (),
                "fold", _counted(members), f"{link}{len(folds)}",
            )  # fmt: skip
            folds.append((group or "outside of modules", members))
        inputs = dict.fromkeys(owner[i] for n in members for i in n.inputs if i in owner)
        owner.update({n.name: box.name for n in members})
        boxes.append(dataclasses.replace(box, inputs=tuple(i for i in inputs if i != box.name)))
    return boxes, folds


def merge(boxes: list[Box], names: Sequence[str], tooltip: str) -> list[Box]:
    """Return the boxes with those in `names`, which are consecutive, merged into one."""
    inside = set(names)
    title = _operations(len(inside))
    found: list[Box] = []
    for box in boxes:
        inputs = tuple(dict.fromkeys("merged" if i in inside else i for i in box.inputs))
        if box.name not in inside:
            found.append(dataclasses.replace(box, inputs=inputs))
            continue
        outer = [i for i in inputs if i != "merged"]
        at = next((k for k, b in enumerate(found) if b.name == "merged"), None)
        if at is None:
            found.append(Box("merged", title, tooltip[:LONGEST], tuple(outer), "fold", tooltip))
        else:
            both = tuple(dict.fromkeys([*found[at].inputs, *outer]))
            found[at] = dataclasses.replace(found[at], inputs=both)
    return found


def _box(node: GraphNode, kind: str) -> Box:
    tooltip = "\n".join(t for t in (str(node), node.source.location, node.source.text) if t)
    return Box(node.name, node.title, node.type, node.inputs, kind, tooltip)


def _counted(nodes: Sequence[GraphNode]) -> str:
    counts = Counter(n.title for n in nodes).most_common()
    return ", ".join(title if times == 1 else f"{times} x {title}" for title, times in counts)


def _operations(number: int) -> str:
    return f"{number} operation{'' if number == 1 else 's'}"


# --- Layout ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Cell:
    """A box, or a bend (no box) of an edge that passes through a layer."""

    box: Box | None
    layer: int
    width: float
    x: float = 0.0
    above: list[_Cell] = dataclasses.field(default_factory=list)
    below: list[_Cell] = dataclasses.field(default_factory=list)


def draw(boxes: Sequence[Box], label: str) -> str:
    """Return the SVG element; `label` describes it for screen readers. Boxes have to come after their inputs."""
    layers, edges = _layers(boxes)
    _order(layers)
    _place(layers)
    left = min(c.x - c.width / 2 for layer in layers for c in layer) - MARGIN
    right = max(c.x + c.width / 2 for layer in layers for c in layer) + MARGIN
    height = len(layers) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    width = right - left
    parts = [
        f'<svg class="graph" role="img" aria-label="{html.escape(label)}" width="{width:.0f}" height="{height}" '
        f'viewBox="{left:.0f} {-MARGIN} {width:.0f} {height}" xmlns="http://www.w3.org/2000/svg">'
    ]
    parts += [_path(edge) for edge in edges]
    parts += [_rectangle(c) for layer in layers for c in layer if c.box is not None]
    return "\n".join([*parts, "</svg>"])


def _layers(boxes: Sequence[Box]) -> tuple[list[list[_Cell]], list[list[_Cell]]]:
    """Return the cells of each layer, and the cells that each edge passes through."""
    layer: dict[str, int] = {}
    for box in boxes:
        layer[box.name] = max((layer[i] + 1 for i in box.inputs), default=0)
    readers: dict[str, list[int]] = {}
    for box in boxes:
        for name in box.inputs:
            readers.setdefault(name, []).append(layer[box.name])
    for box in boxes:  # place an input right above its first reader
        if not box.inputs and box.name in readers:
            layer[box.name] = min(readers[box.name]) - 1
    cells = {b.name: _Cell(b, layer[b.name], _width(b)) for b in boxes}
    layers: list[list[_Cell]] = [[] for _ in range(max(layer.values()) + 1)]
    for cell in cells.values():
        layers[cell.layer].append(cell)
    edges = []
    for box in boxes:
        for name in box.inputs:
            edge = [cells[name]]
            for between in range(layer[name] + 1, layer[box.name]):
                edge.append(_Cell(None, between, 2.0))
                layers[between].append(edge[-1])
            edge.append(cells[box.name])
            for upper, lower in itertools.pairwise(edge):
                upper.below.append(lower)
                lower.above.append(upper)
            edges.append(edge)
    return layers, edges


def _width(box: Box) -> float:
    title, detail = _short(box.title), _short(box.detail)
    return max(len(title) * CHARACTER, len(detail) * SMALL, 28) + 16


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _order(layers: list[list[_Cell]]) -> None:
    """Order the cells of each layer by the mean position of their neighbours, which untangles most edges."""
    for layer in layers:
        _spread(layer)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            middle = {id(c): _middle(c.above if down else c.below, c.x) for c in layer}
            layer.sort(key=lambda c: middle[id(c)])
            _spread(layer)


def _middle(cells: list[_Cell], otherwise: float) -> float:
    return sum(c.x for c in cells) / len(cells) if cells else otherwise


def _spread(layer: list[_Cell]) -> None:
    """Place the cells side by side, centred."""
    total = sum(c.width for c in layer) + GAP_X * (len(layer) - 1)
    x = -total / 2
    for cell in layer:
        cell.x = x + cell.width / 2
        x += cell.width + GAP_X


def _place(layers: list[list[_Cell]]) -> None:
    """Move cells towards their neighbours in other layers, as far as the cells beside them allow."""
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = [_middle(c.above + c.below, c.x) for c in layer]
            # Resolve overlaps once by moving cells to the right and once to the left. The mean of both keeps the
            # distances and favours neither side.
            right, left = list(wanted), list(wanted)
            for at in range(1, len(layer)):
                apart = _apart(layer[at - 1], layer[at])
                right[at] = max(right[at], right[at - 1] + apart)
            for at in range(len(layer) - 2, -1, -1):
                apart = _apart(layer[at], layer[at + 1])
                left[at] = min(left[at], left[at + 1] - apart)
            for cell, one, other in zip(layer, right, left, strict=True):
                cell.x = (one + other) / 2


def _apart(a: _Cell, b: _Cell) -> float:
    return (a.width + b.width) / 2 + GAP_X


# --- SVG ------------------------------------------------------------------------------------------


def _top(cell: _Cell) -> float:
    return cell.layer * (HEIGHT + GAP_Y)


def _path(edge: list[_Cell]) -> str:
    start, *rest = edge
    points = f"M{start.x:.1f},{_top(start) + HEIGHT}"
    x, y = start.x, _top(start) + HEIGHT
    for cell in rest:
        to = _top(cell)
        half = (y + to) / 2
        points += f" C{x:.1f},{half:.1f} {cell.x:.1f},{half:.1f} {cell.x:.1f},{to}"
        x, y = cell.x, to
        if cell.box is None:
            y = to + HEIGHT
            points += f" L{x:.1f},{y}"
    return f'<path class="edge" d="{points}"/>'


def _rectangle(cell: _Cell) -> str:
    box = cell.box
    assert box is not None
    x, y = cell.x - cell.width / 2, _top(cell)
    title, detail = html.escape(_short(box.title)), html.escape(_short(box.detail))
    lines = f'<text class="title" x="{cell.x:.1f}" y="{y + (15 if detail else 23)}">{title}</text>'
    if detail:
        lines += f'<text class="detail" x="{cell.x:.1f}" y="{y + 30}">{detail}</text>'
    drawn = (
        f'<g class="box {box.kind}"><title>{html.escape(box.tooltip or box.title)}</title>'
        f'<rect x="{x:.1f}" y="{y}" width="{cell.width:.1f}" height="{HEIGHT}" rx="6"/>{lines}</g>'
    )
    return f'<a href="{html.escape(box.link)}">{drawn}</a>' if box.link else drawn
