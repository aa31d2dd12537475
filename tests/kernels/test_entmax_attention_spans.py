"""The spans of key tiles that a scan of the mask finds for each block of rows, against the mask itself."""

from __future__ import annotations

import math

import pytest
import torch
from test_entmax_attention import PLAIN

from sparse_inductor.kernels.entmax_attention import spans as entmax_attention_spans
from sparse_inductor.kernels.entmax_attention.problem import Problem

pytestmark = pytest.mark.usefixtures("nan_filled_memory")
ROWS, KEYS = 16, 16


def seen(device, lengths, **sides):
    """Return spans [B or 1, H or 1, blocks or 1, 6]: begin and end of all tiles, of the full tiles, and of the gap."""
    q, k = (torch.zeros(2, 2, n, 16, device=device) for n in lengths)
    problem = Problem.of(q, k, k, **{**PLAIN, "scale": 1.0, **sides})
    table, strides = entmax_attention_spans.spans(problem, ROWS, KEYS)
    assert [s > 0 for s in strides] == [n > 1 for n in table.shape[:3]]
    return table[..., :6].tolist()


@pytest.mark.parametrize("width", [72, 73], ids=["in words", "in bytes"])
def test_a_causal_mask(device, width):
    keep = torch.ones(40, width, dtype=torch.bool, device=device).tril(72 - 40)[None, None, :, :72]
    assert seen(device, (40, 72), mask=keep) == [
        [[[0, 3, 0, 2, 3, 3], [0, 4, 0, 3, 4, 4], [0, 5, 0, 4, 5, 5]]]
    ]


def test_padding_of_each_sequence(device):
    """All rows have the same mask, so that one row is scanned."""
    keep = torch.arange(72, device=device) >= torch.tensor([20, 72], device=device)[:, None]
    assert seen(device, (40, 72), mask=keep[:, None, None]) == [
        [[[1, 5, 2, 5, 5, 5]]],
        [[[0, 0, 0, 0, 0, 0]]],
    ]


def test_a_window_with_sinks(device):
    i, j = torch.arange(200, device=device)[:, None], torch.arange(200, device=device)
    keep = (j <= i) & ((j > i - 40) | (j < 3))
    spans = seen(device, (200, 200), mask=keep[None, None])[0][0]
    assert spans[9] == [0, 10, 8, 9, 1, 6]


@pytest.mark.parametrize("low", [-math.inf, -65504.0, -1e9])
def test_a_mask_that_is_added(low, device):
    """One of two heads has an additional ordinary bias; a boolean mask removes one more tile."""
    bias = torch.zeros(1, 2, 1, 72, device=device)
    bias[..., :20] = low
    bias[:, 1, :, 40] = 0.5
    keep = torch.arange(72, device=device) < 64
    assert seen(device, (40, 72), bias=bias, mask=keep[None, None, None]) == [
        [[[1, 4, 2, 4, 4, 4]], [[1, 4, 3, 4, 4, 4]]]
    ]
    bias[..., 0] = math.nan
    assert seen(device, (40, 72), bias=bias)[0][0][0][0] == 0
