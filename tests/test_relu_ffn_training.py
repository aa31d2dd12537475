"""Whole training steps with rewritten blocks: library models, and a run in which an L1 term makes the block sparse."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_inductor
from corpus.ffn import LanguageModel, _ids
from support import compile_without_codegen, only, rewrites


@pytest.mark.parametrize("kind", ["llama", "nemotron", "opt", "t5"])
def test_an_optimiser_step_of_a_library_model(kind):
    pytest.importorskip("transformers")
    model = LanguageModel(kind).train()
    twin = copy.deepcopy(model)
    ids = _ids()
    with only("relu_ffn") as report:
        for program, module in ((compile_without_codegen(model), model), (twin, twin)):
            optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
            program(ids).square().mean().backward()
            optimiser.step()
        assert rewrites(report, "relu_ffn")
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(16, 96), nn.Linear(16, 96)
        self.down = nn.Linear(96, 16)

    def forward(self, x):
        a = F.relu(self.gate(x))
        return self.down(a * self.up(x)), a.abs().mean(), (a != 0).float().mean()


def test_an_l1_term_makes_the_block_sparse():
    """The recipe of TwELL (section 3.4): the statistic and its gradient come out of the operator."""
    block = Block()
    teacher = torch.randn(16, 16)
    optimiser = torch.optim.Adam(block.parameters(), lr=3e-3)
    shares, losses = [], []
    with only("relu_ffn") as report:
        program = compile_without_codegen(block)
        for step in range(120):
            torch.manual_seed(step)
            x = torch.randn(64, 16)
            y, l1, share = program(x)
            loss = F.mse_loss(y, torch.tanh(x @ teacher))
            optimiser.zero_grad()
            (loss + 3.0 * l1).backward()
            optimiser.step()
            shares.append(share.item())
            losses.append(loss.item())
        assert len(rewrites(report, "relu_ffn")) == 1
    assert shares[0] > 0.4 and shares[-1] < 0.5 * shares[0], "sparsity did not rise"
    assert losses[-1] < losses[0], "nothing was learnt"


@pytest.mark.parametrize("first_axis", [False, True])
def test_explain_counts_neurons_along_their_axis(first_axis):
    torch.manual_seed(0)
    gate, up, down = torch.randn(96, 16), torch.randn(96, 16), torch.randn(16, 96)
    x = torch.randn(5, 16)

    def block(x):
        h = F.relu(x @ gate.T) * (x @ up.T)
        return (down @ h.T) if first_axis else F.linear(h, down)

    (found,) = sparse_inductor.explain(block, x).report.densities
    h = F.relu(x @ gate.T) * (x @ up.T)
    assert (found.pattern, found.what, found.row) == ("relu_ffn", "neurons", 96)
    assert (found.active, found.total) == (int((h != 0).sum()), h.numel())
