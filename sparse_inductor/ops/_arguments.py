"""Access to an operator's arguments by name, and checks of their dtypes and sizes.

Symbolic sizes are not compared while tracing, because a check must not become a guard; the operator compares them when
it runs.
"""

from __future__ import annotations

import ast
import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..layers import launches

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
IMPACTS = (torch.uint8, torch.int8, torch.int16, *INTEGERS)  # quantised weights


def arguments(schema: str) -> Any:
    """A named tuple type of the arguments in a schema, with the schema's defaults: the dispatcher omits arguments that
    have their default."""
    listed = [text.partition("=") for text in schema.split(", ")]
    names = [declared.rpartition(" ")[2] for declared, _, _ in listed]
    defaults = [ast.literal_eval(value) for _, given, value in listed if given]
    make: Any = collections.namedtuple
    return make("Arguments", names, defaults=defaults)


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """[..., N] as [M, N], also for N = 0, where a size of -1 would be ambiguous."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def shifted(x: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """x - shift, or x without a shift."""
    return x if shift is None else x - shift


def known(*sizes: object) -> bool:
    """Whether none of the sizes is symbolic."""
    return all(type(s) is int for s in sizes)


def laid_out_as(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight, in column-major memory order if the weight is column-major."""
    return gradient.t().contiguous().t() if is_column_major(weight) else gradient


def is_column_major(weight: torch.Tensor) -> bool:
    """Whether a matrix is known to be column-major."""
    return known(*weight.stride()) and bool(weight.stride(0) == 1 != weight.stride(1))


def returned(grads: Iterable[torch.Tensor | None], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients as an operator returns them, with an empty tensor in place of None."""
    return tuple(like.new_empty(0) if g is None else g for g in grads)


def fake_gradients(
    of: Sequence[torch.Tensor | None], needs: Sequence[bool], like: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Empty gradients of these tensors in the format of `returned`, for a fake implementation."""
    return returned(
        (t.new_empty(t.shape) if n and t is not None else None for t, n in zip(of, needs)), like
    )


def check_shape(name: str, t: torch.Tensor | None, shape: Sequence[object], said: str = "") -> None:
    """Raises ValueError if the known sizes of a tensor differ from `shape`, where None matches any size. said: a format
    string for the shape in the message, with "{0}" for its first size."""
    if t is not None and not same(t.shape, shape):
        wanted = said.format(*shape) if said else list(shape)
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(t.shape)}")


def check_floats(name: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises TypeError for an operand of an unsupported dtype, and TypeError or ValueError for other operands with a
    different dtype or device."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be one of {FLOATS}, got {x.dtype}")
    for other, t in others.items():
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{other} must have the dtype of {name}, {x.dtype}, got {t.dtype}")
        if t is not None and t.device != x.device:
            raise ValueError(f"{other} is on {t.device}, {name} on {x.device}")


def suit_kernels(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the Triton kernels support these operands; ATen computes fp64 and empty operands on every device."""
    return launches(x) and x.dtype != torch.float64 and all(t.numel() for t in (x, *others))


def differ(a: object, b: object) -> bool:
    """Whether two sizes are known to differ."""
    return known(a, b) and a != b


def same(shape: Sequence[object], wanted: Sequence[object]) -> bool:
    """Whether two shapes are equal, as far as both are known."""
    return len(shape) == len(wanted) and not any(map(differ, shape, wanted))


def fits(shape: Sequence[object], wanted: Sequence[object]) -> bool:
    """Whether `shape` broadcasts to `wanted`, as far as both are known."""
    pairs = zip(shape, wanted[len(wanted) - len(shape) :])
    return len(shape) <= len(wanted) and not any(differ(a, b) and a != 1 for a, b in pairs)
