"""Every way to compile has eager's results and gradients, for every family."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import sparse_inductor
from processes import python
from programs import LAYERS, D, Model, draw, layer, step
from sparse_inductor.testing import compile_without_codegen


def assert_steps_alike(got: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)  # gradients are up to 30


# Higher-order operators


def a_region_used_twice(f):
    region = torch.compiler.nested_compile_region(f)
    return lambda x: region(region(x) + 1)


def a_region_in_a_region(f):
    region = torch.compiler.nested_compile_region(f)
    outer = torch.compiler.nested_compile_region(lambda x: region(x) * 2)
    return lambda x: outer(x) + region(x)


def a_region_with_a_detached_result(f):
    region = torch.compiler.nested_compile_region(lambda x: (f(x), f(x).detach(), x * 2))

    def program(x):
        y, constant, double = region(x)
        return y * constant + double

    return program


def a_checkpointed_region(f):
    region = torch.compiler.nested_compile_region(f)
    return lambda x: checkpoint(region, x, use_reentrant=False) + region(x)


REGIONS = (
    a_region_used_twice,
    a_region_in_a_region,
    a_region_with_a_detached_result,
    a_checkpointed_region,
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("pattern", LAYERS)
@pytest.mark.parametrize("within", REGIONS, ids=lambda f: f.__name__)
def test_regions_compiled_once_have_gradients(pattern, within):
    module = layer(pattern)
    program = within(module)
    wanted = step(program, module)
    with sparse_inductor.enabled(only=pattern, strict=True):
        got = step(compile_without_codegen(program, fullgraph=True), module)
    assert_steps_alike(got, wanted)


@pytest.mark.parametrize("function", ["entmax15", "entmax_bisect"])
def test_a_region_that_dynamo_gives_up_at_entmax(function):
    """Up to torch 2.13 Dynamo cannot capture a region that takes `.mT` of a computed argument."""
    entmax = pytest.importorskip("entmax")
    module = layer("entmax_attention")
    region = torch.compiler.nested_compile_region(
        lambda q, k, v: getattr(entmax, function)(q @ k.mT, dim=-1) @ v
    )

    def program(x):
        y = module(x)
        return region(y, y * 2, y + 1)

    wanted = step(program, module)
    with sparse_inductor.enabled():
        got = step(compile_without_codegen(program), module)
    assert_steps_alike(got, wanted)


def test_attention_in_training_is_left_to_a_cpp_wrapper():
    module = layer("entmax_attention")
    wanted = step(module, module)
    with (
        sparse_inductor.enabled(only="entmax_attention"),
        torch._inductor.config.patch(cpp_wrapper=True),
    ):
        got = step(compile_without_codegen(module), module)
    assert_steps_alike(got, wanted)
    report = sparse_inductor.report()
    assert not report.rewrites
    assert any("C++ wrapper" in miss.reason for miss in report.near_misses)


# One model with every family


@dataclasses.dataclass
class Ran:
    """A program, the module with its parameters, and the eager model to compare with."""

    program: Callable[[Tensor], Tensor]
    module: nn.Module
    eager: nn.Module = dataclasses.field(default_factory=lambda: Model())


WAYS: list[Any] = []


def way(*, rewrites: Collection[str] = Model.PATTERNS, quick: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that adds a way: a generator that yields a `Ran`, or the program alone.

    Settings that the generator makes hold until it is resumed. rewrites: the families that are rewritten. quick: the
    way is part of `make test`.
    """

    def add(f: Callable[[Model], Iterator[Any]]) -> Any:
        marks = [] if quick else [pytest.mark.heavy]
        WAYS.append(
            pytest.param(contextlib.contextmanager(f), set(rewrites), id=f.__name__, marks=marks)
        )
        return f

    return add


def seen_as(**how: Any) -> Callable[[nn.Module], Iterator[Any]]:
    """Return a way that calls torch.compile with these arguments."""

    def program(model):
        yield torch.compile(model, **how)

    program.__name__ = "-".join(f"{key}_{value}" for key, value in how.items())
    return program


for arguments in ({"backend": "eager"}, {"backend": "aot_eager"}):
    way(rewrites=())(seen_as(**arguments))
for arguments in (
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"fullgraph": True},
    {"fullgraph": True, "dynamic": True},
):
    way()(seen_as(**arguments))


