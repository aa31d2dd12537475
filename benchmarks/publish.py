"""The results of a family and their files: Markdown, JSON and a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure. Its limits are judged in the run that measures it and are not published. If it could not be measured,
    `value` is None and `note` says why."""

    name: str
    value: float | None
    unit: str = ""
    floor: float | None = None
    goal: float | None = None
    higher_is_better: bool = False
    note: str = ""
    section: str = ""
    """The part of the benchmark that measured it. A run of some parts keeps the earlier results of the other parts."""

    def verdict(self, limit: float | None) -> str:
        """Return "pass" or "FAIL", "?" if there is no value, or "" if there is no limit."""
        if limit is None:
            return ""
        if self.value is None:
            return "?"
        met = self.value >= limit if self.higher_is_better else self.value <= limit
        return "pass" if met else "FAIL"

    @property
    def is_loss(self) -> bool:
        """Whether the figure is a ratio that shows a loss against the program it is compared with."""
        if self.unit != "x" or self.value is None:
            return False
        return self.value < 1 if self.higher_is_better else self.value > 1


@dataclasses.dataclass(frozen=True)
class Sample:
    """One contender at one shape; times in ms, memory in bytes."""

    case: str
    contender: str
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    rounds: int | None = None
    peak_bytes: int | None = None
    scratch_bytes: int | None = None
    note: str = ""
    latency_ms: float | None = None
    section: str = ""


@dataclasses.dataclass(frozen=True)
class Point:
    """One contender at one place of a sweep."""

    axis: str
    at: int
    contender: str
    ms: float | None
    peak_bytes: int | None
    note: str = ""
    section: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of a map: a program under torch.compile, without the plugin ("compile") and with it ("enabled").

    wall, gpu: wall clock and GPU time, compile over enabled; more than 1 is a gain. host: host time, enabled over
    compile.
    """

    map: str
    row: str
    column: str
    wall: float
    gpu: float | None
    host: float | None
    rewritten: bool
    note: str = ""
    section: str = ""


@dataclasses.dataclass
class Results:
    """All results of one run of a family."""

    family: str
    command: str
    machine: dict[str, str]
    text: list[str] = dataclasses.field(default_factory=list)
    rows: list[Row] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    points: list[Point] = dataclasses.field(default_factory=list)
    cells: list[Cell] = dataclasses.field(default_factory=list)
    fixed: dict[str, int] = dataclasses.field(default_factory=dict)
    """The sizes that stay constant while a sweep varies another one."""
    swept: str = "Forward and backward"
    """The kind of call that a sweep measures at each place."""

    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    """The command, date and version with which each part was measured; parts may come from several runs."""

    def keep(self, earlier: Results, but: Collection[str]) -> None:
        """Take over the results of an earlier run, except those of the parts in `but` and those without a part."""

        def kept(section: str) -> bool:
            return bool(section) and section not in but

        self.rows += [row for row in earlier.rows if kept(row.section)]
        self.samples += [sample for sample in earlier.samples if kept(sample.section)]
        self.points += [point for point in earlier.points if kept(point.section)]
        self.cells += [cell for cell in earlier.cells if kept(cell.section)]
        self.fixed = earlier.fixed | self.fixed
        if any(kept(point.section) for point in earlier.points):
            self.swept = earlier.swept
        if kept("measure_limits"):
            self.text = [*earlier.text, *(said for said in self.text if said not in earlier.text)]
        self.sources |= {name: how for name, how in earlier.sources.items() if kept(name)}

    def ran(self, section: str) -> None:
        """Record that this run has measured a part."""
        facts = ", ".join(f"{name} {self.machine.get(name, '?')}" for name in ("date", "torch"))
        self.sources[section] = f"`{self.command}` ({facts})"

    @property
    def slug(self) -> str:
        """The stem of the file names, such as "splade_head-nvidia-h200"."""
        return (
            f"{self.family}-{re.sub(r'[^a-z0-9]+', '-', self.machine['device'].lower()).strip('-')}"
        )

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a JSON file that `write` has written."""
        found = json.loads(path.read_text())
        kinds = {"rows": Row, "samples": Sample, "points": Point, "cells": Cell}
        for name, kind in kinds.items():
            found[name] = [kind(**one) for one in found.get(name, ())]
        return cls(**found)


def write(results: Results, folder: Path) -> list[Path]:
    """Write all files; return their paths. Without matplotlib, a message says so and there is no plot."""
    folder.mkdir(parents=True, exist_ok=True)
    plot = folder / f"{results.slug}.png"
    picture = draw_maps if results.cells else draw
    plotted = bool(results.cells or results.points) and picture(results, plot)
    texts = {
        "md": markdown(results, plot.name if plotted else None),
        "json": json.dumps(dataclasses.asdict(results), indent=1) + "\n",
    }
    paths = []
    for ending, text in texts.items():
        path = folder / f"{results.slug}.{ending}"
        path.write_text(text)
        paths.append(path)
    return [*paths, plot] if plotted else paths


# --- Text -------------------------------------------------------------------------------------------------------------


