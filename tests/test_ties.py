"""At a bound the gradient is that of the torch in use, which changed in 2.14 for `clamp`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_inductor import compat
from sparse_inductor.epilogue.steps import dual
from sparse_inductor.match.graph import GraphView
from sparse_inductor.match.scalars import scalar_steps
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
    """The answer is kept; it is looked for in the middle of a compile."""
    ask = compat.clamp_has_a_slope_at_its_bounds.__wrapped__
    usual = ask()
    with torch._subclasses.FakeTensorMode(), torch.inference_mode():
        assert ask() is usual
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert ask() is usual
    assert seen == []
