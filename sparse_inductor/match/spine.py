"""What stands between a linear and a reduction, as the climb finds it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from ..epilogue.steps import Step
from .batch_norm import Normalised
from .gemm import Linear
from .names import Call

__all__ = ["Assigned", "Element", "Fill", "Spine", "Term"]


@dataclasses.dataclass(frozen=True)
class Assigned:
    """The operand of `x[index] = constant`: a mask that keeps every element but the indexed ones."""

    index: Any

    def nodes(self) -> list[fx.Node]:
        """The nodes the index is made of."""
        found: list[fx.Node] = []
        fx.map_arg(self.items(), found.append)
        return found

    def items(self) -> list[Any]:
        return list(self.index) if isinstance(self.index, tuple) else [self.index]


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
