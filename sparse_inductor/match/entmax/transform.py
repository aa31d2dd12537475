"""Recognises the row transformation: calls of the entmax package, and the many ways to write it out.

    p_i = [(alpha - 1) z_i - tau]_+ ^ (1 / (alpha - 1)),   sum_i p_i = 1

The structure of a written-out version is checked first: the scores times alpha - 1, minus a threshold with one value
per row, clamped at zero and raised to 1 / (alpha - 1). Given that, p is entmax if and only if its rows sum to one,
because there is only one such threshold; how it is found (sorting, bisection) does not matter. The sums, and the
gradient in training, are tested on concrete rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from ...graph.axes import flat, fresh, originals
from ...graph.emit import Emitter, own_operator
from ...graph.fakes import attribute, bytes_of, fake, same_size
from ...graph.names import Call
from ...graph.no_match import NoMatch, if_matched, once, remembered
from ...graph.saved import for_the_caller
from ...graph.scalars import RECTIFIERS
from ...graph.trial import Region, region
from ...graph.values import matched_nodes, rounds
from ...graph.view import GraphView, Unknown
from ...graph.vocabulary import COMPARISONS, COPIES, SPREADS
from ...pattern import Sparse
from ..chains.terms import widened
from .form import ENDS, Candidate, Form, form, unshifted
from .leaves import compiles_another
from .trial import Trial

LEAVES = frozenset("entmax15 sparsemax entmax_bisect sparsemax_bisect".split())
_LOSS = "a Fenchel-Young loss of entmax is one number a row; there is no operator for it"
_OTHERS = {
    **dict.fromkeys(
        "sparsemax_loss entmax15_loss sparsemax_bisect_loss entmax_bisect_loss".split(), _LOSS
    ),
    "normmax_bisect": "normmax keeps the norm of the probabilities at one, not their sum",
    "budget_bisect": "the probabilities sum to a budget, not to one",
}
NOT_ENTMAX = frozenset(_OTHERS)
_SEARCHES = COMPARISONS | frozenset("sort topk cumsum where kthvalue".split())
# Without a sum of the scores, no threshold makes the rows sum to one: the k-th largest score gives a top-k.
_SUMS = frozenset("sum cumsum mean matmul einsum".split())
_CALLS = LEAVES | NOT_ENTMAX | {"entmax_op", "autograd_function_apply"}
# Every graph with an entmax contains one of these; a written-out entmax has a rectifier.
SIGNS = _CALLS | RECTIFIERS


@dataclasses.dataclass(frozen=True)
class Transform:
    """probabilities = entmax(scale * source, alpha, dim), as a match of the pattern, or a part of an attention.

    node: the probabilities. source: the scores as they are read by `reader`. alpha: a number, or a tensor that
    broadcasts to the scores with one element along `dim`. nodes: the nodes that the operator replaces.
    how: how it was recognised, if it is no call of the package. scale: other than 1 for some written-out ones.
    settled: those of the nodes that together are known to have the operator's gradient.
    undefined: the treatment of a row without a largest score (`ops.entmax`). written_out: it consists of operations,
    which do not save its result, rather than of a call of the package.
    """

    pattern, op = "entmax", "sparse_inductor::entmax"

    view: GraphView
    node: fx.Node
    source: fx.Node
    reader: fx.Node
    dim: int
    alpha: float | fx.Node
    nodes: tuple[fx.Node, ...]
    how: str = ""
    scale: float = 1.0
    settled: tuple[fx.Node, ...] = ()
    undefined: str = ""
    written_out: bool = False

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return (self.source, self.alpha) if isinstance(self.alpha, fx.Node) else (self.source,)

    @property
    def anchor(self) -> fx.Node:
        return self.node

    @functools.cached_property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        return matched_nodes(self.view, self.nodes)

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        return tuple((t, self.reader) for t in self.inputs)

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        return (Sparse("probabilities", self.node, self.dim),)

    @property
    def bytes_saved(self) -> int | None:
        """The bytes that a training step keeps in addition to the probabilities: none for a call of the package, else
        the sorted scores, their sums and other intermediates of the formula, counted as one tensor each."""
        if not self.view.needs_grad(self.source):
            return 0
        kept = [bytes_of(n) for n in self.nodes[:-1] if self.view.requires_grad(n)]
        return None if None in kept else sum(b for b in kept if b is not None)

    @property
    def note(self) -> str:
        return self.described(f"dim {self.dim}")

    def described(self, *more: str) -> str:
        """The description for a record."""
        alpha = "is a tensor" if isinstance(self.alpha, fx.Node) else f"{self.alpha:g}"
        scaled = () if self.scale == 1 else (f"scores times {self.scale:g}",)
        text = ", ".join((f"alpha {alpha}", *scaled, *more))
        return f"{text}; {self.how}" if self.how else text

    def replace(self) -> None:
        e, wanted = Emitter(self.node), fake(self.node).dtype
        # A wider alpha, or a cast on the way, determines the precision of the program.
        source = e.cast(self.source, torch.promote_types(fake(self.source).dtype, wanted))
        if self.scale != 1:
            source = widened(e, source)
            top = e.method("detach", e.method("amax", source, self.dim, True))
            # The maximum is subtracted so that a fill cannot overflow.
            source = e.call(operator.mul, e.call(operator.sub, source, top), self.scale)
        alpha, number = given_alpha(e, self.alpha, source)
        undefined = (self.undefined,) if self.undefined else ()
        p = e.call(own_operator("entmax"), source, alpha, number, self.dim, *undefined)
        p = e.cast(p, wanted)
        if self.written_out:  # the package's functions save their results themselves
            p = for_the_caller(self.view, e, self.node, p)
        self.node.replace_all_uses_with(p)


@remembered
def transform(view: GraphView, node: fx.Node) -> Transform | None:
    """The transformation that results in `node`; None if there is none.

    Raises NoMatch if it is nearly one.
    """
    found = _transform(view, node)
    if found is not None and same_size(view.shape(found.source)[found.dim], 0):
        raise NoMatch("the rows are empty, which PyTorch refuses", found.node)
    return found


@once
def may_be_there(view: GraphView) -> bool:
    """Whether some node of the graph has the name of an entmax, or the form of a written-out one."""

    def may_be(node: fx.Node) -> bool:
        name = view.name_of(node)
        return name in _CALLS or (name in ENDS and form(view, node) is not None)

    try:
        return any(map(may_be, view.graph.nodes))
    except Unknown:
        return True


def is_entmax(view: GraphView, node: fx.Node) -> bool:
    """Whether a node is the result of an entmax."""
    return may_be_there(view) and if_matched(transform, view, node) is not None


@once
def _is_another(view: GraphView) -> bool:
    return compiles_another()


def _transform(view: GraphView, node: fx.Node) -> Transform | None:
    if not view.is_tensor(node) or not view.dtype(node).is_floating_point or _is_another(view):
        return None
    call = view.call(node)
    if call.name in _OTHERS:
        raise NoMatch(_OTHERS[call.name], node)
    if call.name in LEAVES:
        return _leaf(view, node)
    if call.name == "entmax_op":  # called by the user, or inserted earlier
        alpha = call["alpha_value"] if call["alpha"] is None else call["alpha"]
        dim = call["dim"] % max(1, len(view.shape(node)))
        undefined = call["undefined"] if "undefined" in call.args else ""
        return Transform(view, node, call["input"], node, dim, alpha, (node,), undefined=undefined)
    if call.name == "autograd_function_apply":
        return _function(view, node, node, 0)
    if call.name == "getitem" and view.name_of(call["input"]) == "autograd_function_apply":
        return _function(view, node, call["input"], call["index"])
    if call.name in ENDS:
        return _written(view, node)
    return None


def _leaf(view: GraphView, node: fx.Node) -> Transform:
    call = view.call(node)
    x = call["input"]
    dim = call.get("dim", -1)
    if not isinstance(dim, int):
        raise NoMatch("the dimension is known only at run time", node)
    dim %= max(1, len(view.shape(x)))
    undefined = "nan absorbed" if call.name.endswith("_bisect") else "refused"
    alpha: Any = {"entmax15": 1.5, "entmax_bisect": call.get("alpha", 1.5)}.get(call.name, 2.0)
    known = view.const(alpha, node)
    if known is not None:
        alpha = _sane(known, node)
    elif view.is_tensor(alpha):
        if not view.dtype(alpha).is_floating_point:
            raise NoMatch(f"alpha is a tensor of {view.dtype(alpha)}", node)
    elif not isinstance(fake(alpha), (torch.SymFloat, torch.SymInt)):
        raise NoMatch("alpha is a number known only at run time", node)
    found = Transform(view, node, x, node, dim, alpha, (node,), undefined=undefined)
    if call.name == "entmax_bisect":
        found = _bisected(found, call)
    # Subtracting one value per row first does not change the result.
    shifts = unshifted(view, x, node, dim)
    shifted = dataclasses.replace(found, source=shifts[-1].source, reader=shifts[-1].reader)
    piece = region(view, node, shifted.inputs) if len(shifts) > 1 else None
    if piece is None:
        return found
    nodes = _replaced(piece)
    # The subtracted values may be detached; those that they are subtracted from may not.
    settled = tuple(n for n in nodes if n not in {s.reader for s in shifts[1:]})
    undefined = found.undefined.removesuffix(" absorbed")
    return dataclasses.replace(shifted, nodes=nodes, settled=settled, undefined=undefined)


def _sane(alpha: float, node: fx.Node) -> float:
    if not 1 < alpha < math.inf:
        what = "is softmax, which has no zeros" if alpha == 1 else "is no sparse transformation"
        raise NoMatch(f"alpha={alpha:g} {what}", node)
    return alpha


def _bisected(found: Transform, call: Call) -> Transform:
    """The transformation, with this bisection's treatment of rows without a threshold. Raises NoMatch if it has so few
    steps that its result is not entmax's."""
    view, node, alpha, steps = found.view, found.node, found.alpha, call.get("n_iter", 50)
    normalised = call.get("ensure_sum_one", True) is True
    whole = isinstance(steps, int)
    if whole and steps >= 50 and normalised:
        return found
    if not whole or (isinstance(alpha, fx.Node) and not view.is_tensor(alpha)):
        raise NoMatch("a bisection cannot be tried whose n_iter or alpha is not known", node)
    piece = region(view, node, found.inputs)
    assert piece is not None  # the call has no other inputs
    how = f"n_iter={steps}" + ("" if normalised else ", ensure_sum_one=False")
    trial = Trial(view, piece, found.source, found.dim, alpha)
    try:
        trial.check()
    except NoMatch as decline:
        raise NoMatch(f"{how}: {decline.reason}", node) from None
    return dataclasses.replace(found, undefined=trial.undefined())


