"""Every spelling of a product of two tensors in one form: letters for axes, as in an einsum.

Where `gemm` asks for a weight, this takes any two operands: batched on both sides, broadcast, or multiplied and summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from .graph import GraphView, same_size
from .names import Call

__all__ = ["Contraction", "Operand", "contraction"]

Letters = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A factor and its axes: a letter each, None for an axis of one element that is broadcast.

    written: a part of it was written in place before it is read (a cache of keys, say), so that it is the memory of
    `node` that is multiplied and not what `node` says.
    """

    node: fx.Node
    reader: fx.Node
    axes: Letters
    written: bool = False


@dataclasses.dataclass(frozen=True)
class Contraction:
    """out[axes] = scale * sum over the letters that are not in `axes` of a * b, plus factor * bias.

    nodes: what does it, the product first. bias: a tensor that broadcasts to the result, or None.
    """

    node: fx.Node
    a: Operand
    b: Operand
    axes: Letters
    nodes: tuple[fx.Node, ...]
    scale: float = 1.0
    bias: tuple[fx.Node, float] | None = None

    @property
    def summed(self) -> set[str]:
        both = (*self.a.axes, *self.b.axes)
        return {letter for letter in both if letter is not None and letter not in self.axes}


def contraction(view: GraphView, node: fx.Node) -> Contraction | None:
    """How `node` is a product of two tensors; None if it is not."""
    call = view.call(node)
    if call is None or not view.is_tensor(node):
        return None
    match call.name:
        case "matmul" | "mm" | "bmm":
            return _matmul(view, node, call["input"], call["other"])
        case "baddbmm" | "addmm":
            return _added(view, node, call)
        case "einsum":
            return _einsum(view, node, call)
        case "sum":
            return _product_and_sum(view, node, call)
    return None


def _operand(view: GraphView, node: Any, reader: fx.Node, axes: Sequence[str]) -> Operand | None:
    """The operand as `reader` sees it; axes of one element get no letter."""
    if not view.is_tensor(node):
        return None
    if len(view.shape(node)) != len(axes):
        return None
    seen = view.value(node, reader)
    if seen is None or not view.is_tensor(seen):  # x[...] = y has no result
        return Operand(node, reader, tuple(axes), written=True)
    return Operand(seen, reader, tuple(axes))


def _broadcast(
    view: GraphView, node: fx.Node, a: Operand | None, b: Operand | None, out: Sequence[str]
) -> Contraction | None:
    """Letters of axes that have one element in one operand and more in the other are taken off the first."""
    if a is None or b is None or len(out) != len(view.shape(node)):
        return None
    size: dict[str, Any] = {}
    for o in (a, b):
        for letter, s in zip(o.axes, view.shape(o.node)):
            if letter is not None and (letter not in size or same_size(size[letter], 1)):
                size[letter] = s

    def trimmed(o: Operand) -> Operand:
        axes = tuple(
            None
            if letter is None or (same_size(s, 1) and not same_size(size[letter], 1))
            else letter
            for letter, s in zip(o.axes, view.shape(o.node))
        )
        return dataclasses.replace(o, axes=axes)

    return Contraction(node, trimmed(a), trimmed(b), tuple(out), (node,))


def _matmul(view: GraphView, node: fx.Node, x: Any, y: Any) -> Contraction | None:
    if not (view.is_tensor(x) and view.is_tensor(y)):
        return None
    n, m = len(view.shape(x)), len(view.shape(y))
    if n < 2 or m < 2:
        return None  # a product with a vector has one query or one key: nothing to gain
    batch = [f"b{i}" for i in range(max(n, m) - 2)]
    a = _operand(view, x, node, [*batch[len(batch) - n + 2 :], "i", "d"])
    b = _operand(view, y, node, [*batch[len(batch) - m + 2 :], "d", "j"])
    return _broadcast(view, node, a, b, [*batch, "i", "j"])


def _added(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    beta, alpha = view.const(call.get("beta", 1)), view.const(call.get("alpha", 1))
    found = _matmul(view, node, call["input"], call["weight"])
    if found is None or beta is None or alpha is None:
        return None
    bias = (call["bias"], beta) if beta != 0 else None
    return dataclasses.replace(found, scale=alpha, bias=bias)


def _einsum(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    operands, equation = call.get("operands", ()), call["equation"]
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    equation = equation.replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not all(view.is_tensor(o) for o in operands):
        return None
    if not arrow:
        letters = "".join(terms).replace(".", "")
        out = ("..." if "..." in inputs else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    extra = [len(view.shape(o)) - len(t.replace("...", "")) for o, t in zip(operands, terms)]
    spelled = [_letters(t, n) for t, n in zip(terms, extra)]
    # Operands align their ellipses from the right.
    result = _letters(out, max(extra) if "..." in out else 0)
    if any(len(set(s)) != len(s) for s in (*spelled, result)):
        return None  # a diagonal
    a, b = (_operand(view, o, node, s) for o, s in zip(operands, spelled))
    return _broadcast(view, node, a, b, result)


def _letters(term: str, extra: int) -> list[str]:
    """One name an axis; those of an ellipsis are numbered from the right."""
    head, dots, tail = term.partition("...")
    middle = [f".{i}" for i in reversed(range(extra))] if dots else []
    return [*head, *middle, *tail]


def _product_and_sum(view: GraphView, node: fx.Node, call: Call) -> Contraction | None:
    """(a * b).sum(dim)"""
    product = call["input"]
    inner = view.call(product) if view.is_tensor(product) else None
    dim = call.get("dim")
    if inner is None or inner.name != "mul" or inner.inplace or call.get("dtype") is not None:
        return None
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if len(dims) != 1 or not isinstance(dims[0], int):
        return None
    x, y = inner["input"], inner["other"]
    if not (view.is_tensor(x) and view.is_tensor(y)):
        return None
    n = len(view.shape(product))
    names = [f"m{i}" for i in range(n)]
    a = _operand(view, x, product, names[n - len(view.shape(x)) :])
    b = _operand(view, y, product, names[n - len(view.shape(y)) :])
    at = dims[0] % n
    kept = [name for i, name in enumerate(names) if i != at]
    found = _broadcast(view, product, a, b, names)
    if found is None:
        return None
    axes: list[str | None] = list(kept)
    if call.get("keepdim"):
        axes.insert(at, None)
    return dataclasses.replace(found, node=node, axes=tuple(axes), nodes=(product, node))
