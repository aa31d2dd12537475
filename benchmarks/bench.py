"""The harness of all families: times contenders, measures their memory, judges the figures and records the results."""

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
"""A pair (case, contender), such as ("B8 S256, forward", "ours")."""
Limits = tuple[float | None, float | None]
"""The floor and the goal of a figure; each is None if it is not set."""
NONE: Limits = (None, None)
FORWARD, TRAINING, INFERENCE = "forward", "forward + backward", "inference"
"""The kinds of calls. FORWARD is the forward of a training step, which saves tensors for the backward."""


class NotRewritten(RuntimeError):
    """Raised when a contender was not rewritten as expected, so that the comparison would be meaningless."""


@dataclasses.dataclass
class Bench:
    """One benchmark run on one device."""

    device: torch.device
    results: Results
    out: Path
    quick: bool = False
    sweep: bool = True
    budget: float = float("inf")
    """Seconds after which optional measurements, such as sweeps, are skipped; see `late`."""
    started: float = dataclasses.field(default_factory=time.monotonic)
    failed: list[str] = dataclasses.field(default_factory=list)
    only: frozenset[str] = frozenset()
    """The parts to run; an empty set means all parts."""
    part: str = ""
    """The name of the running part."""
    ran: set[str] = dataclasses.field(default_factory=set)
    planning: bool = False
    """If true, nothing is measured or written, and `ran` collects the parts that a real run would measure."""
    limits: Ceilings = dataclasses.field(default_factory=lambda: Ceilings(1.0, 1.0))

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        """Print progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def section(self, part: Callable[..., None], *args: Any) -> None:
        """Run one part. If it fails, the other parts still count; the page and the exit status report the failure."""
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
        """Run the parts, and write the results after each, so that a later failure cannot lose them."""
        for part in parts:
            self.section(part, self)
            self.save()

    def late(self) -> bool:
        """Whether the time budget is used up."""
        return time.monotonic() - self.started > self.budget

    def save(self) -> list[Path]:
        """Write the results so far; return the paths of the files."""
        return [] if self.planning else write(self.results, self.out)

    def measure_limits(self) -> None:
        """Measure the machine's rates of a matrix product and of a copy, each alone."""
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
        """Add a sentence to the page and print it."""
        self.results.text.append(text)
        self.say(text)

    def race(
        self, works: Mapping[Label, Work], seconds: float | None = None, weigh: bool = True
    ) -> dict[Label, Timing]:
        """Time the contenders in turn (briefly with `quick`) and record the timings.

        With `weigh`, also record the peak memory of each contender on a GPU.
        """
        usual = 2.5 if self.cuda else 10.0
        how = (0.2, (2, 3)) if self.quick else (seconds or usual, (5, 40))
        found = race(works, self.device, *how)
        for (case, name), timing in found.items():
            memory = peak_memory(works[case, name], self.device) if self.cuda and weigh else None
            self.sample(case, name, timing, memory)
        return found

    def sample(self, case: str, name: str, timing: Timing, memory: Memory | None = None) -> None:
        """Record one line of the side-by-side table."""
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
        """Record that a contender was not measured."""
        self.results.samples.append(Sample(case, name, note=why, section=self.part))
        self.say(f"{case}: {name} {why}")

    def found(self, case: str, name: str) -> Sample | None:
        """Return the latest measurement of a contender, or None. Results of earlier runs come first."""
        samples = reversed(self.results.samples)
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
        """Record one line of the table of floors and goals. Tiny sizes (`quick`) are not judged."""
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
        """Record the time of `a` over the time of `b`."""
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
        """Record the time of contender `a` over the time of contender `b`, for one case.

        One of the two is "ours", which should take less time. what: a description to use instead of "a over b".
        """
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
        """Measure a contender at one place of a sweep, if there is time left. `make` returns the work to measure."""
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
        """Record one place of a sweep."""
        self.results.points.append(dataclasses.replace(point, section=self.part))

    def cell(self, cell: Cell) -> None:
        """Record one place of a map."""
        self.results.cells.append(dataclasses.replace(cell, section=self.part))
        more = "" if cell.gpu is None else f", GPU {cell.gpu:.3f}, host {cell.host:.2f}"
        self.say(
            f"{cell.map}, {cell.row}, {cell.column}: {cell.wall:.3f}{more} ({cell.note})"
            + ", rewritten" * cell.rewritten
        )


