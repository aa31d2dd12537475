"""The walk from a reduction up to the linear that feeds it, and the list of steps it yields.

`climb` goes up through producers and notes what it passes; `Chain` goes back down with the linear known, follows the
vocabulary axis through every view, and sorts each operand into constant, per token or neither. What comes out is
a program (`epilogue.steps`) that is both what is proved about the subgraph and what the operator executes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from ..epilogue.steps import Program, Step
from .emit import Emitter
from .gemm import Linear, linears
from .graph import GraphView, fake, same_size
from .names import Call
from .shapes import SHAPE_OPS, Decline, Move, move

__all__ = ["Chain", "Element", "Spine", "climb"]

_MAX_DEPTH = 64

# Scalar functions without arguments that are one step, or a fixed sequence of steps.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
_FIXED: dict[str, tuple[Step, ...]] = {
    **{
        n: (Step(n),)
        for n in (
            "relu log log1p log2 log10 exp expm1 sqrt square tanh sigmoid atan asinh erf logsigmoid softsign"
        ).split()
    },
    "neg": (Step("mul", (-1.0,)),),
    "reciprocal": (Step("pow", (-1.0,)),),
    "rsqrt": (Step("pow", (-0.5,)),),
    "exp2": (Step("mul", (math.log(2.0),)), Step("exp")),
    "relu6": (Step("clamp_min", (0.0,)), Step("clamp_max", (6.0,))),
    "selu": (Step("elu", (_SELU_ALPHA, _SELU_SCALE)),),
    "hardsigmoid": (
        Step("add", (3.0,)),
        Step("clamp_min", (0.0,)),
        Step("clamp_max", (6.0,)),
        Step("mul", (1 / 6,)),
    ),
    "positive": (),
}
_IDENTITY = {"contiguous", "clone", "alias", "lift_fresh", "positive"}
_NOT_MONOTONE = {
    "abs", "sin", "cos", "gelu", "silu", "mish", "hardswish", "cosh", "sign", "tan", "tanhshrink", "floor",
    "ceil", "round", "trunc", "erfc", "sinh",
}  # fmt: skip
_COMPARE = {"gt", "ge", "lt", "le"}


@dataclasses.dataclass(frozen=True)
class RowTerm:
    """A row step whose operand is still a node of the user's graph, aligned to the frame it was read in.

    prepare: what to do to the operand first ("neg", "reciprocal", "not" or a factor).
    """

    fn: str
    operand: fx.Node | Callable[[Emitter, fx.Node], fx.Node]
    const: tuple[float, ...] = ()
    prepare: str | float | None = None


@dataclasses.dataclass(frozen=True)
class Element:
    """One thing between the linear and the reduction, and the nodes that do it."""

    node: fx.Node
    terms: tuple[Step | RowTerm, ...] = ()
    shape_op: Call | None = None
    extra: tuple[fx.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Spine:
    """The path from a linear (all its readings) to a value, linear first."""

    linears: tuple[Linear, ...]
    elements: tuple[Element, ...]

    def then(self, element: Element) -> Spine:
        return Spine(self.linears, (*self.elements, element))


def climb(view: GraphView, node: fx.Node, reader: fx.Node, depth: int = 0) -> Spine:
    """The spine that ends in the value `reader` sees of `node`. Raises Decline with the first thing in the way."""
    if depth > _MAX_DEPTH:
        raise Decline("the chain of operations is too long", node)
    seen = view.value(node, reader)
    if seen is None:
        raise Decline("it is changed in place through a view of it", node)
    node = seen
    found = linears(view, node)
    if found is not None:
        if not found:
            raise Decline(
                "both operands of the matmul are batched: there is no vocabulary matrix", node
            )
        return Spine(tuple(found), ())
    call = view.call(node)
    if call is None:
        raise Decline(f"cannot see through {_describe(node)}", node)
    return _Climber(view, node, call, depth).spine()


def _describe(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "an input of the graph: no linear makes these values"
    return getattr(node.target, "__name__", str(node.target))


class _Climber:
    """One node of the climb."""

    def __init__(self, view: GraphView, node: fx.Node, call: Call, depth: int):
        self.view, self.node, self.call, self.depth = view, node, call, depth

    def up(self, x: fx.Node) -> Spine:
        return climb(self.view, x, self.node, self.depth + 1)

    def const(self, x: Any) -> float | None:
        return self.view.const(x, self.node)

    def decline(self, reason: str) -> Decline:
        return Decline(reason, self.node)

    def spine(self) -> Spine:
        call, node, view = self.call, self.node, self.view
        name = call.name
        if name in _IDENTITY:
            return self.up(call["input"]).then(Element(node))
        if name in _FIXED:
            return self.up(call["input"]).then(Element(node, _FIXED[name]))
        if name == "cast":
            return self._cast()
        if name == "detach":
            if torch.is_grad_enabled() and view.requires_grad(call["input"]):
                raise self.decline("detach() cuts the gradient here")
            return self.up(call["input"]).then(Element(node))
        if name == "dropout":
            if call.get("training", True) and call.get("p", 0.5) != 0:
                raise self.decline("dropout is active here")
            return self.up(call["input"]).then(Element(node))
        if name in SHAPE_OPS:
            return self._shape()
        if name in _HANDLERS:
            return _HANDLERS[name](self)
        if name in _NOT_MONOTONE:
            self.up(call["input"])
            raise self.decline(f"{name} is not monotone, so the maximum cannot move past it")
        raise self.decline(
            f"{name} between the linear and the reduction is not an elementwise step"
        )

    # Shape and dtype

    def _cast(self) -> Spine:
        x = self.call["input"]
        if not self.view.is_tensor(x):
            raise self.decline("cast of something that is no tensor")
        if not self.view.dtype(self.node).is_floating_point:
            raise self.decline(f"the logits become {self.view.dtype(self.node)}")
        if fake(self.node).device != fake(x).device:
            raise self.decline("the logits move to another device")
        return self.up(x).then(Element(self.node))

    def _shape(self) -> Spine:
        x = self.call["input"]
        if self.view.is_tensor(x):
            return self.up(x).then(Element(self.node, shape_op=self.call))
        parent = self.view.call(x)
        if parent is None or parent.name not in ("split", "chunk", "tensor_split", "unbind"):
            raise self.decline(
                f"takes one of the results of {_describe(x) if isinstance(x, fx.Node) else x}"
            )
        spine = climb(self.view, parent["input"], x, self.depth + 1)
        return spine.then(Element(self.node, shape_op=self.call, extra=(x,)))

    # Elementwise steps with constants

    def _scalar(self, *terms: Step) -> Spine:
        return self.up(self.call["input"]).then(Element(self.node, terms))

    def _number(self, key: str, default: Any = None) -> float:
        value = self.const(self.call.get(key, default))
        if value is None:
            raise self.decline(f"{self.call.name} has a {key} that is not a constant")
        return value

    def _leaky_relu(self) -> Spine:
        return self._scalar(Step("leaky_relu", (self._number("negative_slope", 0.01),)))

    def _elu(self) -> Spine:
        if self._number("input_scale", 1.0) != 1:
            raise self.decline("elu with an input scale")
        return self._scalar(Step("elu", (self._number("alpha", 1.0), self._number("scale", 1.0))))

    def _celu(self) -> Spine:
        a = self._number("alpha", 1.0)
        if a <= 0:
            raise self.decline(f"celu with alpha {a}")
        return self._scalar(Step("mul", (1 / a,)), Step("elu", (1.0, a)))

    def _softplus(self) -> Spine:
        return self._scalar(
            Step("softplus", (self._number("beta", 1), self._number("threshold", 20)))
        )

    def _threshold(self) -> Spine:
        return self._scalar(Step("threshold", (self._number("threshold"), self._number("value"))))

    def _clamp(self) -> Spine:
        steps = []
        if self.call.get("min") is not None:
            steps.append(Step("clamp_min", (self._number("min"),)))
        if self.call.get("max") is not None:
            steps.append(Step("clamp_max", (self._number("max"),)))
        return self._scalar(*steps)

    def _clamp_min(self) -> Spine:
        return self._scalar(Step("clamp_min", (self._number("min"),)))

    def _clamp_max(self) -> Spine:
        return self._scalar(Step("clamp_max", (self._number("max"),)))

    def _hardtanh(self) -> Spine:
        low, high = self._number("min_val", -1.0), self._number("max_val", 1.0)
        return self._scalar(Step("clamp_min", (low,)), Step("clamp_max", (high,)))

    # Two operands

    def _pick(self, a: Any, b: Any) -> tuple[Spine, int]:
        """Which of two tensor operands the logits come through: its spine and 0 or 1."""
        shape = self.view.shape(self.node)

        def full(x: Any) -> bool:
            if not self.view.is_tensor(x):
                return False
            own = self.view.shape(x)
            return len(own) == len(shape) and all(map(same_size, own, shape))

        first: Decline | None = None
        found: list[tuple[Spine, int]] = []
        for at, x in enumerate((a, b)):
            if full(x):
                try:
                    found.append((self.up(x), at))
                except Decline as e:
                    # Of two reasons the one about real work beats "this is an input".
                    if first is None or "input of the graph" in first.reason:
                        first = e
        if len(found) == 1:
            return found[0]
        if found:
            raise self.decline(f"{self.call.name} combines two tensors of logits")
        raise first or self.decline(f"{self.call.name} of operands that are not logits")

    def _arithmetic(self, a: Any, b: Any, forward: Callable, backward: Callable) -> Spine:
        """f(a, b) with the logits in a (`forward`) or in b (`backward`); each maps (operand, constant) to terms."""
        cb, ca = self.const(b), self.const(a)
        if cb is not None:
            return self.up(a).then(Element(self.node, forward(None, cb)))
        if ca is not None:
            return self.up(b).then(Element(self.node, backward(None, ca)))
        spine, at = self._pick(a, b)
        terms = forward(b, None) if at == 0 else backward(a, None)
        return spine.then(Element(self.node, terms))

    def _add(self) -> Spine:
        k = self._number("alpha", 1)
        return self._sum(self.call["input"], self.call["other"], k)

    def _sub(self) -> Spine:
        return self._sum(self.call["input"], self.call["other"], -self._number("alpha", 1))

    def _rsub(self) -> Spine:
        return self._sum(self.call["other"], self.call["input"], -self._number("alpha", 1))

    def _sum(self, a: Any, b: Any, k: float) -> Spine:
        """a + k * b"""

        def forward(operand: Any, c: float | None) -> tuple:
            return (
                (Step("add", (k * c,)),)
                if c is not None
                else (RowTerm("row_add", operand, prepare=k),)
            )

        def backward(operand: Any, c: float | None) -> tuple:
            scale = () if k == 1 else (Step("mul", (k,)),)
            return (*scale, Step("add", (c,)) if c is not None else RowTerm("row_add", operand))

        return self._arithmetic(a, b, forward, backward)

    def _mul(self) -> Spine:
        a, b = self.call["input"], self.call["other"]
        for x, gate in ((a, b), (b, a)):
            edge = self._edge(gate, x)
            if edge is not None and edge[0] == "gt":  # x * (x > t)
                return self.up(x).then(
                    Element(self.node, (Step("threshold", (edge[1], 0.0)),), extra=edge[2])
                )

        def terms(operand: Any, c: float | None) -> tuple:
            return (Step("mul", (c,)),) if c is not None else (RowTerm("row_mul", operand),)

        return self._arithmetic(a, b, terms, terms)

    def _div(self) -> Spine:
        if self.call.get("rounding_mode") is not None:
            raise self.decline("division that rounds")

        def forward(operand: Any, c: float | None) -> tuple:
            if c == 0:
                raise self.decline("division by zero")
            return (
                (Step("mul", (1 / c,)),)
                if c is not None
                else (RowTerm("row_mul", operand, prepare="reciprocal"),)
            )

        def backward(operand: Any, c: float | None) -> tuple:
            tail = Step("mul", (c,)) if c is not None else RowTerm("row_mul", operand)
            return Step("pow", (-1.0,)), tail

        return self._arithmetic(self.call["input"], self.call["other"], forward, backward)

    def _pow(self) -> Spine:
        a, b = self.call["input"], self.call["other"]
        p, base = self.const(b), self.const(a)
        if p is not None:
            step = {2.0: Step("square"), 0.5: Step("sqrt"), 1.0: Step("mul", (1.0,))}.get(
                p, Step("pow", (p,))
            )
            return self.up(a).then(Element(self.node, (step,)))
        if base is not None and base > 0:
            return self.up(b).then(
                Element(self.node, (Step("mul", (math.log(base),)), Step("exp")))
            )
        raise self.decline("a power whose exponent is not a constant")

    def _maximum(self) -> Spine:
        return self._bound("clamp_min")

    def _minimum(self) -> Spine:
        return self._bound("clamp_max")

    def _bound(self, fn: str) -> Spine:
        def terms(operand: Any, c: float | None) -> tuple:
            if c is None:
                raise self.decline(f"{self.call.name} with a tensor that is not a constant")
            return (Step(fn, (c,)),)

        return self._arithmetic(self.call["input"], self.call["other"], terms, terms)

    # Selection

    def _edge(self, condition: Any, x: Any) -> tuple[str, float, tuple[fx.Node, ...]] | None:
        """("gt" or "lt", t, nodes) where `condition` compares the very value `x` with a constant t.

        A tie x == t is decided as `threshold` does, so >= and <= pass only where the other branch equals t anyway:
        callers check that, or lose one value of measure zero that has no gradient either way.
        """
        nodes: list[fx.Node] = []
        flip = False
        call = self.view.call(condition)
        while call is not None and call.name in ("cast", "invert", "logical_not", "contiguous"):
            nodes.append(condition)
            flip ^= call.name in ("invert", "logical_not")
            condition = call["input"]
            call = self.view.call(condition)
        if call is None or call.name not in _COMPARE or not isinstance(x, fx.Node):
            return None
        nodes.append(condition)
        t, less = self.const(call["other"]), call.name in ("lt", "le")
        operand = call["input"]
        if t is None:
            t, operand, less = self.const(call["input"]), call["other"], not less
        if t is None or not self.view.is_tensor(operand):
            return None
        mine, theirs = self.view.value(x, self.node), self.view.value(operand, condition)
        if mine is None or theirs is None or not self._same(mine, theirs):
            return None
        return ("lt" if less ^ flip else "gt"), t, tuple(nodes)

    def _same(self, a: fx.Node, b: fx.Node) -> bool:
        """The same value up to detach and casts between float types."""
        peel = {"detach", "contiguous", "clone", "alias"}
        while (c := self.view.call(b)) is not None and c.name in peel:
            b = c["input"]
        return self.view.same_value(a, b)

    def _select(self, x: Any, keep: Any, other: Any, negate: bool) -> Spine:
        """x where `keep` (or where not, if `negate`), else the constant `other`."""
        c = self.const(other)
        if c is None:
            raise self.decline("the masked value is a tensor, not a constant")
        edge = self._edge(keep, x)
        if edge is not None:
            above = (edge[0] == "gt") ^ negate
            if not above:
                if edge[1] == c:  # min(x, t)
                    return self.up(x).then(
                        Element(self.node, (Step("clamp_max", (c,)),), extra=edge[2])
                    )
                raise self.decline("keeps the small values and replaces the large ones")
            return self.up(x).then(
                Element(self.node, (Step("threshold", (edge[1], c)),), extra=edge[2])
            )
        term = RowTerm("row_where", keep, (c,), "not" if negate else None)
        return self.up(x).then(Element(self.node, (term,)))

    def _where(self) -> Spine:
        condition, a, b = self.call["condition"], self.call["input"], self.call["other"]
        if self.const(b) is not None:
            return self._select(a, condition, b, negate=False)
        if self.const(a) is not None:
            return self._select(b, condition, a, negate=True)
        raise self.decline("where() chooses between two tensors, neither of them a constant")

    def _masked_fill(self) -> Spine:
        return self._select(self.call["input"], self.call["mask"], self.call["value"], negate=True)

    def _setitem(self) -> Spine:
        """x[index] = constant."""
        return self._assign(self.call["index"], self.call["value"])

    def _index_put(self) -> Spine:
        if self.call.get("accumulate", False):
            raise self.decline("accumulates into the logits")
        return self._assign(
            tuple(self.call["indices"]),
            self.call["value"] if "value" in self.call.args else self.call["values"],
        )

    def _index_fill(self) -> Spine:
        dim = self.call["dim"] % len(self.view.shape(self.node))
        return self._assign((slice(None),) * dim + (self.call["index"],), self.call["value"])

    def _assign(self, index: Any, value: Any) -> Spine:
        x = self.call["input"]
        c = self.const(value)
        if c is None:
            raise self.decline("assigns a tensor into the logits")
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        edge = self._edge(index, x) if isinstance(index, fx.Node) else None
        if edge is not None:
            return self._select(x, index, value, negate=True)

        def keep(e: Emitter, stand_in: fx.Node, v_dim: int) -> fx.Node:
            one = e.call(torch.narrow, stand_in, v_dim, 0, 1)
            ones = e.call(torch.ones_like, one, dtype=torch.bool)
            e.call(operator.setitem, ones, index, False)
            return ones

        return self.up(x).then(
            Element(self.node, (RowTerm("row_where", _Assigned(keep, index), (c,)),))
        )


_HANDLERS: dict[str, Callable[[_Climber], Spine]] = {
    name: getattr(_Climber, "_" + name)
    for name in (
        "leaky_relu elu celu softplus threshold clamp clamp_min clamp_max hardtanh add sub rsub mul div pow maximum "
        "minimum where masked_fill setitem index_put index_fill"
    ).split()
}


@dataclasses.dataclass(frozen=True)
class _Assigned:
    """The keep mask of `x[index] = c`, made by assigning to a mask of ones of the frame's shape."""

    make: Callable[[Emitter, fx.Node, int], fx.Node]
    index: Any

    def touches(self, view: GraphView, v_dim: int, n: int, node: fx.Node) -> bool:
        """Whether the index reaches the V axis."""
        items = list(self.index) if isinstance(self.index, tuple) else [self.index]
        if any(i is Ellipsis for i in items):
            at = next(k for k, i in enumerate(items) if i is Ellipsis)
            used = sum(self._span(view, i) for i in items if i is not Ellipsis)
            items[at : at + 1] = [slice(None)] * (n - used)
        axis = 0
        for item in items:
            span = self._span(view, item)
            if axis <= v_dim < axis + span and item != slice(None):
                return True
            axis += span
        return False

    @staticmethod
    def _span(view: GraphView, item: Any) -> int:
        if isinstance(item, fx.Node) and view.is_tensor(item) and view.dtype(item) == torch.bool:
            return len(view.shape(item))
        return 0 if item is None else 1

    def nodes(self) -> list[fx.Node]:
        items = self.index if isinstance(self.index, tuple) else (self.index,)
        found: list[fx.Node] = []
        fx.map_arg(items, found.append)
        return found


