"""`python -m benchmarks FAMILY`: measure a family of rewrites on this machine and publish what came out."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pkgutil
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .publish import Results

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Run:
    """What a family's `run` is given."""

    device: torch.device
    results: Results
    quick: bool
    sweep: bool
    deadline: float
    """`time.monotonic()` after which comparisons that cost a compile are left out, and said to be."""
    out: Path
    started: float = dataclasses.field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def late(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self.deadline

    def save(self) -> list[Path]:
        """Write what is known so far."""
        from .publish import write

        return write(self.results, self.out)


def families() -> list[str]:
    """The names of the families that can be measured."""
    return sorted(m.name for m in pkgutil.iter_modules([str(HERE / "families")]) if not m.name.startswith("_"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("family", choices=families(), help="what to measure")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, help="folder for the result files (default: benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs; into build/benchmarks")
    parser.add_argument("--no-sweep", action="store_true", help="only the table, not the curves over the sizes")
    parser.add_argument("--budget", type=float, default=None, metavar="SECONDS",
                        help="leave further comparisons out after this time (default: 330 on a GPU, 2400 on a CPU)")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(argv)
    print(f"measuring {options.family}; the first figures take a minute", flush=True)
    import torch

    from . import measure
    from .publish import Results, aligned, rows_table

    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda, but torch sees no CUDA GPU here", file=sys.stderr)
        return 2
    kind = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    out = options.out or (HERE.parent / "build" / "benchmarks" if options.quick else HERE / "results")
    budget = options.budget if options.budget is not None else 330 if kind == "cuda" else 2400
    results = Results(options.family, _command(argv), measure.machine(device))
    if options.quick:
        results.text.append("Tiny sizes (`--quick`): this shows that it runs, the figures mean nothing.")
    run = Run(device, results, options.quick, not options.no_sweep, time.monotonic() + budget, out)
    importlib.import_module(f".families.{options.family}", __package__).run(run)
    paths = run.save()
    print("\n" + aligned(rows_table(results.rows)) + "\n")
    print("written: " + ", ".join(path.name for path in paths))
    return 0


def _command(argv: Sequence[str] | None) -> str:
    """The command as typed, less the folder: that is nobody's business but the user's."""
    words = list(sys.argv[1:] if argv is None else argv)
    kept = [w for at, w in enumerate(words) if not (w.startswith("--out") or (at and words[at - 1] == "--out"))]
    return shlex.join(["python", "-m", "benchmarks", *kept])


if __name__ == "__main__":
    sys.exit(main())
