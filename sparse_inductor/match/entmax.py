"""Recognising the row transformation: calls of the entmax package, and the many ways to write it out.

    p_i = [(alpha - 1) z_i - tau]_+ ^ (1 / (alpha - 1)),   sum_i p_i = 1

For a written-out version the structure is checked first: a clamp at zero of scores, times alpha - 1, less a threshold
that has one value a row, raised to 1 / (alpha - 1). Given that, p is entmax exactly where its rows sum to one, for
there is only one such threshold; how the threshold is found (sorting, bisection) does not matter. That last point, and
the gradient in training, are tried on concrete rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .entmax_trial import Trial
from .graph import GraphView, same_size
from .shapes import Decline
from .trial import Region, region

__all__ = ["LEAVES", "NOT_ENTMAX", "Transform", "ends_here", "transform"]

LEAVES = frozenset("entmax15 sparsemax entmax_bisect sparsemax_bisect".split())
_OTHERS = {
    "normmax_bisect": "normmax keeps the norm of the probabilities at one, not their sum",
    "budget_bisect": "the probabilities sum to a budget, not to one",
}
NOT_ENTMAX = frozenset(_OTHERS)
# 1 - d ** (1 - alpha) < 1 is halved `n_iter` times; what is left has to be below the rounding errors.
_STEPS = {torch.float64: 45, torch.float32: 19, torch.float16: 10, torch.bfloat16: 7}
_SEARCHES = frozenset("sort topk cumsum where kthvalue".split())


@dataclasses.dataclass(frozen=True)
class Transform:
    """probabilities = entmax(source, alpha, dim)

    node: the probabilities. source: the scores as they are read by `reader`. alpha: a number, or a tensor that
    broadcasts to the scores with one element along `dim`. nodes: what the operator takes the place of.
    note: how it was recognised, where that was no call of the package.
    """

    node: fx.Node
    source: fx.Node
    reader: fx.Node
    dim: int
    alpha: float | fx.Node
    nodes: tuple[fx.Node, ...]
    note: str = ""


def transform(view: GraphView, node: fx.Node) -> Transform | None:
    """The transformation that `node` is the result of; None if it is nothing of the kind.

    Raises Decline where it nearly is.
    """
    memo: dict[fx.Node, Any] = view.__dict__.setdefault("_transforms", {})
    if node not in memo:
        try:
            memo[node] = _transform(view, node)
        except Decline as decline:
            memo[node] = decline
    found = memo[node]
    if isinstance(found, Decline):
        raise found
    return found


def _transform(view: GraphView, node: fx.Node) -> Transform | None:
    if not view.is_tensor(node) or not view.dtype(node).is_floating_point:
        return None
    call = view.call(node)
    if call is None:
        return None
    if call.name in _OTHERS:
        raise Decline(_OTHERS[call.name], node)
    if call.name in LEAVES:
        return _leaf(view, node)
    if call.name == "getitem" and view.name_of(call["input"]) == "autograd_function_apply":
        return _function(view, node, call["input"], call["index"])
    if call.name in ("clamp", "clamp_min", "relu", "pow", "square", "mul", "div", "maximum"):
        return _written(view, node)
    return None


def _leaf(view: GraphView, node: fx.Node) -> Transform:
    call = view.call(node)
    assert call is not None
    x = call["input"]
    dim = call.get("dim", -1)
    if not isinstance(dim, int):
        raise Decline("the dimension is known only at run time", node)
    dim %= max(1, len(view.shape(x)))
    alpha: Any = {"entmax15": 1.5, "entmax_bisect": call.get("alpha", 1.5)}.get(call.name, 2.0)
    if call.name == "entmax_bisect":
        if call.get("ensure_sum_one", True) is not True:
            raise Decline("ensure_sum_one=False leaves the sum as the bisection found it", node)
        steps, enough = call.get("n_iter", 50), _STEPS.get(view.dtype(x), 50)
        if not isinstance(steps, int) or steps < enough:
            raise Decline(
                f"n_iter={steps} stops before {view.dtype(x)} is exact (about {enough} steps), so "
                "the result is another",
                node,
            )
    if isinstance(alpha, fx.Node):
        known = view.const(alpha, node)
        if known is None and not view.is_tensor(alpha):
            raise Decline("alpha is a number known only at run time", node)
        alpha = alpha if known is None else known
    if not isinstance(alpha, fx.Node):
        alpha = _sane(float(alpha), node)
    return Transform(node, x, node, dim, alpha, (node,))


def _sane(alpha: float, node: fx.Node) -> float:
    if not alpha > 1:
        what = "is softmax, which has no zeros" if alpha == 1 else "is no sparse transformation"
        raise Decline(f"alpha={alpha:g} {what}", node)
    return alpha


# Written out


@dataclasses.dataclass(frozen=True)
class _Form:
    """node = [factor * (source - shifts) - tau]_+ ** power, perhaps divided by its sum."""

    clamp: fx.Node
    candidates: tuple[tuple[fx.Node, fx.Node, float], ...]  # (source, its reader, factor)
    dim: int
    power: float | fx.Node


def ends_here(view: GraphView, node: fx.Node) -> bool:
    """Whether a clamp, power or quotient is the last step of something with a threshold, not one in its middle."""
    form = _form(view, node)
    if form is None:
        return False
    mine = {form.clamp, node}
    for user in node.users:
        call = view.call(user)
        if call is None:
            continue
        if call.name in ("pow", "square", "div") and _form(view, user) is not None:
            return False
        if call.name == "mul" and call["input"] is call["other"]:
            return False
        if call.name == "sum" and set(node.users) <= {user, *mine}:
            return False
    return any(view.readers(node))


def _form(view: GraphView, node: fx.Node) -> _Form | None:
    memo: dict[fx.Node, _Form | None] = view.__dict__.setdefault("_forms", {})
    if node not in memo:
        memo[node] = _find_form(view, node)
    return memo[node]


def _find_form(view: GraphView, node: fx.Node) -> _Form | None:
    top = node
    call = view.call(node)
    if call is not None and call.name == "div" and call.get("rounding_mode") is None:
        inner = _normalised(view, node, call)
        if inner is None:
            return None
        node, call = inner, view.call(inner)
    power: float | fx.Node = 1.0
    if call is not None and call.name in ("pow", "square", "mul"):
        if call.name == "mul":
            if call["input"] is not call["other"]:
                return None
            power = 2.0
        elif call.name == "square":
            power = 2.0
        else:
            exponent = call["other"]
            known = view.const(exponent, node)
            if known is None and not isinstance(exponent, fx.Node):
                return None
            power = exponent if known is None else known
        inner = view.value(call["input"], node) if isinstance(call["input"], fx.Node) else None
        if inner is None:
            return None
        node, call = inner, view.call(inner)
    clamped = _clamped(view, node)
    if clamped is None:
        return None
    difference = view.value(clamped, node)
    if difference is None or not view.is_tensor(difference):
        return None
    factor = 1.0
    while (call := view.call(difference)) is not None and call.name in ("mul", "div"):
        step = _constant_factor(view, difference)
        if step is None:
            break
        difference, factor = step[0], factor * step[1]
    if call is None or call.name != "sub" or call.get("alpha", 1) != 1:
        return None
    a, tau = call["input"], call["other"]
    if not (view.is_tensor(a) and view.is_tensor(tau)):
        return None
    dim = _row_axis(view, a, tau)
    if dim is None:
        return None
    candidates = tuple(_scores(view, a, difference, factor, dim))
    return _Form(node, candidates, dim, power) if view.is_tensor(top) else None


def _normalised(view: GraphView, node: fx.Node, call: Any) -> fx.Node | None:
    """P of P / P.sum(dim, keepdim=True), whatever guards the quotient."""
    p, total = call["input"], call["other"]
    if not (view.is_tensor(p) and view.is_tensor(total)):
        return None
    for _ in range(4):
        inner = view.call(total)
        if inner is None:
            return None
        if inner.name == "sum":
            same = inner["input"] is p or view.same_value(p, inner["input"])
            return view.value(p, node) if same else None
        if inner.name not in ("unsqueeze", "clamp", "clamp_min", "add", "maximum", "getitem"):
            return None
        total = inner["input"]
    return None


def _clamped(view: GraphView, node: fx.Node) -> fx.Node | None:
    """x of max(x, 0)."""
    call = view.call(node)
    if call is None:
        return None
    match call.name:
        case "relu":
            return call["input"]
        case "clamp" if call.get("max") is None and view.const(call.get("min"), node) == 0:
            return call["input"]
        case "clamp_min" if view.const(call["min"], node) == 0:
            return call["input"]
        case "maximum":
            for x, other in ((call["input"], call["other"]), (call["other"], call["input"])):
                if view.const(other, node) == 0 and isinstance(x, fx.Node):
                    return x
    return None


def _constant_factor(view: GraphView, node: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, c) of x * c, x / c."""
    call = view.call(node)
    if call is None or not isinstance(call.get("input"), (fx.Node, int, float)):
        return None
    a, b = call["input"], call.get("other")
    if call.name == "mul":
        for x, c in ((a, b), (b, a)):
            known = view.const(c, node)
            if known is not None and view.is_tensor(x):
                seen = view.value(x, node)
                return None if seen is None else (seen, known)
    if call.name == "div" and call.get("rounding_mode") is None:
        known = view.const(b, node)
        if known and view.is_tensor(a):
            seen = view.value(a, node)
            return None if seen is None else (seen, 1 / known)
    return None


