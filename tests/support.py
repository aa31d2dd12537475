"""Helpers that the tests share: sessions with selected patterns, reports, errors, and dispatch modes."""

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
    """Mark parameters of a test to run in `make test-all` only, because other parameters cover the same branches."""
    return pytest.param(*values, marks=pytest.mark.heavy)


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """Return the values with all but every n-th marked to run in `make test-all` only."""
    return [value if i % n == 0 else heavy(value) for i, value in enumerate(values)]


@contextlib.contextmanager
def registered(*patterns: Any) -> Iterator[None]:
    """Register the patterns for the duration of the block."""
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
    """Enable the named patterns alone for the block, with Dynamo reset and an empty report, which is yielded."""
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
    """Add rows to the break-even table by which an index of constant documents is faster than scoring them.

    `most` maps names of sizes to the largest values for which this holds; by default it holds for all sizes.
    """
    rows = [
        break_even.Row("sparse_scores", where, below, "", "", {"constant": 1}, sizes)
        for where in ("cpu", "cuda")
        for below, sizes in ((1, most or {}), (0, {}))
    ]
    monkeypatch.setattr(break_even, "TABLE", (*rows, *break_even.TABLE))


def only_splade_head() -> contextlib.AbstractContextManager[Any]:
    """Enable `splade_head` alone for the block; see `only`."""
    return only(SPLADE)


def rewrites(report: Any, pattern: str = SPLADE) -> list[Any]:
    return [r for r in report.rewrites if r.pattern == pattern]


def near_misses(report: Any, pattern: str = SPLADE) -> list[Any]:
    return [m for m in report.near_misses if m.pattern == pattern]


def error(got: torch.Tensor, truth: torch.Tensor, precision: torch.dtype) -> float:
    """Return the error where the truth is finite: absolute below 1, relative above.

    It is the root mean square for 16-bit precisions and the maximum otherwise.
    """
    got, truth = got.detach().double(), truth.detach().double()
    keep = truth.isfinite() & (truth.abs() < 1e30)
    gap = ((got - truth).abs() / truth.abs().clamp(min=1.0))[keep]
    if gap.numel() == 0:
        return 0.0
    low = TOLERANCE[precision] > 1e-3
    return float(gap.square().mean().sqrt() if low else gap.max())


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the norm of the error divided by the norm of the truth."""
    truth = truth.double()
    return ((got.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def in_a_graph(call: Callable[[], Any], before: int = 0) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call into a CUDA graph, after `before` warm-up calls on a side stream.

    Returns the graph and the captured call's result, which a replay overwrites.
    """
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
    """A dispatch mode that compares the results of this package's operators with those of their fake kernels.

    Shapes, dtypes and strides have to agree. `seen` has the names of the operators that were called.
    """

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
    """Return shape, dtype, and the strides of the dimensions of more than one element."""
    strides = [s for n, s in zip(t.shape, t.stride()) if n > 1 and t.numel()]
    return tuple(t.shape), t.dtype, strides


class Largest(TorchDispatchMode):
    """A dispatch mode that records the largest storage, in elements, of any operator's result.

    This includes the intermediate results of this package's operators.
    """

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparse_inductor":
            with self:  # sees the calls that the operator's kernel makes
                out = func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.itemsize)
        return out
