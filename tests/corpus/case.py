"""One case of the corpus: a program, its inputs, and what a recogniser should make of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
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

    `source` names where the spelling was seen, `why` the reason for any expectation other than
    "rewrite". `precision` is the lowest dtype the program computes in; `explained` asks a case that
    is not rewritten for a near miss in the report; `rewrites` is how many places there are to rewrite, `pattern` which
    pattern should.
    """

    name: str
    source: str
    build: Callable[[], tuple[Callable[..., Any], tuple]]
    expect: Expectation = "rewrite"
    why: str = ""
    training: bool = False
    autocast: torch.dtype | None = None
    precision: torch.dtype = torch.float32
    dynamic: bool | None = None
    explained: bool = False
    rewrites: int = 1
    requires: tuple[str, ...] = ()
    pattern: str = "splade_head"

    def __post_init__(self) -> None:
        if self.expect != "rewrite" and not self.why:
            raise ValueError(f"case {self.name!r} expects {self.expect!r} without saying why")


BOTH, INFER, TRAIN = (False, True), (False,), (True,)
Builder = Callable[[], tuple]


def registrar(cases: list[Case], **defaults: Any) -> Callable[..., Callable[[Builder], Builder]]:
    """A decorator factory that adds cases to a list; `defaults` are fields of a `Case`."""

    def program(
        expect: Expectation = "rewrite", why: str = "", modes: Iterable[bool] = BOTH, **fields: Any
    ) -> Callable[[Builder], Builder]:
        """Register a builder, `build() -> (callable, inputs)`, in inference, training or both.

        The docstring says who writes it like this.
        """

        def register(build: Builder) -> Builder:
            for training in modes:
                name = f"{build.__name__}__{'train' if training else 'infer'}"
                seen = (build.__doc__ or "").strip()
                own = {**defaults, **fields}
                cases.append(Case(name, seen, build, expect, why, training, **own))
            return build

        return register

    return program
