"""Every spelling of a product of two tensors in one form: letters for axes, as in an einsum.

A linear, a matmul with any batch axes, an addmm, an einsum, a tensordot, a convolution of width 1, and a product
followed by a sum are read here and nowhere else. The callers decide on the role of an operand: a weight, or a batch of
keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .fakes import same_size
from .indices import listed
from .names import Call
from .no_match import remembered
from .view import GraphView

Letters = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A factor and its axes: a letter for each, or None for an axis of size 1 that is broadcast.

    written: a part of it was written in place before it is read, as in a cache of keys, so that the factor is the
    contents of the memory of `node` and not the result of `node`.
    """

    node: fx.Node
    reader: fx.Node
    axes: Letters
    written: bool = False


@dataclasses.dataclass(frozen=True)
class Contraction:
    """out[axes] = scale * sum over the letters that are not in `axes` of a * b, plus factor * bias.

    nodes: the nodes that compute it, the product first. bias: None, or a tensor that broadcasts to the result, and its
    factor; for a linear and a convolution the tensor is [V], along `bias_dim` of the result. weight: whether `b` is a
    weight by its position, as the second argument of a linear and a convolution.
    """

    node: fx.Node
    a: Operand
    b: Operand
    axes: Letters
    nodes: tuple[fx.Node, ...]
    scale: float = 1.0
    bias: tuple[fx.Node, float] | None = None
    bias_dim: int = -1
    weight: bool = False

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return self.a, self.b

    @property
    def summed(self) -> set[str]:
        both = (*self.a.axes, *self.b.axes)
        return {letter for letter in both if letter is not None and letter not in self.axes}

    @property
    def of_matrices(self) -> bool:
        """Whether neither operand is a single vector: such a product has one query or one key."""
        return all(len(o.axes) > 1 for o in self.operands)


@remembered
def contraction(view: GraphView, node: fx.Node) -> Contraction | None:
    """Return `node` as a product of two tensors; None if it is not one."""
    call = view.call(node)
    read = _READERS.get(call.name)
    if read is None:
        return None
    tensors = [node, *(call.args[k] for k in ("input", "other", "weight") if k in call.args)]
    return read(view, node, call) if all(map(view.is_tensor, tensors)) else None


def _operand(view: GraphView, node: Any, reader: fx.Node, axes: Sequence[Any]) -> Operand | None:
    """Return an operand as `reader` sees it; None if its axes do not match."""
    if not view.is_tensor(node) or len(view.shape(node)) != len(axes):
        return None
    seen = view.value(node, reader)
    if seen is None or not view.is_tensor(seen):  # x[...] = y has no result
        return Operand(node, reader, tuple(axes), written=True)
    return Operand(seen, reader, tuple(axes))


def _product(
    view: GraphView,
    node: fx.Node,
    x: Any,
    y: Any,
    xs: Sequence[Any],
    ys: Sequence[Any],
    out: Sequence[str],
    **fields: Any,
) -> Contraction | None:
    """Return x with the axes `xs` times y with the axes `ys`; None where an operand has an axis twice (a diagonal).

    An axis that has size 1 in one operand, and another size or no counterpart in the other, loses its letter.
    """
    if any(len(set(s)) != len(s) for s in ([c for c in xs if c], [c for c in ys if c], out)):
        return None
    a, b = _operand(view, x, node, xs), _operand(view, y, node, ys)
    if a is None or b is None or len(out) != len(view.shape(node)):
        return None
    size: dict[str, Any] = {}
    for o in (a, b):
        for letter, s in zip(o.axes, view.shape(o.node)):
            if letter is not None and (letter not in size or same_size(size[letter], 1)):
                size[letter] = s
    # An axis of size 1 in both operands, or in the result, keeps its letter.
    ones = {c for c in ({*a.axes} & {*b.axes}) | {*out} if c in size and same_size(size[c], 1)}

    def trimmed(o: Operand) -> Operand:
        sizes = view.shape(o.node)
        axes = (c if c in ones or not same_size(s, 1) else None for c, s in zip(o.axes, sizes))
        return dataclasses.replace(o, axes=tuple(axes))

    return Contraction(node, trimmed(a), trimmed(b), tuple(out), (node,), **fields)


