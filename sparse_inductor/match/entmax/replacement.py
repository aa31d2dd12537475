"""The operator's layout: operands and results of an attention moved between the user's axes and [B, H, L, D].

`attention` reads the graph; this module builds the replacement.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, flat
from ...graph.contraction import Contraction
from ...graph.emit import Emitter, own_operator
from ...graph.fakes import bytes_of, fake
from ...graph.layout import laid_out, size_of
from ...graph.saved import for_the_caller
from ...graph.values import matched_nodes
from ...graph.view import GraphView
from ...pattern import Sparse
from .scores import ABSORBS, Scores
from .transform import Transform, given_alpha

WIDTH = Atom(0)  # the axis D of queries and keys, or Dv of values


@dataclasses.dataclass
class Attention:
    """A whole attention, as a match of the pattern; `emit` inserts the operator."""

    pattern, op = "entmax_attention", "sparse_inductor::entmax_attention"

    view: GraphView
    product: Contraction  # of probabilities and values
    found: Transform
    scores: Scores
    q: Placed
    k: Placed
    v: Placed
    out_axes: tuple[Axis, ...]
    batch: list[Atom]
    shared: list[Atom]  # key heads
    group: list[Atom]  # query heads of one key head
    queries: list[Atom]
    keys: list[Atom]
    width: list[Atom]  # of the values
    alpha: Placed | None
    causal: bool
    undefined: str  # the treatment of a query without scores (`ops.entmax`)
    after: list[Placed]  # factors of rows, and masks that keep rows
    path: list[fx.Node]  # between the transformation and the product with the values
    dtype: torch.dtype

    @property
    def anchor(self) -> fx.Node:
        return self.product.node

    @functools.cached_property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        nodes = [*self.product.nodes, *self.path, *self.found.nodes, *self.scores.nodes]
        return matched_nodes(self.view, nodes)

    @property
    def heads(self) -> list[Atom]:
        return self.shared + self.group

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(node for node, _ in self.reads))

    @property
    def reads(self) -> list[tuple[fx.Node, fx.Node]]:
        """The inputs, each with the node that reads it."""
        scores = self.scores
        beside = [*scores.factors, *scores.biases, *scores.masks, *scores.unless, *self.after]
        beside += [] if self.alpha is None else [self.alpha]
        return [read for t in (self.q, self.k, self.v, *beside) for read in t.reads]

    @property
    def settled(self) -> tuple[fx.Node, ...]:
        return self.found.settled

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        return self.found.sparse

    @property
    def bytes_saved(self) -> int | None:
        """The bytes of the probabilities, which a training step keeps for the backward."""
        return bytes_of(self.found.node) if self.view.needs_grad(self.anchor) else 0

    @property
    def note(self) -> str:
        has = {
            "causal": self.causal,
            "mask": self.scores.masks,
            "bias": self.scores.biases,
            "grouped queries": self.group,
        }
        return self.found.described(*(what for what, present in has.items() if present))

    # Emission

    def replace(self) -> None:
        e = Emitter(self.anchor)
        out = for_the_caller(self.view, e, self.anchor, self.emit(e))
        self.anchor.replace_all_uses_with(out)

    def emit(self, e: Emitter) -> fx.Node:
        """Insert the operator. Returns a node with the shape and dtype of the user's result."""
        of_queries = (self.batch, self.heads, self.queries, [WIDTH])
        of_keys = (self.batch, self.shared, self.keys, [WIDTH])
        q = self._laid_out(e, self.q, of_queries, full=True)
        k = self._laid_out(e, self.k, of_keys, full=True)
        of_values = (*of_keys[:3], [WIDTH] if self.width else [])
        v = self._laid_out(e, self.v, of_values, full=True)
        q, k, v = (e.cast(t, self.dtype) for t in (q, k, v))
        scores = self.scores
        for factor in scores.factors:
            if any(atom in self.keys for atom in factor.atoms):
                k = e.cast(self._times(e, k, factor, turned=True), self.dtype)
            else:
                q = e.cast(self._times(e, q, factor), self.dtype)
        bias, mask = self._bias(e), self._mask(e)
        given = self.found.alpha if self.alpha is None else self._beside(e, self.alpha)
        alpha, number = given_alpha(e, given, q)
        shape = (*fake(q).shape[:3], fake(v).shape[3])
        out = e.declared(
            lambda: fake(q).new_empty(shape),
            own_operator("entmax_attention"),
            q, k, v, bias, mask, alpha, None, None,
            number, scores.scale, None if scores.fill == -math.inf else scores.fill,
            self.causal, scores.added, self.undefined,
        )  # fmt: skip
        out = e.cast(self._changed(e, out), fake(self.anchor).dtype)
        return self._as_user_has_it(e, out)

    def _changed(self, e: Emitter, out: fx.Node) -> fx.Node:
        """The result after the factors and masks of the rows of probabilities."""
        for p in self.after:
            if fake(p.tensor).dtype == torch.bool:
                out = e.call(torch.where, self._kept(e, p), out, 0.0)
            else:
                out = self._times(e, out, p)
        return out

    def _times(self, e: Emitter, t: fx.Node, p: Placed, turned: bool = False) -> fx.Node:
        """A tensor times an operand, or divided by it. turned: the tensor has keys in place of queries."""
        factor = self._beside(e, p) if self.view.is_tensor(p.tensor) else p.tensor
        factor = e.method("transpose", factor, -1, -2) if turned else factor
        return e.call(operator.truediv if p.divides else operator.mul, t, factor)

    def _beside(self, e: Emitter, p: Placed) -> fx.Node:
        """The operand as [B, H, Lq, Lk], with 1 where it does not vary."""
        groups = (self.batch, self.heads, self.queries, self.keys)
        if p.assigned is not None:
            sizes = tuple(self._whole(e, flat(axis)) for axis in p.axes)
            kept = e.method("new_ones", self.q.node, sizes, dtype=torch.bool)
            e.call(operator.setitem, kept, p.assigned, False)
            p = dataclasses.replace(p, node=kept, assigned=None)
        return self._laid_out(e, p, groups)

    def _mask(self, e: Emitter) -> fx.Node | None:
        """The mask of the keys that are kept, or None."""
        kept: fx.Node | None = None
        for mask in self.scores.masks:
            one = self._kept(e, mask)
            kept = one if kept is None else e.call(operator.and_, kept, one)
        for mask in self.scores.unless:
            assert kept is not None
            if mask.fill is None:
                bias = e.call(operator.mul, self._beside(e, mask), mask.factor)
                dropped = e.call(operator.lt, bias, -ABSORBS)
            else:
                dropped = e.call(operator.invert, self._kept(e, mask))
            kept = e.call(operator.or_, kept, dropped)
        return kept

    def _kept(self, e: Emitter, mask: Placed) -> fx.Node:
        t = self._beside(e, mask)
        if fake(t).dtype != torch.bool:
            t = e.call(operator.ne, t, 0)
        return e.call(operator.invert, t) if mask.negate else t

    def _bias(self, e: Emitter) -> fx.Node | None:
        total: fx.Node | None = None
        for bias in self.scores.biases:
            if bias.fill is not None:
                keep = self._kept(e, bias)
                one = e.call(torch.where, keep, 0.0, bias.fill)
            else:
                one = self._beside(e, bias)
                if not fake(one).dtype.is_floating_point:
                    one = e.method("to", one, torch.float32)
                if bias.factor != 1:
                    one = e.call(operator.mul, one, bias.factor)
                if bias.floor is not None:
                    one = e.method("clamp_min", one, bias.floor)
                for factor in bias.times:
                    one = self._times(e, one, factor)
            total = one if total is None else e.call(operator.add, total, one)
        return total

    def _laid_out(
        self, e: Emitter, t: Placed, groups: Sequence[Sequence[Atom]], full: bool = False
    ) -> fx.Node:
        return laid_out(e, t, groups, full, sized=(self.q, self.k, self.v))

    def _whole(self, e: Emitter, atoms: Sequence[Atom]) -> Any:
        """The size of an axis."""
        total: Any = 1
        for size in (size_of(e, atom, (self.q, self.k, self.v)) for atom in atoms):
            known = isinstance(total, int) and isinstance(size, int)
            total = total * size if known else e.call(operator.mul, total, size)
        return total

    def _as_user_has_it(self, e: Emitter, out: fx.Node) -> fx.Node:
        """The result [B, H, Lq, Dv] in the axes of the user's result."""
        groups = (self.batch, self.heads, self.queries, self.width)
        have = Placed(out, self.anchor, tuple(tuple(group) for group in groups))
        out = self._laid_out(e, have, [flat(axis) for axis in self.out_axes])
        if self.product.scale != 1:
            out = e.call(operator.mul, out, self.product.scale)
        if self.product.bias is not None:
            bias, factor = self.product.bias
            bias = e.cast(bias, fake(self.anchor).dtype)
            out = e.call(
                operator.add, out, bias if factor == 1 else e.call(operator.mul, bias, factor)
            )
        return e.laid_out(out, fake(self.anchor))
