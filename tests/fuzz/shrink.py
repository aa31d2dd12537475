"""Shrinks a failing program: removes steps, hazards and settings as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from .program import STAGES, Program, Step

__all__ = ["shrunk"]

SPECIAL = ("weight", "integers", "nan", "infinite", "huge", "repeated", "zeros")

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, seconds: float = 120.0) -> Program:
    """Return a smaller program that `fails`, too."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for smaller in _smaller(program):
            if time.monotonic() > end:
                break
            if smaller != program and fails(smaller):
                program = smaller
                break
        else:
            break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield smaller programs, those with the largest reductions first."""
    yield from _calls(program)
    for at in range(len(program.returns)) if len(program.returns) > 1 else ():
        yield _live(
            dataclasses.replace(program, returns=program.returns[:at] + program.returns[at + 1 :])
        )
    for at in range(len(program.returns)) if len(program.returns) > 2 else ():
        yield _live(dataclasses.replace(program, returns=program.returns[at : at + 1]))
    makers = {n: s for s in program.steps for n in s.stores}
    for at, name in enumerate(program.returns):
        for earlier in makers[name].loads if name in makers else ():
            if earlier in makers:
                others = (*program.returns[:at], earlier, *program.returns[at + 1 :])
                yield _live(dataclasses.replace(program, returns=tuple(dict.fromkeys(others))))
    for at, step in enumerate(program.steps):
        if (without := _without(program, at)) is not None:
            yield without
        if step.within is not None or step.part is not None:
            bare = dataclasses.replace(step, within=None, part=None)
            yield _with_step(program, at, bare)
    for field, value in (
        ("dynamic", None),
        ("autocast", False),
        ("training", False),
        ("stage", STAGES[0]),
    ):
        if getattr(program, field) != value:
            inputs = program.inputs
            if field == "training":
                inputs = tuple(dataclasses.replace(i, grad=False) for i in inputs)
            yield dataclasses.replace(program, inputs=inputs, **{field: value})
    for at, given in enumerate(program.inputs):
        plain = {"dtype": torch.float32} if given.dtype.is_floating_point else {}
        special = given.values in SPECIAL and not program.exact
        ordinary = {"values": "normal"} if special else {}
        for change in (plain, ordinary, {"grad": False}):
            plainer = dataclasses.replace(given, **change)
            if plainer != given:
                inputs = program.inputs[:at] + (plainer,) + program.inputs[at + 1 :]
                yield dataclasses.replace(program, inputs=inputs)
    if len({i.dtype for i in program.inputs if i.dtype.is_floating_point}) == 1:
        same = tuple(
            dataclasses.replace(i, dtype=torch.float32) if i.dtype.is_floating_point else i
            for i in program.inputs
        )
        yield dataclasses.replace(program, inputs=same)


def _calls(program: Program) -> Iterator[Program]:
    if len(program.sizes) > 1:
        for one in program.sizes:
            yield dataclasses.replace(program, sizes=(one,))


def _with_step(program: Program, at: int, step: Step) -> Program:
    return dataclasses.replace(
        program, steps=program.steps[:at] + (step,) + program.steps[at + 1 :]
    )


def _without(program: Program, at: int) -> Program | None:
    """Return the program without one step, whose `instead` replaces its result, or None if that is impossible."""
    step, steps, returns = program.steps[at], list(program.steps), list(program.returns)
    later = {n for s in steps[at + 1 :] for n in s.loads} | set(returns)
    needed = [n for n in step.stores if n in later and n not in step.loads]
    if needed:
        if step.instead is None or len(needed) > 1 or step.instead == needed[0]:
            return None
        steps = steps[: at + 1] + [s.renamed(needed[0], step.instead) for s in steps[at + 1 :]]
        returns = [step.instead if n == needed[0] else n for n in returns]
    del steps[at]
    returns = list(dict.fromkeys(returns))
    return _live(dataclasses.replace(program, steps=tuple(steps), returns=tuple(returns)))


def _live(program: Program) -> Program:
    """Remove steps whose results are unused, except writes, and unused inputs."""
    steps = list(program.steps)
    read = set(program.returns)
    for at in reversed(range(len(steps))):
        step = steps[at]
        if step.stores and not (set(step.stores) & read) and not _writes(step):
            del steps[at]
        else:
            read |= set(step.loads)
    inputs = tuple(i for i in program.inputs if i.name in read)
    return dataclasses.replace(program, steps=tuple(steps), inputs=inputs)


def _writes(step: Step) -> bool:
    return "inplace=True" in step.text or "_(" in step.text or "out=" in step.text
