"""What the recognition tests of any pattern share: one pattern on, one case checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import sparse_inductor
from corpus.case import Case
from support import (
    Compiled,
    Result,
    assert_same_result,
    compile_without_codegen,
    fresh,
    run,
    to_double,
)


@contextlib.contextmanager
def only(pattern: str) -> Iterator[Any]:
    """Nothing compiled before, the one pattern on, an empty report."""
    torch._dynamo.reset()
    sparse_inductor.enable(only=[pattern])
    report = sparse_inductor.report()
    report.clear()
    try:
        yield report
    finally:
        sparse_inductor.disable()
        torch._dynamo.reset()


def check(
    case: Case, pattern: str, report: Any, compiler: Callable[..., Any] = compile_without_codegen
) -> None:
    """The case is recognised as it expects, and its numbers are as good as eager's."""
    eager, truth = _run(case), _run(case, double=True)
    compiled: list[Any] = []
    got = _run(case, lambda fn: compiled.append(compiler(fn, dynamic=case.dynamic)) or compiled[0])
    assert_same_result(got, eager, truth, case.precision)
    found = [r for r in report.rewrites if r.pattern == pattern]
    near = [m for m in report.near_misses if m.pattern == pattern]
    if case.expect == "rewrite":
        said = "; ".join(m.reason for m in near) or "nothing"
        assert len(found) >= case.rewrites, f"{len(found)} of {case.rewrites} rewritten: {said}"
        if isinstance(compiled[0], Compiled):
            assert compiled[0].calls(pattern) >= case.rewrites, "the op is not in the graph"
    elif case.expect in ("no_rewrite", "out_of_graph"):
        assert not found, f"rewritten although: {case.why}"
    if case.explained and not found:
        assert any(m.reason.strip() for m in near), "a near miss of the family without a reason"


def _run(
    case: Case, wrap: Callable[[Any], Any] = lambda fn: fn, double: bool = False
) -> Result:
    """The case once, eagerly unless `wrap` compiles it; tensors it makes itself are double in double too."""
    fn, inputs = case.build()
    inputs = fresh(inputs)
    params: list[nn.Parameter] = []
    if isinstance(fn, nn.Module):
        fn = (fn.double() if double else fn).train(case.training)
        params = list(fn.parameters())
    if double:
        inputs = pytree.tree_map(to_double, inputs)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        autocast = None if double else case.autocast
        return run(wrap(fn), inputs, training=case.training, params=params, autocast=autocast)
    finally:
        torch.set_default_dtype(before)
