"""Who else reads the activations of a feed-forward block: statistics of them, of every token or of every neuron, and
adapters of its down projection.

LoRA computes W h + s B (A h): what reads h is one projection, of W with A behind it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...epilogue.ranges import prove
from ...epilogue.steps import Program
from ...graph.checks import outside_readers
from ...graph.emit import Emitter, Make, made_again
from ...graph.gemm import Linear, linears
from ...graph.indices import listed
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.values import matched_nodes, not_negative, only_along, rounds
from ...graph.view import GraphView, fake, label, same_size
from ...graph.vocabulary import COPIES, PARTS, SHAPE_OPS
from .block import Reading, activation

_ADAPTERS = COPIES | {"mul", "div", "cast"}
_LENGTH = 8  # steps of an adapter
_PASSED = SHAPE_OPS | PARTS | COPIES | {"detach", "cast"}


@dataclasses.dataclass(frozen=True)
class Others:
    """statistics: each with the activation that it is of, "gate" or "hidden". downs: adapters' first projections."""

    statistics: tuple[tuple[Statistic, str], ...] = ()
    downs: tuple[Linear, ...] = ()

    @property
    def ends(self) -> list[fx.Node]:
        return [*(s.node for s, _ in self.statistics), *(d.node for d in self.downs)]


def other_readers(
    view: GraphView, reading: Reading, nodes: tuple[fx.Node, ...]
) -> tuple[Others, tuple[fx.Node, ...]]:
    """Everybody else who reads the activations, if it is for a statistic or an adapter, and the nodes with theirs.

    Raises NoMatch for others.
    """
    found: list[tuple[Statistic, str]] = []
    downs: list[Linear] = []
    own = reading.down
    for source, reader in outside_readers(view, nodes, set(nodes), {own.node}):
        down = None
        weighted = None
        if view.same_read(own.source, own.node, source, reader):
            down = _further_down(view, own, source, reader)
            weighted = _weighted_sum(view, reading, source, reader)
        if down is not None:
            downs.append(down)
        elif weighted is not None and all(s.weight is None for s, _ in found):
            found.append((weighted, "hidden"))
        else:
            found += _statistics(view, reading, source, reader)
    others = Others(tuple(found), tuple(downs))
    taken = [n for s, _ in found for n in s.nodes] + [n for d in downs for n in d.within]
    nodes = matched_nodes(view, [*nodes, *taken, *others.ends])
    for source, reader in outside_readers(view, nodes, set(nodes), {own.node, *others.ends}):
        raise _read_by(view, source, reader)
    return others, nodes


def _further_down(view: GraphView, down: Linear, source: fx.Node, reader: fx.Node) -> Linear | None:
    """The first projection of an adapter, where a reader is one: of what the block's own reads, over the same axes."""
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


def _weighted_sum(
    view: GraphView, reading: Reading, source: fx.Node, reader: fx.Node
) -> Statistic | None:
    """The activations, each times a number of its neuron, added up. Sparse autoencoders weigh their L1 term by the
    norms of the decoder's rows."""
    down, call, shape = reading.down, view.call(reader), view.shape(source)
    axis = down.d_dim
    if call.name != "mul" or call.inplace or reading.factors or reading.tokens:
        return None
    w = call["other"] if call["input"] is source else call["input"]
    if not view.is_tensor(w) or not only_along(view, w, shape, axis):
        return None
    positive = all(_not_negative(b.program) for b in reading.branches)
    # |h| has no slope at 0, where a bound of h may have one.
    tied = any(s.fn in ("clamp_min", "maximum") for b in reading.branches for s in b.program)
    positive = positive and not tied and not_negative(view, w, reader)
    passed, node = [reader], reader
    while len(readers := list(view.readers(node))) == 1 and len(passed) < _LENGTH:
        node = readers[0]
        call = view.call(node)
        if call.inplace:
            return None
        norm = call.name in ("norm", "vector_norm") and call.get("p") in (1, 1.0)
        if call.name == "sum" or (norm and positive):
            break
        if not ((call.name == "abs" and positive) or _changes_nothing(view, node)):
            return None
        passed.append(node)
    else:
        return None
    dims = call.get("dim")
    dims = tuple(d % len(shape) for d in (range(len(shape)) if dims is None else listed(dims)))
    made = made_again(view, w, min(down.node, node, key=view.order.__getitem__))
    # The operator rounds neither a factor nor a sum, and returns them in the dtype of the result.
    exact = fake(w).dtype in (fake(down.node).dtype, torch.float32)
    exact = exact and view.dtype(node) == torch.promote_types(fake(w).dtype, view.dtype(source))
    if axis not in dims or not exact or made is None:
        return None
    detached, keepdim = not view.requires_grad(node), bool(call.get("keepdim"))
    return Statistic(node, source, tuple(passed), dims, keepdim, detached=detached, weight=made)


