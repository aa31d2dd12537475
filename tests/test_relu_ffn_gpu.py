"""relu_ffn on a GPU: accuracy against the dense block, gradients, repeatability, CUDA graphs with changing density."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_fw_bw_and_get_code

import sparse_inductor
from support import in_a_graph

pytestmark = pytest.mark.gpu
relu_ffn = sparse_inductor.ops.relu_ffn


def make(M, K=512, N=1408, D=512, share=0.02, dtype=torch.bfloat16, gated=True):
    """Return tokens and weights; the last feature shifts the gates so that about `share` of them are positive."""
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=dtype)
    x = draw(M, K)
    x[:, -1] = 1
    gate = draw(N, K) / K**0.5
    gate[:, -1] = -torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share)).item()
    return x, {
        "gate": gate,
        "down": draw(D, N) / 4,
        "up": draw(N, K) / K**0.5 if gated else None,
    }


def dense(x, w):
    h = F.relu(F.linear(x, w["gate"]))
    if w["up"] is not None:
        h = h * F.linear(x, w["up"])
    return F.linear(h, w["down"])


def error(got, truth):
    return ((got.double() - truth).norm() / truth.norm().clamp(min=1e-9)).item()


def double(t):
    return None if t is None else t.detach().double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("M", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
@pytest.mark.parametrize("gated", [True, False])
def test_as_close_to_the_truth_as_the_dense_block(dtype, M, share, gated):
    x, w = make(M, share=share, dtype=dtype, gated=gated)
    truth = dense(x.double(), {k: double(v) for k, v in w.items()})
    ours, theirs = error(relu_ffn(x, **w), truth), error(dense(x, w), truth)
    # With very few active neurons the two errors are those of single roundings; fp32 sums have different orders.
    assert ours <= (1.2 if M * share > 1 else 2) * theirs + 3e-6


@pytest.mark.usefixtures("small_blocks_are_packed")
@pytest.mark.parametrize("M", [700, 2304])
@pytest.mark.parametrize("share", [0.005, 0.1, 0.5])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients(share, gated, M):
    x, w = make(M, share=share, gated=gated)
    dy = torch.randn(M, 512, device="cuda", dtype=x.dtype)
    leaves = [t for t in (x, *w.values()) if t is not None]
    for t in leaves:
        t.requires_grad_()
    got = torch.autograd.grad(relu_ffn(x, **w), leaves, dy)
    again = torch.autograd.grad(relu_ffn(x, **w), leaves, dy)
    theirs = torch.autograd.grad(dense(x, w), leaves, dy)
    wx = double(x).requires_grad_()
    ws = {k: None if v is None else double(v).requires_grad_() for k, v in w.items()}
    truth = torch.autograd.grad(
        dense(wx, ws), [wx, *(t for t in ws.values() if t is not None)], dy.double()
    )
    for g, a, e, t in zip(got, again, theirs, truth, strict=True):
        assert torch.equal(g, a), "not the same bits twice"
        assert error(g, t) <= 1.5 * error(e, t) + 1e-6


class Adapted(nn.Module):
    """A gated block with an adapter (LoRA) at each layer."""

    def __init__(self, K, N, rank=16):
        super().__init__()
        sizes = {"gate": (K, N), "up": (K, N), "down": (N, K)}

        def linears(size):
            return nn.ModuleDict({k: nn.Linear(*size(v), bias=False) for k, v in sizes.items()})

        self.layers, self.a, self.b = (
            linears(size) for size in (lambda v: v, lambda v: (v[0], rank), lambda v: (rank, v[1]))
        )

    def _layer(self, name, x):
        return self.layers[name](x) + self.b[name](self.a[name](x)) * 2.0

    def forward(self, x):
        h = F.relu(self._layer("gate", x) - 1) * self._layer("up", x)
        return x + self._layer("down", h)


def popular_block(M, gated, bias=True):
    """Return a block in which 1 % of the entries are active, most of them in a few neurons."""
    x, w = make(M, N=2048, gated=gated, share=0.01)
    w["gate"][:, -1] = 0.8 * torch.randn(2048, device="cuda") - 2.98
    names = ["gate_bias", "up_bias"] if gated else ["gate_bias"]
    for name in names if bias else []:
        w[name] = torch.randn_like(w["gate"][:, 0]) / 100
    return x, w


@pytest.mark.parametrize("popular", [128, 512, 1024])
@pytest.mark.parametrize(("M", "gated"), [(8192, True), (5001, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_popular_neurons_apart(M, gated, popular, dtype):
    x, w = popular_block(M, gated)
    dy = torch.randn(M, 512, device="cuda", dtype=torch.float64)

    def step(of, dtype, **options):
        given = {k: None if v is None else v.to(dtype).requires_grad_() for k, v in w.items()}
        leaves = [x.to(dtype).requires_grad_(), *(v for v in given.values() if v is not None)]
        if of is relu_ffn:
            y = relu_ffn(leaves[0], **given, **options)
        else:
            h = F.relu(F.linear(leaves[0], given["gate"], given["gate_bias"]))
            if gated:
                h = h * F.linear(leaves[0], given["up"], given["up_bias"])
            y = F.linear(h, given["down"])
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    truth, theirs = step(dense, torch.float64), step(dense, dtype)
    ours = step(relu_ffn, dtype, popular=popular)
    for got, as_written, want in zip(ours, theirs, truth, strict=True):
        assert error(got, want) <= 1.1 * error(as_written, want) + 1e-6
    assert all(map(torch.equal, ours, step(relu_ffn, dtype, popular=popular)))
    with torch.no_grad():
        given = {k: None if v is None else v.to(dtype) for k, v in w.items()}
        assert torch.equal(relu_ffn(x.to(dtype), **given, popular=popular), ours[0])


@pytest.mark.parametrize("popular", [0, 512])
def test_a_graph_follows_who_is_popular(popular):
    x, w = popular_block(4096, True, bias=False)
    with torch.no_grad():
        for _ in range(3):
            relu_ffn(x, **w, popular=popular)
        graph, y = in_a_graph(lambda: relu_ffn(x, **w, popular=popular))
        for order in (torch.arange(2048), torch.arange(2048).flip(0), torch.randperm(2048)):
            w["gate"][:, -1] = w["gate"][order.cuda(), -1]
            graph.replay()
            truth = dense(x.double(), {k: double(v) for k, v in w.items()})
            assert error(y, truth) <= 1.1 * error(dense(x, w), truth)
        w["gate"][:, -1] = 1.0  # now the activations are dense
        graph.replay()
        truth = dense(x.double(), {k: double(v) for k, v in w.items()})
        assert error(y, truth) <= 1.1 * error(dense(x, w), truth)


@pytest.mark.usefixtures("small_blocks_are_packed")
@pytest.mark.parametrize(("tokens", "K", "N"), [(300, 128, 704), (8192, 512, 1408)])
def test_adapters_compiled(tokens, K, N):
    torch.manual_seed(0)
    block = Adapted(K, N).cuda().bfloat16()
    x = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16)
    sparse_inductor.enable(only="relu_ffn")
    with torch.no_grad():
        ours, theirs = torch.compile(block)(x), block(x)
        assert len(sparse_inductor.report().rewrites) == 1
        truth = block.double()(x.double())
    assert error(ours, truth) <= 1.1 * error(theirs, truth)


# The down weights are transposed during the gate product (1700, 4100), or later if rows are sparse (2304).
@pytest.mark.usefixtures("small_blocks_are_packed")
@pytest.mark.parametrize("M", [300, 1700, 2304, 4100])
def test_a_graph_follows_the_density(M):
    """One captured graph is replayed on sparse tokens, on dense ones, on a mixture, and on sparse ones again."""
    x, w = make(M, share=0.01)
    with torch.no_grad():
        relu_ffn(x, **w)
        graph, y = in_a_graph(lambda: relu_ffn(x, **w))
        for bias in (1.0, -1.0, 0.3, 1.0):
            x[:, -1] = bias
            if bias == 0.3:
                x[::7, -1] = -2.0
            graph.replay()
            assert error(y, dense(x.double(), {k: double(v) for k, v in w.items()})) < 1e-2


def test_unusual_strides_and_shapes():
    x, w = make(77, K=200, N=333, D=75, share=0.1)
    truth = dense(x.double(), {k: double(v) for k, v in w.items()})
    transposed = {k: None if v is None else v.t().contiguous().t() for k, v in w.items()}
    assert error(relu_ffn(x.t().contiguous().t(), **transposed), truth) < 1e-2


class Block(nn.Module):
    def __init__(self, K, N):
        super().__init__()
        self.gate, self.up = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x):
        h = F.relu(self.gate(x)) * self.up(x)
        return x + self.down(h), h.abs().mean()


@pytest.mark.usefixtures("small_blocks_are_packed")
@pytest.mark.parametrize("texts", [4, 17])
def test_training_step_compiled(texts):
    """The block has a statistic. Inductor computes 260 tokens with a dense block; 1,105 tokens are packed."""
    torch.manual_seed(0)
    block = Block(256, 704).cuda()
    x = torch.randn(texts, 65, 256, device="cuda")
    sparse_inductor.enable(only="relu_ffn")
    program = torch.compile(block)
    losses = []
    for run in (program, block):
        block.zero_grad()
        y, l1 = run(x)
        (y.square().mean() + 0.1 * l1).backward()
        losses.append([p.grad.clone() for p in block.parameters()])
    assert len(sparse_inductor.report().rewrites) == 1
    for ours, theirs in zip(*losses, strict=True):
        assert error(ours, theirs.double()) < 1e-2


def test_a_graph_of_512_tokens_trains_the_block_as_it_was_written():
    def written(
        x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        return (torch.relu(x @ gate.t()) * (x @ up.t())) @ down.t()

    def block(
        x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        op = torch.ops.sparse_inductor.relu_ffn
        return op(x, gate, None, up, None, down, None, None, None, "relu", "", False, False)[0]

    sizes = (512, 64), (256, 64), (256, 64), (64, 256)
    mine = [torch.randn(*size, device="cuda").requires_grad_() for size in sizes]
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    values, codes = run_fw_bw_and_get_code(lambda: torch.compile(block, dynamic=False)(*mine))
    wanted = written(*theirs)
    wanted.sum().backward()
    torch.testing.assert_close(values, wanted)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-3)
    for call in ("sparse_inductor_site(", "torch.ops.sparse_inductor.relu_ffn"):
        assert not any(f"= {call}" in code for code in codes)
