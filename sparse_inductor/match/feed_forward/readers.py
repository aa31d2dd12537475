"""Other readers of the activations of a feed-forward block: per-token or per-neuron statistics, and adapters of its
down projection.

LoRA computes W h + s B (A h): h is then read by one projection, with W and A concatenated as its weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...epilogue.ranges import prove
from ...epilogue.steps import Program
from ...graph.axes import Atom, Axis, flat, regrouped
from ...graph.checks import outside_readers
from ...graph.contraction import PRODUCTS, contraction
from ...graph.emit import Emitter, Make, made_again
from ...graph.fakes import fake, same_sizes
from ...graph.gemm import Linear, linears
from ...graph.indices import listed
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.values import matched_nodes, not_negative, only_along, rounds
from ...graph.view import GraphView, label
from ...graph.vocabulary import COPIES, PARTS, REGROUPS, SAME_VALUES, SHAPE_OPS
from .block import Reading, activation

_ADAPTERS = COPIES | {"mul", "div", "cast"}
_LENGTH = 8  # steps of an adapter
_OF_EVERY_NEURON = "a statistic of every neuron over the tokens needs the activations"
_PASSED = SHAPE_OPS | PARTS | SAME_VALUES


class Others(NamedTuple):
    """The other readers of the activations of a block. downs: the first projections of adapters."""

    statistics: tuple[Statistic, ...] = ()
    downs: tuple[Linear, ...] = ()

    @property
    def ends(self) -> list[fx.Node]:
        return [*(s.node for s in self.statistics), *(d.node for d in self.downs)]


def other_readers(
    view: GraphView, reading: Reading, nodes: tuple[fx.Node, ...]
) -> tuple[Others, tuple[fx.Node, ...]]:
    """The statistics and adapters that also read the activations, and `nodes` together with the nodes of these.

    Raises NoMatch for any other reader.
    """
    found: list[Statistic] = []
    downs: list[Linear] = []
    own = reading.down
    for source, reader in outside_readers(view, nodes, set(nodes), {own.node}):
        whole = view.same_read(own.source, own.node, source, reader)
        down = _further_down(view, own, source, reader) if whole else None
        if down is not None:
            downs.append(down)
        else:
            weighs = whole and all(s.weight is None for s in found)
            found += _statistics(view, reading, source, reader, weighs)
    others = Others(tuple(found), tuple(downs))
    taken = [n for s in found for n in s.path.nodes] + [n for d in downs for n in d.within]
    nodes = matched_nodes(view, [*nodes, *taken, *others.ends])
    for source, reader in outside_readers(view, nodes, set(nodes), {own.node, *others.ends}):
        raise _read_by(view, source, reader)
    return others, nodes


def _further_down(view: GraphView, down: Linear, source: fx.Node, reader: fx.Node) -> Linear | None:
    """The first projection of an adapter, if a reader is one: it has the same input and axes as the block's own down
    projection."""
    passed: list[fx.Node] = []
    while _changes_nothing(view, reader) and len(readers := list(view.readers(reader))) == 1:
        passed.append(reader)
        source, reader = reader, readers[0]
    for one in linears(view, reader) or ():
        same = one.source is source and (one.v_dim, one.order) == (down.v_dim, down.order)
        plain = one.bias is None and not (one.within or one.also or one.v_axes > 1)
        same = same and fake(reader).dtype == fake(down.node).dtype
        if same and plain and _adapts(view, reader, down.node):
            return dataclasses.replace(one, within=tuple(passed))
    return None


def _changes_nothing(view: GraphView, node: fx.Node) -> bool:
    call = view.call(node)
    return not call.inplace and view.kept(call) is not None


def _adapts(view: GraphView, node: fx.Node, anchor: fx.Node) -> bool:
    """Whether the result of a projection is projected again and perhaps scaled, then added to the block's result, and
    has no other readers."""
    projected = False
    for _ in range(_LENGTH):
        readers = list(view.readers(node))
        if len(readers) != 1:
            return False
        call = view.call(readers[0])
        if call.name == "add":
            return projected and anchor in (call["input"], call["other"])
        again = bool(linears(view, readers[0]))
        if not again and call.name not in _ADAPTERS:
            return False
        node, projected = readers[0], projected or again
    return False


def _statistics(
    view: GraphView, reading: Reading, source: fx.Node, reader: fx.Node, weighs: bool
) -> Sequence[Statistic]:
    """The statistics that a reader of an activation computes. weighs: whether they may weight it by a number per
    neuron."""
    try:
        of, counts_only = activation(view, reading, source, reader)
    except NoMatch:
        raise _read_by(view, source, reader) from None
    programs = [b.program for b in (reading.branches if of == "hidden" else (reading.gate,))]
    weighs = weighs and not (reading.factors or reading.tokens)
    axes = tuple((Atom(size),) for size in view.shape(source))
    positive = all(map(_not_negative, programs))
    found = _Reader(view, reading, source, of, axes, positive, weighs)
    statistics = found.follow(source, reader, Path(axes))
    for s in statistics:
        if counts_only and s.path.norm == 1:
            raise _read_by(view, source, reader)
        if len(view.shape(source)) != len(view.shape(reading.down.source)):
            raise NoMatch("a statistic of the activations in another shape", reader)
        if s.of_neurons and of == "gate" and reading.up is not None:
            raise _read_by(view, source, reader)
    return statistics


def _not_negative(program: Program) -> bool:
    proof = prove(program)
    return proof.direction == 1 and proof.range.lo >= 0


def _read_by(view: GraphView, source: fx.Node, reader: fx.Node) -> NoMatch:
    """Why a block with another reader of its tensors does not match. The reason names the node that computes with them,
    not one that only takes a part or a view."""
    split = view.call(source)
    of = split["input"] if split.name in PARTS else source
    what = f"the result of {label(of)} is"
    while view.name_of(reader) in _PASSED and reader.users:
        reader = next(iter(reader.users))
    if reader.op == "output":
        return NoMatch(f"{what} also returned", source)
    return NoMatch(f"{what} also read by {label(reader)}", reader)


class Path(NamedTuple):
    """How `nodes` compute a value, the result of the last one, from the activations a.

    axes: its axes, made of atoms of the activations' axes. reduced: the atoms that were reduced. norm: 1 for |a|, 0 for
    [a != 0], -1 for [a == 0], None for a itself. by: the reduction: "sum", "mean", "any" or "all". weight: a number per
    neuron that a is multiplied by. signed: whether this product may be negative.
    """

    axes: tuple[Axis, ...]
    reduced: frozenset[Atom] = frozenset()
    nodes: tuple[fx.Node, ...] = ()
    norm: int | None = None
    by: str = ""
    weight: fx.Node | None = None
    signed: bool = False


class Statistic(NamedTuple):
    """A reduction of |a|, of [a != 0], or of a times a number per neuron.

    node: the reduction. source: the activation that it reduces. of: which activation that is, "gate" or "hidden". path:
    how the reduction is computed from it. dims: the reduced axes: the axis of the neurons and perhaps others or, if
    `of_neurons`, all other axes. ones: the axes of size 1 that the result has in place of reduced ones. detached:
    whether a gradient is cut on the way. weight: the leaves from which the numbers of the neurons are computed, and the
    function that builds them.
    """

    node: fx.Node
    source: fx.Node
    of: str
    path: Path
    dims: tuple[int, ...]
    ones: tuple[int, ...]
    detached: bool
    of_neurons: bool
    weight: tuple[list[fx.Node], Make] | None = None

    @property
    def leaves(self) -> list[fx.Node]:
        """The nodes from which the weight is computed."""
        return [] if self.weight is None else self.weight[0]

    @property
    def row(self) -> int:
        """The index of the statistic among the numbers that the operator returns for each token."""
        return 4 if self.weight else {"gate": 0, "hidden": 2}[self.of] + (self.path.norm != 1)

    def emit(self, e: Emitter, per_token: fx.Node, axis: int, neurons: Any) -> fx.Node:
        """The user's result from one number per token; its axes are those of the activation without `axis`."""
        t = e.method("detach", per_token) if self.detached else per_token
        if self.path.norm == -1:
            t = e.call(torch.sub, neurons, t)
        if self.path.by == "mean":
            t = e.call(torch.div, t, neurons)
        rest = tuple(d - (d > axis) for d in self.dims if d != axis)
        if rest:
            t = e.method(self.path.by, t, rest)
        elif self.path.norm == 1 and self.path.by == "sum":
            # The result needs its own memory, not a view of all statistics. Compilers remove clones.
            t = e.method("sum", e.method("unsqueeze", t, 0), 0)
        return self._finished(e, t)

    def emit_of_neurons(self, e: Emitter, counts: fx.Node, per_token: fx.Node) -> fx.Node:
        """The user's result from the number of tokens for which each neuron is not 0."""
        sizes = fake(per_token).shape
        static = all(isinstance(n, int) for n in sizes)
        tokens = math.prod(sizes) if static else e.method("numel", per_token)
        t = e.call(torch.rsub, counts, tokens) if self.path.norm == -1 else counts
        if self.path.by == "mean":
            wide = torch.promote_types(fake(self.node).dtype, torch.float32)
            t = e.call(torch.div, e.cast(t, wide), tokens)
        elif self.path.by != "sum":
            t = e.call(torch.ne, t, 0) if self.path.by == "any" else e.call(torch.eq, t, tokens)
        return self._finished(e, t)

    def _finished(self, e: Emitter, t: fx.Node) -> fx.Node:
        for d in self.ones:
            t = e.method("unsqueeze", t, d)
        return e.cast(t, fake(self.node).dtype)


