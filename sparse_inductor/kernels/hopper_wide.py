"""Products of as many columns as a tile has, in Gluon, whose tensors have powers of two.

A wgmma multiplies by any multiple of 8 columns, up to 256. Gluon makes a product of 208 of three, of 128, 64 and 16,
each of which reads all of the first operand: 8 % more in all. So a kernel marks products of the same rows by
columns that follow each other in shared memory, and what it compiles to has one in their place: this is done between
two of Triton's stages, to the PTX. Marks are comments. What a kernel makes is the same with and without this; where
Triton cannot be asked, or writes something else than is known here, it takes longer.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat.triton import compiled_text_edited
from .gluon_names import say

__all__ = ["Widened", "begin_wide", "completing", "end_wide", "widened"]

log = logging.getLogger(__name__)

_WGMMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(k16\.f32\.\w+\.\w+) "
    r"\{([^}]*)\}, ([^,{}]+|\{[^}]*\}), ([^,]+), (.*);"
)
_FENCE, _COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
_WAIT = re.compile(r"(wgmma\.wait_group\.sync\.aligned )(\d+);")


class _Product(NamedTuple):
    """columns; kind: of its operands; sums: registers; first, second: operands; how: predicate, signs and strides."""

    line: int
    columns: int
    kind: str
    sums: list[str]
    first: str
    second: str
    how: str


def _products(lines: list[str], begin: int, end: int) -> list[_Product]:
    found = []
    for i in range(begin, end):
        if (m := _WGMMA.search(lines[i])) is not None:
            sums = m[3].replace(" ", "").split(",")
            found.append(_Product(i, int(m[1]), m[2], sums, m[4].strip(), m[5].strip(), m[6]))
    return found


class _Left(Exception):
    """Why products are left as they are."""


def _join(lines: list[str], begin: int, end: int) -> int:
    """Make those of some lines one for each step of the first operand; of how many parts they were."""
    found = _products(lines, begin, end)
    steps = list(dict.fromkeys(p.first for p in found))
    by_step = [[p for p in found if p.first == first] for first in steps]
    parts = list(zip(*by_step))
    if len({len(step) for step in by_step}) != 1 or [p for part in parts for p in part] != found:
        raise _Left("parts do not follow each other, each of the same rows")
    if len({p.kind for p in found}) != 1 or any(
        len({p.how for p in step}) != 1 for step in by_step
    ):
        raise _Left("parts are not made in the same way")
    if any(len({tuple(p.sums) for p in part}) != 1 for part in parts):
        raise _Left("a part's steps have several sums")
    columns = sum(part[0].columns for part in parts)
    if columns > 256:
        raise _Left(f"{columns} columns")
    held = {register for part in parts for register in part[0].sums}
    of_products = {p.line for p in found}
    for i in range(found[0].line, found[-1].line):
        if i not in of_products and held & set(re.findall(r"%\w+", lines[i])):
            raise _Left(f"sums are used between parts: {lines[i].strip()}")
    sums = ",".join(register for part in parts for register in part[0].sums)
    for p in parts[0]:
        lines[p.line] = (
            f"\twgmma.mma_async.sync.aligned.m64n{columns}{p.kind} {{{sums}}}, {p.first}, {p.second}, {p.how};"
        )
    for part in parts[1:]:
        for p in part:
            lines[p.line] = ""
    for once in (_FENCE, _COMMIT):
        places = [i for i in range(begin, end) if once in lines[i]]
        if len(places) != len(parts):
            raise _Left(f"{len(places)} times {once}")
        for i in places[1:]:
            lines[i] = ""
    return len(parts)


def _widened(lines: list[str]) -> None:
    begin = None
    counts = set()
    for i, line in enumerate(lines):
        if BEGIN.value in line:
            begin = i
        elif END.value in line:
            if begin is None:
                raise _Left("marks are not in order")
            counts.add(_join(lines, begin, i))
            begin = None
        elif begin is None and _WGMMA.search(line) is not None:
            raise _Left("products beside them are not marked")
    if begin is not None or len(counts) != 1:
        raise _Left(f"marks are not in order, or of different numbers of parts: {counts}")
    # What is waited for is a part's products, then those of all parts.
    (count,) = counts
    for i, line in enumerate(lines):
        if (m := _WAIT.search(line)) is not None:
            if int(m[2]) % count:
                raise _Left(f"{line.strip()} for some of {count} parts")
            lines[i] = f"{line[: m.start()]}{m[1]}{int(m[2]) // count};"


def widened(ptx: str) -> str:
    """PTX with one product in the place of all that are between two marks; as it is, if one of them does not allow
    it."""
    if BEGIN.value not in ptx:
        return ptx
    lines = ptx.split("\n")
    try:
        _widened(lines)
    except _Left as why:
        log.warning("A kernel's products are left in parts, which takes longer: %s", why)
        return ptx
    return "\n".join(lines)


# Compiled kernels are kept by what their source has, and so by how their products are joined.
_HOW = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:8]
BEGIN = gl.constexpr(f"// one product {_HOW} of")
END = gl.constexpr(f"// one product {_HOW} up to")


@gluon.jit
def begin_wide():
    """The products from here to `end_wide` are parts of one: of the same rows, by columns that follow each other."""
    say(BEGIN)


@gluon.jit
def end_wide():
    say(END)


def completing() -> contextlib.AbstractContextManager[bool]:
    """Kernels that are compiled in the block have their marked products joined."""
    return compiled_text_edited("ptx", _HOW, widened)


class Widened:
    """Decorates a kernel: launched and compiled as any other one, its marked products joined."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        run = self.kernel[grid]

        def compiling(*args: Any, **named: Any) -> Any:
            with completing():
                return run(*args, **named)

        return compiling
