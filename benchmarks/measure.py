"""Measuring: time, peak memory and the machine's own limits. Every family uses this and nothing else.

What is compared is measured in one call of `race`: the contenders take turns, so that a card that grows hot or a
neighbour that wakes up is everybody's. Before each timed call the caches are overwritten.

A GPU's time is the GPU's alone: it is held up until the host has queued the whole call, as in a program that keeps it
busy. How long a call takes that finds the GPU idle, with the host's part, is measured by itself: the latency.
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
    """Median of some rounds, with the quartiles; milliseconds."""

    ms: float
    low: float
    high: float
    rounds: int
    disturbed: bool = False
    """Other programs were running all the time (CPU), or the host's part could not be taken out (GPU)."""
    latency: float | None = None
    """Of a call that finds the GPU idle, from the call to the end of its work; None on a CPU, where it is `ms`."""

    def per_second(self, amount: float) -> float:
        """What `amount` (FLOPs, bytes) comes to in a second."""
        return amount / (self.ms * 1e-3)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Peak of a call over what was allocated before it, and how much of that the call returned; bytes."""

    peak: int
    returned: int

    @property
    def scratch(self) -> int:
        """The peak beyond what is returned: outputs and gradients are not counted."""
        return max(0, self.peak - self.returned)


# --- Time -------------------------------------------------------------------------------------------------------------


def race(
    contenders: Mapping[Name, Work],
    device: torch.device,
    seconds: float = 3.0,
    rounds: tuple[int, int] = (5, 60),
) -> dict[Name, Timing]:
    """Time the contenders in turn, round by round, for about `seconds` and within `rounds`; after two warm-up calls.

    On a CPU a call during which other programs took more than `_OTHERS` of the machine does not count, on a GPU one
    that was queued after the GPU had begun with it, unless a contender is left with fewer than three; then all count
    and its timing is marked as disturbed.
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
    """Medians over some rounds of one call among many that follow each other; milliseconds.

    host_ms: until the host was done with it, on a GPU that is less than `wall_ms` where the GPU is what is waited for.
    """

    wall_ms: float
    host_ms: float


def steady(
    contenders: Mapping[str, Work],
    device: torch.device,
    seconds: float = 1.0,
    rounds: int = 11,
) -> dict[str, Steady]:
    """Wall clock and host time of calls that follow each other, a batch of each contender in turn, so many rounds in
    about `seconds`; after two warm-up calls."""

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
    """Overwrites more than any last-level cache holds (H200: 50 MiB of L2)."""
    size = 256 * MIB if device.type == "cuda" else 64 * MIB
    buffer = torch.empty(size, dtype=torch.int8, device=device)
    return lambda: buffer.zero_()


class _Watch:
    """What was measured of one contender: (ms, whether that counts) a call, and latencies."""

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
    """Each call waits in the GPU's queue, behind a sleep, until the host is done with it.

    A call that makes the host wait for the GPU outlasts any sleep: what the host does afterwards is in its time, and
    the timing is marked. So is one that keeps the host longer than `LONGEST`.
    """

    # Latencies taken, in the first rounds; what the host took of the slowest of them sizes the sleep.
    LATENCIES = 3
    # Of the host's time, and in ms on top: what another call may need more than those.
    MARGIN = 2.0, 0.1
    # ms; a call of more than a few thousand kernels.
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
    """Keep the current stream busy with nothing."""
    torch.cuda._sleep(int(ms * _cycles_per_ms(torch.cuda.current_device())))


@functools.cache
def _cycles_per_ms(device: int) -> float:
    """The rate at which `torch.cuda._sleep` counts; the first sleep wakes the clocks."""
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
        # The kernel counts in steps of 10 ms a core.
        allowed = _OTHERS * taken * (os.cpu_count() or 1) + 0.02
        self._taken.append((taken * 1e3, _others() - others <= allowed))


def host_us(works: Sequence[Work], batches: int, calls: int) -> list[float]:
    """Microseconds that the host takes for a call of each, of work that a GPU has no trouble to keep up with.

    The works take turns, a batch each; the least batch counts, as whatever is above it is other work of the machine.
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
    """Seconds that the machine's cores have spent on anything but this process."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[:8])
    mine = resource.getrusage(resource.RUSAGE_SELF)
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - mine.ru_utime - mine.ru_stime


# --- Memory -----------------------------------------------------------------------------------------------------------


def peak_memory(work: Work, device: torch.device) -> Memory:
    """Peak memory of one call, after two warm-up calls. On the CPU this needs a process of its own: `isolated`."""
    for _ in range(2):
        work()
    meter = PeakMeter(device)
    with meter:
        returned = work()
    return Memory(meter.peak, _bytes_of(returned))


class PeakMeter:
    """`with PeakMeter(device) as m: ...`; afterwards `m.peak` bytes over what was there at the start."""

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
    """Give freed memory back, so that it does not hide what is allocated next (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    return sum(map(_bytes_of, value)) if isinstance(value, (tuple, list)) else 0


# --- The machine's own limits -----------------------------------------------------------------------------------------


def gemm(device: torch.device, quick: bool = False) -> tuple[Work, float]:
    """A square product of random matrices (bf16 8192 cubed on a GPU, fp32 2048 cubed on a CPU), and its FLOPs."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    size = 256 if quick else size
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return (lambda: torch.mm(a, b, out=out)), 2.0 * size**3


def copy(device: torch.device, quick: bool = False) -> tuple[Work, float]:
    """A copy within the device's memory, and the bytes it reads plus writes."""
    size = 1024 * MIB if device.type == "cuda" else 256 * MIB
    size = MIB if quick else size
    source = torch.randint(0, 100, (size,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    return (lambda: target.copy_(source)), 2.0 * size


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured rates: FLOPs and bytes a second."""

    flops: float
    bytes: float

    def ms(self, flops: float, moved: float) -> float:
        """The least time for so much arithmetic and so many bytes."""
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


# --- Processes of their own -------------------------------------------------------------------------------------------

_MARK = "@result "

# For a child's environment: freed blocks go back to the system at once (glibc), so that the resident size is what is
# in use. The threshold is below any tensor that matters.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}


def isolated(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a top-level function in a fresh Python process; arguments and result are JSON-able.

    Raises RuntimeError with the end of what the process said when it fails.
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
    """The other end of `isolated`."""
    import importlib

    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(_MARK + json.dumps(result), flush=True)


# --- What it ran on ---------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, str]:
    """What a reader needs to know about where the numbers come from; nothing that names the machine itself."""
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
    """ "NVIDIA H200", "AMD EPYC"."""
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
