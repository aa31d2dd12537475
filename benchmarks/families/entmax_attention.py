"""Entmax attention: scores, alpha-entmax over the keys, weighted sum of the values.

The contenders run in one process and take turns: attention as users write it with the `entmax` package, eager ("eager")
and compiled ("compile"), if its score matrices fit; the same module compiled after `sparse_inductor.enable()` ("ours");
the operator called directly ("operator"); the `adasplash` package if it is installed ("adasplash"); and softmax
attention of the same shape with flash-attention 2 ("flash") and cuDNN ("cudnn"), which compute a different function.

The cost depends on the support, the number of keys that a row keeps. There are three regimes: P, the paper's random
data (query variance 6, a support of 6 to 8); M, a support of about 64; D, about 5 % of the keys. The query variances
for M and D, and for P with an alpha other than 1.5, are found by bisection on the data of the run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparse_inductor
from benchmarks import bench as common
from benchmarks.bench import (
    FORWARD,
    INFERENCE,
    NONE,
    TRAINING,
    Bench,
    Label,
    Section,
    part,
    step,
)
from benchmarks.clients import fit
from benchmarks.measure import MIB, Timing, Work, isolated, peak_memory

from .entmax import package

# Duration of each comparison on a GPU: at least ten rounds of calls of a few milliseconds.
SECONDS = 1.5
PATTERN = "entmax_attention"
PAPER_VARIANCE = 6.0


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    bench.sections(_gpu_sections(bench) if bench.cuda else _cpu_sections(bench))
    if bench.sweep:
        bench.section(_sweeps, bench)


# --- The work ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """[B, H, L, D] queries, keys and values."""

    B: int
    H: int
    L: int
    causal: bool = False
    D: int = 64

    def __str__(self) -> str:
        return f"B{self.B} H{self.H} L{self.L} D{self.D} {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> float:
        """FLOPs of the scores, the only product that cannot be avoided."""
        pairs = self.L * (self.L + 1) / 2 if self.causal else self.L**2
        return 2.0 * self.B * self.H * pairs * self.D

    @property
    def score_bytes(self) -> float:
        """Bytes of one fp32 score matrix. The unrewritten program holds several of them."""
        return 4.0 * self.B * self.H * self.L**2


class Attention(nn.Module):
    """Attention as users write it with the entmax package. `alpha` is a float, or None for a learned value per head."""

    def __init__(self, heads: int, causal: bool, alpha: float | None) -> None:
        super().__init__()
        self.causal, self.value = causal, alpha
        if alpha is None:
            self.alpha = nn.Parameter(torch.linspace(1.4, 1.6, heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~keep, float("-inf"))
        alpha = self.alpha.view(1, -1, 1, 1) if self.value is None else self.value
        return package(scores, alpha).to(v.dtype) @ v


class Case(common.Case):
    """Random data for one shape. `variance` is the variance of the queries, one value or one per row.

    Keys and values have variance 1.
    """

    pattern = PATTERN

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        variance: float | Tensor = PAPER_VARIANCE,
        alpha: float | None = 1.5,
        name: str = "P",
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.alpha, self.device = shape, alpha, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = (shape.B, shape.H, shape.L, shape.D)
        q, k, v, grad = (torch.randn(size, device=device) for _ in range(4))
        q = q * (variance.sqrt() if isinstance(variance, Tensor) else variance**0.5)
        self.q, self.k, self.v, self.grad = (t.to(dtype) for t in (q, k, v, grad))
        self.module = Attention(shape.H, shape.causal, alpha).to(device)
        self.support = support(self.q, self.k, shape.causal, 1.5 if alpha is None else alpha)
        self.inputs = self.wanted = self.q, self.k, self.v
        for t in self.inputs:
            t.requires_grad_()
        said = "" if alpha == 1.5 else f" alpha {alpha or 'learned'}"
        self.label = f"{name} {shape}{said}, support {self.support:.3g}"

    def contender(self, name: str) -> Callable[..., Tensor]:
        if name in ("eager", "compile", "ours"):
            return super().contender(name)
        causal = self.shape.causal
        if name == "operator":
            alpha = self.alpha or self.module.alpha.view(1, -1, 1, 1)
            operator = sparse_inductor.ops.entmax_attention
            return lambda q, k, v: operator(q, k, v, alpha=alpha, causal=causal)
        if name == "adasplash":
            from adasplash import adasplash

            return lambda q, k, v: adasplash(q, k, v, alpha=self.alpha, is_causal=causal)
        softmax = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]
        if self.device.type != "cuda":
            return softmax

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return softmax(q, k, v)

        return call


def support(q: Tensor, k: Tensor, causal: bool, alpha: float, rows: int = 128) -> float:
    """Return the mean number of keys that a row keeps, estimated from some rows of the first head."""
    at = torch.linspace(0, q.shape[-2] - 1, rows, device=q.device).long()
    with torch.no_grad():
        scores = q[0, 0, at].float() @ k[0, 0].float().T / math.sqrt(q.shape[-1])
        if causal:
            later = torch.arange(k.shape[-2], device=q.device) > at[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        return (sparse_inductor.ops.entmax(scores, alpha) > 0).sum(-1).float().mean().item()


def variance_for(shape: Shape, device: torch.device, wanted: float, alpha: float = 1.5) -> float:
    """Return the query variance at which a row keeps `wanted` keys. The support falls as the variance grows."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, shape.L, shape.D, device=device) for _ in range(2))
    low, high = 1e-8, 1000.0
    for _ in range(32):
        middle = math.sqrt(low * high)
        many = support(q * middle**0.5, k, shape.causal, alpha) > wanted
        low, high = (middle, high) if many else (low, middle)
    return math.sqrt(low * high)


