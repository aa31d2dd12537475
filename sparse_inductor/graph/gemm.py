"""Every spelling of a linear map in one form: out = linear input with its D axis mapped to V by a [V, D] weight.

The *linear input* of a linear's output is a tensor of the output's shape with D in the place of V. For `F.linear(x, w)`
it is x itself; for `w @ x.transpose(1, 2)` it is `x.transpose(1, 2)`; for an einsum a permutation of x. Anything
that moves rows of the output about (views, slices, permutes) moves rows of the linear input the same way, which is
how a pattern carries a reduction from the output back to the input.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .axes import Atom, Placed
from .contraction import PRODUCTS, Contraction, Letters, Operand, contraction
from .emit import Emitter, Make
from .indices import is_full, taken
from .layout import laid_out
from .mesh import local_part, settled, shared_bias, spread_alike, spread_by_row, summand
from .no_match import remembered
from .parts import entry_of_axis
from .shapes import order_of
from .values import is_parameter, only_along, uniform
from .view import GraphView, fake, label, same_sizes
from .vocabulary import COPIES, SPREADS


@dataclasses.dataclass(frozen=True)
class Linear:
    """One reading of a matmul node as a linear map.

    node: the matmul. source: the input as the user has it, which must not change before it is read again.
    v_dim: the axis of the output that is V. linear_input, weight: build the linear input and the [V, D] weight.
    bias: [V] or None. weight_source: the tensor the weight comes from. within: nodes before `node` that belong to it.
    make_bias: builds the bias, where it is not `bias` as it stands. order: the permutation of the source that makes the
    linear input, None where it is the source itself. finish: makes `node` of the map's result, where that is more.
    also: what `finish` reads, or the weight is made of. parts: the maps whose sum it is, if it is one, in the order of
    their columns in D. d_axes, v_axes: how many neighbouring axes of the source are D, and of `node` are V, the first
    of which is `v_dim`.
    """

    node: fx.Node
    source: fx.Node
    weight_source: fx.Node
    v_dim: int
    linear_input: Make
    weight: Make
    bias: fx.Node | None = None
    within: tuple[fx.Node, ...] = ()
    make_bias: Make | None = None
    order: tuple[int, ...] | None = None
    finish: Callable[[Emitter, fx.Node], fx.Node] = lambda e, y: y
    also: tuple[fx.Node, ...] = ()
    parts: tuple[Linear, ...] = ()
    d_axes: int = 1
    v_axes: int = 1

    @property
    def outputs(self) -> Any:
        """The size of V."""
        return math.prod(fake(self.node).shape[self.v_dim : self.v_dim + self.v_axes])

    @property
    def summands(self) -> tuple[Linear, ...]:
        return self.parts or (self,)

    @property
    def read(self) -> list[fx.Node]:
        """What is read beside the source."""
        return [t for t in (self.weight_source, self.bias, *self.also) if t is not None]

    def times(self, number: float) -> Linear:
        """The map that gives as many times as much."""
        if number == 1:
            return self

        def scaled(make: Make) -> Make:
            return lambda e: e.call(operator.mul, make(e), number)

        make_bias = None if self.bias is None else scaled(self.emit_bias)
        return dataclasses.replace(self, weight=scaled(self.weight), make_bias=make_bias)

    def emit_bias(self, e: Emitter) -> fx.Node | None:
        """[V], or None."""
        return self.bias if self.make_bias is None else self.make_bias(e)

    @property
    def over_last(self) -> bool:
        """Whether rows of the source, along its last axis, become rows of the result."""
        return self.order is None and self.v_dim + self.v_axes == fake(self.node).dim()

    @property
    def d_dim(self) -> int:
        """The axis of the source that is D, of several the first."""
        return self.v_dim if self.order is None else self.order[self.v_dim]


@remembered
def linears(view: GraphView, node: fx.Node) -> list[Linear] | None:
    """The readings of `node` as a linear map: several where either operand may be the weight, none where both are
    batched; None if it is no matmul at all."""
    call = view.call(node)
    if not view.is_tensor(node):
        return None
    if call.name == "to_local":
        return _local(view, node)
    if call.name not in PRODUCTS:
        return None
    product = contraction(view, node)
    if product is None:
        return []
    if call.name == "einsum" and not product.summed:
        return None
    found = _scaled(view, product)
    if product.bias is None or product.weight:
        return found
    bias, beta = product.bias
    if _exact(beta, node) is None:
        return []
    bias, _ = view.behind(bias, SPREADS)  # what was expanded broadcasts to the same

    def vector(e: Emitter) -> fx.Node:
        b = bias if len(view.shape(bias)) == 1 else e.method("flatten", bias)
        return b if beta == 1 else e.call(operator.mul, b, beta)

    return [
        dataclasses.replace(f, bias=bias, make_bias=vector)
        for f in found
        if only_along(view, bias, view.shape(node), f.v_dim)
    ]


def why_not_linear(view: GraphView, node: fx.Node) -> str:
    """Why a matmul has no reading as a linear map."""
    product, name = contraction(view, node), label(node)
    if product is None:
        return f"{name} is not followed as a product of two tensors"
    if product.scale != 0 and _exact(product.scale, node) is None:
        return f"{name} multiplies by {product.scale:g}, which would round the weight"
    if product.bias is not None and _scaled(view, product):
        return f"{name} adds more than a bias of the outputs, or multiplies that by a number which rounds it"
    return "both operands of the matmul are batched: neither is a weight"


def added(view: GraphView, node: fx.Node) -> list[Linear]:
    """The readings of an addmm or baddbmm that adds more than a bias: a residual, say."""
    product = contraction(view, node)
    if product is None or product.weight or product.bias is None:
        return []
    summand, beta = product.bias
    if not view.is_tensor(summand):
        return []

    def finish(e: Emitter, y: fx.Node) -> fx.Node:
        t = e.cast(summand, fake(node).dtype)
        return e.call(operator.add, y, t if beta == 1 else e.call(operator.mul, t, beta))

    return [dataclasses.replace(f, finish=finish, also=(summand,)) for f in _scaled(view, product)]


def _exact(number: float, node: fx.Node) -> float | None:
    """A number that changes no mantissa of what it multiplies, else None; in fp16, what is small would underflow."""
    if number in (0, 1):
        return number
    exact = abs(math.frexp(number)[0]) == 0.5 and fake(node).dtype != torch.float16
    return number if exact else None


def _scaled(view: GraphView, product: Contraction) -> list[Linear]:
    """The readings, without a bias that is no argument of a linear, a number that scales them in the weight."""
    sides = [(product.a, product.b), (product.b, product.a)][: 1 if product.weight else 2]
    found = [f for x, w in sides if (f := _reading(view, product, x, w)) is not None]
    alpha = _exact(product.scale, product.node)
    return [f.times(alpha) for f in found] if alpha else []


def _reading(view: GraphView, product: Contraction, x: Operand, w: Operand) -> Linear | None:
    """A product of x with a matrix as a linear map."""
    w = _matrix(view, w)
    kept = [letter for letter in w.axes if letter is not None]
    if len(kept) > 2 and not (
        is_parameter(view, w.node)
        and _merge(w.node, w.axes, [c for c in kept if c not in product.axes])
        and _merge(w.node, w.axes, [c for c in product.axes if c in kept])
    ):
        return None
    bias = product.bias[0] if product.weight and product.bias is not None else None
    return _map(product.node, x, w, product.axes, bias=bias)


def _merge(t: fx.Node, axes: Sequence[str | None], letters: Sequence[str | None]) -> bool:
    """Whether some axes of a tensor are one axis of its memory, in this order."""
    sizes, strides = fake(t).shape, fake(t).stride()
    at = [axes.index(letter) for letter in letters]
    known = all(isinstance(sizes[d], int) for d in at)
    return known and all(strides[i] == strides[j] * sizes[j] for i, j in itertools.pairwise(at))


def _map(
    node: fx.Node,
    x: Operand,
    w: Operand,
    out: Letters,
    at: Sequence[dict[str, int]] = ({}, {}),
    bias: fx.Node | None = None,
) -> Linear | None:
    """`node` as the linear map of x by a matrix w: D is summed over, V is what the matrix alone has. Of several axes
    each, one is made. at: of both operands, the place along some axes that is taken of them before."""
    x_axes = [c for c in x.axes if c not in at[0] and (c is not None or not at[0])]
    w_axes = [c for c in w.axes if c not in at[1] and c is not None]
    reduced = [c for c in w_axes if c in x_axes and c not in out]
    own = [c for c in out if c in w_axes and c not in x_axes]
    if not (reduced and own) or len(reduced) + len(own) != len(w_axes):
        return None
    v_dim = out.index(own[0])
    last = v_dim + len(own)
    wanted = [*out[:v_dim], *reduced, *out[last:]]
    if [*out[v_dim:last]] != own or None in wanted:
        return None
    if len(wanted) != len(x_axes) or set(wanted) != {*x_axes}:
        return None
    order = [x_axes.index(c) for c in wanted]
    sizes = fake(node).shape[v_dim:last]
    atoms = {c: Atom(0) for c in (*x_axes, *w_axes)}

    def made(o: Operand, places: dict[str, int], groups: Sequence[Sequence[Any]]) -> Make:
        def make(e: Emitter) -> fx.Node:
            t = o.node
            for d, letter in reversed([*enumerate(o.axes)]):
                t = e.method("select", t, d, places[letter]) if letter in places else t
            left = (c for c in o.axes if c not in places)
            placed = Placed(t, node, tuple(() if c is None else (atoms[c],) for c in left))
            return laid_out(e, placed, [[atoms[c] for c in group] for group in groups])

        return make

    def finish(e: Emitter, y: fx.Node) -> fx.Node:
        return y if len(own) == 1 else e.method("unflatten", y, v_dim, tuple(sizes))

    rows = [[c] for c in out]
    return Linear(
        node,
        x.node,
        w.node,
        v_dim,
        made(x, at[0], [*rows[:v_dim], reduced, *rows[last:]]),
        made(w, at[1], [own, reduced]),
        bias,
        order=None if order == sorted(order) else tuple(order),
        finish=finish,
        d_axes=len(reduced),
        v_axes=len(own),
    )


def _matrix(view: GraphView, w: Operand) -> Operand:
    """An operand as it was before it was given broadcast batch axes."""
    node, axes = w.node, list(w.axes)
    while len(axes) > 2 and not w.written:
        call = view.call(node)
        x = call.get("input")
        if call.inplace or not view.is_tensor(x) or len(view.shape(x)) < 2:
            break
        if view.value(x, w.reader) is not x:
            break  # it was copied before it was written to
        inner = view.shape(x)
        order = order_of(call, len(axes))
        if order is not None:
            if order[:-2] != [*range(len(axes) - 2)]:
                break
            axes = [axes[order.index(d)] for d in range(len(axes))]
        elif not same_sizes(inner[-2:], view.shape(node)[-2:]):
            break
        elif call.name in COPIES | SPREADS | {"repeat", "tile"}:
            axes = axes[len(axes) - len(inner) :]
        elif (part := taken(view, call)) is not None and all(map(is_full, part.items)):
            axes = [axis for axis, item in zip(axes, part.items) if item is not None]
        else:
            break
        node = x
    return w if node is w.node else dataclasses.replace(w, node=node, axes=tuple(axes))


def _local(view: GraphView, node: fx.Node) -> list[Linear] | None:
    """A process's part of a linear on DTensors is the linear of the parts where nothing is sent for it."""
    found = settled(view, node)
    if found is None or view.name_of(found[0]) != "linear":
        return None
    inner, between = found
    readings = linears(view, inner)
    if not readings:
        return None
    one = readings[0]
    x, w, b = one.source, one.weight_source, one.bias
    sums = spread_alike(inner, x, w, b)
    if sums is None:
        return None
    return [
        dataclasses.replace(
            one,
            node=node,
            linear_input=lambda e: e.call(local_part, x, sums[0]),
            weight=lambda e: e.call(local_part, w, sums[1]),
            make_bias=None if b is None else lambda e: e.call(local_part, b, sums[1]),
            within=(inner, *between),
        )
    ]