_REDUCTIONS = frozenset(
    "sum mean any all count_nonzero norm vector_norm linalg_norm l1_loss".split()
)


class _Reader(NamedTuple):
    """Reads statistics of the activation `source` with `axes`. of: "gate" or "hidden". positive: it is nowhere
    negative. weighs: it may be multiplied by a number per neuron."""

    view: GraphView
    reading: Reading
    source: fx.Node
    of: str
    axes: tuple[Axis, ...]
    positive: bool
    weighs: bool

    def follow(self, x: fx.Node, node: fx.Node, path: Path) -> list[Statistic]:
        """The statistics that `node`, a reader of the value x at the end of `path`, leads to.

        Raises NoMatch if it is used for anything else.
        """
        call = self.view.call(node)
        if call.inplace or self.view.value(x, node) is not x:
            raise self._decline(node)
        reduces = True
        if call.name in PRODUCTS:
            step = self._dotted
        elif call.name in _REDUCTIONS:
            step = self._reduction
        else:
            step, reduces = self._elementwise, False
        path = path._replace(**step(x, node, call, path))
        if reduces and (statistic := self._statistic(node, path)) is not None:
            return [statistic]
        path = path._replace(nodes=(*path.nodes, node))
        try:
            return [s for r in self.view.readers(node) for s in self.follow(node, r, path)]
        except NoMatch as reason:
            if reduces:
                raise NoMatch(_OF_EVERY_NEURON, node) from None
            raise reason if path.weight is None else self._decline(node) from None

    def _reduction(self, x: fx.Node, node: fx.Node, call: Call, path: Path) -> dict[str, Any]:
        """The fields of a path that a reduction changes."""
        norm, by = path.norm, call.name
        absolute = norm is None or not (path.weight is None or path.by or path.signed)
        match call.name:
            case "any" | "all" if norm != 1:
                norm = norm or 0
            case "count_nonzero" if norm is None:
                norm, by = 0, "sum"
            case "linalg_norm" if not isinstance(call.get("dim"), int):  # perhaps of a matrix
                raise self._decline(node)
            case "norm" | "vector_norm" | "linalg_norm" if absolute and call.get("p") == 1:
                norm, by = 1, "sum"
            case "norm" | "vector_norm" | "linalg_norm" if norm is None and call.get("p") == 0:
                norm, by = 0, "sum"
            case "l1_loss" if norm is None and self._loss_against_zeros(x, node, call):
                norm, by = 1, call.get("reduction", "mean")
            case "sum" | "mean" if norm is not None or self.positive:
                norm = 1 if norm is None else norm
            case _:
                raise self._decline(node)
        if path.by not in ("", by):
            raise self._decline(node)
        over, n = call.get("dim"), len(path.axes)
        dims = [d % n for d in (range(n) if over in (None, ()) else listed(over))]
        gone = flat(tuple(atom for d in dims for atom in path.axes[d]))
        keepdim = call.get("keepdim")
        axes = (() if d in dims else a for d, a in enumerate(path.axes) if keepdim or d not in dims)
        return {"axes": (*axes,), "reduced": path.reduced | {*gone}, "norm": norm, "by": by}

    def _elementwise(self, x: fx.Node, node: fx.Node, call: Call, path: Path) -> dict[str, Any]:
        """The fields of a path that an elementwise operation or a view changes."""
        view, norm, name = self.view, path.norm, call.name
        if name in COPIES or name == "detach":
            return {}
        if name in REGROUPS:
            return {"axes": (*regrouped(view.shape(node), view.shape(x), path.axes, node),)}
        if path.by:
            raise self._decline(node)
        if name == "abs" and not path.signed:
            return {"norm": 1 if norm is None else norm}
        if name == "mul" and norm is None and self.weighs:
            return self._weighed(x, node, call["other"] if call["input"] is x else call["input"])
        if name == "cast" and call["input"] is x:
            dtype = view.dtype(node)
            if norm is None and dtype == torch.bool:
                return {"norm": 0}
            if norm in (0, -1):
                return {}
            if dtype.is_floating_point and not rounds(dtype, view.dtype(x)):
                return {}
        if name in ("ne", "gt", "eq", "le") and norm is None and call["input"] is x:
            zeros = self.positive or name in ("ne", "eq")
            if zeros and view.const(call["other"], node) == 0:
                return {"norm": 0 if name in ("ne", "gt") else -1}
        raise self._decline(node)

    def _dotted(self, x: fx.Node, node: fx.Node, call: Call, path: Path) -> dict[str, Any]:
        """The fields of a path that a product with a vector changes: with a number per neuron, and summed."""
        found = contraction(self.view, node)
        if found is None or found.scale != 1 or found.bias is not None or path.norm is not None:
            raise self._decline(node)
        a, b = found.operands if found.a.node is x else found.operands[::-1]
        left = [at for at, letter in enumerate(a.axes) if letter in found.axes]
        kept = (*(a.axes[at] for at in left),) == found.axes and a.axes[-1] not in found.axes
        if not (self.weighs and a.node is x and kept and b.axes == a.axes[-1:] and not b.written):
            raise self._decline(node)
        axes = tuple(path.axes[at] for at in left)
        gone = frozenset(atom for axis in path.axes if axis not in axes for atom in flat(axis))
        return {**self._weighed(x, node, b.node), "axes": axes, "reduced": gone, "by": "sum"}

    def _weighed(self, x: fx.Node, node: fx.Node, w: Any) -> dict[str, Any]:
        """The fields of a path that a product with a number per neuron changes. Sparse autoencoders weight their L1
        term by the norms of the decoder's rows."""
        view, shape = self.view, self.view.shape(self.source)
        along = view.is_tensor(w) and only_along(view, w, shape, self.reading.down.d_dim)
        if not (along and same_sizes(view.shape(x), shape)):
            raise self._decline(node)
        # The gradient of |h| is 0 at 0, where that of a bound of h may not be.
        steps = [s.fn for b in self.reading.branches for s in b.program]
        tied = "clamp_min" in steps or "maximum" in steps
        signed = tied or not (self.positive and not_negative(view, w, node))
        return {"norm": 1, "weight": w, "signed": signed}

    def _loss_against_zeros(self, x: fx.Node, node: fx.Node, call: Call) -> bool:
        """Whether l1_loss is the mean or sum of |x|."""
        a, b = call["input"], call["target"]
        zeros = b if a is x else a
        usual = all(call.get(old) is None for old in ("size_average", "reduce", "weight"))
        whole = self.view.is_tensor(zeros) and self.view.same_shape(zeros, x)
        reduced = call.get("reduction", "mean") in ("mean", "sum")
        return usual and reduced and whole and self.view.const(zeros, node) == 0

    def _statistic(self, node: fx.Node, path: Path) -> Statistic | None:
        """The statistic that a reduction at the end of a path computes; None if its result still has axes of tokens and
        of neurons."""
        view, neurons = self.view, self.reading.down.d_dim
        dims = tuple(d for d, axis in enumerate(self.axes) if path.reduced.issuperset(flat(axis)))
        of_neurons = [d for d in range(len(self.axes)) if d not in dims] == [neurons]
        if of_neurons and path.norm == 1:
            raise NoMatch("a sum of every neuron over the tokens needs the activations", node)
        if neurons in dims and path.by in ("any", "all"):
            raise NoMatch(_OF_EVERY_NEURON, node)
        if not (of_neurons or neurons in dims):
            return None
        left = [axis for d, axis in enumerate(self.axes) if d not in dims]
        size = view.shape(self.source)[neurons]
        if not isinstance(size, int) or size == 0 or [a for a in path.axes if a] != left:
            raise self._decline(node)
        ones = tuple(d for d, axis in enumerate(path.axes) if not axis)
        weight = None if path.weight is None else self._made_again(path.weight, node, path.by)
        detached = not view.requires_grad(node)  # by detach(), no_grad, or because all is frozen
        return Statistic(node, self.source, self.of, path, dims, ones, detached, of_neurons, weight)

    def _made_again(self, w: fx.Node, node: fx.Node, by: str) -> tuple[list[fx.Node], Make]:
        """The nodes before the operator from which the numbers of the neurons are computed, and the function that
        builds the numbers."""
        view, down = self.view, self.reading.down
        made = made_again(view, w, min(down.node, node, key=view.order.__getitem__))
        # The operator rounds neither the factors nor the sums, and returns the sums in the dtype of the result.
        exact = fake(w).dtype in (fake(down.node).dtype, torch.float32)
        both = torch.promote_types(fake(w).dtype, view.dtype(self.source))
        if made is None or by != "sum" or not exact or view.dtype(node) != both:
            raise self._decline(node)
        return made

    def _decline(self, node: fx.Node) -> NoMatch:
        if node.op == "output":
            return NoMatch("the activations are also returned", self.source)
        return NoMatch(f"the activations are also read by {label(node)}", node)
