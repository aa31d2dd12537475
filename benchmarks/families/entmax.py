"""Entmax of rows: alpha-entmax over one dimension of a tensor, forward and backward.

The contenders are the `entmax` package ("eager"), the package under torch.compile ("compile"), the package compiled
after `sparse_inductor.enable()` ("ours"), the operator called directly ("operator"), and a copy of the tensor ("copy"),
which reads and writes every number once and so is the lower limit.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import sparse_inductor
from benchmarks import bench as common
from benchmarks.bench import INFERENCE, NONE, TRAINING, Bench, Limits, Section, part


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    bench.sections(_gpu_sections(bench) if bench.cuda else _cpu_sections(bench))


def package(x: Tensor, alpha: float | Tensor, exact: bool = True, halvings: int = 50) -> Tensor:
    """Compute entmax over the last dimension with the package's function for this alpha."""
    import entmax

    if exact and isinstance(alpha, float) and alpha in (1.5, 2.0):
        return (entmax.entmax15 if alpha == 1.5 else entmax.sparsemax)(x, dim=-1)
    return entmax.entmax_bisect(x, alpha, dim=-1, n_iter=halvings)


class Rows(nn.Module):
    """Entmax of rows as users write it."""

    def __init__(self, alpha: float, exact: bool = True, halvings: int = 50) -> None:
        super().__init__()
        self.alpha, self.exact, self.halvings = alpha, exact, halvings

    def forward(self, x: Tensor) -> Tensor:
        return package(x, self.alpha, self.exact, self.halvings)


class Case(common.Case):
    """Random rows like scores of attention: normal with the paper's standard deviation of sqrt(6)."""

    pattern = "entmax"

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        alpha: float,
        exact: bool = True,
        quick: bool = False,
    ):
        torch.manual_seed(0)
        # The package's default of 50 halvings takes a minute to compile, so `quick` uses fewer.
        self.alpha, self.module = alpha, Rows(alpha, exact, 20 if quick else 50)
        self.x = (torch.randn(*shape, device=device) * math.sqrt(6)).requires_grad_()
        self.inputs = self.wanted = (self.x,)
        self.grad = torch.randn(*shape, device=device)
        function = "entmax15" if alpha == 1.5 else "sparsemax" if alpha == 2.0 else "entmax_bisect"
        function = function if exact else "entmax_bisect"
        self.label = f"{list(shape)} fp32, {function} alpha {alpha}"

    def contender(self, name: str) -> Callable[[Tensor], Tensor]:
        if name == "operator":
            return lambda x: sparse_inductor.ops.entmax(x, self.alpha)
        return torch.clone if name == "copy" else super().contender(name)


def _contenders(bench: Bench, case: Case) -> list[str]:
    if importlib.util.find_spec("entmax") is not None:
        return ["eager", "compile", "ours", "operator"]
    bench.left_out(case.label, "ours", "not measured: the package entmax is not installed")
    return ["operator"]


def _gpu_sections(bench: Bench) -> list[Section]:
    shapes = [(64, 64)] if bench.quick else [(8192, 8192), (65536, 512), (512, 131072)]

    return [
        part(f"copy_{rows}x{width}_alpha_{alpha}", _against_copy, (rows, width), alpha, at == 0)
        for at, (rows, width) in enumerate(shapes)
        for alpha in (1.5, 2.0, 1.25)
    ]


def _against_copy(bench: Bench, shape: Sequence[int], alpha: float, judged: bool) -> None:
    """Compare with the least time in which the numbers can be read and written, at the measured copy rate."""
    case = Case(shape, bench.device, alpha, quick=bench.quick)
    names = _contenders(bench, case)
    if case.x.numel() > 2**26 or case.x.shape[-1] > 2**14:
        names = [n for n in names if n != "eager"]  # its sort holds eight copies of x
    taken = bench.race(case.works([INFERENCE, TRAINING], [*names, "copy"]))
    moved = 2.0 * case.x.numel() * case.x.element_size()
    # The forward reads x and writes y. The backward reads y and its gradient and writes the gradient of x.
    for kind, passes in ((INFERENCE, 1.0), (TRAINING, 2.5)):
        limit = bench.limits.ms(0, moved * passes)
        for name in ("ours", "operator"):
            if (mine := taken.get((f"{case.label}, {kind}", name))) is None:
                continue
            limits = (2.5, 1.3) if judged and kind == INFERENCE and name == "ours" else NONE
            what = "" if name == "ours" else " (operator)"
            note = f"{mine.ms:.4g} ms, at the copy rate {limit:.3g} ms"
            label = f"{case.label}, {kind}: time over the copy limit{what}"
            bench.row(label, mine.ms / limit, "x", *limits, note=note)


def _cpu_sections(bench: Bench) -> list[Section]:
    shape = (2, 2, 8, 32) if bench.quick else (8, 12, 512, 512)
    wanted = ((1.5, True, (1.5, 3.0)), (1.5, False, (8.0, 20.0)), (2.0, True, NONE))
    return [part("against_the_package", _against_package, shape, *one) for one in wanted]


def _against_package(
    bench: Bench, shape: Sequence[int], alpha: float, exact: bool, limits: Limits
) -> None:
    case = Case(shape, bench.device, alpha, exact, bench.quick)
    taken = bench.race(case.works([INFERENCE, TRAINING], _contenders(bench, case)), 60.0)
    for kind, judged in ((INFERENCE, limits), (TRAINING, NONE)):
        label, what = f"{case.label}, {kind}", "the package over ours"
        bench.over(taken, label, "eager", "ours", judged, what)