def _installed(bench: Bench, case: str, name: str, module: str) -> bool:
    if importlib.util.find_spec(module) is not None:
        return True
    bench.left_out(case, name, f"not measured: the package {module} is not installed")
    return False


# --- The GPU's table --------------------------------------------------------------------------------------------------


def _gpu_sections(bench: Bench) -> list[Section]:
    tiny = bench.quick
    H, long, middle, short = (2, 128, 96, 64) if tiny else (16, 16384, 8192, 4096)
    lengths = [256, 512] if tiny else [131072, 1048576]
    causal = Shape(2, H, long, True)
    return [
        part("paper_causal", _against_adasplash, causal, (4.0, 5.0), (6.0, 8.0)),
        part("paper_short", _against_adasplash, Shape(8, H, short, True), (2.0, 2.4), (4.0, 4.0)),
        part("paper_full", _paper_full, Shape(2, H, long)),
        part("regimes", _regimes, Shape(2, H, middle)),
        part("alphas", _alphas, causal, "P"),
        part("alphas_of_broad_rows", _alphas, Shape(2, H, middle), "MD"),
        part("workspace", _workspace, Shape(2, H, long)),
        row_sums,
        part("longest", _longest, H, lengths),
        part("unrewritten", _against_unrewritten, Shape(1, H, short, True)),
    ]


def _paper_full(bench: Bench, shape: Shape) -> None:
    _against_softmax(bench, Case(shape, bench.device), "cudnn", (0.8, 0.3), (0.5, 0.18))


def _limit(bench: Bench, shape: Shape) -> str:
    return f"; QK^T at the GEMM rate {bench.limits.ms(shape.flops, 0):.3g} ms"


def _against_adasplash(
    bench: Bench, shape: Shape, floors: Sequence[float], goals: Sequence[float]
) -> None:
    """Compare with the paper's kernels on the paper's data; also measure softmax attention."""
    case = Case(shape, bench.device)
    names = ["ours", "operator", "flash", "cudnn"]
    if _installed(bench, case.label, "adasplash", "adasplash") and case.q.is_cuda:
        names.append("adasplash")
    taken = bench.race(case.works([FORWARD, TRAINING], names), SECONDS)
    for kind, *limits in zip((FORWARD, TRAINING), floors, goals):
        name, remark = f"{case.label}, {kind}", _limit(bench, shape)
        bench.over(taken, name, "adasplash", "ours", limits, remark=remark)


def _against_softmax(
    bench: Bench,
    case: Case,
    peer: str,
    floors: Sequence[float | None],
    goals: Sequence[float | None],
) -> dict[Label, Timing]:
    """Compare with softmax attention of the same shape."""
    names = ["ours", "operator", "flash", "cudnn"]
    taken = bench.race(case.works([FORWARD, TRAINING], names), SECONDS)
    for kind, *limits in zip((FORWARD, TRAINING), floors, goals):
        what, remark = f"ours over {peer} softmax", _limit(bench, case.shape)
        bench.over(taken, f"{case.label}, {kind}", "ours", peer, limits, what, remark)
    return taken


def _variances(bench: Bench, shape: Shape) -> dict[str, float]:
    """Return the query variance of each regime."""
    wanted = {"M": 64.0, "D": 0.05 * shape.L}
    if bench.quick:
        wanted = {"M": 0.4 * shape.L, "D": 0.6 * shape.L}
    found = {name: variance_for(shape, bench.device, many) for name, many in wanted.items()}
    return {"P": PAPER_VARIANCE, **found}