class Chain:
    """A spine read from one linear: the program, its row operands, and how to build the operator's inputs.

    Raises Decline when something is not a constant, not one number a token, or not what the linear's readings allow.
    """

    def __init__(self, view: GraphView, spine: Spine, linear: Linear):
        self.view, self.linear = view, linear
        self.steps: list[Step] = []
        self.rows: list[
            tuple[int, RowTerm, fx.Node]
        ] = []  # (moves applied before it, term, reading node)
        self.moves: list[Move] = []
        self.biases: list[tuple[float, fx.Node, str | float | None, fx.Node]] = []
        self.v_dim = linear.v_dim
        self.nodes: list[fx.Node] = [linear.node]
        self.reads: list[tuple[fx.Node, fx.Node]] = [
            (linear.source, linear.node),
            (linear.weight_source, linear.node),
        ]
        ndim = len(view.shape(linear.node))
        self.origin: list[int | None] = list(range(ndim))
        self.frame = linear.node
        if linear.bias is not None:
            self.reads.append((linear.bias, linear.node))
        for element in spine.elements:
            self._pass(element)

    @property
    def program(self) -> Program:
        return tuple(self.steps)

    # Down the spine

    def _pass(self, element: Element) -> None:
        self.nodes += [*element.extra, element.node]
        if element.shape_op is not None:
            step = move(self.view, element.node, element.shape_op, self.v_dim)
            self.moves.append(step)
            self.v_dim = step.v_dim
            self.origin = [None if o is None else self.origin[o] for o in step.origin]
        for term in element.terms:
            if isinstance(term, Step):
                self.steps.append(term)
            else:
                self._row(term, element.node)
        if not isinstance(
            fake(element.node), torch.Tensor
        ):  # a setitem statement has no value of its own
            return
        self.frame = element.node

    def _row(self, term: RowTerm, node: fx.Node) -> None:
        ndim = len(self.origin)
        if isinstance(term.operand, _Assigned):
            if term.operand.touches(self.view, self.v_dim, ndim, node):
                raise Decline("assigns to single vocabulary entries before the reduction", node)
            self.reads += [(n, node) for n in term.operand.nodes()]
        else:
            operand = term.operand
            if not self.view.is_tensor(operand):
                raise Decline("an operand is a number known only at run time", node)
            if torch.is_grad_enabled() and self.view.requires_grad(operand):
                if self._is_bias(term, operand):
                    self._bias(term, operand, node)
                    return
                raise Decline("a per-token factor is learned: its gradient would be lost", node)
            kind = self._kind(operand, ndim, node)
            if kind == "column":
                self._bias(term, operand, node)
                return
            self.reads.append((operand, node))
        index = len(self.rows)
        self.rows.append((len(self.moves), term, node))
        self.steps.append(Step(term.fn, term.const, index))

    def _kind(self, operand: fx.Node, ndim: int, node: fx.Node) -> str:
        shape = self.view.shape(operand)
        if len(shape) > ndim:
            raise Decline("an operand has more axes than the logits", node)
        at = self.v_dim - (ndim - len(shape))
        if at < 0 or same_size(shape[at], 1) or _uniform(self.view, operand, len(shape) - at, node):
            return "row"
        if all(same_size(s, 1) for a, s in enumerate(shape) if a != at):
            return "column"
        raise Decline("an operand differs by token and by vocabulary entry", node)

    def _is_bias(self, term: RowTerm, operand: fx.Node) -> bool:
        return (
            term.fn == "row_add" and self._kind(operand, len(self.origin), self.frame) == "column"
        )

    def _bias(self, term: RowTerm, operand: fx.Node, node: fx.Node) -> None:
        """A [V] vector added while the chain is still a multiple of the linear is part of the bias."""
        if term.fn != "row_add":
            raise Decline("a factor or mask over the vocabulary stands before the reduction", node)
        if any(s.fn != "mul" or s.consts[0] == 0 for s in self.steps):
            raise Decline("a vector over the vocabulary is added after the activation", node)
        scale = math.prod(s.consts[0] for s in self.steps)
        self.biases.append((scale, operand, term.prepare, node))
        self.reads.append((operand, node))

    # Building the operator's inputs

    def stand_in(self, e: Emitter, upto: int | None = None) -> fx.Node:
        """The linear's input in the shape of the frame, D in the place of V."""
        t = self.linear.stand_in(e)
        for m in self.moves[:upto]:
            t = m.apply(e, t, False)
        return t

    def weight_and_bias(self, e: Emitter) -> tuple[fx.Node, fx.Node | None]:
        """[V, D] and [V], with the slices of V that the moves took."""
        weight, bias = self.linear.weight(e), self.linear.bias
        for scale, operand, prepare, _ in self.biases:
            extra = e.method("flatten", operand) if len(fake(operand).shape) > 1 else operand
            factor = (prepare if isinstance(prepare, (int, float)) else 1.0) / scale
            if factor != 1:
                extra = e.call(operator.mul, extra, factor)
            bias = extra if bias is None else e.call(operator.add, bias, extra)
        for m in self.moves:
            if m.columns is not None:
                weight = e.call(operator.getitem, weight, m.columns)
                bias = None if bias is None else e.call(operator.getitem, bias, m.columns)
        return weight, bias

    def row_operands(self, e: Emitter) -> list[fx.Node]:
        """Every row operand in the shape of the frame, 1 in the place of V."""
        return [self._operand(e, *row) for row in self.rows]

    def _operand(self, e: Emitter, at: int, term: RowTerm, node: fx.Node) -> fx.Node:
        if isinstance(term.operand, _Assigned):
            before = self.moves[at - 1].v_dim if at else self.linear.v_dim
            t = term.operand.make(e, self.stand_in(e, at), before)
        else:
            t = self._aligned(e, term.operand, at)
        match term.prepare:
            case "not":
                t = e.call(torch.logical_not, t)
            case "reciprocal":
                t = e.call(torch.reciprocal, t)
            case int() | float() if term.prepare != 1:
                t = e.call(operator.mul, t, term.prepare)
        for m in self.moves[at:]:
            t = m.apply(e, t, True)
        return t

    def _aligned(self, e: Emitter, t: fx.Node, at: int) -> fx.Node:
        ndim = len(self.moves[at - 1].origin) if at else len(fake(self.linear.node).shape)
        v_dim = self.moves[at - 1].v_dim if at else self.linear.v_dim
        while len(fake(t).shape) < ndim:
            t = e.method("unsqueeze", t, 0)
        if not same_size(fake(t).shape[v_dim], 1):
            t = e.call(torch.narrow, t, v_dim, 0, 1)
        return t


