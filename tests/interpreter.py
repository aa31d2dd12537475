"""Triton's interpreter at twice its speed.

It patches `triton.language` at each call of a helper function, although the launch around it has done so, which is
half of the time of the kernels here, and makes a dict of all dtypes to look one up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def make_faster() -> None:
    """Have a helper function patch only what the launch that calls it has not, and remember the dtypes looked up."""
    patch = interpreter._patch_lang
    if not hasattr(patch, "patches_once"):
        interpreter._patch_lang = _Once(patch)
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


def _remembered(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    scalar = functools.cache(look_up)
    return lambda dtype: scalar(dtype) if type(dtype) is interpreter.tl.dtype else look_up(dtype)


class _Once:
    """Triton's `_patch_lang`; `restore` of what the outermost call returns undoes the nested ones too."""

    patches_once = True

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._modules: set[str] = set()
        self._outermost: Any = None

    def __call__(self, fn: Any) -> Any:
        modules = {
            value.__name__
            for value in fn.__globals__.values()
            if value is interpreter.tl or value is interpreter.tl.core
        }
        if self._outermost is not None and modules <= self._modules:
            return self
        scope = self._patch(fn)
        self._modules |= modules
        if self._outermost is not None:
            self._outermost._changes += scope._changes
            return self
        self._outermost = scope
        return self

    def restore(self) -> None:
        scope, self._outermost = self._outermost, None
        self._modules.clear()
        if scope is not None:
            scope.restore()
