"""SPLADE head: linear to the vocabulary, mask, activation, maximum over the sequence -> `splade_head`.

    logits = linear(hidden, weight, bias)                      [B, S, V]
    max_s program(logits, mask)                                [B, V]
        ->  splade_head(hidden, weight, bias, [mask], program)

`program` is the elementwise chain between the linear and the maximum (relu, log1p, soft-caps, masks of every kind). It
has to be non-decreasing in the logits, which is proved with interval arithmetic. Masks need no proof, because the
operator inspects their values at run time.
Sources: Sparton, Eq. 1 and Algorithms 2-3; SPLADE v2 max pooling.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from sparse_inductor.epilogue.functions import Interval
from sparse_inductor.epilogue.ranges import prove, shared_bounds, steep, undefined
from sparse_inductor.epilogue.steps import Program, Step, render, scalar_steps, value_at
from sparse_inductor.example import examples_of
from sparse_inductor.graph.checks import check_device
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import expected, expected_elements, fake, same_size, same_sizes
from sparse_inductor.graph.gemm import Linear
from sparse_inductor.graph.no_match import NoMatch, first_match
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.shapes import OutputsReshaped, order_of
from sparse_inductor.graph.values import is_parameter, matched_nodes
from sparse_inductor.graph.view import GraphView
from sparse_inductor.graph.vocabulary import NEGATIONS, REGROUPS, SPREADS
from sparse_inductor.match.chains.backward_walk import Spread, walk_back
from sparse_inductor.match.chains.chain import Chain
from sparse_inductor.match.chains.joined import joined_summands
from sparse_inductor.match.chains.pooling import (
    ANCHORS,
    SIGNS,
    OverTerms,
    Reduction,
    maximum,
    other_pool,
    rescales,
    resembles,
)
from sparse_inductor.pattern import Miss, Sparse
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME = "splade_head"
OP = "sparse_inductor::splade_head"
# The largest number of calls (the layers of an encoder) to follow from the linear up to a transpose.
_LAYERS = 100


@dataclasses.dataclass
class HeadMatch:
    """A recognised head, ready to be replaced."""

    anchor: fx.Node
    reduction: Reduction
    chain: Chain
    program: Program
    matched_nodes: tuple[fx.Node, ...]
    bytes_saved: int | None
    pattern, op = NAME, OP

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(n for n, _ in self.chain.reads))

    @property
    def reads(self) -> Sequence[tuple[fx.Node, fx.Node]]:
        return self.chain.reads

    @property
    def wants_argmax(self) -> bool:
        at = self.reduction.positions
        return at is not None and any(u.args[1] == at and u.users for u in self.anchor.users)

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        red, v_dim = self.reduction, self.chain.v_dim
        if red.minimum:
            return ()
        dim = v_dim - (v_dim > red.dim)
        for d in red.dims if red.keepdim else ():
            dim += d <= dim
        return (Sparse("terms", self.anchor, dim, red.values, positive=True),)

    @property
    def note(self) -> str:
        steps = render(self.program) or "no steps"
        return steps + (", argmax kept" if self.wants_argmax else "")

    def replace(self) -> None:
        chain, anchor, red = self.chain, self.anchor, self.reduction
        e = Emitter(anchor)
        order = [
            *(d for d in range(len(chain.origin)) if d not in (red.dim, chain.v_dim)),
            red.dim,
            chain.v_dim,
        ]
        # Under autocast the linear computes in another dtype than its inputs have.
        dtype = fake(chain.linear.node).dtype
        hidden, [(weight, bias)] = joined_summands(chain).emit(e, dtype)
        hidden = e.permuted(hidden, order)
        rows = [e.method("squeeze", e.permuted(r, order), -1) for r in chain.row_operands(e)]
        program = self.program
        if _makes_nan_a_number(program):
            # The operator takes the maximum before it runs the program, and a maximum with a NaN is NaN. This program
            # maps NaN to the value that it has at -inf, so tokens with NaN logits are masked out.
            rows.append(e.method("all", e.call(operator.eq, hidden, hidden), -1))
            program = (Step("row_where", (-math.inf,), len(rows) - 1), *program)
        if bias is not None:
            # A folded bias may not be representable in 16 bits.
            wide = chain.wide_bias or bool(chain.folded)
            bias = e.cast(bias, torch.promote_types(dtype, torch.float32) if wide else dtype)
        result = fake(anchor) if red.values is None else fake(anchor)[red.values]
        wide = torch.promote_types(result.dtype, torch.float32) if chain.tail else result.dtype
        # None means the dtype of the inputs. An AOTInductor package of torch 2.11 misreads a dtype that is named.
        named = None if wide == dtype else wide
        op = e.call(
            own_operator("splade_head"),
            hidden, weight, bias, rows, render(program), named, self.wants_argmax, red.even,
        )  # fmt: skip
        values = e.call(operator.getitem, op, 0)
        if chain.tail:
            values = e.cast(chain.replay_tail(e, values, [*order[:-2], order[-1]]), result.dtype)
        values = self._shaped(e, values, order[:-2])
        if red.minimum:
            values = e.call(operator.neg, values)
        if red.values is None:
            anchor.replace_all_uses_with(values)
            return
        positions = (
            self._shaped(e, e.call(operator.getitem, op, 1), order[:-2])
            if self.wants_argmax
            else None
        )
        for user in list(anchor.users):
            if user.args[1] == red.values:
                user.replace_all_uses_with(values)
            elif positions is not None and user.args[1] == red.positions:
                user.replace_all_uses_with(positions)

    def _shaped(self, e: Emitter, t: fx.Node, others: list[int]) -> fx.Node:
        """Bring t, [*others, V], into the shape and memory layout of the user's result."""
        order = [*others, self.chain.v_dim]
        t = e.permuted(t, [order.index(d) for d in sorted(order)])
        for dim in self.reduction.dims if self.reduction.keepdim else ():
            t = e.method("unsqueeze", t, dim)
        result = fake(self.anchor)
        return e.laid_out(t, result if isinstance(result, torch.Tensor) else result[0])


