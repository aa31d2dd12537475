"""A case of the corpora, tested as users would: what is rewritten, what is said of it, that it computes the same."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence

import pytest
import torch

import sparse_inductor
from corpus.case import Case
from sparse_inductor.explanation import Explanation
from sparse_inductor.graphs import GraphNode
from sparse_inductor.testing import (
    assert_matches_reference,
    assert_not_rewritten,
    assert_rewrites,
)

__all__ = ["assert_case", "left_behind"]


def assert_case(case: Case, only: tuple[str, ...], codegen: bool = False) -> Explanation:
    """The case is recognised as it expects with the patterns `only`, and its numbers are as good as eager's.

    A case of a family of one pattern need not name it.
    """
    pattern = case.pattern if case.pattern in only else only[0]
    for package in case.requires:
        pytest.importorskip(package)
    fn, args = case.build()
    if isinstance(fn, torch.nn.Module):
        fn.train(case.training)
    autocast = contextlib.nullcontext()
    if case.autocast is not None:
        autocast = torch.autocast("cpu", dtype=case.autocast)
    with sparse_inductor.enabled(only=only), autocast, torch.set_grad_enabled(case.training):
        if case.expect == "rewrite":
            explanation = assert_rewrites(fn, args, {pattern: case.rewrites})
        elif case.expect == "maybe":
            explanation = sparse_inductor.explain(fn, *args)
        else:
            reason = (
                "" if case.explained else None
            )  # whatever it is: `test_reasons` has what it says
            explanation = assert_not_rewritten(fn, args, pattern, reason=reason)
        assert_matches_reference(
            fn, args, case.training, dynamic=case.dynamic, vary=0, codegen=codegen, must_rewrite=False
        )  # fmt: skip
    return explanation


def left_behind(explanation: Explanation, numel: int) -> list[str]:
    """Matrix products in the rewritten graphs with at least so many results that somebody reads."""
    return [
        str(node)
        for graph in explanation.graphs
        for node in _read(graph.nodes_after)
        if node.title in PRODUCTS and _numel(node.type) >= numel
    ]


PRODUCTS = frozenset("linear matmul mm addmm bmm baddbmm einsum tensordot conv1d inner".split())
ABOUT = frozenset("size dim getattr new_zeros new_ones new_full zeros_like ones_like".split())
LIKE = frozenset("expand_as view_as type_as to".split())


def _read(nodes: Sequence[GraphNode]) -> Iterator[GraphNode]:
    """The nodes whose elements the result depends on, not their shapes alone."""
    needed: set[str] = set()
    for node in reversed(nodes):
        writes = node.title == "setitem" or (node.title[-1:] == "_" and node.title[-2:] != "__")
        if not (node.name in needed or node.kind == "output" or writes):
            continue
        yield node
        if node.title not in ABOUT:
            needed.update(node.inputs[:1] if node.title in LIKE else node.inputs)


def _numel(type_: str) -> int:
    return math.prod(int(size) for size in re.findall(r"\d+", type_.partition("[")[2]))
