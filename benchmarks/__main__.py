"""`python -m benchmarks FAMILY`: measure a family of rewrites on this machine and publish the results."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import pkgutil
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def families() -> list[str]:
    """Return the names of the families that can be measured."""
    found = pkgutil.iter_modules([str(HERE / "families")])
    return sorted(m.name for m in found if not m.name.startswith("_"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("family", choices=families(), help="what to measure")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU if any")
    add("--out", type=Path, help="folder for the result files (default: benchmarks/results)")
    add("--quick", action="store_true", help="tiny sizes, to see that it runs; build/benchmarks")
    add("--no-sweep", action="store_true", help="only the tables, not the curves over the sizes")
    add(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="stop comparing sizes after this time (default: 330 on a GPU, 2400 on a CPU)",
    )
    add(
        "--only",
        metavar="PART,...",
        default="",
        help="run these parts; what the result files hold of the others stays (parts: as the files name them)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parse(argv)
    print(f"measuring {options.family}; the first figures take a minute", flush=True)
    import torch

    from . import measure
    from .bench import Bench
    from .publish import Results, aligned, rows_table

    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda, but torch sees no CUDA GPU here", file=sys.stderr)
        return 2
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    results = Results(options.family, _command(argv), measure.machine(device))
    if options.quick:
        results.text.append("Tiny sizes (`--quick`): it runs; the figures mean nothing.")
    out = options.out or (HERE.parent / "build/benchmarks" if options.quick else HERE / "results")
    only = frozenset(filter(None, options.only.split(",")))
    before = out / f"{results.slug}.json"
    if only and before.exists():
        results.keep(Results.read(before), only)
    bench = Bench(
        device,
        results,
        out,
        options.quick,
        not options.no_sweep,
        options.budget if options.budget is not None else 330 if on_gpu else 2400,
        only=only,
    )
    run = importlib.import_module(f".families.{options.family}", __package__).run
    if only:
        plan = dataclasses.replace(
            bench, results=copy.deepcopy(results), ran=set(), failed=[], planning=True
        )
        run(plan)
        if missing := sorted(only - plan.ran):
            what = f"{options.family} has no part {', '.join(missing)}"
            print(f"error: --only: {what}", file=sys.stderr)
            return 2
    run(bench)
    paths = bench.save()
    print("\n" + aligned(rows_table(results.rows)) + "\n")
    print("written: " + ", ".join(path.name for path in paths))
    if bench.failed:
        print(f"FAILED: {', '.join(bench.failed)}", file=sys.stderr)
    return 1 if bench.failed else 0


def _command(argv: Sequence[str] | None) -> str:
    """Return the command as typed, without the output folder, which would reveal a private path."""
    words = list(sys.argv[1:] if argv is None else argv)
    kept = []
    for at, word in enumerate(words):
        if not word.startswith("--out") and (at == 0 or words[at - 1] != "--out"):
            kept.append(word)
    return shlex.join(["python", "-m", "benchmarks", *kept])


if __name__ == "__main__":
    sys.exit(main())