def summed_over_processes(view: GraphView, node: fx.Node) -> Linear | None:
    """A linear on DTensors whose result each process makes a summand of, out of tensors of its own."""
    if view.name_of(node) != "linear":
        return None
    (one,) = linears(view, node) or (None,)
    if one is None:
        return None
    x, w, b = one.source, one.weight_source, one.bias
    local = spread_by_row(view, node, x, w, b)
    if local is None:
        return None
    nothing = (False,) * len(fake(w).placements)
    return dataclasses.replace(
        one,
        source=local,
        linear_input=lambda e: local,
        weight=lambda e: e.call(local_part, w, nothing),
        make_bias=None if b is None else lambda e: e.call(shared_bias, b),
        within=(x,),
        finish=lambda e, y: e.call(summand, y, w),
    )


# Gate and up projections are often kept as one parameter [2, D, V], multiplied at once and taken apart afterwards:
# einsum("bsd,edv->ebsv", x, w)[i] is the linear map x @ w[i].


def entry_of_stack(view: GraphView, node: fx.Node) -> Linear | None:
    """The linear map that a node is, if it takes one of several that are computed together; else None."""
    entry = entry_of_axis(view, view.call(node))
    if entry is None:
        return None
    stack, dim, index, between = entry
    reader = between[-1] if between else node
    product = contraction(view, stack) if view.value(stack, reader) is stack else None
    if product is None or product.bias is not None or product.scale != 1:
        return None
    letter = product.axes[dim]
    out = [c for at, c in enumerate(product.axes) if at != dim]
    for x, w in ((product.a, product.b), (product.b, product.a)):
        if letter is None or letter not in w.axes or x.written or w.written:
            continue
        at = [{letter: _entry(view, o, letter, index)} for o in (x, w)]
        found = _map(node, x, w, tuple(out), at)
        if found is not None and len({*w.axes} - {None, letter}) == 2:
            within = tuple(dict.fromkeys((*product.nodes, stack, *reversed(between))))
            return dataclasses.replace(found, within=within, order=None)
    return None


def _entry(view: GraphView, o: Operand, letter: str, index: int) -> int:
    """Which entry of an axis is taken of an operand: the first where it is repeated for every entry."""
    repeated = letter in o.axes and uniform(
        view, o.node, len(o.axes) - o.axes.index(letter), o.reader
    )
    return 0 if repeated else index
