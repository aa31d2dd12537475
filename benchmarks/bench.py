"""What every family's benchmark does with its work: race it, weigh it, judge it, write it down."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparse_inductor
from sparse_inductor.private_copy import private_copy

from .measure import MIB, Ceilings, Memory, Timing, Work, ceilings, peak_memory, race
from .publish import Cell, Point, Results, Row, Sample, write

Label = tuple[str, str]
"""(case, contender): "B8 S256, forward", "ours"."""
Limits = tuple[float | None, float | None]
"""A floor and a goal."""
NONE: Limits = (None, None)
FORWARD, TRAINING, INFERENCE = "forward", "forward + backward", "inference"
"""What is called; the first is that of a training step: what the backward needs is kept."""


class NotRewritten(RuntimeError):
    """The benchmark would have compared the unrewritten program with itself."""


@dataclasses.dataclass
class Bench:
    """One run on one device."""

    device: torch.device
    results: Results
    out: Path
    quick: bool = False
    sweep: bool = True
    budget: float = float("inf")
    """Seconds after which comparisons of the sweeps are left out, and said to be."""
    started: float = dataclasses.field(default_factory=time.monotonic)
    failed: list[str] = dataclasses.field(default_factory=list)
    only: frozenset[str] = frozenset()
    """The parts that are run; none: all."""
    part: str = ""
    """The one that is running."""
    ran: set[str] = dataclasses.field(default_factory=set)
    planning: bool = False
    """Whether nothing is measured or written: `ran` then tells which parts would be."""
    limits: Ceilings = dataclasses.field(default_factory=lambda: Ceilings(1.0, 1.0))

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def section(self, part: Callable[..., None], *args: Any) -> None:
        """Run one part; where it fails the others still count, and the page and the exit status say so."""
        self.part = part.__name__.strip("_")
        if self.only and self.part not in self.only:
            return
        self.ran.add(self.part)
        if self.planning:
            return
        self.results.ran(self.part)
        name = self.part.replace("_", " ")
        try:
            part(*args)
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.note(f"FAILED: the part `{name}`: {type(error).__name__}: {str(error)[:300]}")
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def sections(self, parts: Iterable[Section]) -> None:
        """Run these, and write what is known after each: whatever happens to the others, it is there."""
        for part in parts:
            self.section(part, self)
            self.save()

    def late(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() - self.started > self.budget

    def save(self) -> list[Path]:
        """Write what is known so far."""
        return [] if self.planning else write(self.results, self.out)

    def measure_limits(self) -> None:
        """The machine's own rates, each alone."""
        self.limits = ceilings(self.device, self.quick)
        what = "bf16 8192 cubed" if self.cuda else "fp32 2048 cubed"
        self.note(
            f"Limits measured in this run: matrix product ({what}) {self.limits.flops / 1e12:.4g} TFLOP/s, "
            f"copy (read + write) {self.limits.bytes / 1e12:.3g} TB/s."
        )
        if self.cuda:
            self.note(
                "Times are the GPU's, from a sweep of its caches to the end of the call: it sleeps until the host has "
                "queued the call, of every contender alike. Latency is that of a call that finds the GPU idle, with "
                "all that the host does first."
            )
        else:
            self.note(
                "Calls during which other programs took more than a tenth of the machine are not counted."
            )

    def note(self, text: str) -> None:
        """A sentence for the page, and for whoever watches."""
        self.results.text.append(text)
        self.say(text)

    def race(
        self, works: Mapping[Label, Work], seconds: float | None = None, weigh: bool = True
    ) -> dict[Label, Timing]:
        """Time all of these in turn, tiny sizes briefly; write each down, and on a GPU its peak memory (`weigh`)."""
        usual = 2.5 if self.cuda else 10.0
        how = (0.2, (2, 3)) if self.quick else (seconds or usual, (5, 40))
        found = race(works, self.device, *how)
        for (case, name), timing in found.items():
            memory = peak_memory(works[case, name], self.device) if self.cuda and weigh else None
            self.sample(case, name, timing, memory)
        return found

    def sample(self, case: str, name: str, timing: Timing, memory: Memory | None = None) -> None:
        """Write one line of the side-by-side table down."""
        peak, scratch = (memory.peak, memory.scratch) if memory else (None, None)
        disturbance = "with host time" if self.cuda else "other programs were running"
        note = disturbance if timing.disturbed else ""
        span = (timing.ms, timing.low, timing.high, timing.rounds)
        sample = Sample(case, name, *span, peak, scratch, note, timing.latency, self.part)
        self.results.samples.append(sample)
        weight = f", peak {peak / MIB:,.0f} MiB" if peak is not None else ""
        after = f", latency {timing.latency:.4g} ms" if timing.latency is not None else ""
        said = f" ({note})" if note else ""
        self.say(f"{case}: {name} {timing.ms:.4g} ms{after}{weight}{said}")

    def left_out(self, case: str, name: str, why: str) -> None:
        """Write down that a contender was not measured."""
        self.results.samples.append(Sample(case, name, note=why, section=self.part))
        self.say(f"{case}: {name} {why}")

    def found(self, case: str, name: str) -> Sample | None:
        """What was measured before."""
        samples = self.results.samples
        return next((s for s in samples if (s.case, s.contender) == (case, name)), None)

    def row(
        self,
        name: str,
        value: float | None,
        unit: str = "",
        floor: float | None = None,
        goal: float | None = None,
        higher: bool = False,
        note: str = "",
    ) -> None:
        """Write one line of the table of floors and goals down; tiny sizes are not judged."""
        if self.quick:
            floor = goal = None
        self.results.rows.append(Row(name, value, unit, floor, goal, higher, note, self.part))

    def compare(
        self,
        name: str,
        a: Timing | None,
        b: Timing | None,
        limits: Limits = NONE,
        higher: bool = False,
        remark: str = "",
    ) -> None:
        """Write down how many times as long `a` takes as `b`."""
        self.row(name, ratio(a, b), "x", *limits, higher, both(a, b) + remark)

    def over(
        self,
        taken: Mapping[Label, Timing],
        case: str,
        a: str,
        b: str,
        limits: Limits = NONE,
        what: str = "",
        remark: str = "",
    ) -> None:
        """The same of two contenders of a case, one of them ours, which is to take less. what: another name for it."""
        first, second = (taken.get((case, name)) for name in (a, b))
        name = f"{case}: time, {what or f'{a} over {b}'}"
        self.compare(name, first, second, limits, a != "ours", remark)

    def measure_point(
        self,
        axis: str,
        at: int,
        name: str,
        make: Callable[[], Work],
        seconds: float,
        weigh: bool = True,
    ) -> Point:
        """A contender at one place of a curve, where there is time left; `make` makes what is called."""
        if self.late():
            return Point(axis, at, name, None, None, "not measured: out of time")
        torch._dynamo.reset()
        gc.collect()
        work = make()
        ms = race({name: work}, self.device, 0.1 if self.quick else seconds, (3, 20))[name].ms
        peak = peak_memory(work, self.device).peak if self.cuda and weigh else None
        self.say(f"sweep {axis} {at}: {name} {ms:.4g} ms")
        return Point(axis, at, name, ms, peak)

    def point(self, point: Point) -> None:
        """Write down one place of a curve."""
        self.results.points.append(dataclasses.replace(point, section=self.part))

    def cell(self, cell: Cell) -> None:
        """Write down one place of a map."""
        self.results.cells.append(dataclasses.replace(cell, section=self.part))
        more = "" if cell.gpu is None else f", GPU {cell.gpu:.3f}, host {cell.host:.2f}"
        self.say(
            f"{cell.map}, {cell.row}, {cell.column}: {cell.wall:.3f}{more} ({cell.note})"
            + ", rewritten" * cell.rewritten
        )


