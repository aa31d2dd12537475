"""The largest batch that a device's memory holds."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.measure import PeakMeter


@dataclasses.dataclass(frozen=True)
class Trial:
    """A step at one batch; `peak` is all that was allocated at its height, in bytes, None where it did not fit."""

    batch: int
    ms: float | None
    peak: int | None


def largest(
    attempt: Callable[[int], Trial],
    limit: float,
    start: int,
    most: int,
    trials: int = 2,
    unit: int = 16,
) -> list[Trial]:
    """All that was tried, the largest batch that fits last.

    From `start` (at most `most`) on, batches grow for as long as the last two say, in a straight line, that more than
    this one stays below `limit` bytes: twofold, then up to eightfold, not beyond 0.97 of where the line ends. Then at
    most `trials` batches near its end are tried, halving what is unknown. A batch is `start` or a multiple of `unit`.
    Raises MemoryError when `start` itself does not fit.
    """
    done = [attempt(start)]
    if done[0].peak is None:
        raise MemoryError(f"a batch of {start} does not fit")
    end, batch = most, 2 * start
    while 1.03 * done[-1].batch < batch <= end:
        tried = attempt(batch)
        if tried.peak is None:
            end = tried.batch - unit
            break
        done.append(tried)
        end = min(most, _line(done, limit))
        batch = round(min(8 * batch, 0.97 * end)) // unit * unit
    # What fits at the line's end is decided by the allocator: 3 % to either side of it are looked at.
    best, beyond = done[-1], min(most, round(1.03 * end)) + unit
    candidate = min(most, round(0.97 * end))
    for _ in range(trials):
        candidate = candidate // unit * unit
        if not best.batch < candidate < beyond:
            break
        tried = attempt(candidate)
        if tried.peak is None:
            beyond = candidate
        else:
            best = tried
            done.append(tried)
        candidate = (best.batch + beyond) // 2
    return done


def _line(done: Sequence[Trial], limit: float) -> int:
    """The batch at which the line through the last two peaks reaches the limit."""
    first, last = done[-2], done[-1]
    assert first.peak is not None and last.peak is not None
    slope = (last.peak - first.peak) / (last.batch - first.batch)
    return int(min(2**40, last.batch + (limit - last.peak) / slope)) if slope > 0 else 2**40


def attempt(step: Callable[[int], object], batch: int, device: torch.device) -> Trial:
    """Run a step twice (once where it takes longer than two seconds) and weigh it."""
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    meter = PeakMeter(device)
    try:
        with meter:
            ms = timed(step, batch, device)
    except torch.OutOfMemoryError:
        return Trial(batch, None, None)
    if ms < 2e3:
        ms = timed(step, batch, device)
    return Trial(batch, ms, before + meter.peak)


def timed(step: Callable[[int], object], batch: int, device: torch.device, times: int = 1) -> float:
    """Milliseconds of a step, from an idle device to an idle device, over `times` of them."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3 / times


def room(device: torch.device) -> float:
    """Bytes that tensors of this process may take, all together."""
    if device.type != "cuda":
        return float("inf")
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return float(torch.cuda.mem_get_info()[0] + held + torch.cuda.memory_allocated())
