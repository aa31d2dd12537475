"""What the nodes of a graph run under: autocast, whether autograd records, inference_mode."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Modes:
    """autocast: by device type whether it is on, and its dtype. grad: what `set_grad_enabled` was told last. inference:
    whether the graph has turned inference_mode on."""

    autocast: dict[str, tuple[bool, torch.dtype]]
    grad: bool = True
    inference: bool = False

    @property
    def records(self) -> bool:
        """Whether autograd records."""
        return self.grad and not self.inference


def modes_now() -> Modes:
    """What a graph starts under that is compiled now."""
    autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES}
    return Modes(autocast, torch.is_grad_enabled())


_known: contextvars.ContextVar[Mapping[fx.Node, Modes]] = contextvars.ContextVar("_known")


@contextlib.contextmanager
def known(states: Mapping[fx.Node, Modes]) -> Iterator[None]:
    """In the block, `modes_of` knows what the nodes of a graph run under, which is to be rewritten."""
    token = _known.set(states)
    try:
        yield
    finally:
        _known.reset(token)


def modes_of(node: fx.Node) -> Modes:
    """What a node of a graph that is compiled now runs under."""
    states = _known.get({})
    return states[node] if node in states else modes_by_node(node.graph, modes_now())[node]


def modes_by_node(graph: fx.Graph, around: Modes) -> dict[fx.Node, Modes]:
    """What each node runs under, in a graph that starts under `around`."""
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
            current = dataclasses.replace(current, autocast={**current.autocast, device: own})
        elif name == "_exit_autocast":
            before = states.get(node.args[0], around)
            current = dataclasses.replace(current, autocast=before.autocast)
        elif name == "_enter_inference_mode":
            inference = node.args[0] is not False
            current = Modes(current.autocast, not inference, inference)
        elif name == "_exit_inference_mode":
            before = states.get(node.args[0], around)
            current = Modes(current.autocast, before.grad, before.inference)
        elif changes_grad_mode(node):
            current = dataclasses.replace(current, grad=node.args[0] is not False)
    return states


def changes_grad_mode(node: fx.Node) -> bool:
    """Whether a node turns the recording of gradients on or off."""
    name = _name(node.op, node.target)
    return "set_grad_enabled" in name or name.endswith("_inference_mode")


@functools.lru_cache(maxsize=4096)
def _name(op: str, target: Any) -> str:
    """The name of a function that changes a mode; empty for anything else."""
    name = getattr(target, "__name__", "") if op == "call_function" else ""
    switches = name.endswith(("_autocast", "_inference_mode")) or "set_grad_enabled" in name
    return name if switches else ""