def _matmul(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    return _of_matrices(
        view, node, call["input"], call["other" if "other" in call.args else "weight"]
    )


def _multi_dot(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    """Read a product of exactly two tensors. With more, the intermediate products have no nodes."""
    if len(tensors := listed(call["tensors"])) != 2 or not all(map(view.is_tensor, tensors)):
        return None
    return _of_matrices(view, node, *tensors)


def _of_matrices(view: GraphView, node: fx.Node, x: Any, y: Any) -> Contraction | None:
    n, m = len(view.shape(x)), len(view.shape(y))
    batch = [f"b{i}" for i in range(max(n, m) - 2)]
    xs = [*batch[max(0, len(batch) - n + 2) :], "i", "d"] if n > 1 else ["d"]
    ys = [*batch[max(0, len(batch) - m + 2) :], "d", "j"] if m > 1 else ["d"]
    return _product(view, node, x, y, xs, ys, [*batch, *"i"[: n - 1], *"j"[: m - 1]])


def _added(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    beta, alpha = view.const(call.get("beta", 1)), view.const(call.get("alpha", 1))
    found = _matmul(view, node, call)
    if found is None or beta is None or alpha is None:
        return None
    bias = (call["bias"], beta) if beta != 0 else None
    return dataclasses.replace(found, scale=alpha, bias=bias)


def _linear(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    x, w, bias = call["input"], call["weight"], call.get("bias")
    if len(view.shape(w)) != 2:
        return None
    rows = [f"b{i}" for i in range(len(view.shape(x)) - 1)]
    beside = _with_weight(bias, -1)
    return _product(view, node, x, w, [*rows, "d"], ["v", "d"], [*rows, "v"], **beside)


def _conv(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    """Read a convolution of width 1, a linear over the channel axis: [B, D, S, ...] -> [B, V, S, ...]."""
    x, w = call["input"], call["weight"]
    sizes = view.shape(w)[2:]

    def every(value: Any, *accepted: Any) -> bool:
        return all(v in accepted for v in listed(value))

    plain = every(call.get("stride", 1), 1) and every(call.get("padding", 0), 0, "valid", "same")
    if not plain or call.get("groups", 1) != 1 or not all(same_size(s, 1) for s in sizes):
        return None
    batch = ["b"] * (len(view.shape(x)) - len(sizes) - 1)
    space = [f"s{i}" for i in range(len(sizes))]
    ws = ["v", "d", *[None] * len(sizes)]
    beside = _with_weight(call.get("bias"), -1 - len(sizes))
    return _product(view, node, x, w, [*batch, "d", *space], ws, [*batch, "v", *space], **beside)


def _with_weight(bias: Any, dim: int) -> dict[str, Any]:
    """Return the fields of a product with a weight and perhaps a bias."""
    if not isinstance(bias, fx.Node):
        return {"weight": True}
    return {"weight": True, "bias": (bias, 1.0), "bias_dim": dim}


def _inner(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    a, b = call["input"], call["other"]
    return _over(view, node, a, b, [-1], [-1])


def _vecdot(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    a, b, dim = call["input"], call["other"], call.get("dim", -1)
    xs, ys, out = _side_by_side(view, a, b)
    if not isinstance(dim, int):
        return None
    return _product(view, node, a, b, xs, ys, [c for c in out if c != out[dim]])


def _side_by_side(view: GraphView, x: Any, y: Any) -> tuple[list[str], list[str], list[str]]:
    """Return the letters of x, y and x * y."""
    n, m = len(view.shape(x)), len(view.shape(y))
    names = [f"m{i}" for i in range(max(n, m))]
    return names[len(names) - n :], names[len(names) - m :], names


def _tensordot(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    a, b, dims = call["input"], call["other"], call.get("dims", 2)
    if isinstance(dims, int):
        dims = [*range(-dims, 0)], [*range(dims)]
    if not isinstance(dims, (tuple, list)) or len(dims) != 2:
        return None
    first, second = map(listed, dims)
    if not all(isinstance(d, int) for d in (*first, *second)):
        return None
    return _over(view, node, a, b, first, second)


def _over(
    view: GraphView, node: fx.Node, a: Any, b: Any, first: Sequence[int], second: Sequence[int]
) -> Contraction | None:
    """Return the product over the axes `first` of a and `second` of b."""
    if len(first) != len(second):
        return None
    xs = [f"a{i}" for i in range(len(view.shape(a)))]
    ys = [f"b{i}" for i in range(len(view.shape(b)))]
    if not (xs and ys):
        return None
    for i, j in zip(first, second):
        xs[i] = ys[j] = f"d{i % len(xs)}"
    return _product(view, node, a, b, xs, ys, [c for c in (*xs, *ys) if c[0] != "d"])


def _einsum(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    found = lettered(view, call)
    if found is None or len(found[0]) != 2 or not all(map(view.is_tensor, found[0])):
        return None
    (x, y), (xs, ys), out = found
    return _product(view, node, x, y, list(xs), list(ys), list(out))


def lettered(view: GraphView, call: Call) -> tuple[tuple[Any, ...], tuple[str, ...], str] | None:
    """Return the operands of an einsum, their letters and those of the result. Axes of an ellipsis are capitals."""
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


def _sum(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    """Read (a * b).sum(dim), and the sum of a product over batch axes: einsum("bld,ldv->blv").sum(1)."""
    product, dims = call["input"], listed(call.get("dim"))
    inner = view.call(product)
    if inner.inplace or call.get("dtype") is not None or view.value(product, node) is not product:
        return None
    elementwise = inner.name == "mul"
    found = _elementwise(view, product, inner) if elementwise else contraction(view, product)
    if found is None or found.scale != 1 or found.bias is not None:
        return None
    if not (found.axes and dims and all(isinstance(d, int) for d in dims)):
        return None
    gone = {d % len(found.axes) for d in dims}
    both = {*found.a.axes} & {*found.b.axes}
    if not elementwise and (
        view.dtype(node) != view.dtype(product) or any(found.axes[i] not in both for i in gone)
    ):
        return None
    keepdim = bool(call.get("keepdim"))
    axes = (None if i in gone else c for i, c in enumerate(found.axes) if keepdim or i not in gone)
    return dataclasses.replace(found, node=node, axes=tuple(axes), nodes=(*found.nodes, node))


def _elementwise(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    x, y = call["input"], call["other"]
    if not (view.is_tensor(x) and view.is_tensor(y)):
        return None
    return _product(view, node, x, y, *_side_by_side(view, x, y))


_READERS: dict[str, Callable[[GraphView, fx.Node, Call], Contraction | None]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _added),
    "einsum": _einsum,
    "tensordot": _tensordot,
    "inner": _inner,
    "vecdot": _vecdot,
    "multi_dot": _multi_dot,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    "sum": _sum,
}
PRODUCTS = frozenset(_READERS) - {"sum"}
# Those that can multiply the last axis by one matrix. Of the others, bmm and baddbmm have a matrix for each element of
# the batch, a convolution sums over axis 1, vecdot has no matrix, and multi_dot has several.
LAST_AXIS_PRODUCTS = frozenset("linear matmul mm addmm einsum tensordot inner".split())
