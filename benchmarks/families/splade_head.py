"""SPLADE head: linear to the vocabulary, mask, activation, maximum over the sequence.

Contenders, in one process and in turn: the head as users write it, eagerly ("eager") and compiled ("compile"); the
same module compiled after `sparse_inductor.enable()` ("ours"); the operator called directly ("operator").
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import sparse_inductor
from benchmarks.measure import MIB, Ceilings, Memory, Timing, ceilings, gemm, isolated, peak_memory, race
from benchmarks.publish import Point, Row, Sample

if TYPE_CHECKING:
    from benchmarks.__main__ import Run

# --- The work ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """[B, S, D] hidden states, [V, D] vocabulary."""

    B: int
    S: int
    D: int
    V: int

    def __str__(self) -> str:
        return f"B{self.B} S{self.S} D{self.D} V{self.V}"

    @property
    def flops(self) -> float:
        """Of the one product that cannot be avoided."""
        return 2.0 * self.B * self.S * self.D * self.V

    def bytes(self, itemsize: int) -> float:
        """Every input read once, every value written once."""
        return float(itemsize) * (self.B * self.S * self.D + self.V * self.D + self.V + self.B * self.V)

    @property
    def entries(self) -> int:
        """Of the result."""
        return self.B * self.V


class Head(nn.Module):
    """The head as people write it (naver/splade, max pooling)."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.decoder = nn.Linear(1, 1)
        self.decoder.weight, self.decoder.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.decoder(hidden)
        values, _ = torch.max(torch.log1p(torch.relu(logits)) * attention_mask.unsqueeze(-1), dim=1)
        return values


Forward = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass
class Case:
    """Random data for one shape. `active` is the share of [B, V] that comes out positive."""

    shape: Shape
    hidden: Tensor
    mask: Tensor
    grad: Tensor
    head: Head
    active: float
    contenders: dict[str, Forward] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.hidden, self.head.decoder.weight, self.head.decoder.bias

    def contender(self, name: str) -> Forward:
        """One way of computing the head, made once; nothing is compiled before its first call."""
        if name not in self.contenders:
            self.contenders[name] = _contender(name, self.head)
        return self.contenders[name]