Section = Callable[[Bench], None]
"""A part of a family, as a function of the bench."""


def part(name: str, run: Callable[..., None], *args: Any, **how: Any) -> Section:
    """Return a part with this name, which calls `run` with the bench and the given arguments."""

    def section(bench: Bench) -> None:
        run(bench, *args, **how)

    section.__name__ = name
    return section


def both(a: Timing | None, b: Timing | None) -> str:
    """Format two times as a remark on their ratio."""
    return f"{a.ms:.4g} ms / {b.ms:.4g} ms" if a and b else ""


def ratio(a: Timing | None, b: Timing | None) -> float | None:
    """Return the time of `a` over the time of `b`, or None if either is missing."""
    return a.ms / b.ms if a and b else None


# --- One call ---------------------------------------------------------------------------------------------------------


def call(
    program: Callable[..., Any],
    inputs: Sequence[Any],
    kind: str,
    wanted: Sequence[Tensor] = (),
    grad: Tensor | Sequence[Tensor] | None = None,
) -> Work:
    """Return a call of the program.

    In training, the call returns the results followed by the gradients of `wanted`. `grad` is the gradient of the
    results; if it is None, a random one is drawn at the first call.
    """

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
    """A module and the arguments of `call` for it: `inputs`, and for training `wanted` and `grad`."""

    pattern: str
    """The pattern that rewrites the module."""
    label: str
    """The name of the case in the tables."""
    module: nn.Module
    inputs: Sequence[Tensor]
    wanted: Sequence[Tensor]
    grad: Tensor

    def contender(self, name: str) -> Callable[..., Any]:
        """Return one way of computing the case. Nothing is compiled before its first call."""
        if name == "compile":
            return compiled(self.module)
        return rewritten(self.module, self.pattern) if name == "ours" else self.module

    def work(self, kind: str, run: Callable[..., Any]) -> Work:
        """Return a call of a contender."""
        return call(run, self.inputs, kind, self.wanted, self.grad)

    def works(
        self, kinds: Sequence[str], names: Sequence[str], remark: str = ""
    ) -> dict[Label, Work]:
        """Return the works for `Bench.race`: each kind of call by each contender."""
        runs = {name: self.contender(name) for name in names}
        return {
            (f"{self.label}{remark}, {kind}", name): self.work(kind, runs[name])
            for kind in kinds
            for name in names
        }


def step(
    family: str, sizes: Sequence[Any], name: str, kind: str, seconds: float = 0.0
) -> dict[str, Any]:
    """Measure one contender of a family's case on the CPU: peak memory and, if `seconds` is not 0, the median time.

    This function is meant to be run by `isolated`.
    """
    module, device = importlib.import_module(f"benchmarks.families.{family}"), torch.device("cpu")
    case = module.Case(module.Shape(*sizes), device)
    work = case.work(kind, case.contender(name))
    peak = peak_memory(work, device).peak
    ms = race({name: work}, device, seconds, (3, 20))[name].ms if seconds else None
    return {"peak": peak, "ms": ms}


# --- An unchanged module, unrewritten and rewritten, in one process ---------------------------------------------------


def compiled(module: nn.Module, **how: Any) -> Callable[..., Any]:
    """Compile the module without rewrites. how: further arguments of torch.compile."""
    return torch.compile(twin(module), dynamic=False, **how)


def rewritten(module: nn.Module, pattern: str, **how: Any) -> Callable[..., Any]:
    """Compile the module with `pattern` enabled.

    The pattern is enabled only during the first call in each grad mode, which compiles the module. That call raises
    NotRewritten if nothing was rewritten.
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
    """Return a module with the same parameters but a separate code object, because Dynamo caches by code object."""
    kind = type(module)
    own: Any = type(kind.__name__, (kind,), {"forward": fresh(kind.forward)})
    made: nn.Module = own.__new__(own)
    made.__dict__.update(module.__dict__)
    return made


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of the function with a separate code object."""
    return private_copy(function, lambda module, memo: module)[0]


def graphed(work: Work) -> Work:
    """Capture the work in a CUDA graph and return its replay, so that host time is not measured."""
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
        _ = work  # keeps the tensors alive that the graph reads
        graph.replay()

    return replay


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Suppress the warning that code was compiled before sparse_inductor was enabled; here this is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sparse_inductor was enabled after")
        yield
