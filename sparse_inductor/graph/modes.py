"""The modes in which the nodes of a graph run: autocast, gradient recording, inference_mode."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """The modes at a node.

    autocast: for each device type, whether it is on, and its dtype. grad: the last argument of `set_grad_enabled`.
    inference: whether the graph has turned inference_mode on.
    """

    autocast: dict[str, tuple[bool, torch.dtype]]
    grad: bool = True
    inference: bool = False

    @property
    def records(self) -> bool:
        """Whether autograd records."""
        return self.grad and not self.inference


def modes_now() -> Modes:
    """Return the modes in which a graph that is being compiled starts."""
    autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES}
    return Modes(autocast, torch.is_grad_enabled())


_known: contextvars.ContextVar[Mapping[fx.Node, Modes]] = contextvars.ContextVar("_known")


@contextlib.contextmanager
def known(states: Mapping[fx.Node, Modes]) -> Iterator[None]:
    """In the block, which rewrites a graph, `modes_of` takes the modes of its nodes from `states`."""
    token = _known.set(states)
    try:
        yield
    finally:
        _known.reset(token)


def modes_of(node: fx.Node) -> Modes:
    """Return the modes of a node in a graph that is being compiled."""
    states = _known.get({})
    return states[node] if node in states else modes_by_node(node.graph, modes_now())[node]


def modes_by_node(graph: fx.Graph, around: Modes) -> dict[fx.Node, Modes]:
    """Return the modes of each node, in a graph that starts in the modes `around`."""
    states: dict[fx.Node, Modes] = {}
    current = around
    for node in graph.nodes:
        states[node] = current
        name = _name(node.op, node.target)
        if not name:
            continue
        if name == "_enter_autocast":
            device, dtype, on = (*node.args, None, None, True)[:3]
            own = (bool(on), dtype or torch.get_autocast_dtype(device))
            current = current._replace(autocast={**current.autocast, device: own})
        elif name == "_exit_autocast":
            before = states.get(node.args[0], around)
            current = current._replace(autocast=before.autocast)
        elif name == "_enter_inference_mode":
            inference = node.args[0] is not False
            current = Modes(current.autocast, not inference, inference)
        elif name == "_exit_inference_mode":
            before = states.get(node.args[0], around)
            current = Modes(current.autocast, before.grad, before.inference)
        elif changes_grad_mode(node):
            current = current._replace(grad=node.args[0] is not False)
    return states


def changes_grad_mode(node: fx.Node) -> bool:
    """Whether a node turns the recording of gradients on or off."""
    name = _name(node.op, node.target)
    return "set_grad_enabled" in name or name.endswith("_inference_mode")


@functools.lru_cache(maxsize=4096)
def _name(op: str, target: Any) -> str:
    """Return the name of a function that changes a mode; an empty string for anything else."""
    name = getattr(target, "__name__", "") if op == "call_function" else ""
    switches = name.endswith(("_autocast", "_inference_mode")) or "set_grad_enabled" in name
    return name if switches else ""
