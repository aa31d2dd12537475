"""Patches that make Triton's interpreter twice as fast and let it run with any NumPy.

The interpreter patches `triton.language` at each call of a helper function although the launch has already done so,
which takes half of the time of this package's kernels. It also builds a dict of all dtypes for each look-up. In Triton
3.6 it converts an array of one element to a number, which NumPy 2.4 refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def prepare() -> None:
    """Patch the interpreter."""
    patch = interpreter._patch_lang
    if not hasattr(patch, "patches_once"):
        interpreter._patch_lang = _Once(patch)
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
        interpreter._patch_lang_tensor = _with_numbers(interpreter._patch_lang_tensor)


def _remembered(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    scalar = functools.cache(look_up)
    return lambda dtype: scalar(dtype) if type(dtype) is interpreter.tl.dtype else look_up(dtype)


def _with_numbers(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda t: t.handle.data.item())

    return patch_tensor


class _Once:
    """A replacement of Triton's `_patch_lang` that patches once; the outermost `restore` undoes nested calls too."""

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
