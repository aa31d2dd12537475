"""Gradients at ties. At a bound the gradient is that of the installed torch, which changed in 2.14 for `clamp`. At a
maximum that several positions share, it is that of the program's reduction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_inductor
from sparse_inductor import compat
from sparse_inductor.epilogue.steps import dual
from sparse_inductor.graph.emit import own_operator
from sparse_inductor.graph.scalars import scalar_steps
from sparse_inductor.graph.view import GraphView
from sparse_inductor.testing import compile_without_codegen
from test_match import capture, returned

BOUNDED = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -2.0, 3.0),
    "hardtanh from 0": lambda x: F.hardtanh(x, 0.0, 3.0),
    "hardsigmoid": F.hardsigmoid,
    "threshold": lambda x: F.threshold(x, 3.0, 0.0),
    "clamp": lambda x: x.clamp(-2.0, 3.0),
    "clamp from 0": lambda x: x.clamp(min=0),
    "clamp up to 3": lambda x: torch.clamp(x, max=3),
    "clamp_min": lambda x: torch.clamp_min(x, -2.0),
    "clamp_max": lambda x: x.clamp_max(3.0),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(-2.0), torch.tensor(3.0)),
    "clamp_min by a tensor": lambda x: torch.clamp_min(x, torch.tensor(1.0)),
    "clamp_max by a tensor": lambda x: x.clamp_max(torch.tensor(3.0)),
    "clip": lambda x: x.clip(0, 6),
    "clamp of equal bounds": lambda x: x.clamp(3, 3),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_has_the_gradient_of_eager(name):
    fn = BOUNDED[name]
    x = torch.tensor([-3.0, -2.0, -1.0, 0.0, 1.0, 3.0, 4.0, 6.0, 7.0], requires_grad=True)
    gm = capture(fn, x)
    node, view = returned(gm), GraphView(gm.graph)
    value, slope = dual(scalar_steps(view, node, view.call(node)), x.detach())
    y = fn(x)
    (right,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(value, y.detach())
    torch.testing.assert_close(slope, right)


def test_torch_is_asked_under_every_mode():
    """torch's behaviour is determined once, possibly during a compilation, and must not depend on active modes."""
    ask = compat.clamp_has_a_slope_at_its_bounds.__wrapped__
    usual = ask()
    with torch._subclasses.FakeTensorMode(), torch.inference_mode():
        assert ask() is usual
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert ask() is usual
    assert seen == []


POOLED = {
    "amax": lambda z, m: (z.relu().log1p() * m).amax(1),
    "amax of a mask that fills": lambda z, m: z.masked_fill(m == 0, -1e4).amax(1).relu(),
    "amax of scaled tokens": lambda z, m: (torch.tanh(z / 9) * (m * 0.5)).relu().amax(1),
    "amax of no steps": lambda z, m: z.amax(1),
    "amin": lambda z, m: (-z.relu()).amin(1),
    "aminmax": lambda z, m: z.aminmax(dim=1).max,
    "max": lambda z, m: (z.relu().log1p() * m).max(1).values,
}


@pytest.mark.parametrize(
    ("pool", "same"),
    [("amax", "tokens"), ("max", "tokens"), *((pool, "logits") for pool in POOLED)],
)
def test_positions_that_share_a_maximum_have_the_gradient_of_eager(pool, same):
    """Ties come from equal tokens, or from small integers; `amax` distributes a gradient that `max` gives to one."""
    sparse_inductor.enable()
    torch.manual_seed(0)
    decoder = nn.Linear(8, 40)
    hidden = torch.randn(3, 7, 8)
    if same == "tokens":
        hidden[:, 3:5] = hidden[:, :1]
    else:
        hidden = hidden.round()
        for p in decoder.parameters():
            p.data = (p * 4).round()
    mask = (torch.arange(7) < torch.tensor([7, 5, 2])[:, None]).float()[..., None]
    leaves = (hidden.requires_grad_(), *decoder.parameters())
    weights = torch.linspace(0.5, 1.5, 120).view(3, 40)

    def gradients(fn):
        return torch.autograd.grad((fn(hidden) * weights).sum(), leaves)

    def head(hidden):
        return POOLED[pool](decoder(hidden), mask)

    if pool == "aminmax" and torch.__version__ < (2, 13):
        pytest.skip("this torch has no derivative of aminmax")
    compiled = compile_without_codegen(head)
    torch.testing.assert_close(gradients(compiled), gradients(head))
    assert compiled.calls("splade_head_train") == 1


def test_a_shared_maximum_in_the_longest_sequence_of_a_width():
    """One byte stores the position among up to 127 tokens, and whether the maximum is shared."""
    for length in (127, 128):
        hidden = torch.ones(1, length, 2, requires_grad=True)
        values, _ = own_operator("splade_head")(
            hidden, torch.ones(3, 2), None, [], "relu", even=True
        )
        (grad,) = torch.autograd.grad(values.sum(), hidden)
        torch.testing.assert_close(grad, torch.full_like(grad, 3 / length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "bounded", [lambda z: z.clamp_min(0), lambda z: torch.maximum(z, torch.zeros_like(z))]
)
def test_zeros_of_a_bounded_block_pass_on_the_gradient_of_eager(dtype, bounded):
    """A padding row has projections of exactly 0. In 16-bit dtypes, the threshold just below 0 may round to 0."""
    up, down = nn.Linear(8, 32, bias=False, dtype=dtype), nn.Linear(32, 8, dtype=dtype)
    x = torch.zeros(4, 8, dtype=dtype, requires_grad=True)

    def block(x):
        return down(bounded(up(x)))

    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    with sparse_inductor.enabled(only="relu_ffn", policy="always"):
        (got,) = torch.autograd.grad(compile_without_codegen(block)(x).sum(), x)
        assert len(sparse_inductor.report().rewrites) >= 1
    torch.testing.assert_close(got, wanted)
