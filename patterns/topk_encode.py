"""The encoder of a TopK autoencoder: the k largest of each row of a linear -> `topk_encode`.

    values, indices = topk(x We^T + be)              [..., k] of [..., N]
        ->  topk_encode(x, We, be, k)

A ReLU in front of the topk moves behind it, to k entries a row: the k largest are the same, but where a row has fewer
positive ones, others of its zeros are taken. A product that is read elsewhere, too, stays as written, with its own
gradient, and is handed to the operator.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparse_inductor.example import Layers, example_of
from sparse_inductor.graph.checks import check_followed, check_operands, only_read_by
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import expected, expected_elements
from sparse_inductor.graph.gemm import Linear, linears
from sparse_inductor.graph.no_match import NoMatch, Recogniser
from sparse_inductor.graph.view import GraphView, fake, label
from sparse_inductor.graph.vocabulary import COPIES
from sparse_inductor.match.feed_forward.entries import by_column, is_last
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME = "topk_encode"
OP = "sparse_inductor::topk_encode"


@dataclasses.dataclass(frozen=True)
class _Product:
    """A linear and what follows it up to the topk: the sum with a bias, a product with a number for each column, a
    ReLU. nodes: all of it, from its end; scores: what the topk would choose from without the ReLU; mixed: the product
    is in another dtype, as under autocast with a bias in fp32."""

    linear: Linear
    bias: fx.Node | None
    bias_reader: fx.Node
    factor: fx.Node | None
    factor_reader: fx.Node
    rectified: bool
    scores: fx.Node
    nodes: tuple[fx.Node, ...]
    mixed: bool


@dataclasses.dataclass
class EncoderMatch:
    """A recognised encoder, ready to be replaced. given: the product is there already, since it is read elsewhere or in
    another dtype than what is added to it. shifted: (node, tensor, vector) of the difference that the linear takes,
    where only the vector needs a gradient."""

    anchor: fx.Node
    product: _Product
    k: int | fx.Node
    given: bool
    shifted: tuple[fx.Node, fx.Node, fx.Node] | None
    matched_nodes: tuple[fx.Node, ...]
    bytes_saved: int | None = 0
    pattern, op = NAME, OP
    top: bool = True

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return (self.product.linear.source, self.product.linear.weight_source)

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        p = self.product
        found = [(t, p.linear.node) for t in self.inputs]
        if p.bias is not None:
            found.append((p.bias, p.bias_reader))
        if p.factor is not None:
            found.append((p.factor, p.factor_reader))
        if self.given:
            found.append((p.scores, self.anchor))
        if self.shifted is not None:
            difference, *operands = self.shifted
            found += [(t, difference) for t in operands]
        return tuple(found)

    @property
    def apart(self) -> str:
        """With a product that is kept, the gradient of the entries goes past it."""
        return "the gradient goes past the product, which is kept" if self.given else ""

    @property
    def note(self) -> str:
        k = self.k if isinstance(self.k, int) else fake(self.k)
        text = f"k {k}" + (", relu" if self.product.rectified else "")
        return text + (", the product is kept" if self.given else "")

    def replace(self) -> None:
        e, p = Emitter(self.anchor), self.product
        dtype = fake(p.scores).dtype  # under autocast not that of the inputs
        linear = p.linear
        bias = linear.emit_bias(e) if p.bias is linear.bias else p.bias
        if bias is not None and fake(bias).dim() != 1:
            bias = e.method("flatten", bias)
        weight = linear.weight(e)
        if p.factor is not None:
            factor = e.method("flatten", p.factor)
            weight = e.call(operator.mul, weight, e.method("unsqueeze", factor, 1))
            bias = None if bias is None else e.call(operator.mul, bias, factor)
        x, shift = linear.linear_input(e), None
        if self.shifted is not None and x is linear.source:
            _, x, shift = self.shifted
            shift = e.method("flatten", shift) if fake(shift).dim() != 1 else shift
        found = e.call(
            own_operator("topk_encode"),
            e.cast(x, dtype), e.cast(weight, dtype), None if bias is None else e.cast(bias, dtype),
            e.method("detach", p.scores) if self.given else None, self.k, True, shift,
        )  # fmt: skip
        values, indices = (e.call(operator.getitem, found, i) for i in (0, 1))
        if p.rectified:
            # relu saves its result, to which the program may write: topk saves only its indices.
            values = e.call(F.threshold, values, 0.0, 0.0)
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
        if call is None or not view.is_tensor(call["input"]):
            return None
        product = _product(view, call["input"], node)
        if product is None:
            return None
        scores, linear = product.scores, product.linear
        check_operands(scores, linear.source)
        if call.get("largest", True) is not True:
            raise NoMatch("topk takes the smallest", node)
        if not (linear.over_last and is_last(view, scores, call.get("dim", -1))):
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
        check_followed(view, product.nodes, node, any(map(view.needs_grad, _inputs(product))))
        nodes = only_read_by(view, node, () if product.mixed else product.nodes)
        left = not nodes.issuperset(product.nodes)
        shifted = None if left else _shifted(view, product, node)
        if shifted is not None:
            nodes = only_read_by(view, node, (*product.nodes, shifted[0]))
        matched = tuple(sorted(nodes, key=view.order.__getitem__))
        return EncoderMatch(node, product, k, left, shifted, matched)

    def worth(self, match: EncoderMatch, view: GraphView) -> Worth:
        product = match.product
        k = max(1, expected(match.k if isinstance(match.k, int) else fake(match.k)))
        neurons = expected(fake(product.scores).shape[-1])
        return look_up(
            NAME,
            fake(product.scores).device,
            tokens=expected_elements(fake(product.scores).shape) // max(1, neurons),
            neurons=neurons,
            width=expected(fake(product.linear.source).shape[-1]),
            ratio=neurons // k,
            bits=8 * fake(product.scores).dtype.itemsize,
            training=int(any(map(view.needs_grad, _inputs(product)))),
        )


def _shifted(
    view: GraphView, product: _Product, anchor: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(difference, tensor, vector) where the linear takes a tensor less a vector, and only the vector needs a gradient:
    that is a sum over the rows, which need not be made one by one."""
    node = product.linear.source
    call = view.call(node)
    if call is None or call.name != "sub" or call.inplace:
        return None
    found = by_column(view, node)
    if found is None or found[0] is not call["input"]:
        return None
    x, vector = found
    dtypes = {fake(t).dtype for t in (node, x, vector, product.scores)}
    wanted = all(map(view.needs_grad, (node, vector))) and not view.needs_grad(x)
    there = all(view.effects.unchanged(t, node, anchor) for t in (x, vector))
    return (node, x, vector) if wanted and there and len(dtypes) == 1 else None


