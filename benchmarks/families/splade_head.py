"""SPLADE head: linear to the vocabulary, mask, activation, maximum over the sequence.

The contenders run in one process and take turns: the head as users write it, eager ("eager") and compiled ("compile");
the same module compiled after `sparse_inductor.enable()` ("ours"); and the operator called directly ("operator").
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sparse_inductor
from benchmarks import bench as common
from benchmarks.bench import (
    FORWARD,
    INFERENCE,
    NONE,
    TRAINING,
    Bench,
    Label,
    Limits,
    NotRewritten,
    Section,
    part,
    step,
)
from benchmarks.measure import MIB, Work, gemm, isolated, peak_memory
from benchmarks.publish import Point, Sample

FAMILY = "splade_head"
ACTIVE = 0.02


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    bench.sections([*(_gpu_sections(bench) if bench.cuda else _cpu_sections(bench)), _pass_time])
    if bench.sweep:
        bench.section(_sweeps, bench)


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
        """FLOPs of the only product that cannot be avoided."""
        return 2.0 * self.B * self.S * self.D * self.V

    @property
    def numbers(self) -> float:
        """The number of elements that are accessed if every input is read once and every value is written once."""
        return float(self.B * self.S * self.D + self.V * self.D + self.V + self.B * self.V)

    @property
    def entries(self) -> int:
        """The number of entries of the result."""
        return self.B * self.V


class Head(nn.Module):
    """The head as users write it (naver/splade, max pooling)."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.decoder = nn.Linear(1, 1)
        self.decoder.weight, self.decoder.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.decoder(hidden)
        values, _ = torch.max(torch.log1p(torch.relu(logits)) * attention_mask.unsqueeze(-1), dim=1)
        return values


class Case(common.Case):
    """Random data for one shape; logits are about N(0, 1).

    The bias is shifted so that the share `active` of [B, V] is positive; None means that all of it is. `padding` is
    "none", "half" (every length is half of S) or "random" (lengths are half of S on average).
    """

    pattern = FAMILY

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        active: float | None = ACTIVE,
        padding: str = "none",
    ) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.shape = shape
        self.hidden = torch.randn(shape.B, shape.S, shape.D, **like)
        weight = torch.randn(shape.V, shape.D, **like).mul_(shape.D**-0.5)
        bias = torch.randn(shape.V, **like).mul_(0.1)
        self.mask = _mask(shape, device, padding)
        shift = 1.0 if active is None else -_quantile(self.hidden, weight, bias, 1 - active)
        self.module = Head(weight, bias + shift)
        self.grad = torch.randn(shape.B, shape.V, **like)
        self.inputs = self.hidden, self.mask
        self.wanted = (self.hidden, *self.module.parameters())
        with torch.no_grad():
            values = self.contender("operator")(*self.inputs)
        self.active = (values > 0).float().mean().item()
        self.label = f"{shape}, {self.active:.1%} active"
        self.hidden.requires_grad_()

    def contender(self, name: str) -> Callable[..., Tensor]:
        if name != "operator":
            return super().contender(name)
        weight, bias = self.module.decoder.weight, self.module.decoder.bias
        return lambda hidden, mask: sparse_inductor.ops.splade_head(hidden, weight, bias, mask)


