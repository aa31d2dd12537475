"""The form of a written-out entmax: the scores minus a threshold per row, clamped at 0 and raised to a power.

node = [factor * (source - shifts) - tau]_+ ** power  (/ its sum)

All that is known about tau here is that it has one number per row. It may also be added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from ...graph.fakes import same_size
from ...graph.indices import listed
from ...graph.names import Call
from ...graph.no_match import NoMatch, remembered
from ...graph.scalars import RECTIFIER_STEPS, constant_factor, scalar_steps, sums
from ...graph.values import drowns
from ...graph.view import GraphView
from ...graph.vocabulary import COMPARISONS, COPIES, SPREADS
from .masks import masked

ENDS = frozenset(
    "clamp clamp_min relu threshold maximum where masked_fill pow square mul div normalize".split()
)


class Candidate(NamedTuple):
    """A candidate for the scores: `source`, as `reader` sees it. It is multiplied by `factor` and, if alpha is a
    tensor, `gaps` times by alpha - 1."""

    source: fx.Node
    reader: fx.Node
    factor: float
    gaps: int


class Form(NamedTuple):
    """The form of an entmax. power: 1 / (alpha - 1), or None if alpha is a tensor from which it is computed."""

    clamp: fx.Node
    candidates: tuple[Candidate, ...]
    dim: int
    power: float | None
    alpha: fx.Node | None


def ends_here(view: GraphView, node: fx.Node) -> bool:
    """Whether a clamp, power or quotient is the last step of a form, not an intermediate one."""
    found = form(view, node)
    if found is None:
        return False
    for user in node.users:
        call = view.call(user)
        if call.name in ("pow", "square", "div", "normalize") and form(view, user) is not None:
            return False
        if call.name == "mul" and call["input"] is call["other"]:
            return False
        if call.name == "sum" and set(node.users) <= {user, found.clamp, node}:
            return False
    return any(view.readers(node))


@remembered
def form(view: GraphView, node: fx.Node) -> Form | None:
    """The form of `node`, if it has one."""
    call = view.call(node)
    whole: fx.Node | None = node
    if call.name in ("div", "normalize"):
        normalised = own_sum(view, node, call)
        whole = None if normalised is None else view.value(normalised[0], node)
    if whole is None:
        return None
    x, power, alpha = _raised(view, whole)
    clamp = view.value(x, whole) if view.is_tensor(x) else None
    if clamp is None or (power is None and alpha is None):
        return None
    clamped = _clamped(view, clamp)
    seen = None if clamped is None else view.value(clamped, clamp)
    factor = 1.0
    while seen is not None and (step := constant_factor(view, seen)) is not None:
        seen, factor = view.value(step[0], seen), factor * step[1]
    if seen is None or (shifted := _shift(view, seen)) is None:
        return None
    a, dim, _ = shifted
    if dim is None:
        return None
    candidates = tuple(_scores(view, a, seen, factor, dim, alpha))
    return Form(clamp, candidates, dim, power, alpha)


def _raised(view: GraphView, node: fx.Node) -> tuple[Any, float | None, fx.Node | None]:
    """(x, power, None) of x ** power, or (x, None, alpha) if the power is computed from alpha. Any other node is its
    own first power."""
    call = view.call(node)
    if call.name == "pow":
        power = view.const(call["other"], node)
        alpha = None if power is not None else _alpha_of_power(view, call["other"])
        return call["input"], power, alpha
    if call.name == "square" or (call.name == "mul" and call["input"] is call["other"]):
        return call["input"], 2.0, None
    return node, 1.0, None


def _alpha_of_power(view: GraphView, exponent: Any) -> fx.Node | None:
    """alpha, if `exponent` is 1 / (alpha - 1); else None."""
    call = view.call(exponent)
    gap: Any = None
    if call.name == "div" and view.const(call["input"], exponent) == 1:
        gap = call["other"]
    elif call.name == "reciprocal" or (
        call.name == "pow" and view.const(call["other"], exponent) == -1
    ):
        gap = call["input"]
    return _alpha_of_gap(view, gap)


def _alpha_of_gap(view: GraphView, gap: Any) -> fx.Node | None:
    """alpha, if `gap` is alpha - 1; else None."""
    for (alpha, own), (one, factor) in sums(view, gap):
        c = view.const(one, gap)
        if view.is_tensor(alpha) and own == 1 and c is not None and c * factor == -1:
            return view.value(alpha, gap)
    return None


_OF_A_SUM = frozenset("unsqueeze clamp clamp_min add maximum getitem expand expand_as".split())


def own_sum(view: GraphView, node: fx.Node, call: Call) -> tuple[fx.Node, list[fx.Node]] | None:
    """(P, the nodes of the divisor, from its last node to the sum) of P / P.sum(), where a guard against division by
    zero may follow the sum. A `normalize` has no such nodes. None for anything else."""
    p, total = call.get("input"), call.get("other")
    if call.name == "normalize":
        return (p, []) if call.get("p", 2.0) == 1 else None
    if call.name != "div" or not view.is_tensor(p):
        return None
    nodes = [node]
    while len(nodes) <= 5 and view.is_tensor(total):
        seen = view.value(total, nodes[-1])
        inner = view.call(seen)
        if seen is None:
            return None
        nodes.append(seen)
        total = inner.get("input")
        if inner.name == "sum":
            return (p, nodes[1:]) if view.same_read(p, node, total, seen) else None
        if inner.name not in _OF_A_SUM:
            return None
    return None


def _clamped(view: GraphView, node: fx.Node) -> fx.Node | None:
    """x, if `node` is max(x, 0); else None."""
    call = view.call(node)

    def zero(x: Any) -> bool:
        return view.const(x, node) == 0

    with contextlib.suppress(NoMatch):
        if (steps := scalar_steps(view, node, call)) is not None:
            return call["input"] if len(steps) == 1 and steps[0] in RECTIFIER_STEPS else None
    if call.name == "maximum":
        return next((x for x, other in call.both_ways if zero(other) and view.is_tensor(x)), None)
    for one, _ in masked(view, node, call):
        if zero(one.other) and _says_positive(view, one.keep, one.x, one.negate):
            return one.x
    return None


def _says_positive(view: GraphView, gate: fx.Node, x: Any, negate: bool) -> bool:
    """Whether a mask (with `negate`, its negation) is x > 0 or x >= 0, or a > b or a >= b for x = a - b."""
    call = view.call(gate)
    if call.name not in COMPARISONS or not view.is_tensor(x):
        return False
    large, small, _ = call.ordered(negate)
    if view.const(small, gate) == 0:
        return view.same_value(large, x)
    return any(
        (own, factor) == (1, -1)
        and view.same_value(a, large)
        and view.same_value(*(view.behind(t, SPREADS)[0] for t in (b, small)))
        for (a, own), (b, factor) in sums(view, x)
    )


def row_axis(view: GraphView, a: fx.Node, tau: fx.Node) -> int | None:
    """The only axis along which `tau` has a single value and the scores have several."""
    x, t = view.shape(a), view.shape(view.behind(tau, SPREADS)[0])
    t = (1,) * (len(x) - len(t)) + t
    if len(t) != len(x):
        return None
    single = [i for i in range(len(x)) if same_size(t[i], 1) and not same_size(x[i], 1)]
    rest = all(same_size(x[i], t[i]) for i in range(len(x)) if i not in single)
    return single[0] if len(single) == 1 and rest else None


def _scores(
    view: GraphView,
    a: fx.Node,
    reader: fx.Node,
    factor: float,
    dim: int,
    alpha: fx.Node | None,
) -> Iterator[Candidate]:
    """The candidates for the scores, nearest first. Each becomes `a` by factors and by subtracting values per row."""
    seen = view.value(a, reader)
    gaps = 0
    while seen is not None and view.is_tensor(seen):
        a = seen
        yield Candidate(a, reader, factor, gaps)
        call = view.call(a)
        if (step := constant_factor(view, a)) is not None:
            x, factor = step[0], factor * step[1]
        elif (gap := _times_gap(view, call, alpha)) is not None:
            x, gaps = gap, gaps + 1
        elif (shifted := _shift(view, a)) is not None and shifted[1] in (None, dim):
            x = shifted[0]
        elif call.name in COPIES:
            x = call["input"]
        else:
            return
        reader, seen = a, view.value(x, a)


def _times_gap(view: GraphView, call: Call, alpha: fx.Node | None) -> fx.Node | None:
    """x, if the call is x * (alpha - 1); else None."""
    if alpha is None or call.name != "mul":
        return None
    for x, gap in call.both_ways:
        found = _alpha_of_gap(view, gap)
        if found is not None and view.same_value(found, alpha) and isinstance(x, fx.Node):
            return x
    return None


def _shift(view: GraphView, node: fx.Node) -> tuple[fx.Node, int | None, Any] | None:
    """(x, the axis of the rows, s) of x - s, x + s and s + x if s has one value per row. The axis is None if s is a
    number."""
    for (x, own), (shift, factor) in sums(view, node):
        if own != 1 or not view.is_tensor(x) or not view.same_shape(x, node):
            continue
        number = view.const(shift, node)
        if number is not None:
            return None if drowns(number * factor, view.dtype(node)) else (x, None, shift)
        dim = row_axis(view, x, shift) if view.is_tensor(shift) else None
        if dim is not None:
            return x, dim, shift
    return None


def unshifted(view: GraphView, source: fx.Node, reader: fx.Node, dim: int) -> list[Candidate]:
    """`source`, and the values from which it is computed by subtracting a number or the maximum of each row, which does
    not change entmax. Other shifts are kept, because a mean or a bias may be infinite where the row is not."""
    found = [Candidate(source, reader, 1.0, 0)]
    while (seen := view.value(found[-1].source, found[-1].reader)) is not None:
        shifted = _shift(view, seen)
        if shifted is None or shifted[1] not in (None, dim):
            break
        x, axis, shift = shifted
        if axis is not None and not _largest(view, x, shift, axis):
            break
        found.append(Candidate(x, seen, 1.0, 0))
    return found


def _largest(view: GraphView, x: fx.Node, shift: Any, dim: int) -> bool:
    """Whether `shift` is the maximum of each row of x, or the logsumexp, which is infinite only if the maximum is. The
    maximum of each column of a square x has the same shape, but may be infinite where the row is not."""
    call = view.call(view.behind(shift, COPIES | SPREADS | {"detach", "unsqueeze"})[0])
    if call.name == "getitem":
        call = view.call(call["input"])
    if call.name not in ("amax", "max_dim", "logsumexp"):
        return False
    over, ndim = listed(call.get("dim")), len(view.shape(x))
    if not any(isinstance(d, int) and d % ndim == dim for d in over):
        return False
    return view.same_value(view.behind(call["input"], COPIES | {"detach"})[0], x)
