"""Every spelling of a linear map in one form: out = linear input with its D axis mapped to V by a [V, D] weight.

The *linear input* of a linear's output is a tensor of the output's shape with D in the place of V. For `F.linear(x, w)`
it is x itself; for `w @ x.transpose(1, 2)` it is `x.transpose(1, 2)`; for an einsum a permutation of x. An operation
that moves rows of the output (views, slices, permutes) moves rows of the linear input in the same way. Patterns use
this to move a reduction from the output to the input.
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
from .fakes import fake, same_sizes
from .indices import is_full, taken
from .layout import laid_out
from .mesh import local_part, settled, shared_bias, spread_alike, spread_by_row, summand
from .no_match import remembered
from .parts import entry_of_axis
from .shapes import order_of
from .values import is_parameter, only_along, uniform
from .view import GraphView, label
from .vocabulary import COPIES, SPREADS


@dataclasses.dataclass(frozen=True)
class Linear:
    """One reading of a matmul node as a linear map.

    node: the matmul. source: the input in the program, which must not change before it is read again.
    v_dim: the axis of the output that is V. linear_input, weight: build the linear input and the [V, D] weight.
    bias: [V] or None. weight_source: the tensor the weight comes from. within: nodes before `node` that belong to it.
    make_bias: builds the bias, if it differs from `bias`. order: the permutation from the source to the linear input;
    None where they are the same. finish: computes `node` from the map's result, if they differ. also: further tensors
    that `finish` or `weight` reads. parts: if `node` is a sum of maps, these maps in the order of their columns in D.
    d_axes, v_axes: the numbers of neighbouring axes of the source that form D, and of `node` that form V, from `v_dim`
    on.
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
        """The tensors that are read in addition to the source."""
        return [t for t in (self.weight_source, self.bias, *self.also) if t is not None]

    def times(self, number: float) -> Linear:
        """Return the map multiplied by a number."""
        if number == 1:
            return self

        def scaled(make: Make) -> Make:
            return lambda e: e.call(operator.mul, make(e), number)

        make_bias = None if self.bias is None else scaled(self.emit_bias)
        return dataclasses.replace(self, weight=scaled(self.weight), make_bias=make_bias)

    def emit_bias(self, e: Emitter) -> fx.Node | None:
        """Emit the bias, [V], or return None."""
        return self.bias if self.make_bias is None else self.make_bias(e)

    @property
    def over_last(self) -> bool:
        """Whether the map is along the last axis of both the source and the result."""
        return self.order is None and self.v_dim + self.v_axes == fake(self.node).dim()

    @property
    def d_dim(self) -> int:
        """The axis of the source that is D; the first, if there are several."""
        return self.v_dim if self.order is None else self.order[self.v_dim]


@remembered
def linears(view: GraphView, node: fx.Node) -> list[Linear] | None:
    """Return the readings of `node` as a linear map: several where either operand may be the weight, an empty list if
    both are batched, and None if it is no matmul."""
    call = view.call(node)
    if not view.is_tensor(node):
        return None
    if call.name == "to_local":
        return _local(view, node)
    product = contraction(view, node)
    if product is None:
        return [] if call.name in PRODUCTS else None
    if (call.name == "einsum" and not product.summed) or view.name_of(product.nodes[0]) == "mul":
        return None
    found = _scaled(view, product)
    if call.name == "sum":
        return found or None
    if product.bias is None or product.weight:
        return found
    bias, beta = product.bias
    if _exact(beta, node) is None:
        return []
    bias, _ = view.behind(bias, SPREADS)  # broadcasting gives the same result

    def vector(e: Emitter) -> fx.Node:
        b = bias if len(view.shape(bias)) == 1 else e.method("flatten", bias)
        return b if beta == 1 else e.call(operator.mul, b, beta)

    return [
        dataclasses.replace(f, bias=bias, make_bias=vector)
        for f in found
        if only_along(view, bias, view.shape(node), f.v_dim)
    ]


