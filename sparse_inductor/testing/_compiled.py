"""torch.compile up to code generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import compat

_PRODUCTS = frozenset("mm addmm bmm baddbmm convolution linear matmul".split())


class Compiled:
    """A function that Dynamo, Inductor's passes and AOTAutograd have compiled and ATen runs; see
    `compile_without_codegen`.

    dynamo_graphs: how many graphs Dynamo made of it so far (1 where nothing broke). graphs: every graph of ATen
    operations that code would have been generated for (of inference, or of forward and backward).
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
        """How many nodes call an operator such as "splade_head", or one of its parts ("splade_head_forward")."""
        names = [compat.schema(n.target).name for n in self._nodes()]
        other = f"sparse_inductor::{op}_attention"  # no part of entmax
        return sum(
            name.startswith(f"sparse_inductor::{op}") and not name.startswith(other)
            for name in names
        )

    def matmuls(self, numel: int) -> list[fx.Node]:
        """Matrix products with at least `numel` results: what was to be avoided and is still there."""
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
    """`torch.compile(fn)` without a compiler: every pass and autograd run, ATen executes the result.

    For tests that call a compiled function several times, or look at what it became. The patterns are those of the
    enabled session (`sparse_inductor.enabled(...)`); caches are off, and a seeded program draws the numbers that it
    draws uncompiled.
    """
    return Compiled(fn, dynamic, fullgraph)
