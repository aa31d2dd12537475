"""Graphs that hold together what Dynamo would compile apart.

Dynamo ends the graph at a call of the entmax package in training, or of a copy of its autograd Functions; with
`match.leaves` it goes on. AOTAutograd differentiates the whole graph while it compiles, and refuses one that writes to
what autograd has saved, even if the program never asks for a gradient. In parts, such a program runs.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import fx

from . import compat
from .match import leaves
from .match.effects import written
from .match.fakes import fake, tensors_in
from .rehearsal import differentiating_fakes

__all__ = ["overwrites_what_is_saved"]

log = logging.getLogger("sparse_inductor")


def overwrites_what_is_saved(graph: fx.Graph) -> bool:
    """Whether a graph with such functions in it writes to what its backward needs: it is run on fakes, forward
    and backward, if it writes to anything."""
    if not torch.is_grad_enabled() or not any(map(_joins, graph.nodes)):
        return False
    try:
        return any(map(written, graph.nodes)) and _refused(graph)
    except Exception as error:
        log.debug("a graph could not be tried out: %s: %s", type(error).__name__, error)
        return False


def _refused(graph: fx.Graph) -> bool:
    inputs = [fake(node) for node in graph.nodes if node.op == "placeholder"]
    state = compat.ShapeState(compat.shape_env_of(inputs))
    try:
        _forward_and_backward(graph, inputs)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return True
    finally:
        state.restore()
    return False


def _joins(node: fx.Node) -> bool:
    if compat.is_higher_order(node.target):
        return str(node.target) == "autograd_function_apply"
    return getattr(node.target, "__module__", None) == leaves.__name__


def _forward_and_backward(graph: fx.Graph, inputs: list[Any]) -> None:
    module = graph.owning_module
    assert module is not None
    mode = next((t.fake_mode for t in inputs if hasattr(t, "fake_mode")), None)
    leaf = [t.detach().requires_grad_(t.requires_grad) if _is_tensor(t) else t for t in inputs]
    with differentiating_fakes(), mode or contextlib.nullcontext():
        # What is written to may be an input.
        given = [t.clone() if _is_tensor(t) else t for t in leaf]
        results = [t for t in tensors_in(fx.Interpreter(module).run(*given)) if t.requires_grad]
        wanted = [t for t in leaf if _is_tensor(t) and t.requires_grad]
        if results and wanted:
            grads = [torch.empty_like(t) for t in results]
            torch.autograd.grad(results, wanted, grads, allow_unused=True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