def given_alpha(
    e: Emitter, alpha: float | fx.Node, scores: fx.Node
) -> tuple[fx.Node | None, float]:
    """alpha as the operators take it: a tensor, or a number.

    A learned alpha that has been rounded to 1, which would be softmax, is replaced by the number above 1 that gives the
    probabilities nearest to softmax's when computed in the scores' dtype. It then gets no gradient.
    """
    if not isinstance(alpha, fx.Node):
        return None, alpha
    computed = torch.promote_types(fake(scores).dtype, torch.float32)
    if not isinstance(fake(alpha), torch.Tensor):  # a number known at run time
        shape = (1,) * fake(scores).dim()
        alpha = e.method("new_full", scores, shape, alpha, dtype=computed)
    alpha = e.cast(alpha, torch.promote_types(fake(alpha).dtype, computed))
    above = 1 + (2**-34 if computed == torch.float64 else 2**-20)
    return e.call(torch.where, e.call(operator.eq, alpha, 1), above, alpha), 0.0


# Written out


def _written(view: GraphView, node: fx.Node) -> Transform | None:
    found = form(view, node)
    if found is None:
        return None
    beside = () if found.alpha is None else (found.alpha,)
    closed = [
        (candidate, piece)
        for candidate in found.candidates
        if (piece := region(view, node, (candidate.source, *beside))) is not None
    ]
    if not closed:
        return None
    names = {view.name_of(n) for n in closed[0][1].nodes}
    normalised = view.name_of(node) in ("div", "normalize")
    searched = normalised or bool(names & _SEARCHES and names & _SUMS)
    try:
        chosen, alpha, piece, scale = _scaled_right(node, found, closed)
        _check_rounding(view, piece, view.dtype(chosen.source))
        trial = Trial(view, piece, chosen.source, found.dim, alpha, scale)
        if scale != 1:
            try:
                trial.check(gradient=False)
            except NoMatch:  # the factor is not alpha - 1, and it is not entmax of scaled scores
                raise _unlike(found, chosen.factor) from None
        trial.check()
    except NoMatch:
        if searched:
            raise
        return None  # relu(x - mean), its square and the like are no near misses
    note = "written out; checked numerically: rows sum to 1"
    if trial.learned:
        note += ", gradient"
    nodes = _replaced(piece)
    settled = nodes if trial.learned else ()
    return Transform(
        view, node, chosen.source, chosen.reader, found.dim, alpha, nodes, note, scale, settled,
        trial.undefined(), written_out=True,
    )  # fmt: skip


