"""The test of one case of the corpus: its rewrites, its report, and its results against the unrewritten program.

One capture of the program provides all of this.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence

import pytest
import torch

from corpus.case import Case
from sparse_inductor.explanation.explain import Explanation
from sparse_inductor.reporting.graphs import GraphNode
from sparse_inductor.testing import assert_matches_reference, assert_not_rewritten, assert_rewrites

__all__ = ["check", "products"]


def check(case: Case, how: str = "eager") -> Explanation:
    """Check that the enabled patterns treat the case as it expects, and that its results are as accurate as eager's.

    how: "eager" runs the rewritten graph as it is, "aten" runs it through AOTAutograd, "inductor" compiles it.
    """
    for package in case.requires:
        pytest.importorskip(package)
    if case.unsupported is not None and (why := case.unsupported()):
        pytest.skip(why)
    fn, args = case.build()
    if isinstance(fn, torch.nn.Module):
        fn.train(case.training)
    autocast = contextlib.nullcontext()
    if case.autocast is not None:
        autocast = torch.autocast("cpu", dtype=case.autocast)
    with autocast, torch.set_grad_enabled(case.training):
        explanation = assert_matches_reference(
            fn, args, grads=case.training, inference=not case.training, dynamic=case.dynamic,
            vary=0, codegen=how == "inductor", aot=how != "eager", must_rewrite=False,
        )  # fmt: skip
    if case.expect == "rewrite":
        assert_rewrites(explanation, expected={case.pattern: case.rewrites})
        assert not explanation.graph_breaks
        beside = [m for m in explanation.report.near_misses if m.pattern != case.beside]
        assert not beside, f"near misses beside a rewrite: {beside}"
        assert all(r.note.endswith(case.note) for r in explanation.report.rewrites)
        if case.dense is not None:
            left = products(explanation, case.dense)
            assert not left, f"what a rewrite saves is still computed: {left}"
    elif case.expect != "maybe":
        assert_not_rewritten(explanation, pattern=case.pattern)
    if case.expect == "no_rewrite":
        _check_reason(case, explanation)
    return explanation


def _check_reason(case: Case, explanation: Explanation) -> None:
    """Check that the report names the cause at the line that prevents the rewrite.

    Without `at`, the program does not resemble the family, and the report must have no near miss.
    """
    found = explanation.report.near_misses
    if case.at is None:
        assert not found
        return
    told = any(
        case.why in m.reason and case.at in m.source and (":" in m.location or not case.at)
        for m in found
    )
    lines = [(m.location, m.reason) for m in found]
    assert len(lines) == len(set(lines)), f"the same reason twice: {lines}"
    said = "; ".join(f"{m.reason} [{m.source}]" for m in found) or "nothing"
    assert told, f"wanted {case.why!r} at {case.at!r}, was told {said}"


def products(explanation: Explanation, numel: int) -> list[str]:
    """Return the matrix products in the rewritten graphs that have at least `numel` elements and are read."""
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
    """Yield the nodes whose elements, and not their shapes alone, affect the result."""
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
