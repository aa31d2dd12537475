"""Runs an example twice, each time in a process of its own: unrewritten, then rewritten; prints both beside each other.

An example is a script with a function that takes the `Side` it runs on and ends with `main(function)`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
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
    """One of the two runs: what it found, by name."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.found: dict[str, float] = {}

    @contextlib.contextmanager
    def clock(self, name: str, times: int = 1) -> Iterator[None]:
        """Milliseconds of a block, divided by `times`."""
        _wait()
        started = time.perf_counter()
        yield
        _wait()
        self.found[f"{name}, ms"] = (time.perf_counter() - started) * 1e3 / times


def sentences() -> list[str]:
    """The texts that come with the repository, a sentence each."""
    lines = (line for path in sorted(TEXTS.glob("*.txt")) for line in path.read_text().splitlines())
    return [line.strip() for line in lines if line.strip()]


def tokenizer(vocabulary: int) -> Any:
    """A lower-casing tokenizer of the words in the texts, the same in every process."""
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
    """The command line of an example."""
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


def _one(run: Callable[[Side], None], options: argparse.Namespace) -> None:
    import torch

    import sparse_inductor

    torch.manual_seed(0)
    side = Side(options.small)
    before = _peak()
    with sparse_inductor.enabled() if options.side == "rewritten" else contextlib.nullcontext():
        run(side)
    side.found["peak over the start, MiB"] = (_peak() - before) / 2**20
    patterns = [r.pattern for r in sparse_inductor.report().rewrites]
    counted = [f"{patterns.count(p)} x {p}" for p in sorted(set(patterns))]
    Path(options.out).write_text(json.dumps({"found": side.found, "patterns": counted}))


def _peak() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