def make_case(shape: Shape, device: torch.device, active: float | None = None, padding: str = "none") -> Case:
    """Logits are about N(0, 1); a bias moves them so that `active` of the pooled values are positive (None: all)."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    like = {"device": device, "dtype": dtype}
    hidden = torch.randn(shape.B, shape.S, shape.D, **like)
    weight = torch.randn(shape.V, shape.D, **like).mul_(shape.D**-0.5)
    bias = torch.randn(shape.V, **like).mul_(0.1)
    mask = _mask(shape, device, padding)
    shift = 1.0 if active is None else -_pooled_quantile(hidden, weight, bias, mask, 1 - active)
    bias = bias + shift
    with torch.no_grad():
        values = sparse_inductor.ops.splade_head(hidden, weight, bias, mask)
    grad = torch.randn(shape.B, shape.V, **like)
    share = (values > 0).float().mean().item()
    return Case(shape, hidden.requires_grad_(), mask, grad, Head(weight, bias), share)


def _mask(shape: Shape, device: torch.device, padding: str) -> Tensor:
    """int64 as tokenizers make it: "none", "half" (every sequence), or "random" lengths with a mean of half."""
    full = torch.full((shape.B,), shape.S, device=device)
    half = torch.full_like(full, max(1, shape.S // 2))
    drawn = torch.randint(1, shape.S + 1, (shape.B,), device=device)
    lengths = {"none": full, "half": half, "random": drawn}[padding]
    return (torch.arange(shape.S, device=device) < lengths[:, None]).long()


def _pooled_quantile(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, share: float) -> float:
    """Quantile of the pooled logits over a part of the batch and vocabulary."""
    rows, entries = slice(0, 8), slice(0, 30522)
    raised = bias[entries].float() + 20.0  # everything positive: the activation can be undone
    values = sparse_inductor.ops.splade_head(
        hidden[rows].float(), weight[entries].float(), raised, mask[rows], steps="relu | row_mul(0)"
    )
    return torch.sort(values.flatten()).values[int(share * (values.numel() - 1))].item() - 20.0


# --- The contenders ---------------------------------------------------------------------------------------------------


class NotRewritten(RuntimeError):
    """The benchmark would have compared the unrewritten program with itself."""


def _contender(name: str, head: Head) -> Forward:
    if name == "eager":
        return head
    if name == "compile":
        return torch.compile(_twin(head), dynamic=False)
    if name == "ours":
        return _rewritten(torch.compile(_twin(head), dynamic=False))
    weight, bias = head.decoder.weight, head.decoder.bias
    return lambda hidden, mask: sparse_inductor.ops.splade_head(hidden, weight, bias, mask)


def _twin(head: Head) -> Head:
    """The same parameters in a class with code of its own: Dynamo shares what it compiled for a code object."""
    code = Head.forward.__code__.replace()
    forward = types.FunctionType(code, Head.forward.__globals__, "forward")
    twin = type("Head", (Head,), {"forward": forward})(torch.empty(1, 1), torch.empty(1))
    twin.decoder = head.decoder
    return twin


def _rewritten(compiled: Forward) -> Forward:
    """Compile (at the first call of each mode) with the rewriting on, and insist that it happened."""
    seen: set[bool] = set()

    def call(hidden: Tensor, mask: Tensor) -> Tensor:
        mode = torch.is_grad_enabled()
        if mode in seen:
            return compiled(hidden, mask)
        before = len(sparse_inductor.report().rewrites)
        with _quiet(), sparse_inductor.enabled(only="splade_head"):
            out = compiled(hidden, mask)
        if len(sparse_inductor.report().rewrites) == before:
            raise NotRewritten(f"the head was not rewritten:\n{sparse_inductor.report()}")
        seen.add(mode)
        return out

    return call


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that something else was compiled before: here that is meant."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sparse_inductor was enabled after")
        yield


def forward(case: Case, name: str) -> Callable[[], Tensor]:
    """Forward of a training step: the winning positions are kept."""
    run = case.contender(name)
    return lambda: run(case.hidden, case.mask)


def inference(case: Case, name: str) -> Callable[[], Tensor]:
    """Forward without gradients."""
    run = case.contender(name)

    def work() -> Tensor:
        with torch.no_grad():
            return run(case.hidden, case.mask)

    return work


def training(case: Case, name: str) -> Callable[[], tuple[Tensor, ...]]:
    """Forward, and gradients of hidden states, weight and bias."""
    run = case.contender(name)

    def work() -> tuple[Tensor, ...]:
        out = run(case.hidden, case.mask)
        return (out, *torch.autograd.grad(out, case.inputs, case.grad))

    return work


KINDS = {"forward": forward, "forward + backward": training, "inference": inference}

# Copies of the logits that the unrewritten program holds at its peak, to leave out what cannot fit (measured).
_COPIES = {("eager", "forward"): 3.2, ("eager", "inference"): 3.2, ("eager", "forward + backward"): 4.4,
           ("compile", "forward"): 1.2, ("compile", "inference"): 1.2, ("compile", "forward + backward"): 2.4}  # fmt: skip


def too_large(case: Case, name: str, kind: str) -> str:
    """Why this contender cannot run here; "" when it can."""
    if not case.hidden.is_cuda:
        return ""
    logits = case.shape.S * case.shape.entries * case.hidden.element_size()
    need = _COPIES.get((name, kind), 0) * logits
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return f"not measured: needs about {need / 2**30:.0f} GiB" if need > 0.95 * free else ""


# --- Comparing --------------------------------------------------------------------------------------------------------


class Bench:
    """One run on one device: measures, and writes down what it found."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.device = run.device
        self.cuda = run.device.type == "cuda"
        self.results = run.results
        self.limits: Ceilings
        self.seconds = 0.2 if run.quick else 2.5 if self.cuda else 10.0

    def compare(
        self, case: Case, label: str, kinds: dict[str, list[str]], extra: dict[str, Callable[[], Any]] | None = None
    ) -> dict[tuple[str, str], Timing]:
        """Race contenders (by kind of work) over one case, all in turn; (contender, kind) -> timing."""
        works: dict[str, Callable[[], Any]] = dict(extra or {})
        keys: dict[str, tuple[str, str]] = {}
        for kind, names in kinds.items():
            for name in names:
                why = too_large(case, name, kind)
                if why:
                    self.results.samples.append(Sample(f"{label}, {kind}", name, note=why))
                    continue
                keys[f"{kind}/{name}"] = (name, kind)
                works[f"{kind}/{name}"] = KINDS[kind](case, name)
        rounds = (2, 3) if self.run.quick else (5, 40)
        taken = race(works, self.device, self.seconds, rounds)
        found = {}
        for at, timing in taken.items():
            name, kind = keys.get(at, (at, ""))
            found[name, kind] = timing
            if kind:
                memory = peak_memory(works[at], self.device) if self.cuda else None
                self.sample(f"{label}, {kind}", name, timing, memory)
        return found

    def sample(self, case: str, name: str, timing: Timing, memory: Memory | None) -> None:
        """Write one line of the side-by-side table down, and show it."""
        peak, scratch = (memory.peak, memory.scratch) if memory else (None, None)
        self.results.samples.append(
            Sample(case, name, timing.ms, timing.low, timing.high, timing.rounds, peak, scratch)
        )
        note = f", peak {peak / MIB:,.0f} MiB" if peak is not None else ""
        self.run.say(f"{case}: {name} {timing.ms:.4g} ms{note}")

    def memory(self, case: str, name: str) -> Sample | None:
        """A sample measured before."""
        return next((s for s in self.results.samples if (s.case, s.contender) == (case, name)), None)

    def row(self, name: str, value: float | None, unit: str = "", floor: float | None = None,
            goal: float | None = None, higher: bool = False, note: str = "") -> None:  # fmt: skip
        """Write one line of the table of floors and goals down."""
        self.results.rows.append(Row(name, value, unit, floor, goal, higher, note))

    def measure_limits(self) -> None:
        """The machine's own rates, each alone."""
        self.limits = ceilings(self.device, self.run.quick)
        what = "bf16 8192 cubed" if self.cuda else "fp32 2048 cubed"
        self.results.text.append(
            f"Limits measured in this run: matrix product ({what}) {self.limits.flops / 1e12:.4g} TFLOP/s, "
            f"copy (read + write) {self.limits.bytes / 1e12:.3g} TB/s."
        )
        self.run.say(self.results.text[-1])


