"""Operators whose kernels fail: the next layer computes them, with the same result and one warning."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import sparse_inductor
from sparse_inductor import ability, doctor, facts, layers
from sparse_inductor.aten import sparse_scores as scoring
from sparse_inductor.layers import KernelWarning, Layer, Operator
from sparse_inductor.ops import _dispatch, _merge
from sparse_inductor.pattern import registered
from sparse_inductor.testing import compile_without_codegen
from support import Promises, heavy, in_a_graph, one_in

ops = torch.ops.sparse_inductor


@pytest.fixture(autouse=True)
def every_layer_works() -> Iterator[None]:
    """Forgets failed kernels before and after each test."""
    forget_all()
    yield
    forget_all()


def forget_all() -> None:
    layers.forget()
    from sparse_inductor.kernels.common import ahead, launch, replay

    replay.forget()
    for kept in (launch._compiled, launch._seen, launch._under_way, ahead._begun):
        kept.clear()


# The choice of the layer that computes an operator


def made(fails: dict[Layer, Exception], follows: str | None = None) -> tuple[Any, list[Layer]]:
    """Return an operator that doubles a tensor, with the given error in each layer, and a list of the tried layers."""
    tried: list[Layer] = []

    def double(x: Tensor) -> Tensor:
        tried.append(layers.current())
        if layers.current() in fails:
            raise fails[layers.current()]
        return x * 2

    operator = Operator("double", double, follows)
    return lambda x: operator.run(double, (x,)), tried


X = torch.arange(3.0)


def test_the_first_layer_that_works_is_remembered():
    double, tried = made({Layer.NATIVE: RuntimeError("PassManager::run failed\nand more")})
    with pytest.warns(KernelWarning) as seen:
        assert torch.equal(double(X), X * 2)
    assert torch.equal(double(X), X * 2)
    assert tried == [Layer.NATIVE, Layer.PORTABLE, Layer.PORTABLE]
    (message,) = [str(w.message) for w in seen]
    assert f"torch {torch.__version__}" in message and "triton 3." in message
    assert "RuntimeError: PassManager::run failed)" in message
    assert "portable Triton kernels instead, usually 1.5 to 3 times slower" in message
    (fallback,) = layers.fallbacks()
    assert (fallback.operator, fallback.layer) == ("double", Layer.PORTABLE)


def test_aten_is_the_last_layer():
    error = RuntimeError("no ptxas")
    double, tried = made({Layer.NATIVE: error, Layer.PORTABLE: error})
    with pytest.warns(KernelWarning, match="ATen instead") as seen:
        assert torch.equal(double(X), X * 2)
    assert tried == [*Layer] and len(seen) == 1
    double(X)
    assert tried[3:] == [Layer.ATEN]


def test_memory_that_kernels_lack_is_not_remembered():
    """A GPU whose memory is temporarily full cannot load a kernel."""
    fails = {Layer.NATIVE: RuntimeError("Triton Error [CUDA]: out of memory")}
    double, tried = made(fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(double(X), X * 2)
    fails.clear()
    double(X)
    assert tried == [Layer.NATIVE, Layer.PORTABLE, Layer.NATIVE] and not layers.fallbacks()


def test_another_dtype_is_another_matter():
    double, tried = made({Layer.NATIVE: RuntimeError("out of resource: shared memory")})
    with pytest.warns(KernelWarning):
        double(X)
    double(X.double())
    assert tried == [Layer.NATIVE, Layer.PORTABLE, Layer.NATIVE, Layer.PORTABLE]


@pytest.mark.filterwarnings("error")
def test_what_every_layer_raises_is_the_programs_own():
    """An example is an error about invalid arguments; no layer is recorded as failed."""
    double, tried = made(dict.fromkeys(Layer, ValueError("x must be [M, K]")))
    for _ in range(2):
        with pytest.raises(ValueError, match="x must be"):
            double(X)
    assert tried == [*Layer, *Layer] and not layers.fallbacks()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()]
)
def test_memory_that_runs_out_and_interrupts_pass(error):
    double, tried = made({Layer.NATIVE: error})
    with pytest.raises(type(error)):
        double(X)
    assert tried == [Layer.NATIVE] and not layers.fallbacks()


def test_an_operator_is_never_above_the_one_it_reads_from():
    follower, tried = made({}, follows="saving")
    operator = Operator("saving", lambda x: x)

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    follower(X)
    with pytest.warns(KernelWarning):
        operator.run(fails, (X,))
    follower(X)
    assert tried == [Layer.NATIVE, Layer.PORTABLE]


def test_a_program_goes_on_where_warnings_are_errors(caplog):
    double, _ = made({Layer.NATIVE: RuntimeError("no kernel")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(double(X), X * 2)
    assert "no kernel" in caplog.text


def test_a_failed_attempt_holds_no_memory():
    held: list[Any] = []

    class Big:
        pass

    def fails(x: Tensor) -> Tensor:
        import weakref

        if layers.current() == Layer.NATIVE:
            big = Big()
            held.append(weakref.ref(big))
            raise RuntimeError("no kernel")
        assert held[0]() is None
        return x

    with pytest.warns(KernelWarning):
        Operator("holding", fails).run(fails, (X,))


# Every kernel of every family


# A function from a device to a program and its tensors; the floating-point ones may require gradients.
Build = Callable[[torch.device], tuple[Callable[..., Any], list[Tensor]]]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draw(device: torch.device, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=_generator(seed)) * scale
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return x.to(device, dtype)


def splade(device: torch.device, steps: str = "relu | log1p | row_mul(0)", mask: str = "bool"):
    B, S, D, V = (8, 128, 128, 30522) if device.type == "cuda" else (3, 20, 16, 40)
    hidden, weight = _draw(device, B, S, D), _draw(device, V, D, scale=D**-0.5, seed=1)
    bias = _draw(device, V, scale=0.1, seed=2)
    rows = torch.rand(B, S, generator=_generator(3)).to(device)
    rows = rows > 0.2 if mask == "bool" else rows

    def program(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sparse_inductor.ops.splade_head(hidden, weight, bias, rows=[rows], steps=steps)

    return program, [hidden, weight, bias]


def relu_ffn(
    device: torch.device, tokens: int, share: float = 0.02, up: bool = True, stats: bool = False
):
    """Build a block in which the last feature makes about `share` of the gates positive, and all in the first rows."""
    K, N, D = (256, 8192, 256) if device.type == "cuda" else (16, 80, 16)
    x = _draw(device, tokens, K)
    x[:, -1] = 1
    x[: (tokens + 7) // 8 if tokens > 4 else 0, -1] = -4
    gate = _draw(device, N, K, scale=K**-0.5, seed=1)
    gate[:, -1] = -torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share)).item()
    weights = [gate, _draw(device, D, N, scale=0.25, seed=2)]
    if up:
        weights.append(_draw(device, N, K, scale=K**-0.5, seed=3))

    def program(*tensors: Tensor) -> Any:
        out = sparse_inductor.ops.relu_ffn(*tensors, return_stats=stats)
        return (out[0], out[1][0], out[1][2]) if stats else out

    return program, [x, *weights]


def entmax(device: torch.device):
    def program(x: Tensor, alpha: Tensor) -> Tensor:
        return sparse_inductor.ops.entmax(x, 1.5) + sparse_inductor.ops.entmax(x, alpha, 1)

    alpha = torch.full((1, 1, 1), 1.3, device=device)
    return program, [_draw(device, 2, 5, 70).float(), alpha]


def entmax_attention(device: torch.device, keys: int, bias: bool = False):
    B, H, L, D = (2, 4, 256, 64) if device.type == "cuda" else (1, 2, 24, 16)
    shapes = (B, H, L, D), (B, H, keys, D), (B, H, keys, D)
    tensors = [_draw(device, *shape, scale=2.0, seed=i) for i, shape in enumerate(shapes)]
    if bias:
        tensors.append(_draw(device, 1, H, L, keys, seed=4))

    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return sparse_inductor.ops.entmax_attention(q, k, v, bias=bias)

    return program, tensors


def sparse_scores(
    device: torch.device, queries: int, k: int | None = None, docs: int = 50, form: str = "padded"
):
    V, L = 60, 7
    ids = torch.randint(0, V, (docs, L), generator=_generator(), device="cpu").to(device)
    values = _draw(device, docs, L, seed=1).abs().float()
    query = _draw(device, queries, V, seed=2).float()

    def program(query: Tensor) -> Any:
        given = (ids, values)
        more: dict[str, Any] = {}
        if form == "rows":
            more = {
                "rows": torch.arange(docs, device=device).repeat_interleave(L),
                "num_docs": docs,
            }
            given = (ids.flatten(), values.flatten())
        out = sparse_inductor.ops.sparse_scores(query, *given, k=k, **more)
        return out if k is None else out[0]

    return program, [query]


def index(device: torch.device, docs: int, weights: str = "float32"):
    """Build the call of `SparseIndex.search`, on packed tensors if the query has kernels."""
    from sparse_inductor.kernels.sparse_scores import search as kernel

    dense = torch.rand(docs, 40, generator=_generator())
    dense *= torch.rand(docs, 40, generator=_generator(1)) < 0.1
    built = sparse_inductor.SparseIndex.build(dense, num_terms=40, weights=weights)
    packed = kernel.pack([s.to(device) for s in built._contents.segments], 40)
    deleted = torch.zeros(docs, dtype=torch.bool, device=device)
    deleted[3] = True
    query = (torch.rand(3, 40, generator=_generator(2)) * (torch.arange(40) % 3 == 0)).to(device)

    def program(query: Tensor) -> Any:
        takes = layers.has_kernels(query)
        postings, counts, _ = (packed, [docs], None) if takes else built.operands()
        return ops.index_search(query, postings, counts, deleted, 5)

    return program, [query]


def several_processes(device: torch.device):
    """Build the merge of two processes' results as in `ShardedIndex`."""
    scores = torch.rand(2, 3, 5, generator=_generator()).sort(descending=True).values.to(device)
    scores[1, 1, 3:] = -math.inf
    ids = torch.randint(0, 90, (2, 3, 5), generator=_generator(1)).to(device)
    ids[1, 1, 3:] = -1

    def program(scores: Tensor) -> Any:
        made = [_merge.keys(s, i, 100 * n) for n, (s, i) in enumerate(zip(scores, ids))]
        return _merge.merged(torch.stack(made), scores[0])

    return program, [scores]


