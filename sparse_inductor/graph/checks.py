"""What has to hold for a match: who else reads what it would take away, whether its inputs are still what they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import fx

from .. import compat
from ..pattern import Match, Miss
from .contraction import PRODUCTS
from .effects import gives_memory, made_of
from .fakes import tensors_in
from .mesh import is_distributed
from .names import stored
from .no_match import NoMatch
from .view import GraphView, fake, label
from .vocabulary import SHAPE_OPS

_DEVICES = ("cpu", "cuda")
_ACCUMULATIONS = frozenset(
    "index_add scatter scatter_add scatter_reduce index_put embedding_bag".split()
)

# Of those, what autocast of a GPU gives the widest dtype of its operands.
_PROMOTED = frozenset(("index_put", "scatter_add"))

# Functions that autograd keeps the result of: their gradient reads what is written to it through `detach()` or `.data`.
_SAVE_THEIR_RESULT = frozenset(
    "amax amin relu sigmoid tanh exp expm1 sqrt rsqrt reciprocal softmax "
    "entmax15 sparsemax entmax_bisect sparsemax_bisect".split()
)


M = TypeVar("M", bound=Match)


def check_device(node: fx.Node) -> None:
    """Raises NoMatch where a node's result is on a device that the operators do not run on."""
    if fake(node).device.type not in _DEVICES:
        raise NoMatch(f"there is no operator for {fake(node).device}", node)


def check_operands(node: fx.Node, *tensors: fx.Node) -> None:
    """The same, and where one of the operator's tensors is a DTensor."""
    check_device(node)
    if any(is_distributed(fake(t)) for t in (node, *tensors)):
        raise NoMatch("the operator takes whole tensors, not DTensors", node)


def check_followed(view: GraphView, nodes: Iterable[fx.Node], end: fx.Node, learnt: bool) -> None:
    """Raises NoMatch where one of the nodes up to `end` is in another grad mode, or (with `learnt`) passes no gradient
    on to what the operator has one for. Where nothing is recorded at `end`, nothing passes one on."""
    learnt = learnt and view.records(end)
    for n in nodes:
        whole = n if view.is_tensor(n) else n.args[0]  # an assignment is no tensor
        if view.records(n) != view.records(end):
            raise _cut(view, end if view.records(n) else n)
        if learnt and not view.requires_grad(whole):
            raise _cut(view, n)