def _changes_nothing(view: GraphView, node: fx.Node) -> bool:
    call = view.call(node)
    return not call.inplace and view.kept(call) is not None


def _adapts(view: GraphView, node: fx.Node, anchor: fx.Node) -> bool:
    """Whether what a projection gives, projected and scaled, is added to the block's result and read by nobody else."""
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
    view: GraphView, reading: Reading, source: fx.Node, reader: fx.Node
) -> Sequence[tuple[Statistic, str]]:
    try:
        of, counts_only = activation(view, reading, source, reader)
    except NoMatch:
        raise _read_by(view, source, reader) from None
    positive = of == "gate" or reading.up is None or _not_negative(reading.up.program)
    positive = positive and _not_negative(reading.gate.program)
    found = _Reader(view, source, positive, reading.down.d_dim).follow(source, reader)
    for s in found:
        if counts_only and s.norm == 1:
            raise _read_by(view, source, reader)
        if len(view.shape(source)) != len(view.shape(reading.down.source)):
            raise NoMatch("a statistic of the activations in another shape", reader)
        if s.of_neurons and of == "gate" and reading.up is not None:
            raise _read_by(view, source, reader)
    return [(s, of) for s in found]


def _not_negative(program: Program) -> bool:
    proof = prove(program)
    return proof.direction == 1 and proof.range.lo >= 0


