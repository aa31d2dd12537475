"""Entmax attention of few queries, split over the keys, against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from test_entmax_attention import check, check_nan, operands

from sparse_inductor.kernels.entmax_attention import attention as entmax_attention
from support import heavy

pytestmark = pytest.mark.usefixtures("nan_filled_memory")


def sizes(device, **keywords):
    """Several tiles of keys and chunks of a row."""
    Lk = 9000 if device.type == "cuda" else 50
    return {"B": 2, "H": 2, "Hkv": 1, "Lq": 2, "Lk": Lk, **keywords}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """What is checked is these kernels."""

    def passes(*_):
        raise AssertionError("taken by others")

    for name in ("forward_blocks", "short", "lists"):
        part = getattr(entmax_attention, name)
        where, name = (entmax_attention, name) if callable(part) else (part, f"forward_{name}")
        monkeypatch.setattr(where, name, passes)


@pytest.mark.parametrize(
    "dtype, alpha, variance",
    [
        (torch.bfloat16, 1.5, 6.0),
        heavy(torch.bfloat16, 1.5, 1e-4),
        heavy(torch.float16, 1.3, 0.5),
        heavy(torch.float32, 1.3, 0.5),
        heavy(torch.float32, 2.0, 1e-4),
    ],
)
def test_any_dtype_alpha_and_variance(dtype, alpha, variance, device):
    tensors = operands(device, **sizes(device, dtype=dtype, variance=variance))
    check(*tensors, alpha_value=alpha, causal=True)


@pytest.mark.parametrize("fill, added", [(-math.inf, False), heavy(-1e4, False), heavy(0.25, True)])
@pytest.mark.parametrize("each_head", [True, heavy(False)])
def test_masks_and_biases(fill, added, each_head, device):
    """Of each head or of all, with padding of keys and of queries, and a row without keys."""
    tensors = operands(device, **sizes(device, variance=0.5))
    Lq, Lk = tensors[0].shape[2], tensors[1].shape[2]
    g = torch.Generator().manual_seed(1)
    heads = 2 if each_head else 1
    mask = torch.rand(2, heads, Lq, Lk, generator=g) > 0.4
    mask[:, -1, 1] = False
    check(
        *tensors,
        mask=mask.to(device),
        bias=torch.randn(1, heads, Lq if each_head else 1, Lk, generator=g).to(device),
        alpha=torch.tensor([1.4, 2.0]).view(1, 2, 1, 1).to(device),
        fill=fill,
        added=added,
        query_lengths=torch.tensor([Lq, Lq - 1], device=device),
        key_lengths=torch.tensor([Lk - 29, Lk], device=device),
        tolerance=5e-6,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("D, DV", [(40, 16), (16, 72), (256, 64)])
def test_any_width(D, DV, device):
    check(*operands(device, **sizes(device, D=D, DV=DV, dtype=torch.bfloat16)))


@pytest.mark.heavy
def test_nan_stays_in_its_rows(device):
    check_nan(operands(device, **sizes(device)), 1)