CASES: dict[str, Build] = {
    "splade_head": splade,
    "splade_head of real weights": lambda d: splade(
        d, "row_add(0) | relu | log1p | row_mul(0)", "real"
    ),
    "relu_ffn of one token": lambda d: relu_ffn(d, 1),
    "relu_ffn of four tokens": lambda d: relu_ffn(d, 4),
    "relu_ffn": lambda d: relu_ffn(d, 2048 if d.type == "cuda" else 6),
    "relu_ffn without a second factor": lambda d: relu_ffn(
        d, 2048 if d.type == "cuda" else 6, up=False, stats=True
    ),
    "entmax": entmax,
    "entmax_attention": lambda d: entmax_attention(d, 1024 if d.type == "cuda" else 40),
    "entmax_attention with a bias": lambda d: entmax_attention(d, 24, bias=True),
    "sparse_scores": lambda d: sparse_scores(d, 3),
    "sparse_scores of many queries": lambda d: sparse_scores(d, 12, k=4, form="rows"),
    "the best of few documents": lambda d: sparse_scores(d, 2, k=4),
    "index": lambda d: index(d, 20_000 if d.type == "cuda" else 90),
    "index of several processes": several_processes,
    "index of bytes": lambda d: index(d, 90, weights="int8"),
}
LEARNS = {name for name in CASES if not name.startswith("index")}