def check_match(view: GraphView, match: Match) -> None:
    """Raises NoMatch where the operator of a match would see other values than the program, leave out a write, or pass
    another gradient.

    A match may say more of itself. reads: what its operator reads further up than the nodes it replaces do, each with
    the node that reads it now. at: the node before which its operator goes in, instead of the anchor. ends: further
    nodes that are replaced. kept: nodes whose write stays. settled: nodes whose gradient, taken as one function, is
    known to be the operator's, whatever they do to single values.
    """
    inside = {*match.matched_nodes, match.anchor}
    if len({view.in_inference_mode(n) for n in inside if n.op.startswith("call")}) > 1:
        # AOTAutograd takes no views there of tensors from outside, which an operator's operands may be.
        raise NoMatch("a part of it is computed in inference mode, the rest is not", match.anchor)
    at = getattr(match, "at", match.anchor)
    reads = [
        (source, n)
        for n in sorted(inside, key=view.order.__getitem__)
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
    """Raises NoMatch for operands of different dtypes: Dynamo traces them, and PyTorch refuses them when it runs."""
    name = view.name_of(node)
    accumulates = name in _ACCUMULATIONS
    if not (accumulates or name in PRODUCTS) or not view.is_tensor(node):
        return
    dtypes = {view.dtype(n) for n in node.all_input_nodes if view.is_tensor(n)}
    autocasts = view.autocasts(node)
    if accumulates:
        if autocasts and name in _PROMOTED and fake(node).device.type == "cuda":
            return
        dtypes = {dtype for dtype in dtypes if dtype.is_floating_point}  # beside their ids
    elif autocasts and torch.float64 not in dtypes:  # which autocast leaves as it is
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
    # Their own writes are gone with them, where nothing keeps one of them in the graph.
    gone = nodes if all({*n.users} <= {*nodes} for n in nodes if n not in ends) else ()
    for source, reader in reads:
        first, last = sorted((reader, at), key=view.order.__getitem__)
        for writer, target in view.effects.changes(source, first, last, but=gone):
            raise NoMatch(f"{label(target)} is changed in place before {label(at)}", writer)
    for n in nodes:
        for target in view.effects.writers.get(n, ()):
            dies = view.effects.creators(target) <= {*nodes}
            if not dies and (n not in gone or _seen_later(view, target, n, nodes)):
                raise NoMatch(f"{label(target)} is written in place and lives on", n)


def _seen_later(
    view: GraphView, target: fx.Node, writer: fx.Node, nodes: Collection[fx.Node]
) -> bool:
    """Whether somebody else may see what a writer wrote to a tensor that was made before."""
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
    """Raises NoMatch where something that the match reads requires a gradient, and what the operator passes on to it
    is not what the program does."""
    ends = [match.anchor, *getattr(match, "ends", ())]
    wanted = {n for n in ends if any(t.requires_grad for t in tensors_in(fake(n)))}
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
            if one in given:  # a view of it keeps the memory that it had
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
            if compat.is_higher_order(by.target):  # AOTAutograd computes a checkpoint once more
                why = f"writes to {label(source)}, and may again before the gradient reads it"
                raise NoMatch(f"the body of {label(by)} {why}", by)
        if view.in_inference_mode(source):
            why = "was made under inference_mode: PyTorch saves it for no backward"
            raise NoMatch(f"{label(source)} {why}", reader)
    values = tensors_in(fake(match.anchor))
    ordered = sorted(inside, key=view.order.__getitem__)
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
    """What the gradient of a function reads as it is by then, and what to call that: its result, and what the
    bisections keep of alpha without autograd's knowledge."""
    call = view.call(node)
    if call.name not in _SAVE_THEIR_RESULT:
        return
    yield node, "its result"
    alpha = call.get("alpha") if call.name == "entmax_bisect" else None
    if view.is_tensor(alpha):
        yield alpha, "alpha"


def _differentiable(view: GraphView, node: fx.Node) -> bool:
    """Not what is true or false, or counts: a comparison passes no gradient to what it compares, detached or not."""
    if not view.is_tensor(node):
        return True
    dtype = view.dtype(node)
    return dtype.is_floating_point or dtype.is_complex


def _cuts(view: GraphView, node: fx.Node) -> bool:
    """Whether a node computes numbers from some that a gradient is asked of, and passes none on."""
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
    """Where an operator goes in that is to stand at `at`: before the region without gradients that `at` is in, if the
    nodes that it takes the place of are outside.

    Raises NoMatch where one of them is in such a region and others are not.
    """
    # A comparison, and what is made of one, passes no gradient on in any mode.
    ordered = [
        n
        for n in sorted(nodes, key=view.order.__getitem__)
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
    """The anchor with those of the nodes above it, the nearest first, that are read for it alone, up to the first that
    is not."""
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
    """(node, reader) for every reader that is not `inside` of a matched node that is not one of `ends`."""
    for n in nodes:
        if n not in ends:
            yield from ((n, reader) for reader in view.readers(n) if reader not in inside)


def without_outside_readers(
    matches: Sequence[M], view: GraphView, name: Callable[[M, fx.Node], str]
) -> tuple[list[M], list[Miss]]:
    """Matches whose nodes nobody else reads, and misses for the rest.

    Matches may share nodes, and say which ones of theirs are `open` to others. `name(match, node)` is what a miss calls
    the result of a node ("the scores are"). It points at the reader, or at the node where that is returned as it is.
    """
    accepted, misses = list(matches), []
    while True:
        inside = {n for m in accepted for n in m.matched_nodes}
        kept = []
        for m in accepted:
            ends = {m.anchor, *getattr(m, "open", ())}
            found = next(outside_readers(view, m.matched_nodes, inside, ends), None)
            if found is None:
                kept.append(m)
                continue
            node, reader = found
            at = node if reader.op == "output" else reader
            while view.name_of(reader) in SHAPE_OPS and len(reader.users) == 1:
                reader = next(iter(reader.users))  # the view is not what the user asks about
            how = "returned" if reader.op == "output" else f"read by {label(reader)}"
            misses.append(Miss(f"{name(m, node)} also {how}", at))
        if len(kept) == len(accepted):
            return kept, misses
        accepted = kept