def _inputs(product: _Product) -> list[fx.Node]:
    linear = product.linear
    found = (linear.source, linear.weight_source, product.bias, product.factor)
    return [t for t in found if t is not None]


def _product(view: GraphView, source: fx.Node, reader: fx.Node) -> _Product | None:
    """The linear that `reader` sees of a tensor; None for anything else."""
    nodes: list[fx.Node] = []
    rectified = False
    bias: fx.Node | None = None
    factor: fx.Node | None = None
    bias_reader = factor_reader = reader
    scores: fx.Node | None = None
    node = view.value(source, reader)
    while node is not None:
        call = view.call(node)
        if call is None or call.inplace:
            return None
        if call.name == "relu" and scores is None and not rectified:
            rectified = True
        elif call.name in COPIES:
            pass
        elif call.name in ("add", "mul") and bias is None and (call.name == "add" or not factor):
            found = by_column(view, node)
            if found is None or linears(view, found[1]):
                return None
            scores = scores or node
            if call.name == "add":
                bias, bias_reader = found[1], node
            else:
                factor, factor_reader = found[1], node
            nodes.append(node)
            node = view.value(found[0], node)
            continue
        else:
            break
        nodes.append(node)
        node = view.value(call["input"], node)
    if node is None or not fake(node).dtype.is_floating_point:
        return None
    for linear in (one for one in linears(view, node) or () if one.v_axes == 1):
        if linear.within or linear.also or (bias is not None and linear.bias is not None):
            continue
        if bias is None and linear.bias is not None:
            bias, bias_reader = linear.bias, node
        scores = scores or node
        every = (*nodes, node)
        mixed = any(fake(n).dtype != fake(scores).dtype for n in every)
        return _Product(
            linear, bias, bias_reader, factor, factor_reader, rectified, scores, every, mixed
        )
    return None


# Examples: what is rewritten and what is declined, as people write it. Tests and documentation are built from these.


_example = example_of(
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


TopkEncode.examples = (
    _example("topk", lambda x, encoder: encoder(x).topk(4, dim=-1)),
    _example("rectified", lambda x, encoder: F.relu(encoder(x)).topk(2)[0], True),
    _example("written_out", _written_out, True),
    _example("by_norms", _by_norms, True),
)
TopkEncode.near_misses = (
    _example(
        "smallest",
        lambda x, encoder: encoder(x).topk(4, largest=False),
        reason="takes the smallest",
    ),
    _example(
        "along_tokens",
        lambda x, encoder: encoder(x).topk(4, dim=1),
        reason="not along the outputs",
    ),
    _example("without_gradient", _without_gradient, True, reason="no gradient goes through"),
)

PATTERN = TopkEncode()
