"""Entmax attention of short rows, whose scores stay in registers, against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from test_entmax_attention import check, check_nan, operands

from sparse_inductor.kernels.entmax_attention import attention as entmax_attention
from support import heavy

pytestmark = pytest.mark.usefixtures("nan_filled_memory")


def sizes(device, **keywords):
    long = {"Lq": 130, "Lk": 100} if device.type == "cuda" else {"Lq": 18, "Lk": 30}
    return {"dtype": torch.bfloat16, **long, **keywords}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """What is checked is this kernel."""

    def passes(*_):
        raise AssertionError("taken by the block passes")

    monkeypatch.setattr(entmax_attention, "forward_blocks", passes)


@pytest.mark.parametrize("alpha", [1.5, heavy(1.3), heavy(2.0)])
@pytest.mark.parametrize("variance", [6.0, heavy(1e-4), heavy(0.5)])
def test_any_alpha_and_variance(alpha, variance, device):
    check(*operands(device, **sizes(device, variance=variance)), alpha_value=alpha, causal=True)


@pytest.mark.parametrize("part, D", [heavy(1 / 32, 32), heavy(0.55, 64), (1, 64), heavy(1, 128)])
def test_numbers_of_keys_and_widths(part, D, device):
    """Up to as many keys as stay, by rows of both kinds of tile."""
    most = 256 if device.type == "cuda" else 32
    check(*operands(device, **sizes(device, Lk=int(part * most), D=D, variance=6.0)))


@pytest.mark.parametrize("fill, added", [(-math.inf, False), heavy(-1e4, False), heavy(0.25, True)])
def test_masks(fill, added, device):
    """Grouped heads, padding of keys and of queries, a row without keys."""
    tensors = operands(device, **sizes(device, B=2, H=2, Hkv=1, variance=0.5))
    Lq, Lk = tensors[0].shape[2], tensors[1].shape[2]
    mask = torch.rand(2, 1, Lq, Lk, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 5, :] = False
    lengths = {
        "query_lengths": torch.tensor([Lq, Lq - 3], device=device),
        "key_lengths": torch.tensor([Lk - 9, Lk], device=device),
    }
    check(*tensors, mask=mask.to(device), fill=fill, added=added, **lengths)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 0, 0)])
def test_bias_and_alpha_have_gradients(shape, device):
    q, k, v, grad = operands(device, **sizes(device))
    Lq, Lk = q.shape[2], k.shape[2]
    g = torch.Generator().manual_seed(1)
    bias = torch.randn([n or m for n, m in zip(shape, (1, 2, Lq, Lk))], generator=g).to(device)
    alpha = torch.tensor([1.4, 1.8]).view(1, 2, 1, 1).to(device)
    check(q, k, v, grad, bias=bias, alpha=alpha)


@pytest.mark.heavy
def test_nan_stays_in_its_rows(device):
    check_nan(operands(device, **sizes(device)), 7)