def _regimes(bench: Bench, shape: Shape) -> None:
    """Compare each regime with flash-attention 2, then measure a batch with rows of all three regimes."""
    variances = _variances(bench, shape)
    limits = {"P": NONE, "M": (1.2, 0.7), "D": (2.0, 1.0)}
    alone: dict[str, list[Timing]] = {FORWARD: [], TRAINING: []}
    for name, (floor, goal) in limits.items():
        case = Case(shape, bench.device, variances[name], name=name)
        taken = _against_softmax(bench, case, "flash", (None, floor), (None, goal))
        for kind, found in alone.items():
            found.append(taken[f"{case.label}, {kind}", "ours"])
    choices = torch.tensor([variances[name] for name in limits], device=bench.device)
    torch.manual_seed(1)
    drawn = torch.randint(0, 3, (shape.B, shape.H, shape.L, 1), device=bench.device)
    mixed = Case(shape, bench.device, choices[drawn], name="mixed")
    taken = bench.race(mixed.works(list(alone), ["ours"]), SECONDS)
    for kind, found in alone.items():
        mean = sum(t.ms for t in found) / len(found)
        mine = taken[f"{mixed.label}, {kind}", "ours"]
        note = f"{mine.ms:.4g} ms / {mean:.4g} ms; regimes drawn by row"
        name = f"{mixed.label}, {kind}: time over the mean of P, M and D"
        bench.row(name, mine.ms / mean, "x", 1.3, 1.1, note=note)


def _alphas(bench: Bench, shape: Shape, regimes: str) -> None:
    """Compare other alphas with alpha 1.5, by calling the operator directly.

    Each alpha is measured in the same regime, so that a row keeps equally many keys, and on the scores of alpha 1.5,
    where a smaller alpha keeps more keys.
    """
    for regime in regimes:
        _alphas_in(bench, shape, regime)


def _alphas_in(bench: Bench, shape: Shape, regime: str) -> None:
    variance = PAPER_VARIANCE if regime == "P" else _variances(bench, shape)[regime]
    base = Case(shape, bench.device, variance, 1.5, regime)
    learned = Case(shape, bench.device, variance, None, regime)  # about 1.5
    same, others = [learned], []
    for alpha in (2.0, 1.25):
        at = variance_for(shape, bench.device, base.support, alpha)
        same.append(Case(shape, bench.device, at, alpha, regime))
        others.append(Case(shape, bench.device, variance, alpha, f"the scores of {regime}"))
    works: dict[Label, Work] = {}
    for case in (base, *same, *others):
        works |= case.works([FORWARD, TRAINING], ["operator"])
    taken = bench.race(works, SECONDS, weigh=False)
    for cases, limits in ((same, (1.5, 1.2)), (others, NONE)):
        for case in cases:
            for kind in (FORWARD, TRAINING):
                mine, alone = (taken[f"{c.label}, {kind}", "operator"] for c in (case, base))
                name = f"{case.label}, {kind}: time over alpha 1.5 (operator)"
                bench.compare(name, mine, alone, limits)


def _against_unrewritten(bench: Bench, shape: Shape, seconds: float | None = None) -> None:
    """Compare with the unrewritten program, at a length at which its score matrices fit."""
    case = Case(shape, bench.device)
    names = ["ours"] if bench.cuda else ["ours", "operator"]
    if _installed(bench, case.label, "eager", "entmax"):
        names = ["eager", "compile", *names]
    taken = bench.race(case.works([INFERENCE, TRAINING], names), seconds)
    for kind in (INFERENCE, TRAINING):
        bench.over(taken, f"{case.label}, {kind}", "compile", "ours")


def _workspace(bench: Bench, shape: Shape) -> None:
    """Measure the memory of a training step beyond inputs, outputs and gradients, in regime P."""
    case = Case(shape, bench.device)
    found = peak_memory(case.work(TRAINING, case.contender("ours")), bench.device)
    name = f"P {shape}, {TRAINING}: peak memory beyond inputs, outputs and gradients"
    bench.row(name, found.scratch / MIB, "MiB", 1024, 0.4 * 1024)


def _longest(bench: Bench, heads: int, lengths: Sequence[int]) -> None:
    """Find the longest of these sequences at which a training step of the operator runs.

    The program as written cannot be used: with a million keys, the number of its scores overflows in Dynamo's fake
    tensors.
    """
    done, notes = 0, []
    for length in lengths:
        case = Case(Shape(1, heads, length, True), bench.device)
        work = case.work(TRAINING, case.contender("operator"))
        try:
            # A call takes seconds, so there are only two calls, of which the second counts.
            ms = [fit.timed(lambda _, work=work: work(), length, bench.device) for _ in range(2)][1]
        except torch.OutOfMemoryError:
            notes.append(f"{length}: out of memory")
            break
        done = length
        notes.append(f"{length}: {ms:.4g} ms")
        bench.say(f"{case.label}, {TRAINING}: operator {ms:.4g} ms")
    name = f"longest causal sequence, forward + backward of the operator, B1 H{heads}"
    bench.row(name, done, "", 131072, 1048576, True, "; ".join(notes))


