"""Blocks that DistributedDataParallel's buckets split.

Dynamo's DDPOptimizer cuts a graph before any pass sees it, so that the gradients of a bucket are reduced while those of
the one before it are computed. A projection whose parameters fill a bucket starts it: what is projected is a result of
another graph. A pattern sees the head of such a block when it is asked about "output", one of its `anchors`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from .. import compat
from ..pattern import Miss
from .graph import GraphView

__all__ = ["split_block"]


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
