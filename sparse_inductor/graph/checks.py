"""Conditions of a match: its nodes are not read elsewhere, its inputs are unchanged, and gradients are preserved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import fx

from .. import compat
from ..pattern import Match, Miss
from .contraction import PRODUCTS
from .effects import gives_memory, writes_past_autograd
from .fakes import fake, has_gradient, tensors_in
from .mesh import is_distributed
from .names import stored
from .no_match import NoMatch
from .search import made_of
from .view import GraphView, label
from .vocabulary import SHAPE_OPS

_DEVICES = ("cpu", "cuda")
_ACCUMULATIONS = frozenset(
    "index_add scatter scatter_add scatter_reduce index_put embedding_bag".split()
)

# Those whose operands autocast on a GPU promotes to the widest dtype among them.
_PROMOTED = frozenset(("index_put", "scatter_add"))

# Functions whose result autograd saves. Their gradient reads it with any writes through `detach()` or `.data`.
_RESULT_IN_GRADIENT = frozenset(
    "amax amin relu sigmoid tanh exp expm1 sqrt rsqrt reciprocal softmax "
    "entmax15 sparsemax entmax_bisect sparsemax_bisect".split()
)


M = TypeVar("M", bound=Match)


def check_device(node: fx.Node) -> None:
    """Raises NoMatch where a node's result is on a device without operators."""
    if fake(node).device.type not in _DEVICES:
        raise NoMatch(f"there is no operator for {fake(node).device}", node)


def check_operands(node: fx.Node, *tensors: fx.Node) -> None:
    """As `check_device`; also raises NoMatch where one of the operator's tensors is a DTensor."""
    check_device(node)
    if any(is_distributed(fake(t)) for t in (node, *tensors)):
        raise NoMatch("the operator takes whole tensors, not DTensors", node)


def check_followed(view: GraphView, nodes: Iterable[fx.Node], end: fx.Node) -> None:
    """Raises NoMatch where one of the nodes up to `end` passes on no gradient although the operator would, or `end`
    records none although the nodes do."""
    for n in nodes:
        if view.records(n) and not view.records(end):
            raise _cut(view, end)
        if view.records(end) and _cuts(view, n):
            raise _cut(view, n)


def check_match(view: GraphView, match: Match) -> None:
    """Raises NoMatch where the operator of a match would see other values than the program, omit a write, or pass on
    another gradient. For the optional attributes of a match see `Match`.
    """
    inside = set(match.matched_nodes)
    if len({view.in_inference_mode(n) for n in inside if n.op.startswith("call")}) > 1:
        # In inference mode AOTAutograd takes no views of outside tensors, and operands may be such views.
        raise NoMatch("a part of it is computed in inference mode, the rest is not", match.anchor)
    at = getattr(match, "at", match.anchor)
    reads = [
        (source, n)
        for n in view.in_order(inside)
        for source in view.read_by(n)
        if source not in inside and view.is_tensor(source)
    ]
    reads += [r for r in getattr(match, "reads", ()) if view.is_tensor(r[0])]
    ends = {match.anchor, *getattr(match, "ends", ())}
    _check_memory(view, reads, inside - {*getattr(match, "kept", ())}, at, ends)
    for node in (*inside, *(source for source, _ in reads)):
        if (by := view.effects.regraded(node)) is not None:
            raise NoMatch(f"{label(by)} changes whether {label(node)} follows gradients", by)
    for node in inside:
        _check_dtypes(view, node)
    if any(view.needs_grad(source) for source, _ in reads):
        _check_gradient(view, match, inside, reads, at)


def _check_dtypes(view: GraphView, node: fx.Node) -> None:
    """Raises NoMatch for operands of different dtypes: Dynamo traces such a call, but PyTorch raises at run time."""
    name = view.name_of(node)
    accumulates = name in _ACCUMULATIONS
    if not (accumulates or name in PRODUCTS) or not view.is_tensor(node):
        return
    dtypes = {view.dtype(n) for n in node.all_input_nodes if view.is_tensor(n)}
    autocasts = view.autocasts(node)
    if accumulates:
        if autocasts and name in _PROMOTED and fake(node).device.type == "cuda":
            return
        dtypes = {dtype for dtype in dtypes if dtype.is_floating_point}  # without the indices
    elif autocasts and torch.float64 not in dtypes:  # autocast does not cast float64
        return
    if len(dtypes) > 1:
        named = " and ".join(sorted(map(str, dtypes)))
        under = " under autocast, which casts no float64" if autocasts and not accumulates else ""
        raise NoMatch(f"PyTorch refuses {name} of {named}{under}", node)