def ratio(a: Timing | None, b: Timing | None) -> float | None:
    """How many times as long `a` takes as `b`."""
    return a.ms / b.ms if a and b else None


def run(run: Run) -> None:
    """Measure everything for this device."""
    bench = Bench(run)
    bench.measure_limits()
    if bench.cuda:
        _gpu(bench)
    else:
        _cpu(bench)
    _pass_time(bench)
    run.save()  # whatever happens in the sweeps, the table is there
    if run.sweep:
        _sweeps(bench)


# --- The GPU's table --------------------------------------------------------------------------------------------------


def _gpu(bench: Bench) -> None:
    quick = bench.run.quick
    main = Shape(4, 64, 64, 1000) if quick else Shape(320, 512, 768, 30522)
    large = Shape(2, 64, 64, 3000) if quick else Shape(64, 512, 768, 250002)
    case = make_case(main, bench.device, active=0.02)
    _against_limits(bench, case)
    _against_compile(bench, case)
    _density(bench, case)
    _padding(bench, main)
    del case
    _scratch(bench, main, "any S")
    case = make_case(large, bench.device, active=0.02)
    bench.run.say(f"{large}")
    _against_limits(bench, case, others=["compile"], floor=0.72, goal=0.90)
    del case
    _scratch(bench, large, "large vocabulary")
    _long(bench)


def _product(bench: Bench) -> tuple[Callable[[], Any], float]:
    return gemm(bench.device, bench.run.quick)


def _against_limits(
    bench: Bench, case: Case, others: list[str] | None = None, floor: float = 0.75, goal: float = 0.92
) -> None:
    """The forward's share of what a plain matrix product reaches, both in one race."""
    others = ["eager", "compile"] if others is None else others
    product, flops = _product(bench)
    label = str(case.shape)
    found = bench.compare(case, label, {"forward": [*others, "ours", "operator"]}, {"gemm": product})
    reached = found["gemm", ""].per_second(flops)
    best = max(reached, bench.limits.flops)  # the stricter of: beside the head, and alone
    for name in ("ours", "operator"):
        mine = found[name, "forward"].per_second(case.shape.flops)
        judged = {"floor": floor, "goal": goal} if name == "ours" else {}
        bench.row(
            f"{label} forward with argmax, share of the GEMM rate" + (" (operator)" if name == "operator" else ""),
            mine / best, higher=True, **judged,
            note=f"{mine / 1e12:.0f} of {best / 1e12:.0f} TFLOP/s ({reached / 1e12:.0f} beside the head); "
            f"at the limits {bench.limits.ms(case.shape.flops, case.shape.bytes(2)):.3g} ms",
        )  # fmt: skip