def _row_axis(view: GraphView, a: fx.Node, tau: fx.Node) -> int | None:
    """The one axis along which tau has a single value and the scores have not."""
    x, t = view.shape(a), view.shape(tau)
    t = (1,) * (len(x) - len(t)) + t
    if len(t) != len(x):
        return None
    single = [i for i in range(len(x)) if same_size(t[i], 1) and not same_size(x[i], 1)]
    rest = all(same_size(x[i], t[i]) for i in range(len(x)) if i not in single)
    return single[0] if len(single) == 1 and rest else None


def _scores(
    view: GraphView, a: fx.Node, reader: fx.Node, factor: float, dim: int
) -> Iterator[tuple[fx.Node, fx.Node, float]]:
    """What the scores may be, nearest first: each less a value a row and times constants is `a`."""
    seen = view.value(a, reader)
    while seen is not None and view.is_tensor(seen):
        a = seen
        yield a, reader, factor
        call = view.call(a)
        if call is None:
            return
        if call.name in ("mul", "div"):
            step = _constant_factor(view, a)
            if step is None:
                return
            reader, seen, factor = a, step[0], factor * step[1]
        elif call.name in ("sub", "add") and view.is_tensor(call["input"]):
            shift = call["other"]
            uniform = view.const(shift, a) is not None or (
                view.is_tensor(shift) and _row_axis(view, call["input"], shift) == dim
            )
            if not uniform:
                return
            reader, seen = a, view.value(call["input"], a)
        elif call.name in ("contiguous", "clone", "alias"):
            reader, seen = a, view.value(call["input"], a)
        else:
            return


