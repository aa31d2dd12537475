"""What is ours is silent, also where warnings are errors, and changes nothing that others can see."""

from __future__ import annotations

import pytest

from processes import python
from support import heavy

HEAD = """
linear = torch.nn.Linear(16, 200)
fn = lambda h, mask: (linear(h).relu().log1p() * mask[..., None]).amax(1)
args = torch.randn(2, 5, 16, requires_grad=True), torch.ones(2, 5)
"""
SCORES = """
ids, weights = torch.randint(0, 30, (50, 4)), torch.rand(50, 4)
fn = lambda q: (q[:, ids] * weights).sum(-1)
args = (torch.rand(2, 30, requires_grad=True),)
"""
BLOCK = """
up, down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
fn = lambda x: down(torch.relu(up(x)))
args = (torch.randn(5, 8, requires_grad=True),)
"""
RUN = """
import logging, sys, threading, warnings
import torch, torch._inductor.compile_fx
warnings.simplefilter("error")
def seen():
    return (
        list(warnings.filters), list(sys.meta_path), threading.enumerate(), list(sys.path_hooks),
        torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_default_dtype(), logging.root.handlers[:], sys.getswitchinterval(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
    )
before = seen()
import sparse_inductor
from sparse_inductor.testing import compile_without_codegen
sparse_inductor.enable()
assert seen() == before, (before, seen())
{program}
torch.manual_seed(0)
compile_without_codegen(fn)(*args).sum().backward()
assert len(sparse_inductor.report().rewrites) == 1, str(sparse_inductor.report())
sparse_inductor.disable()
assert warnings.filters == before[0]
"""


@pytest.mark.parametrize(
    "program", [HEAD, heavy(SCORES), heavy(BLOCK)], ids=["head", "scores", "block"]
)
def test_nothing_is_said_or_changed(program):
    done = python("-c", RUN.format(program=program))
    assert not done.stderr, done.stderr
