"""Entmax attention: scores, alpha-entmax over the keys, weighted sum of the values.

Contenders, in one process and in turn: attention as users write it with the `entmax` package, eagerly ("eager") and
compiled ("compile"), where its score matrices fit; the same module compiled after `sparse_inductor.enable()` ("ours");
the operator called directly ("operator"); the `adasplash` package where it is installed ("adasplash"); softmax
attention of the same shape by flash-attention 2 ("flash") and cuDNN ("cudnn"), which do another computation.

What the attention costs depends on how many keys a row keeps. Three regimes: P, the paper's random data (query
variance 6, a support of 6 to 8); M, a support of about 64; D, about 5 % of the keys. The query variance for M and D,
and in P for another alpha than 1.5, is found by bisection on the data of the run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparse_inductor
from benchmarks.bench import Bench, Label, both, compiled, ratio, rewritten
from benchmarks.clients import fit
from benchmarks.measure import MIB, Timing, Work, isolated, peak_memory, race
from benchmarks.publish import Point

# Of each comparison on a GPU: ten rounds and more of calls of a few milliseconds.
SECONDS = 1.5
FORWARD, TRAINING, INFERENCE = "forward", "forward + backward", "inference"
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
        """Of the scores, the one product that cannot be avoided."""
        pairs = self.L * (self.L + 1) / 2 if self.causal else self.L**2
        return 2.0 * self.B * self.H * pairs * self.D

    @property
    def score_bytes(self) -> float:
        """Of one fp32 score matrix, which the unrewritten program holds several times."""
        return 4.0 * self.B * self.H * self.L**2


class Attention(nn.Module):
    """Attention as people write it around the entmax package; `alpha`: a float, or None for learned per head."""

    def __init__(self, heads: int, causal: bool, alpha: float | None) -> None:
        super().__init__()
        self.causal, self.value = causal, alpha
        if alpha is None:
            self.alpha = nn.Parameter(torch.linspace(1.4, 1.6, heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        import entmax

        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~keep, float("-inf"))
        if self.value == 1.5:
            p = entmax.entmax15(scores, dim=-1)
        elif self.value == 2.0:
            p = entmax.sparsemax(scores, dim=-1)
        else:
            alpha = self.alpha.view(1, -1, 1, 1) if self.value is None else self.value
            p = entmax.entmax_bisect(scores, alpha, dim=-1)
        return p.to(v.dtype) @ v


class Case:
    """Random data for one shape. `variance` is the queries' (keys and values have 1): one for all, or one a row."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        variance: float | Tensor = PAPER_VARIANCE,
        alpha: float | None = 1.5,
        name: str = "P",
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.alpha, self.name, self.device = shape, alpha, name, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = (shape.B, shape.H, shape.L, shape.D)
        q, k, v, grad = (torch.randn(size, device=device) for _ in range(4))
        q = q * (variance.sqrt() if isinstance(variance, Tensor) else variance**0.5)
        self.q, self.k, self.v, self.grad = (t.to(dtype) for t in (q, k, v, grad))
        self.module = Attention(shape.H, shape.causal, alpha).to(device)
        self.support = support(self.q, self.k, shape.causal, 1.5 if alpha is None else alpha)
        for t in (self.q, self.k, self.v):
            t.requires_grad_()

    @property
    def label(self) -> str:
        """For the tables: the shape, the regime and the support that was measured."""
        alpha = "" if self.alpha == 1.5 else f" alpha {self.alpha or 'learned'}"
        return f"{self.name} {self.shape}{alpha}, support {self.support:.3g}"

    def contender(self, name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """One way of computing attention; nothing is compiled before its first call."""
        causal = self.shape.causal
        if name == "eager":
            return self.module
        if name == "compile":
            return compiled(self.module)
        if name == "ours":
            return rewritten(self.module, PATTERN)
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

    def works(self, kinds: Sequence[str], names: Sequence[str]) -> dict[Label, Work]:
        """What `Bench.race` takes: each kind of work by each contender."""
        runs = {name: self.contender(name) for name in names}
        return {
            (f"{self.label}, {kind}", name): self.work(kind, runs[name])
            for kind in kinds
            for name in names
        }

    def work(self, kind: str, run: Callable[..., Tensor]) -> Work:
        inputs = (self.q, self.k, self.v)

        def forward() -> Tensor:  # of a training step: what the backward needs is kept
            return run(*inputs)

        def training() -> tuple[Tensor, ...]:
            out = run(*inputs)
            return (out, *torch.autograd.grad(out, inputs, self.grad))

        def inference() -> Tensor:
            with torch.no_grad():
                return run(*inputs)

        return {FORWARD: forward, TRAINING: training, INFERENCE: inference}[kind]


def support(q: Tensor, k: Tensor, causal: bool, alpha: float, rows: int = 128) -> float:
    """Mean number of keys that a row keeps, from some rows of the first head."""
    at = torch.linspace(0, q.shape[-2] - 1, rows, device=q.device).long()
    with torch.no_grad():
        scores = q[0, 0, at].float() @ k[0, 0].float().T / math.sqrt(q.shape[-1])
        if causal:
            later = torch.arange(k.shape[-2], device=q.device) > at[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        return (sparse_inductor.ops.entmax(scores, alpha) > 0).sum(-1).float().mean().item()


def variance_for(shape: Shape, device: torch.device, wanted: float, alpha: float = 1.5) -> float:
    """The query variance at which a row keeps `wanted` keys: the support falls as the variance grows."""
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


Section = Callable[[Bench], None]


def _gpu_sections(bench: Bench) -> list[Section]:
    tiny = bench.quick
    H, long, middle, short = (2, 128, 96, 64) if tiny else (16, 16384, 8192, 4096)

    def paper_causal(bench: Bench) -> None:
        _against_adasplash(bench, Shape(2, H, long, True), (4.0, 5.0), (6.0, 8.0))

    def paper_short(bench: Bench) -> None:
        _against_adasplash(bench, Shape(8, H, short, True), (2.0, 2.4), (4.0, 4.0))

    def paper_full(bench: Bench) -> None:
        _against_softmax(
            bench, Case(Shape(2, H, long), bench.device), "cudnn", (0.8, 0.3), (0.5, 0.18)
        )

    def regimes(bench: Bench) -> None:
        _regimes(bench, Shape(2, H, middle))

    def alphas(bench: Bench) -> None:
        _alphas(bench, Shape(2, H, long, True), "P")

    def alphas_of_broad_rows(bench: Bench) -> None:
        for name in ("M", "D"):
            _alphas(bench, Shape(2, H, middle), name)

    def unrewritten(bench: Bench) -> None:
        _against_unrewritten(bench, Shape(1, H, short, True))

    def workspace(bench: Bench) -> None:
        _workspace(bench, Shape(2, H, long))

    def longest(bench: Bench) -> None:
        _longest(bench, H, [256, 512] if tiny else [131072, 1048576])

    return [paper_causal, paper_short, paper_full, regimes, alphas, alphas_of_broad_rows, workspace,
            row_sums, longest, unrewritten, _host]  # fmt: skip


class Product(nn.Module):
    """One kernel of Inductor's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * k * v


def _host(bench: Bench) -> None:
    """The host's part of a call, at a size at which the GPU's is small."""
    case = Case(Shape(1, 2, 256), bench.device)
    runs = {name: case.contender(name) for name in ("ours", "compile")}
    for kind in (INFERENCE, TRAINING):
        plain = case.work(kind, compiled(Product()))
        ours, theirs = (case.work(kind, runs[name]) for name in ("ours", "compile"))
        bench.host(f"{case.label}, {kind}", ours, plain, theirs)


def _race(bench: Bench, works: Mapping[Label, Work], weigh: bool = True) -> dict[Label, Timing]:
    return bench.race(works, None if bench.quick else SECONDS, weigh)


def _limit(bench: Bench, shape: Shape) -> str:
    return f"; QK^T at the GEMM rate {bench.limits.ms(shape.flops, 0):.3g} ms"


def _against_adasplash(
    bench: Bench, shape: Shape, floors: Sequence[float], goals: Sequence[float]
) -> None:
    """The paper's data against the paper's kernels, and softmax attention beside them."""
    case = Case(shape, bench.device)
    names = ["ours", "operator", "flash", "cudnn"]
    if _installed(bench, case.label, "adasplash", "adasplash") and case.q.is_cuda:
        names.append("adasplash")
    taken = _race(bench, case.works([FORWARD, TRAINING], names))
    for kind, floor, goal in zip((FORWARD, TRAINING), floors, goals):
        theirs, mine = (taken.get((f"{case.label}, {kind}", n)) for n in ("adasplash", "ours"))
        note = both(theirs, mine) + _limit(bench, shape)
        name = f"{case.label}, {kind}: time, adasplash over ours"
        bench.row(name, ratio(theirs, mine), "x", floor, goal, True, note)


def _against_softmax(
    bench: Bench,
    case: Case,
    peer: str,
    floors: Sequence[float | None],
    goals: Sequence[float | None],
) -> dict[Label, Timing]:
    """Against softmax attention of the same shape."""
    taken = _race(bench, case.works([FORWARD, TRAINING], ["ours", "operator", "flash", "cudnn"]))
    for kind, floor, goal in zip((FORWARD, TRAINING), floors, goals):
        theirs, mine = (taken[f"{case.label}, {kind}", n] for n in (peer, "ours"))
        note = both(mine, theirs) + _limit(bench, case.shape)
        name = f"{case.label}, {kind}: time, ours over {peer} softmax"
        bench.row(name, ratio(mine, theirs), "x", floor, goal, note=note)
    return taken


def _variances(bench: Bench, shape: Shape) -> dict[str, float]:
    """The query variances of the regimes."""
    wanted = {"M": 64.0, "D": 0.05 * shape.L}
    if bench.quick:
        wanted = {"M": 0.4 * shape.L, "D": 0.6 * shape.L}
    found = {name: variance_for(shape, bench.device, many) for name, many in wanted.items()}
    return {"P": PAPER_VARIANCE, **found}


def _regimes(bench: Bench, shape: Shape) -> None:
    """Each regime against flash-attention 2, then rows of all three in one batch."""
    variances = _variances(bench, shape)
    limits = {"P": (None, None), "M": (1.2, 0.7), "D": (2.0, 1.0)}
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
    taken = _race(bench, mixed.works(list(alone), ["ours"]))
    for kind, found in alone.items():
        mean = sum(t.ms for t in found) / len(found)
        mine = taken[f"{mixed.label}, {kind}", "ours"]
        note = f"{mine.ms:.4g} ms / {mean:.4g} ms; regimes drawn by row"
        name = f"{mixed.label}, {kind}: time over the mean of P, M and D"
        bench.row(name, mine.ms / mean, "x", 1.3, 1.1, note=note)


def _alphas(bench: Bench, shape: Shape, regime: str) -> None:
    """Other alphas, called directly: in the same regime, so that a row keeps as many keys, and on the scores of alpha
    1.5, of which a smaller one keeps more."""
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
    taken = _race(bench, works, weigh=False)
    for cases, limits in ((same, (1.5, 1.2)), (others, (None, None))):
        for case in cases:
            for kind in (FORWARD, TRAINING):
                mine, alone = (taken[f"{c.label}, {kind}", "operator"] for c in (case, base))
                name = f"{case.label}, {kind}: time over alpha 1.5 (operator)"
                bench.row(name, ratio(mine, alone), "x", *limits, note=both(mine, alone))


def _against_unrewritten(bench: Bench, shape: Shape) -> None:
    """The program without the rewrite, at a length where its score matrices fit."""
    case = Case(shape, bench.device)
    names = ["ours"]
    if _installed(bench, case.label, "eager", "entmax"):
        names = ["eager", "compile", "ours"]
    taken = bench.race(case.works([INFERENCE, TRAINING], names))
    for kind in (INFERENCE, TRAINING):
        theirs, mine = (taken.get((f"{case.label}, {kind}", n)) for n in ("compile", "ours"))
        name = f"{case.label}, {kind}: time, compile over ours"
        bench.row(name, ratio(theirs, mine), "x", higher=True, note=both(theirs, mine))


def _workspace(bench: Bench, shape: Shape) -> None:
    """Memory that is neither input, output nor gradient, in each regime's training step."""
    work = next(iter(Case(shape, bench.device).works([TRAINING], ["ours"]).values()))
    found = peak_memory(work, bench.device)
    name = f"P {shape}, {TRAINING}: peak memory beyond inputs, outputs and gradients"
    bench.row(name, found.scratch / MIB, "MiB", 1024, 0.4 * 1024)


def _longest(bench: Bench, heads: int, lengths: Sequence[int]) -> None:
    """The longest of these sequences whose training step runs: the operator's, as a million keys overflow the count of
    the scores that Dynamo's fake tensors keep of the program as written."""
    done, notes = 0, []
    for length in lengths:
        case = Case(Shape(1, heads, length, True), bench.device)
        work = case.works([TRAINING], ["operator"]).popitem()[1]
        try:
            # Two calls that take seconds: the second is timed.
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
    """How far a row's probabilities are from summing to 1: the values are all ones, in fp32."""
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

    def times(bench: Bench) -> None:
        for causal in (False, True):
            _cpu_times(bench, dataclasses.replace(shape, causal=causal))

    def memory(bench: Bench) -> None:
        _cpu_memory(bench, shape)

    return [times, memory, row_sums_cpu]


def row_sums_cpu(bench: Bench) -> None:
    """As on the GPU, at lengths that a CPU can take."""
    row_sums(dataclasses.replace(bench, quick=True))


def _cpu_times(bench: Bench, shape: Shape) -> None:
    case = Case(shape, bench.device)
    names = ["ours", "operator"]
    if _installed(bench, case.label, "eager", "entmax"):
        names = ["eager", "compile", *names]
    taken = bench.race(case.works([INFERENCE, TRAINING], names), None if bench.quick else 30.0)
    for kind in (INFERENCE, TRAINING):
        theirs, mine = (taken.get((f"{case.label}, {kind}", n)) for n in ("compile", "ours"))
        name = f"{case.label}, {kind}: time, compile over ours"
        bench.row(name, ratio(theirs, mine), "x", higher=True, note=both(theirs, mine))


def _cpu_memory(bench: Bench, shape: Shape) -> None:
    """Peak resident memory over the inputs, each contender in a process of its own."""
    taken = {}
    for name in ("compile", "ours"):
        sizes = dataclasses.asdict(shape)
        taken[name] = isolated(measure_step, sizes=sizes, name=name)["peak"]
    mine, theirs = taken["ours"], max(1, taken["compile"])
    note = f"{theirs / MIB:,.0f} MiB / {mine / MIB:,.0f} MiB, outputs and gradients included"
    name = f"P {shape}, {TRAINING}: peak memory over the inputs, compile over ours"
    bench.row(name, theirs / max(mine, 1), "x", higher=True, note=note)


def measure_step(sizes: Mapping[str, Any], name: str, seconds: float = 0.0) -> dict[str, Any]:
    """In a process of its own: median time (if `seconds`) and peak memory of one contender's training step, CPU."""
    device = torch.device("cpu")
    work = next(iter(Case(Shape(**sizes), device).works([TRAINING], [name]).values()))
    peak = peak_memory(work, device).peak
    ms = race({name: work}, device, seconds, (3, 20))[name].ms if seconds else None
    return {"peak": peak, "ms": ms}


# --- Sweeps -----------------------------------------------------------------------------------------------------------


def _sweeps(bench: Bench) -> None:
    """Training step over the length (the paper's data, causal) and over the support (at one length, full)."""
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
    """All contenders at one place of the sweeps; the unrewritten program where ten score matrices fit."""
    names = ["ours", "flash", "adasplash"] if bench.cuda else ["ours"]
    free = torch.cuda.mem_get_info()[0] if case.q.is_cuda else 4e9
    if 10 * case.shape.score_bytes < free and importlib.util.find_spec("entmax"):
        names.insert(0, "compile")
    if importlib.util.find_spec("adasplash") is None or not case.q.is_cuda:
        names = [n for n in names if n != "adasplash"]
    for name in names:
        if bench.late():
            bench.point(Point(axis, at, name, None, None, "not measured: out of time"))
            continue
        torch._dynamo.reset()
        work = next(iter(case.works([TRAINING], [name]).values()))
        seconds = 0.1 if bench.quick else 0.3 if bench.cuda else 2.0
        ms = race({name: work}, bench.device, seconds, (3, 20))[name].ms
        peak = peak_memory(work, bench.device).peak if bench.cuda else None
        bench.say(f"sweep {axis} {at}: {name} {ms:.4g} ms")
        bench.point(Point(axis, at, name, ms, peak))