def rows_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return heading and lines of the table of floors and goals."""
    lines = [["", "value", "floor", "", "goal", "", "remarks"]]
    for r in rows:
        lines.append(
            [r.name, _value(r.value, r.unit, limits=(r.floor, r.goal)),
             _value(r.floor, r.unit, ""), r.verdict(r.floor), _value(r.goal, r.unit, ""), r.verdict(r.goal), r.note]
        )  # fmt: skip
    return lines


def figures_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return heading and lines of the table of figures, without limits."""
    lines = [[r.name, _value(r.value, r.unit, limits=(r.floor, r.goal)), r.note] for r in rows]
    return [["", "value", "remarks"], *lines]


def samples_table(samples: Sequence[Sample]) -> list[list[str]]:
    """Return heading and lines of the side-by-side table; it has a column of latencies if there are any."""
    late = ["latency, ms"] if any(s.latency_ms is not None for s in samples) else []
    memory = ["peak over the inputs", "beyond outputs and gradients"]
    lines = [["case", "contender", "ms (quartiles)", *late, *memory, "remarks"]]
    for s in samples:
        spread = f" ({s.low_ms:.4g} - {s.high_ms:.4g})" if s.low_ms is not None else ""
        times = ["" if s.ms is None else f"{s.ms:.4g}{spread}"]
        if late:
            times.append("" if s.latency_ms is None else f"{s.latency_ms:.4g}")
        memory = [_mib(s.peak_bytes), _mib(s.scratch_bytes)]
        lines.append([s.case, s.contender, *times, *memory, s.note])
    return lines


def points_table(points: Sequence[Point]) -> list[list[str]]:
    """Return heading and lines of the table of sweeps."""
    lines = [["axis", "at", "contender", "ms", "peak over the inputs", "remarks"]]
    for p in points:
        lines.append(
            [
                p.axis,
                str(p.at),
                p.contender,
                "" if p.ms is None else f"{p.ms:.4g}",
                _mib(p.peak_bytes),
                p.note,
            ]
        )
    return lines


def by_map(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return the cells of each map, in order."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.map, []).append(cell)
    return found


def cells_table(cells: Sequence[Cell]) -> list[list[str]]:
    """Return heading and lines of the table of one map."""
    lines = [["", "", "wall clock", "GPU time", "host time", "", "compile / enabled"]]
    for c in cells:
        gpu, host = ("" if r is None else f"{r:.2f}" for r in (c.gpu, c.host))
        done = "rewritten" if c.rewritten else "as written"
        lines.append([c.row, c.column, f"{c.wall:.3f}", gpu, host, done, c.note])
    return lines


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Format a table for a terminal."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines
    )


def markdown(results: Results, plot: str | None) -> str:
    """Return the page to publish."""
    facts = ", ".join(
        f"{name} {value}" for name, value in results.machine.items() if name != "device"
    )
    parts = [
        f"# {results.family} on {results.machine['device']}",
        facts + ".",
        f"`{results.command}`",
    ]
    parts += results.text
    if len(set(results.sources.values())) > 1:
        lines = [f"- {name.replace('_', ' ')}: {how}" for name, how in results.sources.items()]
        parts += ["Parts were measured in several runs:", "\n".join(lines)]
    if results.rows:
        parts += [
            "## Figures",
            markdown_table(figures_table(results.rows)),
            _losses(results),
        ]
    if results.samples:
        parts += ["## Side by side", markdown_table(samples_table(results.samples))]
    for name, cells in by_map(results.cells).items():
        parts += [f"## {name[0].upper()}{name[1:]}", markdown_table(cells_table(cells))]
    if results.cells and plot:
        parts += [f"![wall clock, compile over enabled]({plot})"]
    if results.points:
        fixed = ", ".join(f"{name} {size}" for name, size in results.fixed.items())
        axes = _listed(list(dict.fromkeys(p.axis for p in results.points)))
        parts += [f"## Over {axes}\n\n{results.swept}; what does not move stays at {fixed}."]
        parts += [f"![time and memory]({plot})"] if plot else []
        parts += [markdown_table(points_table(results.points))]
    return "\n\n".join(parts) + "\n"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _losses(results: Results) -> str:
    """List the figures and places at which ours is slower or larger than the program it is compared with."""
    rows = [r.name for r in results.rows if r.is_loss]
    worse = [*_worse(results.points, "ms", "time"), *_worse(results.points, "peak_bytes", "memory")]
    lines = [f"Losses: {'; '.join(rows) or 'none'}."]
    if results.points:
        lines.append(f"Behind compile in the curves: {'; '.join(worse) or 'nothing'}.")
    return "\n".join(f"- {line}" for line in lines)


