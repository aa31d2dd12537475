"""Entmax attention's kernels against the same formula in fp64 with ATen's entmax."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_inductor.kernels.entmax_attention import attention as entmax_attention
from support import heavy
from test_entmax_attention_op import written_out

# The norm of the error over the norm of the truth. It covers the accumulation order in fp32, and the
# rounding of the operands and of p in 16-bit dtypes.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

LQ, LK = 20, 45  # in the interpreter two blocks of queries and three of keys, some of them partial

PLAIN = {
    "bias": None, "mask": None, "alpha": None, "query_lengths": None, "key_lengths": None,
    "alpha_value": 1.5, "fill": -math.inf, "causal": False,
    "added": False,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("nan_filled_memory")


def operands(
    device, B=1, H=None, Hkv=None, Lq=LQ, Lk=LK, D=16, DV=None, dtype=torch.float32, variance=6.0
):
    """Return random q, k, v and a gradient, by default with one head in the interpreter and two on a GPU."""
    H = H or (2 if torch.device(device).type == "cuda" else 1)
    g = torch.Generator().manual_seed(0)
    shapes = (B, H, Lq, D), (B, Hkv or H, Lk, D), (B, Hkv or H, Lk, DV or D), (B, H, Lq, DV or D)
    q, k, v, grad = (torch.randn(s, generator=g) for s in shapes)
    return [x.to(device, dtype) for x in (q * variance**0.5, k, v, grad)]


def relative(actual, expected):
    expected = expected.double()
    # A gradient that cancels to 0 (with one key, or a bias that is constant along its row) has an absolute tolerance.
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1.0)).item()


def run(q, k, v, grad, **keywords):
    """Run forward and backward, and return (out, dq, dk, dv, dbias, dalpha)."""
    keywords = {**PLAIN, "scale": q.shape[3] ** -0.5, **keywords}
    out, saved = entmax_attention.forward(q, k, v, training=True, **keywords)
    like = entmax_attention.saved_like(q, k, v, **keywords)
    assert [(s.shape, s.dtype) for s in saved] == [(s.shape, s.dtype) for s in like]
    needs = (True,) * 3 + (keywords["bias"] is not None, keywords["alpha"] is not None)
    return out, *entmax_attention.backward(grad, q, k, v, out, saved, needs=needs, **keywords)


def truth(q, k, v, grad, **keywords):
    keywords = {**PLAIN, "scale": q.shape[3] ** -0.5, **keywords}
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    for name in ("bias", "alpha"):
        if keywords[name] is not None:
            keywords[name] = keywords[name].double().requires_grad_()
            leaves.append(keywords[name])
    value = keywords.pop("alpha_value")
    alpha = value if keywords["alpha"] is None else keywords["alpha"]
    out = written_out(*leaves[:3], **{**keywords, "alpha": alpha})
    return out, *torch.autograd.grad(out, leaves, grad.double())


def check(q, k, v, grad, tolerance=0.0, **keywords):
    actual = [x for x in run(q, k, v, grad, **keywords) if x is not None]
    expected = truth(q, k, v, grad, **keywords)
    assert len(actual) == len(expected)
    for name, a, e in zip(["out", "dq", "dk", "dv", "more", "more"], actual, expected):
        assert not a.isnan().any(), name
        assert relative(a, e) <= max(tolerance, TOLERANCE[q.dtype]), name
    return actual


def check_nan(tensors, row, off=0.0):
    """Check that a NaN in one query of the last head changes that row alone; other rows may differ by up to `off`."""
    q, k, v, _ = tensors
    keywords = {**PLAIN, "scale": q.shape[3] ** -0.5, "training": True}
    clean, _ = entmax_attention.forward(q, k, v, **keywords)
    q[0, -1, row] = math.nan
    out, _ = entmax_attention.forward(q, k, v, **keywords)
    assert out[0, -1, row].isnan().all()
    out[0, -1, row] = clean[0, -1, row]
    torch.testing.assert_close(out, clean, rtol=0, atol=off)


@pytest.mark.parametrize("dtype", [torch.float32, heavy(torch.float16), torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention(dtype, causal, device):
    check(*operands(device, H=2, Lq=37, dtype=dtype), causal=causal)


@pytest.mark.parametrize("alpha", [1.05, heavy(1.25), 4 / 3, heavy(1.7), 2.0])
def test_any_alpha(alpha, device):
    check(*operands(device), alpha_value=alpha)


@pytest.mark.parametrize("alpha", [1.05, 1.3, heavy(1.7)])
def test_any_alpha_of_16_bits(alpha, device):
    """For 16-bit operands, GPU code computes these powers approximately."""
    check(*operands(device, dtype=torch.bfloat16), alpha_value=alpha)


@pytest.mark.parametrize("alpha", [heavy(1.25), heavy(1.3)])
def test_search_starts_from_a_sample_of_the_keys(alpha, device):
    """In many rows most keys are in the support. The search samples keys from 64 tiles on."""
    q, k, v, grad = operands(device, H=1, Lq=24, Lk=4200 if device.type == "cuda" else 1100)
    q[:, :, ::3] *= 0.1
    q[:, :, 1::3] *= 0.05
    check(q, k, v, grad, alpha_value=alpha, tolerance=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.bfloat16, heavy(torch.float32)])
def test_search_for_general_powers_starts_with_cubics(dtype, device):
    """The thresholds stay as exact. For 16-bit operands, the pass that computes the output takes the last step."""
    Lq, Lk = (24, 4200) if device.type == "cuda" else (16, 1100)
    q, k, v, grad = operands(device, H=2, Lq=Lq, Lk=Lk, dtype=dtype, variance=0.05)
    q[:, :, ::7] *= 3  # in these rows the sample gives a worse estimate
    alpha = torch.tensor([1.4, 1.6]).view(1, 2, 1, 1).to(device)
    keywords = {**PLAIN, "alpha": alpha, "scale": 0.25}
    out, (reference, shift, *_) = entmax_attention.forward(q, k, v, training=True, **keywords)
    assert relative(out, truth(q, k, v, grad, **keywords)[0]) <= TOLERANCE[dtype]
    x = (q.double() @ k.double().transpose(-1, -2)) * 0.25 * (alpha.double() - 1)
    u = (x - reference[..., None].double() - shift[..., None].double()).clamp_min(0)
    assert ((u ** (1 / (alpha.double() - 1))).sum(-1) - 1).abs().max() <= 1e-5


@pytest.mark.heavy
def test_alpha_above_two(device):
    """u^(beta - 1) has a pole at the threshold, so that the rounding of tau affects the gradients."""
    check(*operands(device), alpha_value=3.0, tolerance=5e-3)


@pytest.mark.parametrize("shape", [heavy((1, 1, 1, 1)), heavy((1, 2, 1, 1)), (2, 2, LQ, 1)])
def test_alpha_tensor_has_a_gradient(shape, device):
    alpha = torch.linspace(1.2, 1.9, math.prod(shape)).view(shape).to(device)
    check(*operands(device, B=2, H=2), alpha=alpha, tolerance=1e-5)


@pytest.mark.parametrize("variance", [1e-6, heavy(0.3), 400.0])
def test_flat_and_peaked_rows(variance, device):
    check(*operands(device, variance=variance), tolerance=1e-5)


@pytest.mark.parametrize("widths", [heavy((16, 16)), (80, 40), (24, 96), heavy((64, 64))])
def test_head_widths(widths, device):
    check(*operands(device, D=widths[0], DV=widths[1]))


@pytest.mark.parametrize("lengths", [(1, 1), heavy((1, 45)), (LQ, 1), (60, 40), heavy((16, 16))])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(lengths, causal, device):
    check(*operands(device, Lq=lengths[0], Lk=lengths[1]), causal=causal, tolerance=1e-5)


def test_grouped_heads(device):
    check(*operands(device, H=4, Hkv=2), causal=True)


def test_variable_lengths(device):
    lengths = {
        "query_lengths": torch.tensor([11, 0, LQ]).to(device),
        "key_lengths": torch.tensor([0, 30, LK]).to(device),
    }
    out, *_ = check(*operands(device, B=3), **lengths)
    assert not out[0].any() and not out[1].any() and not out[2, :, 11:].eq(0).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fill, added", [heavy(-math.inf, False), (-1e4, False), heavy(0.25, False), (0.25, True)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_take_the_fill(fill, added, causal, device):
    mask = torch.rand(1, 1, LQ, LK, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 5, :] = False
    check(
        *operands(device, variance=0.5), mask=mask.to(device), fill=fill, causal=causal, added=added
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "dtype, causal",
    [(torch.float32, True), (torch.bfloat16, True)]
    + [heavy(torch.float32, False), heavy(torch.float16, True)]
    + [heavy(torch.bfloat16, False), heavy(torch.float16, False)],
)
def test_rows_without_keys_pass_an_added_masks_gradient_on(dtype, causal, device):
    """Left padding, and a sequence of padding only: adding the fill absorbs all scores of these rows."""
    mask = torch.arange(45) >= torch.tensor([20, 45])[:, None]
    q, k, v, grad = operands(device, B=2, H=2, Hkv=1, Lq=45, dtype=dtype)
    low = torch.finfo(torch.float32).min
    mask = mask[:, None, None].to(device)
    _, dq, *_ = check(q, k, v, grad, mask=mask, causal=causal, fill=low, added=True)
    without = dq[:, :, :20] if causal else dq[1:]
    assert without.any(-1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, heavy(torch.float32)])
@pytest.mark.parametrize("causal", [False, heavy(True)])
def test_padding_of_keys(dtype, causal, device):
    """Padding on the right, on the left, with a key dropped in between, and of all keys, for all rows of a sequence."""
    tensors = operands(device, B=4, H=1, dtype=dtype, variance=0.5)
    j = torch.arange(tensors[1].shape[2], device=device)
    keep = torch.stack([j < 38, j >= 9, (j > 2) & (j != 17), j < 0])[:, None, None]
    check(*tensors, mask=keep, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("kind", ["mask", "bias", "fp64 bias"])
@pytest.mark.parametrize("layout", ["aligned", "odd", "strided"])
def test_masks_and_biases_however_they_lie(layout, kind, width, dtype):
    """The way of loading them determines the layout of scores over warps, and thus the order of rows' sums."""
    Lk = 45 if layout == "odd" else 64
    side = torch.randn(1, 2, LQ, Lk, 2, generator=torch.Generator().manual_seed(1)).cuda()
    side = side > -0.5 if kind == "mask" else side.double() if kind == "fp64 bias" else side
    side = side[..., 0] if layout == "strided" else side[..., 0].contiguous()
    check(*operands("cuda", Lk=Lk, D=width, dtype=dtype), **{kind.split()[-1]: side})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "lengths, added",
    [((45, 45), False), heavy((45, 45), True), heavy((60, 40), False), ((60, 40), True)],
)
def test_a_causal_fill_that_competes_reaches_later_keys(lengths, added, device):
    q, k, v, grad = operands(device, Lq=lengths[0], Lk=lengths[1], variance=0.3)
    check(q, k, v, grad, causal=True, fill=0.0, added=added)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "shape, added",
    [((1, 2, LQ, LK), True), ((2, 1, 1, 45), False), heavy((1, 1, LQ, 1), True)]
    + [heavy((1, 2, LQ, LK), False), heavy((2, 1, 1, 45), True), heavy((1, 1, LQ, 1), False)],
)
def test_bias_has_a_gradient(shape, added, device):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.rand(2, 1, 1, 45, generator=torch.Generator().manual_seed(2)) > 0.2
    # A bias that is constant along a row has an effect only where the fill is comparable to the scores.
    fill = 0.0 if shape[3] == 1 or added else -math.inf
    keywords = {"bias": bias, "mask": mask.to(device), "fill": fill, "added": added}
    check(*operands(device, B=2, H=2), **keywords, tolerance=1e-5)


