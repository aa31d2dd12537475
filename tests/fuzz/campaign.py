"""Campaigns: many programs are checked in parallel processes, and their results are logged."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TextIO, cast

from torch._inductor import config as inductor

from .compare import Outcome, check
from .generate import FAMILIES, generate
from .program import STAGES, Program
from .shrink import shrunk

__all__ = ["Drawing", "Tally", "campaign", "examine"]

SHARES = {
    "aot": 0.1,
    "codegen": 0.005,
}  # shares of the programs that are compiled up to these stages
SHRINKING = 0.2  # the largest share of the processes' time that is spent on shrinking
# Programs per process. A process ends earlier if a program fails. Dynamo keeps some memory for every program, and a
# program that fails may leave the process in any state.
A_PROCESS = 100


@dataclasses.dataclass
class Failure:
    seed: int
    families: tuple[str, ...]
    hazards: tuple[str, ...]
    findings: list[str]
    text: str


@dataclasses.dataclass
class Tally:
    """The counters of a campaign."""

    programs: int = 0
    invalid: int = 0
    rewritten: int = 0
    stages: Counter[str] = dataclasses.field(default_factory=Counter)
    theirs: int = 0
    made: Counter[str] = dataclasses.field(default_factory=Counter)
    by_family: Counter[str] = dataclasses.field(default_factory=Counter)
    hazards: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    cpu: float = 0.0
    """CPU seconds of the processes, without their start and without shrinking."""

    def add(self, other: Tally) -> None:
        for field in dataclasses.fields(self):
            mine, more = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine + more)

    def __str__(self) -> str:
        share = 100 * self.rewritten / max(1, self.programs)
        lines = [
            f"programs {self.programs} (eager refuses {self.invalid})",
            "compiled to: " + ", ".join(f"{stage} {self.stages[stage]}" for stage in STAGES),
            f"rewritten {self.rewritten} ({share:.0f} %)",
            *(
                f"  {name}: rewritten {self.by_family[name]}, made with {self.made[name]}"
                for name in FAMILIES
            ),
            "hazards: " + ", ".join(f"{name} {n}" for name, n in self.hazards.most_common()),
            f"as plain torch.compile does {self.theirs}",
            f"failures {len(self.failures)}",
        ]
        kinds = Counter(f.findings[0].split(":")[0] for f in self.failures)
        lines += [f"  {kind} {n}" for kind, n in kinds.most_common()]
        return "\n".join(lines)


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Otherwise Inductor starts processes that import torch to test for vector extensions.
    inductor.compile_threads = 1
    inductor.cpp.vec_isa_ok = True
    logging.disable(logging.ERROR)
    torch._dynamo.config.recompile_limit = 1 << 20
    torch._dynamo.config.accumulated_recompile_limit = 1 << 20


def examine(program: Program, shrink: float = 0.0) -> tuple[Outcome, Failure | None]:
    """Check one program, and shrink it for up to `shrink` seconds if it fails."""
    try:
        outcome = check(program)
    except Exception:
        return Outcome([]), _failure(program, ["fuzzer: " + traceback.format_exc()], program)
    if not outcome.findings:
        return outcome, None
    small = program
    if shrink:
        kinds = {f.kind for f in outcome.findings}

        def fails(p: Program) -> bool:
            return bool(kinds & {f.kind for f in check(p).findings})

        small = shrunk(program, fails, shrink)
    found = check(small).findings if small is not program else outcome.findings
    return outcome, _failure(program, [str(f) for f in found or outcome.findings], small)


def _failure(program: Program, findings: list[str], small: Program) -> Failure:
    return Failure(program.seed, program.families, program.hazards, findings, small.text())


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The families of a campaign's programs, and the shares of programs that are compiled further."""

    families: Sequence[str] = tuple(FAMILIES)
    shares: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(SHARES))

    def program(self, seed: int) -> Program:
        """Return the program of a seed, with the last stage whose share selects this seed."""
        turn = [s for s, share in self.shares.items() if share and seed % round(1 / share) == 0]
        program = generate(seed, self.families)
        return dataclasses.replace(program, stage=turn[-1]) if turn else program


def _run(seeds: Sequence[int], drawing: Drawing) -> Tally:
    """Check the programs of these seeds, and stop after one that fails or leaves the process in a bad state."""
    _prepare()
    tally, started = Tally(), time.process_time()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for seed in seeds:
            program = drawing.program(seed)
            outcome, failure = examine(program)
            tally.programs += 1
            tally.stages[program.stage] += 1
            tally.invalid += outcome.invalid
            tally.rewritten += bool(outcome.rewritten)
            tally.theirs += bool(outcome.theirs) and failure is None
            tally.made.update(program.families)
            tally.by_family.update(outcome.rewritten)
            tally.hazards.update(program.hazards or ("none",))
            if failure is not None:
                tally.failures.append(failure)
            if failure is not None or not _as_it_was():
                break
    tally.cpu = time.process_time() - started
    return tally


