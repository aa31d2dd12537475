"""Planted mistakes, the programs that show them, and two ways to plant one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that `pattern` rewrites; `build()` returns a callable and its arguments."""

    pattern: str
    build: Callable[[], tuple[Any, tuple[Any, ...]]]


def programs(pattern: str, build: Callable[[Any], Any], **of: Any) -> dict[str, Program]:
    """Return programs by name; `build` makes each from what `of` has under its name."""
    return {name: Program(pattern, functools.partial(build, fn)) for name, fn in of.items()}


@dataclasses.dataclass(frozen=True)
class Bug:
    """A mistake and the name of the program that shows it; with `backward` only gradients are wrong."""

    name: str
    plant: Plant
    program: str
    backward: bool = False


def result(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Return a plant that passes the result of `owner.name` through `change`; a tuple becomes several arguments."""

    def plant() -> Any:
        original = getattr(owner, name)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            return change(*found) if type(found) in (tuple, list) else change(found)

        return mock.patch.object(owner, name, wrong)

    return plant


def gradient(aten: Any, at: int, change: Callable[[Any], Any]) -> Plant:
    """Return a plant that passes one of the gradients of `aten.backward` through `change`."""
    return result(
        aten, "backward", lambda *grads: [g if i != at else change(g) for i, g in enumerate(grads)]
    )


def instead(owner: Any, name: str, wrong: Callable[..., Any]) -> Plant:
    """Return a plant that replaces `owner.name` by `wrong(original, *arguments)`."""

    def plant() -> Any:
        original = getattr(owner, name)
        return mock.patch.object(
            owner, name, lambda *args, **kwargs: wrong(original, *args, **kwargs)
        )

    return plant