def row_sums(bench: Bench) -> None:
    """Measure how far the sum of a row's probabilities is from 1, with values of all ones in fp32."""
    lengths = (64, 100) if bench.quick else (1000, 8192, 65536)
    variances = torch.tensor((0.0, 1e-4, 0.01, 0.3, 6.0, 100.0), device=bench.device)
    worst, where = 0.0, ""
    for length in lengths:
        for alpha in (1.1, 1.25, 1.5, 2.0):
            torch.manual_seed(0)
            size = (1, len(variances), length, 64)
            q, k = (torch.randn(size, device=bench.device) for _ in range(2))
            q = q[:, :, :256] * variances.sqrt()[:, None, None]
            out = sparse_inductor.ops.entmax_attention(q, k, torch.ones_like(k), alpha=alpha)
            gaps = (out.double() - 1).abs().amax((0, 2, 3)).tolist()
            for variance, gap in zip(variances.tolist(), gaps):
                if not gap <= worst:
                    worst = gap
                    where = f"at {length} keys, alpha {alpha}, query variance {variance:.4g}"
    name = "largest |sum of a row's probabilities - 1| over lengths, alphas and variances"
    bench.row(name, worst, "", 1e-5, 1e-6, note=where)


# --- The CPU's table --------------------------------------------------------------------------------------------------


def _cpu_sections(bench: Bench) -> list[Section]:
    shape = Shape(1, 2, 64) if bench.quick else Shape(2, 12, 512)
    return [part("times", _cpu_times, shape), part("memory", _cpu_memory, shape), row_sums_cpu]


def _cpu_times(bench: Bench, shape: Shape) -> None:
    for causal in (False, True):
        _against_unrewritten(bench, dataclasses.replace(shape, causal=causal), 30.0)


def row_sums_cpu(bench: Bench) -> None:
    """Run `row_sums` with lengths that are short enough for a CPU."""
    row_sums(dataclasses.replace(bench, quick=True))


def _cpu_memory(bench: Bench, shape: Shape) -> None:
    """Compare peak resident memory over the inputs, with each contender in a separate process."""
    how = {"family": PATTERN, "sizes": dataclasses.astuple(shape), "kind": TRAINING}
    taken = {name: isolated(step, name=name, **how)["peak"] for name in ("compile", "ours")}
    mine, theirs = taken["ours"], max(1, taken["compile"])
    note = f"{theirs / MIB:,.0f} MiB / {mine / MIB:,.0f} MiB, outputs and gradients included"
    name = f"P {shape}, {TRAINING}: peak memory over the inputs, compile over ours"
    bench.row(name, theirs / max(mine, 1), "x", higher=True, note=note)


# --- Sweeps -----------------------------------------------------------------------------------------------------------


def _sweeps(bench: Bench) -> None:
    """Measure a training step over the length (the paper's data, causal) and over the support (at one length, full)."""
    if bench.quick:
        heads, lengths, at, supports = 2, [64], 64, [16]
    elif bench.cuda:
        heads, lengths, at, supports = 16, [1024, 4096, 16384, 65536], 8192, [8, 32, 128, 512, 2048]
    else:
        heads, lengths, at, supports = 12, [128, 512, 2048], 512, [8, 32, 128]
    bench.results.fixed = {"B": 1, "H": heads, "D": 64}
    for length in lengths:
        case = Case(Shape(1, heads, length, True), bench.device)
        _points(bench, "L", length, case)
    for wanted in supports:
        shape = Shape(1, heads, at)
        case = Case(shape, bench.device, variance_for(shape, bench.device, wanted), name="swept")
        _points(bench, f"support of {at} keys", wanted, case)
    bench.save()


def _points(bench: Bench, axis: str, at: int, case: Case) -> None:
    """Measure all contenders at one place of the sweeps; the unrewritten program only if ten score matrices fit."""
    names = ["ours", "flash", "adasplash"] if bench.cuda else ["ours"]
    free = torch.cuda.mem_get_info()[0] if case.q.is_cuda else 4e9
    if 10 * case.shape.score_bytes < free and importlib.util.find_spec("entmax"):
        names.insert(0, "compile")
    if importlib.util.find_spec("adasplash") is None or not case.q.is_cuda:
        names = [n for n in names if n != "adasplash"]
    for name in names:
        make = lambda name=name: case.work(TRAINING, case.contender(name))
        bench.point(bench.measure_point(axis, at, name, make, 0.3 if bench.cuda else 2.0))
