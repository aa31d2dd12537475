"""The encoder of a TopK autoencoder: the k largest outputs in each row of a linear -> `topk_encode`.

    values, indices = topk(x We^T + be)              [..., k] of [..., N]
        ->  topk_encode(x, We, be, k)

The top-k of the flattened outputs, of a whole batch, becomes `batch_topk_encode(x, We, be, k)`.

A ReLU before the topk is applied after it instead, to the k entries. The k largest values are the same, but if fewer
than k are positive, the indices of other zeros may be returned. A product that is also read elsewhere stays as written,
with its own gradient, and is passed to the operator.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparse_inductor.epilogue.steps import Step
from sparse_inductor.example import Layers, examples_of
from sparse_inductor.graph.checks import check_followed, check_operands, only_read_by
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import fake
from sparse_inductor.graph.no_match import NoMatch, if_matched
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.view import GraphView, label
from sparse_inductor.graph.vocabulary import COPIES, REGROUPS
from sparse_inductor.match.chains.backward_walk import walk_back
from sparse_inductor.match.chains.chain import Chain
from sparse_inductor.match.feed_forward.entries import (
    KEEPS_ZEROS,
    SCATTERS,
    Shift,
    is_last,
    ratio_of,
    shift_of,
    shifted,
    sizes_of,
)
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME = "topk_encode"
OP = "sparse_inductor::topk_encode"
OF_BATCH = "sparse_inductor::batch_topk_encode"


@dataclasses.dataclass
class EncoderMatch:
    """A recognised encoder, ready to be replaced.

    scores: the input of the topk, before a ReLU. given: whether the product is kept and passed to the operator: it is
    read elsewhere, or its dtype differs from that of the scores, as under autocast with a bias in fp32. shift: the
    result of `shift_of`. flat: whether the topk is of the flattened scores. ordered: whether the order of the entries
    may be observed.
    """

    anchor: fx.Node
    chain: Chain
    scores: fx.Node
    k: int | fx.Node
    given: bool
    shift: Shift | None
    matched_nodes: tuple[fx.Node, ...]
    flat: bool = False
    ordered: bool = True
    bytes_saved: int | None = 0
    pattern = NAME
    top: bool = True

    @property
    def op(self) -> str:
        return OF_BATCH if self.flat else OP

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return (self.chain.linear.source, self.chain.linear.weight_source)

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        given = [(self.scores, self.anchor)] if self.given else []
        return (*self.chain.reads, *given, *(self.shift.reads if self.shift else ()))

    @property
    def apart(self) -> str:
        """Why `verify` cannot compare the product: if it is kept, the gradient of the entries bypasses it."""
        return "the gradient goes past the product, which is kept" if self.given else ""

    @property
    def note(self) -> str:
        k = self.k if isinstance(self.k, int) else fake(self.k)
        text = f"k {k}" + (" of the batch" if self.flat else "")
        text += ", relu" if self.chain.program else ""
        return text + (", the product is kept" if self.given else "")

    def replace(self) -> None:
        e, linear = Emitter(self.anchor), self.chain.linear
        dtype = fake(self.scores).dtype  # under autocast, not the inputs' dtype
        (weight,), bias = self.chain.weights_and_bias(e)
        x, shift = shifted(e, linear.linear_input(e), self.shift)
        found = e.call(
            own_operator(self.op),
            e.cast(x, dtype), e.cast(weight, dtype), None if bias is None else e.cast(bias, dtype),
            e.method("detach", self.scores) if self.given else None, self.k, self.ordered, shift,
        )  # fmt: skip
        values, indices = (e.call(operator.getitem, found, i) for i in (0, 1))
        if self.chain.program:
            # The program may write to the values, since topk saves only its indices. relu would save its result.
            values = e.call(torch.threshold, values, 0.0, 0.0)
        for user in list(self.anchor.users):
            user.replace_all_uses_with(values if user.args[1] == 0 else indices)


class TopkEncode(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "topk(x @ We.t() + be) -> topk_encode(x, We, be, k)"
    anchors = frozenset({"topk"})

    def _match(self, node: fx.Node, view: GraphView) -> EncoderMatch | None:
        call = view.call(node)
        if not view.is_tensor(call.get("input")):
            return None
        source, views = _unflattened(view, call["input"], node)
        found = _encoder(view, source, (node, *views)[-1], REGROUPS if views else frozenset())
        if found is None:
            return None
        chain, scores = found
        linear, above = chain.linear, [*views, *chain.nodes[::-1]]
        check_operands(scores, linear.source)
        if call.get("largest", True) is not True:
            raise NoMatch("topk takes the smallest", node)
        if not (linear.over_last and is_last(view, call["input"], call.get("dim", -1))):
            raise NoMatch("topk is not along the outputs of the linear", node)
        k = call["k"]
        if not isinstance(k, int) and not isinstance(fake(k), (int, torch.SymInt)):
            raise NoMatch("k is known only at run time", node)
        if call.get("out") is not None:
            raise NoMatch("topk writes to tensors that are there already", node)
        for user in node.users:
            taken = user.target is operator.getitem and user.args[1] in (0, 1)
            if not taken and user.users:
                raise NoMatch(f"the pair that topk returns is also read by {label(user)}", user)
        check_followed(view, above, node)
        mixed = any(fake(n).dtype != fake(scores).dtype for n in above)
        # In inference mode torch 2.11 does not trace F.linear, of which the operator of a batch is composed.
        kept = mixed or (bool(views) and view.in_inference_mode(node))
        nodes = only_read_by(view, node, () if kept else above)
        left = not nodes.issuperset(above)
        shift = None if left else shift_of(view, linear.source, scores, node)
        if shift is not None:
            nodes = only_read_by(view, node, (*above, shift.difference))
        matched = view.in_order(nodes)
        ordered = not (views and _only_scattered(view, node))
        return EncoderMatch(
            node, chain, scores, k, left, shift, matched, flat=bool(views), ordered=ordered
        )

    def worth(self, match: EncoderMatch, view: GraphView) -> Worth:
        k = match.k if isinstance(match.k, int) else fake(match.k)
        x, learnt = match.chain.linear.source, view.needs_grad(match.scores)
        sizes = sizes_of(match.scores, x, match.scores, learnt)
        sizes |= ratio_of(match.scores, k, whole=match.flat) | {"kept": match.given}
        return look_up(NAME, fake(match.scores).device, **sizes)


def _unflattened(view: GraphView, source: fx.Node, topk: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the tensor that a topk takes flattened, and the nodes that flatten it, the last one first; (source, []) if
    the input is not a flattened tensor."""
    seen = view.value(source, topk)
    if seen is None or len(view.shape(seen)) != 1:
        return source, []
    base, views = view.behind(seen, REGROUPS)
    return (base, views) if views and len(view.shape(base)) > 1 else (source, [])