def why_not_linear(view: GraphView, node: fx.Node) -> str:
    """Return the reason why a matmul has no reading as a linear map."""
    product, name = contraction(view, node), label(node)
    if product is None:
        return f"{name} is not followed as a product of two tensors"
    if product.scale != 0 and _exact(product.scale, node) is None:
        return f"{name} multiplies by {product.scale:g}, which would round the weight"
    if product.bias is not None and _scaled(view, product):
        return f"{name} adds more than a bias of the outputs, or multiplies that by a number which rounds it"
    if has_weights_of_entries(view, node):
        return f"{name} is batched: every entry of a batch has a weight of its own, and the operator takes one"
    return "both operands of the matmul are batched: neither is a weight"


def has_weights_of_entries(view: GraphView, node: fx.Node) -> bool:
    """Whether a node is a product that multiplies the entries of a batch with those of a parameter."""
    product = contraction(view, node) if linears(view, node) == [] else None
    return product is not None and any(is_parameter(view, o.node) for o in product.operands)


def added(view: GraphView, node: fx.Node) -> list[Linear]:
    """Return the readings of an addmm or baddbmm that adds more than a bias, such as a residual."""
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
    """Return a number if multiplying a weight by it is exact, else None.

    Powers of two are exact, but not in fp16, where small values would underflow.
    """
    if number in (0, 1):
        return number
    exact = abs(math.frexp(number)[0]) == 0.5 and fake(node).dtype != torch.float16
    return number if exact else None


def _scaled(view: GraphView, product: Contraction) -> list[Linear]:
    """Return the readings of a product, with its scale multiplied into the weight, and without the bias of an addmm."""
    sides = [(product.a, product.b), (product.b, product.a)][: 1 if product.weight else 2]
    found = [f for x, w in sides if (f := _reading(view, product, x, w)) is not None]
    alpha = _exact(product.scale, product.node)
    return [f.times(alpha) for f in found] if alpha else []


def _reading(view: GraphView, product: Contraction, x: Operand, w: Operand) -> Linear | None:
    """Read a product of x with a matrix as a linear map, or return None."""
    w = _matrix(view, w)
    kept = [letter for letter in w.axes if letter is not None]
    if len(kept) > 2 and not (
        is_parameter(view, w.node)
        and _merge(w.node, w.axes, [c for c in kept if c not in product.axes])
        and _merge(w.node, w.axes, [c for c in product.axes if c in kept])
    ):
        return None
    bias = product.bias[0] if product.weight and product.bias is not None else None
    found = _map(product.node, x, w, product.axes, bias=bias)
    return found and dataclasses.replace(found, within=product.nodes[:-1])


def _merge(t: fx.Node, axes: Sequence[str | None], letters: Sequence[str | None]) -> bool:
    """Whether some axes of a tensor, in this order, can be merged to one without a copy."""
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
    """Read `node` as the linear map of x by a matrix w: D is summed over, and V is in w alone. Several axes of each are
    merged to one. at: for each operand, the axes on which one entry is selected first, and that entry."""
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
    """Return an operand without broadcast batch axes that were added to it."""
    node, axes = w.node, list(w.axes)
    while len(axes) > 2 and not w.written:
        call = view.call(node)
        x = call.get("input")
        if call.inplace or not view.is_tensor(x) or len(view.shape(x)) < 2:
            break
        if view.value(x, w.reader) is not x:
            break  # x was written to after the copy
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
    """Return the readings of a process's local part of a linear on DTensors. Without communication, it is the linear of
    the local parts."""
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
    """Return the reading of a linear on DTensors where each process computes one summand from its local tensors."""
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


# Gate and up projections are often stored as one parameter [2, D, V], computed in one product and split afterwards:
# einsum("bsd,edv->ebsv", x, w)[i] is the linear map x @ w[i].


def entry_of_stack(view: GraphView, node: fx.Node) -> Linear | None:
    """Return the linear map of a node that selects one of several maps computed together; else None."""
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
    """Return the entry of an axis to select from an operand: the first if the operand repeats along the axis."""
    repeated = letter in o.axes and uniform(
        view, o.node, len(o.axes) - o.axes.index(letter), o.reader
    )
    return 0 if repeated else index