def _mask(shape: Shape, device: torch.device, padding: str) -> Tensor:
    """Return a mask in int64, as tokenizers do."""
    full = torch.full((shape.B,), shape.S, device=device)
    half = torch.full_like(full, max(1, shape.S // 2))
    drawn = torch.randint(1, shape.S + 1, (shape.B,), device=device)
    lengths = {"none": full, "half": half, "random": drawn}[padding]
    return (torch.arange(shape.S, device=device) < lengths[:, None]).long()


def _quantile(hidden: Tensor, weight: Tensor, bias: Tensor, share: float) -> float:
    """Return a quantile of the pooled logits of a part of the batch and vocabulary, without the operator under test."""
    entries = slice(0, 30522)
    rows = [(x @ weight[entries].T).amax(0) + bias[entries] for x in hidden[:8]]
    pooled = torch.stack(rows).float().flatten().sort().values
    return pooled[int(share * (len(pooled) - 1))].item()


# The peak memory of the unrewritten program in multiples of the logits (measured), to skip contenders that cannot fit.
_COPIES = {
    ("eager", FORWARD): 3.2,
    ("eager", INFERENCE): 3.2,
    ("eager", TRAINING): 4.4,
    ("compile", FORWARD): 1.2,
    ("compile", INFERENCE): 1.2,
    ("compile", TRAINING): 2.4,
}


def _fitting(bench: Bench, shape: Shape, works: Mapping[Label, Work]) -> dict[Label, Work]:
    """Return the works that fit into the GPU's memory; record the others as left out."""
    if not bench.cuda:
        return dict(works)
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + reserved - allocated
    kept = {}
    for (case, name), work in works.items():
        need = _COPIES.get((name, case.rpartition(", ")[2]), 0) * 2.0 * shape.S * shape.entries
        if need > 0.95 * free:
            bench.left_out(case, name, f"not measured: needs about {need / 2**30:.0f} GiB")
        else:
            kept[case, name] = work
    return kept


# --- The GPU's table --------------------------------------------------------------------------------------------------


def _gpu_sections(bench: Bench) -> list[Section]:
    main, large = Shape(320, 512, 768, 30522), Shape(64, 512, 768, 250002)
    others = [Shape(64, 128, 768, 30522), Shape(64, 4096, 768, 30522)]
    if bench.quick:
        main, large, others = Shape(4, 64, 64, 1000), Shape(2, 64, 64, 3000), []

    return [
        part("first", _first, main),
        part("all_active", _all_active, main),
        part("padding", _padding, main),
        part("second", _second, large),
        part("scratch", _scratch, (*others, main, large)),
        _long,
    ]


def _first(bench: Bench, shape: Shape) -> None:
    case = Case(shape, bench.device)
    _against_limits(bench, case, ["eager", "compile"], 0.75, 0.92)
    _against_compile(bench, case)


def _second(bench: Bench, shape: Shape) -> None:
    _against_limits(bench, Case(shape, bench.device), ["compile"], 0.72, 0.90)


def _against_limits(
    bench: Bench, case: Case, others: Sequence[str], floor: float, goal: float
) -> None:
    """Compare the rate of the forward with that of a plain matrix product, both in one race."""
    remark, names = ", beside a matrix product", [*others, "ours", "operator"]
    works = _fitting(bench, case.shape, case.works([FORWARD], names, remark))
    product, flops = gemm(bench.device, bench.quick)
    product_label = ("matrix product for the limit", "torch.mm")
    taken = bench.race({product_label: product, **works})
    beside = taken[product_label].per_second(flops)
    best = max(beside, bench.limits.flops)  # the stricter limit: in turn with the head, or alone
    limit = bench.limits.ms(case.shape.flops, 2 * case.shape.numbers)
    for name, what, limits in (("ours", "", (floor, goal)), ("operator", " (operator)", NONE)):
        mine = taken[f"{case.label}{remark}, {FORWARD}", name]
        rate = mine.per_second(case.shape.flops)
        bench.row(
            f"{case.shape} forward with argmax, share of the GEMM rate{what}",
            rate / best,
            "",
            *limits,
            higher=True,
            note=f"{mine.ms:.4g} ms, at the limits {limit:.3g} ms; {rate / 1e12:.0f} of {best / 1e12:.0f} TFLOP/s "
            f"({beside / 1e12:.0f} when the product takes turns with the head)",
        )


def _against_compile(bench: Bench, case: Case) -> None:
    """Record the ratios to the unrewritten program, and of our training step to our forward, from one race."""
    names = ["eager", "compile", "ours", "operator"]
    works = {**case.works([TRAINING], names), **case.works([FORWARD, INFERENCE], names[1:3])}
    taken = bench.race(_fitting(bench, case.shape, works), 4.0)
    for kind, limits in ((FORWARD, (1.5, 1.8)), (TRAINING, (4.0, 5.0)), (INFERENCE, NONE)):
        bench.over(taken, f"{case.label}, {kind}", "compile", "ours", limits)
    _memory_rows(bench, f"{case.label}, {TRAINING}")
    whole, front = (taken[f"{case.label}, {kind}", "ours"] for kind in (TRAINING, FORWARD))
    bench.compare(f"{case.label}, {TRAINING}, over our forward", whole, front, (1.35, 1.15))


def _memory_rows(bench: Bench, case: str) -> None:
    """Record the ratio of peak memory to the unrewritten program's, with and without outputs and gradients."""
    theirs, mine = bench.found(case, "compile"), bench.found(case, "ours")
    for what, field in (
        ("beyond inputs", "peak_bytes"),
        ("beyond inputs, outputs and gradients", "scratch_bytes"),
    ):
        a, b = (getattr(sample, field, None) for sample in (theirs, mine))
        value, note = None, ""
        if a is not None and b is not None:
            value, note = a / max(b, 1), f"{a / MIB:,.0f} MiB / {b / MIB:,.0f} MiB"
        bench.row(f"{case}: peak memory {what}, compile over ours", value, "x", 10, 60, True, note)


def _all_active(bench: Bench, shape: Shape) -> None:
    """Compare forward and backward when every entry is active."""
    case = Case(shape, bench.device, active=None)
    works = {**case.works([FORWARD], ["ours"]), **case.works([TRAINING], ["compile", "ours"])}
    taken = bench.race(_fitting(bench, shape, works))
    name = f"{case.label}, {TRAINING}"
    whole, front = taken[name, "ours"], taken[f"{case.label}, {FORWARD}", "ours"]
    bench.compare(f"{name}, over our forward", whole, front, (2.0, 1.6))
    bench.over(taken, name, "compile", "ours")


def _padding(bench: Bench, shape: Shape) -> None:
    """Compare the forward of half-padded batches with the forward of the same batch without padding."""
    cases = {name: Case(shape, bench.device, padding=name) for name in ("none", "half", "random")}
    works: dict[Label, Work] = {}
    labels: dict[str, Label] = {}
    for name, case in cases.items():
        labels[name] = (f"{shape}, padding {name}, forward", "ours")
        works[labels[name]] = case.work(FORWARD, case.contender("ours"))
    taken = bench.race(works, weigh=False)
    whole = taken[labels["none"]]
    for name, what in (("half", "every length half of S"), ("random", "random lengths")):
        share = 1 - cases[name].mask.float().mean().item()
        mine = taken[labels[name]]
        label = f"{shape} forward, {what}, over the same batch unpadded"
        bench.compare(label, mine, whole, (0.60, 0.52), remark=f", {share:.1%} padding")


def _scratch(bench: Bench, shapes: Sequence[Shape]) -> None:
    """Measure the memory beyond inputs, outputs and gradients."""
    for shape in shapes:
        case = Case(shape, bench.device)
        found = peak_memory(case.work(TRAINING, case.contender("ours")), bench.device).scratch
        allowed = [(each * shape.entries / MIB) + more for each, more in ((12, 256), (8, 64))]
        note = f"{found / shape.entries:.1f} bytes a [B, V] entry"
        what = "peak memory beyond inputs, outputs and gradients"
        bench.row(f"{shape}, {TRAINING}: {what}", found / MIB, "MiB", *allowed, note=note)
        bench.say(f"{shape}: {found / MIB:,.0f} MiB beyond inputs, outputs and gradients")


def _long(bench: Bench) -> None:
    """Compare a training step on long sequences with a step on equally many tokens in short sequences."""
    long, short = Shape(16, 8192, 768, 30522), Shape(256, 512, 768, 30522)
    if bench.quick:
        long, short = Shape(1, 256, 64, 1000), Shape(4, 64, 64, 1000)
    works: dict[Label, Work] = {}
    for shape in (long, short):
        works |= Case(shape, bench.device).works([TRAINING], ["ours"])
    mine, other = bench.race(works).values()
    name = f"{long}, {TRAINING}: time a token, over {short}"
    bench.compare(name, mine, other, (None, 1.1), remark=" for as many tokens")


# --- The CPU's table --------------------------------------------------------------------------------------------------


def _cpu_sections(bench: Bench) -> list[Section]:
    shape = Shape(2, 16, 32, 500) if bench.quick else Shape(8, 256, 384, 30522)

    return [
        part("few_active", _cpu_times, shape),
        part("memory", _cpu_memory, shape),
        part("all_active", _cpu_all_active, shape),
    ]


def _cpu_all_active(bench: Bench, shape: Shape) -> None:
    full = Case(shape, bench.device, active=None)
    taken = bench.race(full.works([TRAINING, INFERENCE], ["compile", "ours"]), 60.0)
    for kind in (TRAINING, INFERENCE):
        bench.over(taken, f"{full.label}, {kind}", "ours", "compile")


def _cpu_times(bench: Bench, shape: Shape) -> None:
    product, flops = gemm(bench.device, bench.quick)
    product_label = ("matrix product for the limit", "torch.mm")
    case = Case(shape, bench.device)
    works = case.works([FORWARD, TRAINING], ["eager", "compile", "ours", "operator"])
    taken = bench.race({product_label: product, **works}, 120.0)
    for kind, limits in ((FORWARD, (1.05, 0.9)), (TRAINING, (0.7, 0.5))):
        bench.over(taken, f"{case.label}, {kind}", "ours", "compile", limits)
    best = max(taken[product_label].per_second(flops), bench.limits.flops)
    rate = taken[f"{case.label}, {FORWARD}", "ours"].per_second(shape.flops)
    note = f"{rate / 1e9:.0f} of {best / 1e9:.0f} GFLOP/s"
    bench.row(f"{shape} forward, share of the GEMM rate", rate / best, higher=True, note=note)


def _cpu_memory(bench: Bench, shape: Shape) -> None:
    """Compare peak resident memory over the inputs, with each contender in a separate process."""
    kinds: Sequence[tuple[str, Limits]] = ((FORWARD, NONE), (TRAINING, (0.25, 0.1)))
    for kind, limits in kinds[1:] if bench.quick else kinds:
        taken = {}
        for name in ("compile", "ours") if bench.quick else ("eager", "compile", "ours"):
            sizes = dataclasses.astuple(shape)
            taken[name] = isolated(step, family=FAMILY, sizes=sizes, name=name, kind=kind)["peak"]
            case = f"{shape}, {kind}, in a process of its own"
            bench.results.samples.append(Sample(case, name, peak_bytes=taken[name]))
            bench.say(f"{case}: {name} peak {taken[name] / MIB:,.0f} MiB")
        mine, theirs = taken["ours"], max(1, taken["compile"])
        bench.row(
            f"{shape}, {kind}: peak memory over the inputs, ours over compile",
            mine / theirs,
            "x",
            *limits,
            note=f"{mine / MIB:,.0f} MiB / {theirs / MIB:,.0f} MiB, outputs and gradients included",
        )


# --- The pass itself --------------------------------------------------------------------------------------------------


def _pass_time(bench: Bench) -> None:
    """Measure the time of the pass on a BERT-base with this head."""
    layers, times = (1, 2) if bench.quick else (12, 6)
    taken = isolated(capture_bert, layers=layers, times=times)
    first, rest = taken["ms"][0], statistics.median(taken["ms"][1:])
    name, note = (
        f"the pass on BERT ({layers} layers) with the head",
        f"graph of {taken['lines']} lines",
    )
    bench.row(f"{name}, first graph of a process", first, "ms", 20, 5, note=note)
    bench.row(f"{name}, later graphs (median)", rest, "ms", 20, 5, note=note)
    bench.say(f"{name}: first {first:.1f} ms, later {rest:.1f} ms")


def capture_bert(layers: int, times: int) -> dict[str, Any]:
    """Return the report's `pass_ms` for several captures of a BERT masked LM with SPLADE pooling.

    This function is meant to be run by `isolated`.
    """
    from transformers import BertConfig, BertForMaskedLM

    from benchmarks.demo.model import Splade

    model = Splade(BertForMaskedLM(BertConfig(num_hidden_layers=layers)))
    ids = torch.randint(0, 30000, (2, 16))
    ms, lines = [], 0
    for _ in range(times):
        with sparse_inductor.enabled(policy="always"):
            found = sparse_inductor.explain(model, ids, torch.ones_like(ids))
        if len(found.report.rewrites) != 1:
            raise NotRewritten(f"the head was not rewritten:\n{found.report}")
        ms.append(found.report.pass_ms)
        lines = sum(len(g.before.splitlines()) for g in found.graphs)
    return {"ms": ms, "lines": lines}


# --- Sweeps -----------------------------------------------------------------------------------------------------------


def _sweeps(bench: Bench) -> None:
    """Measure a training step of the head over B, S and V, varying one size at a time."""
    base, moves = _sweep_sizes(bench)
    bench.results.fixed = dataclasses.asdict(base)
    known: dict[Shape, dict[str, Point]] = {}
    for axis, sizes in moves.items():
        for size in sizes:
            shape = dataclasses.replace(base, **{axis: size})
            if shape not in known:
                known[shape] = {name: _point(bench, shape, name) for name in ("compile", "ours")}
            for point in known[shape].values():
                bench.point(dataclasses.replace(point, axis=axis, at=size))
        bench.save()


def _sweep_sizes(bench: Bench) -> tuple[Shape, dict[str, list[int]]]:
    if bench.quick:
        return Shape(2, 16, 32, 500), {"B": [2], "S": [16], "V": [500]}
    if bench.cuda:
        vocabularies = [8192, 30522, 65536, 128256, 250002]
        moves = {"B": [8, 32, 64, 128, 256], "S": [128, 256, 512, 1024, 2048], "V": vocabularies}
        return Shape(64, 512, 768, 30522), moves
    moves = {"B": [1, 4, 16], "S": [64, 256, 1024], "V": [8192, 30522, 100000]}
    return Shape(4, 256, 384, 30522), moves


def _point(bench: Bench, shape: Shape, name: str) -> Point:
    """Measure a training step at one place of the sweeps."""
    if bench.cuda:
        works = _fitting(bench, shape, Case(shape, bench.device).works([TRAINING], [name]))
        if not works:
            return Point("", 0, name, None, None, "not measured: does not fit")
        return bench.measure_point(str(shape), 0, name, lambda: works.popitem()[1], 0.4)
    if bench.late():
        return Point("", 0, name, None, None, "not measured: out of time")
    how = {"sizes": dataclasses.astuple(shape), "seconds": 0.1 if bench.quick else 3.0}
    found = isolated(step, family=FAMILY, name=name, kind=TRAINING, **how)
    bench.say(f"sweep {shape}: {name} {found['ms']:.4g} ms, peak {found['peak'] / MIB:,.0f} MiB")
    return Point("", 0, name, found["ms"], found["peak"])