def test_bias_of_minus_infinity(device):
    bias = torch.zeros(1, 1, LQ, LK)
    bias[..., ::2] = -math.inf
    bias[..., 3, :] = -math.inf
    q, k, v, grad = operands(device)
    actual = run(q, k, v, grad, bias=bias.to(device))
    expected = truth(q, k, v, grad, mask=bias.to(device) == 0)
    assert not actual[0][:, :, 3].any()
    for a, e in zip(actual[:4], expected):
        assert relative(a, e) <= TOLERANCE[torch.float32]


def test_strided_operands(device):
    q, k, v, grad = (x.transpose(1, 2).contiguous() for x in operands(device, B=2, H=2))
    views = [x.transpose(1, 2) for x in (q, k, v, grad)]
    assert not views[0].is_contiguous()
    check(*views, causal=True)


def test_large_scores_keep_the_row_sum(device):
    """Adjacent fp32 numbers near tau = 500 are 3e-5 apart, so tau is stored relative to the row's maximum."""
    q, k, _, grad = operands(device, H=1, Lk=200, variance=1e-2)
    q[..., 0], k[..., 0] = 40.0, 100.0
    v = torch.ones_like(k)
    out = run(q, k, v, grad)[0]
    assert (out - 1).abs().max() <= 1e-6


