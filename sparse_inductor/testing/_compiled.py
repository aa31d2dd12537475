"""`torch.compile` without code generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import compat

_PRODUCTS = frozenset("mm addmm bmm baddbmm convolution linear matmul".split())


class Compiled:
    """A function compiled by Dynamo, Inductor's passes and AOTAutograd, and executed by ATen; see
    `compile_without_codegen`.

    dynamo_graphs: the number of graphs that Dynamo has captured so far (1 if there was no graph break and no
    recompile). graphs: every graph of ATen operations that would be passed to code generation (inference graphs, or
    forward and backward graphs).
    """

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None, fullgraph: bool) -> None:
        self.dynamo_graphs = 0
        self.graphs: list[fx.Graph] = []
        self._fn = torch.compile(fn, backend=self._backend, dynamic=dynamic, fullgraph=fullgraph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.dynamo_graphs += 1
        return compat.compile_graph(gm, example_inputs, codegen=False, see=self.graphs.append)

    def calls(self, op: str) -> int:
        """Count the nodes that call an operator such as "splade_head", or one of its parts ("splade_head_forward")."""
        names = [compat.schema(n.target).name for n in self._nodes()]
        other = f"sparse_inductor::{op}_attention"  # "entmax_attention" is not a part of "entmax"
        return sum(
            name.startswith(f"sparse_inductor::{op}") and not name.startswith(other)
            for name in names
        )

    def matmuls(self, numel: int) -> list[fx.Node]:
        """Return the matrix products with at least `numel` results, to check that a rewrite has removed them."""
        return [
            n
            for n in self._nodes()
            if compat.schema(n.target).name.removeprefix("aten::") in _PRODUCTS
            and isinstance(n.meta.get("val"), torch.Tensor)
            and _hint(n.meta["val"].numel()) >= numel
        ]

    def _nodes(self) -> list[Any]:
        return [
            n
            for g in self.graphs
            for n in g.nodes
            if n.op == "call_function" and compat.is_overload(n.target)
        ]


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint


def compile_without_codegen(
    fn: Callable[..., Any], dynamic: bool | None = None, fullgraph: bool = False
) -> Compiled:
    """Compile like `torch.compile(fn)`, with all passes and autograd but no code generation. ATen executes the result.

    For tests that call a compiled function several times, or inspect its graphs. The patterns are those of the enabled
    session (`sparse_inductor.enabled(...)`). Caches are off. With a fixed seed, the program draws the same random
    numbers as uncompiled.
    """
    return Compiled(fn, dynamic, fullgraph)
