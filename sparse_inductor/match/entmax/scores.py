"""Reads attention scores from their use up to the product that computes them.

    z = where(mask, scale * (q @ k^T) + bias, fill)

A program may scale, add and mask in any order. This module brings the operations into the order above where that is
exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ... import compat
from ...graph.axes import Axis, Placed, above, beside
from ...graph.contraction import PRODUCTS, Contraction, contraction
from ...graph.fakes import fake
from ...graph.indices import is_full
from ...graph.names import Call
from ...graph.no_match import NoMatch, changed, first_match
from ...graph.scalars import constant_factor, sums
from ...graph.selection import SELECTIONS, Assigned, selections
from ...graph.values import check_cast, drowns, extreme
from ...graph.view import GraphView, label, rounded
from ...graph.vocabulary import VIEWS
from .masks import as_mask, keeps_a_key, mixed

_MAX_DEPTH = 48
_MAX_READS = 1024  # each z = z + z can be read in two ways; if there is no product, both are tried
# The sum of a number this large and a score is the number, in any precision that can represent it.
ABSORBS = 1e30
_NOT_LINEAR = frozenset(
    "tanh sigmoid relu clamp exp log log1p softplus abs square pow sqrt gelu silu topk sort div_floor div_trunc".split()
)


@dataclasses.dataclass
class Scores:
    """The scores as far as they have been read: the product, and the operations after it.

    axes: those of the product's result. factors: tensors with one number per query or per key. masks: the scores that
    they drop become `fill`.
    """

    product: Contraction
    axes: list[Axis]
    scale: float
    factors: list[Placed] = dataclasses.field(default_factory=list)
    biases: list[Placed] = dataclasses.field(default_factory=list)
    masks: list[Placed] = dataclasses.field(default_factory=list)
    fill: float | None = None
    unless: list[Placed] = dataclasses.field(default_factory=list)
    """Masks among the biases that take precedence over `masks`: nothing is filled in where they drop a key. One without
    a fill is a bias, which drops a key where it is a large negative number."""
    added: bool = False  # the fill was added to the scores, so these get a gradient
    doubled: bool = False  # the masks are also among the biases
    floored: bool = False
    shifted: bool = False  # a constant was added, which only matters with a finite fill
    nodes: list[fx.Node] = dataclasses.field(default_factory=list)


def read_scores(
    view: GraphView,
    source: fx.Node,
    reader: fx.Node,
    axes: Sequence[Axis],
    depth: int = 0,
    reads: Iterator[int] | None = None,
) -> Scores:
    """The scores that `reader` sees of `source`, which has the axes `axes`. Raises NoMatch."""
    reads = reads or itertools.count()
    if depth > _MAX_DEPTH or next(reads) > _MAX_READS:
        raise NoMatch("the chain of operations is too long", source)
    node = view.value(source, reader)
    if node is None:
        raise changed(view, source, reader, "the scores are", "them")
    product = contraction(view, node)
    if product is not None and product.of_matrices and product.bias_dim == -1:
        return _start(view, product, list(axes))
    call = view.call(node)
    if not call:
        if node.op != "placeholder":
            raise _not_followed(label(node), node)
        what = "an input of the graph, not from a product of queries and keys"
        raise NoMatch(f"the scores come from {what}", node)
    return _Step(view, node, call, list(axes), depth, reads).read()


def _not_followed(name: str, node: fx.Node) -> NoMatch:
    reason = f"the scores come from {name}, which is not followed to a product of queries and keys"
    return NoMatch(reason, node)


def _start(view: GraphView, product: Contraction, axes: list[Axis]) -> Scores:
    found = scaled(
        Scores(product, axes, 1.0, nodes=list(product.nodes)), product.scale, product.node
    )
    if product.bias is not None:
        bias, factor = product.bias
        found.biases.append(beside(view, bias, axes, product.node, factor=factor))
    return found


def scaled(found: Scores, c: float, node: fx.Node) -> Scores:
    """The scores times a number, by which `node` multiplies them. Raises NoMatch."""
    if extreme(found.scale * c):
        raise NoMatch(f"the scores are multiplied by {found.scale * c:g}", node)
    if found.floored and c != 1:
        raise NoMatch("scores that have a floor are multiplied", node)
    if found.masks:
        if c <= 0:
            raise NoMatch("masked scores are multiplied by a number that is not positive", node)
        assert found.fill is not None
        found.fill *= c
    found.scale *= c
    found.biases = [
        dataclasses.replace(b, factor=b.factor * c)
        if b.fill is None
        else dataclasses.replace(b, fill=b.fill * c)
        for b in found.biases
    ]
    return found


class _Step:
    """One operation on the scores."""

    def __init__(
        self,
        view: GraphView,
        node: fx.Node,
        call: Call,
        axes: list[Axis],
        depth: int,
        reads: Iterator[int],
    ):
        self.view, self.node, self.call, self.axes = view, node, call, axes
        self.depth, self.reads = depth, reads

    def decline(self, reason: str) -> NoMatch:
        return NoMatch(reason, self.node)

    def up(self, x: Any, axes: list[Axis] | None = None) -> Scores:
        """The scores before the operation. axes: their axes, if the operation is a view."""
        if axes is None and not self.view.same_shape(x, self.node):
            raise self.decline(f"{self.call.name} spreads the scores over an axis that they lack")
        axes = self.axes if axes is None else axes
        found = read_scores(self.view, x, self.node, axes, self.depth + 1, self.reads)
        found.nodes.append(self.node)
        return found

    def const(self, x: Any) -> float | None:
        return self.view.const(x, self.node)

    def read(self) -> Scores:
        call, name = self.call, self.call.name
        x = call.get("input")
        if (kept := self.view.kept(call)) is not None:
            return self.up(kept)
        if name == "cast":
            check_cast(self.view, self.node, "the scores")
            found = self.up(x)
            check_cast(self.view, self.node, "the scores", self.view.dtype(found.product.node))
            return found
        if name == "detach":
            raise self.decline("detach() cuts the gradient here")
        if name == "dropout":
            raise self.decline("dropout on the scores")
        if name in VIEWS and self.view.is_tensor(x):
            return self.up(x, above(self.view, self.node, call, self.axes))
        if name in SELECTIONS:
            return self._selected()
        if (by := constant_factor(self.view, self.node)) is not None:
            return scaled(self.up(by[0]), by[1], self.node)
        if name in _HANDLERS:
            return _HANDLERS[name](self)
        if name == "einsum" and len(call.get("operands", ())) > 2:
            raise self.decline(f"an einsum of {len(call['operands'])} tensors makes the scores")
        if name in ("addmm", "baddbmm"):
            raise self.decline(
                f"{name} makes the scores with a beta or alpha that is not a constant"
            )
        if name in PRODUCTS:
            raise self.decline("the scores are a product with a single vector")
        if name == "getitem":  # one of several results
            name = self.view.name_of(x) or name
        if name in _NOT_LINEAR:
            raise self.decline(f"{name} between the product and the normalisation is not linear")
        raise _not_followed(name, self.node)

    # Scale and bias

    def _floored(self) -> Scores:
        """max(z, finfo.min), as used when masks are added up. No score is this low, so only the masks are affected."""
        call = self.call
        if call.name == "maximum":
            one, other = call.both_ways
            x, least = one if self.const(one[1]) is not None else other
        else:
            x, least = call["input"], call.get("min") if call.get("max") is None else None
        low = self.const(least)
        if low is None or not self.view.is_tensor(x) or low > -ABSORBS:
            name = call.name
            raise self.decline(f"{name} between the product and the normalisation is not linear")
        found = self.up(x)
        if len(found.biases) > 1 or found.unless or any(b.times for b in found.biases):
            raise self.decline("several terms of the scores have one floor")
        for bias in found.biases:
            mask = as_mask(self.view, bias)
            lowest = -math.inf if mask is None or mask.fill is None else mask.fill
            if self.view.needs_grad(self.node):
                # If every key of a row is at the floor, it passes no gradient. The sum with a bias would pass it.
                if mask is None:
                    raise self.decline("scores with a bias that is no mask have a floor")
                halved = lowest == low and self._slope_at_a_tie(least) == 0.5
                if halved and not keeps_a_key(self.view, mask):
                    raise self.decline(
                        f"{self.call.name} halves the gradient of a row whose keys all tie"
                    )
            if lowest < low or (lowest == low and not self._slope_at_a_tie(least)):
                fill = None if bias.fill is None else low
                found.biases = [dataclasses.replace(bias, fill=fill, floor=low)]
        if found.fill is not None:
            found.fill = max(found.fill, low)
        found.floored = True
        return found

    def _slope_at_a_tie(self, least: Any) -> float:
        """The gradient of a value that equals its lower bound, which depends on the torch version."""
        if self.call.name != "maximum" and compat.clamp_has_a_slope_at_its_bounds():
            return 1.0
        return 0.5 if self.view.is_tensor(least) else 0.0

    def _mul(self) -> Scores:
        return self._factor(*self._pick(*self.call.both_ways[0]), divides=False)

    def _div(self) -> Scores:
        if self.const(self.call["other"]) == 0:
            raise self.decline("division by zero")
        return self._factor(self.up(self.call["input"]), self.call["other"], divides=True)

    def _factor(self, found: Scores, other: Any, divides: bool) -> Scores:
        if found.floored or found.masks or any(b.fill is not None for b in found.biases):
            raise self.decline("masked scores are multiplied by a tensor")
        if isinstance(fake(other), (torch.SymInt, torch.SymFloat)):  # a scale made of sizes
            factor = Placed(other, self.node, (), divides=divides)
        elif self.view.is_tensor(other):
            factor = self._place(other, divides=divides)
        else:
            raise self.decline("the scale is a number known only at run time")
        found.factors.append(factor)
        found.biases = [dataclasses.replace(b, times=(*b.times, factor)) for b in found.biases]
        return found

    def _sum(self) -> Scores:
        """A sum a + k * b."""
        ways = sums(self.view, self.node)
        if not ways:
            raise self.decline("alpha= is not a constant")
        for (x, own), (other, factor) in ways:
            known = self.const(other)
            if known is not None and self.view.is_tensor(x):
                return self._shifted(scaled(self.up(x), own, self.node), known)
            if own == 1 and (way := mixed(self.view, self.node, x, other)) is not None:
                scores, mask, fill = way
                found = self._masked(scores, self._place(mask), fill * factor)
                found.nodes.append(x)
                return found
        (a, _), (b, k) = ways[0]
        found, other = self._pick(a, b)
        own, factor = (k, 1.0) if other is a and other is not b else (1.0, k)
        return self._biased(scaled(found, own, self.node), other, factor)

    def _shifted(self, found: Scores, number: float) -> Scores:
        """The scores plus a constant, which changes nothing unless a mask fills in a finite number."""
        if drowns(number, self.view.dtype(self.node)):
            raise self.decline(f"the scores are rounded by adding {number:g}")
        if found.masks and found.fill != -math.inf:
            raise self.decline("a constant is added to scores that are masked with a number")
        found.shifted = True
        return found

    def _biased(self, found: Scores, bias: Any, factor: float) -> Scores:
        if not self.view.is_tensor(bias):
            raise self.decline("a number known only at run time is added to the scores")
        one = self._place(bias, factor=factor)
        if found.masks and found.fill != -math.inf:
            excluded = as_mask(self.view, one)
            if excluded is not None and excluded.fill == -math.inf:
                found.unless.append(excluded)
            elif (
                self.view.needs_grad(found.product.node) or len(found.masks) > 1
            ) and not self.view.needs_grad(one.node):
                # Where the fill absorbs the bias, it stays a fill, which stops the gradient and is the same for a key
                # that two masks drop. Where both are large, they are added.
                found.biases += [] if found.doubled else self._filled(found)
                found.doubled = True
                found.unless.append(excluded or one)
            else:
                self._masks_to_biases(found)
        found.biases.append(one)
        return found

    def _filled(self, found: Scores) -> list[Placed]:
        """The masks as biases: adding a number that absorbs the score is the same as filling it in."""
        assert found.fill is not None
        if found.fill > -ABSORBS:
            raise self._again(f"are masked with {found.fill:g}")
        return [dataclasses.replace(m, fill=found.fill) for m in found.masks]

    def _masks_to_biases(self, found: Scores) -> None:
        """Turn masks into biases that add the fill. The values are the same, but a sum passes the gradient."""
        biases = self._filled(found)
        if len(found.masks) > 1:
            why = "in a row that they empty, keys that two of them drop are as good as keys that one does"
            raise self._again(f"several masks set to {found.fill:g}", f"; {why}")
        if self.view.needs_grad(found.product.node) and not keeps_a_key(self.view, found.masks[0]):
            why = "a row that they empty has another gradient"
            raise self._again(f"are masked with {found.fill:g}", f"; {why}")
        if found.doubled:
            raise self._again("are masked twice")
        found.biases += biases
        found.masks, found.fill, found.unless = [], None, []

    def _again(self, masked: str, why: str = "") -> NoMatch:
        return self.decline(f"scores that {masked} are masked or biased once more{why}")

    def _place(self, node: Any, **fields: Any) -> Placed:
        return beside(self.view, node, self.axes, self.node, **fields)

    def _pick(self, a: Any, b: Any) -> tuple[Scores, Any]:
        """The scores that come through one of two operands, and the other operand."""
        ways = [way for way in ((a, b), (b, a)) if self.view.is_tensor(way[0])]
        ways.sort(key=lambda way: not self.view.same_shape(way[0], self.node))
        return first_match(lambda way: (self.up(way[0]), way[1]), ways)

    # Masks

    def _selected(self) -> Scores:
        """The scores where a mask keeps them, else a number."""
        ways = ((one, self.const(one.other)) for one in selections(self.view, self.call))
        found, fill = next(((one, c) for one, c in ways if c is not None), (None, None))
        if found is None or fill is None:
            what = "where() puts" if self.call.name == "where" else f"{self.call.name} puts"
            raise self.decline(f"{what} numbers known only at run time into the scores")
        if isinstance(found.keep, Assigned):
            mask = self._assigned(found.x, found.keep)
        elif self.view.is_tensor(found.keep) and self.view.dtype(found.keep) == torch.bool:
            mask = self._place(found.keep, negate=found.negate)
        else:
            raise self.decline("the mask is not boolean")
        return self._masked(found.x, mask, fill)

    def _assigned(self, x: Any, keep: Assigned) -> Placed:
        """The mask that drops the assigned elements, along the axes that the assignment indexes."""
        axes, index = [], []
        for item, taken in keep.by_axis(self.view, len(self.view.shape(x))):
            if item is None:
                raise self.decline("assigns into the scores through an index that adds an axis")
            if not is_full(item):
                axes += [self.axes[d] for d in taken]
                index.append(item)
        return Placed(self.node, self.node, tuple(axes), assigned=tuple(index))

    def _masked(self, x: Any, mask: Placed, fill: float) -> Scores:
        """The scores `x` where a mask keeps them, else a number."""
        found = self.up(x)
        if fill > -1e3:
            raise self.decline(f"masked scores become {fill:g}, which is no exclusion")
        # The fill is rounded to the dtype of the scores: that of x, because an assignment has none.
        fill = rounded(fill, self.view.dtype(x))
        if found.shifted and fill != -math.inf:
            raise self.decline("scores that a constant was added to are masked with a number")
        if found.unless and fill != -math.inf:
            raise self._again("are masked twice")
        if found.masks and found.fill != fill:
            if fill == -math.inf and (found.fill or 0.0) > -ABSORBS:
                excluded = dataclasses.replace(mask, fill=fill)
                found.unless.append(excluded)
                found.biases.append(excluded)
                return found
            if found.fill == -math.inf:
                found.biases += [dataclasses.replace(m, fill=-math.inf) for m in found.masks]
                found.masks = []
            else:
                self._masks_to_biases(found)
        found.masks.append(mask)
        found.fill = fill
        return found


_HANDLERS: dict[str, Callable[[_Step], Scores]] = {
    **dict.fromkeys(("add", "sub", "rsub"), _Step._sum),
    **dict.fromkeys(("maximum", "clamp_min", "clamp"), _Step._floored),
    **{name: getattr(_Step, "_" + name) for name in ("mul", "div")},
}
