"""What recognition tests share: compile without codegen, run a case, compare with the truth."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx

SPLADE = "splade_head"

# How much worse than eager's a rewritten program's error against an fp64 truth may be, by the
# lowest precision it computes in. In bf16 neighbouring logits tie and the winner of a max changes
# with the order of summation, so there errors are averaged over a tensor, not the worst element's.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}


class Compiled:
    """A callable compiled by Dynamo, Inductor's pre-grad passes and AOTAutograd, run as ATen ops.

    `dynamo_graphs` counts the graphs Dynamo produced (1 where nothing broke); `graphs` holds every
    ATen graph (inference, or forward and backward) that code would have been generated for.
    """

    def __init__(
        self, fn: Callable[..., Any], dynamic: bool | None = None, fullgraph: bool = False
    ):
        self.dynamo_graphs = 0
        self.graphs: list[torch.fx.Graph] = []
        self._fn = torch.compile(fn, backend=self._backend, dynamic=dynamic, fullgraph=fullgraph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def _backend(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        self.dynamo_graphs += 1
        # With fallback_random a seeded program draws the same numbers as eager.
        with (
            inductor_config.patch(fx_graph_cache=False, fallback_random=True),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            return compile_fx(gm, example_inputs, inner_compile=self._inner)

    def _inner(self, gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        self.graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def calls(self, op: str, namespace: str = "sparse_inductor") -> int:
        """How many nodes call `namespace::op` or one of its parts (`op_forward`, ...); entmax_attention is no
        part of entmax."""
        names = [n.target._schema.name for g in self.graphs for n in g.nodes if _is_aten_like(n)]
        other = f"{namespace}::{op}_attention"
        return sum(
            name.startswith(f"{namespace}::{op}") and not name.startswith(other) for name in names
        )

    def matmuls(self, numel: int) -> list[torch.fx.Node]:
        """Matrix products with at least `numel` results: a [B, S, V] that was left behind."""
        products = {"mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "matmul"}
        return [
            n
            for g in self.graphs
            for n in g.nodes
            if _is_aten_like(n)
            and n.target._schema.name.removeprefix("aten::") in products
            and isinstance(n.meta.get("val"), torch.Tensor)
            and _hint(n.meta["val"].numel()) >= numel
        ]


def _is_aten_like(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint


def compile_without_codegen(
    fn: Callable[..., Any], dynamic: bool | None = None, fullgraph: bool = False
) -> Compiled:
    """torch.compile up to code generation: every pass runs, no compiler is started."""
    return Compiled(fn, dynamic, fullgraph)


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


def flatten(value: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists, mappings (model outputs too) and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in flatten(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flatten(v)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in flatten(getattr(value, f.name))]
    return []


def to_double(t: Any) -> Any:
    is_real = isinstance(t, torch.Tensor) and t.is_floating_point()
    return t.detach().double().requires_grad_(t.requires_grad) if is_real else t


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
        outputs = flatten(fn(*inputs))
    if not training:
        return Result(outputs, [])
    leaves = [t for t in [*params, *flatten(inputs)] if t.requires_grad]
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


def assert_as_accurate(
    got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, precision: torch.dtype, what: str
) -> None:
    """`got` is as close to `truth` as `eager` is, and infinite or NaN exactly where eager is."""
    assert got.shape == eager.shape, f"{what}: {tuple(got.shape)}, eager {tuple(eager.shape)}"
    assert got.dtype == eager.dtype, f"{what}: dtype {got.dtype}, eager {eager.dtype}"
    if not eager.is_floating_point():
        assert torch.equal(got, eager), f"{what}: differs from eager"
        return
    assert torch.equal(got.isnan(), eager.isnan()), f"{what}: NaN in other places than eager"
    assert torch.equal(got.isinf(), eager.isinf()), f"{what}: infinite in other places than eager"
    huge = eager.detach().double().abs() >= 1e30
    assert torch.allclose(got[huge], eager[huge], equal_nan=True), (
        f"{what}: huge values differ from eager's"
    )
    ours, theirs = error(got, truth, precision), error(eager, truth, precision)
    limit = theirs + TOLERANCE[precision]
    assert ours <= limit, f"{what}: error {ours:.2e} against the truth, eager's is {theirs:.2e}"


def assert_same_result(got: Result, eager: Result, truth: Result, precision: torch.dtype) -> None:
    assert len(got.outputs) == len(eager.outputs) == len(truth.outputs)
    for i, (g, e, t) in enumerate(zip(got.outputs, eager.outputs, truth.outputs, strict=True)):
        assert_as_accurate(g, e, t, precision, f"output {i}")
    for i, (g, e, t) in enumerate(zip(got.grads, eager.grads, truth.grads, strict=True)):
        if g is None or e is None:
            # A gradient that is nowhere used may come back as None or as zeros.
            assert all(x is None or not x.any() for x in (g, e)), (
                f"gradient {i}: None on one side only"
            )
        else:
            assert_as_accurate(
                g, e, t if t is not None else torch.zeros_like(e), precision, f"gradient {i}"
            )


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
    found, near = rewrites(report, case.pattern), near_misses(report, case.pattern)
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
    if case.explained and not found:
        assert any(m.reason.strip() for m in near), "a near miss of the family without a reason"
