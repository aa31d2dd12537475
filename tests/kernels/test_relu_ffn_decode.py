"""The down projection of one token by words of neurons, run on a CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch
from on_cpu import ORDERS, OnCpu

from sparse_inductor.kernels.relu_ffn import decode

WARPS = 8


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize(
    ("groups", "rows", "share", "word"),
    [(300, 4, 0.05, 32), (137, 3, 0.5, 22), (40, 4, 1.0, 10), (64, 1, 0.0, 16), (1, 2, 0.9, 1)],
)
@pytest.mark.parametrize("order", ORDERS)
def test_outputs_of_a_block(kind, groups, rows, share, word, order):
    """Weights are ignored where the hidden activation is 0.0 or -0.0, even if they are NaN or inf."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    torch.manual_seed(0)
    h = torch.randn(groups * decode.GROUP) * (torch.rand(groups * decode.GROUP) < share)
    h = torch.where(torch.rand(len(h)) < 0.5, h, h.abs().copysign(-h)).to(dtype)
    weights = torch.randn(rows, groups * decode.GROUP + decode.GROUP).to(dtype)
    want = weights[:, : len(h)].double() @ h.double()
    absent = (h == 0).nonzero()[:, 0]
    weights[:, absent[::2]], weights[:, absent[1::2]] = torch.nan, torch.inf
    extras = [torch.randn(rows).to(dtype) for _ in range(2)]
    want += extras[0].double() + extras[1].double()
    y = torch.full((1, 4), torch.nan, dtype=dtype)
    arrays = (t.view(torch.int16).numpy() for t in (h, weights, *extras, y))
    constants = {"OUTPUTS": 4, "IS_BF16": kind == "bf16", "PDL": True}
    OnCpu(decode.words_kernel, WARPS, **constants, HAS_BIAS=True, HAS_RESIDUAL=True)(
        (1, 1), *arrays, groups, word, rows, weights.stride(0), 1, order=order
    )
    rounding = 2**-8 if kind == "bf16" else 2**-11
    torch.testing.assert_close(y[0, :rows].double(), want, rtol=2 * rounding, atol=4 * rounding)
    assert y[0, rows:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(
    ("K", "N", "D", "share"),
    [(256, 1000, 100, 0.05), (2048, 5632, 2048, 0.01), (512, 28672, 515, 0.5), (64, 8, 8, 0.9)],
)
def test_by_words_and_by_lists(monkeypatch, K, N, D, share, extras, dtype):
    """Both kernels use the active neurons only: the weights of the others are NaN."""
    torch.manual_seed(0)
    x = torch.randn(1, K, device="cuda", dtype=dtype)
    h = torch.randn(1, N, device="cuda", dtype=dtype) * (torch.rand(1, N, device="cuda") < share)
    down = torch.randn(D, N, device="cuda", dtype=dtype) / N**0.5
    down.masked_fill_(h == 0, torch.nan)
    bias = torch.randn(D, device="cuda", dtype=dtype) if extras else None
    residual = torch.randn(1, D, device="cuda", dtype=dtype) if extras else None
    want = torch.where(h == 0, 0, h).double() @ down.nan_to_num().double().T
    if extras:
        want += bias.double() + residual.double()
    assert decode.by_words(x, down)
    first, again, listed = (torch.empty(1, D, device="cuda", dtype=dtype) for _ in range(3))
    decode.down_projection(h, down, bias, residual, first)
    decode.down_projection(h, down, bias, residual, again)
    assert torch.equal(again, first)
    monkeypatch.setattr(decode, "by_words", lambda *_: False)
    decode.down_projection(h, down, bias, residual, listed)
    for y in (first, listed):
        torch.testing.assert_close(y.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_by_words_where_rows_are_pieces_of_16_bytes():
    x = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(16, 72, device="cuda", dtype=torch.bfloat16)
    assert decode.by_words(x, down)
    others = [down[:, :66], down[:, 1:65], down[:, ::2], down.T.contiguous().T, down.float()]
    assert not any(decode.by_words(x.to(t.dtype), t) for t in others)