def _check_memory(
    view: GraphView,
    reads: Iterable[tuple[fx.Node, fx.Node]],
    nodes: Collection[fx.Node],
    at: fx.Node,
    ends: Collection[fx.Node],
) -> None:
    # The writes of the nodes disappear with them, unless a user outside keeps one of them in the graph.
    gone = nodes if all({*n.users} <= {*nodes} for n in nodes if n not in ends) else ()
    for source, reader in reads:
        first, last = view.in_order((reader, at))
        for writer, target in view.effects.changes(source, first, last):
            if writer not in gone:
                raise NoMatch(f"{label(target)} is changed in place before {label(at)}", writer)
    for n in nodes:
        for target in view.effects.writers.get(n, ()):
            dies = view.effects.creators(target) <= {*nodes}
            if not dies and (n not in gone or _seen_later(view, target, n, nodes)):
                raise NoMatch(f"{label(target)} is written in place and lives on", n)


def _seen_later(
    view: GraphView, target: fx.Node, writer: fx.Node, nodes: Collection[fx.Node]
) -> bool:
    """Whether a node other than the matched ones may read what `writer` wrote to `target`."""
    sharing = view.effects.sharing(target)
    return sharing is None or any(
        view.order[reader] > view.order[writer] and reader not in nodes
        for n in sharing
        if n not in nodes
        for reader in view.readers(n)
    )


def _check_gradient(
    view: GraphView,
    match: Match,
    inside: Collection[fx.Node],
    reads: Iterable[tuple[fx.Node, fx.Node]],
    at: fx.Node,
) -> None:
    """Raises NoMatch where a tensor that the match reads requires a gradient, and the operator would pass on a gradient
    that differs from the program's."""
    ends = [match.anchor, *getattr(match, "ends", ())]
    wanted = {n for n in ends if has_gradient(n)}
    if not view.records(at):
        for n in wanted:
            raise NoMatch(f"{label(n)} requires a gradient, and the operator runs under no_grad", n)
        return
    for n in inside:
        gradients = (t.grad_fn.name() for t in tensors_in(fake(n)) if t.grad_fn is not None)
        if "torch::autograd::NotImplemented" in gradients:
            raise NoMatch(f"PyTorch has no gradient of {label(n)} and raises", n)
        for read, what in _unsaved(view, n):
            for by in view.effects.writers_to(read):
                if by not in inside and view.order[by] > view.order[n]:
                    reason = f"{label(by)} writes to {what}, which the gradient of {label(n)} reads"
                    raise NoMatch(reason, by)
    given = {t: by for by, ts in view.effects.writers.items() if gives_memory(by) for t in ts}
    for source, _ in reads if given else ():
        for one in made_of(source):
            if one in given:  # a view keeps the previous memory
                raise NoMatch(f"{label(one)} is given other memory", given[one])
    for source, reader in reads:
        if (by := view.effects.past_autograd(source, at)) is not None:
            raise NoMatch(
                f"{label(by)} writes to {label(source)} past autograd, which reads it", by
            )
        if (by := view.effects.given_and_written(source, at)) is not None:
            why = "is made of, and autograd may compute that once more afterwards"
            raise NoMatch(f"{label(by)} writes to an input that {label(source)} {why}", by)
        for by in view.effects.writers_to(source):
            if not compat.is_higher_order(by.target):
                continue
            if by not in inside:  # AOTAutograd recomputes a checkpoint
                why = f"writes to {label(source)}, and may again before the gradient reads it"
                raise NoMatch(f"the body of {label(by)} {why}", by)
            if writes_past_autograd(by):  # other gradients are computed from what it wrote
                raise NoMatch(
                    f"the body of {label(by)} writes to {label(source)} past autograd", by
                )
        if view.in_inference_mode(source):
            why = "was made under inference_mode: PyTorch saves it for no backward"
            raise NoMatch(f"{label(source)} {why}", reader)
    values = tensors_in(fake(match.anchor))
    ordered = view.in_order(inside)
    if match.anchor not in wanted and any(t.is_floating_point() for t in values):
        raise _cut(view, next((n for n in ordered if _cuts(view, n)), match.anchor))
    settled = {*getattr(match, "settled", ())}
    on_the_way = {*wanted}
    for n in reversed(ordered):
        if any(user in on_the_way and _differentiable(view, user) for user in n.users):
            on_the_way.add(n)
        written = n in view.effects.writers
        if (n in on_the_way or written) and n not in settled and _cuts(view, n):
            raise _cut(view, n)


