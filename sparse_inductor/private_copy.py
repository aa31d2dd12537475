"""A function together with the modules it uses, copied."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def private_copy(
    fn: Callable[..., Any], duplicate: Callable[[Any, dict[int, Any]], Any] = copy.deepcopy
) -> tuple[Any, list[nn.Module]]:
    """`fn` as it is, but working on copies of the modules it uses; and those copies. duplicate: makes one, given what
    has been copied so far as `copy.deepcopy` takes it.

    Modules are found where `fn` is one or a method of one, in a function's closure and globals, and among the
    attributes of the object that a method belongs to. What a module holds beyond tensors may be shared.
    """
    memo: dict[int, Any] = {}
    modules: list[nn.Module] = []

    def copied(value: Any) -> Any:
        if not isinstance(value, nn.Module):
            return value
        new = duplicate(value, memo)
        if all(new is not m for m in modules):
            modules.append(new)
        return new

    if isinstance(fn, nn.Module):
        return copied(fn), modules
    owner = getattr(fn, "__self__", None)
    if isinstance(fn, types.MethodType):
        if isinstance(owner, nn.Module):
            owner = copied(owner)
        elif hasattr(owner, "__dict__") and not isinstance(owner, type):
            owner = copy.copy(owner)
            vars(owner).update({name: copied(value) for name, value in vars(owner).items()})
        return types.MethodType(fn.__func__, owner), modules
    if not isinstance(fn, types.FunctionType):
        return fn, modules
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(types.CellType(copied(cell.cell_contents)))
        except ValueError:  # empty
            cells.append(cell)
    named = {name: fn.__globals__.get(name) for name in fn.__code__.co_names}
    own = {name: copied(v) for name, v in named.items() if isinstance(v, nn.Module)}
    # Without modules among them the globals stay the same object, so that a function sees them change.
    space = {**fn.__globals__, **own} if own else fn.__globals__
    # A code object of its own: what Dynamo remembers of the original (skip it, too many recompiles) is not asked, and
    # nothing is remembered of the copy.
    code = fn.__code__.replace()
    new = types.FunctionType(code, space, fn.__name__, fn.__defaults__, tuple(cells))
    new.__kwdefaults__ = fn.__kwdefaults__
    new.__dict__.update(fn.__dict__)
    new.__module__, new.__qualname__ = fn.__module__, fn.__qualname__
    return new, modules