@way(quick=True)
def any_size(model):
    yield compile_without_codegen(model, dynamic=True, fullgraph=True)


def marked(model, mark, *dims):
    compiled = compile_without_codegen(model, fullgraph=True)

    def program(x):
        for dim in dims:
            mark(x, dim)
        return compiled(x)

    yield program


@way()
def sizes_marked_dynamic(model):
    yield from marked(model, torch._dynamo.mark_dynamic, 0, 1)


@way()
def a_size_marked_unbacked(model):
    yield from marked(model, torch._dynamo.decorators.mark_unbacked, 0)


@way(rewrites=())
def stance_force_eager(model):
    with torch.compiler.set_stance("force_eager"):
        yield compile_without_codegen(model)


def seen_before(model, size, stance):
    """Set a stance after a call with a batch of `size`; the training step has a batch of 2."""
    compiled = compile_without_codegen(model)
    compiled(torch.randn(size, 5, D, requires_grad=True))
    with torch.compiler.set_stance(stance):
        yield compiled


@way()
def stance_fail_on_recompile(model):
    yield from seen_before(model, 2, "fail_on_recompile")


@way()
def stance_eager_on_recompile(model):
    yield from seen_before(model, 3, "eager_on_recompile")


def checkpointed_outside(model, reentrant):
    compiled = compile_without_codegen(model)
    yield lambda x: checkpoint(compiled, x, use_reentrant=reentrant)


@way()
def a_reentrant_checkpoint_outside(model):
    yield from checkpointed_outside(model, True)


@way(quick=True)
def a_checkpoint_outside(model):
    yield from checkpointed_outside(model, False)


@way()
def a_checkpoint_of_every_layer_inside(model):
    def program(x):
        for module in model:
            x = checkpoint(module, x, use_reentrant=False)
        return x

    yield compile_without_codegen(program, fullgraph=True)


@way()
def a_small_memory_budget(model):
    with torch._functorch.config.patch(activation_memory_budget=0.2):
        yield compile_without_codegen(model)


@way()
def given_weights(model):
    def program(weights, x):
        return torch.func.functional_call(model, weights, (x,))

    compiled = compile_without_codegen(program, fullgraph=True)
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    yield lambda x: compiled(weights, x)


@way()
def weight_norm(model):
    for linear in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        nn.utils.parametrizations.weight_norm(linear)
    yield Ran(compile_without_codegen(model), model, copy.deepcopy(model))


@way()
def an_exported_program(model):
    x = torch.randn(2, 5, D)
    exported = torch.export.export(model, (x,)).module()
    yield Ran(compile_without_codegen(exported), exported)


@contextlib.contextmanager
def alone_in_a_process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@way(quick=True)
def ddp(model):
    with alone_in_a_process_group():
        yield compile_without_codegen(nn.parallel.DistributedDataParallel(model))


@pytest.mark.heavy
@pytest.mark.parametrize("pattern", ["relu_ffn", "entmax_attention"])
def test_a_block_split_between_buckets_says_so(pattern, monkeypatch):
    monkeypatch.setattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    module = layer(pattern)
    wanted = step(module, module)
    with alone_in_a_process_group(), sparse_inductor.enabled(only=pattern, policy="always"):
        replica = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=2e-6)
        got = step(compile_without_codegen(replica), module)
    assert_steps_alike(got, wanted)
    report = sparse_inductor.report()
    assert not report.rewrites
    (miss,) = report.near_misses
    assert "bucket of DistributedDataParallel" in miss.reason
    assert miss.source is not None and ("relu" in miss.source or "entmax15" in miss.source)


