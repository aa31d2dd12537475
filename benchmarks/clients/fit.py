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
    """A step with one batch size. `peak` is the largest total of allocated bytes, or None if the step did not fit."""

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
    """Find the largest batch that fits. Returns all trials that fit, the largest last.

    The first phase grows the batch from `start`: first twofold, then up to eightfold per trial. A line through the last
    two peaks predicts the batch that needs `limit` bytes. A batch is at most `most` and at most 0.97 of the prediction,
    and the phase ends when the next batch would be less than 3 % larger. The second phase tries at most `trials`
    batches near the prediction, each of which halves the interval between a batch that fits and one that does not. If a
    batch of the first phase did not fit, that interval is first halved until its ends are within a factor of two; these
    batches do not count as `trials`. A batch is `start`, `most` or a multiple of `unit`.

    Raises MemoryError if `start` itself does not fit.
    """
    done = [attempt(start)]
    if done[0].peak is None:
        raise MemoryError(f"a batch of {start} does not fit")
    line, batch, failed = 2**40, 2 * start, 0
    while 1.03 * done[-1].batch < batch <= min(most, line):
        tried = attempt(batch)
        if tried.peak is None:
            failed = batch
            break
        done.append(tried)
        line = _line(done, limit)
        batch = min(8 * batch, most, _whole(0.97 * line, unit))
    best = done[-1]
    if failed:
        beyond, candidate = failed, (best.batch + failed) / 2
    else:
        # Near the prediction the allocator decides which batches fit, so batches within 3 % of it are tried.
        beyond, candidate = min(most, round(1.03 * line)) + unit, 0.97 * line
    while trials > 0:
        batch = min(most, _whole(candidate, unit))
        if not best.batch < batch < beyond:
            break
        if not failed or beyond <= 2 * best.batch:
            trials -= 1
        tried = attempt(batch)
        if tried.peak is None:
            beyond = batch
        else:
            best = tried
            done.append(tried)
        candidate = (best.batch + beyond) / 2
    return done


def _whole(batch: float, unit: int) -> int:
    return round(batch) // unit * unit


def _line(done: Sequence[Trial], limit: float) -> int:
    """Return the batch at which the line through the last two peaks reaches the limit."""
    first, last = done[-2], done[-1]
    assert first.peak is not None and last.peak is not None
    slope = (last.peak - first.peak) / (last.batch - first.batch)
    return int(min(2**40, last.batch + (limit - last.peak) / slope)) if slope > 0 else 2**40


def attempt(step: Callable[[int], object], batch: int, device: torch.device) -> Trial:
    """Measure the memory of one step and the time of another, because the first step of a batch may compile."""
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    meter = PeakMeter(device)
    try:
        with meter:
            timed(step, batch, device)
    except torch.OutOfMemoryError:
        return Trial(batch, None, None)
    return Trial(batch, timed(step, batch, device), before + meter.peak)


def timed(step: Callable[[int], object], batch: int, device: torch.device, times: int = 1) -> float:
    """Return the milliseconds per step, over `times` steps from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3 / times


def room(device: torch.device) -> float:
    """Return the bytes that all tensors of this process may take together."""
    if device.type != "cuda":
        return float("inf")
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return float(torch.cuda.mem_get_info()[0] + held + torch.cuda.memory_allocated())
