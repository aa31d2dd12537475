"""Every spelling of a linear map in one form: out = stand-in with its D axis mapped to V by a [V, D] weight.

The *stand-in* of a linear's output is a tensor of the output's shape with D in the place of V. For `F.linear(x, w)`
it is x itself; for `w @ x.transpose(1, 2)` it is `x.transpose(1, 2)`; for an einsum a permutation of x. Anything
that moves rows of the output about (views, slices, permutes) moves rows of the stand-in the same way, which is
how a pattern carries a reduction from the output back to the input.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .emit import Emitter
from .graph import GraphView, fake, same_size
from .mesh import local_part, settled, shared_bias, spread_alike, spread_by_row, summand
from .names import Call

__all__ = ["Linear", "added", "all_lettered", "lettered", "linears", "summed_over_processes"]

Make = Callable[[Emitter], fx.Node]


@dataclasses.dataclass(frozen=True)
class Linear:
    """One reading of a matmul node as a linear map.

    node: the matmul. source: the input as the user has it, which must not change before it is read again.
    v_dim: the axis of the output that is V. stand_in, weight: build the stand-in and the [V, D] weight.
    bias: [V] or None. weight_source: the tensor the weight comes from. within: nodes before `node` that belong to it.
    make_bias: builds the bias, where it is not `bias` as it stands. order: the permutation of the source that makes the
    stand-in, None where it is the source itself. finish: makes what `node` is of the map's result, where that is more.
    also: what `finish` reads. parts: the maps whose sum it is, if it is one, in the order of their columns in D.
    """

    node: fx.Node
    source: fx.Node
    weight_source: fx.Node
    v_dim: int
    stand_in: Make
    weight: Make
    bias: fx.Node | None = None
    within: tuple[fx.Node, ...] = ()
    make_bias: Make | None = None
    order: tuple[int, ...] | None = None
    finish: Callable[[Emitter, fx.Node], fx.Node] = lambda e, y: y
    also: tuple[fx.Node, ...] = ()
    parts: tuple[Linear, ...] = ()

    @property
    def summands(self) -> tuple[Linear, ...]:
        return self.parts or (self,)

    @property
    def d_dim(self) -> int:
        """The axis of the source that is D."""
        return self.v_dim if self.order is None else self.order[self.v_dim]


def linears(view: GraphView, node: fx.Node) -> list[Linear] | None:
    """The readings of `node` as a linear map: several where either operand may be the weight, none where both are
    batched; None if it is no matmul at all."""
    call = view.call(node)
    read = None if call is None else _READERS.get(call.name)
    if call is None or read is None or not view.is_tensor(node):
        return None
    return read(view, node, call)


def _linear(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    x, w, b = call["input"], call["weight"], call.get("bias")
    if len(view.shape(w)) != 2 or len(view.shape(x)) < 1:
        return []
    return [Linear(node, x, w, len(view.shape(node)) - 1, lambda e: x, lambda e: w, b)]


def _matmul(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    a, b = call["input"], call["other"]
    return _product(view, node, a, b)


def _addmm(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    """beta * bias + alpha * (input @ weight): the numbers go into the bias and the weight."""
    found = _scaled(view, node, call)
    beta = _exact(view.const(call.get("beta", 1)), node)
    if beta is None:
        return []
    if beta == 0:
        return found
    bias = _spread(view, call["bias"])
    return [
        dataclasses.replace(f, bias=bias, make_bias=_vector(view, bias, beta))
        for f in found
        if _one_per_column(view, bias, f)
    ]


def added(view: GraphView, node: fx.Node) -> list[Linear]:
    """The readings of an addmm or baddbmm that adds more than a bias: a residual, say."""
    call = view.call(node)
    if call is None or call.name not in ("addmm", "baddbmm") or not view.is_tensor(node):
        return []
    beta, summand = view.const(call.get("beta", 1)), call["bias"]
    if not beta or not view.is_tensor(summand):
        return []

    def finish(e: Emitter, y: fx.Node) -> fx.Node:
        t = e.cast(summand, fake(node).dtype)
        return e.call(operator.add, y, t if beta == 1 else e.call(operator.mul, t, beta))

    return [
        dataclasses.replace(f, finish=finish, also=(summand,)) for f in _scaled(view, node, call)
    ]


def _exact(number: float | None, node: fx.Node) -> float | None:
    """A number that changes no mantissa of what it multiplies, else None; in fp16, what is small would underflow."""
    if number is None or number in (0, 1):
        return number
    exact = abs(math.frexp(number)[0]) == 0.5 and fake(node).dtype != torch.float16
    return number if exact else None


def _scaled(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    """alpha * (input @ weight), the number in the weight."""
    found = _product(view, node, call["input"], call["weight"])
    alpha = _exact(view.const(call.get("alpha", 1)), node)
    if not alpha:
        return []
    if alpha == 1:
        return found

    def times(weight: Make) -> Make:
        return lambda e: e.call(operator.mul, weight(e), alpha)

    return [dataclasses.replace(f, weight=times(f.weight)) for f in found]


def _spread(view: GraphView, bias: fx.Node) -> fx.Node:
    """What was expanded, which broadcasts to the same."""
    while (call := view.call(bias)) is not None and call.name in ("expand", "expand_as"):
        if not view.is_tensor(call["input"]):
            break
        bias = call["input"]
    return bias


def _one_per_column(view: GraphView, bias: fx.Node, linear: Linear) -> bool:
    """Whether a tensor that broadcasts to the result varies over the axis V alone, and covers it."""
    shape, sizes = view.shape(linear.node), view.shape(bias)
    at = linear.v_dim - (len(shape) - len(sizes))
    return at >= 0 and all(
        same_size(size, shape[linear.v_dim] if d == at else 1) for d, size in enumerate(sizes)
    )


def _vector(view: GraphView, bias: fx.Node, beta: float) -> Make | None:
    flat = len(view.shape(bias)) == 1
    if flat and beta == 1:
        return None

    def make(e: Emitter) -> fx.Node:
        b = bias if flat else e.method("flatten", bias)
        return b if beta == 1 else e.call(operator.mul, b, beta)

    return make


def _product(view: GraphView, node: fx.Node, a: Any, b: Any) -> list[Linear]:
    if not (view.is_tensor(a) and view.is_tensor(b)):
        return []
    n = len(view.shape(node))
    if len(view.shape(b)) == 1 and (left := _matrix(view, a)) is not None and n == 1:
        base, flipped = left  # a is [V, D], and there is one token
        return [Linear(node, b, base, 0, lambda e: b, _oriented(base, flipped))]
    if len(view.shape(a)) < 1 or len(view.shape(b)) < 2:
        return []
    found = []
    if (right := _matrix(view, b)) is not None and len(view.shape(a)) == n:
        base, flipped = right  # b is [D, V]: the weight is its transpose
        found.append(Linear(node, a, base, n - 1, lambda e: a, _oriented(base, not flipped)))
    left = _matrix(view, a) if len(view.shape(a)) > 1 else None
    if left is not None and len(view.shape(b)) == n:
        base, flipped = left  # a is [V, D]
        found.append(Linear(node, b, base, n - 2, lambda e: b, _oriented(base, flipped)))
    return found


def _oriented(base: fx.Node, transpose: bool) -> Make:
    return (lambda e: e.method("t", base)) if transpose else (lambda e: base)


def _matrix(view: GraphView, node: fx.Node, flipped: bool = False) -> tuple[fx.Node, bool] | None:
    """(2-D base, whether transposed) of a matrix that was only given broadcast batch axes."""
    shape = view.shape(node)
    if len(shape) == 2:
        return node, flipped
    call = view.call(node)
    if call is None or call.inplace:
        return None
    x = call.get("input")
    if not view.is_tensor(x):
        return None
    inner = view.shape(x)
    same_matrix = len(inner) >= 2 and all(map(same_size, inner[-2:], shape[-2:]))
    n = len(shape)
    match call.name:
        case "expand" | "expand_as" | "contiguous" | "clone" | "repeat" | "tile":
            return _matrix(view, x, flipped) if same_matrix else None
        case "unsqueeze":
            ok = same_matrix and call["dim"] % n < n - 2
            return _matrix(view, x, flipped) if ok else None
        case "getitem":
            index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
            ok = same_matrix and index and index[0] is None and all(_is_full(i) for i in index[1:])
            return _matrix(view, x, flipped) if ok else None
        case "mT":
            return _matrix(view, x, not flipped)
        case "transpose":
            dims = {call["dim0"] % n, call["dim1"] % n}
            return _matrix(view, x, not flipped) if dims == {n - 1, n - 2} else None
        case "permute":
            order = [d % n for d in call["dims"]]
            return _matrix(view, x, not flipped) if order == [*range(n - 2), n - 1, n - 2] else None
    return None


def _is_full(index: Any) -> bool:
    return index is Ellipsis or index == slice(None)


def lettered(view: GraphView, call: Call) -> tuple[tuple[Any, ...], tuple[str, str], str] | None:
    """An einsum of two operands: these, their letters and those of the result, each axis of an ellipsis a capital."""
    found = all_lettered(view, call)
    if found is None or len(found[0]) != 2:
        return None
    operands, terms, out = found
    return operands, (terms[0], terms[1]), out


def all_lettered(
    view: GraphView, call: Call
) -> tuple[tuple[Any, ...], tuple[str, ...], str] | None:
    """The same of any number of operands."""
    operands, equation = call.get("operands", ()), call["equation"]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return None
    equation = equation.replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return None
    if not arrow:
        letters = "".join(terms).replace(".", "")
        out = ("..." if "..." in inputs else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    if "..." in equation:
        spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
        extra = [len(view.shape(o)) - len(t.replace("...", "")) for o, t in zip(operands, terms)]
        if min(extra) < 0:
            return None
        fill = ["".join(spare[max(extra) - k : max(extra)]) for k in extra]
        terms = [t.replace("...", f) for t, f in zip(terms, fill)]
        out = out.replace("...", "".join(spare[: max(extra)]))
    return operands, tuple(terms), out


def _einsum(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    found = lettered(view, call)
    if found is None:
        return []
    operands, terms, out = found
    return [
        f
        for i in (1, 0)
        if (f := _contract(view, node, operands[1 - i], terms[1 - i], operands[i], terms[i], out))
    ]


def _contract(view: GraphView, node, x, xs: str, w, ws: str, out: str) -> Linear | None:
    """x with letters `xs` times a two-letter weight."""
    if len(set(xs)) != len(xs) or len(set(ws)) != 2 or len(ws) != 2 or len(set(out)) != len(out):
        return None
    reduced = [c for c in ws if c in xs and c not in out]
    kept = [c for c in ws if c not in xs and c in out]
    if len(reduced) != 1 or len(kept) != 1 or set(xs) - {reduced[0]} | {kept[0]} != set(out):
        return None
    d, v = reduced[0], kept[0]
    if len(view.shape(x)) != len(xs) or len(view.shape(w)) != 2:
        return None
    order = [xs.index(d if c == v else c) for c in out]
    stand_in = (
        (lambda e: x)
        if order == sorted(order)
        else (lambda e: e.method("permute", x, tuple(order)))
    )
    weight = _oriented(w, ws == d + v)
    return Linear(node, x, w, out.index(v), stand_in, weight, order=tuple(order))


def _tensordot(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    a, b, dims = call["input"], call["other"], call.get("dims", 2)
    n, m = len(view.shape(a)), len(view.shape(b))
    if dims == 1:
        dims = ([n - 1], [0])
    if not isinstance(dims, (tuple, list)) or len(dims) != 2:
        return []
    one = [d[0] if isinstance(d, (tuple, list)) and len(d) == 1 else d for d in dims]
    if not all(isinstance(d, int) for d in one):
        return []
    letters = "abcdefghijklmnopqrstuvwxyz"
    xs = list(letters[:n])
    ws = list(letters[n : n + m])
    xs[one[0] % n] = ws[one[1] % m] = "Z"
    out = "".join(c for c in xs + ws if c != "Z")
    found = [_contract(view, node, a, "".join(xs), b, "".join(ws), out)]
    found.append(_contract(view, node, b, "".join(ws), a, "".join(xs), out))
    return [f for f in found if f is not None]


def _inner(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    a, b = call["input"], call["other"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    n, m = len(view.shape(a)), len(view.shape(b))
    xs, ws = letters[: n - 1] + "Z", letters[n : n + m - 1] + "Z"
    found = [
        _contract(view, node, a, xs, b, ws, xs[:-1] + ws[:-1]),
        _contract(view, node, b, ws, a, xs, xs[:-1] + ws[:-1]),
    ]
    return [f for f in found if f is not None]


def _conv(view: GraphView, node: fx.Node, call: Call) -> list[Linear]:
    """A convolution of width 1 is a linear over the channel axis: [B, D, S, ...] -> [B, V, S, ...]."""
    x, w = call["input"], call["weight"]
    sizes = view.shape(w)[2:]

    def every(value: Any, *accepted: Any) -> bool:
        return all(v in accepted for v in (value if isinstance(value, (tuple, list)) else [value]))

    plain = every(call.get("stride", 1), 1) and every(call.get("padding", 0), 0, "valid", "same")
    if not plain or call.get("groups", 1) != 1 or not all(same_size(s, 1) for s in sizes):
        return []
    v_dim = len(view.shape(node)) - len(sizes) - 1
    return [
        Linear(
            node, x, w, v_dim, lambda e: x, lambda e: e.method("flatten", w, 1), call.get("bias")
        )
    ]


def _local(view: GraphView, node: fx.Node, call: Call) -> list[Linear] | None:
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
            stand_in=lambda e: e.call(local_part, x, sums[0]),
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
        stand_in=lambda e: local,
        weight=lambda e: e.call(local_part, w, nothing),
        make_bias=None if b is None else lambda e: e.call(shared_bias, b),
        within=(x,),
        finish=lambda e, y: e.call(summand, y, w),
    )


_READERS: dict[str, Callable[[GraphView, fx.Node, Call], list[Linear] | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "inner": _inner,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "to_local": _local,
}
