"""Which of its arguments a call writes, as far as its target says: by its name, its schemas, or known exceptions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .. import compat
from .names import INPLACE_OPERATORS, TRAILING_INPLACE, is_plain, target_name


def _in_place(target: Any) -> bool:
    """Whether the name shows that the first argument is written: `x.relu_()`, `x += y`, `x[i] = v`."""
    name = target_name(target)
    if getattr(target, "__module__", "") == "_operator" or name.endswith("__"):
        return name.strip("_") == "setitem" or name.strip("_") in INPLACE_OPERATORS
    return name.endswith("_")


# Functions with writes that their schemas do not declare: the argument that enables them, and the written arguments.
_STATISTICS = ("running_mean", "running_var")
_UNSAID: dict[str, tuple[str, tuple[str, ...]]] = {
    "batch_norm": ("training", _STATISTICS),
    "native_batch_norm": ("training", _STATISTICS),
    "cudnn_batch_norm": ("training", _STATISTICS),
    "miopen_batch_norm": ("training", _STATISTICS),
    "instance_norm": ("use_input_stats", _STATISTICS),
    "embedding": ("max_norm", ("weight",)),
    "embedding_bag": ("max_norm", ("weight",)),
}


@functools.lru_cache(maxsize=4096)
def _schemas(name: str) -> tuple[Any, ...]:
    """Return the schemas of ATen's operators with a name."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return compat.schemas(packet)  # may be a method of any object, like "__eq__"


class _Written(NamedTuple):
    """An argument that a schema declares as written: its position (None if keyword-only), its name, and whether it is a
    list of tensors."""

    at: int | None
    name: str
    several: bool


class Habit(NamedTuple):
    """The writes of a call as far as its target determines them, independent of the arguments.

    operator: the target has schemas itself. foreign: its writes are unknown, as for NumPy's functions, and autograd
    does not see them. first: its name shows that it writes its first argument. by_schema: the arguments that schemas
    declare as written. unsaid: it may have writes that neither its name nor its schemas declare. quiet: it writes
    nothing unless a keyword argument requests it.
    """

    name: str
    operator: bool = False
    foreign: bool = False
    first: bool = False
    by_schema: tuple[_Written, ...] = ()
    unsaid: bool = False
    quiet: bool = False


@functools.lru_cache(maxsize=4096)
def habit_of(op: str, target: Any) -> Habit:
    """Return the writes of a call as far as its target, of a node with this `op`, determines them."""
    own = getattr(target, "__name__", "")
    name, known = target if op == "call_method" else own, compat.schemas(target)
    if compat.is_higher_order(target):
        return Habit(name)
    if not known and op == "call_function" and not is_plain(target):
        return Habit(name, foreign=True)
    by_schema = dict.fromkeys(
        _Written(None if arg.kwarg_only else at, arg.name, "List" in str(arg.type))
        for schema in known or _schemas(name)
        for at, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )
    first = not known and _in_place(target)
    unsaid = own.partition(".")[0] in _UNSAID
    by_place = any(w.at is not None for w in by_schema) or name in TRAILING_INPLACE
    quiet = not (first or unsaid or by_place)
    return Habit(name, bool(known), False, first, (*by_schema,), unsaid, quiet)


def unsaid_writes(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a call writes although neither its name nor its schemas declare it."""
    name = getattr(target, "__name__", "").partition(".")[0]
    when, names = _UNSAID[name]
    try:
        bound = inspect.signature(target).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        given: Mapping[str, Any] = bound.arguments
    except (TypeError, ValueError):
        # A builtin has the parameters of ATen's schema, without defaults.
        parameters = [a.name for schema in _schemas(name)[:1] for a in schema.arguments]
        given = {**dict(zip(parameters, args)), **kwargs}
    return [given.get(n) for n in names] if given.get(when) not in (False, None) else []
