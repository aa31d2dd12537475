"""One case of the corpus: a program, its inputs, and the expected decision of the recogniser."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

# rewrite        a user would expect the rewrite, and it is exact
# no_rewrite     no rewrite keeps the result
# maybe          either is fine; the results must be right
# out_of_graph   the pattern is not inside the compiled region; nothing may break
Expectation = Literal["rewrite", "no_rewrite", "maybe", "out_of_graph"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program with its inputs and its expectation.

    - `build()` returns a callable or nn.Module and its example inputs, newly made from fixed seeds.
    - `why` is the reason for any expectation other than "rewrite". For "no_rewrite" the report has to give this reason
      at a source line that contains `at`. Without `at` the program does not resemble a family, and the report must not
      mention it.
    - `precision` is the lowest dtype that the program computes in.
    - `rewrites` is the number of rewrites, and `pattern` the pattern that makes them.
    - `dense` is a number of elements: no matrix product with that many results may be left after the rewrite.
    - `beside` is a pattern that may report near misses beside the rewrite; other patterns may not.
    - `note` is the end of the rewrite's note.
    - `unsupported` returns the reason why this version of torch cannot run the program, or "" if it can.
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
    """A named group of cases; `defaults` are fields that they share."""

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
        """Register a function; `make` turns it into (callable, inputs). The other arguments are those of `program`."""

        def register(function: Callable) -> Callable:
            def build() -> tuple:
                return make(function)

            build.__name__ = prefix + function.__name__
            self.program(*how, **fields)(build)
            return function

        return register

    def formulas(self, **named: Callable[[], Any]) -> Callable[..., Callable]:
        """Return a decorator for functions of tensors, whose arguments `named` or `inputs` make by parameter name."""

        def formula(*how: Any, inputs: Mapping[str, Callable[[], Any]] = {}, **fields: Any):
            def make(function: Callable) -> tuple:
                makers = {**named, **inputs}
                return function, tuple(makers[p]() for p in inspect.signature(function).parameters)

            return self.function(make, *how, **fields)

        return formula


def each(register: Callable[[Callable], Any], **programs: Callable) -> None:
    """Register several programs, each under its keyword, with the decorator `register`."""
    for name, program in programs.items():
        program.__name__ = name
        register(program)


def of(register: Callable[[Callable], Any], wrap: Callable[[Callable], Callable]):
    """Return a decorator that registers `wrap(function)` under the function's name."""

    def decorate(function: Callable) -> Callable:
        made = wrap(function)
        made.__name__ = function.__name__
        register(made)
        return function

    return decorate
