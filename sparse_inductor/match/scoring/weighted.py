"""Gathered query weights times document weights, through views, masks and casts.

`weighted` walks up from a tensor of contributions to the gather at its root and collects what it is
multiplied by. Everything that does not depend on the gather is a factor: it stays in the graph and
becomes part of the document weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...graph.contraction import lettered
from ...graph.indices import only_new_axes
from ...graph.names import Call
from ...graph.no_match import NoMatch
from ...graph.selection import SELECTIONS, Assigned, selections
from ...graph.shapes import kept_axis, order_of
from ...graph.values import is_parameter, rounds
from ...graph.view import GraphView, fake, same_size, same_sizes
from ...graph.vocabulary import COPIES, VIEWS
from .contributions import Weighted, merged, times_lettered
from .gathers import Gather, gather_of

Read = Callable[[GraphView, Any], Gather | None]

_REACH = 24  # nodes between a reduction and its gather; nobody writes more than ten

# Those of them whose backward makes 0 of 0 whatever the weight: the operator's gradient of one that no document has.
_KEEPS_ZERO = frozenset("relu clamp clamp_min clamp_max add sub rsub mul div".split())
_OF_ONE_WEIGHT = frozenset(
    "relu log log1p log2 log10 exp expm1 sqrt square tanh sigmoid abs neg pow clamp clamp_min "
    "clamp_max add sub rsub div mul reciprocal nan_to_num softplus".split()
)


def weighted(
    view: GraphView, node: Any, reader: fx.Node, read: Read = gather_of, reach: int = _REACH
) -> Weighted | None:
    """`node`, as `reader` sees it, as contributions; None where no gather is at its root.

    `read` says what counts as a gather. Raises NoMatch where there is one, and what follows it cannot be moved into
    the operator.
    """
    if not view.is_tensor(node) or reach == 0:
        return None
    seen = view.value(node, reader)
    if seen is None:
        return None
    found = read(view, seen)
    if found is not None:
        reads = ((found.source, seen), (found.index, seen))
        shape = merged(view.shape(seen), found.lead)
        return Weighted(seen, found, shape, found.batch, nodes=(seen,), reads=reads)
    call = view.call(seen)
    up = lambda x: weighted(view, x, seen, read, reach - 1)
    if call is None:
        return None
    for names, follow in _FOLLOWED:
        if call.name in names:
            return follow(view, seen, call, up)
    return None


def gathered_among(operands: Sequence[Any], up: Up) -> list[tuple[int, Weighted]]:
    """Which operands of a product are contributions. Raises NoMatch where none is and one nearly is."""
    found: list[tuple[int, Weighted]] = []
    declined: NoMatch | None = None
    for i, x in enumerate(operands):
        try:
            w = up(x)
        except NoMatch as d:
            declined = declined or d
        else:
            found += [] if w is None else [(i, w)]
    if declined is not None and not found:
        raise declined
    return found


def _through(view: GraphView, node: fx.Node, call: Call, up: Up) -> Weighted | None:
    w = up(call["input"])
    if w is None:
        return None
    if call.name == "detach" and view.needs_grad(call["input"]):
        raise NoMatch("the contributions are detached", node)
    if call.name == "cast":
        if not view.dtype(node).is_floating_point:
            raise NoMatch(f"the contributions are cast to {view.dtype(node)}", node)
        if fake(node).device != fake(w.node).device:
            raise NoMatch("the contributions move to another device", node)
        gathered = view.dtype(w.gather.node)
        if gathered.is_floating_point and rounds(view.dtype(node), gathered):
            raise NoMatch(f"the contributions are rounded to {view.dtype(node)}", node)
    return w.then(node)


def _function(view: GraphView, node: fx.Node, call: Call, up: Up) -> Weighted | None:
    """A function of the gathered weight alone can be taken of the query before the gather."""
    tensors = [a for a in node.all_input_nodes if view.is_tensor(a)]
    if len(tensors) != 1 or call.get("input") is not tensors[0] or call.get("rounding_mode"):
        return None
    w = up(tensors[0])
    if w is None:
        return None
    if call.name == "neg":
        return w.times(view, node, "mul", -1.0)
    if w.gather.features and call.name not in _KEEPS_ZERO:
        return None  # the square of an embedding, say
    if w.has_weights or any(f.how in ("keep", "drop") for f in w.factors):
        raise NoMatch(f"{call.name} of the products: they are no terms of an inner product", node)
    if call.name not in _KEEPS_ZERO and view.needs_grad(tensors[0]):
        raise NoMatch(
            f"{call.name} of the gathered weights alone: of the others its gradient may be no number",
            node,
        )
    if w.factors or call.inplace or w.node is not (w.of_one or (w.gather.node,))[-1]:
        return None  # scaled or reshaped before it: nobody has been seen to write this
    return w.then(node, of_one=(*w.of_one, node))


def _product(view: GraphView, node: fx.Node, call: Call, up: Up) -> Weighted | None:
    if call.get("rounding_mode"):
        return None
    operands = call["input"], call["other"]
    how = "div" if call.name == "div" else "mul"
    found = gathered_among(operands[: 1 if how == "div" else 2], up)
    if not found or (len(found) == 2 and all(w.gather.features for _, w in found)):
        return None
    shape = view.shape(node)
    full = lambda w: w.alike(shape)
    mine, w = min(found, key=lambda f: (not full(f[1]), *preference(view, f[1])))
    other = operands[1 - mine]
    if not full(w):
        raise NoMatch("the document weights have more axes than the gathered query weights", node)
    if not view.dtype(node).is_floating_point:
        raise NoMatch(f"the products are {view.dtype(node)}, which overflow as they do", node)
    if not view.is_tensor(other):
        const = view.const(other, node)
        if const is None:
            raise NoMatch("the products are scaled by a number that is not known", node)
        return w.times(view, node, how, const)
    written = view.value(other, node)
    if written is not None and view.is_tensor(written):  # an assignment has no value of its own
        other = written
    return w.times(view, node, how, other)


def preference(view: GraphView, w: Weighted) -> tuple[bool, ...]:
    """The query is no gather of rows, has a batch axis, or gradients, or is no buffer; the documents are the other."""
    source = w.gather.source
    kept = is_parameter(view, source) or "buffers" in source.name
    return w.gather.features, w.batch is None, not view.requires_grad(source), kept


def _masked(view: GraphView, node: fx.Node, call: Call, up: Up) -> Weighted | None:
    """The contributions where a mask says so, else 0."""
    ways = selections(view, call)
    found = next((one for one in ways if view.const(one.other, node) == 0), next(iter(ways), None))
    w = None if found is None else up(found.x)
    if found is None or w is None:
        return None
    if isinstance(found.keep, Assigned):
        raise NoMatch("a part of the contributions is assigned to", node)
    assigns = call.name not in ("where", "masked_fill")
    if view.const(found.other, node) != 0 or (
        assigns and not view.dtype(w.gather.node).is_floating_point
    ):
        raise NoMatch("masked contributions are not 0", node)
    if not (assigns or w.alike(view.shape(node))):
        raise NoMatch("the mask has more axes than the contributions", node)
    return w.times(view, node, "drop" if found.negate else "keep", found.keep)


def _lettered(view: GraphView, node: fx.Node, call: Call, up: Up) -> Weighted | None:
    """An einsum that only multiplies: bnl,nl->bnl, or btp,bt->btp."""
    product = lettered(view, call)
    if product is None or len(product[0]) != 2:
        return None
    operands, letters, out = product
    for i in (0, 1):
        w = up(operands[i]) if letters[i] == out and len({*out}) == len(out) else None
        if w is not None and same_sizes(w.shape, view.shape(node)):
            timed = times_lettered(view, node, w, out, operands[1 - i], letters[1 - i])
            return timed and timed.then(node)
    return None


def _viewed(view: GraphView, node: fx.Node, call: Call, up: Up) -> Weighted | None:
    """A view keeps the entries in their order and the batch axis apart from them."""
    if (w := up(call["input"])) is None:
        return None
    if w.lead:
        return None
    before, after = w.shape, view.shape(node)
    n = len(before)
    order = order_of(call, n)
    if order is not None:
        entries = [a for a in order if a != w.batch]
        if [a for a in entries if not same_size(before[a], 1)] != [
            a for a in sorted(entries) if not same_size(before[a], 1)
        ]:
            raise NoMatch("reorders the contributions", node)
        batch = None if w.batch is None else order.index(w.batch)
        return w.then(node, shape=after, batch=batch)
    if call.name == "getitem" and not only_new_axes(call["index"]):
        raise NoMatch("takes a part of the contributions", node)
    if not same_size(math.prod(before), math.prod(after)):
        raise NoMatch("expands or reshapes the contributions by sizes that are not known", node)
    if w.batch is None:
        return w.then(node, shape=after)
    batch = kept_axis(before, w.batch, after)
    if batch is None and same_size(before[w.batch], 1):
        return w.of_one_query().then(node, shape=after)
    if batch is None:
        raise NoMatch("merges queries and documents into one axis", node)
    return w.then(node, shape=after, batch=batch)


Up = Callable[[Any], Weighted | None]
_FOLLOWED: tuple[
    tuple[frozenset[str], Callable[[GraphView, fx.Node, Call, Up], Weighted | None]], ...
] = (
    (frozenset(("mul", "div")), _product),
    (SELECTIONS, _masked),
    (frozenset(("einsum",)), _lettered),
    (COPIES | {"cast", "detach"}, _through),
    (VIEWS, _viewed),
    (_OF_ONE_WEIGHT, _function),
)
