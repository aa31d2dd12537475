"""Entmax of rows: alpha-entmax over one dimension of a tensor, forward and backward.

Contenders: the `entmax` package ("eager"), the same under torch.compile ("compile"), the same compiled after
`sparse_inductor.enable()` ("ours"), the operator called directly ("operator"), and a copy of the tensor, which is the
limit: every number read once and written once.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import sparse_inductor
from benchmarks.bench import Bench, Label, both, compiled, ratio, rewritten
from benchmarks.measure import Work

INFERENCE, TRAINING = "forward", "forward + backward"


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    bench.sections(_gpu_sections(bench) if bench.cuda else _cpu_sections(bench))


class Rows(nn.Module):
    """What users write: a function of the package over the last dimension."""

    def __init__(self, alpha: float, exact: bool = True, halvings: int = 50) -> None:
        super().__init__()
        self.alpha, self.exact, self.halvings = alpha, exact, halvings

    def forward(self, x: Tensor) -> Tensor:
        import entmax

        if self.exact and self.alpha == 1.5:
            return entmax.entmax15(x, dim=-1)
        if self.exact and self.alpha == 2.0:
            return entmax.sparsemax(x, dim=-1)
        return entmax.entmax_bisect(x, self.alpha, dim=-1, n_iter=self.halvings)


class Case:
    """Random rows: scores of attention, normal with the paper's deviation of sqrt(6)."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        alpha: float,
        exact: bool = True,
        quick: bool = False,
    ):
        torch.manual_seed(0)
        # The package's own 50 halvings, which take a minute to compile.
        self.alpha, self.rows = alpha, Rows(alpha, exact, 20 if quick else 50)
        self.x = (torch.randn(*shape, device=device) * math.sqrt(6)).requires_grad_()
        self.grad = torch.randn(*shape, device=device)
        function = "entmax15" if alpha == 1.5 else "sparsemax" if alpha == 2.0 else "entmax_bisect"
        function = function if exact else "entmax_bisect"
        self.label = f"{list(shape)} fp32, {function} alpha {alpha}"

    def works(self, kinds: Sequence[str], names: Sequence[str]) -> dict[Label, Work]:
        """What `Bench.race` takes."""
        runs = {name: self._contender(name) for name in names}
        return {
            (f"{self.label}, {kind}", name): self.work(kind, runs[name])
            for kind in kinds
            for name in names
        }

    def _contender(self, name: str) -> Callable[[Tensor], Tensor]:
        if name == "operator":
            return lambda x: sparse_inductor.ops.entmax(x, self.alpha)
        if name == "copy":
            return torch.clone
        if name == "eager":
            return self.rows
        return compiled(self.rows) if name == "compile" else rewritten(self.rows, "entmax")

    def work(self, kind: str, run: Callable[[Tensor], Tensor]) -> Work:
        def inference() -> Tensor:
            with torch.no_grad():
                return run(self.x)

        def training() -> tuple[Tensor, Tensor]:
            y = run(self.x)
            return y, torch.autograd.grad(y, self.x, self.grad)[0]

        return {INFERENCE: inference, TRAINING: training}[kind]


def _contenders(bench: Bench, case: Case) -> list[str]:
    if importlib.util.find_spec("entmax") is not None:
        return ["eager", "compile", "ours", "operator"]
    bench.left_out(case.label, "ours", "not measured: the package entmax is not installed")
    return ["operator"]


Section = Callable[[Bench], None]


def _gpu_sections(bench: Bench) -> list[Section]:
    shapes = [(64, 64)] if bench.quick else [(8192, 8192), (65536, 512), (512, 131072)]

    def section(shape: tuple[int, int], alpha: float) -> Section:
        def against_the_copy(bench: Bench) -> None:
            judged = shape == shapes[0]
            _against_copy(bench, Case(shape, bench.device, alpha, quick=bench.quick), judged)

        against_the_copy.__name__ = f"copy_{shape[0]}x{shape[1]}_alpha_{alpha}"
        return against_the_copy

    rows = [section(shape, alpha) for shape in shapes for alpha in (1.5, 2.0, 1.25)]
    return [*rows, _host]


class Doubled(nn.Module):
    """One kernel of Inductor's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _host(bench: Bench) -> None:
    """The host's part of a call, at a size at which the GPU's is next to nothing."""
    if importlib.util.find_spec("entmax") is None:
        return
    case = Case((64, 64), bench.device, 1.5)
    runs = {"ours": rewritten(case.rows, "entmax"), "compile": compiled(case.rows)}
    for kind in (INFERENCE, TRAINING):
        plain = case.work(kind, compiled(Doubled()))
        ours, theirs = (case.work(kind, runs[name]) for name in ("ours", "compile"))
        bench.host(f"{case.label}, {kind}", ours, plain, theirs)


def _against_copy(bench: Bench, case: Case, judged: bool) -> None:
    """Time over the least time in which the numbers can be read and written, at the measured copy rate."""
    names = _contenders(bench, case)
    if case.x.numel() > 2**26 or case.x.shape[-1] > 2**14:
        names = [n for n in names if n != "eager"]  # its sort holds eight copies
    taken = bench.race(case.works([INFERENCE, TRAINING], [*names, "copy"]))
    moved = 2.0 * case.x.numel() * case.x.element_size()
    # forward reads x and writes y; backward reads y and its gradient and writes x's.
    for kind, passes in ((INFERENCE, 1.0), (TRAINING, 2.5)):
        limit = bench.limits.ms(0, moved * passes)
        for name in ("ours", "operator"):
            if (mine := taken.get((f"{case.label}, {kind}", name))) is None:
                continue
            limits = (2.5, 1.3) if judged and kind == INFERENCE and name == "ours" else (None, None)
            what = "" if name == "ours" else " (operator)"
            note = f"{mine.ms:.4g} ms, at the copy rate {limit:.3g} ms"
            label = f"{case.label}, {kind}: time over the copy limit{what}"
            bench.row(label, mine.ms / limit, "x", *limits, note=note)


def _cpu_sections(bench: Bench) -> list[Section]:
    shape = (2, 2, 8, 32) if bench.quick else (8, 12, 512, 512)
    wanted = ((1.5, True, 1.5, 3.0), (1.5, False, 8.0, 20.0), (2.0, True, None, None))

    def section(alpha: float, exact: bool, floor: float | None, goal: float | None) -> Section:
        def against_the_package(bench: Bench) -> None:
            case = Case(shape, bench.device, alpha, exact, bench.quick)
            _against_package(bench, case, floor, goal)

        return against_the_package

    return [section(*one) for one in wanted]


def _against_package(bench: Bench, case: Case, floor: float | None, goal: float | None) -> None:
    names = _contenders(bench, case)
    taken = bench.race(case.works([INFERENCE, TRAINING], names), None if bench.quick else 60.0)
    for kind in (INFERENCE, TRAINING):
        theirs, mine = (taken.get((f"{case.label}, {kind}", n)) for n in ("eager", "ours"))
        label = f"{case.label}, {kind}: time, the package over ours"
        limits = (floor, goal) if kind == INFERENCE else (None, None)
        note = both(theirs, mine)
        bench.row(label, ratio(theirs, mine), "x", *limits, higher=True, note=note)
