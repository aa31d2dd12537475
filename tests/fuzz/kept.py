"""The declaration of programs that were once computed wrongly, in the form in which the fuzzer prints them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from .program import Input, Program, Step

__all__ = ["kept", "tensor"]


def tensor(
    shape: tuple, values: str = "normal", dtype: torch.dtype = torch.float32, grad: bool = False
) -> Input:
    """Return an input; it gets the name of its argument from `kept`."""
    return Input("", shape, values, dtype, grad)


@dataclasses.dataclass(frozen=True)
class _Kept(Program):
    """A program that has its function, instead of steps that print it."""

    fn: Callable[..., Any] = lambda: None

    @property
    def name(self) -> str:
        return self.fn.__name__

    def function(self, branching: bool = True) -> Callable[..., Any]:
        return self.fn

    def documented(self) -> Program:
        return self


def kept(**fields: Any) -> Callable[[Callable[..., Any]], Program]:
    """Turn a function into a program: tensors are its inputs, the rest are fields of `Program`.

    Its default stage is "aot", because findings of the stage "graph" do not count by themselves.
    """

    def decorate(fn: Callable[..., Any]) -> Program:
        given = {n: v for n, v in fields.items() if isinstance(v, Input)}
        names = list(inspect.signature(fn).parameters)
        inputs = tuple(Input(n, *list(vars(given[n]).values())[1:]) for n in names)
        others = {"stage": "aot", **{n: v for n, v in fields.items() if n not in given}}
        body = ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0]
        body.decorator_list = []
        return _Kept(inputs=inputs, steps=(Step(ast.unparse(body)),), returns=(), fn=fn, **others)

    return decorate
