"""Measurement of time, peak memory and the machine's own limits. All families use only this module.

Contenders that are compared are measured in one call of `race`. They take turns, so that a GPU that heats up or other
load on the machine affects all of them alike. The caches are overwritten before each timed call.

Times on a GPU exclude host time: the GPU sleeps until the host has queued the whole call, as in a program that keeps
the GPU busy. The latency is measured separately: it is the time of a call that finds the GPU idle, host time included.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import functools
import gc
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parent.parent
MIB = 1024**2

Work = Callable[[], Any]
Name = TypeVar("Name")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median and quartiles over several rounds, in milliseconds."""

    ms: float
    low: float
    high: float
    rounds: int
    disturbed: bool = False
    """Whether too few calls were free of other programs' load (CPU) or of host time (GPU)."""
    latency: float | None = None
    """The time of a call that finds the GPU idle, to the end of its work; None on a CPU, where it equals `ms`."""

    def per_second(self, amount: float) -> float:
        """Return the rate per second for `amount` (FLOPs or bytes) per call."""
        return amount / (self.ms * 1e-3)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Peak memory of a call over the memory allocated before it, and the size of the returned tensors; in bytes."""

    peak: int
    returned: int

    @property
    def scratch(self) -> int:
        """The peak minus the returned tensors, so that outputs and gradients are not counted."""
        return max(0, self.peak - self.returned)


# --- Time -------------------------------------------------------------------------------------------------------------


def race(
    contenders: Mapping[Name, Work],
    device: torch.device,
    seconds: float = 3.0,
    rounds: tuple[int, int] = (5, 60),
) -> dict[Name, Timing]:
    """Time the contenders in turn, round by round, after two warm-up calls.

    The race takes about `seconds`, but at least the first and at most the second number of `rounds`. On a CPU, a call
    does not count if other programs took more than `_OTHERS` of the machine during it. On a GPU, a call does not count
    if the GPU had started it before the host had queued all of it. If fewer than three calls of a contender are left,
    all of its calls count and its timing is marked as disturbed.
    """
    for work in contenders.values():
        for _ in range(2):
            work()
    clear = _cache_sweeper(device)
    watch = _GpuWatch if device.type == "cuda" else _CpuWatch
    watches = {name: watch(work, clear) for name, work in contenders.items()}
    end = time.perf_counter() + seconds
    least, most = rounds
    done = 0
    while done < least or (done < most and time.perf_counter() < end):
        for each in watches.values():
            each.take()
        done += 1
    return {name: each.timing() for name, each in watches.items()}


@dataclasses.dataclass(frozen=True)
class Steady:
    """Medians over several rounds of the time per call, for back-to-back calls; in milliseconds.

    host_ms: the time until the host has queued the call. On a GPU it is less than `wall_ms` if the GPU is the
    bottleneck.
    """

    wall_ms: float
    host_ms: float


def steady(
    contenders: Mapping[str, Work],
    device: torch.device,
    seconds: float = 1.0,
    rounds: int = 11,
) -> dict[str, Steady]:
    """Measure wall clock and host time of back-to-back calls, with a batch of each contender in turn.

    The given number of rounds takes about `seconds`; two warm-up calls precede them.
    """

    def batch(work: Work, calls: int) -> tuple[float, float]:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        queued = time.perf_counter()
        _synchronize(device)
        return (time.perf_counter() - start) * 1e3 / calls, (queued - start) * 1e3 / calls

    for work in contenders.values():
        batch(work, 2)
    most = seconds * 1e3 / (rounds * len(contenders))
    calls = {name: max(1, int(most / batch(work, 3)[0])) for name, work in contenders.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            taken[name].append(batch(work, calls[name]))
    return {
        name: Steady(*(statistics.median(column) for column in zip(*found)))
        for name, found in taken.items()
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cache_sweeper(device: torch.device) -> Work:
    """Return a function that overwrites more memory than any last-level cache holds (H200: 50 MiB of L2)."""
    size = 256 * MIB if device.type == "cuda" else 64 * MIB
    buffer = torch.empty(size, dtype=torch.int8, device=device)
    return lambda: buffer.zero_()


class _Watch:
    """The measurements of one contender: (ms, whether it counts) for each call, and the latencies."""

    def __init__(self, work: Work, clear: Work) -> None:
        self._work, self._clear = work, clear
        self._taken: list[tuple[float, bool]] = []
        self._latencies: list[float] = []

    def take(self) -> None:
        raise NotImplementedError

    def timing(self) -> Timing:
        quiet = [ms for ms, undisturbed in self._taken if undisturbed]
        disturbed = len(quiet) < min(3, len(self._taken))
        values = [ms for ms, _ in self._taken] if disturbed else quiet
        parts = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        )
        low, middle, high = parts
        latency = statistics.median(self._latencies) if self._latencies else None
        return Timing(middle, low, high, len(values), disturbed, latency)


class _GpuWatch(_Watch):
    """Times calls that wait in the GPU's queue, after a sleep kernel, until the host has queued them completely.

    A call that makes the host wait for the GPU outlasts any sleep, so that its time includes the host's later work. The
    same holds for a call that keeps the host busy for longer than `LONGEST`. Such timings are marked as disturbed.
    """

    # The number of latencies, taken in the first rounds. The longest host time among them sets the length of the sleep.
    LATENCIES = 3
    # A factor on that host time and an addend in ms, because a later call may take longer.
    MARGIN = 2.0, 0.1
    # In ms. Only a call of more than a few thousand kernels keeps the host busy for longer.
    LONGEST = 50.0

    def __init__(self, work: Work, clear: Work) -> None:
        super().__init__(work, clear)
        self._host = 0.0

    def take(self) -> None:
        if len(self._latencies) < self.LATENCIES:
            self._from_idle()
        factor, more = self.MARGIN
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._clear()
        _sleep(min(self._host * factor + more, self.LONGEST))
        start.record()
        self._work()
        end.record()
        held = not start.query()
        end.synchronize()
        self._taken.append((start.elapsed_time(end), held))

    def _from_idle(self) -> None:
        self._clear()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._work()
        self._host = max(self._host, (time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        self._latencies.append((time.perf_counter() - start) * 1e3)


def _sleep(ms: float) -> None:
    """Keep the current stream busy for `ms` milliseconds without doing any work."""
    torch.cuda._sleep(int(ms * _cycles_per_ms(torch.cuda.current_device())))


@functools.cache
def _cycles_per_ms(device: int) -> float:
    """Return the rate at which `torch.cuda._sleep` counts. The first of the two sleeps raises the clocks."""
    cycles = 20_000_000
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / start.elapsed_time(end)


class _CpuWatch(_Watch):
    def take(self) -> None:
        self._clear()
        others = _others()
        start = time.perf_counter()
        self._work()
        taken = time.perf_counter() - start
        # The kernel accounts CPU time in steps of 10 ms per core.
        allowed = _OTHERS * taken * (os.cpu_count() or 1) + 0.02
        self._taken.append((taken * 1e3, _others() - others <= allowed))


def host_us(works: Sequence[Work], batches: int, calls: int) -> list[float]:
    """Return the host time per call of each work in microseconds, for works at which the GPU is faster than the host.

    The works take turns with one batch each. The fastest batch counts, because any excess is due to other load on the
    machine.
    """
    for work in works:
        for _ in range(calls):
            work()
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(batches):
        for times, work in zip(taken, works, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                work()
            times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return [min(times) for times in taken]


_OTHERS = 0.1


def _others() -> float:
    """Return the seconds that the machine's cores have spent on anything but this process."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[:8])
    mine = resource.getrusage(resource.RUSAGE_SELF)
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - mine.ru_utime - mine.ru_stime


