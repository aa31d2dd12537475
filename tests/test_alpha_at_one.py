"""A learned alpha, 1 + sigmoid(a), may round to 1: that head becomes softmax, and other heads are unaffected."""

from __future__ import annotations

import pytest
import torch

from sparse_inductor.testing import compile_without_codegen
from support import heavy, only

entmax = pytest.importorskip("entmax")


def rows(q, a):
    return entmax.entmax_bisect(q @ q.mT, 1 + torch.sigmoid(a))


def attention(q, a):
    return rows(q, a) @ q


@pytest.mark.parametrize("program", [rows, attention])
@pytest.mark.parametrize("dtype", [torch.float32, heavy(torch.float64), heavy(torch.bfloat16)])
def test_one_head_of_three(program, dtype):
    torch.manual_seed(0)
    q = torch.randn(2, 3, 5, 4, dtype=dtype, requires_grad=True)
    a = torch.tensor([-60.0, 0.0, 3.0], dtype=dtype).view(3, 1, 1).requires_grad_()
    with only("entmax", "entmax_attention") as report:
        got = compile_without_codegen(program)(q, a)
        assert len(report.rewrites) == 1
    grads = torch.autograd.grad(got.float().square().sum(), (q, a))
    assert all(g.isfinite().all() for g in grads)

    softmax = torch.softmax(q @ q.mT, -1)
    softmax = softmax @ q if program is attention else softmax
    right = torch.cat([softmax[:, :1], program(q, a)[:, 1:]], 1)
    close = {
        torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
        torch.float32: {"rtol": 1e-4, "atol": 1e-5},
        torch.float64: {"rtol": 1e-8, "atol": 1e-9},
    }[dtype]
    torch.testing.assert_close(got, right, **close)
    wanted = torch.autograd.grad(right.float().square().sum(), (q, a))
    if dtype != torch.bfloat16:
        torch.testing.assert_close(grads[0], wanted[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(grads[1][1:], wanted[1][1:], rtol=1e-3, atol=1e-4)


def test_the_one_alpha_of_all_heads():
    q = torch.randn(2, 3, 5, 4)
    with only("entmax", "entmax_attention"), torch.no_grad():
        got = compile_without_codegen(attention)(q, torch.tensor(-18.0))
    torch.testing.assert_close(got, torch.softmax(q @ q.mT, -1) @ q, rtol=1e-4, atol=1e-5)
