"""The two products of a sparse autoencoder whose activations are also read elsewhere -> products over their entries.

    z = x We^T + be;  f = any program of z, mostly zeros;  y = f Wd + bd      f or z are returned, or in the loss
        ->  sparse_gradient_linear(x, We, be)  and  sparse_product(f, Wd, bd)

The code between the two products stays as written, with its own gradient: thresholds that are trained with a
straight-through estimator, gates, a mask by the k-th largest of a batch. `relu_ffn` replaces blocks whose activations
are not read elsewhere, and `sparse_decode` decoders whose activations are the entries of a top-k. An encoder of such a
decoder is replaced here only if it is read elsewhere, too: where `topk_encode` is rewritten, the gradient of the
entries bypasses it, and what is left of its own gradient is often zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparse_inductor.example import Layers, examples_of
from sparse_inductor.graph.checks import check_operands
from sparse_inductor.graph.contraction import LAST_AXIS_PRODUCTS
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import fake, has_gradient
from sparse_inductor.graph.gemm import Linear, linears
from sparse_inductor.graph.no_match import NoMatch, if_matched, once, remembered
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.search import reached
from sparse_inductor.graph.view import GraphView
from sparse_inductor.graph.vocabulary import COPIES, REGROUPS
from sparse_inductor.match.chains.family import may_be_above
from sparse_inductor.match.feed_forward.entries import (
    ACTIVATES,
    Activated,
    Entries,
    Shift,
    activated,
    decoders_below,
    entries,
    ratio_of,
    shift_of,
    shifted,
    sizes_of,
)
from sparse_inductor.pattern import Sparse
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME = "sparse_product"
DECODER = "sparse_inductor::sparse_product"
ENCODER = "sparse_inductor::sparse_gradient_linear"


@dataclasses.dataclass
class ProductMatch:
    """A recognised decoder or encoder product, ready to be replaced.

    activations: the tensor that the decoder reads. rectified: the input of the ReLU that computes the activations, if
    there is one. shift: the result of `shift_of`, for the encoder.
    """

    linear: Linear
    op: str
    activations: fx.Node
    rectified: fx.Node | None = None
    shift: Shift | None = None
    bytes_saved: int | None = 0
    pattern: str = NAME

    @property
    def anchor(self) -> fx.Node:
        return self.linear.node

    @property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        return (self.anchor,)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return (self.linear.source, self.linear.weight_source)

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        reads = [(t, self.anchor) for t in (self.linear.source, *self.linear.read)]
        if self.op == DECODER and self.rectified is not None:
            reads.append((self.rectified, self.activations))
        return (*reads, *(self.shift.reads if self.shift else ()))

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        return (Sparse("activations", self.activations),)

    @property
    def note(self) -> str:
        return "the decoder" if self.op == DECODER else "the encoder"

    def replace(self) -> None:
        e, linear = Emitter(self.anchor), self.linear
        dtype = fake(self.anchor).dtype  # under autocast, not the inputs' dtype
        bias = linear.emit_bias(e)
        weight = e.cast(linear.weight(e), dtype)
        x, shift = shifted(e, linear.linear_input(e), self.shift)
        more: list[Any] = [] if shift is None else [shift]
        if self.op == DECODER:
            weight = e.method("t", weight)
            if self.rectified is not None and x is self.activations:
                x, more = self.rectified, [True]
        y = e.call(
            own_operator(self.op),
            e.cast(x, dtype), weight, None if bias is None else e.cast(bias, dtype), *more,
        )  # fmt: skip
        self.anchor.replace_all_uses_with(e.laid_out(linear.finish(e, y), fake(self.anchor)))


class SparseProduct(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = DECODER
    summary = (
        "act(x @ We.t()) that is kept, @ W + b -> sparse_product(f, W, b), and sparse gradients"
    )
    anchors = LAST_AXIS_PRODUCTS
    signs = ACTIVATES

    def _match(self, node: fx.Node, view: GraphView) -> ProductMatch | None:
        found = _decoder(view, node)
        if found is not None and found.entries is None:
            source = found.down.source
            rectified = _rectified(view, source, node)
            return _checked(ProductMatch(found.down, DECODER, source, rectified), view)
        if not view.records(node) or node not in _encoders(view):
            return None
        for linear in sorted(linears(view, node) or (), key=lambda one: not one.over_last):
            if not (view.needs_grad(linear.source) or view.needs_grad(linear.weight_source)):
                continue
            for user in decoders_below(view, node):
                found = _decoder(view, user)
                if found is not None and node in found.activated.encoders:
                    source = found.down.source
                    rectified = _rectified(view, source, user)
                    shift = shift_of(view, linear.source, node, node)
                    return _checked(ProductMatch(linear, ENCODER, source, rectified, shift), view)
        return None

    def worth(self, match: ProductMatch, view: GraphView) -> Worth:
        other = match.anchor if match.op == DECODER else match.linear.source
        sizes = sizes_of(match.activations, other, match.anchor, view.needs_grad(match.anchor))
        sizes |= {"rectified": match.rectified is not None, "ratio": 0, "changing": False}
        selected = _only_selected(view, match.anchor) if match.op == ENCODER else None
        if selected is not None:
            k = fake(selected.values).shape[-1]
            sizes |= ratio_of(match.activations, k, whole=bool(selected.views))
        return look_up(NAME, fake(match.anchor).device, **sizes)


def _rectified(view: GraphView, activations: fx.Node, anchor: fx.Node) -> fx.Node | None:
    """Return the tensor whose ReLU the activations are, if it still has its value where the decoder reads them, and its
    gradient, if it needs one, goes through the ReLU."""
    call = view.call(activations)
    if call.name != "relu" or call.inplace or view.value(activations, anchor) is not activations:
        return None
    z = call["input"]
    if view.needs_grad(z) and not view.needs_grad(activations):
        return None
    there = view.is_tensor(z) and not view.effects.changes(z, activations, anchor)
    return z if there and fake(z).dtype == fake(activations).dtype else None


@once
def _encoders(view: GraphView) -> set[fx.Node]:
    """Return the products from which the activations of any decoder are computed."""
    decoders = (
        _decoder(view, n) for n in view.graph.nodes if view.name_of(n) in LAST_AXIS_PRODUCTS
    )
    return {
        encoder for found in decoders if found is not None for encoder in found.activated.encoders
    }


class _Decoder(NamedTuple):
    """A decoder, read as a linear, and its activations. entries: those of a top-k that the activations are, if so."""

    down: Linear
    activated: Activated
    entries: Entries | None


def _only_selected(view: GraphView, encoder: fx.Node) -> Entries | None:
    """Return the entries of the top-k that a decoder below a product takes, if the product is only read by such top-ks
    and returned: unless the caller has it in a loss, the gradient that arrives for it is zero."""
    found = (_decoder(view, user) for user in decoders_below(view, encoder))
    decoders = [one for one in found if one is not None and one.entries is not None]
    inside = {n for one in decoders for n in one.activated.nodes}

    def below(node: fx.Node) -> list[fx.Node]:
        readers = () if view.name_of(node) == "topk" else view.readers(node)
        return [n for n in readers if n.op != "output" and has_gradient(n)]

    passing = inside | {encoder}
    only = all(
        n in passing or view.name_of(n) in COPIES | REGROUPS for n in reached([encoder], below)
    )
    return decoders[0].entries if decoders and only else None


@remembered
def _decoder(view: GraphView, node: fx.Node) -> _Decoder | None:
    """Return a decoder of many neurons; None for any other node."""
    if not may_be_above(view, node.all_input_nodes, ACTIVATES):
        return None
    for down in linears(view, node) or ():
        between = None if down.within or down.d_axes > 1 else activated(view, down)
        if between is None:
            continue
        # `entries` also declines, with NoMatch, rows that differ in their number of entries.
        return _Decoder(down, between, if_matched(entries, view, down.source, node))
    return None


def _checked(match: ProductMatch, view: GraphView) -> ProductMatch:
    linear, node = match.linear, match.anchor
    check_operands(node, *match.inputs)
    if linear.d_dim + linear.d_axes != len(view.shape(linear.source)):
        raise NoMatch("the product does not sum over the last axis of the activations", node)
    if not linear.over_last:
        raise NoMatch("the results of the product are not along the last axis", node)
    return match


def _autoencoder(forward: Callable[..., Any], training: bool) -> tuple[Any, tuple[Any, ...]]:
    """Build an autoencoder. Only the bias of its encoder is trained, so that there is one rewrite."""
    encoder = nn.Linear(4, 28)
    encoder.weight.requires_grad_(False)
    return Layers(forward, encoder=encoder, decoder=nn.Linear(28, 4)), (torch.randn(2, 6, 4),)


_examples = functools.partial(examples_of(_autoencoder), True)


def _returned(x, encoder, decoder):
    pre = encoder(x)
    f = F.relu(pre)
    return decoder(f), f, pre


def _bounded_penalty(x, encoder, decoder):
    f = F.relu(encoder(x))
    return decoder(f), torch.tanh(4 * f * decoder.weight.norm(dim=0)).sum(-1).mean()


def _above_a_threshold_of_the_batch(x, encoder, decoder):
    f = F.relu(encoder(x))
    return decoder(f * (f >= f.flatten().kthvalue(317).values))


def _without_gradient(x, encoder, decoder):
    pre = encoder(x)
    with torch.no_grad():
        f = F.relu(pre)
    return decoder(f), f, pre


def _over_the_tokens(x, encoder, decoder):
    f = F.relu(encoder(x))
    return torch.einsum("bsn,se->bne", f, decoder.weight[:, :4].repeat(2, 1)[:6]), f


def _outputs_first(x, encoder, decoder):
    f = F.relu(encoder(x))
    return torch.einsum("bsn,en->ebs", f, decoder.weight), f


def _outputs_between(x, encoder, decoder):
    f = F.relu(encoder(x))
    return torch.einsum("bsn,en->bes", f, decoder.weight), f


SparseProduct.examples = _examples(
    returned=_returned,
    bounded_penalty=_bounded_penalty,
    above_a_threshold_of_the_batch=_above_a_threshold_of_the_batch,
    without_gradient=_without_gradient,
)
SparseProduct.near_misses = (
    *_examples("does not sum over the last axis", over_the_tokens=_over_the_tokens),
    *_examples(
        "not along the last axis", outputs_first=_outputs_first, outputs_between=_outputs_between
    ),
)

PATTERN = SparseProduct()
