"""Tests a written-out entmax on concrete rows: each row must sum to one, and its gradient must be right.

The structure (see `transform`) leaves one question open: whether the threshold makes a row sum to one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from ... import layers
from ...graph.contraction import PRODUCTS
from ...graph.emit import own_operator
from ...graph.fakes import attribute, bounds, fake, same_size, static_size
from ...graph.no_match import NoMatch
from ...graph.search import reached
from ...graph.trial import Region, Untestable, run
from ...graph.view import GraphView

# The permitted deviation from entmax, by the precision of the program: it covers the program's own rounding.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 4e-3,
}
_tried: dict[tuple, str | None] = {}
_MAX_TRIED = 1024
_WIDEST = 1 << 16
_WIDTHS = (2, 3, 5, 8, 20, 67, 200)  # row sizes that are tried if the size is not known
_MAX_SEARCHED = 1 << 16  # random scores of a trial
_MOST = 2.0**24  # beyond it fp32 loses differences of 1, the order of differences within a row
# Arguments that are not values, and functions that have only such arguments.
_SIZES = frozenset("dim dims k size shape start end step steps repeats index".split())
_COUNTS = frozenset("arange linspace metadata getitem".split())
# The gradients that arrive at a trial's result: the backward of an autograd Function may clip them, or replace NaN.
_SIZES_OF_GRADIENTS = (1.0, 2.0**40, 2.0**-40, math.nan)
_MAX_NUMEL = 1 << 21  # scores of a trial in the program's own shape: about a second for a bisection


class Trial:
    """A test of one transformation, the region `piece`, which should be entmax of `scale` times `source`, on many kinds
    of rows."""

    def __init__(
        self,
        view: GraphView,
        piece: Region,
        source: fx.Node,
        dim: int,
        alpha: float | fx.Node,
        scale: float = 1.0,
    ):
        self.view, self.piece, self.node = view, piece, piece.output
        self.source, self.dim, self.scale = source, dim, scale
        self.tensor = alpha if isinstance(alpha, fx.Node) else None
        self.alphas = (1.3, 1.8) if isinstance(alpha, fx.Node) else (alpha,)
        self.alpha = self.alphas[0]  # the value that is being tried
        self.tolerance = _TOLERANCE.get(view.dtype(self.node), 1e-5)
        self.learned = False
        self.fills = tuple(scale * fill for fill in sorted(_fills(view, source)))
        self.levels = tuple(scale * level for level in _levels(view, piece.nodes))
        self.leaf_alpha: torch.Tensor | None = None

    def check(self, gradient: bool = True) -> None:
        """Raise NoMatch if the result is not entmax's or, with `gradient` and if one may be needed, if the gradient of
        the scores or of alpha is not."""
        learned = self.view.requires_grad(self.source) or self._alpha_needs_grad()
        needs_grad = self.learned = gradient and learned and self.view.grad_enabled
        if static_size(self.view.shape(self.source)[self.dim]) == 0:
            raise NoMatch("its rows have no scores to try it with", self.node)
        how = self.dim, self.alphas, self.scale, needs_grad, self.fills, self._alpha_needs_grad()
        key = (_key(self.view, self.piece), *how)
        tried = _tried
        if any(static_size(s) is None for n in self.piece.leaves for s in self.view.shape(n)):
            # A symbol may mean another size in another graph, so results are kept per graph.
            tried = self.view.remembered.setdefault(Trial, {})
        if key not in tried:
            if len(tried) >= _MAX_TRIED:
                tried.clear()
            with torch.device("cpu"):
                tried[key] = self._outcome(needs_grad)
        if tried[key] is not None:
            raise NoMatch(tried[key] or "", self.node)

    def undefined(self) -> str:
        """The treatment of a row of -inf (`ops.entmax`), once other rows are known to be right."""
        rows = (self._row_with(low) for low in (-torch.inf, torch.finfo(torch.float32).min))
        lost, least = ("refused" if p is None else "nan" if p.isnan().any() else "" for p in rows)
        return f"{lost} absorbed" if lost and lost == least else lost

    def _row_with(self, score: float, at: int | slice = slice(None)) -> torch.Tensor | None:
        """The result for a row with all scores, or the one at `at`, set to `score`; None if the program raises."""
        try:
            with torch.device("cpu"), torch.no_grad():
                rows = self._noise(2, seed=6)
                rows[1, at] = score
                return self._run(rows)[1]
        except Untestable:
            return None

    def _outcome(self, needs_grad: bool) -> str | None:
        """The first deviation found, or None. A tensor alpha is tried with two values."""
        try:
            for alpha in self.alphas:
                self.alpha = alpha
                with torch.no_grad():
                    wrong = self._forward() or self._not_a_number()
                if wrong is None and needs_grad:
                    wrong = self._backward()
                if wrong is not None:
                    return wrong
        except Untestable as error:
            return f"it could not be tried on concrete rows ({error})"
        return None

    def _forward(self) -> str | None:
        own, *others = self._widths()
        wrong = self._forward_of(own)
        for width in others if wrong is None else ():
            with contextlib.suppress(Untestable):  # the program may not allow this size
                wrong = wrong or self._forward_of(width)
        for fill in self.fills if wrong is None else ():
            p = self._row_with(self._as_rounded(fill))
            if p is not None and not p.any():
                return self._reason("is zero in a row that is masked throughout", fill)
        return wrong

    def _as_rounded(self, fill: float) -> float:
        """A number that is absorbed in float64, in which trials run, if `fill` is absorbed in the scores' dtype: 1 less
        is the same number."""
        number = torch.tensor((self.alpha - 1) * fill, dtype=self.view.dtype(self.source))
        absorbed = math.isfinite(fill) and bool(number - 1 == number)
        return min(fill, torch.finfo(torch.float32).min) if absorbed else fill

    def _forward_of(self, width: int) -> str | None:
        for rows, fill in _rows(width, self.alpha, self.fills, self.levels):
            p = self._run(rows)
            if not p.isfinite().all():
                return self._reason("has no finite result", fill)
            sums = p.sum(-1).flatten()
            worst = float(sums[(sums - 1).abs().argmax()])
            if abs(worst - 1) > self.tolerance:
                return self._reason(f"has a row that sums to {worst:.10g}", fill)
            gap = (p - self._operator(rows)).abs().max()
            if float(gap) > 2 * self.tolerance:
                return self._reason(f"differs from entmax by {float(gap):.2g}", fill)
        return None

    def _operator(self, rows: torch.Tensor) -> torch.Tensor:
        """The operator's result for the rows."""
        alpha = None if self.leaf_alpha is None else self.leaf_alpha.view(1, 1)
        with layers.at(layers.Layer.ATEN):
            p: torch.Tensor = own_operator("entmax")(rows, alpha, self.alpha, -1)
        return p

    def _not_a_number(self) -> str | None:
        """The deviation for a row with a NaN, or None. entmax turns the whole row into NaN, or raises."""
        p = self._row_with(torch.nan, at=0)
        known = p is None or bool(p.isnan().all())
        return None if known else self._reason("is finite in a row with a NaN", None)

    def _reason(self, what: str, fill: float | None) -> str:
        where = "" if fill is None else f" where scores are masked with {fill:g}"
        return f"this looks like entmax with alpha {self.alpha:g} but {what}{where}"

    def _backward(self) -> str | None:
        rows, masked = self._noise(4, seed=5) * 1.5, -torch.inf in self.fills
        if masked:
            rows[:2, 1:] = -torch.inf
        rows = rows.requires_grad_()
        self.leaf_alpha = None
        with torch.enable_grad():
            p = self._run(rows)
            if not p.requires_grad:
                return "no gradient goes through it, and entmax has one"
            g = self._noise(4, seed=8)
            alpha = self.leaf_alpha if self._alpha_needs_grad() else None
            leaves = (rows,) if alpha is None else (rows, alpha)
            want = torch.autograd.grad(self._operator(rows), leaves, g)
            for size in _SIZES_OF_GRADIENTS:
                got = torch.autograd.grad(p, leaves, size * g, retain_graph=True, allow_unused=True)
                if not _close(got[0], want[0], size):
                    if masked and got[0] is not None and got[0].isnan().any():
                        return "its gradient is NaN where scores are masked with -inf"
                    return (
                        "its gradient is not entmax's: what finds the threshold is not differentiated "
                        "through, or it has a backward of another kind"
                    )
                if alpha is not None and not _close(got[1], want[1], size):
                    return "the gradient of alpha is not entmax's"
        return None

    def _alpha_needs_grad(self) -> bool:
        return self.tensor is not None and self.view.requires_grad(self.tensor)

    def _widths(self) -> list[int]:
        """The row size. If it is not known: the size that the program is compiled for, and others that it may have."""
        size = self.view.shape(self.source)[self.dim]
        known = static_size(size)
        if known is None:
            hint = int(size.node.hint) if size.node.has_hint() else 8
            least, most = bounds(size)
            others = [n for n in _WIDTHS if n != hint and least <= n <= most]
            return [hint, *others] if hint <= _WIDEST else others
        if known > _WIDEST:
            raise Untestable(f"rows of {known}")
        return [known]

    def _noise(self, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self._widths()[0], generator=generator, dtype=torch.float64)

    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        """p for `rows` [R, n], in a shape like the one that the graph was traced with: with few rows or, if that fails
        because the number of rows is a constant in the program, with that number."""
        if self.tensor is not None:
            self.leaf_alpha = torch.tensor(self.alpha, dtype=torch.float64)
            self.leaf_alpha.requires_grad_(torch.is_grad_enabled())
        try:
            return self._in_shape(rows, self._few(rows))
        except Untestable:
            every = self._every(rows)
            if every is None:
                raise
            return self._in_shape(rows, every)

    def _few(self, rows: torch.Tensor) -> list[int]:
        """Sizes for these rows: an axis of size 1 keeps it, any other axis has two or more elements."""
        sizes = [1 if same_size(s, 1) else 2 for s in self.view.shape(self.source)]
        sizes[self.dim] = rows.shape[-1]
        others = [i for i, s in enumerate(sizes) if s == 2 and i != self.dim]
        if others:
            sizes[others[0]] = max(2, math.ceil(rows.shape[0] / 2 ** (len(others) - 1)))
        return sizes

    def _every(self, rows: torch.Tensor) -> list[int] | None:
        """The sizes that the graph was traced with, if they are known and small enough for a trial."""
        sizes = [static_size(s) for s in self.view.shape(self.source)]
        known = [s for s in sizes if s is not None]
        small = len(known) == len(sizes) and 0 < math.prod(known) <= _MAX_NUMEL
        return known if small and known[self.dim] == rows.shape[-1] else None

    def _in_shape(self, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """p for `rows`, run as one or more tensors of these sizes; rows are repeated to fill the last one."""
        at_once = math.prod(sizes) // rows.shape[-1]
        last = [*sizes[: self.dim], *sizes[self.dim + 1 :], rows.shape[-1]]
        found = []
        for start in range(0, rows.shape[0], at_once):
            filled = rows[(start + torch.arange(at_once)) % rows.shape[0]]
            values = {self.source: filled.reshape(last).movedim(-1, self.dim) / self.scale}
            if self.tensor is not None:
                values[self.tensor] = self._alpha_like(sizes)
            p = run(self.view, self.piece, values, self.source, self.dim)
            if list(p.shape) != sizes:
                raise Untestable(f"the result has shape {tuple(p.shape)}")
            found.append(p.movedim(self.dim, -1).reshape(filled.shape))
        return torch.cat(found)[: rows.shape[0]].to(torch.float64)

    def _alpha_like(self, sizes: list[int]) -> torch.Tensor:
        """alpha in the shape that it has with scores of `sizes`."""
        assert self.leaf_alpha is not None
        own, scores = self.view.shape(self.tensor), self.view.shape(self.source)
        scores, sizes = scores[len(scores) - len(own) :], sizes[len(sizes) - len(own) :]
        shape = [new if same_size(a, s) else 1 for a, s, new in zip(own, scores, sizes)]
        return self.leaf_alpha * torch.ones(shape, dtype=torch.float64)


def _close(got: torch.Tensor | None, want: torch.Tensor, size: float) -> bool:
    """Whether a gradient is `size` times the one that is wanted."""
    if got is None:
        return False
    if math.isnan(size):
        return bool(got[want != 0].isnan().all())
    want = size * want
    return torch.allclose(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def _rows(
    width: int, alpha: float, fills: tuple[float, ...], levels: tuple[float, ...]
) -> Iterator[tuple[torch.Tensor, float | None]]:
    """Rows that a search for the threshold may fail on; then rows beyond the numbers in the program, which may be
    bounds; then rows with masked scores, a few or all but one."""
    generator = torch.Generator().manual_seed(4)
    yield _searched(width, alpha, generator), None
    noise = torch.randn(4, width, generator=generator, dtype=torch.float64)
    if levels:
        beyond = 4 / min(1.0, alpha - 1) * torch.tensor(levels, dtype=torch.float64)[:, None, None]
        yield torch.cat([noise + beyond, noise - beyond, noise * beyond]).flatten(0, 1), None
    for fill in fills:
        keep = torch.rand(4, width, generator=generator) > torch.tensor(
            [[0.1], [0.5], [0.9], [0.97]]
        )
        keep[:, width // 2] = True
        yield torch.where(keep, noise * 2, fill), fill


def _searched(width: int, alpha: float, generator: torch.Generator) -> torch.Tensor:
    """Rows with supports of all sizes, peaked and flat, with ties and offsets.

    A search of few steps fails if each step drops only one score, as in geometric rows: their mean is near the smallest
    score. A bisection that stops early fails if scores are just below the threshold. A search that only uses the
    largest few scores fails in flat rows.
    """
    count = max(1, min(64, _MAX_SEARCHED // width // 4))
    noise = torch.randn(4, count, width, generator=generator, dtype=torch.float64)
    scales = torch.tensor([0.3, 1.0, 3.0, 30.0], dtype=torch.float64)
    at = torch.arange(width, dtype=torch.float64)
    slopes = torch.logspace(-4, 1, 24, dtype=torch.float64).unsqueeze(-1)
    bases = torch.tensor([1.05, 1.1, 1.3, 1.6, 2.0, 3.0, 5.0, 9.0, 17.0], dtype=torch.float64)
    bases = bases.clamp(max=10 ** (30 / width)).unsqueeze(-1)
    edge = torch.zeros(2, width, dtype=torch.float64)
    edge[:, width // 3] = torch.tensor([1.0, 2.0]) / (alpha - 1)
    sizes = torch.linspace(1, width, min(width, 24)).long().unsqueeze(-1)
    ties = torch.where(at < sizes, 0.0, -1.0 / (alpha - 1))
    few = noise[1, :1]
    return torch.cat(
        [
            (noise * scales.view(-1, 1, 1)).flatten(0, 1), few * 0.01, few * 0.5 + 8,
            (few * 2).round(), edge, ties, -slopes * at, -0.01 * bases**at, -0.3 * bases**at,
            torch.linspace(-3, 3, width, dtype=torch.float64).unsqueeze(0), _slowest(width) / (alpha - 1),
        ]
    )  # fmt: skip


def _slowest(width: int) -> torch.Tensor:
    """A row [1, width] from which an iteration that computes the threshold from the mean of the scores above the
    previous one drops only one score per step. In fp32 this lasts for about 40 steps."""
    below = [0.0]  # the distance of each score from the largest, minus 1
    while len(below) < width - 1:
        far = 1.001 * ((len(below) + 2) * below[-1] - sum(below)) + 1e-6
        below.append(min(far, 1e38))
    return -torch.tensor([[0.0, *(1.0 + far for far in below)][:width]], dtype=torch.float64)


def _fills(view: GraphView, source: fx.Node) -> set[float]:
    """The values that scores are masked with on their way to `source`, as far as the graph shows them."""
    found: set[float] = set()

    def up(n: fx.Node) -> list[fx.Node]:
        call = view.call(n)
        return n.all_input_nodes if call and call.name not in PRODUCTS else []

    for node in reached([source], up, 24):
        call = view.call(node)
        given = (call.get(key) for key in ("value", "other", "input", "fill_value", "values"))
        numbers = (view.const(x, node) for x in given)
        found |= {number for number in numbers if number is not None and number < -1e3}
        if call.name == "add" and view.is_tensor(call["other"]) and not found:
            mask = call["other"]
            if not view.requires_grad(mask) and mask.op == "placeholder":
                found |= {-1e9, -torch.inf}
    return found


def _levels(view: GraphView, nodes: Iterable[fx.Node]) -> list[float]:
    """The magnitudes of the numbers that a program adds to its values, multiplies them by, or compares them with."""
    found: set[float] = set()
    for node in nodes:
        if isinstance(body := attribute(node), fx.GraphModule):
            found |= {*_levels(GraphView(body.graph), body.graph.nodes)}
        call = view.call(node)
        tensors = [t for t in (node, *node.all_input_nodes) if view.is_tensor(t)]
        if not any(view.dtype(t).is_floating_point for t in tensors):
            continue
        if not call:
            found |= {float(a) for a in node.args if isinstance(a, (int, float))}
        elif call.name not in _COUNTS:
            given = (v for name, v in call.args.items() if name not in _SIZES)
            values = (view.const(v, node) for v in given if isinstance(v, (int, float, fx.Node)))
            found |= {v for v in values if v is not None}
    return sorted({abs(v) for v in found if 1 <= abs(v) <= _MOST})


def _key(view: GraphView, piece: Region) -> tuple:
    """The structure of a region. Layers of a model with the same structure are tried only once."""
    leaves = tuple((str(tuple(view.shape(n))), str(view.dtype(n))) for n in piece.leaves)
    return _structure(piece.nodes, piece.leaves), tuple(map(view.records, piece.nodes)), leaves


def _structure(nodes: Iterable[fx.Node], leaves: Iterable[fx.Node] = ()) -> tuple:
    """The operations and connections of nodes, independent of their names."""
    number = {leaf: -1 - i for i, leaf in enumerate(leaves)}

    def name(x: Any) -> Any:
        known = isinstance(x, fx.Node)
        return ("n", number.get(x, str(fake(x)))) if known else (type(x).__name__, str(x))

    rows = []
    for at, n in enumerate(nodes):
        target: Any = str(n.target) if n.op in ("call_function", "call_method") else n.op
        if n.op == "get_attr":
            value = attribute(n)
            if isinstance(value, fx.GraphModule):
                target = _structure(value.graph.nodes)
            elif isinstance(value, torch.Tensor) and value.numel() <= 4096:
                target = (str(value.dtype), str(tuple(value.shape)), str(value.flatten().tolist()))
            else:
                target = object()  # equal to nothing else, so tried each time
        rows.append((target, str(fx.node.map_aggregate((n.args, n.kwargs), name))))
        number[n] = at
    return tuple(rows)