class Failure(NamedTuple):
    """An error that a kernel raises; with `launched`, after it has run."""

    error: Callable[[str], Exception]
    launched: bool = False


FAILURES = {
    "compiling": Failure(lambda name: RuntimeError(f"PassManager::run failed\n  of {name}")),
    "loading": Failure(lambda name: OutOfResources(262144, 232448, "shared memory")),
    "launching": Failure(
        lambda name: RuntimeError("Triton Error [CUDA]: invalid device function"), launched=True
    ),
}


@contextlib.contextmanager
def launched(
    fails: Callable[[str], bool] = lambda name: False, failure: str = "compiling"
) -> Iterator[set[str]]:
    """Collect the names of the kernels launched in the block; those for which `fails(name)` is true raise."""
    names: set[str] = set()
    kind: Any = InterpretedFunction if knobs.runtime.interpret else JITFunction
    usual = kind.run

    def run(self: Any, *args: Any, **named: Any) -> Any:
        fn = self.fn
        name = f"{fn.__module__.removeprefix('sparse_inductor.kernels.')}.{fn.__name__}"
        if fn.__module__.startswith("sparse_inductor"):
            names.add(name)
            if fails(name):
                if FAILURES[failure].launched:
                    usual(self, *args, **named)
                raise FAILURES[failure].error(name)
        return usual(self, *args, **named)

    kind.run = run
    try:
        yield names
    finally:
        kind.run = usual


