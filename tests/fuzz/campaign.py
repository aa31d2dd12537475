"""Many programs in parallel processes; what they did goes to a log."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TextIO

from .compare import Outcome, check
from .generate import FAMILIES, generate
from .program import STAGES, Program
from .shrink import shrunk

__all__ = ["Tally", "campaign", "examine"]

SHARES = {"aot": 0.1, "codegen": 0.005}  # of the programs that are compiled that far
SHRINKING = 0.2  # of a process's time at most
A_CHUNK = 10  # programs a process is handed at once
A_PROCESS = (
    15  # chunks until a process is replaced by a new one: Dynamo keeps a little of every program
)


@dataclasses.dataclass
class Failure:
    seed: int
    families: tuple[str, ...]
    hazards: tuple[str, ...]
    findings: list[str]
    text: str


@dataclasses.dataclass
class Tally:
    """What a campaign has done so far."""

    programs: int = 0
    invalid: int = 0
    rewritten: int = 0
    stages: Counter[str] = dataclasses.field(default_factory=Counter)
    theirs: int = 0
    made: Counter[str] = dataclasses.field(default_factory=Counter)
    by_family: Counter[str] = dataclasses.field(default_factory=Counter)
    hazards: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)

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
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    logging.disable(logging.ERROR)
    torch._dynamo.config.recompile_limit = 1 << 20
    torch._dynamo.config.accumulated_recompile_limit = 1 << 20


def examine(program: Program, shrink: float = 0.0) -> tuple[Outcome, Failure | None]:
    """Check one program; make a failing one small for so many seconds."""
    outcome = check(program)
    if not outcome.findings:
        return outcome, None
    small = program
    if shrink:
        kinds = {f.kind for f in outcome.findings}

        def fails(p: Program) -> bool:
            return bool(kinds & {f.kind for f in check(p).findings})

        small = shrunk(program, fails, shrink)
    found = check(small).findings if small is not program else outcome.findings
    findings = [str(f) for f in found or outcome.findings]
    failure = Failure(program.seed, program.families, program.hazards, findings, small.text())
    return outcome, failure


def _stage(seed: int, shares: Mapping[str, float]) -> str:
    """Where the program of a seed is compiled to: the last stage whose turn it is."""
    turn = [stage for stage, share in shares.items() if share and seed % round(1 / share) == 0]
    return turn[-1] if turn else STAGES[0]


def _chunk(
    seeds: Sequence[int], families: Sequence[str], shares: Mapping[str, float], shrink: float
) -> Tally:
    _prepare()
    tally, started, shrinking = Tally(), time.monotonic(), 0.0
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for seed in seeds:
            program = dataclasses.replace(generate(seed, families), stage=_stage(seed, shares))
            begun = time.monotonic()
            affordable = shrinking <= SHRINKING * (begun - started)
            try:
                outcome, failure = examine(program, shrink if affordable else 0.0)
            except Exception:
                outcome = Outcome([])
                failure = Failure(
                    seed,
                    program.families,
                    program.hazards,
                    ["fuzzer: " + traceback.format_exc()],
                    program.text(),
                )
            shrinking += time.monotonic() - begun if failure and affordable else 0.0
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
    return tally


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


def campaign(
    programs: int,
    first: int,
    processes: int,
    log: TextIO,
    families: Sequence[str] = tuple(FAMILIES),
    shares: Mapping[str, float] = SHARES,
    shrink: float = 60.0,
    seconds: float = float("inf"),
) -> Tally:
    """Check the programs of seeds `first` on; after `seconds` nothing new is begun, and the log says with which seed
    to go on."""
    tally, started = Tally(), time.monotonic()

    def say(text: str) -> None:
        print(text, file=log, flush=True)

    chunks = [
        range(at, min(at + A_CHUNK, first + programs))
        for at in range(first, first + programs, A_CHUNK)
    ]
    say(
        f"seeds {first} to {first + programs - 1}, {processes} processes, families {', '.join(families)}"
    )
    done: set[int] = set()
    with (
        _own_cache(),
        ProcessPoolExecutor(
            processes, mp_context=get_context("spawn"), max_tasks_per_child=A_PROCESS
        ) as pool,
    ):
        waiting: dict[Any, range] = {}
        at = 0
        while at < len(chunks) or waiting:
            while (
                at < len(chunks)
                and len(waiting) < 2 * processes
                and time.monotonic() - started < seconds
            ):
                waiting[pool.submit(_chunk, chunks[at], families, shares, shrink)] = chunks[at]
                at += 1
            if not waiting:
                break
            future = next(as_completed(waiting))
            seeds = waiting.pop(future)
            try:
                part = future.result()
            except Exception as error:  # a process died
                part = Tally(
                    programs=0,
                    failures=[
                        Failure(
                            seeds[0],
                            (),
                            (),
                            [f"fuzzer: seeds {seeds[0]} to {seeds[-1]}: {error!r}"],
                            "",
                        )
                    ],
                )
            done.update(seeds)
            tally.add(part)
            for failure in part.failures:
                say(
                    f"\nFAILED seed {failure.seed}, of {', '.join(failure.families)}; "
                    f"hazards: {', '.join(failure.hazards) or 'none'}"
                )
                say("\n".join(failure.findings[:4]))
                say(failure.text)
            elapsed = time.monotonic() - started
            say(
                f"[{elapsed:.0f} s] {tally.programs} programs, {tally.rewritten} rewritten, "
                f"{len(tally.failures)} failures"
            )
    missing = sorted(set(range(first, first + programs)) - done)
    say("")
    say(str(tally))
    say(f"seconds {time.monotonic() - started:.0f}")
    if missing:
        say(
            f"not run: {len(missing)} programs; go on with --seed {missing[0]} "
            f"--programs {first + programs - missing[0]}"
        )
    return tally