def _against_compile(bench: Bench, case: Case) -> None:
    """Ratios to the unrewritten program on the first shape."""
    label = str(case.shape)
    train, infer = "forward + backward", "inference"
    names = ["compile", "ours", "operator"]
    found = bench.compare(case, f"{label}, {case.active:.1%} active", {"forward": ["compile", "ours"], train: ["eager", *names]})
    bench.compare(case, label, {infer: ["compile", "ours"]})
    _speed_rows(bench, found, label, "forward", 1.5, 1.8)
    _speed_rows(bench, found, label, train, 4.0, 5.0)
    samples = [bench.memory(f"{label}, {case.active:.1%} active, {train}", n) for n in ("compile", "ours")]
    theirs, mine = samples
    for what, field in (("beyond inputs", "peak_bytes"), ("beyond inputs, outputs and gradients", "scratch_bytes")):
        a, b = (getattr(s, field, None) if s else None for s in (theirs, mine))
        value = a / max(b, 1) if a is not None and b is not None else None
        note = f"{a / MIB:,.0f} MiB / {b / MIB:,.0f} MiB" if value is not None else ""
        bench.row(f"{label} {train}: peak memory {what}, compile over ours", value, "x", 10, 60, True, note)
    step, front = found.get(("ours", train)), found.get(("ours", "forward"))
    bench.row(
        f"{label} {train}, {case.active:.1%} of [B, V] active, over our forward", ratio(step, front), "x", 1.35, 1.15
    )


def _speed_rows(bench: Bench, found: dict[tuple[str, str], Timing], label: str, kind: str, floor: float, goal: float) -> None:
    theirs, mine = found.get(("compile", kind)), found.get(("ours", kind))
    note = f"{theirs.ms:.4g} ms / {mine.ms:.4g} ms" if theirs and mine else ""
    bench.row(f"{label} {kind}: compile over ours", ratio(theirs, mine), "x", floor, goal, True, note)


def _density(bench: Bench, case: Case) -> None:
    """Forward and backward when every entry is active."""
    dense = make_case(case.shape, bench.device)
    train = "forward + backward"
    found = bench.compare(
        dense, f"{case.shape}, {dense.active:.0%} active", {"forward": ["ours"], train: ["compile", "ours"]}
    )
    label = f"{case.shape} {train}, {dense.active:.0%} of [B, V] active"
    bench.row(f"{label}, over our forward", ratio(found["ours", train], found["ours", "forward"]), "x", 2.0, 1.6)
    theirs = found.get(("compile", train))
    bench.row(f"{label}: compile over ours", ratio(theirs, found["ours", train]), "x", None, None, True)


def _padding(bench: Bench, shape: Shape) -> None:
    """Forward of half-padded batches over that of the same batch unpadded."""
    works = {}
    cases = {padding: make_case(shape, bench.device, padding=padding) for padding in ("none", "half", "random")}
    for padding, case in cases.items():
        works[padding] = forward(case, "ours")
    taken = race(works, bench.device, bench.seconds, (2, 3) if bench.run.quick else (5, 40))
    for padding, what in (("half", "all lengths half of S"), ("random", "random lengths")):
        share = cases[padding].mask.float().mean().item()
        bench.row(
            f"{shape} forward, {what}, over the same batch unpadded", ratio(taken[padding], taken["none"]), "x",
            0.60, 0.52, note=f"{1 - share:.1%} padding, {taken[padding].ms:.4g} ms / {taken['none'].ms:.4g} ms",
        )  # fmt: skip
    for padding, timing in taken.items():
        bench.sample(f"{shape}, padding {padding}, forward", "ours", timing, None)


def _scratch(bench: Bench, shape: Shape, what: str) -> None:
    """Memory that is neither input, output nor gradient; for the first shape at several S."""
    shapes = [shape]
    if what == "any S" and not bench.run.quick:
        shapes = [dataclasses.replace(shape, B=64, S=s) for s in (128, 4096)] + shapes
    for at in shapes:
        case = make_case(at, bench.device, active=0.02)
        found = peak_memory(training(case, "ours"), bench.device)
        del case
        floor, goal = 12 * at.entries / MIB + 256, 8 * at.entries / MIB + 64
        each = found.scratch / at.entries
        bench.row(
            f"{at} forward + backward: peak memory beyond inputs, outputs and gradients", found.scratch / MIB, "MiB",
            floor, goal, note=f"{each:.1f} bytes a [B, V] entry",
        )  # fmt: skip
        bench.run.say(f"{at}: {found.scratch / MIB:,.0f} MiB beyond inputs, outputs and gradients")


