"""Checks what a rewrite inserted before the compile continues: its shape, and its operators on fake tensors.

An error in an operator's shape function or backward would otherwise end the compile when AOTAutograd traces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from . import compat
from .graph.fakes import fake, tensors_in
from .graph.names import is_operator, name_of


def rehearse(inserted: Iterable[fx.Node], env: Any | None) -> None:
    """Run the operators among the inserted nodes, given in graph order, forward and backward; raises what they raise.

    env: the shape environment, which is restored afterwards.
    """
    state = compat.ShapeState(env)
    learning: dict[fx.Node, bool] = {}
    done = set()

    def needs_grad(node: fx.Node) -> bool:
        return learning.get(node, bool(getattr(fake(node), "requires_grad", False)))

    try:
        for node in inserted:
            learning[node] = name_of(node) != "detach" and any(
                map(needs_grad, node.all_input_nodes)
            )
            if not is_operator(node) or not torch.is_grad_enabled() or not learning[node]:
                continue  # its forward ran when the node was created
            arguments = (node.args, node.kwargs)
            described = fx.map_arg(arguments, lambda n: _describe(fake(n), needs_grad(n)))
            if (key := (node.target, str(described))) not in done:
                done.add(key)
                args, kwargs = fx.map_arg(arguments, lambda n: _leaf(fake(n), needs_grad(n)))
                _forward_and_backward(node.target, args, kwargs)
    finally:
        state.restore()


@contextlib.contextmanager
def keeping_shape(anchor: fx.Node) -> Iterator[None]:
    """Raise ValueError at the end of the block if the readers of `anchor` were given a tensor of another shape."""
    places = [
        (reader, i)
        for reader in anchor.users
        for i, leaf in enumerate(pytree.tree_leaves((reader.args, reader.kwargs)))
        if leaf is anchor
    ]
    yield
    for reader, i in places:
        leaves = pytree.tree_leaves((reader.args, reader.kwargs))
        if i < len(leaves) and isinstance(leaves[i], fx.Node):
            check_shape(anchor, leaves[i])


def check_shape(old: fx.Node, new: fx.Node) -> None:
    """Raise ValueError if two tensors are known to differ in their shapes."""
    was, now = fake(old), fake(new)
    if not (isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor)):
        return
    differs = (type(a) is int and type(b) is int and a != b for a, b in zip(was.shape, now.shape))
    if was.dim() != now.dim() or any(differs):
        shapes = f"has shape {list(now.shape)}, it was {list(was.shape)}"
        raise ValueError(f"the replacement of {old} {shapes}")


def _forward_and_backward(op: Any, args: Any, kwargs: Any) -> None:
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if getattr(t, "requires_grad", False)]
    mode = next((t.fake_mode for t in leaves if hasattr(t, "fake_mode")), contextlib.nullcontext())
    with differentiating_fakes(), mode, compat.symbolic_sizes():
        run_backward(op(*args, **kwargs), leaves)


def run_backward(result: Any, leaves: Sequence[torch.Tensor]) -> None:
    """Run the backward of all tensors of a result that require a gradient, without keeping the gradients."""
    outputs = [t for t in tensors_in(result) if t.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [*map(torch.empty_like, outputs)], allow_unused=True)


@contextlib.contextmanager
def differentiating_fakes() -> Iterator[None]:
    """Allow gradients of fake tensors in the block: autograd runs in this thread, because its own threads do not have
    the fake tensor mode, and anomaly detection is off, because fake tensors have no values to check for NaN."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def _describe(value: Any, needs_grad: bool) -> str:
    """Describe everything that an operator's shape function and backward may depend on; repeated layers agree in it."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    layout = (tuple(value.shape), value.stride(), value.storage_offset())
    return f"{type(value).__name__} {layout} {value.dtype} {value.device} {needs_grad}"


def _leaf(value: Any, needs_grad: bool) -> Any:
    if not isinstance(value, torch.Tensor) or not (needs_grad or value.requires_grad):
        return value
    value = value.detach()
    return value.requires_grad_() if needs_grad and value.is_floating_point() else value