def _written(view: GraphView, node: fx.Node) -> Transform | None:
    form = _form(view, node)
    if form is None:
        return None
    closed = [
        (source, reader, factor, piece)
        for source, reader, factor in form.candidates
        if (piece := region(view, node, (source,))) is not None
    ]
    if not closed:
        return None
    nodes = set(closed[0][3].nodes)
    searches = {view.name_of(n) for n in nodes} & _SEARCHES
    if not searches:
        return None  # relu(x - mean) and the like
    if isinstance(form.power, fx.Node):
        raise Decline("the exponent is computed at run time", form.power)
    alpha = _sane(round(1 + 1 / form.power, 9), node) if form.power > 0 else math.nan
    right = [c for c in closed if math.isclose(c[2], alpha - 1, rel_tol=1e-6)]
    if not right:
        raise Decline(
            f"the scores are multiplied by {closed[-1][2]:g} before the threshold; with the power "
            f"{form.power:g} entmax has {alpha - 1:g}",
            form.clamp,
        )
    source, reader, _, piece = right[-1]
    trial = Trial(view, source, form.dim, alpha, node)
    trial.check(piece, learns=torch.is_grad_enabled() and view.requires_grad(source))
    note = "written out; that its rows sum to one was tried"
    if trial.learned:
        note += ", as was its gradient"
    return Transform(node, source, reader, form.dim, alpha, _replaced(piece), note)


def _replaced(piece: Region) -> tuple[fx.Node, ...]:
    """What depends on the leaves, and what nobody else has a use for: constants may be shared."""
    inside, depend = set(piece.nodes), set(piece.leaves)
    for node in piece.nodes:
        if any(a in depend for a in node.all_input_nodes):
            depend.add(node)
    depend -= set(piece.leaves)
    for node in reversed(piece.nodes):
        if node not in depend and node.users and all(u in depend for u in node.users):
            depend.add(node)
    return tuple(n for n in piece.nodes if n in depend and n in inside)


# A Function of the user's


def _function(view: GraphView, node: fx.Node, hop: fx.Node, which: Any) -> Transform | None:
    """One result of an autograd Function with forward and backward of its own."""
    call = view.call(hop)
    if call is None or which != 0:
        return None
    body = _body(hop, call["forward"])
    if body is None:
        return None
    inner = GraphView(body.graph)
    output = next(n for n in body.graph.nodes if n.op == "output").args[0]
    result = output[0] if isinstance(output, (tuple, list)) else output
    result = result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result
    if not isinstance(result, fx.Node) or not inner.is_tensor(result):
        return None
    with torch.no_grad():  # the body's own mode: what it does not record needs no check
        found = transform(inner, result)
    if found is None:
        return None
    operands = list(call.get("operands", ()))
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    inputs = inputs[len(inputs) - len(operands) :]
    if found.source not in inputs or isinstance(found.alpha, fx.Node):
        raise Decline("the Function does more than an entmax of its argument", hop)
    source = operands[inputs.index(found.source)]
    if not view.is_tensor(source):
        return None
    nodes = (hop, node, *(a for a in hop.args if isinstance(a, fx.Node) and a.op == "get_attr"))
    nodes += tuple(u for u in hop.users if u is not node and not u.users)
    trial = Trial(view, source, found.dim, found.alpha, node)
    piece = region(view, node, (source,))
    if piece is None:
        raise Decline("the Function reads more than its scores", hop)
    trial.check(piece, learns=torch.is_grad_enabled() and view.requires_grad(source))
    note = f"autograd Function; {found.note or 'a call of the package'}"
    if trial.learned:
        note += ", its backward was tried"
    return Transform(node, source, hop, found.dim, found.alpha, nodes, note)


def _body(hop: fx.Node, attribute: Any) -> fx.GraphModule | None:
    if not isinstance(attribute, fx.Node) or attribute.op != "get_attr":
        return None
    module = getattr(hop.graph.owning_module, str(attribute.target), None)
    return module if isinstance(module, fx.GraphModule) else None
