"""A table of which instrument catches which planted mistake: verify, the fuzzer, the tests.

    python -m planted.table     (make planted)

The tests compare the program that shows a mistake with itself unrewritten, by `assert_matches_reference`, or by the
fuzzer's comparison for the mistakes in `overlooked`. The fuzzer runs `TRIES` of its programs of the mistake's family.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sys
from collections.abc import Iterator, Sequence

import torch

import sparse_inductor
from fuzz.compare import check
from fuzz.generate import generate
from fuzz.program import Program
from planted import BUGS, PROGRAMS, Bug, program
from planted.overlooked import OVERLOOKED, Overlooked
from sparse_inductor.testing import assert_matches_reference, compile_without_codegen

__all__ = ["Caught", "by_fuzz", "by_tests", "by_verify", "caught"]

SEEDS, TRIES = 2000, 30  # programs drawn at most, and programs run at most


@dataclasses.dataclass(frozen=True)
class Caught:
    """Which instruments catch a mistake; `fuzz` is the seed of the fuzzer's program that does."""

    verify: bool
    fuzz: int | None
    tests: bool

    @property
    def by(self) -> int:
        return self.verify + (self.fuzz is not None) + self.tests


def caught(mistake: Bug | Overlooked, tries: int = TRIES) -> Caught:
    return Caught(by_verify(mistake), by_fuzz(mistake, tries), by_tests(mistake))


def by_verify(mistake: Bug | Overlooked) -> bool:
    if isinstance(mistake, Overlooked):
        with mistake.plant():
            return any(f.kind == "caught" for f in check(mistake.program, verify=True).findings)
    fn, args = program(mistake.program)
    torch._dynamo.reset()
    sparse_inductor.report().clear()
    only = PROGRAMS[mistake.program].pattern
    with mistake.plant(), sparse_inductor.enabled(only=only, verify=True, policy="always"):
        compile_without_codegen(fn)(*args)
    return any(c.verdict == "differs" for c in sparse_inductor.report().checks)


def by_tests(mistake: Bug | Overlooked) -> bool:
    if isinstance(mistake, Overlooked):
        with mistake.plant():
            return bool(check(mistake.program).findings)
    try:
        with mistake.plant():
            assert_matches_reference(*program(mistake.program), aot=False)
    except AssertionError:
        return True
    return False


def by_fuzz(mistake: Bug | Overlooked, tries: int = TRIES) -> int | None:
    """Return the first seed whose program is right without the mistake and wrong with it."""
    for seed, drawn in itertools.islice(_drawn(mistake), tries):
        with mistake.plant():
            found = check(drawn).findings
        if found and _right(drawn):
            return seed
    return None


def _drawn(mistake: Bug | Overlooked) -> Iterator[tuple[int, Program]]:
    """Yield seeds and programs that could show the mistake.

    For `Overlooked` mistakes they are selected by their text, so that they do not depend on the generator's order of
    draws.
    """
    for seed in range(SEEDS):
        if isinstance(mistake, Bug):
            yield seed, generate(seed, (PROGRAMS[mistake.program].pattern,), ())
        else:
            drawn = generate(
                seed, (mistake.family,), mistake.hazards, mistake.values, torch.float32
            )
            if not drawn.autocast and mistake.drawn(drawn):
                yield seed, drawn


_known: dict[str, bool] = {}


def _right(drawn: Program) -> bool:
    if (text := drawn.text()) not in _known:
        _known[text] = not check(drawn).findings
    return _known[text]


def main(names: Sequence[str]) -> int:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    logging.disable(logging.ERROR)
    wanted = [m for m in (*BUGS, *OVERLOOKED) if not names or any(n in m.name for n in names)]
    width = max(len(m.name) for m in wanted) + 2
    print(f"{'mistake':{width}}{'family':18}verify  fuzz (seed)  tests", flush=True)
    twice = 0
    for mistake in wanted:
        family = (
            mistake.family if isinstance(mistake, Overlooked) else PROGRAMS[mistake.program].pattern
        )
        with contextlib.redirect_stderr(None):
            found = caught(mistake)
        twice += found.by >= 2
        fuzz = "-" if found.fuzz is None else f"yes ({found.fuzz})"
        verify, tests = ("yes" if c else "-" for c in (found.verify, found.tests))
        print(f"{mistake.name:{width}}{family:18}{verify:8}{fuzz:13}{tests}", flush=True)
    print(f"{twice} of {len(wanted)} are caught by at least two of the three")
    return 0 if twice == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
