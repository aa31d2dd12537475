"""Whole training steps with rewritten blocks: library models, and a run in which an L1 term makes the block sparse."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from sparse_inductor.patterns.relu_ffn import PATTERN, BlockMatch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sparse_inductor
from corpus.relu_ffn.published import LanguageModel, token_ids
from corpus.relu_ffn.registry import Block, K
from sparse_inductor.graph.view import GraphView
from sparse_inductor.testing import assert_matches_reference, assert_rewrites
from support import compile_without_codegen, heavy, only, rewrites


@pytest.mark.parametrize("kind", ["llama", heavy("nemotron"), heavy("opt"), heavy("t5")])
def test_an_optimiser_step_of_a_library_model(kind):
    pytest.importorskip("transformers")
    model = LanguageModel(kind).train()
    twin = copy.deepcopy(model)
    ids = token_ids()
    with only("relu_ffn") as report:
        for program, module in ((compile_without_codegen(model), model), (twin, twin)):
            optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
            program(ids).square().mean().backward()
            optimiser.step()
        assert rewrites(report, "relu_ffn")
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_dropout_of_nothing_at_any_size():
    """dynamic=True makes the rate symbolic."""
    block = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.0), nn.Linear(48, 8)).train()
    found = assert_matches_reference(block, (torch.randn(2, 5, 8),), dynamic=True, aot=False)
    assert_rewrites(found, expected={"relu_ffn": 1})


def _matched_on(device, tokens, statistics=False):
    """Match a training step's block as if the graph's tensors were on that device."""

    def block(x, gate, up, down):
        h = F.relu(x @ gate.t()) * (x @ up.t())
        y = h @ down.t()
        return (y, h.abs().mean()) if statistics else y

    graphs = []
    shapes = ((tokens, 64), (256, 64), (256, 64), (64, 256))
    inputs = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    torch.compile(block, backend=lambda gm, _: graphs.append(gm) or gm)(*inputs)
    with FakeTensorMode():
        for node in graphs[0].graph.nodes:
            if isinstance(t := node.meta.get("example_value"), torch.Tensor):
                with torch.no_grad():
                    moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
                node.meta["example_value"] = moved.requires_grad_(t.requires_grad)
    view = GraphView(graphs[0].graph)
    found = [PATTERN.match(n, view) for n in graphs[0].graph.nodes if view.name_of(n) == "matmul"]
    (match,) = [m for m in found if isinstance(m, BlockMatch)]
    return match


@pytest.mark.parametrize(
    ("device", "tokens", "statistics", "projections"),
    [
        # Inductor uses the dense block, which keeps both projections, as without a rewrite.
        ("cuda", 512, False, 0),
        ("cuda", 512, True, 0),
        ("cuda", 65536, False, 2),
        ("cuda", 65536, True, 2),
        ("cpu", 512, False, 2),
    ],
)
def test_what_a_step_no_longer_keeps(device, tokens, statistics, projections):
    assert _matched_on(device, tokens, statistics).bytes_saved == projections * tokens * 256 * 2


def _with_statistics(x, m):
    a = F.relu(m.gate(x))
    return m.down(a * m.up(x)), a.abs().mean(), (a != 0).float().mean()


@pytest.mark.heavy
def test_an_l1_term_makes_the_block_sparse():
    """This is the recipe of TwELL (section 3.4): the operator computes the statistic and its gradient."""
    block = Block(_with_statistics, bias=True)
    teacher = torch.randn(K, K)
    optimiser = torch.optim.Adam(block.parameters(), lr=3e-3)
    shares, losses = [], []
    with only("relu_ffn") as report:
        program = compile_without_codegen(block)
        for step in range(120):
            torch.manual_seed(step)
            x = torch.randn(64, K)
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
