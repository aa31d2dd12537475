"""The cost of the tools: the import, `explain` on a model, and the number of lines of a pattern."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import sparse_inductor
from benchmarks.bench import Bench
from benchmarks.pages import DOCS


def run(bench: Bench) -> None:
    """Measure everything."""
    bench.section(_import, bench)
    bench.section(_explain, bench)
    bench.section(_lines, bench)


IMPORT = """
import json, time
import torch
started = time.perf_counter()
import sparse_inductor
imported = time.perf_counter()
sparse_inductor.enable()
print(json.dumps([imported - started, time.perf_counter() - imported]))
"""


def _import(bench: Bench) -> None:
    """Measure the import, in separate processes."""
    times = 2 if bench.quick else 9
    found = []
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=120
        )
        found.append([1e3 * t for t in json.loads(done.stdout.splitlines()[-1])])
    first, on = (min(column) for column in zip(*found))
    note = f"least of {times} processes; the first enable() takes {on:.0f} ms more"
    bench.row("import sparse_inductor, beyond import torch", first, "ms", 30, 10, note=note)


def _explain(bench: Bench) -> None:
    """Measure `explain`, its text and its page, less the time in which Dynamo captures the same call."""
    from transformers import BertConfig, BertForMaskedLM

    from benchmarks.demo.model import Splade

    layers = 2 if bench.quick else 12
    model = Splade(BertForMaskedLM(BertConfig(num_hidden_layers=layers))).eval()
    args = torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64)

    def capture() -> None:
        torch.compile(model, backend=lambda gm, inputs: gm.forward)(*args)

    def explained() -> None:
        found = sparse_inductor.explain(model, *args)
        str(found), found.to_html()
        assert found.report.rewrites

    # Processor time of one thread, and the least of several runs, because other programs may be running.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for what in (capture, explained):
            _processor_time(what)  # keeps imports and other first uses out of the measurement
        times = [(_processor_time(explained), _processor_time(capture)) for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    whole, alone = (min(column) for column in zip(*times))
    parameters = sum(p.numel() for p in _parameters(model)) / 1e6
    name = f"explain on BERT ({layers} layers, {parameters:.0f} M parameters), beyond its capture"
    note = f"text and page included; {whole:.2f} s, the capture alone {alone:.2f} s"
    bench.row(name, whole - alone, "s", 3, 1, note=note)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    return list({id(p): p for p in model.parameters()}.values())


def _processor_time(what: Callable[[], None]) -> float:
    torch._dynamo.reset()
    started = time.process_time()
    what()
    return time.process_time() - started


def _lines(bench: Bench) -> None:
    """Count the lines of the documentation's template and its tests, as a newcomer would copy them."""
    page = (DOCS / "how-to" / "write-a-pattern.md").read_text()
    template, test = re.findall(r"```python\n(.*?)```", page, re.S)[:2]
    written = [line for line in (template + test).splitlines() if line.strip()]
    name = "lines of a pattern over an existing operator, tests included"
    bench.row(name, len(written), "lines", 80, 40, note="the first example of Write a pattern")
