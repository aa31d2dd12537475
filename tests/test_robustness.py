"""If the operators cannot run, the program runs unrewritten and one line gives the reason; memory does not grow."""

from __future__ import annotations

import functools
import gc
import os
import resource
import shutil
from importlib import metadata

import pytest
import torch
from entmax import sparsemax

import sparse_inductor
from fuzz.compare import COMPILING
from processes import python
from programs import Block, batch, encoder
from sparse_inductor import ability, admission, rewrite
from sparse_inductor.ops import _linear_max_aten
from support import compile_without_codegen

# Requirements of the kernels


def not_installed(name):
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    "where, name, instead, says",
    [
        (metadata, "version", not_installed, "triton is not installed"),
        (metadata, "version", lambda name: "3.2.0", "triton 3.2.0 is older than 3.6"),
        (shutil, "which", lambda name: None, "triton needs a C compiler"),
        (
            torch.cuda,
            "get_device_capability",
            lambda _: (7, 5),
            "capability 7.5, its kernels need 8.0",
        ),
        (torch.version, "hip", "6.4", "made for NVIDIA GPUs"),
    ],
    ids=["no triton", "old triton", "no compiler", "old GPU", "other GPU"],
)
def test_what_the_kernels_lack(monkeypatch, where, name, instead, says):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(where, name, instead)
    ability.unsupported_reason.cache_clear()
    try:
        assert says in ability.unsupported_reason(torch.device("cuda"))
        assert ability.unsupported_reason(torch.device("cpu")) == ""
    finally:
        ability.unsupported_reason.cache_clear()


@pytest.mark.parametrize("policy", ["always", "never"])
def test_kernels_are_imported_for_what_is_rewritten(policy, monkeypatch):
    asked = []
    monkeypatch.setattr(admission, "unimportable", lambda op, _: asked.append(op) or "no such file")
    sparse_inductor.enable(only="splade_head", policy=policy)
    model = encoder()
    torch.testing.assert_close(compile_without_codegen(model)(*batch()), model(*batch()))
    report = sparse_inductor.report()
    assert not report.rewrites
    if policy == "never":
        assert not asked and not report.near_misses and len(report.pending) == 1
    else:
        assert asked == ["sparse_inductor::splade_head"]
        (miss,) = report.near_misses
        assert miss.reason == "there is no operator here: no such file" and miss.location != "?"


def test_a_device_without_kernels_leaves_the_program_as_it_is(monkeypatch, caplog):
    monkeypatch.setattr(admission, "unsupported_reason", lambda device: "triton is not installed")
    monkeypatch.setattr(admission, "_told", set())
    sparse_inductor.enable()
    for _ in range(2):
        torch._dynamo.reset()
        model = encoder()
        torch.testing.assert_close(compile_without_codegen(model)(*batch()), model(*batch()))
    report = sparse_inductor.report()
    assert not report.rewrites
    assert {m.pattern for m in report.near_misses} >= {"splade_head", "entmax_attention"}
    assert all("triton is not installed" in m.reason for m in report.near_misses)
    said = [r.getMessage() for r in caplog.records if r.name == "sparse_inductor"]
    assert said == ["nothing is rewritten on cpu: triton is not installed"]