def _check_rounding(view: GraphView, piece: Region, computed: torch.dtype) -> None:
    """Raise NoMatch if an intermediate is rounded, which a trial in float64 does not reveal."""
    for n in piece.nodes:
        if view.name_of(n) != "cast" or not view.is_tensor(n) or n is piece.output:
            continue
        if view.dtype(n).is_floating_point and rounds(view.dtype(n), computed):
            raise NoMatch(f"it is rounded to {view.dtype(n)} on the way", n)


def _scaled_right(
    node: fx.Node, found: Form, closed: list[tuple[Candidate, Region]]
) -> tuple[Candidate, float | fx.Node, Region, float]:
    """The furthest candidate with the factor alpha - 1, else the furthest one, as (candidate, alpha, region, number by
    which to scale its scores). Raises NoMatch if none is suitable."""
    alpha: float | fx.Node
    if found.alpha is not None:
        alpha, wanted, gaps = found.alpha, 1.0, 1
    else:
        assert found.power is not None
        alpha = _sane(round(1 + 1 / found.power, 9) if found.power else math.inf, node)
        wanted, gaps = alpha - 1, 0
    fitting = [one for one in reversed(closed) if one[0].gaps == gaps and one[0].factor > 0]
    exact = [one for one in fitting if math.isclose(one[0].factor, wanted, rel_tol=1e-6)]
    if not exact and found.alpha is not None:
        raise NoMatch("the scores are not multiplied by alpha - 1 before the threshold", node)
    if not fitting:
        raise _unlike(found, closed[-1][0].factor)
    candidate, piece = (exact or fitting)[0]
    return candidate, alpha, piece, 1.0 if exact else candidate.factor / wanted


