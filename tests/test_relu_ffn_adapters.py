"""Adapters of a feed-forward block: which are joined with its weights, where that would take too long, and results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_inductor
from corpus.relu_ffn.adapters import RANK, Adapted
from corpus.relu_ffn.registry import K, tokens
from sparse_inductor.testing import assert_not_rewritten, assert_rewrites


def block(x, m):
    return m.down(F.relu(m.gate(x)) * m.up(x))


def calls(explanation, name):
    (graph,) = explanation.graphs
    return [n for n in graph.nodes_after if n.title == name]


@pytest.mark.parametrize("frozen", [True, False])
def test_one_operator_and_what_is_small(frozen):
    """Of nine products three remain beside the operator: x with each of two A, and the result with the last B."""
    m = Adapted(block, frozen, bias=True)
    found = assert_rewrites(m, (tokens(),), {"relu_ffn": 1})
    assert len(calls(found, "linear")) == 3
    (op,) = calls(found, "sparse_inductor::relu_ffn")
    assert op.type.startswith(f"float32[2, 5, {K + RANK}]")


class Wide(nn.Module):
    """A gate projection of a given size with an adapter."""

    def __init__(self, neurons):
        super().__init__()
        self.gate, self.a, self.b = (
            nn.Linear(512, neurons),
            nn.Linear(512, 4),
            nn.Linear(4, neurons),
        )
        self.down = nn.Linear(neurons, 8)

    def forward(self, x):
        return self.down(F.relu(self.gate(x) + self.b(self.a(x))))


@pytest.mark.parametrize(
    ("neurons", "rows", "training", "reason"),
    [
        (500, 3, False, ""),
        (500, 3, True, ""),
        (1024, 8192, False, ""),
        (1024, 8191, False, "2 MiB of weights would be joined at every call, too many for 8191"),
        (1024, 8192, True, "linear maps that learn: 2 MiB of weights would be joined"),
    ],
)
def test_weights_are_joined_where_it_takes_no_time(neurons, rows, training, reason):
    m, x = Wide(neurons), torch.randn(rows, 512)
    with torch.set_grad_enabled(training):
        if reason:
            assert_not_rewritten(m, (x,), "relu_ffn", reason=reason)
        else:
            assert_rewrites(m, (x,), {"relu_ffn": 1})


class Weighed(nn.Module):
    """An autoencoder with activations that are multiplied by the norms of the decoder's rows."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32_768)
        self.decoder = nn.Parameter(torch.randn(32_768, 16) / 4)
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x):
        f = F.relu(self.encoder(x))
        return f @ self.decoder + self.bias, (f * self.decoder.norm(dim=1)).sum(-1)


def test_a_weighted_sum_comes_out_of_the_operator():
    found = assert_rewrites(Weighed(), (torch.randn(6, 16),), {"relu_ffn": 1})
    (op,) = calls(found, "sparse_inductor::relu_ffn")
    assert op.type.startswith("float32[6, 16]")


def of_weights(x, gate, a, b, down):
    return F.relu(x @ gate + x @ a @ b) @ down


@pytest.mark.parametrize(
    ("program", "sizes", "dynamic", "reason"),
    [
        (lambda: Wide(1024), [(20, 512)], True, "too many for a number of tokens"),
        (lambda: of_weights, [(6, 16), (16, 40), (16, 4), (4, 40), (40, 16)], True, "of a size that is not known"),
    ],
    ids=["unknown tokens", "weights of any size"],
)  # fmt: skip
def test_in_inference_nothing_is_joined(program, sizes, dynamic, reason):
    with torch.no_grad(), sparse_inductor.enabled(only="relu_ffn"):
        torch.compile(program(), dynamic=dynamic)(*(torch.randn(*size) for size in sizes))
        (miss,) = sparse_inductor.report().near_misses
    assert reason in miss.reason
