"""The decoder of a TopK autoencoder: a product with an operand that has k entries in each row -> `sparse_decode`.

    f = zeros; f[row, indices] = values              [..., N], k of them a row
    f W + b                                          [..., D]
        ->  sparse_decode(values, indices, W, b)

The indices come from a top-k, so those of a row are distinct. f may also be read elsewhere (returned, counted): it is
then still written for these readers, and their gradient is added to that of the values.

With the top-k of a flattened batch, f is a view of flat zeros with values [k] at indices [k], and becomes
`batch_topk_decode(values, indices, W, b)`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx, nn

from sparse_inductor.example import Layers, examples_of
from sparse_inductor.graph.checks import check_followed, check_operands, only_read_by
from sparse_inductor.graph.contraction import LAST_AXIS_PRODUCTS
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import bytes_of, fake
from sparse_inductor.graph.gemm import Linear, linears
from sparse_inductor.graph.no_match import NoMatch
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.view import GraphView
from sparse_inductor.match.feed_forward.entries import (
    SCATTERS,
    Entries,
    entries,
    ratio_of,
    sizes_of,
)
from sparse_inductor.pattern import Sparse
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME = "sparse_decode"
OP = "sparse_inductor::sparse_decode"
OF_BATCH = "sparse_inductor::batch_topk_decode"


@dataclasses.dataclass
class DecoderMatch:
    """A recognised decoder, ready to be replaced."""

    down: Linear
    found: Entries
    matched_nodes: tuple[fx.Node, ...]
    bytes_saved: int | None
    pattern = NAME

    @property
    def op(self) -> str:
        return OF_BATCH if self.found.views else OP

    @property
    def anchor(self) -> fx.Node:
        return self.down.node

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return (self.found.values, self.found.indices, self.down.weight_source)

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        found, down = self.found, self.down
        return (
            (found.values, found.scatter),
            (found.indices, found.scatter),
            *((factor, node) for node, factor in found.scaled),
            *((t, down.node) for t in down.read),
        )

    @property
    def apart(self) -> str:
        """Why `verify` cannot compare the activations: if they are kept, the gradient of the values bypasses them."""
        kept = self.found.scatter not in self.matched_nodes
        return "the gradient goes past the activations, which others read" if kept else ""

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        return (Sparse("activations", self.down.source),)

    @property
    def note(self) -> str:
        k = fake(self.found.indices).shape[-1]
        kept = "" if self.found.scatter in self.matched_nodes else ", the activations are kept"
        return f"{k} entries {'of the batch' if self.found.views else 'a row'}{kept}"

    def replace(self) -> None:
        e, down = Emitter(self.anchor), self.down
        dtype = fake(self.anchor).dtype  # under autocast, not the inputs' dtype
        values = self.found.values
        for node in (n for n in self.found.after if n not in self.found.views):
            values = e.again(node, {node.all_input_nodes[0]: values})
        bias = down.emit_bias(e)
        weight = e.method("t", e.cast(down.weight(e), dtype))
        for node, factor in self.found.scaled:
            (scaled,) = {*node.all_input_nodes} - {factor}
            of_rows = e.method("unsqueeze", e.method("flatten", factor), 1)
            weight = e.cast(e.again(node, {scaled: weight, factor: of_rows}), dtype)
        more = []
        if self.found.views:
            more.append([e.size(down.source, i) for i in range(fake(down.source).dim() - 1)])
        y = e.call(
            own_operator(self.op),
            e.cast(values, dtype), self.found.indices, weight, None if bias is None else e.cast(bias, dtype), *more,
        )  # fmt: skip
        y = e.laid_out(down.finish(e, y), fake(self.anchor))
        self.anchor.replace_all_uses_with(y)


class SparseDecode(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "zeros.scatter(-1, indices, values) @ W + b -> sparse_decode(values, indices, W, b)"
    anchors = LAST_AXIS_PRODUCTS
    signs = SCATTERS

    def _match(self, node: fx.Node, view: GraphView) -> DecoderMatch | None:
        for down in linears(view, node) or ():
            found = None if down.within or down.d_axes > 1 else entries(view, down.source, node)
            if found is not None:
                return self._checked(view, down, found)
        return None

    def _checked(self, view: GraphView, down: Linear, found: Entries) -> DecoderMatch:
        node = down.node
        check_operands(node, found.values)
        if not down.over_last:
            raise NoMatch("the decoder does not sum over the last axis of the activations", node)
        if not fake(node).dtype.is_floating_point:
            raise NoMatch(f"the decoder computes in {fake(node).dtype}", node)
        between = (*found.after, found.scatter, *(n for n, _ in found.scaled))
        check_followed(view, between, node)
        nodes = _only_here(view, found, node)
        saves = found.scatter in nodes and view.needs_grad(down.weight_source)
        return DecoderMatch(down, found, nodes, bytes_of(down.source) if saves else 0)

    def worth(self, match: DecoderMatch, view: GraphView) -> Worth:
        down, found = match.down, match.found
        sizes = sizes_of(down.source, down.node, down.node, view.needs_grad(down.node))
        sizes |= ratio_of(down.source, fake(found.values).shape[-1], whole=bool(found.views))
        return look_up(NAME, fake(down.node).device, **sizes)


def _only_here(view: GraphView, found: Entries, anchor: fx.Node) -> tuple[fx.Node, ...]:
    """Return the anchor and the nodes above it, up to the first that is also read elsewhere."""
    base = found.base
    given = base is found.scatter or base.op in ("placeholder", "get_attr")
    nodes = only_read_by(view, anchor, found.nodes[:-1] if given else found.nodes)
    if not given and base not in nodes:  # the scatter may write to it in place
        nodes.discard(found.scatter)
    return view.in_order(nodes)


_examples = examples_of(
    lambda forward, training: (
        Layers(forward, decoder=nn.Linear(24, 8)),
        (torch.randn(2, 6, 24, requires_grad=training),),
    )
)


def _scatter(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    return decoder(torch.zeros_like(pre).scatter(-1, indices, values.relu()))


def _in_place(pre, decoder):
    values, indices = pre.relu().topk(4, dim=-1, sorted=False)
    f = torch.zeros_like(pre)
    f.scatter_(-1, indices, values)
    return f @ decoder.weight.T + decoder.bias


def _assigned_by_row(pre, decoder):
    pre = pre.flatten(0, 1)
    values, indices = pre.topk(4)
    f = torch.zeros_like(pre)
    f[torch.arange(12).unsqueeze(1), indices] = values
    return torch.einsum("bn,dn->bd", f.relu(), decoder.weight)


def _unit_rows(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    f = torch.zeros_like(pre).scatter(-1, indices, values.relu())
    return (f * (1 / decoder.weight.norm(dim=0))) @ decoder.weight.T


def _of_the_batch(pre, decoder):
    values, indices = pre.relu().flatten().topk(30, sorted=False)
    f = torch.zeros_like(pre).flatten().scatter(0, indices, values)
    return decoder(f.view_as(pre) / decoder.weight.norm(dim=0))


def _of_the_batch_assigned(pre, decoder):
    values, indices = pre.reshape(-1).topk(30)
    f = pre.new_zeros(pre.numel())
    f[indices] = values
    return decoder(f.unflatten(0, pre.shape).relu())


def _sorted(pre, decoder):
    indices = pre.argsort(-1)[..., :4]
    return decoder(torch.zeros_like(pre).scatter(-1, indices, pre.gather(-1, indices)))


def _into_ones(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    return decoder(torch.ones_like(pre).scatter(-1, indices, values))


def _without_gradient(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    with torch.no_grad():
        f = torch.zeros_like(pre).scatter(-1, indices, values)
    return decoder(f)


def _more_rows(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    return decoder(pre.new_zeros(3, 6, 24).scatter(-1, indices, values))


SparseDecode.examples = (
    *_examples(scatter=_scatter),
    *_examples(
        True,
        in_place=_in_place,
        assigned_by_row=_assigned_by_row,
        unit_rows=_unit_rows,
        of_the_batch=_of_the_batch,
        of_the_batch_assigned=_of_the_batch_assigned,
    ),
)
SparseDecode.near_misses = (
    *_examples(reason="not those of a topk", sorted=_sorted),
    *_examples(reason="is not zero", into_ones=_into_ones),
    *_examples(True, "no gradient goes through", without_gradient=_without_gradient),
    *_examples(reason="only some rows have entries", more_rows=_more_rows),
)

PATTERN = SparseDecode()