class SpladeHead(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "max_s program(linear(hidden), mask) -> splade_head(hidden, weight, bias, mask)"
    anchors = ANCHORS
    signs = SIGNS

    def _match(self, node: fx.Node, view: GraphView) -> HeadMatch | Miss | None:
        red = maximum(view, node)
        if red is None:
            reason = other_pool(view, node)
            return None if reason is None else Miss(reason, node)
        if len(view.shape(red.source)) < 2 or rescales(view, node, red):
            return None
        dtype = view.dtype(red.source)
        if not dtype.is_floating_point:
            return Miss(f"the logits are {dtype}", node) if resembles(view, node, red) else None
        try:
            return self._head(node, view, red)
        except NoMatch as e:
            bare, last = not isinstance(e, Spread), red.dim == len(view.shape(red.source)) - 1
            terms = isinstance(e, OverTerms) or (last and isinstance(e, OutputsReshaped))
            return e.miss(node) if resembles(view, node, red, bare, terms) else None

    def worth(self, match: HeadMatch, view: GraphView) -> Worth:
        if match.chain.linear.parts:
            return Worth(
                0.0, "a sum of linears, whose weights are joined at every call: not measured"
            )
        logits = fake(match.reduction.source)
        return look_up(
            NAME,
            logits.device,
            logits=expected_elements(logits.shape),
            tokens=expected_elements(logits.shape)
            // max(1, expected(logits.shape[match.chain.v_dim])),
            training=view.needs_grad(match.reduction.source),
            bits=8 * logits.dtype.itemsize,
        )

    def _head(self, node: fx.Node, view: GraphView, red: Reduction) -> HeadMatch:
        epilogue = walk_back(view, red.source, node)
        read = lambda linear: self._reading(node, view, red, Chain(view, epilogue, linear))
        return first_match(read, epilogue.linears)

    def _reading(self, node: fx.Node, view: GraphView, red: Reduction, chain: Chain) -> HeadMatch:
        linear = chain.linear
        if len(red.dims) > 1:
            chain.merge(red.dims, red.dim, red.source)
        if any(same_size(s, 0) for s in view.shape(red.source)):
            raise NoMatch("the logits have no elements", node)
        if chain.v_dim == red.dim or (
            is_parameter(view, linear.source) and not is_parameter(view, linear.weight_source)
        ):
            raise OverTerms("it reduces over the vocabulary, not over the sequence", node)
        if _over_batch(view, chain, red, linear):
            raise NoMatch(
                "it reduces over the batch: axis 0 is a sequence where a transpose put it there",
                node,
            )
        check_device(linear.node)
        if not fake(linear.node).dtype.is_floating_point:
            raise NoMatch(f"the logits are {fake(linear.node).dtype}", linear.node)
        if red.values is not None and any(u.target is not operator.getitem for u in node.users):
            raise NoMatch("the pair of values and indices is used as a whole", node)
        if red.one_by_one and view.needs_grad(red.source):
            raise NoMatch(
                "maximum() of one token after the other gives the tokens of a tie unequal parts of the gradient: amax "
                "and max do not",
                node,
            )
        turned: tuple[Step, ...] = (Step("mul", (-1.0,)),) if red.minimum else ()
        turned += () if red.least == -math.inf else (Step("maximum", (red.least,)),)
        program = chain.program + turned
        proof = prove(program)
        if proof.direction != 1 and chain.flip():
            program = chain.program + turned
            proof = prove(program)
        if proof.direction != 1:
            pool = "minimum" if red.minimum else "maximum"
            if red.minimum and proof.direction == -1:
                raise NoMatch("a minimum over the sequence is that of the smallest logits", node)
            raise NoMatch(f"the {pool} cannot move past the activation: {proof.why()}", node)
        _check_finite(program, node)
        if view.needs_grad(red.source):
            _check_slopes(program)
        if chain.tail:
            self._check_tail(chain, red, proof.range, node)
        if not (is_parameter(view, linear.weight_source) or resembles(view, node, red)):
            raise NoMatch(
                "neither operand of the matmul is a parameter and no activation follows", node
            )
        chain.rehearse(node)
        nodes = matched_nodes(view, [*chain.nodes, *red.within, node])
        return HeadMatch(node, red, chain, program, nodes, _bytes_saved(view, linear, red))

    def _check_tail(self, chain: Chain, red: Reduction, reaching: Interval, node: fx.Node) -> None:
        """Raises NoMatch unless the tail, which starts at the first step that varies over the vocabulary, can be
        applied after the maximum."""
        if (
            red.minimum
            or red.least > -math.inf
            or (red.positions is not None and any(u.args[1] == red.positions for u in node.users))
        ):
            raise NoMatch(
                "a vocabulary mask after the activation, and more than the maximum is used", node
            )
        if not chain.tail_fits(red.dim):
            raise NoMatch("an operand differs by token and by output", node)
        if not chain.tail_rises(reaching):
            raise NoMatch("the maximum cannot move past what follows the vocabulary mask", node)

    def called(self, match: HeadMatch, node: fx.Node) -> str:
        return "the logits are" if node is match.chain.linear.node else super().called(match, node)


def _check_finite(program: Program, node: fx.Node) -> None:
    """Raises NoMatch where the operator would return a number, and the program returns NaN or a different number."""
    for at, step in enumerate(program):
        before = scalar_steps(program[:at])
        if step.fn == "row_mul" and (undefined_step := undefined(before)) is not None:
            raise NoMatch(f"multiplies by 0 what may be no number: {undefined_step}", node)
    if _makes_nan_a_number(program):
        nan, least = (value_at(scalar_steps(program), x) for x in (math.nan, -math.inf))
        if nan != least:
            raise NoMatch(f"makes NaN {nan:g}, and small logits {least:g}", node)


def _check_slopes(program: Program) -> None:
    """Raises NoMatch where the operator cannot reproduce the gradient.

    It cannot if positions above an upper bound share the gradient, or if a zero gradient meets an infinite slope.
    """
    if upper := shared_bounds(program)[1]:
        raise NoMatch(
            f"positions above the bound of {upper[0]} share the gradient of one that is just there"
        )
    if (step := steep(program)) is not None:
        raise NoMatch(f"0 times the slope of {step}, which may be infinite, is NaN")


def _makes_nan_a_number(program: Program) -> bool:
    return not math.isnan(value_at(scalar_steps(program), math.nan))


def _over_batch(view: GraphView, chain: Chain, red: Reduction, linear: Linear) -> bool:
    """Whether the reduction is over the batch: axis 0 of a 3-D output, unless the program transposed the input, the
    output or a mask explicitly."""
    if len(view.shape(linear.node)) != 3 or chain.origin[red.dim] != 0:
        return False
    others = [d for d in range(len(chain.origin)) if d not in (red.dim, chain.v_dim)]
    turned = len(others) == 1 and others[0] < red.dim
    orders = [part.order for part in linear.summands]
    turned |= any(order is not None and order[0] != 0 for order in orders)  # by an einsum, say
    masked = any(_is_transposed(view, n) for row in chain.rows for n in row.term.nodes)
    first = any(_sequence_first(view, part.source) for part in linear.summands)
    return not (turned or masked or first)


def _is_transposed(view: GraphView, mask: fx.Node) -> bool:
    """Whether a mask [sequence, batch] is the transpose of one [batch, sequence]."""
    source, _ = view.behind(mask, REGROUPS | SPREADS | NEGATIONS | {"getitem", "cast"})
    call = view.call(source)
    x = call.get("input")
    return view.is_tensor(x) and len(view.shape(x)) == 2 and order_of(call, 2) == [1, 0]


def _sequence_first(view: GraphView, node: fx.Node) -> bool:
    """Whether a transpose put the first axis in its place, perhaps before layers that keep it there."""
    for _ in range(_LAYERS):
        call = view.call(node)
        x = call.get("input")
        if not view.is_tensor(x) or len(view.shape(x)) != 3:
            return False
        order = order_of(call, 3)
        if order is not None and order != [0, 1, 2]:
            return order[:2] == [1, 0]
        if not same_sizes(view.shape(x)[:2], view.shape(node)[:2]):
            return False
        node = x
    return False


def _bytes_saved(view: GraphView, linear: Linear, red: Reduction) -> int | None:
    """Return the bytes of logits that a training step keeps, minus those of the peaks and positions kept instead."""
    if not view.needs_grad(linear.node):
        return 0
    sizes, shape = view.shape(linear.node), view.shape(red.source)
    if not all(isinstance(s, int) for s in (*sizes, *shape)):
        return None
    logits = math.prod(sizes) * fake(linear.node).dtype.itemsize
    entries = math.prod(s for d, s in enumerate(shape) if d not in red.dims)
    return max(0, logits - 6 * entries)  # a peak (fp32) and a position (int16) for each entry


class _Head(nn.Module):
    def __init__(self, pool: Callable[..., Any]):
        super().__init__()
        self.decoder = nn.Linear(8, 40)
        self.pool = pool

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.pool(self.decoder(hidden), mask)


def _head(pool: Callable[..., Any], training: bool) -> tuple[Any, tuple[Any, ...]]:
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, 4:] = 0
    return _Head(pool), (torch.randn(2, 6, 8, requires_grad=training), mask)


