"""One case of a recogniser's tests, for programs that make tensors of their own (accumulators, for instance)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from corpus.case import Case
from support import (
    Outcome,
    Result,
    assert_recognised,
    assert_same_result,
    compile_without_codegen,
    fresh,
    run,
    to_double,
)


def check(
    case: Case, pattern: str, report: Any, compiler: Callable[..., Any] = compile_without_codegen
) -> None:
    """The case is recognised as it expects, and its numbers are as good as eager's."""
    compiled: list[Any] = []

    def keep(fn: Any) -> Any:
        compiled.append(compiler(fn, dynamic=case.dynamic))
        return compiled[0]

    eager, truth, got = _run(case), _run(case, double=True), _run(case, keep)
    assert_same_result(got, eager, truth, case.precision)
    outcome = Outcome(compiled[0], got, eager, truth)
    assert_recognised(dataclasses.replace(case, pattern=pattern), outcome, report)


def _run(case: Case, wrap: Callable[[Any], Any] = lambda fn: fn, double: bool = False) -> Result:
    """The case once; in double the tensors that it makes itself are double, too."""
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
