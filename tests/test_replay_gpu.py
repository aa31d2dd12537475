"""Replay on a GPU: a replayed call of each operator has the bits of a planned one, in eager code and in CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from sparse_inductor import SparseIndex, ops
from sparse_inductor.kernels.common import ahead, launch, replay
from sparse_inductor.kernels.common.ahead import compile_ahead
from support import in_a_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("small_blocks_are_packed", "nothing_recorded"),
]

Made = tuple[Callable[..., Tensor], Callable[[], list[Tensor | None]]]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def splade(B: int, S: int, V: int, dtype: torch.dtype = torch.bfloat16) -> Made:
    def inputs() -> list[Tensor | None]:
        mask = torch.rand(B, S, device="cuda") < 0.8
        return [draw(B, S, 64, dtype=dtype), draw(V, 64, dtype=dtype), draw(V, dtype=dtype), mask]

    return ops.splade_head, inputs


def ffn(tokens: int, gated: bool = True, dtype: torch.dtype = torch.bfloat16) -> Made:
    def inputs() -> list[Tensor | None]:
        up = draw(1024, 256, dtype=dtype) if gated else None
        gate = draw(1024, 256, dtype=dtype)
        return [draw(tokens, 256, dtype=dtype), gate, draw(256, 1024, dtype=dtype), up]

    return ops.relu_ffn, inputs


def ffn_with_residual(tokens: int) -> Made:
    _, inputs = ffn(tokens)

    def added(x: Tensor, gate: Tensor, down: Tensor, up: Tensor, residual: Tensor) -> Tensor:
        return ops.relu_ffn(x, gate, down, up, residual=residual)

    return added, lambda: [*inputs(), draw(tokens, 256)]


def attention(heads: int, keys: int, causal: bool) -> Made:
    def inputs() -> list[Tensor | None]:
        return [4 * draw(2, heads, keys, 64), draw(2, 2, keys, 64), draw(2, 2, keys, 64)]

    return lambda q, k, v: ops.entmax_attention(q, k, v, causal=causal), inputs


def rows(*shape: int, dim: int) -> Made:
    return lambda x: ops.entmax(x, 1.5, dim), lambda: [draw(*shape, dtype=torch.float32)]


def scoring(k: int | None, count: int = 300) -> Made:
    @functools.cache
    def documents() -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 500, (count, 16), device="cuda")
        return ids, draw(count, 16, dtype=torch.float32)

    def found(query: Tensor) -> Tensor:
        got = ops.sparse_scores(query, *documents(), k=k)
        return got if k is None else got[0]

    return found, lambda: [draw(4, 500, dtype=torch.float32)]


CASES = {
    "scores": scoring(None),
    "best scores": scoring(10),
    "best of many": scoring(10, 9000),
    "head": splade(4, 32, 1000),
    "head, 128 positions": splade(4, 128, 1000),
    "head, several parts": splade(2, 1100, 3000),
    "head in fp32": splade(3, 40, 500, torch.float32),
    "block of a token": ffn(1),
    "block of a token, residual": ffn_with_residual(1),
    "block of a few": ffn(16),
    "block of a few, residual": ffn_with_residual(16),
    "block of 300, not gated": ffn(300, gated=False),
    "block of 5000": ffn(5000),
    "block in fp32": ffn(16, dtype=torch.float32),
    "attention": attention(2, 256, True),
    "attention, long": attention(4, 2048, True),
    "attention, full": attention(2, 700, False),
    "rows": rows(64, 500, dim=-1),
    "columns": rows(8, 300, 40, dim=1),
}
# These calls are limited by the host, so they must be replayed; the small blocks in inference only.
REPLAYED = {
    "scores", "best scores", "best of many", "head", "head, 128 positions", "head in fp32", "block of a token",
    "block of a token, residual", "block of a few", "block of a few, residual", "block of 5000", "attention", "rows",
}  # fmt: skip


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_replayed_calls_give_the_bits_of_planned_ones(name, training):
    fn, inputs = CASES[name]
    torch.manual_seed(0)
    sets = [inputs() for _ in range(4)]

    def call(given: list[Tensor | None]) -> list[Tensor]:
        leaves = [
            t.requires_grad_(training) if t is not None and t.is_floating_point() else t
            for t in given
        ]
        out = fn(*leaves)
        if not training:
            return bits([out])
        learnt = [t for t in leaves if t is not None and t.requires_grad]
        cotangent = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
        return bits([out, *torch.autograd.grad(out, learnt, cotangent)])

    replayed = [call(given) for given in sets]
    plans = [type(p) for p in replay._plans.values()]
    for given, got in zip(sets, replayed):
        replay.forget()
        torch.testing.assert_close(got, call(given), rtol=0, atol=0, equal_nan=True)
    if name in REPLAYED and not training:
        assert plans == [replay.Plan]
    elif name == "block of 5000":
        assert plans == [replay.Plan] * 2
    elif name in REPLAYED and not name.startswith("block"):
        assert replay.Plan in plans


@pytest.mark.parametrize("batch, k", [(1, 1000), (1, 10), (300, 40)])
def test_searches(batch, k):
    """The threshold of the last search does not prove one of its answers."""
    g = torch.Generator(device="cuda").manual_seed(0)
    dense = torch.rand(20_000, 300, generator=g, device="cuda")
    dense *= torch.rand(20_000, 300, generator=g, device="cuda") < 0.1
    index = SparseIndex(300).to("cuda")
    index.append(dense.to_sparse_csr())
    sets = [torch.rand(batch, 300, generator=g, device="cuda") for _ in range(4)]
    sets = [q * (torch.rand(batch, 300, generator=g, device="cuda") < 0.1) for q in sets]
    sets[3][0] = 0
    sets[3][0, 5] = 1e-30
    replayed = [bits([*index.search(q, k)]) for q in sets]
    assert [type(p) for p in replay._plans.values()] == [replay.Plan]
    for q, got in zip(sets, replayed):
        replay.forget()
        assert all(map(torch.equal, got, index.search(q, k)))


@pytest.mark.parametrize("name", ["head", "block of 5000"])
def test_in_a_cuda_graph(name):
    fn, inputs = CASES[name]
    held = [t.clone() for t in inputs()]
    graph, out = in_a_graph(lambda: fn(*held), before=3)
    for _ in range(2):
        given = inputs()
        for mine, theirs in zip(held, given):
            mine.copy_(theirs)
        graph.replay()
        replay.forget()
        assert torch.equal(out, fn(*given))


@pytest.mark.parametrize("name", ["block of a few", "block of 5000"])
def test_on_another_stream(name):
    """A call recorded on one stream is replayed on the caller's current stream."""
    fn, inputs = CASES[name]
    sets = [inputs() for _ in range(6)]
    wanted = []
    for given in sets:
        replay.forget()
        wanted.append(fn(*given))
    for given in sets[:3]:
        fn(*given)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    got = []
    for _ in range(20):
        for i, given in enumerate(sets):
            with torch.cuda.stream(streams[i % 2]):
                got.append((i, fn(*given)))
    torch.cuda.synchronize()
    for i, y in got:
        assert torch.equal(y, wanted[i])