_ELEMENTWISE = {
    "cast", "add", "sub", "rsub", "mul", "div", "neg", "eq", "ne", "gt", "ge", "lt", "le", "and_", "or_", "xor",
    "invert", "logical_not", "where", "clone", "contiguous", "detach", "relu", "clamp", "maximum", "minimum", "log",
    "exp", "abs", "sigmoid", "masked_fill",
}  # fmt: skip


def _uniform(view: GraphView, x: Any, from_end: int, reader: fx.Node) -> bool:
    """Whether a tensor is provably the same all along an axis (counted from the end), expanded or computed so."""
    if not view.is_tensor(x):
        return True
    shape = view.shape(x)
    if len(shape) < from_end or same_size(shape[-from_end], 1):
        return True
    x = view.value(x, reader)
    call = view.call(x)
    if call is None or call.inplace:
        return False
    if view.const(x, reader) is not None:
        return True
    if call.name in ("expand", "expand_as", "repeat", "tile"):
        inner = view.shape(call["input"])
        return (
            len(inner) < from_end
            or same_size(inner[-from_end], 1)
            or (
                same_size(inner[-from_end], shape[-from_end])
                and _uniform(view, call["input"], from_end, x)
            )
        )
    if call.name in _ELEMENTWISE:
        tensors = [
            a
            for k, a in call.args.items()
            if isinstance(a, fx.Node) and not (call.name == "cast" and k != "input")
        ]
        return bool(tensors) and all(_uniform(view, a, from_end, x) for a in tensors)
    return False


def swallowed(view: GraphView, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes in graph order, with those that only read the shape or dtype of one of them and serve no one else."""
    taken = set(nodes)
    grown = True
    while grown:
        grown = False
        for node in list(taken):
            for user in node.users:
                if (
                    user not in taken
                    and user.users
                    and view.name_of(user) in _CONSTANT_LIKE
                    and all(u in taken for u in user.users)
                ):
                    taken.add(user)
                    grown = True
    return tuple(sorted(taken, key=view.order.__getitem__))


_CONSTANT_LIKE = {
    "full_like",
    "zeros_like",
    "ones_like",
    "new_full",
    "new_zeros",
    "new_ones",
    "new_tensor",
}