def test_ties_share_alike(device):
    q, k, v, grad = operands(device)
    k[:] = k[:, :, :1]
    out = run(q, k, v, grad)[0]
    assert relative(out, v.double().mean(2, keepdim=True).expand_as(out)) <= 1e-6


def test_nan_stays_in_its_rows(device):
    check_nan(operands(device, H=2), 7)


@pytest.mark.parametrize("alpha", [heavy(1.25), 1.5, heavy(2.0)])
def test_mild_scores_lose_no_mass(alpha, device):
    """Ten bisections of [max - 1, max - n^(1 - alpha)] would lose most of a flat row's mass."""
    Lk = 3000 if device.type == "cuda" else 1000
    q, k, _, grad = operands(device, H=1, Lq=4, Lk=Lk, variance=1e-3)
    v = torch.ones_like(k)
    out = run(q, k, v, grad, alpha_value=alpha)[0]
    assert (out - 1).abs().max() <= 1e-6


@pytest.mark.gpu
def test_gradients_repeat_bitwise():
    tensors = operands("cuda", B=2, H=4, Hkv=2, dtype=torch.bfloat16)
    for a, b in zip(run(*tensors)[:4], run(*tensors)[:4]):
        assert torch.equal(a, b)


def test_inference_saves_nothing(device):
    q, k, v, _ = operands(device)
    keywords = {**PLAIN, "scale": 0.25}
    assert entmax_attention.forward(q, k, v, training=False, **keywords)[1] == ()


