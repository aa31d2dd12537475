"""The SPLADE head on a GPU, end to end: rewritten by torch.compile, run by the kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparse_inductor
from sparse_inductor.epilogue.steps import parse, run
from sparse_inductor.ops import splade_head
from support import relative

pytestmark = pytest.mark.gpu


class Head(nn.Module):
    """SPLADE max pooling as naver/splade writes it."""

    def __init__(self, width: int, vocabulary: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(width, vocabulary, device="cuda", dtype=dtype)

    def forward(self, hidden, mask):
        logits = self.decoder(hidden)
        return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1).values


def _inputs(B, S, D, dtype=torch.bfloat16):
    torch.manual_seed(1)
    hidden = torch.randn(B, S, D, device="cuda").to(dtype).requires_grad_()
    lengths = torch.randint(0, S + 1, (B,), device="cuda")
    lengths[0] = 0
    mask = (torch.arange(S, device="cuda") < lengths[:, None]).long()
    return hidden, mask


@pytest.fixture
def report():
    sparse_inductor.enable()
    return sparse_inductor.report()


def _gradients(module, hidden, mask, cotangent):
    out = module(hidden, mask)
    leaves = [hidden, *module.parameters()]
    return out, torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(5, 70, 64, 1001), (3, 257, 48, 513), (2, 33, 31, 70), (3, 70, 2112, 257)]
)
def test_training_is_rewritten_and_as_accurate_as_eager(dtype, shape, report):
    B, S, D, V = shape
    module = Head(D, V, dtype)
    hidden, mask = _inputs(B, S, D, dtype)
    cotangent = torch.randn(B, V, device="cuda")
    truth_module = copy.deepcopy(module).double()
    truth = _gradients(
        truth_module, hidden.detach().double().requires_grad_(), mask, cotangent.double()
    )
    eager = _gradients(module, hidden, mask, cotangent)
    ours = _gradients(torch.compile(module), hidden, mask, cotangent)
    assert [r.pattern for r in report.rewrites] == ["splade_head"]
    slack = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert relative(ours[0], truth[0]) <= relative(eager[0], truth[0]) + slack
    for name, g, e, t in zip(
        ("hidden", "weight", "bias"), ours[1], eager[1], truth[1], strict=True
    ):
        assert g.dtype == e.dtype
        assert relative(g, t) <= relative(e, t) + slack, name


def test_inference_under_cuda_graphs(report):
    module = Head(64, 900, torch.bfloat16).requires_grad_(False)
    compiled = torch.compile(module, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):  # warm-up, record, replay with other inputs
            torch.manual_seed(seed)
            hidden, mask = _inputs(4, 50, 64)
            hidden = hidden.detach() * (seed + 1)
            got = compiled(hidden, mask).clone()
            assert relative(got, copy.deepcopy(module).double()(hidden.double(), mask)) < 1e-2
    assert len(report.rewrites) >= 1


def test_autocast(report):
    module = Head(64, 777, torch.float32)
    hidden, mask = _inputs(4, 50, 64, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got, eager = torch.compile(module)(hidden, mask), module(hidden, mask)
    truth = copy.deepcopy(module).double()(hidden.double(), mask)
    assert got.dtype == eager.dtype
    assert relative(got, truth) <= relative(eager, truth) + 1e-2
    assert len(report.rewrites) == 1


def test_dynamic_shapes(report):
    module = Head(64, 600, torch.bfloat16).requires_grad_(False)
    compiled = torch.compile(module, dynamic=True)
    with torch.no_grad():
        for B, S in ((3, 40), (5, 129), (2, 7)):
            hidden, mask = _inputs(B, S, 64)
            truth = copy.deepcopy(module).double()(hidden.double(), mask)
            assert relative(compiled(hidden, mask), truth) < 1e-2


@pytest.mark.parametrize(
    "steps",
    [
        "relu | log1p | row_mul(0)",
        "row_mul(0) | relu | log1p",
        "relu | log1p | row_where(0, -inf)",
        "row_add(0) | relu | log1p",
        "mul(0.03) | tanh | mul(30.0) | row_add(0) | relu | sqrt",
        "relu | row_mul(0) | log1p | row_mul(0)",
    ],
)
@pytest.mark.parametrize("kind", ["binary", "real", "one sequence real"])
def test_any_mask_values(steps, kind):
    B, S, D, V = 4, 150, 64, 700
    hidden, mask = _inputs(B, S, D)
    row = mask.double()
    if kind != "binary":
        row[1 if kind == "one sequence real" else slice(None)] = (
            torch.rand(S, device="cuda").double() * 1.5
        )
    weight = torch.randn(V, D, device="cuda").to(torch.bfloat16)
    bias = torch.randn(V, device="cuda").to(torch.bfloat16)
    logits = hidden.detach().double() @ weight.double().t() + bias.double()
    per_token = run(parse(steps), logits, [row])
    values, positions = splade_head(
        hidden, weight, bias, rows=(row,), steps=steps, out_dtype=torch.float32, return_argmax=True
    )
    fast = splade_head(hidden, weight, bias, rows=(row,), steps=steps, out_dtype=torch.float32)
    truth = per_token.amax(1)
    torch.testing.assert_close(values.double(), truth, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fast.double(), truth, rtol=1e-3, atol=1e-3)
    chosen = per_token.gather(1, positions[:, None]).squeeze(1)
    torch.testing.assert_close(chosen, truth, rtol=1e-3, atol=1e-3)


def test_nan_in_the_padding_stays_there():
    hidden, mask = _inputs(4, 150, 64)
    poisoned = hidden.detach().masked_fill(mask[..., None] == 0, float("nan"))
    weight = torch.randn(500, 64, device="cuda").to(torch.bfloat16)
    got = splade_head(poisoned, weight, rows=(mask,), steps="row_where(0, -inf) | relu | log1p")
    assert got.isfinite().all()
    spread = splade_head(poisoned, weight, mask=mask)
    eager = (torch.log1p(torch.relu(poisoned @ weight.t())) * mask[..., None]).amax(1)
    assert torch.equal(spread.isnan(), eager.isnan())


def test_backward_is_bitwise_repeatable_and_leaves_the_graph_usable():
    hidden, mask = _inputs(6, 200, 96)
    weight = torch.randn(3000, 96, device="cuda").to(torch.bfloat16).requires_grad_()
    bias = torch.zeros(3000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    out = splade_head(hidden, weight, bias, mask)
    cotangent = torch.randn_like(out)
    first = torch.autograd.grad(out, (hidden, weight, bias), cotangent, retain_graph=True)
    again = torch.autograd.grad(out, (hidden, weight, bias), cotangent)
    assert all(map(torch.equal, first, again))


def test_the_logits_never_exist():
    """A training step's peak memory beside inputs, outputs and gradients is at most 12 bytes per entry plus 256 MiB."""
    B, S, D, V = 64, 512, 768, 30522
    hidden, mask = _inputs(B, S, D)
    weight = (torch.randn(V, D, device="cuda") * 0.05).to(torch.bfloat16).requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = splade_head(hidden, weight, None, mask)
    grads = torch.autograd.grad(out, (hidden, weight), torch.randn_like(out))
    peak = torch.cuda.max_memory_allocated() - before
    own = sum(t.numel() * t.element_size() for t in (out, out, *grads))
    assert peak - own <= 12 * B * V + 256 * 2**20


def test_long_sequences_and_more_than_2_31_elements():
    B, S, D, V = 2, 8192, 64, 140_000  # B * S * V > 2^31
    hidden, mask = _inputs(B, S, D)
    mask[0] = 1
    weight = torch.randn(V, D, device="cuda").to(torch.bfloat16).requires_grad_()
    out = splade_head(hidden, weight, None, mask, out_dtype=torch.float32)
    out.sum().backward()
    some = torch.tensor([0, 1, 77, V - 1], device="cuda")
    logits = hidden.detach().double() @ weight.detach()[some].double().t()
    truth = (torch.log1p(torch.relu(logits)) * mask[..., None]).amax(1)
    torch.testing.assert_close(out.detach()[:, some].double(), truth, rtol=1e-3, atol=1e-3)
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