_examples = examples_of(_head)

SpladeHead.examples = (
    *_examples(
        splade=lambda z, m: (torch.log1p(torch.relu(z)) * m.unsqueeze(-1)).amax(1),
        tevatron=lambda z, m: torch.log1p(torch.relu((z + (1 - m.unsqueeze(-1)) * -1e4).max(1)[0])),
        masked_fill=lambda z, m: (
            z.relu().log1p().masked_fill(m[..., None] == 0, float("-inf")).amax(1)
        ),
        soft_cap=lambda z, m: ((torch.tanh(z / 30) * 30).relu().log1p() * m[..., None]).amax(1),
        term_positions=lambda z, m: torch.max(torch.log1p(torch.relu(z)) * m[..., None], dim=1),
    ),
    *_examples(
        True,
        splade_train=lambda z, m: (torch.log1p(torch.relu(z)) * m.unsqueeze(-1)).max(1).values,
    ),
)
SpladeHead.near_misses = (
    *_examples(
        reason="also returned",
        logits_returned=lambda z, m: ((z.relu().log1p() * m[..., None]).amax(1), z),
    ),
    *_examples(
        reason="sum pooling", sum_pooling=lambda z, m: (z.relu().log1p() * m[..., None]).sum(1)
    ),
    *_examples(
        reason="sin is not monotone",
        not_monotone=lambda z, m: (torch.sin(z).relu().log1p() * m[..., None]).amax(1),
    ),
    *_examples(
        reason="over the batch",
        over_the_batch=lambda z, m: (z.relu().log1p() * m[..., None]).amax(0),
    ),
)

PATTERN = SpladeHead()
