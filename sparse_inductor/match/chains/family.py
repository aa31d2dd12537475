"""The looser signature of a family: is it worth telling the user why a subgraph did not match?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from ... import compat
from ...graph.contraction import contraction
from ...graph.gemm import entry_of_stack, linears
from ...graph.no_match import remembered
from ...graph.values import is_parameter
from ...graph.view import GraphView, fake
from ...pattern import Miss

RECTIFIERS = frozenset("relu relu6 clamp clamp_min threshold".split())

_REACH = 40  # nodes looked at; a head has about ten


def above(view: GraphView, node: fx.Node, stop: Collection[str] = ()) -> set[str]:
    """Canonical names found among the producers of a tensor; matmuls are not crossed, nor what `stop` names. A linear
    map counts as "linear", a matmul of two batched tensors as "batched matmul"."""
    found: set[str] = set()
    seen: set[fx.Node] = set()
    queue = deque([node])
    while queue and len(seen) < _REACH:
        node = queue.popleft()
        if node in seen:
            continue
        name, producers = _named(view, node)
        if producers is None:
            continue
        seen.add(node)
        if name is not None:
            found.add(name)
        if name not in stop:
            queue += producers
    return found


@remembered
def _named(view: GraphView, node: fx.Node) -> tuple[str | None, Sequence[fx.Node] | None]:
    """What a node counts as, and what is above it: nothing of a product, None of what is no tensor."""
    if not isinstance(fake(node), (torch.Tensor, tuple, list)):
        return None, None
    readings = linears(view, node)
    if readings is not None:
        return "linear" if readings else "batched matmul", ()
    if entry_of_stack(view, node) is not None:
        return "linear", ()
    # What is a function of somebody else's may well be in the way.
    return view.name_of(node), node.all_input_nodes


def below(view: GraphView, node: fx.Node, names: Collection[str], reach: int = 8) -> bool:
    """Whether one of the next few readers of a node is one of `names`."""
    queue = list(node.users)
    while queue and reach:
        user = queue.pop(0)
        reach -= 1
        if view.name_of(user) in names:
            return True
        queue += user.users
    return False


def rectified_product(view: GraphView, node: fx.Node) -> tuple[set[str], bool] | None:
    """What is above the rectified operand of a batched product of products, and whether the other one is a
    parameter: the down projections of experts rather than the values of an attention. None for anything else."""
    product = contraction(view, node)
    if product is None:
        return None
    for mine, other in ((product.a, product.b), (product.b, product.a)):
        found, weight = above(view, mine.node), is_parameter(view, other.node)
        projected = "batched matmul" in found or (weight and "linear" in found)
        if projected and found & RECTIFIERS:
            return found, weight
    return None


# Dynamo's DDPOptimizer cuts a graph before any pass sees it, so that the gradients of a bucket are reduced while those
# of the one before it are computed. A projection whose parameters fill a bucket starts it: what is projected is a
# result of another graph. A pattern sees the head of such a block when it is asked about "output", one of its anchors.


def split_block(
    view: GraphView, output: fx.Node, what: str, is_head: Callable[[fx.Node], bool]
) -> Miss | None:
    """Why a block is none whose first part, `what`, is a result of a bucket's graph."""
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