def _read_by(view: GraphView, source: fx.Node, reader: fx.Node) -> NoMatch:
    """Why a block is none whose tensors somebody else reads: whoever makes something of them, not who takes a part."""
    split = view.call(source)
    of = split["input"] if split.name in PARTS else source
    what = f"the result of {label(of)} is"
    while view.name_of(reader) in _PASSED and reader.users:
        reader = next(iter(reader.users))
    if reader.op == "output":
        return NoMatch(f"{what} also returned", source)
    return NoMatch(f"{what} also read by {label(reader)}", reader)


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A reduction of |a|, of [a != 0], or of a times a number of its neuron.

    node: the reduction. source: the activation it is of. dims: the axes reduced, the neurons' among them, or all but
    that: `of_neurons`. norm: 1 for |a|, 0 for [a != 0], -1 for [a == 0]. by: "sum", "mean", "any", "all". detached:
    whether a gradient is cut on the way. weight: what the numbers of the neurons are made of, and what makes them.
    """

    node: fx.Node
    source: fx.Node
    nodes: tuple[fx.Node, ...]
    dims: tuple[int, ...]
    keepdim: bool
    norm: int = 1
    by: str = "sum"
    detached: bool = False
    of_neurons: bool = False
    weight: tuple[list[fx.Node], Make] | None = None

    @property
    def leaves(self) -> list[fx.Node]:
        """What the weight is made of."""
        return [] if self.weight is None else self.weight[0]

    def emit(self, e: Emitter, per_token: fx.Node, axis: int, neurons: Any) -> fx.Node:
        """The user's result from one number a token, whose axes are the activation's without `axis`."""
        t = e.method("detach", per_token) if self.detached else per_token
        if self.norm == -1:
            t = e.call(torch.sub, neurons, t)
        if self.by == "mean":
            t = e.call(torch.div, t, neurons)
        rest = tuple(d - (d > axis) for d in self.dims if d != axis)
        if rest:
            t = e.method(self.by, t, rest)
        elif self.norm == 1 and self.by == "sum":
            # Its own memory, no view of all statistics; a clone is what compilers leave out.
            t = e.method("sum", e.method("unsqueeze", t, 0), 0)
        return self._finished(e, t)

    def emit_of_neurons(self, e: Emitter, counts: fx.Node, per_token: fx.Node) -> fx.Node:
        """The user's result from the number of tokens at which each neuron is not 0."""
        sizes = fake(per_token).shape
        static = all(isinstance(n, int) for n in sizes)
        tokens = math.prod(sizes) if static else e.method("numel", per_token)
        t = e.call(torch.rsub, counts, tokens) if self.norm == -1 else counts
        if self.by == "mean":
            t = e.call(torch.div, e.method("to", t, torch.float32), tokens)
        elif self.by != "sum":
            t = e.call(torch.ne, t, 0) if self.by == "any" else e.call(torch.eq, t, tokens)
        return self._finished(e, t)

    def _finished(self, e: Emitter, t: fx.Node) -> fx.Node:
        if self.keepdim:
            for d in sorted(self.dims):
                t = e.method("unsqueeze", t, d)
        return e.cast(t, fake(self.node).dtype)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads statistics of the activation `source`, whose `axis` is the neurons'. positive: it is nowhere negative."""

    view: GraphView
    source: fx.Node
    positive: bool
    axis: int

    def follow(
        self,
        x: fx.Node,
        node: fx.Node,
        passed: tuple[fx.Node, ...] = (),
        norm: int | None = None,
        detached: bool = False,
    ) -> list[Statistic]:
        """The statistics that a reader of a value leads to; norm is None while that is still the activation. Raises
        NoMatch where the reader wants more."""
        call = self.view.call(node)
        if call.inplace or self.view.value(x, node) is not x:
            raise self._decline(node)
        name = call.name
        if name in ("sum", "mean"):
            return [self._reduction(node, call, passed, norm, name, detached)]
        if name in ("any", "all") and norm != 1:
            return [self._reduction(node, call, passed, norm or 0, name, True)]
        if norm is None and name == "count_nonzero":
            return [self._reduction(node, call, passed, 0, "sum", True)]
        if norm is None and name in ("norm", "vector_norm") and call.get("p") in (1, 1.0):
            return [self._reduction(node, call, passed, 1, "sum", detached)]
        if norm is None and name == "l1_loss" and self._loss_against_zeros(x, node, call):
            by = call.get("reduction", "mean")
            return [self._reduction(node, call, passed, 1, by, detached)]
        if name == "abs":
            norm = 1 if norm is None else norm
        elif name in ("ne", "gt", "eq", "le") and norm is None:
            if self.view.const(call["other"], node) != 0 or call["input"] is not x:
                raise self._decline(node)
            if name in ("gt", "le") and not self.positive:
                raise self._decline(node)
            norm, detached = (0 if name in ("ne", "gt") else -1), True
        elif name == "detach":
            detached = True
        elif name == "cast" and call["input"] is x:
            dtype = self.view.dtype(node)
            if norm is None and dtype == torch.bool:
                norm, detached = 0, True
            elif norm in (None, 1) and (
                not dtype.is_floating_point or rounds(dtype, self.view.dtype(x))
            ):
                raise self._decline(node)
        elif name not in COPIES:
            raise self._decline(node)
        found: list[Statistic] = []
        for reader in self.view.readers(node):
            found += self.follow(node, reader, (*passed, node), norm, detached)
        return found

    def _loss_against_zeros(self, x: fx.Node, node: fx.Node, call: Call) -> bool:
        """Whether l1_loss is the mean or sum of |x|."""
        a, b = call["input"], call["target"]
        zeros = b if a is x else a
        usual = all(call.get(old) is None for old in ("size_average", "reduce", "weight"))
        whole = self.view.is_tensor(zeros) and self.view.same_shape(zeros, x)
        reduced = call.get("reduction", "mean") in ("mean", "sum")
        return usual and reduced and whole and self.view.const(zeros, node) == 0

    def _reduction(self, node, call, passed, norm, by, detached) -> Statistic:
        if norm is None:
            if not self.positive:
                raise self._decline(node)
            norm = 1
        sizes = self.view.shape(self.source)
        dim = call.get("dim")
        dims = tuple(range(len(sizes))) if dim is None or dim == () else dim
        dims = tuple(d % len(sizes) for d in listed(dims))
        of_neurons = {*dims} == {*range(len(sizes))} - {self.axis}
        if of_neurons and norm == 1:
            raise NoMatch("a sum of every neuron over the tokens needs the activations", node)
        if not of_neurons and (self.axis not in dims or by in ("any", "all")):
            raise NoMatch("a statistic of every neuron over the tokens needs the activations", node)
        size = sizes[self.axis]
        if not isinstance(size, int) or same_size(size, 0):
            raise self._decline(node)
        # Under no_grad, or of what is frozen.
        detached = detached or not self.view.requires_grad(node)
        keepdim = bool(call.get("keepdim"))
        return Statistic(node, self.source, passed, dims, keepdim, norm, by, detached, of_neurons)

    def _decline(self, node: fx.Node) -> NoMatch:
        if node.op == "output":
            return NoMatch("the activations are also returned", self.source)
        return NoMatch(f"the activations are also read by {label(node)}", node)