def test_what_the_kernels_take(device):
    q, k, v, _ = operands(device)
    assert entmax_attention.applies(q, k, v)
    assert not entmax_attention.applies(q.double(), k.double(), v.double())
    assert not entmax_attention.applies(q.half(), k, v)
    assert not entmax_attention.applies(q[..., :8], k[..., :8], v)
    assert not entmax_attention.applies(q, k[:, :, :0], v[:, :, :0])


@pytest.mark.heavy
@pytest.mark.parametrize("dtype, Lk, D", [(torch.float32, 45, 16), (torch.bfloat16, 1100, 64)])
def test_every_operand_at_once(dtype, Lk, D, device):
    """Kernels take all operands as one argument. With every operand present, Triton 3.6 once lost its strides."""
    if device.type == "cpu":
        Lk = min(Lk, 60)
    B, H, Lq = 2, 2, 40
    tensors = operands(device, B=B, H=H, Lq=Lq, Lk=Lk, D=D, dtype=dtype, variance=0.5)
    g = torch.Generator().manual_seed(1)
    check(
        *tensors,
        bias=torch.randn(1, H, Lq, Lk, generator=g).to(device, dtype),
        mask=(torch.rand(B, H, Lq, Lk, generator=g) > 0.3).to(device),
        alpha=torch.tensor([1.4, 1.9]).view(1, H, 1, 1).to(device),
        query_lengths=torch.tensor([Lq, Lq - 9], device=device),
        key_lengths=torch.tensor([Lk - 7, Lk], device=device),
        tolerance=2e-2 if dtype == torch.bfloat16 else 1e-5,
    )