def _as_it_was() -> bool:
    """Whether the process's modes are in their initial state.

    A compilation that fails within inference_mode or a fake mode leaves the mode on. Dynamo's graph leaves autocast on
    if a function in it raises.
    """
    import torch

    try:
        tensor = torch.randn(1)
        ordinary = type(tensor) is torch.Tensor and not tensor.is_inference()
        ordinary = ordinary and torch.is_grad_enabled()
    except RuntimeError:  # raised where a dispatch key has remained on
        return False
    return ordinary and not torch.is_autocast_enabled("cpu")


def _again(failure: Failure, shrink: float, drawing: Drawing) -> Failure:
    """Reproduce a failure in a new process and shrink it.

    If it does not occur there, it depends on the programs that ran before, and its findings say so.
    """
    _prepare()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        found = examine(drawing.program(failure.seed), shrink)[1]
    findings = ["only after others: " + f for f in failure.findings]
    return found or dataclasses.replace(failure, findings=findings)


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="sparse_inductor-fuzz-")
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _send(to: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    to.send(function(*arguments))


def campaign(
    programs: int,
    first: int,
    processes: int,
    log: TextIO,
    drawing: Drawing | None = None,
    shrink: float = 60.0,
    seconds: float = float("inf"),
) -> Tally:
    """Check `programs` programs, from seed `first` on.

    After `seconds` no new task begins, and the log gives the seed to continue with.
    """
    drawing = drawing or Drawing()
    tally, started, shrinking = Tally(), time.monotonic(), 0.0

    def say(text: str) -> None:
        print(text, file=log, flush=True)

    def elapsed() -> float:
        return time.monotonic() - started

    end = first + programs
    say(
        f"seeds {first} to {end - 1}, {processes} processes, families {', '.join(drawing.families)}"
    )
    todo = deque(range(at, min(at + A_PROCESS, end)) for at in range(first, end, A_PROCESS))
    failed: deque[Failure] = deque()
    context = get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.compare", f"{__package__}.generate"])
    running: dict[Connection, tuple[Any, range | Failure]] = {}

    def begin(task: range | Failure, function: Callable[..., Any], *arguments: Any) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(theirs, function, (*arguments, drawing)))
        process.start()
        theirs.close()
        running[ours] = process, task

    with _own_cache():
        while True:
            while len(running) < processes and (failed or (todo and elapsed() < seconds)):
                if failed:
                    affordable = shrink if shrinking <= SHRINKING * processes * elapsed() else 0.0
                    shrinking += affordable
                    begin(failed[0], _again, failed.popleft(), affordable)
                else:
                    begin(todo[0], _run, todo.popleft())
            if not running:
                break
            ready = cast(Connection, wait(running)[0])
            process, task = running.pop(ready)
            try:
                result = ready.recv()
            except EOFError:
                result = None
            process.join()
            if isinstance(task, Failure):
                failure = result or task
                tally.failures.append(failure)
                say(
                    f"\nFAILED seed {failure.seed}, of {', '.join(failure.families)}; "
                    f"hazards: {', '.join(failure.hazards) or 'none'}"
                )
                say("\n".join(failure.findings[:4]))
                say(failure.text)
            elif result is not None:
                failed += result.failures
                result.failures = []
                tally.add(result)
                if rest := task[result.programs :]:
                    todo.appendleft(rest)
            elif len(task) > 1:  # the process died: run its programs one by one to find the cause
                todo.extendleft(range(seed, seed + 1) for seed in task)
            else:
                died = [f"process: ended with {process.exitcode}"]
                program = drawing.program(task[0])
                tally.programs += 1
                failed.append(_failure(program, died, program))
            say(
                f"[{elapsed():.0f} s] {tally.programs} programs, {tally.rewritten} rewritten, "
                f"{len(tally.failures)} failures"
            )
    say("")
    say(str(tally))
    say(f"seconds {elapsed():.0f}, of processors {tally.cpu:.0f}")
    if todo:
        next_ = min(seeds[0] for seeds in todo)
        say(
            f"not run: {sum(map(len, todo))} programs; go on with --seed {next_} --programs {end - next_}"
        )
    return tally
