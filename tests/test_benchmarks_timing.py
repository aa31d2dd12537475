"""The benchmarks' timing of a GPU, on a simulated GPU with known times and on a real one."""

from __future__ import annotations

import functools
import json
import time

import pytest
import torch

from benchmarks import measure
from benchmarks.bench import Bench
from benchmarks.publish import Results, Sample, samples_table, write

GPU = torch.device("cuda")
US = 1e-6
CYCLES = 1.5e9  # per second


class Machine:
    """A simulated host and GPU with one queue; all clocks are in seconds."""

    def __init__(self) -> None:
        self.now = 0.0  # on the host
        self.queued = 0.0  # when the GPU will be done

    def compute(self, host: float) -> None:
        self.now += host

    def kernel(self, gpu: float, host: float = 0.0) -> None:
        self.now += host
        self.queued = max(self.queued, self.now) + gpu

    def wait(self) -> None:
        self.now = max(self.now, self.queued)

    def event(self, **_: object) -> Event:
        return Event(self)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record(self) -> None:
        self.at = max(self.machine.queued, self.machine.now)

    def query(self) -> bool:
        return self.machine.now >= self.at

    def synchronize(self) -> None:
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine()
    for name, value in (
        ("Event", made.event),
        ("synchronize", made.wait),
        ("current_device", lambda: 0),
        ("_sleep", lambda cycles: made.kernel(cycles / CYCLES)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(measure, "_cache_sweeper", lambda device: lambda: made.kernel(60 * US))
    rate = functools.cache(measure._cycles_per_ms.__wrapped__)
    monkeypatch.setattr(measure, "_cycles_per_ms", rate)
    return made


def timed(work: measure.Work) -> measure.Timing:
    return measure.race({"it": work}, GPU, seconds=0.0, rounds=(5, 5))["it"]


def test_the_host_is_not_in_the_time_but_in_the_latency(machine):
    found = timed(lambda: machine.kernel(gpu=100 * US, host=700 * US))
    assert found.ms == pytest.approx(0.1)
    assert found.latency == pytest.approx(0.8)
    assert not found.disturbed


def test_kernels_queued_one_by_one_take_their_sum(machine):
    def work() -> None:
        for _ in range(12):
            machine.kernel(gpu=10 * US, host=40 * US)

    found = timed(work)
    assert found.ms == pytest.approx(0.12)
    assert found.latency == pytest.approx(0.49)


def test_a_call_that_waits_for_the_gpu_shows_what_the_host_does_then_and_is_marked(machine):
    def work() -> None:
        machine.kernel(gpu=100 * US, host=20 * US)
        machine.wait()
        machine.kernel(gpu=50 * US, host=300 * US)

    found = timed(work)
    assert found.ms == pytest.approx(0.1 + 0.3 + 0.05)
    assert found.disturbed


def test_a_call_that_keeps_the_host_too_long_is_marked(machine):
    found = timed(lambda: machine.kernel(gpu=100 * US, host=2 * measure._GpuWatch.LONGEST * 1e-3))
    assert found.disturbed
    assert found.ms == pytest.approx(measure._GpuWatch.LONGEST, abs=0.2)


def test_a_call_during_which_the_host_was_held_up_does_not_count(machine):
    calls = []

    def work() -> None:
        calls.append(None)
        machine.kernel(gpu=100 * US, host=9000 * US if len(calls) == 8 else 50 * US)

    found = timed(work)
    assert (found.ms, found.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (found.rounds, found.disturbed) == (4, False)


def test_a_gpu_bound_call_is_as_long_as_it_is(machine):
    found = timed(lambda: machine.kernel(gpu=0.02, host=30 * US))
    assert found.ms == pytest.approx(20.0)
    assert found.latency == pytest.approx(20.03)


# --- Output -----------------------------------------------------------------------------------------------------------


def test_latencies_have_a_column_of_their_own_where_there_are_any(tmp_path):
    bench = Bench(torch.device("cpu"), Results("f", "c", {"device": "d"}), tmp_path)
    bench.sample("case", "plain", measure.Timing(1.0, 0.9, 1.1, 5))
    assert "latency, ms" not in samples_table(bench.results.samples)[0]
    bench.sample("case", "ours", measure.Timing(1.0, 0.9, 1.1, 5, latency=1.25))
    head, plain, ours = samples_table(bench.results.samples)
    assert (plain[head.index("latency, ms")], ours[head.index("latency, ms")]) == ("", "1.25")
    files = {p.suffix: p for p in write(bench.results, tmp_path)}
    assert Results.read(files[".json"]) == bench.results


def test_files_written_before_there_were_latencies_are_read(tmp_path):
    path = tmp_path / "old.json"
    old = {"case": "case", "contender": "ours", "ms": 1.0, "note": ""}
    found = {
        "family": "f",
        "command": "c",
        "machine": {},
        "rows": [],
        "samples": [old],
        "points": [],
    }
    path.write_text(json.dumps(found))
    assert Results.read(path).samples == [Sample("case", "ours", 1.0)]