def _unsaved(view: GraphView, node: fx.Node) -> Iterator[tuple[fx.Node, str]]:
    """Yield the tensors, with their names for messages, that a function's backward reads in their state by then.

    These are the result, and alpha, which the bisections keep without autograd's knowledge.
    """
    call = view.call(node)
    if call.name not in _RESULT_IN_GRADIENT:
        return
    yield node, "its result"
    alpha = call.get("alpha") if call.name == "entmax_bisect" else None
    if view.is_tensor(alpha):
        yield alpha, "alpha"


def _differentiable(view: GraphView, node: fx.Node) -> bool:
    """Whether a result can have a gradient. Booleans and integers cannot: a comparison passes on none anyway."""
    if not view.is_tensor(node):
        return True
    dtype = view.dtype(node)
    return dtype.is_floating_point or dtype.is_complex


def _cuts(view: GraphView, node: fx.Node) -> bool:
    """Whether a node computes numbers from tensors that require a gradient, and passes no gradient on to them."""
    whole = stored(node)
    if not view.is_tensor(whole) or not view.dtype(whole).is_floating_point:
        return False
    if not any(map(view.requires_grad, view.read_by(node))):
        return False
    return not (view.records(node) and view.requires_grad(whole))


def _cut(view: GraphView, node: fx.Node) -> NoMatch:
    why = "" if view.records(node) else ": it is under no_grad"
    return NoMatch(f"no gradient goes through {label(node)}{why}", node)


def outside_no_grad(
    view: GraphView, nodes: Collection[fx.Node], at: fx.Node, where: str
) -> fx.Node:
    """Return the node before which to insert an operator that should stand at `at`. If `at` is in a region without
    gradients and the replaced nodes are not, that is a place before the region.

    Raises NoMatch where some of the replaced nodes are in such a region and others are not.
    """
    # Comparisons and their results are ignored: they pass on no gradient in any mode.
    ordered = [
        n
        for n in view.in_order(nodes)
        if _differentiable(view, n) and any(map(view.requires_grad, view.read_by(n)))
    ]
    for n in ordered:
        if view.records(n) != view.records(ordered[0]):
            raise NoMatch(f"grad mode changes {where}", n)
    if not ordered or not view.records(ordered[0]) or view.records(at):
        return at
    return max(
        (n for n in view.graph.nodes if view.records(n) and view.order[n] < view.order[at]),
        key=view.order.__getitem__,
    )


def only_read_by(view: GraphView, anchor: fx.Node, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the anchor and the nodes above it that are read for it alone, up to the first that is also read elsewhere.

    nodes: the nodes above the anchor, the nearest first.
    """
    found = {anchor}
    for n in nodes:
        if not {*view.readers(n)} <= found:
            break
        found.add(n)
    return found


def outside_readers(
    view: GraphView,
    nodes: Iterable[fx.Node],
    inside: Collection[fx.Node],
    ends: Collection[fx.Node],
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (node, reader) for every reader outside `inside` of one of `nodes`, except of those in `ends`."""
    for n in nodes:
        if n not in ends:
            yield from ((n, reader) for reader in view.readers(n) if reader not in inside)


def without_outside_readers(
    matches: Sequence[M], view: GraphView, name: Callable[[M, fx.Node], str]
) -> tuple[list[M], list[Miss]]:
    """Return the matches whose nodes are not read elsewhere, and misses for the rest.

    Matches may share nodes. The nodes in a match's `open` attribute may be read elsewhere. `name(match, node)` returns
    the words for the result of a node ("the scores are"). A miss points at the reader, or at the node if the graph
    returns it directly. Of two matches of which one contains the other's result, only that one is returned, as for the
    last two steps of an iteration that has converged.
    """
    accepted, misses = list(matches), []
    while True:
        inside = {n for m in accepted for n in m.matched_nodes}
        kept = []
        within = set()
        for m in accepted:
            ends = {m.anchor, *getattr(m, "open", ())}
            found = next(outside_readers(view, m.matched_nodes, inside, ends), None)
            if found is None:
                kept.append(m)
                within |= {*m.matched_nodes} - ends
                continue
            node, reader = found
            at = node if reader.op == "output" else reader
            while view.name_of(reader) in SHAPE_OPS and len(reader.users) == 1:
                reader = next(iter(reader.users))  # report the reader of a view, not the view
            how = "returned" if reader.op == "output" else f"read by {label(reader)}"
            misses.append(Miss(f"{name(m, node)} also {how}", at))
        if len(kept) == len(accepted):
            within -= {n for m in kept for n in m.inputs}
            return [m for m in kept if m.anchor not in within], misses
        accepted = kept
