"""A pattern that exists only for tests, so that they can test the machinery without the real families.

`relu(x + 1)` becomes `hardtanh(x + 1, 0, inf)`, which has the same value and is easy to find; a
relu of anything else is a near miss.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import sparse_inductor
from sparse_inductor import compat
from sparse_inductor.pattern import Example, Miss


@dataclasses.dataclass
class ToyMatch:
    anchor: fx.Node
    matched_nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    pattern: str = "toy"
    op: str = "hardtanh"
    bytes_saved: int | None = 3 << 20
    note: str = ""

    def replace(self) -> None:
        graph = self.anchor.graph
        with graph.inserting_before(self.anchor):
            added = graph.call_function(operator.add, (self.inputs[0], 1))
            new = graph.call_function(torch.nn.functional.hardtanh, (added, 0.0, math.inf))
        added.meta, new.meta = dict(self.matched_nodes[0].meta), dict(self.anchor.meta)
        self.anchor.replace_all_uses_with(new)


class Toy:
    name = "toy"
    op = "hardtanh"
    summary = "relu(x + 1) -> hardtanh(x + 1, 0, inf)"
    anchors = frozenset({"relu"})
    examples = (Example("plain", lambda: (relu_of_sum, (torch.randn(4),))),)
    near_misses = (Example("bare", lambda: (relu_alone, (torch.randn(4),)), reason="not a sum"),)

    def __init__(self, name: str = "toy") -> None:
        self.name = name

    def match(self, node: fx.Node, view: Any) -> ToyMatch | Miss | None:
        argument = node.args[0] if node.args else None
        if (
            not isinstance(argument, fx.Node)
            or argument.target is not operator.add
            or argument.args[1:] != (1,)
        ):
            return Miss("its input is not a sum", node)
        return ToyMatch(node, (argument, node), tuple(argument.all_input_nodes), pattern=self.name)


def relu_of_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + 1)


def relu_alone(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def captured(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Compile with Dynamo and Inductor's pre-grad passes alone, and return the names of the functions in
    the graphs."""
    names: list[str] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        gm = compat.pre_grad_passes(gm, example_inputs)
        names.extend(n.target.__name__ for n in gm.graph.nodes if n.op == "call_function")
        return gm.forward

    torch.compile(fn, backend=backend)(*args)
    return names


def matched() -> list[str]:
    """Return the patterns of the rewrites in the report."""
    return [r.pattern for r in sparse_inductor.report().rewrites]