Section = Callable[[Bench], None]
"""A part of a family."""


def part(name: str, run: Callable[..., None], *args: Any, **how: Any) -> Section:
    """The part of this name: `run`, given these after the bench."""

    def section(bench: Bench) -> None:
        run(bench, *args, **how)

    section.__name__ = name
    return section


def both(a: Timing | None, b: Timing | None) -> str:
    """Two times as a remark on their ratio."""
    return f"{a.ms:.4g} ms / {b.ms:.4g} ms" if a and b else ""


def ratio(a: Timing | None, b: Timing | None) -> float | None:
    """How many times as long `a` takes as `b`."""
    return a.ms / b.ms if a and b else None


# --- One call ---------------------------------------------------------------------------------------------------------


def call(
    program: Callable[..., Any],
    inputs: Sequence[Any],
    kind: str,
    wanted: Sequence[Tensor] = (),
    grad: Tensor | Sequence[Tensor] | None = None,
) -> Work:
    """A call of the program. In training it returns the gradients of `wanted` behind the results, whose own gradient is
    `grad`; without one, it is drawn."""

    def inference() -> Any:
        with torch.no_grad():
            return program(*inputs)

    def training() -> tuple[Any, ...]:
        nonlocal grad
        out = program(*inputs)
        if grad is None:
            grad = torch.randn_like(out)
        return *(out if isinstance(out, tuple) else (out,)), *torch.autograd.grad(out, wanted, grad)

    return {
        INFERENCE: inference,
        FORWARD: lambda: program(*inputs),
        TRAINING: training,
    }[kind]


