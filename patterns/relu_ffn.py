"""ReLU feed-forward block: projections up, a rectifier, their product, the projection down -> `relu_ffn`.

    h = f(x Wg^T + bg) [* g(x Wu^T + bu)]                      [..., N], mostly zeros
    h Wd^T + bd                                                [..., D]
        ->  relu_ffn(x, Wg, Wd, ...)

f is any elementwise chain that is zero for inputs up to some number (relu, its square, a shifted or thresholded
relu). g is any elementwise chain. If the program also reads sums or means of |h| or [h != 0] (the L1 term of TwELL,
section 3.4), the operator returns these as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparse_inductor.epilogue.ranges import steep
from sparse_inductor.epilogue.steps import render
from sparse_inductor.example import Layers, examples_of
from sparse_inductor.graph.checks import check_device, check_match, outside_no_grad
from sparse_inductor.graph.contraction import PRODUCTS, contraction
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import expected, expected_elements, fake
from sparse_inductor.graph.gemm import Linear, added, linears, summed_over_processes
from sparse_inductor.graph.mesh import is_distributed
from sparse_inductor.graph.no_match import NoMatch, first_match
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.values import matched_nodes
from sparse_inductor.graph.view import GraphView, label
from sparse_inductor.graph.vocabulary import COMPARISONS
from sparse_inductor.match.chains.epilogue_chain import Term
from sparse_inductor.match.chains.family import may_be_above, rectified_product, split_block
from sparse_inductor.match.feed_forward.block import (
    SIGNS,
    Joined,
    Reading,
    check_joined,
    is_activation,
    joined,
    product_in_einsum,
    read_block,
    resembles,
    residual_sum,
    thresholds_of,
)
from sparse_inductor.match.feed_forward.downs import Downs
from sparse_inductor.match.feed_forward.encoder_layer import NAME as FUSED_LAYER
from sparse_inductor.match.feed_forward.encoder_layer import LayerMatch, encoder_layer
from sparse_inductor.match.feed_forward.entries import Shift, shift_of, shifted
from sparse_inductor.match.feed_forward.indicators import compared_dtype, is_flat, said
from sparse_inductor.match.feed_forward.readers import Others, other_readers
from sparse_inductor.pattern import Miss, Sparse
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.popular import may_take_popular
from sparse_inductor.policy.worth import Worth

NAME = "relu_ffn"
OP = "sparse_inductor::relu_ffn"

_SEVERAL_AXES = "projections over several axes at once, or to several: make one axis of them before (flatten, reshape)"
_VECTOR = "the down projection is a vector, which gives one number a token"
_EXPERTS = "every expert (or head) has weights of its own, and the operator takes those of one"


@dataclasses.dataclass
class BlockMatch:
    """A recognised block, ready to be replaced.

    at: the node before which the operator is inserted. residual: the tensor that is added to the block's result, if the
    anchor is this sum. shift: the result of `shift_of`. thresholds: the result of `thresholds_of`; with thresholds, the
    operator takes the up branch as its gate. saves: computes `bytes_saved` on demand, because it imports kernels on a
    GPU.
    """

    anchor: fx.Node
    reading: Reading
    joined: Joined
    others: Others
    at: fx.Node
    matched_nodes: tuple[fx.Node, ...]
    saves: Callable[[], int | None]
    residual: fx.Node | None = None
    shift: Shift | None = None
    thresholds: Term | None = None
    popular: int = 0
    pattern, op = NAME, OP

    @property
    def bytes_saved(self) -> int | None:
        return self.saves()

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys([*self.reading.inputs, self.reading.down.weight_source]))

    @property
    def reads(self) -> list[tuple[fx.Node, fx.Node]]:
        return [*_reads(self.reading, self.others), *(self.shift.reads if self.shift else ())]

    @property
    def ends(self) -> tuple[fx.Node, ...]:
        return tuple(self.others.ends)

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        down = self.reading.down
        return (Sparse("neurons", down.source, down.d_dim, reader=down.node),)

    @property
    def note(self) -> str:
        r = self.reading
        text, up = said(r.gate.program), "" if r.up is None else said(r.up.program) or "as it is"
        if self.thresholds is not None:
            text = f"{up} above a threshold of every neuron"
        elif up:
            text = f"gate {text}, up {up}"
        text += ", with statistics" if self.others.statistics else ""
        return text + (", with the residual" if self.residual is not None else "")

    def replace(self) -> None:
        r, e, downs = self.reading, Emitter(self.at), Downs(self.reading, self.others.downs)
        dtype = fake(r.down.node).dtype  # under autocast, not the inputs' dtype
        x, pairs = self.joined.emit(e, dtype)
        if r.down.order is not None:
            x = e.permuted(x, r.down.order)
        ndim, axis = len(fake(x).shape), r.down.v_dim
        rest = [d for d in range(ndim) if d != axis]
        x = e.permuted(x, [*rest, axis])
        weights: list[fx.Node | None] = []
        branches, thresholds = r.branches, None
        if self.thresholds is not None and r.up is not None:
            branches, pairs = (r.up,), pairs[1:]
            thresholds = r.gate.vector(e, self.thresholds, e.size(pairs[0][0], 0))
            thresholds = e.cast(thresholds, dtype)
        for branch, pair in zip(branches, pairs):
            flat = is_flat(branch.program)  # passes no gradient, not even zeros
            cast = [None if t is None else e.cast(t, dtype) for t in pair]
            weights += [e.method("detach", t) if t is not None and flat else t for t in cast]
        weights += [None] * (4 - len(weights))
        down_bias = downs.bias(e, dtype)
        x, shift = shifted(e, x, self.shift)
        statistics = self.others.statistics
        stat_weight = next((s.weight[1](e) for s in statistics if s.weight is not None), None)
        if stat_weight is not None:
            stat_weight = e.method("reshape", stat_weight, (-1,))
        more = [self.residual, self.popular, shift]
        op = e.call(
            own_operator("relu_ffn"),
            x, *weights, downs.weight(e, dtype), None if r.tokens else down_bias, stat_weight, thresholds,
            *[render(b.program) for b in branches], *([""] if len(branches) == 1 else []),
            bool(statistics), any(s.of_neurons for s in statistics), *(more if any(more) else []),
        )  # fmt: skip
        y = downs.scaled(e, e.call(operator.getitem, op, 0), [*rest, axis], down_bias)
        y = e.permuted(y, [[*rest, axis].index(d) for d in range(ndim)])
        y, *more = downs.apart(e, y)
        y = e.laid_out(r.down.finish(e, y), fake(self.anchor))
        self.anchor.replace_all_uses_with(y)
        for down, t in zip(self.others.downs, more):
            down.node.replace_all_uses_with(e.laid_out(down.finish(e, t), fake(down.node)))
        if statistics:
            self._emit_statistics(e, op, rest)

    def _emit_statistics(self, e: Emitter, op: fx.Node, rest: list[int]) -> None:
        down = self.reading.down
        axis = down.d_dim
        values = e.call(operator.getitem, op, 1)
        # The operator returns statistics in the axis order of its input, without D. The program's have the order of the
        # activation, without the axis of the neurons.
        order = rest if down.order is None else [down.order[d] for d in rest]
        axes = [a for a in range(len(order) + 1) if a != axis]
        for s in self.others.statistics:
            t = e.call(operator.getitem, values, s.row)
            if s.of_neurons:
                found = s.emit_of_neurons(e, e.call(operator.getitem, op, 2), t)
            else:
                t = e.permuted(t, [order.index(a) for a in axes])
                found = s.emit(e, t, axis, fake(s.source).shape[axis])
            s.node.replace_all_uses_with(e.laid_out(found, fake(s.node)))


class ReluFfn(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "down(relu(gate(x)) * up(x)) -> relu_ffn(x, gate, up, down)"
    anchors = PRODUCTS | {FUSED_LAYER, "output"}
    signs = SIGNS | {FUSED_LAYER}

    def _match(self, node: fx.Node, view: GraphView) -> BlockMatch | LayerMatch | Miss | None:
        if view.name_of(node) == FUSED_LAYER:
            return encoder_layer(view, node, NAME, OP)
        if node.op == "output":
            return split_block(
                view, node, "the activations", lambda n: is_activation(view, n, node)
            )
        if not may_be_above(view, node.all_input_nodes, SIGNS):
            return None
        found = [one for one in linears(view, node) or added(view, node) if not one.within]
        if found and is_distributed(fake(node)):
            found = [summed_over_processes(view, node) or found[0]]
        # Either operand of a product may be read as the weight. A reading whose activations are an input or a parameter
        # of the graph is not a down projection.
        found = [one for one in found if one.source.op not in ("placeholder", "get_attr")]
        if not found or not fake(node).dtype.is_floating_point:
            _, weights = rectified_product(view, node) or (None, False)
            product = contraction(view, node)
            if product is None or not weights:
                why = product_in_einsum(view, node)
            else:
                batched = {*product.a.axes} & {*product.b.axes} & {*product.axes} - {None}
                vector = min(len(product.a.axes), len(product.b.axes)) == 1
                why = _EXPERTS if batched else _VECTOR if vector else _SEVERAL_AXES
            return Miss(why, node) if why else None
        try:
            return first_match(lambda down: self._block(node, view, down), found)
        except NoMatch as reason:
            source, weight = found[0].source, found[0].weight_source
            if not resembles(view, source, node):
                return None
            # A product of two rectified tensors scores one by the other.
            return None if resembles(view, weight, node) else reason.miss(node)

    def _block(self, node: fx.Node, view: GraphView, down: Linear) -> BlockMatch:
        if down.d_axes > 1:
            raise NoMatch(_SEVERAL_AXES, node)
        if is_distributed(fake(down.source)):
            raise NoMatch("the operator takes whole tensors, not DTensors", node)
        reading = read_block(view, down, down.source, node)
        if reading.tokens and fake(node).dtype == torch.float16:
            raise NoMatch("what a token's factor has not scaled yet may overflow in float16", node)
        gate = reading.gate
        axis = down.d_dim
        if any(b.v_dim != axis for b in reading.branches):
            raise NoMatch("the down projection is over another axis than the neurons", node)
        dtype = fake(node).dtype
        for branch in reading.branches:
            mine = fake(branch.linear.node).dtype
            if mine != dtype:
                raise NoMatch(
                    f"the activations are {mine}, the down projection is in {dtype}: the operator has one dtype",
                    node,
                )
            for n in branch.nodes if is_flat(branch.program) else ():
                if view.name_of(n) in COMPARISONS and (other := compared_dtype(view, n)) != dtype:
                    raise NoMatch(
                        f"thresholds compared in {other}, which the operator has in {dtype}", n
                    )
        check_device(node)
        if any(map(view.needs_grad, reading.inputs)):
            if all(is_flat(b.program) for b in reading.branches):
                raise NoMatch("a comparison passes no gradient on to what it compares", node)
            for branch in reading.branches:
                if (step := steep(branch.program)) is not None:
                    why = "which may be infinite, is NaN"
                    raise NoMatch(f"0 times the slope of {step}, {why}", branch.linear.node)
        up = reading.up
        one = joined(view, gate, up, node)
        if one is None:
            assert up is not None
            raise NoMatch("the two projections read different inputs", up.linear.node)
        inside = [n for b in reading.branches for n in b.nodes]
        nodes = matched_nodes(view, [*inside, *down.within, node])
        others, nodes = other_readers(view, reading, nodes)
        at = min([node, *others.ends], key=view.order.__getitem__)
        apart = {n for s in others.statistics for n in (*s.path.nodes, s.node)}
        at = outside_no_grad(view, {*nodes} - apart, at, "within the block")
        late = [t for t, _ in _reads(reading, others) if view.order[t] >= view.order[at]]
        if late:
            what = "an activation" if others.downs else "a statistic"
            raise NoMatch(f"{what} is read before {label(late[0])} is there", at)
        if not {*down.also}.isdisjoint(nodes):
            raise NoMatch("what is added to the result comes out of the block itself", node)
        if not {down.weight_source, *(d.weight_source for d in others.downs)}.isdisjoint(nodes):
            raise NoMatch("the down weight comes out of the block itself", node)
        if not {t for s in others.statistics for t in s.leaves}.isdisjoint(nodes):
            raise NoMatch("a weight of the activations comes out of the block itself", node)
        check_joined(view, [one.parts, [down, *others.downs]], down)
        saved = functools.partial(_bytes_saved, view, reading)
        if (total := residual_sum(view, reading)) is not None and not others.ends:
            end, residual = total
            with contextlib.suppress(NoMatch):
                with_sum = (*nodes, end)
                match = BlockMatch(end, reading, one, others, end, with_sum, saved, residual)
                check_match(view, match)
                return match
        shift = None
        if up is None and len(gate.linear.summands) == 1 and gate.linear.source not in nodes:
            shift = shift_of(view, gate.linear.source, node, node)
        if shift is not None and {*view.readers(shift.difference)} <= {*nodes}:
            nodes = matched_nodes(view, [*nodes, shift.difference])
        thresholds = None if others.statistics else thresholds_of(reading)
        return BlockMatch(
            node, reading, one, others, at, nodes, saved, shift=shift, thresholds=thresholds
        )

    def worth(self, match: BlockMatch | LayerMatch, view: GraphView) -> Worth:
        if isinstance(match, LayerMatch):
            return Worth(0.0, "what a fused layer activates cannot be counted")
        down, branches = match.reading.down, match.reading.branches
        jumps = match.thresholds is not None
        neurons = expected(fake(down.source).shape[down.d_dim])
        width = expected(down.outputs)
        tokens = expected_elements(fake(down.source).shape) // max(1, neurons)
        dtype = fake(down.node).dtype
        worth = look_up(
            NAME,
            fake(down.node).device,
            tokens=tokens,
            weight=neurons * width,
            width=width,
            bits=8 * dtype.itemsize,
            branches=1 if jumps else len(branches),
            shared=not jumps and len({b.linear.node for b in branches}) < len(branches),
            weighed=any(s.weight is not None for s in match.others.statistics),
            training=any(map(view.needs_grad, match.reading.inputs)),
        )
        given = sum(expected_elements(fake(p.source).shape) for p in branches[0].linear.summands)
        inputs, stats = given // max(1, tokens), bool(match.others.statistics)
        if not jumps and may_take_popular(dtype, neurons, inputs, stats):
            return worth
        return worth._replace(apart=None)

    def resolve(
        self, matches: Sequence[BlockMatch | LayerMatch], view: GraphView
    ) -> tuple[list[BlockMatch | LayerMatch], list[Miss]]:
        """Accept matches in graph order. If two blocks share a linear, only the first is rewritten."""
        kept: list[BlockMatch | LayerMatch] = []
        taken: set[fx.Node] = set()
        for m in sorted(matches, key=lambda m: view.order[m.anchor]):
            if taken.isdisjoint(m.matched_nodes):
                kept.append(m)
                taken.update(m.matched_nodes)
        return kept, []


def _reads(reading: Reading, others: Others) -> list[tuple[fx.Node, fx.Node]]:
    """Return the tensors that a block reads, each with the node that reads it."""
    down = reading.down
    reads = [r for b in reading.branches for r in b.reads]
    reads += [(t, down.node) for t in down.read]
    reads += [(t, s.node) for s in others.statistics for t in s.leaves]
    return reads + [(t, d.node) for d in others.downs for t in (d.weight_source, *d.also)]


def _bytes_saved(view: GraphView, reading: Reading) -> int | None:
    """Return the bytes of hidden activations that a training step as written keeps for the backward.

    The bytes that the operator keeps are not subtracted: they depend on the number of active neurons.
    """
    if not any(map(view.needs_grad, reading.inputs)):
        return 0
    sizes = view.shape(reading.down.source)
    if not all(isinstance(s, int) for s in sizes):
        return None
    y = fake(reading.down.node)
    tokens = math.prod(s for d, s in enumerate(sizes) if d != reading.down.d_dim)
    neurons = sizes[reading.down.d_dim]
    from sparse_inductor.ops.relu_ffn import saves_nothing

    if saves_nothing(y.device, y.dtype, tokens, neurons):
        return 0
    return len(reading.branches) * math.prod(sizes) * y.dtype.itemsize


def _block(forward: Callable[..., Any], training: bool) -> tuple[Any, tuple[Any, ...]]:
    gate, up = nn.Linear(8, 24, bias=False), nn.Linear(8, 24, bias=False)
    block = Layers(forward, gate=gate, up=up, down=nn.Linear(24, 8))
    return block, (torch.randn(2, 6, 8, requires_grad=training),)


_examples = examples_of(_block)


def _with_l1(x, gate, up, down):
    h = F.relu(gate(x)) * up(x)
    return down(h), h.abs().mean()


def _returned(x, gate, up, down):
    h = F.relu(gate(x)) * up(x)
    return down(h), h


ReluFfn.examples = (
    *_examples(
        llama=lambda x, gate, up, down: down(F.relu(gate(x)) * up(x)),
        squared=lambda x, gate, up, down: down(F.relu(up(x)).square()),
        drelu=lambda x, gate, up, down: down(F.relu(gate(x)) * F.relu(up(x))),
        threshold=lambda x, gate, up, down: down(F.threshold(gate(x), 0.1, 0.0) * up(x)),
    ),
    *_examples(
        True,
        llama_train=lambda x, gate, up, down: down(up(x) * torch.relu(gate(x))),
        l1_in_the_loss=_with_l1,
    ),
)
ReluFfn.near_misses = (
    *_examples(reason="also returned", returned=_returned),
    *_examples(
        reason="no factor is known to be zero below some number",
        leaky=lambda x, gate, up, down: down(F.leaky_relu(up(x))),
    ),
    *_examples(
        reason="layer_norm after the linear",
        norm_between=lambda x, gate, up, down: down(F.layer_norm(F.relu(up(x)), (24,))),
    ),
    *_examples(
        reason="add combines two tensors",
        sum=lambda x, gate, up, down: down(F.relu(gate(x)) + up(x)),
    ),
)

PATTERN = ReluFfn()
