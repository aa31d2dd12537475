"""Steps: the elementwise program between a matmul and the reduction that ends it.

A program is a tuple of `Step`. The matcher creates it, `ranges` proves its properties, and the operators execute it:
one representation for all three. An operator's `steps` argument, which a reader of the graph sees, holds its text form:

    "mul(0.125) | row_where(0, -inf) | relu | log1p"

A scalar step maps the running value y to fn(y, *constants). A row step combines y with a per-row operand
r[i] of shape [..., S] (one number for each token, broadcast over the columns):

    row_add(i)         y + r[i]
    row_mul(i)         y * r[i]
    row_where(i, c)    y where r[i] != 0, else the constant c
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .functions import SCALAR

ROW: dict[str, int] = {"row_add": 0, "row_mul": 0, "row_where": 1}


@dataclasses.dataclass(frozen=True)
class Step:
    """One elementwise step: a name of `SCALAR` or `ROW`, its constants, and for a row step its operand."""

    fn: str
    consts: tuple[float, ...] = ()
    row: int | None = None

    def __post_init__(self) -> None:
        if self.fn in SCALAR:
            arity, takes_row = SCALAR[self.fn].arity, False
        elif self.fn in ROW:
            arity, takes_row = ROW[self.fn], True
        else:
            known = ", ".join([*SCALAR, *ROW])
            raise ValueError(f"unknown step {self.fn!r}; known steps: {known}")
        if len(self.consts) != arity:
            raise ValueError(f"step {self.fn!r} takes {arity} constants, got {self.consts!r}")
        if takes_row != (self.row is not None):
            raise ValueError(f"step {self.fn!r}: row operand index is {self.row!r}")

    def __str__(self) -> str:
        args = ([] if self.row is None else [str(self.row)]) + [repr(float(c)) for c in self.consts]
        return f"{self.fn}({', '.join(args)})" if args else self.fn


Program = tuple[Step, ...]


def render(program: Sequence[Step]) -> str:
    """Return the text form of a program; `parse` is its inverse."""
    return " | ".join(map(str, program))


def scalar_steps(program: Sequence[Step]) -> Program:
    """Return a program without its row steps."""
    return tuple(s for s in program if s.fn not in ROW)


_MINUS = Step("mul", (-1.0,))
_MIRRORED = {
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "maximum": "minimum",
    "minimum": "maximum",
}


def simplified(program: Sequence[Step]) -> Program:
    """Return a program without pairs of sign changes that cancel: -min(-x, 0) is max(x, 0), also at a tie."""
    if program[-1:] != (_MINUS,):
        return tuple(program)
    *before, _ = program
    if before[-1:] == [_MINUS]:
        return tuple(before[:-1])
    if len(before) > 1 and before[-2] == _MINUS and before[-1].fn in _MIRRORED:
        *rest, _, bound = before
        return (*rest, Step(_MIRRORED[bound.fn], (0.0 - bound.consts[0],)))
    return tuple(program)


def parse(text: str) -> Program:
    """Read a program's text form. Raises ValueError naming the step that is wrong."""
    steps = []
    for part in filter(None, (p.strip() for p in text.split("|"))):
        name, _, rest = part.partition("(")
        if rest and not rest.endswith(")"):
            raise ValueError(f"step {part!r} has no closing parenthesis")
        args = [a.strip() for a in rest[:-1].split(",")] if rest else []
        try:
            row = int(args.pop(0)) if name in ROW and args else None
            consts = tuple(float(a) for a in args)
        except ValueError as e:
            raise ValueError(f"step {part!r}: {e}") from None
        steps.append(Step(name, consts, row))
    return tuple(steps)


def apply(step: Step, y: torch.Tensor, rows: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Apply one step to `y` [..., S, V] with row operands [..., S]. `y` may also have one value a row, [..., S]."""
    if step.row is None:
        return SCALAR[step.fn].value(y, *step.consts)
    r = rows[step.row]
    if y.dim() > r.dim():
        r = r.unsqueeze(-1)
    if step.fn == "row_add":
        return y + r
    if step.fn == "row_mul":
        return y * r
    return torch.where(r != 0, y, step.consts[0])


def run(
    program: Sequence[Step], y: torch.Tensor, rows: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Apply all steps in order."""
    for step in program:
        y = apply(step, y, rows)
    return y


def value_at(program: Sequence[Step], x: float) -> float:
    """Return the value of a program without row steps at a number."""
    return run(program, torch.tensor(x, dtype=torch.float64)).item()


def dual(
    program: Sequence[Step], y: torch.Tensor, rows: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the value and its derivative with respect to the input, in one forward sweep.

    `rows` are already gathered to the shape of `y`. A step that is flat at its input makes the derivative
    exactly 0 whatever follows, infinite slopes included (sqrt(relu(x)) at x <= 0), as PyTorch's backward does.
    """
    y, slope, flat = dual_parts(program, y, rows)
    return y, torch.where(flat, 0.0, slope)


def dual_parts(
    program: Sequence[Step], y: torch.Tensor, rows: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the value, the product of the steps' derivatives, and a mask of the elements where a step is flat: no
    gradient, not even NaN, passes there."""
    slope = torch.ones_like(y)
    flat = torch.zeros_like(y, dtype=torch.bool)
    for step in program:
        x = y
        if step.row is not None:
            r = rows[step.row].to(y.dtype)
            if step.fn == "row_add":
                y = x + r
            elif step.fn == "row_mul":
                y, slope = x * r, slope * r
            else:
                y, flat = torch.where(r != 0, x, step.consts[0]), flat | (r == 0)
            continue
        f = SCALAR[step.fn]
        y = f.value(x, *step.consts)
        if f.flat is not None:
            flat = flat | f.flat(x, *step.consts)
        if f.slope is not None:
            slope = slope * f.slope(x, y, *step.consts)
    return y, slope, flat
