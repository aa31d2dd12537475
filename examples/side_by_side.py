"""Runs an example twice, unrewritten and rewritten, in separate processes, and prints the results side by side.

An example is a script that defines a function of a `Side` and ends with `main(function)`. Timed code has run before, so
that times do not include compilation. A time is the median of several runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "benchmarks" / "text"

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class Side:
    """One of the two runs, with its results by name."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.found: dict[str, float] = {}
        self._taken: dict[str, list[float]] = {}
        self._others = self._seconds = 0.0

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Time a block. If several blocks have the same name, their median counts."""
        _wait()
        others, started = _others(), time.perf_counter()
        yield
        _wait()
        taken = time.perf_counter() - started
        self._seconds += taken
        self._others += _others() - others
        self._taken.setdefault(name, []).append(taken * 1e3)
        self.found[f"{name}, ms"] = statistics.median(self._taken[name])

    def repeat(self, name: str, work: Callable[[], Any], times: int = 5) -> Any:
        """Time `work` and return its result.

        It first runs twice untimed, because it compiles, and may recompile when sizes become symbolic. Then it runs
        `times` times timed.
        """
        for _ in range(2):
            work()
        for _ in range(times):
            with self.clock(name):
                result = work()
        return result

    @property
    def share_of_others(self) -> float:
        """The share of this machine's cores that other programs took during the timed blocks."""
        return self._others / (self._seconds * (os.cpu_count() or 1)) if self._seconds else 0.0


def sentences() -> list[str]:
    """Return the sentences of the texts in the repository."""
    lines = (line for path in sorted(TEXTS.glob("*.txt")) for line in path.read_text().splitlines())
    return [line.strip() for line in lines if line.strip()]


def tokenizer(vocabulary: int) -> Any:
    """Return a lower-casing tokenizer of the words in the texts, which is the same in every process."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Whitespace()
    words = {word.lower() for line in sentences() for word, _ in split.pre_tokenize_str(line)}
    listed = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)][:vocabulary]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(listed)}, "[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), split
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def main(run: Callable[[Side], None]) -> None:
    """Run the command line of an example."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--side", choices=("unrewritten", "rewritten"), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        _one(run, options)
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("unrewritten", "rewritten"):
            print(f"{side} ...", flush=True)
            out = Path(folder, side)
            command = [sys.executable, sys.argv[0], "--side", side, "--out", str(out)]
            subprocess.run(command + ["--small"] * options.small, check=True)
            results[side] = json.loads(out.read_text())
    before, after = results["unrewritten"], results["rewritten"]
    print(f"\n{'':34}{'unrewritten':>14}{'rewritten':>14}{'ratio':>8}")
    for name, old in before["found"].items():
        new = after["found"][name]
        share = f"{old / new:.2f}" if new and name.endswith((", ms", ", MiB")) else ""
        print(f"{name:34}{old:14.5g}{new:14.5g}{share:>8}")
    print(f"\nrewritten: {', '.join(after['patterns']) or 'nothing'}")
    if (others := max(r["others"] for r in results.values())) > 0.1:
        print(f"Other programs took {others:.0%} of the machine meanwhile: the times say little.")
    if options.small:
        print("Tiny sizes (--small): it runs; what is rewritten pays from larger ones on.")


def _one(run: Callable[[Side], None], options: argparse.Namespace) -> None:
    import torch

    import sparse_inductor

    torch.manual_seed(0)
    side = Side(options.small)
    before = _peak()
    with (
        sparse_inductor.enabled(policy="always")
        if options.side == "rewritten"
        else contextlib.nullcontext()
    ):
        run(side)
    side.found["peak over the start, MiB"] = (_peak() - before) / 2**20
    patterns = [r.pattern for r in sparse_inductor.report().rewrites]
    counted = [f"{patterns.count(p)} x {p}" for p in sorted(set(patterns))]
    found = {"found": side.found, "patterns": counted, "others": side.share_of_others}
    Path(options.out).write_text(json.dumps(found))


def _peak() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _others() -> float:
    """Return the seconds that the machine's cores have spent on other programs so far, or 0 without /proc/stat."""
    try:
        spent = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, spent)
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return busy - mine.ru_utime - mine.ru_stime


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