@way(quick=True)
def fsdp2(model):
    with alone_in_a_process_group():
        mesh = distributed.init_device_mesh("cpu", (1,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        yield compile_without_codegen(model)


def trained(model, program=None, update=lambda f: f):
    """Train a model, compiled or not, for two steps of Adam, and return it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3))
    stepping = update(optimizer.step)
    for seed in range(2):
        optimizer.zero_grad()
        (program or model)(draw(seed=seed).detach()).square().mean().backward()
        stepping()
    return model


# With Inductor's code generation


@way()
def a_compiled_optimizer(model):
    compiled = torch.compile(model)
    trained(model, compiled, update=torch.compile)
    yield Ran(compiled, model, trained(Model()))


@way(rewrites={"relu_ffn", "splade_head", "sparse_scores", "entmax"})
def cpp_wrapper_in_training(model):
    with torch._inductor.config.patch(cpp_wrapper=True):
        yield torch.compile(model)


@way()
def an_aot_package(model):
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(model, (torch.randn(2, 5, D),))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=f"{folder}/model.pt2"
        )
        yield torch._inductor.aoti_load_package(path)


class Loss(nn.Module):
    """A model with a loss as Transformers' Trainer expects it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        y = self.model(x)
        return {"loss": y.square().mean(), "y": y}


@way()
def a_trainer(model):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{"x": x} for x in torch.randn(4, 5, D, generator=torch.Generator().manual_seed(2))]

    def fitted(model, compiles):
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=2, per_device_train_batch_size=2, torch_compile=compiles, use_cpu=True,
                report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            )  # fmt: skip
            transformers.Trainer(Loss(model), arguments, train_dataset=data).train()
        return model.eval()

    yield Ran(fitted(model, True), model, fitted(Model(), False))


@way()
def regional_compilation(model):
    for module in model:
        module.compile()
    yield model


@way()
def a_deep_copy(model):
    copied = copy.deepcopy(torch.compile(model))
    yield Ran(copied, copied)


@way()
def pickled(model):
    model.compile()
    again = pickle.loads(pickle.dumps(model))
    again.compile()
    yield Ran(again, again)


@way()
def cpp_wrapper_in_inference(model):
    with torch._inductor.config.patch(cpp_wrapper=True), torch.no_grad():
        yield torch.compile(model)


@way()
def frozen(model):
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        yield torch.compile(model.eval())


@way()
def compiled_autograd(model):
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.compiled_autograd._enable(torch.compile):
        yield torch.compile(model)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == 1


@way()
def accelerated(model):
    accelerate = pytest.importorskip("accelerate")
    yield torch.compile(accelerate.Accelerator(cpu=True).prepare(model))


@pytest.mark.parametrize("program_of,rewritten", WAYS)
def test_way(program_of, rewritten):
    """Results and gradients equal eager's, and all families that can be rewritten are."""
    model = Model()
    with sparse_inductor.enabled(policy="always"), program_of(model) as made:
        ran = made if isinstance(made, Ran) else Ran(made, model)
        got = step(ran.program, ran.module)
    wanted = step(ran.eager, ran.eager)
    assert_steps_alike(got, wanted[: len(got)])
    report = sparse_inductor.report()
    assert {r.pattern for r in report.rewrites} == rewritten, report


@pytest.mark.heavy
def test_nothing_of_ours_warns():
    """With warnings as errors, the package is imported and enabled, compiles a program of each family, is disabled."""
    program = """
        import warnings
        for module in ("__main__", "programs", "sparse_inductor"):
            warnings.filterwarnings("error", module=module)
        import torch
        import sparse_inductor
        from programs import LAYERS, D
        sparse_inductor.enable(policy="always")
        for name, layer in LAYERS.items():
            x = torch.randn(2, 5, D, requires_grad=True)
            torch.compile(layer())(x).sum().backward()
            found = {rewrite.pattern for rewrite in sparse_inductor.report().rewrites}
            assert name in found, (name, found)
        print(sparse_inductor.report())
        sparse_inductor.disable()
    """
    python("-c", textwrap.dedent(program))


@pytest.mark.heavy
def test_a_process_forked_after_a_step():
    """The child takes steps and compiles again. It uses one thread, because OpenMP's threads do not survive a fork:
    with more threads PyTorch's own linear hangs in the child, compiled or not."""
    program = """
        import os, signal, traceback
        import torch
        import sparse_inductor
        from test_ways_to_compile import Model, assert_steps_alike, step
        sparse_inductor.enable(policy="always")
        model = Model()
        wanted = step(torch.compile(model), model)
        found = {rewrite.pattern for rewrite in sparse_inductor.report().rewrites}
        assert found == {*Model.PATTERNS}, found
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            try:
                assert_steps_alike(step(torch.compile(model), model), wanted)
                torch._dynamo.reset()
                assert_steps_alike(step(torch.compile(model), model), wanted)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    python("-c", textwrap.dedent(program), OMP_NUM_THREADS="1")
