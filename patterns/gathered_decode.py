"""The decoder of a TopK autoencoder as a sum over gathered rows of its weight -> `sparse_decode`.

    values, indices = topk(...)                      [..., k]
    y = the sum over i of values[..., i] * W[indices[..., i]]          [..., D]
        ->  sparse_decode(values, indices, W)

A training step materialises W[indices], [..., k, D], and accumulates the gradient of W entry by entry. The product is
recognised in every form: a multiplication and a sum, an einsum, a batched matmul, `embedding_bag` with weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparse_inductor.example import Layers, examples_of
from sparse_inductor.graph.checks import check_followed, check_operands
from sparse_inductor.graph.contraction import PRODUCTS, Contraction, Operand, contraction
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import (
    bytes_of,
    expected,
    expected_elements,
    fake,
    same_size,
    same_sizes,
)
from sparse_inductor.graph.no_match import NoMatch
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.values import rounds
from sparse_inductor.graph.view import GraphView
from sparse_inductor.graph.vocabulary import REGROUPS, SAME_VALUES
from sparse_inductor.match.feed_forward.entries import topk_of
from sparse_inductor.match.scoring.gathers import Gather, rows_of, table_gradient
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME = "gathered_decode"
OP = "sparse_inductor::sparse_decode"


@dataclasses.dataclass
class GatheredMatch:
    """A recognised decoder, ready to be replaced.

    gather: the node that computes weight[indices], or the anchor itself if that is an embedding_bag. ones: the axes of
    size 1 that the values have in addition to those of the indices, and that the anchor has in addition to [..., D].
    dim: the axis of the weight that is looked up, 1 for weight[:, indices]. first: whether D comes first in the anchor,
    as it does in these columns. settled: the nodes from the weight to the rows, if they pass on no gradient to it.
    """

    anchor: fx.Node
    gather: fx.Node
    values: fx.Node
    indices: fx.Node
    weight: fx.Node
    matched_nodes: tuple[fx.Node, ...]
    bytes_saved: int | None = 0
    ones: tuple[Sequence[int], Sequence[int]] = ((), ())
    dim: int = 0
    first: bool = False
    settled: tuple[fx.Node, ...] = ()
    pattern, op = NAME, OP

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return (self.values, self.indices, self.weight)

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        return ((self.weight, self.gather), (self.indices, self.gather))

    @property
    def note(self) -> str:
        return f"{fake(self.indices).shape[-1]} entries a row"

    def replace(self) -> None:
        e = Emitter(self.anchor)
        y, values, weight = fake(self.anchor), self.values, self.weight
        if self.settled:
            weight = e.method("detach", weight)
        if self.dim == 1:
            weight = e.permuted(weight, (1, 0))
        for axis in reversed(self.ones[0]):
            values = e.method("squeeze", values, axis)
        found = e.call(
            own_operator("sparse_decode"),
            e.cast(values, y.dtype), self.indices, e.cast(weight, y.dtype), None,
        )  # fmt: skip
        if self.first:
            found = e.method("movedim", found, -1, 0)
        for axis in self.ones[1]:
            found = e.method("unsqueeze", found, axis)
        self.anchor.replace_all_uses_with(e.laid_out(found, y))


class GatheredDecode(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "(values[..., None] * W[indices]).sum(-2) -> sparse_decode(values, indices, W)"
    anchors = PRODUCTS | {"sum", "embedding_bag"}
    signs = frozenset({"topk"})

    def _match(self, node: fx.Node, view: GraphView) -> GatheredMatch | None:
        if view.name_of(node) == "embedding_bag":
            return self._bag(node, view)
        product = contraction(view, node)
        if product is None or product.bias is not None or product.scale != 1:
            return None
        for rows, values in (product.operands, product.operands[::-1]):
            if rows.written or values.written:
                continue
            gather, path = _gathered(view, rows.node)
            top = None if gather is None else topk_of(view, gather.index, gather.node)
            if gather is not None and top is not None:
                dim, axes = gather.dim, [*rows.axes]
                axes = axes[dim:] + axes[:dim]
                first = dim == 1 and [*product.axes[:1]] == axes[-1:]
                ones = _added_axes(view, product, axes, values, first)
                if ones is None:
                    continue
                dtype = view.dtype(gather.node)
                # The operator would cast the whole weight, at each call.
                for n in path:
                    if view.dtype(n) != dtype:
                        raise NoMatch(f"the gathered rows are cast to {view.dtype(n)}", n)
                follows = view.requires_grad(rows.node)
                if follows and rounds(view.dtype(node), dtype):
                    raise NoMatch(f"the gradients of the rows are added up in {dtype}", node)
                settled = path if view.needs_grad(gather.source) and not follows else ()
                if gather.gradient and follows:
                    raise NoMatch(gather.gradient, gather.node)
                parts = (values.node, gather.index, gather.source, (*path, *product.nodes))
                match = GatheredMatch(
                    node, gather.node, *parts, ones=ones, dim=dim, first=first, settled=settled
                )
                return _checked(view, match, top)
        return None

    def _bag(self, node: fx.Node, view: GraphView) -> GatheredMatch | None:
        call = view.call(node)
        if node.target is torch.embedding_bag or call.get("mode") != "sum":
            return None
        indices, weight, values = call["input"], call["weight"], call.get("per_sample_weights")
        if not (view.is_tensor(indices) and view.is_tensor(values) and view.is_tensor(weight)):
            return None
        top = topk_of(view, indices, node) if len(view.shape(indices)) == 2 else None
        if top is None:
            return None
        if call.get("max_norm") is not None:
            raise NoMatch("the bags renormalise the rows of the weight", node)
        if why := table_gradient(call):
            raise NoMatch(why, node)
        return _checked(view, GatheredMatch(node, node, values, indices, weight, (node,)), top)

    def worth(self, match: GatheredMatch, view: GraphView) -> Worth:
        table, entries = fake(match.weight), expected_elements(fake(match.indices).shape)
        rows, width = table.shape[match.dim], table.shape[1 - match.dim]
        strides = table.stride(match.dim), table.stride(1 - match.dim)
        return look_up(
            NAME,
            table.device,
            entries=entries,
            width=expected(width),
            bits=8 * fake(match.anchor).dtype.itemsize,
            training=view.needs_grad(match.anchor),
            bag=match.gather is match.anchor,
            copied=not same_sizes(strides, (width, 1)),
            repeats=entries // max(1, expected(rows)),
        )


def _checked(view: GraphView, found: GatheredMatch, top: fx.Node) -> GatheredMatch | None:
    """Check a match, and return it with all its nodes and `bytes_saved`; None where the weight is not a matrix.

    top: the topk that computes the indices.
    """
    anchor, gather, values, weight = found.anchor, found.gather, found.values, found.weight
    check_operands(anchor, values, weight)
    dtype = fake(anchor).dtype
    if not (dtype.is_floating_point and fake(values).dtype.is_floating_point):
        raise NoMatch(f"the decoder computes in {dtype}", anchor)
    if len(view.shape(weight)) != 2:
        return None
    chosen = view.call(top)["input"]
    if not same_size(view.shape(weight)[found.dim], view.shape(chosen)[-1]):
        what = "column" if found.dim == 1 else "row"
        raise NoMatch(f"the weight has not one {what} for each column that topk chose from", gather)
    inside = {gather, *found.matched_nodes}
    check_followed(view, inside - {*found.settled}, anchor)
    if any(not {*view.readers(n)} <= inside for n in inside - {anchor}):
        raise NoMatch("the gathered rows, or their products, are read elsewhere, too", gather)
    saved = bytes_of(gather) if gather is not anchor and view.needs_grad(values) else 0
    ordered = view.in_order(inside)
    return dataclasses.replace(found, matched_nodes=ordered, bytes_saved=saved)


def _gathered(view: GraphView, rows: fx.Node) -> tuple[Gather | None, tuple[fx.Node, ...]]:
    """Return the gather weight[indices] or weight[:, indices] of the rows, and the nodes from it to them; None for
    other rows.

    The indices may be flattened before it, as index_select requires, and the result reshaped after it.
    """
    node, passed = view.behind(rows, SAME_VALUES)
    found, regroups = rows_of(view, node, columns=True), view.name_of(node) in REGROUPS
    if found is None and regroups:
        passed.append(node)
        node, more = view.behind(view.value(view.call(node)["input"], node), SAME_VALUES)
        passed += more
        found = rows_of(view, node, columns=True)
        if found is None or (flattened := view.call(found.index)).name not in REGROUPS:
            return None, ()
        indices = flattened["input"]
        sizes = [*view.shape(found.source)]
        sizes[found.dim : found.dim + 1] = view.shape(indices)
        if not same_sizes(view.shape(rows), sizes):
            return None, ()
        found = dataclasses.replace(found, index=indices)
    if found is None:
        return None, ()
    for n in (node, *passed):
        if not view.dtype(n).is_floating_point or fake(n).device != fake(rows).device:
            return None, ()
    return found, (node, *passed)


def _added_axes(
    view: GraphView, product: Contraction, rows: Sequence[Any], values: Operand, first: bool
) -> tuple[list[int], list[int]] | None:
    """Return the axes of size 1 that the values have in addition to those of the indices, and the product in addition
    to [..., D], or with `first` to [D, ...]; None where it is not a sum over the entries of each row.

    rows: the axes of the gathered rows. Raises NoMatch where several sums are computed from the same rows.
    """
    *entries, column = rows
    found = [column, *entries[:-1]] if first else [*entries[:-1], column]
    wanted = (values.axes, entries), (product.axes, found)
    if None in rows or any([a for a in axes if a in rows] != of for axes, of in wanted):
        return None
    extra, added = ([i for i, a in enumerate(axes) if a not in of] for axes, of in wanted)
    sizes = [view.shape(values.node)[i] for i in extra]
    sizes += [view.shape(product.node)[i] for i in added]
    if not all(same_size(s, 1) for s in sizes):
        raise NoMatch("the same rows are summed up with several values", product.node)
    return extra, added


_examples = examples_of(
    lambda forward, training: (
        Layers(forward, decoder=nn.Linear(8, 24, bias=False)),
        (torch.randn(6, 24, requires_grad=training),),
    )
)


def _summed(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    return (values.relu().unsqueeze(-1) * decoder.weight[indices]).sum(dim=-2)


def _einsum(pre, decoder):
    values, indices = pre.relu().topk(4, dim=-1, sorted=False)
    return torch.einsum("bk,bkd->bd", values, decoder.weight[indices])


def _matmul(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    return (values[:, None] @ F.embedding(indices, decoder.weight)).squeeze(1)


def _bags(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    return F.embedding_bag(indices, decoder.weight, per_sample_weights=values, mode="sum")


def _read_twice(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    rows = decoder.weight[indices]
    return (values.unsqueeze(-1) * rows).sum(1), rows.norm(dim=-1)


def _several(pre, decoder):
    values, indices = pre.topk(4, dim=-1)
    return torch.stack((values, values.relu()), -2) @ decoder.weight[indices]


def _fewer_rows(pre, decoder):
    values, indices = pre[:, :20].topk(4, dim=-1)
    return (values.unsqueeze(-1) * decoder.weight[indices]).sum(-2)


GatheredDecode.examples = (
    *_examples(True, summed=_summed, einsum=_einsum, bags=_bags),
    *_examples(matmul=_matmul),
)
GatheredDecode.near_misses = (
    *_examples(reason="are read elsewhere", read_twice=_read_twice),
    *_examples(reason="summed up with several values", several=_several),
    *_examples(reason="has not one row for each column", fewer_rows=_fewer_rows),
)

PATTERN = GatheredDecode()
