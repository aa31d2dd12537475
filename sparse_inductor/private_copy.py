"""Copies a function together with the modules that it uses."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def private_copy(
    fn: Callable[..., Any], duplicate: Callable[[Any, dict[int, Any]], Any] = copy.deepcopy
) -> tuple[Any, list[nn.Module]]:
    """Return a version of `fn` that works on copies of the modules it uses, and those copies. duplicate: copies a
    module, given a memo as for `copy.deepcopy`.

    Modules are found if `fn` is a module or a method of one, in the closure and globals of a function, and among the
    attributes of a method's object. A module's contents other than tensors may be shared.
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
    # If no module is among the globals, the copy keeps the same dict and so sees later changes.
    space = {**fn.__globals__, **own} if own else fn.__globals__
    # A separate code object: Dynamo's state for the original (skipped, too many recompiles) does not apply to the copy,
    # and compiling the copy leaves no state for the original.
    code = fn.__code__.replace()
    new = types.FunctionType(code, space, fn.__name__, fn.__defaults__, tuple(cells))
    new.__kwdefaults__ = fn.__kwdefaults__
    new.__dict__.update(fn.__dict__)
    new.__module__, new.__qualname__ = fn.__module__, fn.__qualname__
    return new, modules
