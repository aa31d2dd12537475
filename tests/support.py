"""What recognition tests share: compile without codegen, run a case, compare with the truth."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_inductor.policy import break_even
from sparse_inductor.testing import Compiled, compile_without_codegen
from sparse_inductor.verify.accuracy import TOLERANCE, compare, tensors_in, to_double

SPLADE = "splade_head"


def heavy(*values: Any) -> Any:
    """Values of a test's parameters that are left to `make test-all`, because others cross the same branches."""
    return pytest.param(*values, marks=pytest.mark.heavy)


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """Each n-th of a test's values, and the others for `make test-all`."""
    return [value if i % n == 0 else heavy(value) for i, value in enumerate(values)]


@contextlib.contextmanager
def only(*patterns: str) -> Iterator[Any]:
    """Nothing compiled before, the named patterns on, an empty report."""
    import sparse_inductor

    torch._dynamo.reset()
    sparse_inductor.enable(only=patterns)
    report = sparse_inductor.report()
    report.clear()
    try:
        yield report
    finally:
        sparse_inductor.disable()
        torch._dynamo.reset()


def index_pays(monkeypatch: pytest.MonkeyPatch, most: dict[str, int] | None = None) -> None:
    """Have an index of documents that stay the same count as faster than scoring, up to such sizes."""
    rows = [
        break_even.Row("sparse_scores", where, below, "", "", {"constant": 1}, sizes)
        for where in ("cpu", "cuda")
        for below, sizes in ((1, most or {}), (0, {}))
    ]
    monkeypatch.setattr(break_even, "TABLE", (*rows, *break_even.TABLE))


def only_splade_head() -> contextlib.AbstractContextManager[Any]:
    """Nothing compiled before, the one pattern on, an empty report."""
    return only(SPLADE)


def rewrites(report: Any, pattern: str = SPLADE) -> list[Any]:
    return [r for r in report.rewrites if r.pattern == pattern]


def near_misses(report: Any, pattern: str = SPLADE) -> list[Any]:
    return [m for m in report.near_misses if m.pattern == pattern]


@dataclasses.dataclass
class Result:
    """What a program computed: its tensors, and the gradients of its leaves (None: unused)."""

    outputs: list[torch.Tensor]
    grads: list[torch.Tensor | None]


def fresh(inputs: tuple) -> tuple:
    """Copies of the example inputs: a program may write to what it is given."""

    def copy_leaf(t: Any) -> Any:
        return (
            t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
        )

    return pytree.tree_map(copy_leaf, inputs)


def run(
    fn: Callable[..., Any],
    inputs: tuple,
    *,
    training: bool,
    params: list[nn.Parameter] | tuple = (),
    autocast: torch.dtype | None = None,
) -> Result:
    """Run once; in training back-propagate fixed random cotangents to `params` and inputs."""
    torch.manual_seed(0)
    region = torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext()
    with region, torch.set_grad_enabled(training):
        outputs = tensors_in(fn(*inputs))
    if not training:
        return Result(outputs, [])
    leaves = [t for t in [*params, *tensors_in(inputs)] if t.requires_grad]
    wanted = [o for o in outputs if o.requires_grad]
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in wanted]
    grads = torch.autograd.grad(wanted, leaves, cotangents, allow_unused=True)
    return Result(outputs, list(grads))


def error(got: torch.Tensor, truth: torch.Tensor, precision: torch.dtype) -> float:
    """Distance to the truth, absolute below 1 and relative above, where the truth is finite."""
    got, truth = got.detach().double(), truth.detach().double()
    keep = truth.isfinite() & (truth.abs() < 1e30)
    gap = ((got - truth).abs() / truth.abs().clamp(min=1.0))[keep]
    if gap.numel() == 0:
        return 0.0
    low = TOLERANCE[precision] > 1e-3
    return float(gap.square().mean().sqrt() if low else gap.max())


def assert_same_result(got: Result, eager: Result, truth: Result, precision: torch.dtype) -> None:
    """Every tensor is as close to the truth as eager's; `precision` is the lowest that was computed in."""
    assert len(got.outputs) == len(eager.outputs) == len(truth.outputs)
    found = [
        compare(f"output {i}", *three, precision=precision)
        for i, three in enumerate(zip(got.outputs, eager.outputs, truth.outputs, strict=True))
    ]
    found += [
        compare(f"gradient {i}", *three, ties=True, precision=precision)
        for i, three in enumerate(zip(got.grads, eager.grads, truth.grads, strict=True))
    ]
    wrong = [str(c) for c in found if not c.ok]
    assert not wrong, "\n".join(wrong)


@dataclasses.dataclass
class Outcome:
    """One case, run three ways: compiled, eager, and eager in fp64 without autocast."""

    compiled: Compiled
    got: Result
    eager: Result
    truth: Result


def run_three_ways(case: Any, compiler: Callable[..., Any] = compile_without_codegen) -> Outcome:
    """Run a `corpus.case.Case` eagerly, in double, and through `compiler(fn, dynamic=...)`."""
    fn, inputs = case.build()
    results = []
    for mode in ("eager", "truth", "compiled"):
        program, args, autocast = copy.deepcopy(fn), fresh(inputs), case.autocast
        if mode == "truth":
            args, autocast = pytree.tree_map(to_double, args), None
        params: list[nn.Parameter] = []
        if isinstance(program, nn.Module):
            program = (program.double() if mode == "truth" else program).train(case.training)
            params = list(program.parameters())
        if mode == "compiled":
            program = compiler(program, dynamic=case.dynamic)
        results.append(run(program, args, training=case.training, params=params, autocast=autocast))
    eager, truth, got = results
    return Outcome(program, got, eager, truth)


def assert_recognised(
    case: Any, outcome: Outcome, report: Any, logits_numel: int | None = None
) -> None:
    """The report, and for a rewrite the graph, are what the case expects.

    logits_numel: matrix products of that many results may not be left behind.
    """
    found = rewrites(report, case.pattern)
    if case.expect == "rewrite":
        said = "; ".join(m.reason for m in report.near_misses) or "nothing"
        assert len(found) >= case.rewrites, (
            f"{len(found)} of {case.rewrites} rewritten, report says: {said}"
        )
        if isinstance(outcome.compiled, Compiled):
            assert outcome.compiled.calls(case.pattern) >= case.rewrites, (
                "the op is not in the graph"
            )
            if logits_numel is not None:
                left = outcome.compiled.matmuls(logits_numel)
                assert not left, f"logits are still computed: {left}"
    elif case.expect in ("no_rewrite", "out_of_graph"):
        assert not found, f"rewritten although: {case.why}"


class Promises(TorchDispatchMode):
    """Compares every call of an operator of ours with what its fake says."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "sparse_inductor":
            mode = FakeTensorMode()
            like = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs or {}))
            with mode:
                promised = func(*like[0], **like[1])
            real, fakes = (pytree.tree_leaves(t) for t in (results, promised))
            assert [described(t) for t in real] == [described(t) for t in fakes], func
            self.seen.add(func._schema.name.removeprefix("sparse_inductor::"))
        return results


def described(t: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, and the strides of the dimensions that have one."""
    strides = [s for n, s in zip(t.shape, t.stride()) if n > 1 and t.numel()]
    return tuple(t.shape), t.dtype, strides
