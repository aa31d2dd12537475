"""Gathered query weights times document weights, as a record that emits the operands of an operator.

Everything that does not depend on the gather is a factor: it stays in the graph and becomes part of the document
weights. The other operand of a product with a sum is an ordinary factor.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, flat
from ...graph.emit import Emitter
from ...graph.fakes import fake
from ...graph.layout import at_first, laid_out
from ...graph.names import stored
from ...graph.no_match import NoMatch
from ...graph.values import extreme, uniform
from ...graph.view import GraphView
from .gathers import VOCABULARY, Gather

Axes = tuple[Axis, ...]
Groups = Sequence[Sequence[Atom]]


class Factor(NamedTuple):
    """An operand that multiplies or divides contributions, or a mask that keeps or drops them.

    made: a function to apply to the operand first, once it has the axes of the contributions.
    """

    how: str  # "mul", "div", "keep", "drop"
    operand: Placed
    made: Callable[[Emitter, fx.Node], fx.Node] = lambda e, t: t


@dataclasses.dataclass(frozen=True)
class Contributions:
    """Gathered weights, after the functions `of_one`, times the factors and a number. axes: those of the gather."""

    gather: Gather
    axes: Axes
    nodes: tuple[fx.Node, ...]
    factors: tuple[Factor, ...] = ()
    of_one: tuple[fx.Node, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if extreme(self.scale):
            raise NoMatch(f"the products are scaled by {self.scale:g}", self.nodes[-1])

    @property
    def queries(self) -> tuple[Atom, ...]:
        return tuple(a for at in self.gather.queries for a in flat(self.axes[at]))

    @property
    def entries(self) -> tuple[Atom, ...]:
        """All atoms but those of the queries, in their order."""
        places = (at for at in range(len(self.axes)) if at not in self.gather.queries)
        return tuple(a for at in places for a in flat(self.axes[at]))

    @property
    def operands(self) -> list[Placed]:
        """The operands of the factors, and the ids."""
        return [*(f.operand for f in self.factors), self.gather.ids(self.axes)]

    def same_for_all(self, view: GraphView, t: Placed) -> bool:
        """Whether a tensor is the same for all queries. Raises NoMatch if the axes of the queries are not known."""
        queries = {*self.queries}
        for from_end, axis in enumerate(reversed(t.axes), 1):
            if queries.isdisjoint(flat(axis)):
                continue
            if not {*flat(axis)} <= queries:
                raise NoMatch("merges queries and documents into one axis", t.reader)
            if not uniform(view, t.node, from_end, t.reader):
                return False
        return True

    @property
    def sized(self) -> list[Placed]:
        """The tensors from which sizes may be read."""
        whole = not (self.gather.part or self.gather.repeated)
        return [*self.operands, *([self.gather.whole_table(self.axes)] if whole else [])]

    @property
    def reads(self) -> list[tuple[fx.Node, fx.Node]]:
        """The nodes that are read, each with its reader."""
        return [
            (self.gather.source, self.gather.node),
            *(r for t in self.operands for r in t.reads),
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the contributions."""
        dtype: torch.dtype = fake(stored(self.nodes[-1])).dtype
        return dtype

    @property
    def masked(self) -> bool:
        """Whether some contributions do not count."""
        return any(f.how in ("keep", "drop") for f in self.factors)

    @property
    def has_weights(self) -> bool:
        return any(f.how in ("mul", "div") for f in self.factors)

    def then(self, node: fx.Node, **changes: Any) -> Contributions:
        """The contributions after a further node."""
        return dataclasses.replace(self, nodes=(*self.nodes, node), **changes)

    def times(self, *factor: Any) -> Contributions:
        """The contributions with a further `Factor`."""
        return dataclasses.replace(self, factors=(*self.factors, Factor(*factor)))

    def scaled(self, number: float) -> Contributions:
        return dataclasses.replace(self, scale=self.scale * number)

    # Emission

    def query(self, e: Emitter) -> fx.Node:
        """The query weights [V] or [B, V]."""
        table = at_first(e, self.gather.table(e, self.axes), self.entries)
        groups = [self.queries, (VOCABULARY,)] if self.queries else [(VOCABULARY,)]
        t = laid_out(e, table, groups)
        # Integers are cast after the look-up, as are narrower weights if the program computes in float64.
        if not fake(t).dtype.is_floating_point or self.dtype == torch.float64:
            t = e.cast(t, self.dtype)
        inner = self.gather.node
        for n in self.of_one:
            t, inner = e.again(n, {inner: t}), n
        return t

    def ids(self, e: Emitter, groups: Groups) -> fx.Node:
        ids = self.placed(e, self.gather.ids(self.axes), groups)
        if self.gather.wraps:
            size = e.size(self.gather.source, self.gather.dim)
            ids = e.call(torch.remainder, ids, size)
        return ids

    def placed(self, e: Emitter, t: Placed, groups: Groups) -> fx.Node:
        """A tensor that is the same for all queries, with all elements of the groups of entries."""
        return laid_out(e, at_first(e, t, self.queries), groups, full=True, sized=self.sized)

    def weights(self, e: Emitter, groups: Groups) -> tuple[fx.Node, fx.Node | None]:
        """The factors as one tensor of document weights, and the mask of contributions that count (None: all)."""
        # A product of factors, a quotient or a count may exceed the range of 16 bits.
        dtype = torch.promote_types(self.dtype, torch.float32)
        alone = [f.how for f in self.factors if f.how in ("mul", "div")] == ["mul"]
        weights: Any = self.scale
        keep: fx.Node | None = None
        for how, operand, made in self.factors:
            t = made(e, self.placed(e, operand, groups))
            if how in ("keep", "drop"):
                t = t if fake(t).dtype == torch.bool else e.call(torch.ne, t, 0)
                t = e.call(torch.logical_not, t) if how == "drop" else t
                keep = t if keep is None else e.call(torch.logical_and, keep, t)
            elif alone and self.scale == 1 and fake(t).dtype.is_floating_point:
                weights = t
            else:
                t = e.cast(t, dtype)
                first = how == "mul" and isinstance(weights, float) and weights == 1
                apply = operator.mul if how == "mul" else operator.truediv
                weights = t if first else e.call(apply, weights, t)
        if not isinstance(weights, fx.Node):
            ones = (1,) * len(groups)
            weights = e.method("new_full", self.gather.source, ones, weights, dtype=dtype)
        return weights, keep
