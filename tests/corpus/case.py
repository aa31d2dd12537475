"""One case of the corpus: a program, its inputs, and what a recogniser should make of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

# rewrite        a user would be disappointed without the rewrite, and it is exact
# no_rewrite     no rewrite exists that keeps the result
# maybe          either is fine; the numbers must hold
# out_of_graph   the pattern is not inside the compiled region; nothing may break
Expectation = Literal["rewrite", "no_rewrite", "maybe", "out_of_graph"]


@dataclasses.dataclass(frozen=True)
class Case:
    """`build()` returns a callable or nn.Module and its example inputs, made anew from fixed seeds.

    `why` is the reason for any expectation other than "rewrite". The report has to give it of what is "no_rewrite", at
    a line with `at` in it; without `at` the program only stands in the same place as a family, as much of every model
    does, and nothing may be said of it. `precision` is the lowest dtype the program computes in; `rewrites` is how many
    places there are to rewrite, `pattern` which pattern should. `dense` is what a rewrite saves: afterwards no matrix
    product with so many results is left. Of what is rewritten nothing is a near miss, but of a pattern `beside` it;
    `note` is how its note ends. `unsupported` says why this torch cannot run the program itself, and nothing where it
    can.
    """

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple]]
    expect: Expectation = "rewrite"
    why: str = ""
    training: bool = False
    autocast: torch.dtype | None = None
    precision: torch.dtype = torch.float32
    dynamic: bool | None = None
    rewrites: int = 1
    requires: tuple[str, ...] = ()
    pattern: str = "splade_head"
    dense: int | None = None
    beside: str = ""
    note: str = ""
    unsupported: Callable[[], str] | None = None
    group: str = ""
    at: str | None = None

    def __post_init__(self) -> None:
        if self.expect != "rewrite" and not self.why:
            raise ValueError(f"case {self.name!r} expects {self.expect!r} without saying why")

    @property
    def id(self) -> str:
        return f"{self.group}-{self.name}"


BOTH, INFER, TRAIN = (False, True), (False,), (True,)
Builder = Callable[[], tuple]
CASES: list[Case] = []


class Group:
    """Cases that stand together; `defaults` are fields that they share."""

    def __init__(self, name: str, **defaults: Any) -> None:
        self._defaults = {"group": name, **defaults}

    def program(
        self,
        expect: Expectation = "rewrite",
        why: str = "",
        modes: Iterable[bool] = BOTH,
        **fields: Any,
    ) -> Callable[[Builder], Builder]:
        """Register a builder, `build() -> (callable, inputs)`, in inference, training or both."""

        def register(build: Builder) -> Builder:
            for training in modes:
                name = f"{build.__name__}__{'train' if training else 'infer'}"
                given = {**self._defaults, **fields}
                CASES.append(Case(name, build, expect, why, training, **given))
            return build

        return register

    def function(
        self, make: Callable[[Callable], tuple], *how: Any, prefix: str = "", **fields: Any
    ) -> Callable[[Callable], Callable]:
        """Register a function as the program that `make` makes of it; the rest is as in `program`."""

        def register(function: Callable) -> Callable:
            def build() -> tuple:
                return make(function)

            build.__name__ = prefix + function.__name__
            self.program(*how, **fields)(build)
            return function

        return register

    def formulas(self, **named: Callable[[], Any]) -> Callable[..., Callable]:
        """A decorator of functions of tensors alone: their parameters are what `named` makes, or `inputs`."""

        def formula(*how: Any, inputs: Mapping[str, Callable[[], Any]] = {}, **fields: Any):
            def make(function: Callable) -> tuple:
                makers = {**named, **inputs}
                return function, tuple(makers[p]() for p in inspect.signature(function).parameters)

            return self.function(make, *how, **fields)

        return formula


def each(register: Callable[[Callable], Any], **programs: Callable) -> None:
    """Register programs of one expression, each under its name, as the decorator `register` does."""
    for name, program in programs.items():
        program.__name__ = name
        register(program)


def of(register: Callable[[Callable], Any], wrap: Callable[[Callable], Callable]):
    """A decorator that registers, under a function's name, what `wrap` makes of it."""

    def decorate(function: Callable) -> Callable:
        made = wrap(function)
        made.__name__ = function.__name__
        register(made)
        return function

    return decorate
