"""An epilogue read from its linear down: the program, its operands, and how to build the operator's inputs.

The vocabulary axis is followed through every view. Each operand is classified as a constant, one number per token, one
number per vocabulary entry, or none of these. A vocabulary operand that is applied while the chain is still linear
becomes part of the weight and bias. One that is applied later must be at the end of the chain, and is replayed after
the reduction.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import fx

from ...epilogue.functions import REALS, Interval
from ...epilogue.ranges import prove
from ...epilogue.steps import Program, Step, simplified
from ...graph.emit import Emitter
from ...graph.fakes import fake, same_size
from ...graph.gemm import Linear
from ...graph.indices import is_full
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.search import reached
from ...graph.selection import Assigned
from ...graph.shapes import Move, move, reshaped
from ...graph.values import extreme, not_negative
from ...graph.view import GraphView, label
from .epilogue_chain import Element, EpilogueChain, Fill, Normalised, Term
from .kinds import Frame, Kind, kind_of
from .terms import Pair, applied, combined, prepared, raised, scaled, selected, widened

_LEARNED = "needs a gradient, and the operator has those of the projection alone"
_MORE = "more than a factor or mask of every neuron or token after the rectifier"


class _Row(NamedTuple):
    """A per-token operand, read by `node` after `at` moves."""

    at: int
    term: Term
    node: fx.Node


class Chain:
    """The program of an epilogue, for one reading of its linear.

    program: the steps up to the reduction. tail: the items after them that vary over the vocabulary; they are
    replayed on the reduced values. Raises NoMatch when an operand is not a constant, one number per token, or one
    number per vocabulary entry.

    linear_after: another linear map follows, not a maximum. Per-token factors can then be applied after that map: they
    are kept in the tail, and `factors` separates them from the others.

    folded: the terms that became part of weight and bias, each with its reader and the constant factor before it.
    """

    def __init__(
        self, view: GraphView, epilogue: EpilogueChain, linear: Linear, linear_after: bool = False
    ):
        self.view, self.linear, self.linear_after = view, linear, linear_after
        self.steps: list[Step] = []
        self.tail: list[Step | Term] = []
        self.rows: list[_Row] = []
        self.moves: list[Move] = []
        self.origin: list[int | None] = list(range(len(view.shape(linear.node))))
        self.frames = [Frame(len(self.origin), linear.v_dim)]  # before the moves, and after each
        self.nodes: list[fx.Node] = [*linear.within, linear.node]
        if linear.v_axes > 1:
            raise NoMatch("a projection to several axes: make one of them before", linear.node)
        self.reads = [
            (t, part.node if t in part.also else (*part.within, part.node)[0])
            for part in linear.summands
            for t in (part.source, *part.read)
        ]
        self.folded: list[tuple[Term, fx.Node, float]] = []
        self._folds: list[Callable[[Emitter, Pair], Pair]] = []  # transforms of weight and bias
        self.wide_bias = False  # whether adding an operand to 16-bit logits promotes them to fp32
        self._turns: NoMatch | None = None  # why a maximum may not move past the tail
        for element in epilogue.elements:
            self._pass(element)

    @property
    def program(self) -> Program:
        return tuple(self.steps)

    @property
    def v_dim(self) -> int:
        return self.frames[-1].v_dim

    # Down the epilogue

    def _pass(self, element: Element) -> None:
        self.nodes += [*element.extra, element.node]
        # An assignment is not a tensor, so it has no dtype. A comparison computes in that of its operands.
        if element.terms and self.view.is_tensor(element.node):
            logits, steps = (self.view.dtype(n) for n in (self.linear.node, element.node))
            if torch.float64 in (logits, steps) and logits != steps != torch.bool:
                raise NoMatch(f"steps are applied in {steps} to logits in {logits}", element.node)
        if element.shape_op is not None:
            self._move(move(self.view, element.node, element.shape_op, self.v_dim), element.node)
        for term in element.terms:
            if isinstance(term, Term):
                self._operand(term, element.node)
            elif self.tail and not (self.linear_after and term.fn == "mul" and self._only_scaled()):
                self.tail.append(term)
            else:
                self.steps.append(term)
                if extreme(scale := self._scale()):
                    raise NoMatch(f"the logits are multiplied by {scale:g}", element.node)
                self.steps = [*simplified(tuple(self.steps))]

    def _move(self, step: Move, node: fx.Node) -> None:
        if self.tail:
            raise NoMatch("the shape changes after a factor or term of every output", node)
        self.moves.append(step)
        self.frames.append(Frame(len(step.origin), step.v_dim))
        self.origin = [None if o is None else self.origin[o] for o in step.origin]
        if step.columns is not None:
            columns = step.columns
            if isinstance(columns, fx.Node):
                self.reads.append((columns, node))
            self._folds.append(lambda e, pair: selected(e, pair, columns))

    def _operand(self, term: Term, node: fx.Node) -> None:
        kind = self._kind(term, node)
        if kind == "row" and self._linear_so_far() and self._is_scalar(term):
            kind = "column"  # a single number for all logits, such as a learned scale
        self.reads += [(n, node) for n in term.nodes]
        learned = [n for n in term.nodes if self.view.needs_grad(n)]
        if kind != "row":
            self._column(term, node, kind)
        elif self.linear_after and _is_factor(term):
            self.tail.append(term)
        elif learned and not self.linear_after:
            what = "a number for all tokens" if self._is_scalar(term) else "a per-token operand"
            view, start = self.view, self.view.order[self.linear.node]
            later = lambda n: [m for m in view.read_by(n) if view.order[m] >= start]
            own = self.linear.node in reached(term.nodes, later)
            why = "is made of what it is applied to" if own else _LEARNED
            raise NoMatch(f"{what} ({label(learned[0])}) {why}", node)
        else:
            self._row(term, node)

    def _row(self, term: Term, node: fx.Node) -> None:
        # Factors and masks that fill in 0 commute, so per-token ones may follow per-entry ones.
        if self.tail and not (scales(term) and self._only_scaled()):
            if self.linear_after:
                raise NoMatch(_MORE, node)
            what = "term" if term.fn == "add" else "mask"
            raise NoMatch(f"a {what} of tokens comes after a factor or term of every output", node)
        self.rows.append(_Row(len(self.moves), term, node))
        self.steps.append(Step("row_" + term.fn, term.const, len(self.rows) - 1))

    def _column(self, term: Term, node: fx.Node, kind: Kind) -> None:
        scale = self._scale()
        if kind == "column" and self._linear_so_far():
            self.folded.append((term, node, scale))
            self._folds.append(lambda e, pair: self._fold(e, pair, term, scale))
            narrow = fake(self.linear.node).dtype.itemsize == 2
            self.wide_bias |= term.fn == "add" and narrow and self.view.dtype(node) == torch.float32
            return
        if isinstance(term.operand, Normalised):
            raise NoMatch("batch_norm after the activation", node)
        if term.fn == "mul" and self._turns is None:
            self._turns = self._turning(term, node)
        self.tail.append(term)

    def _scale(self) -> float:
        return math.prod(s.consts[0] for s in self.steps if s.fn == "mul")

    def _turning(self, term: Term, node: fx.Node) -> NoMatch | None:
        if isinstance(term.operand, fx.Node) and not not_negative(self.view, term.operand, node):
            return NoMatch(
                "a factor of every output may be negative, which turns the order around", node
            )
        if term.prepare is not None:
            return NoMatch("division by a number of every output after the activation", node)
        return None

    def _only_scaled(self) -> bool:
        """Whether all items of the tail commute with a constant factor."""
        return all(isinstance(t, Term) and scales(t) for t in self.tail)

    def _linear_so_far(self) -> bool:
        """Whether the chain is still a non-zero multiple of the linear."""
        return not self.tail and all(s.fn == "mul" and s.consts[0] != 0 for s in self.steps)

    def _is_scalar(self, term: Term) -> bool:
        numbers = self.view.shape(term.operand) if isinstance(term.operand, fx.Node) else (2,)
        return term.fn in ("add", "mul") and all(same_size(s, 1) for s in numbers)

    def _kind(self, term: Term, node: fx.Node) -> Kind:
        return kind_of(self.view, term.operand, node, self.frames[-1], self.linear_after)

    def merge(self, dims: Sequence[int], first: int, node: fx.Node) -> None:
        """Merge several axes into the axis `first`: a maximum over all of them is a maximum over the merged axis."""
        shape = self.view.shape(node)
        if self.v_dim in dims:
            raise NoMatch("it reduces over the vocabulary too", node)
        rest = [d for d in range(len(shape)) if d not in dims]
        order = (*rest[:first], *dims, *rest[first:])
        together = Call("permute", {"input": node, "dims": order})
        self._move(move(self.view, node, together, self.v_dim), node)
        shape = tuple(shape[d] for d in order)
        last = first + len(dims)
        joint = (*shape[:first], math.prod(shape[first:last]), *shape[last:])
        self._move(reshaped(node, shape, joint, self.v_dim), node)

    # Proofs

    def flip(self) -> bool:
        """Move the sign of a negative factor at the start of the program into the weight, so that it no longer turns
        a maximum into a minimum. Return whether there was such a factor."""
        factors = list(itertools.takewhile(lambda s: s.fn == "mul", self.steps))
        factor = math.prod(s.consts[0] for s in factors)
        if factor >= 0:
            return False
        self.steps[: len(factors)] = [] if factor == -1 else [Step("mul", (-factor,))]
        self._folds.append(functools.partial(scaled, factor=-1.0))
        return True

    def tail_fits(self, dim: int) -> bool:
        """Whether no operand of the tail varies along the reduced axis. Raises NoMatch if one of them may turn a
        maximum into a minimum."""
        if self._turns is not None:
            raise self._turns
        for item in self.tail:
            if isinstance(item, Term) and isinstance(item.operand, fx.Node):
                shape = self.view.shape(item.operand)
                at = dim - (len(self.origin) - len(shape))
                if at >= 0 and not same_size(shape[at], 1):
                    return False
        return True

    def tail_rises(self, x: Interval) -> bool:
        """Whether the tail is non-decreasing in the logits for every vocabulary entry, on values in `x`."""
        for item in self.tail:
            if isinstance(item, Step):
                proof = prove((item,), x)
                if proof.direction != 1:
                    return False
                x = proof.range
            elif item.fn == "where":
                x = Interval(min(x.lo, *item.const), max(x.hi, *item.const))
            else:
                x = REALS if item.fn == "add" or x.lo < 0 else Interval(0.0, math.inf)
        return True

    def factors(self, node: fx.Node) -> tuple[list[Term], list[Term]]:
        """The per-entry and the per-token items of a tail that consists of factors and of masks that fill in 0. Raises
        NoMatch if it contains anything else."""
        columns: list[Term] = []
        rows: list[Term] = []
        for item in self.tail:
            kind = self._kind(item, node) if isinstance(item, Term) else None
            if kind == "entry":
                raise NoMatch("an operand differs by sequence and by output", node)
            if rows and isinstance(item, Step):
                raise NoMatch(f"a factor or mask of every token comes before {item.fn}", node)
            if not (isinstance(item, Term) and _is_factor(item)):
                raise NoMatch(_MORE, node)
            (rows if kind == "row" else columns).append(item)
        return columns, rows

    # Building the operator's inputs

    def linear_input(
        self, e: Emitter, upto: int | None = None, part: Linear | None = None
    ) -> fx.Node:
        """The input of the linear, or of a part of it, in the shape of the frame, with D in place of V."""
        t = (part or self.linear).linear_input(e)
        for m in self.moves[:upto]:
            t = m.apply(e, t)
        return t

    def weights_and_bias(self, e: Emitter) -> tuple[list[fx.Node], fx.Node | None]:
        """The weight [V, D] of every summand of the linear map and the bias ([V] or None). Both include the column
        operations that the chain applied while it was linear."""
        bias = self.linear.emit_bias(e)
        first, *more = self.linear.summands
        pair = self._folded_into(e, (first.weight(e), bias))
        return [pair[0], *(self._folded_into(e, (p.weight(e), None))[0] for p in more)], pair[1]

    def _folded_into(self, e: Emitter, pair: Pair) -> Pair:
        for fold in self._folds:
            pair = fold(e, pair)
        return pair

    def _fold(self, e: Emitter, pair: Pair, term: Term, scale: float) -> Pair:
        """s (w x + b) with a column operand, as s (w' x + b'); 16-bit tensors are computed in fp32."""
        weight, bias = pair
        r = self.vector(e, term, e.size(weight, 0))
        if term.fn == "add":
            r = r if scale == 1 else e.call(operator.mul, widened(e, r), 1 / scale)
            return weight, r if bias is None else e.call(operator.add, widened(e, bias), r)
        if term.fn == "mul":
            r = widened(e, r)
            weight = e.call(operator.mul, weight, e.method("unsqueeze", r, 1))
            return weight, None if bias is None else e.call(operator.mul, bias, r)
        r = e.method("bool", r)
        weight = e.call(torch.where, e.method("unsqueeze", r, 1), weight, 0.0)
        dtype = torch.promote_types(fake(self.linear.node).dtype, torch.float32)
        new = e.method("new_zeros", weight, (), dtype=dtype) if bias is None else bias
        return weight, e.call(torch.where, r, e.cast(new, dtype), term.const[0] / scale)

    def vector(self, e: Emitter, term: Term, columns: int | fx.Node) -> fx.Node:
        """A column operand as [V], prepared."""
        if isinstance(term.operand, Normalised):
            return term.operand.emit(e)
        if isinstance(term.operand, Assigned):
            index = next(i for i in term.operand.items() if i is not None and not is_full(i))
            ones = e.method("new_ones", self.linear.weight_source, (columns,), dtype=torch.bool)
            e.call(operator.setitem, ones, index, False)
            return ones
        t = term.operand
        t = t if len(fake(t).shape) == 1 else e.method("flatten", t)
        t = prepared(e, t, term.prepare)
        return e.method("expand", t, (columns,)) if same_size(fake(t).shape[0], 1) else t

    def token_operand(self, e: Emitter, term: Term) -> fx.Node:
        """A per-token factor or mask from the tail, in the shape of the frame, with 1 in place of V."""
        return self._row_operand(e, _Row(len(self.moves), term, self.linear.node))

    def row_operands(self, e: Emitter) -> list[fx.Node]:
        """Every row operand in the shape of the frame, with 1 in place of V."""
        return [self._row_operand(e, row) for row in self.rows]

    def rehearse(self, anchor: fx.Node) -> None:
        """Raise NoMatch if an operand cannot follow the moves after it. Leaves the graph unchanged."""
        if all(row.at == len(self.moves) for row in self.rows):
            return
        try:
            with Emitter(anchor) as e:
                self.row_operands(e)
        except RuntimeError as error:  # raised by a fake tensor for a view that does not fit
            raise NoMatch(
                "a per-token operand does not follow the views after it", anchor
            ) from error

    def _row_operand(self, e: Emitter, row: _Row) -> fx.Node:
        if isinstance(row.term.operand, Assigned):
            t = self._assigned(e, row.term.operand, row.at)
        elif isinstance(row.term.operand, Fill):
            mask, value = (self._aligned(e, n, row.at) for n in row.term.operand.nodes())
            t = e.call(torch.where, mask, *((value, 0) if row.term.operand.negate else (0, value)))
        else:
            t = self._aligned(e, row.term.operand, row.at)
        t = prepared(e, t, row.term.prepare)
        for m in self.moves[row.at :]:
            t = m.apply(e, t)
        return t

    def _assigned(self, e: Emitter, operand: Assigned, at: int) -> fx.Node:
        """The mask of the tokens that an assignment does not change."""
        one = e.call(torch.narrow, self.linear_input(e, at), self.frames[at].v_dim, 0, 1)
        t = e.call(torch.ones_like, one, dtype=torch.bool)
        e.call(operator.setitem, t, operand.index, False)
        return t

    def _aligned(self, e: Emitter, t: fx.Node, at: int) -> fx.Node:
        """A per-token tensor with the axes of the frame after `at` moves, with 1 in place of V."""
        ndim, v_dim = self.frames[at]
        t = raised(e, t, ndim)
        return t if same_size(fake(t).shape[v_dim], 1) else e.call(torch.narrow, t, v_dim, 0, 1)

    def replay_tail(self, e: Emitter, t: fx.Node, order: list[int]) -> fx.Node:
        """Apply the tail to reduced values. `order` gives their axes in the frame, without the reduced axis."""
        for item in self.tail:
            if isinstance(item, Step):
                t = applied(e, t, item)
                continue
            t = combined(e, t, item, self._entries(e, item, order, e.size(t, -1)))
        return t

    def _entries(self, e: Emitter, term: Term, order: list[int], columns: int | fx.Node) -> fx.Node:
        """An operand of the tail that broadcasts with values in `order`."""
        t = term.operand
        if not isinstance(t, fx.Node) or sum(not same_size(s, 1) for s in fake(t).shape) <= 1:
            return self.vector(e, term, columns)
        reduced = next(d for d in range(len(self.origin)) if d not in order)
        t = e.method("permute", raised(e, t, len(self.origin)), (reduced, *order))
        t = e.method("squeeze", t, 0)
        return prepared(e, t, term.prepare)


def scales(term: Term) -> bool:
    """Whether a term is a factor or a mask that fills in 0, which is a factor of 0 or 1."""
    return term.fn == "mul" or (term.fn == "where" and term.const == (0.0,))


def _is_factor(term: Term) -> bool:
    """Whether a term scales and its operand may be applied after a further linear map."""
    return isinstance(term.operand, (fx.Node, Assigned)) and scales(term)
