"""python -m tests.fuzz: see `--help`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TextIO


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description="Random programs, rewritten and not."
    )
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=0, help="the first one; those that follow are its successors"
    )
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--families", default="", help="names, with commas")
    parser.add_argument(
        "--aot", type=float, default=0.1, help="share that goes through AOTAutograd"
    )
    parser.add_argument(
        "--codegen", type=float, default=0.005, help="share compiled by Inductor to the end"
    )
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds to make a failing program small"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing new after that many"
    )
    parser.add_argument("--log", default="", help="a file; everything is printed as well")
    parser.add_argument(
        "--show", action="store_true", help="print the program of --seed and what becomes of it"
    )
    options = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from .campaign import Drawing, campaign, examine
    from .generate import FAMILIES

    families = tuple(options.families.split(",")) if options.families else tuple(FAMILIES)
    drawing = Drawing(families, {"aot": options.aot, "codegen": options.codegen})
    if options.show:
        program = drawing.program(options.seed)
        print(program.text())
        outcome, failure = examine(program, options.shrink)
        print("rewritten:", ", ".join(sorted(outcome.rewritten)) or "nothing")
        print("\n".join([*failure.findings, failure.text] if failure else ["nothing differs"]))
        return 1 if failure else 0
    with open(options.log, "w") if options.log else open(os.devnull, "w") as file:
        tally = campaign(
            options.programs,
            options.seed,
            options.processes,
            _Both(file),
            drawing,
            options.shrink,
            options.seconds,
        )
    return 1 if tally.failures else 0


class _Both:
    """Writes to a file and to the terminal."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, text: str) -> int:
        sys.stdout.write(text)
        return self.file.write(text)

    def flush(self) -> None:
        sys.stdout.flush()
        self.file.flush()


if __name__ == "__main__":
    sys.exit(main())
