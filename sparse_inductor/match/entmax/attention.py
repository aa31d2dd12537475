"""Reads an attention, from the product with the values up.

    out = entmax(where(mask, scale * (q @ k^T) + bias, fill)) @ v      q [B, H, Lq, D], k [B, Hkv, Lk, D]

Every axis of every tensor is made of atoms (see `axes`). The role of an atom follows from the tensors that have it: the
values are summed over the keys; a batch atom is in queries, keys and values; an atom that only the queries have is a
query position, or one of the heads that share a key head. Grouped queries therefore need no separate pattern: a
repeated key head is an atom that queries have and keys do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ...graph.axes import Atom, Axis, Placed, before, beside, flat, last_axes, originals, regrouped
from ...graph.contraction import Contraction, Operand, contraction
from ...graph.fakes import same_size
from ...graph.no_match import NoMatch, changed, if_matched
from ...graph.values import check_cast, is_parameter, made_of_parameters
from ...graph.view import GraphView
from ...graph.vocabulary import COPIES, SPREADS, VIEWS
from ..chains.family import above as producers
from ..chains.family import rectified_product
from .form import form, own_sum
from .masks import as_mask, conjuncts, is_triangle, keeps_all
from .probabilities import Probabilities, read_probabilities
from .replacement import WIDTH, Attention
from .scores import Scores, read_scores, scaled
from .transform import may_be_there, transform

_NORMALISED = frozenset("exp exp2 softmax log_softmax sigmoid logsumexp".split())
_SPREADS = SPREADS | {"repeat", "repeat_interleave"}


def read_attention(view: GraphView, node: fx.Node) -> Attention | None:
    """The attention that ends in `node`; None if it contains no entmax. Raises NoMatch."""
    if not may_be_there(view):
        return None
    product = contraction(view, node)
    if product is None:
        _check_operands(view, node)
        return None
    if not product.of_matrices or product.bias_dim != -1:
        return None
    call = view.call(node)
    if call.name == "sum" and view.name_of(call["input"]) != "mul":
        return None  # the product that it adds up is the attention
    if (product.a.node, product.a.axes) == (product.b.node, product.b.axes):
        return None  # a sum of squares
    sides = ((product.a, product.b), (product.b, product.a))
    for p, v in sides[: 1 if product.weight else 2]:
        atoms = {
            letter: Atom(view.shape(o.node)[i])
            for o in (v, p)
            for i, letter in enumerate(o.axes)
            if letter is not None
        }
        # With equal axes, each row weights its own features, as in an entropy.
        told = not product.weight and {*p.axes} != {*v.axes}
        found = read_probabilities(view, p, _axes(p, atoms), told)
        if found is not None and p.written:
            raise changed(view, p.node, p.reader, "the probabilities are", "them")
        if found is None:
            continue
        try:
            return _Reader(view, product, p, v, atoms, found).read()
        except NoMatch:
            if _is_gate(view, found, p, v):
                return None
            raise
    return None


def _is_gate(view: GraphView, found: Probabilities, p: Operand, v: Operand) -> bool:
    """Whether probabilities weight the features of their own row, come from a linear layer, as for experts, or are
    learned themselves, as a choice of features."""
    source = found.found.source
    scores, _ = view.behind(source, COPIES | {"cast", "mul", "div", "masked_fill"})
    product = contraction(view, scores)
    layer = product is not None and product.weight and not same_size(view.shape(scores)[-1], 1)
    learnt = layer or made_of_parameters(view, source)
    features = is_parameter(view, v.node) and "batched matmul" not in producers(view, scores)
    return {*p.axes} == {*v.axes} or learnt or features


def _check_operands(view: GraphView, node: fx.Node) -> None:
    """Raise NoMatch if probabilities are multiplied with several tensors at once."""
    operands = view.call(node).get("operands", ())
    for x in operands if len(operands) > 2 else ():
        if view.is_tensor(x) and transform(view, x) is not None:
            raise NoMatch(f"an einsum of {len(operands)} tensors: two products in one", node)


def _axes(o: Operand | Contraction, atoms: dict[str, Atom]) -> tuple[Axis, ...]:
    return tuple(() if letter is None else (atoms[letter],) for letter in o.axes)


def are_probabilities(view: GraphView, node: fx.Node) -> bool:
    """Whether a tensor is an entmax of scores that are a product of two batched tensors."""
    found = if_matched(transform, view, node)
    return found is not None and "batched matmul" in producers(view, found.source)


def normalises(view: GraphView, node: fx.Node) -> bool:
    """Whether a node sums what it then divides, as of probabilities after a mask: it weighs no values."""
    summed = view.call(node).get("input") if view.name_of(node) == "sum" else None
    readers = summed.users if isinstance(summed, fx.Node) else ()
    quotients = (own_sum(view, n, view.call(n)) for n in readers)
    return any(found is not None and node in found[1] for found in quotients)


def relu_attention(view: GraphView, node: fx.Node) -> str | None:
    """Why a product with rectified scores as weights is no entmax attention; None for other products."""
    if (rectified := rectified_product(view, node)) is None:
        return None
    product = contraction(view, node)
    if product is None or product.weight:
        return None
    if any(made_of_parameters(view, t.node) for t in product.operands):
        return None
    found, experts = rectified
    if experts or found & _NORMALISED:
        return None
    if any(form(view, t.node) is not None for t in product.operands):
        return "rectified scores less a threshold of each row, which is not entmax's for all rows"
    if "sum" in found:
        return "rectified scores divided by their sum: entmax subtracts a threshold instead"
    return "rectified scores: nothing makes the rows sum to one, as entmax does"


@dataclasses.dataclass
class _Reader:
    """Reads one attention: the product of probabilities `p` and values. `atoms` are the axes of both."""

    view: GraphView
    product: Contraction
    p: Operand
    values: Operand
    atoms: dict[str, Atom]
    probabilities: Probabilities

    def __post_init__(self) -> None:
        self.node, self.found = self.product.node, self.probabilities.found

    def read(self) -> Attention | None:
        view, found, product = self.view, self.found, self.product
        summed = product.summed
        if len(summed) != 1 or not summed <= {*self.p.axes} & {*self.values.axes}:
            raise NoMatch("the values are not summed over one axis of the probabilities", self.node)
        (letter,) = summed
        # The next calls may split atoms, so use them only afterwards.
        scores = read_scores(view, found.source, found.reader, self.probabilities.axes)
        if found.scale != 1:
            scores = scaled(scores, found.scale, found.node)
            low = torch.finfo(view.dtype(found.source)).min
            fills = [scores.fill, *(b.fill for b in scores.biases)]
            if any(f is not None and -math.inf < f < low for f in fills):
                raise NoMatch("what masked scores become is too large to be multiplied", found.node)
        self._settle_masks(scores)
        qk = scores.product
        if len(qk.summed) != 1:
            raise NoMatch("the scores are no product over one axis", qk.node)
        keys = list(flat((self.atoms[letter],)))
        (width,) = qk.summed  # the axis that queries and keys are multiplied over
        at = {**dict(zip(qk.axes, scores.axes)), None: (), width: (WIDTH,)}
        both = (Placed(o.node, o.reader, tuple(at[c] for c in o.axes)) for o in qk.operands)
        q, k = sorted(both, key=lambda o: bool({*keys} & {*o.atoms}))
        if list(flat(self.probabilities.axes[found.dim])) != keys:
            if {*keys} & {*q.atoms}:
                return None  # this product mixes heads; the values come later
            raise NoMatch(
                "it is normalised over another axis than the values are summed over", found.node
            )
        if {*keys} & {*q.atoms} or not {*keys} <= {*k.atoms}:
            raise NoMatch("the keys are in both operands of the scores, or in neither", qk.node)
        v = Placed(self.values.node, self.node, _axes(self.values, self.atoms))
        k, v = self._unrepeated(k), self._unrepeated(v)
        q, k, dtype = self._narrowed(q, k, view.dtype(qk.node))
        return self._roles(scores, q, k, v, keys, dtype)

    def _unrepeated(self, t: Placed) -> Placed:
        """The keys or values as they were before their heads were repeated for the query heads."""
        best = t
        repeated, _ = self.view.behind(t.node, (VIEWS | COPIES | {"cast"}) - SPREADS)
        if self.view.name_of(repeated) not in _SPREADS:
            return t  # following it would split axes unnecessarily
        found = originals(self.view, t.node, t.axes, t.reader, self._before, memory=True)
        for node, axes, reader in found:
            if self.view.name_of(reader) in _SPREADS:
                best = Placed(node, reader, tuple(axes))
        return best

    def _before(
        self, view: GraphView, node: fx.Node, call: Any, axes: Sequence[Axis]
    ) -> list[Axis]:
        """The axes above a call that keeps every value, or that repeats values along axes of size 1 or a whole axis."""
        sizes, after = view.shape(call["input"]), view.shape(node)
        if call.name in SPREADS:
            return last_axes(sizes, axes)
        if call.name == "repeat_interleave":
            dim, times = call.get("dim"), call["repeats"]
            at = dim % len(axes) + 1 if isinstance(dim, int) else None  # it is the inner axis
        elif call.name == "repeat" and len(after) == len(sizes):
            many = [d for d in range(len(axes)) if not same_size(after[d], sizes[d])]
            at = many[0] if len(many) == 1 else None
            times = None if at is None else call["sizes"][at]
        else:
            return before(view, node, call, axes)
        if at is None or not isinstance(times, int):
            raise NoMatch("not a repetition of heads", node)
        apart = regrouped((*sizes[:at], times, *sizes[at:]), after, axes, node)
        return [*apart[:at], *apart[at + 1 :]]

    def _roles(
        self,
        scores: Scores,
        q: Placed,
        k: Placed,
        v: Placed,
        keys: list[Atom],
        dtype: torch.dtype,
    ) -> Attention:
        in_q, in_k, in_v = (set(t.atoms) for t in (q, k, v))
        rows = [
            atom for axis in _axes(self.p, self.atoms) for atom in flat(axis) if atom not in keys
        ]
        if stray := [a for a in (in_q | in_k) - {WIDTH} if a not in rows and a not in keys]:
            raise NoMatch(
                f"the probabilities lack an axis of size {stray[0].size} that the scores have",
                self.node,
            )
        alone = [a for a in rows if a in in_q and a not in in_k and a not in in_v]
        batch = [a for a in rows if a not in alone]
        after, again = self.probabilities.by_rows(keys)
        if again:
            self.probabilities.check_again(again, scores)
            scores.fill = -math.inf
        query = self._query(alone, keys, [*scores.masks, *scores.biases])
        group = [a for a in alone if a not in query]
        shared = batch[-1:] if len(batch) > 1 else []
        batch = batch[: len(batch) - len(shared)]
        width = [a for a in v.atoms if a not in keys and a not in rows]
        # The axis that only the values have is called WIDTH, like the one of queries and keys.
        own = ((WIDTH,) if width and flat(axis) == (*width,) else axis for axis in v.axes)
        v = dataclasses.replace(v, axes=tuple(own))
        if len(width) > 1:
            raise NoMatch("the values have more than one axis of their own", self.node)
        if in_q & {*keys} or WIDTH not in in_q or WIDTH not in in_k:
            raise NoMatch("queries and keys do not share one axis to be multiplied over", self.node)
        several = {a for a in (*batch, *shared) if not same_size(a.size, 1)}
        if not query and not several <= in_k:
            if "batched matmul" in producers(self.view, k.node):
                raise NoMatch("the scores are mixed over heads", scores.product.node)
            raise NoMatch("a gate: each row has values of its own, and shares its keys", self.node)
        causal = False
        if not scores.unless:
            causal, scores.masks = _causal(
                self.view, scores.masks, tuple(query), tuple(keys), self.node
            )
        alpha = None
        if self.view.is_tensor(self.found.alpha):
            axes = self.probabilities.axes
            alpha = beside(self.view, self.found.alpha, axes, self.found.reader)
        scale = self.product.scale * self.probabilities.scale
        attention = Attention(
            view=self.view, product=dataclasses.replace(self.product, scale=scale), found=self.found,
            scores=scores, q=q, k=k, v=v,
            out_axes=_axes(self.product, self.atoms), batch=batch, shared=shared, group=group, queries=query,
            keys=keys, width=width, alpha=alpha, causal=causal,
            undefined="" if again else self.found.undefined, after=after,
            path=self.probabilities.nodes, dtype=dtype,
        )  # fmt: skip
        for n in (n for n in self.probabilities.nodes if self.view.name_of(n) == "cast"):
            check_cast(self.view, n, "the probabilities", dtype)
        self._check(attention)
        return attention

    def _query(self, alone: list[Atom], keys: list[Atom], beside: Iterable[Placed]) -> list[Atom]:
        """The atoms, of those that only queries have, that are their position: the last one, unless a mask relates
        another one to the keys, and the atoms that share an axis of the probabilities with it."""
        over_keys = (p for p in beside if set(keys) <= set(p.atoms))
        related = [[a for a in alone if a in p.atoms] for p in over_keys]
        (position,) = next((found for found in related if len(found) == 1), alone[-1:]) or (None,)
        axes = [flat(axis) for axis in _axes(self.p, self.atoms)]
        return [a for axis in axes if position in axis for a in axis if a in alone]

    def _settle_masks(self, scores: Scores) -> None:
        """Turn additive masks among the biases of scores into masks where that is exact."""
        view = self.view
        biases: list[Placed] = []
        for bias in scores.biases:
            mask, fill = as_mask(view, bias), scores.fill
            alike = mask is not None and (fill is None or fill == mask.fill)
            if mask is not None and alike and mask.fill != -math.inf:
                # finfo.min + finfo.min is -inf, as is finfo.min - inf, so a finite number is a fill only if nothing
                # else is added. A fill that is set by a floor is like that of a mask.
                alike = len(scores.biases) == 1 and (fill is None or bias.floor is not None)
                scores.added = alike and bias.floor is None
            if mask is not None and alike:
                scores.masks.append(dataclasses.replace(mask, fill=None))
                scores.fill = mask.fill
            elif bias.floor is not None and view.needs_grad(scores.product.node):
                later = scores.biases[-1].reader
                raise NoMatch("scores that have a floor are masked or biased once more", later)
            else:
                biases.append(bias)
        scores.biases = biases
        for mask in (*scores.masks, *(mask for mask, _ in self.probabilities.again)):
            conjuncts(view, mask)  # splits the atoms that only its parts have

    def _narrowed(
        self, q: Placed, k: Placed, scores: torch.dtype
    ) -> tuple[Placed, Placed, torch.dtype]:
        """Queries, keys and the dtype of the operator: 16 bits if both products have it, or if the operands of the
        first were only widened, which are then returned as they were before."""
        result = self.view.dtype(self.node)
        if result.itemsize < scores.itemsize:
            narrow = [_narrow(self.view, t, result) for t in (q, k)]
            if narrow[0] is not None and narrow[1] is not None:
                return narrow[0], narrow[1], result
        return q, k, torch.promote_types(scores, result)

    def _check(self, a: Attention) -> None:
        view = self.view
        for t, atoms in ((a.q, a.batch + a.heads + a.queries), (a.k, a.batch + a.shared + a.keys)):
            if any(atom not in atoms for atom in t.atoms if atom is not WIDTH):
                raise NoMatch(
                    "queries or keys have an axis that does not fit", a.scores.product.node
                )
        for factor in a.scores.factors:
            varies = {*factor.atoms}
            if varies & {*a.keys} and varies & {*a.queries, *a.group}:
                raise NoMatch("the scale differs by query and by key", factor.reader)
        if a.alpha is not None and any(atom in a.keys for atom in a.alpha.atoms):
            raise NoMatch("alpha differs by key", self.found.node)
        for p in a.scores.biases:
            if p.fill is None and view.dtype(p.node) == torch.bool:
                raise NoMatch("a boolean is added to the scores", p.reader)


def _narrow(view: GraphView, t: Placed, dtype: torch.dtype) -> Placed | None:
    """An operand as it was before it was cast up from `dtype`."""
    found = originals(view, t.node, t.axes, t.reader)
    return next((Placed(n, r, tuple(a)) for n, a, r in found if view.dtype(n) == dtype), None)


def _causal(
    view: GraphView,
    masks: list[Placed],
    queries: tuple[Atom, ...],
    keys: tuple[Atom, ...],
    node: fx.Node,
) -> tuple[bool, list[Placed]]:
    """Whether one of the masks, or a part of one, is the causal triangle, and the masks that remain without it.

    A mask that the program negates for `masked_fill` is read without the negation, unless it is saved for the backward
    of `node`, because the program may then write to it.
    """
    causal, rest = False, list[Placed]()
    for mask in masks:
        parts = conjuncts(view, mask)
        some = [part for part in parts if not keeps_all(view, part)]
        left = [part for part in some if not is_triangle(view, part, queries, keys)]
        causal |= len(left) < len(some)
        negated = len(parts) == 1 and parts[0].negate != mask.negate and not view.records(node)
        rest += [mask] if len(left) == len(parts) and not negated else left
    return causal, rest