def _long(bench: Bench) -> None:
    """A training step on long sequences against one on as many tokens in short ones."""
    quick = bench.run.quick
    long, short = (
        (Shape(1, 256, 64, 1000), Shape(4, 64, 64, 1000))
        if quick
        else (Shape(16, 8192, 768, 30522), Shape(256, 512, 768, 30522))
    )
    works = {str(shape): training(make_case(shape, bench.device, active=0.02), "ours") for shape in (long, short)}
    taken = race(works, bench.device, bench.seconds, (2, 3) if quick else (5, 40))
    for name, timing in taken.items():
        bench.sample(f"{name}, forward + backward", "ours", timing, None)
    value = ratio(taken[str(long)], taken[str(short)])
    bench.row(
        f"{long} training step of the head, a token, over {short}", value, "x", None, 1.1,
        note="the floor is that it runs: it does",
    )  # fmt: skip


# --- The CPU's table --------------------------------------------------------------------------------------------------


def _cpu(bench: Bench) -> None:
    shape = Shape(2, 16, 32, 500) if bench.run.quick else Shape(8, 256, 384, 30522)
    case = make_case(shape, bench.device, active=0.02)
    train, label = "forward + backward", f"{shape}, 2.0% active"
    product, flops = _product(bench)
    names = ["compile", "ours", "operator"]
    found = bench.compare(case, label, {"forward": ["eager", *names], train: ["eager", *names]}, {"gemm": product})
    best = max(found["gemm", ""].per_second(flops), bench.limits.flops)
    for kind, floor, goal in (("forward", 1.05, 0.9), (train, 0.7, 0.5)):
        theirs, mine = found["compile", kind], found["ours", kind]
        note = f"{mine.ms:.4g} ms / {theirs.ms:.4g} ms"
        bench.row(f"{shape} {kind}: time, ours over compile", ratio(mine, theirs), "x", floor, goal, note=note)
    _cpu_memory(bench, shape)
    dense = make_case(shape, bench.device)
    kinds = {train: ["compile", "ours"], "inference": ["compile", "ours"]}
    full = bench.compare(dense, f"{shape}, {dense.active:.0%} active", kinds)
    for kind in kinds:
        value = ratio(full["ours", kind], full["compile", kind])
        bench.row(f"{shape} {kind}, {dense.active:.0%} of [B, V] active: time, ours over compile", value, "x")
    reached = found["ours", "forward"].per_second(shape.flops)
    note = f"{reached / 1e9:.0f} of {best / 1e9:.0f} GFLOP/s"
    bench.row(f"{shape} forward, share of the GEMM rate", reached / best, higher=True, note=note)


def _cpu_memory(bench: Bench, shape: Shape) -> None:
    """Peak resident memory over the inputs, each contender in a process of its own."""
    train = "forward + backward"
    for kind in ("forward", train):
        taken = {}
        for name in ("eager", "compile", "ours"):
            taken[name] = step_memory(shape, name, kind)
            sample = Sample(f"{shape}, {kind}, in a process of its own", name, peak_bytes=taken[name])
            bench.results.samples.append(sample)
            bench.run.say(f"{sample.case}: {name} peak {taken[name] / MIB:,.0f} MiB")
        floor, goal = (0.25, 0.1) if kind == train else (None, None)
        note = f"{taken['ours'] / MIB:,.0f} MiB / {taken['compile'] / MIB:,.0f} MiB, outputs and gradients included"
        bench.row(f"{shape} {kind}: peak memory over the inputs, ours over compile",
                  taken["ours"] / max(1, taken["compile"]), "x", floor, goal, note=note)  # fmt: skip


def step_memory(shape: Shape, name: str, kind: str) -> int:
    """Peak bytes over the inputs, measured in a fresh process (CPU)."""
    return isolated(measure_step, sizes=dataclasses.astuple(shape), name=name, kind=kind, seconds=0.0)["peak"]


def measure_step(sizes: list[int], name: str, kind: str, seconds: float) -> dict[str, Any]:
    """In a process of its own: median time (if `seconds`) and peak memory of one contender on the CPU."""
    device = torch.device("cpu")
    case = make_case(Shape(*sizes), device, active=0.02)
    work = KINDS[kind](case, name)
    peak = peak_memory(work, device).peak
    ms = race({name: work}, device, seconds, (3, 20))[name].ms if seconds else None
    return {"peak": peak, "ms": ms}


