"""Graphs as plain data that outlives them, for snapshots, explanations and drawings."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import compat
from ..graph.fakes import fake
from ..graph.view import label
from .findings import tensor_text
from .source import Source, source_of


class GraphNode(NamedTuple):
    """A node: its call and inputs, the type of its result, and the user's line that it comes from."""

    name: str
    kind: str
    """Whether it is an "input", a "call" or the "output"."""
    call: str
    """The call as Python code: "torch.relu(add)"; for an input, the name of the parameter."""
    title: str
    """The short name of the called function: "relu"."""
    inputs: tuple[str, ...]
    type: str
    """The type of the result, such as "float32[2, 40]"; empty if it is not a tensor."""
    source: Source
    module: str
    """The path of the module that contains the call: "encoder.layer.0"; empty outside of modules."""

    def __str__(self) -> str:
        if self.kind == "output":
            return self.call
        head = f"{self.name}: {self.type}" if self.type else self.name
        return head if self.kind == "input" else f"{head} = {self.call}"


def describe(graph: fx.Graph) -> tuple[GraphNode, ...]:
    """Return the nodes of a graph in graph order."""
    names: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        name = label(node) if node.op in ("placeholder", "get_attr") else node.name
        names[node] = name if name and name not in taken else node.name
        taken.add(names[node])
    return tuple(_describe(node, names) for node in graph.nodes)


def _describe(node: fx.Node, names: dict[fx.Node, str]) -> GraphNode:
    kind = {"placeholder": "input", "get_attr": "input", "output": "output"}.get(node.op, "call")
    title = names[node] if kind == "input" else "return" if kind == "output" else _title(node)
    return GraphNode(
        names[node],
        kind,
        title if kind == "input" else _call(node, names),
        title,
        tuple(names[n] for n in node.all_input_nodes),
        _type(fake(node)),
        Source("") if kind != "call" else source_of(node),
        _module(node),
    )


def _title(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if compat.is_overload(node.target):
        return str(compat.schema(node.target).name)
    return getattr(node.target, "__name__", str(node.target))


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    args = [_argument(a, names) for a in node.args]
    keywords = [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    if node.op == "output":
        return f"return {args[0]}"
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:] + keywords)})"
    if node.target is operator.getitem:
        index = node.args[1]
        inner = args[1][1:-1].rstrip(",") if isinstance(index, tuple) and index else args[1]
        return f"{args[0]}[{inner}]"
    return f"{_target(node.target)}({', '.join(args + keywords)})"


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if compat.is_overload(target):
        return str(compat.schema(target).name)
    module = (getattr(target, "__module__", None) or "").replace("_operator", "operator")
    name = getattr(target, "__name__", str(target))
    # Builtin functions of torch do not record their public module.
    if getattr(torch, name, None) is target:
        module = "torch"
    elif getattr(torch.nn.functional, name, None) is target:
        module = "F"
    return f"{module}.{name}" if module and module != "builtins" else name


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(v, names) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_argument(v, names)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        parts = [
            "" if p is None else _argument(p, names) for p in (value.start, value.stop, value.step)
        ]
        return ":".join(parts[:2] if value.step is None else parts)
    return "..." if value is Ellipsis else repr(value)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(tuple(s if type(s) is int else str(s) for s in value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, map(_type, value)))
    return ""


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    for noise in ("L['self']", "L[`self`]", "_modules", "['", "']"):
        path = path.replace(noise, "." if noise in ("['", "']") else "")
    return ".".join(part for part in path.split(".") if part and part != "self")