@pytest.mark.parametrize("name", ["block of 5000", "attention, long", "head", "best scores"])
def test_kernels_are_compiled_ahead_of_the_first_call(name, monkeypatch):
    """All kernels that the call launches are compiled, and none of them has run by then."""
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_seen", {})
    given = CASES[name][1]()
    seen: list[set] = []

    def first(fn: Callable[..., object], args: list) -> None:
        compile_ahead(fn, args)
        seen.append(set(launch._compiled))

    monkeypatch.setattr(replay, "compile_ahead", first)
    before = bits(given)
    out = CASES[name][0](*given)
    assert len(seen) == 1 and len(seen[0]) > 1
    assert set(launch._compiled) == seen[0]
    assert all(map(torch.equal, given, before))
    monkeypatch.setattr(replay, "compile_ahead", lambda fn, args: None)
    replay.forget()
    assert torch.equal(CASES[name][0](*given), out)


@pytest.mark.parametrize("name", ["attention, long", "head"])
def test_kernels_are_compiled_while_a_graph_is_traced(name, monkeypatch):
    """The call uses kernels that the shape propagation with fake tensors began to compile."""
    for kept in ("_compiled", "_seen", "_under_way"):
        monkeypatch.setattr(launch, kept, {})
    monkeypatch.setattr(ahead, "_begun", set())
    fn, inputs = CASES[name]
    given = inputs()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fn(*[t if t is None else mode.from_tensor(t) for t in given])
    begun = {**launch._under_way}
    assert not any(job.exception() for job in begun.values())
    fn(*given)
    assert len(launch._compiled.keys() & begun.keys()) > 1


def test_a_call_that_asks_the_gpu_is_gone_through_up_to_there():
    done = []

    def asks(x: Tensor) -> Tensor:
        y = x * 2
        done.append(y.data_ptr() != x.data_ptr())
        if y.sum() > 0:
            done.append("asked")
        return y

    compile_ahead(asks, [torch.ones(3, device="cuda")])
    assert done == [True]


@pytest.mark.multigpu
def test_on_the_device_of_the_tensors():
    fn, inputs = CASES["head"]
    for _ in range(4):
        given = inputs()
        torch.testing.assert_close(fn(*(t.to("cuda:1") for t in given)).cpu(), fn(*given).cpu())
    assert torch.cuda.current_device() == 0