def _worse(points: Sequence[Point], field: str, what: str) -> list[str]:
    found = {(p.axis, p.at, p.contender): getattr(p, field) for p in points}
    names = []
    for (axis, at, contender), mine in found.items():
        theirs = found.get((axis, at, "compile"))
        if contender == "ours" and mine and theirs and mine > theirs:
            names.append(f"{what} at {axis} {at} ({mine / theirs:.2f} x)")
    return names


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown."""
    head, *body = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    ]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def _value(
    value: float | None,
    unit: str,
    missing: str = "not measured",
    limits: Sequence[float | None] = (),
) -> str:
    """Format a value with three digits, or with up to six if fewer do not distinguish it from its limits."""
    if value is None:
        return missing
    if value >= 1000:
        return f"{value:.0f} {unit}".rstrip()
    digits = 3
    while digits < 6 and any(
        limit not in (None, value) and f"{value:.{digits}g}" == f"{limit:.{digits}g}"
        for limit in limits
    ):
        digits += 1
    return f"{value:.{digits}g} {unit}".rstrip()


def _mib(number: int | None) -> str:
    return "" if number is None else f"{number / 2**20:,.0f} MiB"


# --- Plot -------------------------------------------------------------------------------------------------------------

_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]  # distinguishable for colour-blind readers
_MARKS = ["o", "s", "^", "D"]


def _pyplot() -> Any:
    """Return matplotlib's pyplot; print a message and return None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print(
            "no plot: matplotlib is not installed (pip install matplotlib); the JSON file holds its numbers"
        )
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_maps(results: Results, path: Path) -> bool:
    """Draw one picture per map, with a colour and a number per cell: wall clock, compile over enabled.

    Numbers of rewritten programs are bold. Returns False, with a message, if matplotlib is not installed.
    """
    if (pyplot := _pyplot()) is None:
        return False
    maps = by_map(results.cells)
    heights = [0.8 + 0.24 * len({c.row for c in cells}) for cells in maps.values()]
    figure, grid = pyplot.subplots(
        len(maps),
        1,
        figsize=(8.0, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (plot,), (name, cells) in zip(grid, maps.items()):
        rows, columns = (
            list(dict.fromkeys(getattr(c, at) for c in cells)) for at in ("row", "column")
        )
        ratios = [[math.nan] * len(columns) for _ in rows]
        for c in cells:
            y, x = rows.index(c.row), columns.index(c.column)
            ratios[y][x] = math.log2(c.wall)
            style = {
                "weight": "bold" if c.rewritten else "normal",
                "color": "white" if abs(ratios[y][x]) > 2 else "black",
            }
            plot.text(x, y, f"{c.wall:.2f}", ha="center", va="center", fontsize=7, **style)
        plot.imshow(ratios, cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
        plot.set_xticks(range(len(columns)), columns, fontsize=7)
        plot.set_yticks(range(len(rows)), rows, fontsize=7)
        plot.set_title(name, fontsize=9)
    figure.suptitle(f"compile over enabled, wall clock, {results.machine['device']}", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def draw(results: Results, path: Path) -> bool:
    """Draw time above and memory (if it was measured) below, with one column per axis.

    Returns False, with a message, if matplotlib is not installed.
    """
    if (pyplot := _pyplot()) is None:
        return False
    axes = list(dict.fromkeys(p.axis for p in results.points))
    names = list(dict.fromkeys(p.contender for p in results.points))
    weighed = any(p.peak_bytes for p in results.points)
    figure, grid = pyplot.subplots(
        1 + weighed,
        len(axes),
        figsize=(3.6 * len(axes), 3.3 + 2.7 * weighed),
        squeeze=False,
        layout="constrained",
    )
    for column, axis in enumerate(axes):
        for at, name in enumerate(names):
            mine = [p for p in results.points if p.axis == axis and p.contender == name]
            style = {
                "label": name,
                "color": _COLOURS[at % 4],
                "marker": _MARKS[at % 4],
                "linewidth": 1.5,
            }
            _line(grid[0][column], [(p.at, p.ms) for p in mine], style)
            if weighed:
                peaks = [(p.at, p.peak_bytes and p.peak_bytes / 2**20) for p in mine]
                _line(grid[1][column], peaks, style)
        for line in grid:
            _scales(line[column], sorted({p.at for p in results.points if p.axis == axis}))
        others = ", ".join(f"{n} {size}" for n, size in results.fixed.items() if n != axis)
        grid[0][column].set_title(others, fontsize=9)
        grid[-1][column].set_xlabel(axis)
    what = results.swept.partition(";")[0].lower().replace(" and ", " + ")
    grid[0][0].set_ylabel(f"{what}, ms")
    if weighed:
        grid[1][0].set_ylabel("peak memory over the inputs, MiB")
    grid[0][0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{results.family}, {results.machine['device']}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _line(plot: Any, points: Sequence[tuple[int, float | None]], style: dict[str, Any]) -> None:
    known = [(x, y) for x, y in points if y]
    if known:
        plot.plot(*zip(*known), **style)


def _scales(plot: Any, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator

    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.set_xticks(sizes, [f"{x}" for x in sizes], rotation=30, fontsize=7)
    low, high = plot.get_ylim()
    # A short axis may contain no power of ten, and axes side by side have separate scales, so each needs labels.
    subs = (1, 2, 5) if high < 100 * low else (1,)
    plot.yaxis.set_major_locator(LogLocator(subs=subs))
    plot.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    plot.tick_params(axis="y", labelsize=7)
    plot.minorticks_off()
    plot.grid(True, linewidth=0.4, alpha=0.6)
