"""What recognition tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_inductor.policy import break_even
from sparse_inductor.testing import compile_without_codegen as compile_without_codegen
from sparse_inductor.verify.accuracy import TOLERANCE as TOLERANCE

SPLADE = "splade_head"


def heavy(*values: Any) -> Any:
    """Values of a test's parameters that are left to `make test-all`, because others cross the same branches."""
    return pytest.param(*values, marks=pytest.mark.heavy)


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """Each n-th of a test's values, and the others for `make test-all`."""
    return [value if i % n == 0 else heavy(value) for i, value in enumerate(values)]


@contextlib.contextmanager
def registered(*patterns: Any) -> Iterator[None]:
    """The patterns are known in the block."""
    from sparse_inductor import pattern

    for each in patterns:
        pattern.register(each)
    try:
        yield
    finally:
        for each in patterns:
            pattern.unregister(each.name)


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


def error(got: torch.Tensor, truth: torch.Tensor, precision: torch.dtype) -> float:
    """Distance to the truth, absolute below 1 and relative above, where the truth is finite."""
    got, truth = got.detach().double(), truth.detach().double()
    keep = truth.isfinite() & (truth.abs() < 1e30)
    gap = ((got - truth).abs() / truth.abs().clamp(min=1.0))[keep]
    if gap.numel() == 0:
        return 0.0
    low = TOLERANCE[precision] > 1e-3
    return float(gap.square().mean().sqrt() if low else gap.max())


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the error over that of the truth."""
    truth = truth.double()
    return ((got.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def in_a_graph(call: Callable[[], Any], before: int = 0) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call, which is made so often on another stream before, and what it writes to."""
    if before:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(before):
                call()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    return graph, made


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


class Largest(TorchDispatchMode):
    """The most elements of one storage that any operator made, those inside our operators included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparse_inductor":
            with self:  # the kernel's own calls, rather than the operator as one
                out = func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.itemsize)
        return out