def test_running_out_of_memory_is_said_and_leaves_the_program_usable(monkeypatch):
    sparse_inductor.enable()
    model = encoder()
    compiled = compile_without_codegen(model)
    wanted = compiled(*batch())
    forward = _linear_max_aten.forward

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(_linear_max_aten, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        compiled(*batch())
    monkeypatch.setattr(_linear_max_aten, "forward", forward)
    torch.testing.assert_close(compiled(*batch()), wanted)
    assert compiled.dynamo_graphs == 1 and not rewrite.failures


def test_nested_tensors_are_left_alone():
    """The operators do not accept them, and the pattern still rewrites the next program."""
    sparse_inductor.enable(only="relu_ffn")
    block = Block(8)

    def ragged(x, ends):
        return block(torch.nested.nested_tensor_from_jagged(x, ends)).values()

    x, ends = torch.randn(10, 8), torch.tensor([0, 3, 10])
    for _ in range(2):  # forward alone, then with a backward
        got = compile_without_codegen(ragged)(x, ends)
        torch.testing.assert_close(got, block(x))
        reasons = {miss.reason for miss in sparse_inductor.report().near_misses}
        assert reasons == {"there is no operator here: the tensors are nested"}
        x = x.clone().requires_grad_()
    compile_without_codegen(block)(x)
    assert len(sparse_inductor.report().rewrites) == 1 and not rewrite.failures


def test_a_block_of_nested_tensors_that_returns_its_activations_is_left_alone():
    """How many there are, which tells blocks from others, no number says."""
    sparse_inductor.enable(policy="always")
    block = Block(8)

    def ragged(x, ends):
        h = torch.relu(block.up(torch.nested.nested_tensor_from_jagged(x, ends)))
        return block.down(h).values(), h.values()

    x, ends = torch.randn(10, 8), torch.tensor([0, 3, 10])
    got = compile_without_codegen(ragged)(x, ends)
    torch.testing.assert_close(got, ragged(x, ends))
    assert not sparse_inductor.report().rewrites and not rewrite.failures


class Labelled(torch.Tensor):
    """A tensor subclass without operations of its own."""


@pytest.mark.parametrize("training", [False, True])
def test_inputs_of_another_class_are_left_alone(training):
    """AOTAutograd does not pass such inputs to custom operators; PyTorch's own operators get views, which are plain
    tensors."""
    sparse_inductor.enable(only="relu_ffn")
    block, x = Block(8), torch.randn(2, 3, 8)
    with torch.set_grad_enabled(training):
        got = torch.compile(block)(x.as_subclass(Labelled))
    assert isinstance(got, Labelled) and got.requires_grad == training
    torch.testing.assert_close(got.as_subclass(torch.Tensor), block(x))
    (miss,) = sparse_inductor.report().near_misses
    assert miss.reason.endswith("is a Labelled, a subclass that no operator takes")


WITHOUT_COMPILER = """
import torch, sparse_inductor
from programs import batch, encoder

sparse_inductor.enable()
model = encoder()
try:
    torch.compile(model)(*batch())
except Exception as error:
    print(type(error).__name__, "No working C++ compiler" in str(error) or "InvalidCxxCompiler" in str(error))
torch._dynamo.reset()
torch._dynamo.config.suppress_errors = True  # torch's own switch: run what cannot be compiled eagerly
torch.testing.assert_close(torch.compile(model)(*batch()), model(*batch()))
print("works")
"""


@pytest.mark.heavy
def test_without_a_compiler_torch_says_so_and_eager_still_works(tmp_path):
    places = {"CXX": "none", "PATH": "", "TORCHINDUCTOR_CACHE_DIR": "cache"}
    env = {name: str(tmp_path / place) for name, place in places.items()}
    done = python("-W", "ignore", "-c", WITHOUT_COMPILER, **env)
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first.endswith("True") and last == "works", done.stdout


# Long programs


def repeated(step, times=30):
    return lambda z: functools.reduce(lambda z, _: step(z), range(times), z)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w, keep: repeated(lambda z: z * z)(torch.relu(x @ w.T)) @ w,
        lambda x, w, keep: repeated(lambda z: z + 0.5 * z)(x @ w.T).topk(2).values,
        lambda x, w, keep: sparsemax(repeated(lambda z: z + 0.5 * z)(x), -1) @ w.T,
        lambda x, w, keep: sparsemax((x @ x.mT).masked_fill(~repeated(lambda k: k & k)(keep), -1e9), -1) @ x,
        lambda x, w, keep: torch.where(repeated(lambda k: k & k)((z := x @ w.T) > 0), z, 0.0).amax(1),
        lambda x, w, keep: repeated(lambda z: z * keep[:, :1], 600)(torch.relu(x @ w.T)).amax(1),
    ],
    ids=["product", "sum", "scores", "mask", "condition", "chain"],
)  # fmt: skip
def test_a_long_program_is_read_in_no_time(program):
    """Each of 30 steps reads the previous one twice, and a chain of 600 steps must not raise RecursionError."""
    inputs = torch.randn(2, 5, 6), torch.randn(24, 6), torch.ones(5, 5, dtype=torch.bool)
    with sparse_inductor.enabled(), torch.no_grad():
        COMPILING["graph"](program)(*inputs)
    assert not rewrite.failures


# A long run


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:sparse_inductor was enabled after")
def test_a_long_run_does_not_grow():
    """In training steps of varying shapes, no graph is compiled and no memory is kept after the first quarter.

    STEPS=2000 in the environment (`make long-run`) makes the full run.
    """
    steps = int(os.environ.get("STEPS", "40"))
    sparse_inductor.enable()
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = compile_without_codegen(model, dynamic=None)
    generator = torch.Generator().manual_seed(0)

    def train(count: int) -> None:
        for _ in range(count):
            B, L = torch.randint(2, 9, (2,), generator=generator).tolist()
            compiled(*batch(B, 4 * L)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(steps // 4)
    graphs, tensors, report = compiled.dynamo_graphs, living(), len(str(sparse_inductor.report()))
    resident = memory()
    train(steps - steps // 4)
    assert compiled.dynamo_graphs == graphs <= 4
    assert living() <= tensors + 8
    assert len(str(sparse_inductor.report())) == report
    # The peak is in KiB; fluctuations of the allocator are below 32 MiB.
    assert memory() - resident < 32 * 1024


def living() -> int:
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