def _unlike(found: Form, factor: float) -> NoMatch:
    assert found.power is not None
    return NoMatch(
        f"the scores are multiplied by {factor:g} before the threshold; with the power "
        f"{found.power:g} entmax has {1 / found.power:g}",
        found.clamp,
    )


def _replaced(piece: Region) -> tuple[fx.Node, ...]:
    """The nodes that depend on the leaves, and those without other users. Constants may have other users."""
    inside, depend = set(piece.nodes), set(piece.leaves)
    for node in piece.nodes:
        if any(a in depend for a in node.all_input_nodes):
            depend.add(node)
    depend -= set(piece.leaves)
    for node in reversed(piece.nodes):
        if node not in depend and node.users and all(u in depend for u in node.users):
            depend.add(node)
    return tuple(n for n in piece.nodes if n in depend and n in inside)


# A custom autograd Function


def _function(view: GraphView, node: fx.Node, hop: fx.Node, which: Any) -> Transform | None:
    """The transformation that is one result of a custom autograd Function; None for other results."""
    call = view.call(hop)
    # The Function's own result comes first; intermediates follow where Dynamo saw side effects in its forward
    # (torch 2.11: always).
    body = attribute(call.get("forward"))
    if which != 0 or not isinstance(body, fx.GraphModule):
        return None
    with torch.no_grad():  # the body runs without gradients, so none need to be checked in it
        inner = GraphView(body.graph)
    result: Any = body.graph.output_node().args[0]
    while isinstance(result, (tuple, list)) and result:
        result = result[0]
    if not isinstance(result, fx.Node) or not inner.is_tensor(result):
        return None
    axes = fresh(inner.shape(result))
    rows = originals(inner, result, axes, result)
    found, at = next(((f, at) for n, at, _ in rows if (f := transform(inner, n))), (None, axes))
    if found is None:
        return None
    *_, (given, given_axes, _) = originals(inner, found.source, at, found.reader)
    dim = next((d for d, axis in enumerate(axes) if axis and axis == at[found.dim]), None)
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    outside: dict[Any, Any] = dict(zip(reversed(inputs), reversed(call.get("operands", ()))))
    alpha: Any = found.alpha
    if isinstance(alpha, fx.Node):
        alpha, _ = inner.behind(alpha, SPREADS | COPIES | {"cast"})  # before it was expanded
    moved = dim is None or list(map(flat, given_axes)) != list(map(flat, axes))
    if given not in outside or moved or (isinstance(alpha, fx.Node) and alpha not in outside):
        raise NoMatch("the Function does more than an entmax of its argument", hop)
    assert dim is not None
    source, alpha = outside[given], outside.get(alpha, alpha)
    if not view.is_tensor(source):
        return None
    nodes = tuple(dict.fromkeys((hop, node)))
    nodes += tuple(a for a in hop.args if isinstance(a, fx.Node) and a.op == "get_attr")
    nodes += tuple(u for u in hop.users if u is not node and not u.users)
    alphas = (alpha,) if isinstance(alpha, fx.Node) else ()
    piece = region(view, node, (source, *alphas))
    if piece is None:
        raise NoMatch("the Function reads more than its scores", hop)
    trial = Trial(view, piece, source, dim, alpha, found.scale)
    trial.check()
    note = f"autograd Function; {found.how or 'a call of the package'}"
    if trial.learned:
        note += "; checked numerically: gradient"
    return Transform(
        view, node, source, hop, dim, alpha, nodes, note, found.scale, undefined=found.undefined
    )