def _only_scattered(view: GraphView, topk: fx.Node) -> bool:
    """Whether the entries that a topk finds are only scattered, so that their order does not matter."""
    into: list[set[fx.Node]] = [set(), set()]
    for i, scatters in enumerate(into):
        nodes = [n for n in topk.users if view.call(n).get("index") == i]
        while nodes:
            node = nodes.pop()
            for user in node.users:
                call, alone = view.call(user), len(user.all_input_nodes) == 1
                if call.name in SCATTERS and call["input"] is not node:
                    scatters.add(user)
                elif call.name in KEEPS_ZEROS and alone and not call.inplace:
                    nodes.append(user)
                else:
                    return False
    return bool(into[0]) and into[0] == into[1]


def _encoder(
    view: GraphView, source: fx.Node, reader: fx.Node, views: frozenset[str]
) -> tuple[Chain, fx.Node] | None:
    """Return the chain above a tensor as `reader` sees it, and the scores before its ReLU; None for anything else.

    The chain is a linear, plus or times a number for each column, and perhaps rectified. views: what it may also have.
    """
    epilogue = if_matched(walk_back, view, source, reader)
    if epilogue is None or any(view.call(e.node).inplace for e in epilogue.elements):
        return None
    names = {view.name_of(e.node) for e in epilogue.elements}
    plain = [one for one in epilogue.linears if one.v_axes == 1 and not (one.within or one.also)]
    if not plain or not names <= COPIES | views | {"add", "mul", "relu"}:
        return None
    chain = if_matched(Chain, view, epilogue, plain[0])
    if chain is None or chain.tail or chain.rows or chain.program not in ((), (Step("relu"),)):
        return None
    before = [e.node for e in epilogue.elements if e.terms and e.terms[0] != Step("relu")]
    scores = (chain.linear.node, *before)[-1]
    return (chain, scores) if fake(scores).dtype.is_floating_point else None


_examples = examples_of(
    lambda forward, training: (
        Layers(forward, encoder=nn.Linear(8, 24)),
        (torch.randn(2, 6, 8, requires_grad=training),),
    )
)


def _written_out(x, encoder):
    pre = x @ encoder.weight.T + encoder.bias
    values, _ = pre.topk(4, sorted=False)
    return values.relu().square().sum(-1)


def _by_norms(x, encoder):
    pre = F.linear(x, encoder.weight, encoder.bias) * encoder.weight.norm(dim=1)
    return pre.topk(4).values.relu()


def _without_gradient(x, encoder):
    with torch.no_grad():
        pre = encoder(x)
    return pre.topk(4).values * x.sum()


def _of_the_batch(x, encoder):
    values, indices = encoder(x).relu().flatten().topk(4 * x.shape[0])
    return values, indices % 24


def _of_the_batch_unsorted(x, encoder):
    return encoder(x).view(-1).topk(20, sorted=False).values.square().sum()


TopkEncode.examples = (
    *_examples(topk=lambda x, encoder: encoder(x).topk(4, dim=-1)),
    *_examples(
        True,
        rectified=lambda x, encoder: F.relu(encoder(x)).topk(2)[0],
        written_out=_written_out,
        by_norms=_by_norms,
        of_the_batch=_of_the_batch,
        of_the_batch_unsorted=_of_the_batch_unsorted,
    ),
)
TopkEncode.near_misses = (
    *_examples(
        reason="takes the smallest",
        smallest=lambda x, encoder: encoder(x).topk(4, largest=False),
    ),
    *_examples(
        reason="not along the outputs", along_tokens=lambda x, encoder: encoder(x).topk(4, dim=1)
    ),
    *_examples(True, "no gradient goes through", without_gradient=_without_gradient),
)

PATTERN = TopkEncode()
