"""Mistakes that a rewrite of the SPLADE head could have."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from planted import bug
from planted.bug import instead, programs, result
from sparse_inductor.epilogue.plan import Lowered
from sparse_inductor.epilogue.steps import Program, Step
from sparse_inductor.match.chains.chain import Chain
from sparse_inductor.ops import _linear_max_aten as aten

HeadMatch = importlib.import_module("sparse_inductor.patterns.splade_head").HeadMatch
op = importlib.import_module("sparse_inductor.ops.splade_head")  # ops.splade_head is the function

PATTERN = "splade_head"
# As many sequences as positions, so that a wrong dimension does not show as a wrong shape.
B = S = 6
D, V = 8, 40


class Head(nn.Module):
    def __init__(self, pool: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.decoder = nn.Linear(D, V)
        self.pool = pool

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.pool(self.decoder(hidden), mask)


def _splade(z: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (torch.log1p(torch.relu(z)) * m.unsqueeze(-1)).amax(1)


def _soft_cap(z: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (torch.log1p(torch.relu(torch.tanh(z / 2) * 2)) * m.unsqueeze(-1)).amax(1)


def _positions(z: torch.Tensor, m: torch.Tensor) -> Any:
    return torch.max(torch.log1p(torch.relu(z)).masked_fill(m[..., None] == 0, -1.0), dim=1)


def _build(pool: Callable[..., Any]) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Build a head and its arguments: the last sequences are shorter, one is empty."""
    model = Head(pool)
    torch.manual_seed(0)
    hidden = torch.randn(B, S, D, requires_grad=True)
    lengths = torch.tensor([S, S, 5, 4, 2, 0])
    return model, (hidden, (torch.arange(S) < lengths[:, None]).long())


PROGRAMS = programs(PATTERN, _build, splade=_splade, soft_cap=_soft_cap, positions=_positions)
Bug = functools.partial(bug.Bug, program="splade")


def _weight_and_bias(change: Callable[..., Any]) -> bug.Plant:
    def changed(f: Callable[..., Any], self: Chain, e: Any) -> Any:
        (weight,), bias = f(self, e)
        weight, bias = change(e, weight, bias)
        return [weight], bias

    return instead(Chain, "weights_and_bias", changed)


def _rows(change: Callable[..., Any]) -> bug.Plant:
    return instead(Chain, "row_operands", lambda f, self, e: [change(e, r) for r in f(self, e)])


def _linear_input(change: Callable[..., Any]) -> bug.Plant:
    return instead(
        Chain, "linear_input", lambda f, self, e, *at, **how: change(e, f(self, e, *at, **how))
    )


def _program(change: Callable[[Program], Program]) -> Callable[[], Any]:
    original = HeadMatch.replace

    def wrong(self: Any) -> None:
        self.program = change(self.program)
        original(self)

    return lambda: mock.patch.object(HeadMatch, "replace", wrong)


def _without(*names: str) -> Callable[[Program], Program]:
    return lambda steps: tuple(s for s in steps if s.fn not in names)


def _no_mask() -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Chain, "row_operands", lambda self, e: []))
    stack.enter_context(_program(_without("row_mul", "row_where"))())
    return stack


def _other_fill(low: Lowered) -> Lowered:
    fill = None if low.fill is None else torch.full_like(low.fill, 0.5)
    return low._replace(fill=fill)


_forward = functools.partial(result, aten, "forward")
_gradients = functools.partial(result, aten, "backward")


def _winners(change: Callable[..., Any]) -> bug.Plant:
    """Return a plant that changes the winning logits' gradients and positions before the backward's products."""
    return instead(aten, "_from_entries", lambda f, g, w, *rest: f(*change(g, w), *rest))


@contextlib.contextmanager
def _flat_slope() -> Iterator[None]:
    with mock.patch.object(aten, "dual", lambda steps, y, rows=(): (y, torch.ones_like(y))):
        yield


def _all(t: Any) -> Any:
    return t if t is None else torch.zeros_like(t)


def _turned(e: Any, t: Any) -> Any:
    return e.method("transpose", t, 0, 1)


def _wrong_dimension() -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(_linear_input(_turned)())
    stack.enter_context(_rows(_turned)())
    return stack


BUGS = (
    # The replacement by the pattern
    Bug("bias dropped", _weight_and_bias(lambda e, w, b: (w, None))),
    Bug("bias twice", _weight_and_bias(lambda e, w, b: (w, e.method("mul", b, 2)))),
    Bug("bias of the neighbour", _weight_and_bias(lambda e, w, b: (w, e.method("roll", b, 1)))),
    Bug("weight of the neighbour", _weight_and_bias(lambda e, w, b: (e.method("roll", w, 1, 0), b))),
    Bug("minimum", _weight_and_bias(lambda e, w, b: (e.method("neg", w), b))),
    Bug("wrong dimension", _wrong_dimension),
    # By arithmetic: Inductor of torch 2.11 removes casts to a lower precision and back.
    Bug(
        "precision lost",
        _linear_input(lambda e, x: e.method("div", e.method("round", e.method("mul", x, 256.0)), 256.0)),
    ),
    Bug("mask dropped", _no_mask),
    Bug("mask inverted", _rows(lambda e, r: e.method("eq", r, 0))),
    Bug("mask of the next token", _rows(lambda e, r: e.method("roll", r, 1, 1))),
    Bug("mask of the next sequence", _rows(lambda e, r: e.method("roll", r, 1, 0))),
    Bug("relu dropped", _program(_without("relu"))),
    Bug("log1p dropped", _program(_without("log1p"))),
    Bug(
        "log instead of log1p",
        _program(lambda steps: tuple(Step("log") if s.fn == "log1p" else s for s in steps)),
    ),
    Bug("steps in another order", _program(lambda steps: (steps[1], steps[0], *steps[2:]))),
    Bug(
        "wrong constant",
        _program(lambda steps: tuple(Step("mul", (2.1,)) if s.consts == (2.0,) else s for s in steps)),
        program="soft_cap",
    ),
    Bug("tanh dropped", _program(_without("tanh")), program="soft_cap"),
    # The operator's forward
    Bug("fill of an empty sequence", result(op, "_lower", _other_fill)),
    Bug("last sequence not written", _forward(lambda v, w, p: (torch.cat([v[:-1], v[:1]]), w, p))),
    Bug("positions off by one", _forward(lambda v, w, p: (v, w if w is None else (w + 1) % S, p)), program="positions"),
    # The operator's backward
    Bug("gradient of the bias dropped", _gradients(lambda h, w, b: (h, w, _all(b))), backward=True),
    Bug("gradient of the weight dropped", _gradients(lambda h, w, b: (h, _all(w), b)), backward=True),
    Bug("gradient doubled", _gradients(lambda h, w, b: (h * 2, w, b)), backward=True),
    Bug("slope of log1p forgotten", _flat_slope, backward=True),
    Bug("gradient at the wrong position", _winners(lambda g, w: (g, (w + 1) % S)), backward=True),
    Bug("gradient of the wrong sequence", _winners(lambda g, w: (g.roll(1, 0), w.roll(1, 0))), backward=True),
)  # fmt: skip
