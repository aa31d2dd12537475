"""Projections that a training step of dense rows keeps for its backward: where they lie, that they are used, and that
the numbers are those without."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import sparse_inductor
from sparse_inductor.epilogue.cut import cut
from sparse_inductor.epilogue.steps import parse
from sparse_inductor.kernels import relu_ffn as kernel
from sparse_inductor.kernels import relu_ffn_backward as backward_kernel
from sparse_inductor.kernels import relu_ffn_kept as kept
from sparse_inductor.ops import _relu_ffn_aten as aten
from sparse_inductor.ops.relu_ffn import capacity

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAP = 16


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("M", [1, 33, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_room_behind_counts(dtype, M, gated):
    x = torch.empty(M, 24, dtype=dtype)
    count = kept.counts(x, 40, gated)
    count.fill_(7)
    room = kept.of(count, dtype, 40, gated)
    assert count.shape == (M,) and room.gate.dtype == dtype and (room.up is None) == (not gated)
    parts = [room.whole, room.gate] + ([room.up] if gated else [])
    for i, part in enumerate(parts):
        assert i == 0 or part.shape == (M + 64, 40)
        part.fill_(i + 1)
    assert count.eq(7).all() and all((t == i + 1).all() for i, t in enumerate(parts))
    rows = room.rows(slice(0, M))
    assert rows.gate.shape == (M + 64, 40) and rows.gate.data_ptr() == room.gate.data_ptr()


def test_only_counts_that_were_made_so_have_room():
    x = torch.empty(100, 24)
    count = kept.counts(x, 40, True)
    for other in (count.clone(), torch.empty(100, dtype=torch.int32), count[1:], count[::2]):
        assert kept.of(other, x.dtype, 40, True) is None
    assert kept.of(count, x.dtype, 40, False) is None
    assert kept.of(count, x.dtype, 48, True) is None


def dense_step(gated, bias):
    """Tokens, a block, what a forward packs of them, and a gradient: no row is packed."""
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, device=DEVICE)
    M, K, N, D = 33, 24, 40, 16
    b = aten.Block(
        draw(N, K) / K**0.5, draw(N) if bias else None,
        draw(N, K) / K**0.5 if gated else None, draw(N) if gated and bias else None,
        draw(D, N) / 4, None, parse("relu"), (), cut(parse("relu")),
    )  # fmt: skip
    x = draw(M, K)
    packed = aten.Packed(
        torch.full((M,), CAP + 1, dtype=torch.int32, device=DEVICE),
        torch.empty(M, CAP, dtype=torch.int16, device=DEVICE),
        x.new_empty(M, CAP),
        x.new_empty(M if gated else 0, CAP),
    )
    return x, b, packed, draw(M, D)


def with_room(x, b, packed):
    count = kept.counts(x, len(b.gate), b.up is not None)
    count.copy_(packed.count)
    return dataclasses.replace(packed, count=count)


@pytest.mark.heavy
@pytest.mark.parametrize(("gated", "bias"), [(True, True), (False, False)])
def test_backward_reads_what_is_kept(gated, bias, monkeypatch):
    monkeypatch.setattr(kernel, "FEW", 0)
    x, b, packed, dy = dense_step(gated, bias)
    needs = [True] * 7

    def gradients(packed):
        found = backward_kernel.backward(dy, None, x, b, packed, needs)
        return [g for g in found if g is not None]

    want = gradients(packed)
    truth = [g for g in aten.backward(dy, None, x, b, packed, needs) if g is not None]
    for g, t in zip(want, truth, strict=True):
        torch.testing.assert_close(g, t, rtol=1e-3, atol=1e-3)

    spare = with_room(x, b, packed)
    room = kept.of(spare.count, x.dtype, len(b.gate), gated)
    M = len(x)

    def keep(x):
        room.whole.fill_(1)
        room.gate[:M] = F.linear(x, b.gate, b.gate_bias)
        if gated:
            room.up[:M] = F.linear(x, b.up, b.up_bias)

    keep(x)
    for g, w in zip(gradients(spare), want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert room.whole.item() == 0, "gradients are where the projections were"
    room.gate.fill_(torch.nan)
    for g, w in zip(gradients(spare), want, strict=True):  # made again
        assert torch.equal(g, w)
    keep(-x)
    assert not torch.allclose(gradients(spare)[0], want[0]), "what is kept is not read"
    # One packed row, and all others are made again.
    spare.count[3] = 0
    packed.count[3] = 0
    keep(-x)
    for g, w in zip(gradients(spare), gradients(packed), strict=True):
        assert torch.equal(g, w)


# --- The whole operator, on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def nothing_seen():
    kept.forget()
    yield
    kept.forget()


def weights(share, gated=True, N=1408, K=512, D=384):
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    gate = draw(N, K) / K**0.5
    gate[:, -1] = -torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share)).item()
    leaves = {"gate": gate, "down": draw(D, N) / 4}
    if gated:
        leaves["up"] = draw(N, K) / K**0.5
    return {name: w.requires_grad_() for name, w in leaves.items()}


def tokens(M, K=512):
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    x[:, -1] = 1
    return x.requires_grad_()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu", "nothing_seen")
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("M", [1500, 4097])
def test_the_same_bits_with_and_without_room(M, gated, stats):
    w = weights(0.5, gated)
    x = tokens(M)
    assert kernel.hopper.applies(x, w["gate"])
    leaves = [x, *w.values()]
    dy = torch.randn(M, 384, device="cuda", dtype=torch.bfloat16)

    def step():
        out = sparse_inductor.ops.relu_ffn(x, **w, return_stats=stats)
        y, more = (out[0], out[1].sum()) if stats else (out, 0)
        loss = (y.float() * dy).sum() + more
        found = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2)]
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b), "a second backward differs"
        return [y, *found[0]]

    cap = capacity(len(w["gate"]))
    given = (x.detach(), w["gate"], None, w.get("up"), None, w["down"], None, "relu", "", stats)
    steps = []
    for _ in range(4):
        assert kept.expected(w["gate"], cap) == bool(steps)
        with torch.no_grad():
            count = torch.ops.sparse_inductor.relu_ffn_train(*given)[2]
        room = kept.of(count, x.dtype, len(w["gate"]), gated)
        assert (room is not None and room.whole.item() == 1) == bool(steps)
        steps.append(step())
        torch.cuda.synchronize()
    for other in steps[1:]:
        for a, b in zip(steps[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu", "nothing_seen")
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_become_sparse_beside_the_room(compiled):
    """A CUDA graph that was captured with room, and is replayed with rows that are packed."""
    M = 2000
    w = weights(0.5)
    x = tokens(M)
    assert kernel.hopper.applies(x, w["gate"])
    names = ["gate", "down", "up"]

    def block(x):
        h = F.relu(F.linear(x, w["gate"])) * F.linear(x, w["up"])
        return F.linear(h, w["down"])

    call = lambda x: sparse_inductor.ops.relu_ffn(x, **w)
    if compiled:
        sparse_inductor.enable(only="relu_ffn")
        call = torch.compile(block)
    try:
        leaves = [x, *(w[n] for n in names)]
        step = lambda: torch.autograd.grad(call(x).float().square().sum(), leaves)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
                torch.cuda.synchronize()
        torch.cuda.current_stream().wait_stream(stream)
        assert kept.expected(w["gate"], capacity(len(w["gate"])))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
    finally:
        sparse_inductor.disable()
    for share in (0.5, 0.02, 0.08, 0.5):
        with torch.no_grad():
            for name, t in weights(share).items():
                w[name].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        theirs = torch.autograd.grad(block(x).float().square().sum(), leaves)
        xs, ws = x.detach().double().requires_grad_(), {}
        for n in names:
            ws[n] = w[n].detach().double().requires_grad_()
        h = F.relu(F.linear(xs, ws["gate"])) * F.linear(xs, ws["up"])
        loss = F.linear(h, ws["down"]).square().sum()
        truth = torch.autograd.grad(loss, [xs, *(ws[n] for n in names)])
        for g, e, t in zip(got, theirs, truth, strict=True):
            error = lambda a, t=t: ((a.double() - t).norm() / t.norm()).item()
            assert error(g) <= 1.5 * error(e) + 1e-6, share


class Block(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        for name, t in w.items():
            self.register_parameter(name, torch.nn.Parameter(t.detach().clone()))

    def forward(self, x):
        h = F.relu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return F.linear(h, self.down)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu", "nothing_seen")
def test_graphs_that_inductor_captures(monkeypatch):
    """mode="reduce-overhead": forward and backward are graphs of their own, whose memory is one pool, and room is in it
    where the run before the capture had dense rows."""
    M = 1600
    dense, sparse = weights(0.5, D=512), weights(0.02, D=512)
    assert kernel.hopper.applies(tokens(M), dense["gate"])
    model = torch.nn.Sequential(Block(dense), Block(dense))
    counts, captured = kept.counts, []

    def counted(*args):
        captured.append(torch.cuda.is_current_stream_capturing())
        return counts(*args)

    monkeypatch.setattr(kept, "counts", counted)
    with sparse_inductor.enabled(only="relu_ffn"):
        compiled = torch.compile(model, mode="reduce-overhead")
        for seed in range(8):
            torch.manual_seed(seed)
            x = tokens(M)
            torch.compiler.cudagraph_mark_step_begin()
            leaves = [x, *model.parameters()]
            y = compiled(x)
            got = [g.clone() for g in torch.autograd.grad(y.float().square().sum(), leaves)]
            want = torch.autograd.grad(model(x).float().square().sum(), leaves)
            for g, e in zip(got, want, strict=True):
                assert ((g.double() - e.double()).norm() / e.double().norm()).item() < 3e-2
            if seed == 4:
                with torch.no_grad():
                    for block in model:
                        for name, t in sparse.items():
                            getattr(block, name).copy_(t)
    assert any(captured)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu", "nothing_seen")
def test_copies_on_the_cpu_have_no_room():
    """`save_on_cpu` brings back counts without what was behind them: it is made again."""
    w = weights(0.5)
    x = tokens(1500)
    assert kernel.hopper.applies(x, w["gate"])
    leaves = [x, *w.values()]
    found = []
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            y = sparse_inductor.ops.relu_ffn(x, **w)
        found.append(torch.autograd.grad(y.float().square().sum(), leaves))
        torch.cuda.synchronize()
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)