def results(build: Build, device: torch.device, training: bool) -> list[Tensor]:
    """Build the program and return its outputs and, in training, gradients."""
    program, tensors = build(device)
    return step(program, [t.requires_grad_(training) for t in tensors], training)


def step(program: Callable[..., Any], leaves: list[Tensor], training: bool) -> list[Tensor]:
    """Run the program and return its outputs and, in training, the gradients of the leaves."""
    out = program(*leaves)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    if not training:
        return outs
    cotangents = [
        torch.linspace(-1, 1, o.numel(), device=o.device).view_as(o).to(o.dtype) for o in outs
    ]
    grads = torch.autograd.grad(outs, leaves, cotangents)
    return [*(o.detach() for o in outs), *grads]


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Operators on CPU tensors run kernels, as on a GPU, in Triton's interpreter."""
    if not knobs.runtime.interpret:
        pytest.skip("kernels run on the CPU under TRITON_INTERPRET=1 only")
    from sparse_inductor.kernels.relu_ffn import forward as blocks

    monkeypatch.setattr(layers, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(blocks, "FEW", 4)
    monkeypatch.setattr(blocks.decode, "TOKENS", 4)
    monkeypatch.setattr(blocks, "FEW_GATES", 0)
    with torch.library._scoped_library("sparse_inductor", "IMPL") as lib:
        for fn, operator in _dispatch._operators.items():
            lib.impl(operator.name, _dispatch.on_gpu(fn), "CPU", allow_override=True)
        yield torch.device("cpu")


def check_every_kernel(
    name: str, device: torch.device, training: bool, failure: str, tolerance: float
) -> None:
    case, training = CASES[name], training and name in LEARNS
    with launched() as kernels:
        want = results(case, device, training)
    assert not layers.fallbacks(), "all kernels work here"
    for kernel in sorted(kernels):
        forget_all()
        with (
            launched(kernel.__eq__, failure),
            Promises(),
            warnings.catch_warnings(record=True) as seen,
        ):
            warnings.simplefilter("always")
            got = results(case, device, training)
            again = results(case, device, training) if device.type == "cuda" else got
        said = [str(w.message) for w in seen if issubclass(w.category, KernelWarning)]
        assert len(said) == 1 and kernel in said[0], (kernel, said)
        found = {f.kernel for f in layers.fallbacks()}
        assert found == {kernel}
        assert kernel in str(sparse_inductor.report())
        alike(got, want, tolerance, kernel)
        alike(again, want, tolerance, kernel)


def alike(got: list[Tensor], want: list[Tensor], tolerance: float, what: str) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        if not b.is_floating_point():
            assert torch.equal(a, b), what
            continue
        finite = b.isfinite()
        assert torch.equal(a[~finite], b[~finite]), what
        a, b = a[finite].double(), b[finite].double()
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6, what


# One failure of each kind runs in `make test`; `test_no_kernel_compiles` covers the same branches as the others.
FAILING = [(n, training, f) for n in CASES for training in (False, True) for f in FAILURES]
QUICK = [("sparse_scores", False, f) for f in FAILURES if f != "compiling"]


@pytest.mark.parametrize(
    "name, training, failure", [c if c in QUICK else heavy(*c) for c in FAILING]
)
def test_every_kernel_that_fails(name, training, failure, cpu_as_gpu):
    check_every_kernel(name, cpu_as_gpu, training, failure, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_that_fails_on_a_gpu(name, training, failure):
    check_every_kernel(name, torch.device("cuda"), training, failure, 3e-2)


@pytest.mark.parametrize(
    "name", one_in(2, ("entmax_attention", "splade_head", "sparse_scores", "relu_ffn"))
)
def test_compiled_training_goes_on_where_kernels_fail(name, request):
    """This holds for programs compiled before a kernel fails, and for programs compiled after the fallback to ATen."""
    case, cpu = CASES[name], torch.device("cpu")
    want = results(case, cpu, training=True)
    request.getfixturevalue("cpu_as_gpu")
    request.getfixturevalue("as_on_a_gpu")

    def build(device: torch.device) -> tuple[Any, list[Tensor]]:
        program, tensors = case(device)
        return compile_without_codegen(program), tensors

    with launched(lambda name: True) as kernels, pytest.warns(KernelWarning) as seen:
        before = results(build, cpu, training=True)
    with launched() as later:
        behind = results(build, cpu, training=True)
    assert kernels and not later
    assert sum(issubclass(w.category, KernelWarning) for w in seen) == 1
    for got in (before, behind):
        alike(got, want, 1e-5, name)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen implementations do not read values of CPU tensors for decisions, as on a GPU, where reading would wait."""
    for module in ("ops._linear_max_aten", "ops._relu_ffn_aten", "aten.sparse_scores"):
        aten = importlib.import_module(f"sparse_inductor.{module}")
        monkeypatch.setattr(aten, "looks_at", lambda t: False)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_kernel_compiles(name, training, request):
    """Results are compared with the operators on CPU tensors, and with their fake kernels in shapes and strides."""
    case, cpu, training = CASES[name], torch.device("cpu"), training and name in LEARNS
    want = results(case, cpu, training)
    request.getfixturevalue("cpu_as_gpu")
    request.getfixturevalue("as_on_a_gpu")
    with launched(lambda name: True) as kernels, pytest.warns(KernelWarning) as seen, Promises():
        got = results(case, cpu, training)
    assert kernels and len(seen) == 1
    assert {fallback.kernel for fallback in layers.fallbacks()} == kernels
    alike(got, want, 1e-5, name)


@pytest.mark.parametrize("form", ["padded", "rows", "offsets"])
def test_scores_of_a_gpus_tensors_ask_nothing(form, as_on_a_gpu):
    """Entries out of range are ignored, as in the kernels, and so are entries before and after all documents."""
    V, L, N = 20, 4, 6
    query = torch.rand(3, V, generator=_generator())
    ids = torch.randint(-V, V + 1, (N, L), generator=_generator(1))
    values = torch.rand(N, L, generator=_generator(2))
    ids[2, 1], ids[4, 0] = V + 7, -V - 3
    term = torch.where(ids < 0, ids + V, ids)
    sound = (term >= 0) & (term < V)
    want = (query[:, term.clamp(0, V - 1)] * values * sound).sum(-1)
    rows = offsets = None
    if form == "rows":
        order = torch.randperm(N * L, generator=_generator(3))
        rows = torch.arange(N).repeat_interleave(L)[order]
        ids, values = ids.flatten()[order], values.flatten()[order]
        rows[rows == 5] = N + 2
        rows[rows == 1] -= N
        want[:, 5] = 0
    elif form == "offsets":
        ids, values = (torch.cat((t[3], t.flatten(), t[2])) for t in (ids, values))
        offsets = torch.arange(N + 1) * L + L
    docs = scoring.documents(ids, values, rows, offsets, N, V)
    found = torch.cat([scores for _, scores in scoring.blocks(query, docs)], 1)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(
        scoring._all_scores(torch.cat((query.t(), torch.zeros(1, 3))), docs, torch.float32), want
    )
    grad = torch.rand(3, N, generator=_generator(4))
    posts = scoring.transposed(docs, V)
    back = torch.cat([scores for _, scores in scoring.blocks(grad, posts)], 1)
    dense = torch.autograd.functional.vjp(
        lambda q: torch.cat([s for _, s in scoring.blocks(q, docs)], 1), query, grad
    )[1]
    torch.testing.assert_close(back, dense)


def test_the_report_names_a_kernel_that_fails(cpu_as_gpu):
    with launched(lambda name: True), pytest.warns(KernelWarning):
        results(CASES["entmax"], cpu_as_gpu, training=False)
    report = sparse_inductor.report()
    assert "slower, because a kernel fails" in str(report)
    assert "entmax.rows._forward_kernel fails on cpu with torch" in str(report)
    (fallback,) = json.loads(report.to_json())["fallbacks"]
    assert (fallback["operator"], fallback["layer"]) == ("entmax", "aten")
    assert "ATen instead" in fallback["cost"]


def test_doctor_says_what_computes_an_operator(cpu_as_gpu):
    probe = doctor._Probe("entmax", lambda d: sparse_inductor.ops.entmax(torch.rand(2, 9)), None)
    found = doctor._path(probe, cpu_as_gpu)
    assert found.status == "ok" and found.value.startswith("portable Triton kernels")
    forget_all()
    with launched(lambda name: True):
        found = doctor._path(probe, cpu_as_gpu)
    assert found.status == "warn" and found.value.startswith("ATen")
    assert "entmax.rows._forward_kernel fails" in found.advice


def test_doctor_knows_that_kernels_are_for_gpus():
    found = doctor._path(doctor._PROBES[0], torch.device("cpu"))
    assert found.status == "ok" and found.value.startswith("ATen")


@pytest.mark.gpu
@pytest.mark.parametrize("probe", doctor._PROBES, ids=lambda p: p.operator)
def test_doctor_compiles_a_kernel_of_each_family(probe):
    found = doctor._path(probe, torch.device("cuda"))
    assert found.status == "ok", found
    assert "kernels" in found.value


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["splade_head", "relu_ffn", "entmax", "entmax_attention"])
def test_compiled_programs_whose_kernels_fail(name, training):
    """Inductor would launch entmax's kernels itself; if they fail, it keeps the operator, which has other layers."""
    cuda = torch.device("cuda")
    want = results(CASES[name], cuda, training)

    def build(device: torch.device) -> tuple[Any, list[Tensor]]:
        program, tensors = CASES[name](device)
        return torch.compile(program), tensors

    forget_all()
    with launched(lambda name: True) as kernels, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = results(build, cuda, training)
    said = [w for w in seen if issubclass(w.category, KernelWarning)]
    assert kernels and len(said) == 1
    alike(got, want, 3e-2, name)


def test_kernels_that_cannot_be_imported_are_named(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    operators = {pattern.op for pattern in registered().values()}
    # The second operators of sparse_product, topk_encode and sparse_decode.
    seconds = "sparse_gradient_linear", "batch_topk_encode", "batch_topk_decode"
    operators |= {f"sparse_inductor::{name}" for name in seconds}
    assert {op.partition("::")[2] for op in operators} == {*facts.OPERATORS}
    assert not any(ability.unimportable(op, cuda) for op in operators)
    monkeypatch.setitem(facts.OPERATORS, "entmax", facts.Facts(("no_such_kernel",)))
    assert ability.unimportable("sparse_inductor::entmax", cpu) == ""
    assert ability.unimportable("other::entmax", cuda) == ""
    found = ability.unimportable("sparse_inductor::entmax", cuda)
    assert found.startswith("its kernels cannot be imported (no_such_kernel: ModuleNotFoundError")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if name in LEARNS])
def test_cuda_graphs_of_programs_whose_kernels_fail(name):
    """The ATen implementations never wait for the GPU, so they can be captured."""
    cuda = torch.device("cuda")
    want = results(CASES[name], cuda, training=True)
    forget_all()
    with launched(lambda name: True), warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)
        program, tensors = CASES[name](cuda)
        leaves = [t.requires_grad_() for t in tensors]
        graph, got = in_a_graph(lambda: step(program, leaves, training=True), before=2)
    assert {f.layer for f in layers.fallbacks()} == {Layer.ATEN}
    graph.replay()
    torch.cuda.synchronize()
    alike(got, want, 3e-2, name)