# --- Memory -----------------------------------------------------------------------------------------------------------


def peak_memory(work: Work, device: torch.device) -> Memory:
    """Measure the peak memory of one call, after two warm-up calls. On a CPU this needs a fresh process: `isolated`."""
    for _ in range(2):
        work()
    meter = PeakMeter(device)
    with meter:
        returned = work()
    return Memory(meter.peak, _bytes_of(returned))


class PeakMeter:
    """A context manager. After the block, `peak` is the peak memory in bytes over the memory in use at the start."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._before = 0
        self.peak = 0

    def __enter__(self) -> PeakMeter:
        gc.collect()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            _trim_heap()
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self._before
        else:
            self.peak = _status("VmHWM") - self._before


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found.group(1)) * 1024 if found else 0


def _trim_heap() -> None:
    """Return freed memory to the system, so that later allocations raise the resident size (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    return sum(map(_bytes_of, value)) if isinstance(value, (tuple, list)) else 0


# --- The machine's own limits -----------------------------------------------------------------------------------------


def gemm(device: torch.device, quick: bool = False) -> tuple[Work, float]:
    """Return a product of random matrices (bf16 8192 cubed on a GPU, fp32 2048 cubed on a CPU) and its FLOPs."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    size = 256 if quick else size
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return (lambda: torch.mm(a, b, out=out)), 2.0 * size**3


def copy(device: torch.device, quick: bool = False) -> tuple[Work, float]:
    """Return a copy within the device's memory and the number of bytes that it reads and writes."""
    size = 1024 * MIB if device.type == "cuda" else 256 * MIB
    size = MIB if quick else size
    source = torch.randint(0, 100, (size,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    return (lambda: target.copy_(source)), 2.0 * size


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured rates, in FLOPs and bytes per second."""

    flops: float
    bytes: float

    def ms(self, flops: float, moved: float) -> float:
        """Return the least time for `flops` FLOPs and `moved` bytes."""
        return max(flops / self.flops, moved / self.bytes) * 1e3


def ceilings(device: torch.device, quick: bool = False) -> Ceilings:
    """Measure both rates, each on its own."""
    product, flops = gemm(device, quick)
    transfer, moved = copy(device, quick)
    seconds = 0.2 if quick else 1.0 if device.type == "cuda" else 5.0
    return Ceilings(
        race({"gemm": product}, device, seconds)["gemm"].per_second(flops),
        race({"copy": transfer}, device, seconds)["copy"].per_second(moved),
    )


# --- Separate processes -----------------------------------------------------------------------------------------------

_MARK = "@result "

# Environment of a child process. glibc then returns freed blocks to the system at once, so that the resident size is
# the memory in use. The threshold is below the size of any tensor that matters.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}


def isolated(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a top-level function in a fresh Python process. Arguments and result must be JSON-serializable.

    Raises RuntimeError with the end of the process's output if it fails.
    """
    env = {**os.environ, **RETURN_MEMORY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        f"{function.__module__}:{function.__qualname__}",
    ]
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not results:
        raise RuntimeError(
            f"{function.__qualname__}({arguments}) failed:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return json.loads(results[-1].removeprefix(_MARK))


def _serve(target: str, arguments: str) -> None:
    """Run the child's side of `isolated`."""
    import importlib

    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(_MARK + json.dumps(result), flush=True)


# --- The machine ------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, str]:
    """Return the hardware and software that the numbers depend on, without anything that identifies the machine."""
    import triton

    facts = {"device": device_name(device)}
    if device.type == "cuda":
        facts["driver"] = _driver()
        facts["CUDA"] = torch.version.cuda or "?"
        facts["memory"] = (
            f"{torch.cuda.get_device_properties(device).total_memory / 1024**3:.0f} GiB"
        )
    else:
        facts["threads"] = str(torch.get_num_threads())
    return {
        **facts,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "Python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def device_name(device: torch.device) -> str:
    """Return the device's name, such as "NVIDIA H200" or "AMD EPYC"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found.group(1).strip() if found else platform.machine()


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(
            asked, capture_output=True, text=True, timeout=20, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "?"


if __name__ == "__main__":
    _serve(*sys.argv[1:])
