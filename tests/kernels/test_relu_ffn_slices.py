"""Tables that do not fit L2 are processed in slices of columns, with the same accuracy as tables that fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from uneven_block import block, of_a_step, tokens

from sparse_inductor.kernels.common import replay
from sparse_inductor.kernels.relu_ffn import dots, gather

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_recorded")]


def error(got, want):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("room", [1 << 28, 1])
@pytest.mark.parametrize(
    ("M", "N", "K", "D", "dtype"),
    [
        (1030, 1408, 1536, 2304, torch.bfloat16),
        (1030, 40000, 264, 520, torch.float16),
        (4500, 1408, 640, 1000, torch.bfloat16),
        (1030, 1408, 513, 640, torch.float32),
    ],
)
def test_as_tables_that_stay_in_the_cache(M, N, K, D, dtype, room, monkeypatch):
    w = block(N, K, D, 0.01, dtype)
    x = tokens(M, K, True, dtype)
    leaves = [t.requires_grad_() for t in (x, *w.values())]
    dy = torch.randn(M, D, device="cuda", dtype=dtype)

    plain = of_a_step(x, w, dy)
    monkeypatch.setattr(gather, "RESIDENT", 1)
    monkeypatch.setattr(dots, "SLICE_SUMS", room)
    replay.forget()
    assert dots._slices(w["up"])[0] > 1
    sliced = of_a_step(x, w, dy)
    again = of_a_step(x, w, dy)
    assert all(torch.equal(a, b) for a, b in zip(sliced, again, strict=True))

    exact = [t.detach().double().requires_grad_() for t in leaves]
    t, gate, up, down = exact
    y = F.linear(F.relu(F.linear(t, gate)) * F.linear(t, up), down)
    want = [y.detach(), y.detach(), *torch.autograd.grad(y, exact, dy.double())]
    for ours, theirs in zip(error(sliced, want), error(plain, want), strict=True):
        assert ours <= 1.05 * theirs + 1e-6