# --- The pass itself --------------------------------------------------------------------------------------------------


def _pass_time(bench: Bench) -> None:
    """How long the pass takes on a BERT-base with this head."""
    bench.run.say("the pass on a BERT-base graph")
    taken = isolated(capture_bert, layers=2 if bench.run.quick else 12, times=3 if bench.run.quick else 6)
    first, rest = taken["ms"][0], statistics.median(taken["ms"][1:])
    what = f"{taken['nodes']} lines of graph"
    bench.row("the pass on BERT-base with the head, first graph of a process", first, "ms", 20, 5, note=what)
    bench.row("the pass on BERT-base with the head, later graphs", rest, "ms", 20, 5, note=what)


def capture_bert(layers: int, times: int) -> dict[str, Any]:
    """In a process of its own: the report's `pass_ms` for a BERT masked LM with SPLADE pooling, several times."""
    from transformers import BertConfig, BertForMaskedLM

    from benchmarks.demo.model import Splade

    model = Splade(BertForMaskedLM(BertConfig(num_hidden_layers=layers)))
    ids = torch.randint(0, 30000, (2, 16))
    ms, nodes = [], 0
    for _ in range(times):
        found = sparse_inductor.explain(model, ids, torch.ones_like(ids))
        if len(found.report.rewrites) != 1:
            raise NotRewritten(f"the head was not rewritten:\n{found.report}")
        ms.append(found.report.pass_ms)
        nodes = sum(len(g.before.splitlines()) for g in found.graphs)
    return {"ms": ms, "nodes": nodes}


# --- Sweeps -----------------------------------------------------------------------------------------------------------


def _sweeps(bench: Bench) -> None:
    """Training step of the head over B, S and V, one size moving at a time."""
    if bench.run.quick:
        base, moves = Shape(2, 16, 32, 500), {"B": [1, 2], "S": [16, 32], "V": [300, 500]}
    elif bench.cuda:
        base = Shape(64, 512, 768, 30522)
        moves = {"B": [8, 32, 64, 128, 256], "S": [128, 256, 512, 1024, 2048], "V": [8192, 30522, 65536, 128256, 250002]}
    else:
        base, moves = Shape(4, 256, 384, 30522), {"B": [1, 4, 16], "S": [64, 256, 1024], "V": [8192, 30522, 100000]}
    bench.results.fixed = dataclasses.asdict(base)
    known: dict[Shape, dict[str, tuple[float | None, int | None, str]]] = {}
    for axis, sizes in moves.items():
        for size in sizes:
            shape = dataclasses.replace(base, **{axis: size})
            if shape not in known:
                known[shape] = {name: _point(bench, shape, name) for name in ("compile", "ours")}
                bench.run.say(f"sweep {shape}: " + _told(known[shape]))
            for name, (ms, peak, note) in known[shape].items():
                bench.results.points.append(Point(axis, size, name, ms, peak, note))
        bench.run.save()


def _told(found: dict[str, tuple[float | None, int | None, str]]) -> str:
    parts = []
    for name, (ms, peak, note) in found.items():
        parts.append(f"{name} {ms:.4g} ms {(peak or 0) / MIB:,.0f} MiB" if ms is not None else f"{name} {note}")
    return ", ".join(parts)


def _point(bench: Bench, shape: Shape, name: str) -> tuple[float | None, int | None, str]:
    """(ms, peak bytes over the inputs, remark) of a training step."""
    if bench.run.late():
        return None, None, "not measured: out of time"
    seconds = 0.1 if bench.run.quick else 0.4 if bench.cuda else 2.0
    if not bench.cuda:
        kind = "forward + backward"
        found = isolated(measure_step, sizes=dataclasses.astuple(shape), name=name, kind=kind, seconds=seconds)
        return found["ms"], found["peak"], ""
    torch._dynamo.reset()
    case = make_case(shape, bench.device, active=0.02)
    why = too_large(case, name, "forward + backward")
    if why:
        return None, None, why
    work = training(case, name)
    ms = race({name: work}, bench.device, seconds, (3, 20))[name].ms
    peak = peak_memory(work, bench.device).peak
    torch.cuda.empty_cache()
    return ms, peak, ""
