"""What stands between a linear and a reduction, as the climb finds it."""

from __future__ import annotations

import dataclasses

from torch import fx

from ..epilogue.steps import Step
from .batch_norm import Normalised
from .gemm import Linear
from .names import Call
from .selection import Assigned

__all__ = ["Element", "Fill", "Spine", "Term"]


@dataclasses.dataclass(frozen=True)
class Fill:
    """The operand that puts `value`, known only at run time, where `mask` is false (true, if `negate`): 0 elsewhere."""

    mask: fx.Node
    value: fx.Node
    negate: bool

    def nodes(self) -> list[fx.Node]:
        return [self.mask, self.value]


@dataclasses.dataclass(frozen=True)
class Term:
    """A step with an operand that is a node of the user's graph: y + r, y * r, or y where r, else a constant.

    prepare: what to do to the operand first: "reciprocal", "not", or a factor.
    """

    fn: str
    operand: fx.Node | Assigned | Fill | Normalised
    const: tuple[float, ...] = ()
    prepare: str | float | None = None


@dataclasses.dataclass(frozen=True)
class Element:
    """One thing between the linear and the reduction, and the nodes that do it."""

    node: fx.Node
    terms: tuple[Step | Term, ...] = ()
    shape_op: Call | None = None
    extra: tuple[fx.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Spine:
    """The path from a linear (all its readings) to a value, linear first."""

    linears: tuple[Linear, ...]
    elements: tuple[Element, ...]

    def then(self, element: Element) -> Spine:
        return Spine(self.linears, (*self.elements, element))
