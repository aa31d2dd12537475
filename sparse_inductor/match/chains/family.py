"""The looser signature of a family of patterns: a subgraph that has it but does not match is reported with a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from ... import compat
from ...epilogue.functions import FUNCTIONS
from ...graph.contraction import PRODUCTS, contraction
from ...graph.fakes import attribute, fake
from ...graph.gemm import entry_of_stack, has_weights_of_entries, linears
from ...graph.names import name_of
from ...graph.no_match import once, remembered
from ...graph.search import reached
from ...graph.values import is_parameter
from ...graph.view import GraphView
from ...graph.vocabulary import COPIES, REGROUPS
from ...pattern import Miss

_RECTIFIERS = frozenset("relu relu6 clamp clamp_min threshold".split())
# What the forward of an autograd Function consists of if it is no rectifier.
_SMOOTH = (
    COPIES
    | REGROUPS
    | frozenset("cast detach add sub rsub mul div pow gelu silu mish".split())
    | {name for name, function in FUNCTIONS.items() if not function.may_level_off}
)

_NOT_CROSSED = PRODUCTS - {"einsum"}  # an einsum that sums over nothing is an elementwise product

_REACH = 40  # nodes that are examined; a head has about ten


def above(
    view: GraphView,
    node: fx.Node,
    stop: Collection[str] = (),
    counts: Callable[[fx.Node], bool] = lambda n: True,
) -> set[str]:
    """The canonical names of the producers of a tensor, restricted to producers for which `counts` is true. The search
    does not go above matmuls or the operations in `stop`. A linear map appears as "linear", a matmul of two batched
    tensors as "batched matmul", and also as "batched linear" if one of them is a parameter."""

    def up(n: fx.Node) -> Sequence[fx.Node]:
        name, producers = _named(view, n)
        return () if name in stop else [p for p in producers if counts(p)]

    found = [*reached([node], up, _REACH)]
    names = {_named(view, n)[0] for n in found}
    if "batched matmul" in names and any(has_weights_of_entries(view, n) for n in found):
        names.add("batched linear")
    return {name for name in names if name is not None}


# Names for clamps that are not rectifiers: those of values to be quantised, and of divisors.
RANGE = "a clamp around 0"
FLOOR = "a clamp above 0"


@remembered
def _named(view: GraphView, node: fx.Node) -> tuple[str | None, Sequence[fx.Node]]:
    """The name of a node for `above`, and its producers (none for a matmul)."""
    readings = linears(view, node)
    if readings is not None:
        return "linear" if readings else "batched matmul", ()
    if entry_of_stack(view, node) is not None:
        return "linear", ()
    # Tuples and lists count as values, because a custom function may return them.
    values = (torch.Tensor, tuple, list)
    name = view.name_of(node)
    if name in ("clamp", "clamp_min"):
        low, high = (view.const(view.call(node).get(bound)) for bound in ("min", "max"))
        if low is not None and low > 0:
            name = FLOOR
        elif low is not None and high is not None and low < 0 < high:
            name = RANGE
    if name == "autograd_function_apply":
        body = attribute(view.call(node)["forward"])
        nodes = () if body is None else body.graph.nodes
        made = [n for n in nodes if n.op.startswith("call_") and isinstance(fake(n), torch.Tensor)]
        if made and _SMOOTH.issuperset(map(name_of, made)):
            name = None  # a smooth activation with a backward of its own
    producers = [n for n in node.all_input_nodes if isinstance(fake(n), values)]
    return name, [p for n in producers for p in producers_of(view, n, node)]


def producers_of(view: GraphView, node: fx.Node, reader: fx.Node) -> list[fx.Node]:
    """The node whose result `reader` sees when it reads `node`; `node` and its last writer where no node has it."""
    seen = view.value(node, reader) if view.is_tensor(node) else node
    return [node, view.effects.last_write(node, reader)[0]] if seen is None else [seen]


class _Names:
    """The names among the producers of each node, as bit sets. Matmuls are not crossed, einsums are. Producers of
    in-place writes count for every node, because any node may read the written tensor."""

    def __init__(self, view: GraphView) -> None:
        self._bits: dict[str | None, int] = {}
        self._of: dict[fx.Node, int] = {}
        for node in view.graph.nodes:
            name, *more = view.names_of(node)
            bits = self._bits.setdefault(name, 1 << len(self._bits))
            for other in more:
                bits |= self._bits.setdefault(other, 1 << len(self._bits))
            if name not in _NOT_CROSSED or not view.is_tensor(node):
                for producer in node.all_input_nodes:
                    bits |= self._of[producer]
            self._of[node] = bits
        self._written = 0
        for writer in view.effects.writers:
            self._written |= self._of[writer]

        self._wanted: dict[frozenset[str], int] = {}

    def among(self, nodes: Iterable[fx.Node], names: frozenset[str]) -> bool:
        if names not in self._wanted:
            self._wanted[names] = sum(bit for name, bit in self._bits.items() if name in names)
        wanted = self._wanted[names]
        return bool(self._written & wanted) or any(self._of[n] & wanted for n in nodes)


_names = once(_Names)


def may_be_above(view: GraphView, nodes: Iterable[fx.Node], names: frozenset[str]) -> bool:
    """Whether one of `names` may be among the producers of `nodes`. If not, `above` and `walk_back` cannot find one
    either."""
    return not view.names.isdisjoint(names) and _names(view).among(nodes, names)


def below(view: GraphView, node: fx.Node, names: Collection[str]) -> bool:
    """Whether one of the next few readers of a node is one of `names`."""
    return any(view.name_of(n) in names for n in reached(node.users, lambda n: n.users, 8))


@remembered
def rectified_product(view: GraphView, node: fx.Node) -> tuple[set[str], bool] | None:
    """The names above the rectified operand of a batched matmul that takes results of matmuls, and whether the other
    operand is a parameter. A parameter means the down projections of experts rather than the values of an attention.
    None for anything else."""
    if not may_be_above(view, node.all_input_nodes, _RECTIFIERS):
        return None
    product = contraction(view, node)
    if product is None:
        return None
    for mine, other in ((product.a, product.b), (product.b, product.a)):
        found, weight = above(view, mine.node, ("topk",)), is_parameter(view, other.node)
        projected = "batched matmul" in found or (weight and "linear" in found)
        if projected and found & _RECTIFIERS:
            return found, weight
    return None


# Dynamo's DDPOptimizer splits a graph before any pass sees it, so that the gradients of one bucket are reduced while
# those of the preceding bucket are computed. A projection with enough parameters to fill a bucket starts a new one, so
# its input is a result of another graph. A pattern sees the first part of such a block at the "output" anchor.


def split_block(
    view: GraphView, output: fx.Node, what: str, is_head: Callable[[fx.Node], bool]
) -> Miss | None:
    """Why a block does not match if its first part, `what`, is a result of the graph of a DDP bucket."""
    if not compat.in_ddp_bucket(view.graph.owning_module):
        return None
    for node in output.all_input_nodes:
        if view.is_tensor(node) and is_head(node):
            return Miss(
                f"what reads {what} is not in this bucket of DistributedDataParallel: a larger bucket_cap_mb, or "
                "torch._dynamo.config.optimize_ddp = False, keeps the block whole",
                node,
            )
    return None