class Case:
    """A module with what it is called with: `inputs`, and in training `wanted` and `grad`, as `call` takes them."""

    pattern: str
    """What rewrites it."""
    label: str
    """For the tables."""
    module: nn.Module
    inputs: Sequence[Tensor]
    wanted: Sequence[Tensor]
    grad: Tensor

    def contender(self, name: str) -> Callable[..., Any]:
        """One way of computing it; nothing is compiled before its first call."""
        if name == "compile":
            return compiled(self.module)
        return rewritten(self.module, self.pattern) if name == "ours" else self.module

    def work(self, kind: str, run: Callable[..., Any]) -> Work:
        """A call of a contender."""
        return call(run, self.inputs, kind, self.wanted, self.grad)

    def works(
        self, kinds: Sequence[str], names: Sequence[str], remark: str = ""
    ) -> dict[Label, Work]:
        """What `Bench.race` takes: each kind of call by each contender."""
        runs = {name: self.contender(name) for name in names}
        return {
            (f"{self.label}{remark}, {kind}", name): self.work(kind, runs[name])
            for kind in kinds
            for name in names
        }


def step(
    family: str, sizes: Sequence[Any], name: str, kind: str, seconds: float = 0.0
) -> dict[str, Any]:
    """Median time (if `seconds`) and peak memory of one contender of a family's case on the CPU, for `isolated`."""
    module, device = importlib.import_module(f"benchmarks.families.{family}"), torch.device("cpu")
    case = module.Case(module.Shape(*sizes), device)
    work = case.work(kind, case.contender(name))
    peak = peak_memory(work, device).peak
    ms = race({name: work}, device, seconds, (3, 20))[name].ms if seconds else None
    return {"peak": peak, "ms": ms}


# --- An unchanged module, unrewritten and rewritten, in one process ---------------------------------------------------


def compiled(module: nn.Module, **how: Any) -> Callable[..., Any]:
    """The module under torch.compile, unrewritten; how: more of torch.compile's arguments."""
    return torch.compile(twin(module), dynamic=False, **how)


def rewritten(module: nn.Module, pattern: str, **how: Any) -> Callable[..., Any]:
    """The module under torch.compile with `pattern` enabled; raises NotRewritten where nothing was.

    The rewriting is on during the first call in each grad mode, which is when it is compiled.
    """
    program = torch.compile(twin(module), dynamic=False, **how)
    seen: set[bool] = set()

    def call(*args: Any) -> Any:
        mode = torch.is_grad_enabled()
        if mode in seen:
            return program(*args)
        before = len(sparse_inductor.report().rewrites)
        with without_advice(), sparse_inductor.enabled(only=pattern, policy="always"):
            out = program(*args)
        if len(sparse_inductor.report().rewrites) == before:
            raise NotRewritten(f"{pattern} was not rewritten:\n{sparse_inductor.report()}")
        seen.add(mode)
        return out

    return call


def twin(module: nn.Module) -> nn.Module:
    """The same parameters in a class with code of its own: Dynamo shares what it compiled for a code object."""
    kind = type(module)
    own: Any = type(kind.__name__, (kind,), {"forward": fresh(kind.forward)})
    made: nn.Module = own.__new__(own)
    made.__dict__.update(module.__dict__)
    return made


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own."""
    return private_copy(function, lambda module, memo: module)[0]


def graphed(work: Work) -> Work:
    """The work as one CUDA graph: what the host costs is not what is measured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> Any:
        _ = work  # the graph reads its tensors
        graph.replay()

    return replay


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Without the warning that something was compiled before: here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sparse_inductor was enabled after")
        yield
