"""Mistakes that a rewrite of a ReLU feed-forward block could have."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from planted import bug
from planted.bug import Plant, instead, programs, result
from sparse_inductor.epilogue.steps import Step
from sparse_inductor.match.chains.chain import Chain
from sparse_inductor.match.feed_forward.block import Joined
from sparse_inductor.ops import _relu_ffn_aten as aten

BlockMatch = importlib.import_module("sparse_inductor.patterns.relu_ffn").BlockMatch
PATTERN = "relu_ffn"
K, N = 8, 24


class Block(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate, self.up, self.down = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


def _gated(m: Block, x: torch.Tensor) -> torch.Tensor:
    return m.down(F.relu(m.gate(x)) * m.up(x))


def _squared(m: Block, x: torch.Tensor) -> torch.Tensor:
    return m.down(F.relu(m.up(x)).square())


def _counted(m: Block, x: torch.Tensor) -> Any:
    h = F.relu(m.gate(x)) * m.up(x)
    return m.down(h), h.abs().mean()


def _build(forward: Callable[..., Any]) -> tuple[nn.Module, tuple[torch.Tensor]]:
    model = Block(forward)
    torch.manual_seed(0)
    return model, (torch.randn(2, 6, K, requires_grad=True),)


PROGRAMS = programs(PATTERN, _build, gated=_gated, squared=_squared, counted=_counted)
Bug = functools.partial(bug.Bug, program="gated")
_gradient = functools.partial(bug.gradient, aten)


def _reading(change: Callable[[Any], dict[str, Any]]) -> Plant:
    """Return a plant that changes the match's description of the block before it is replaced."""

    def wrong(replace: Callable[..., None], self: Any) -> None:
        self.reading = dataclasses.replace(self.reading, **change(self.reading))
        replace(self)

    return instead(BlockMatch, "replace", wrong)


def _joined(change: Callable[..., Any]) -> Plant:
    """Return a plant that changes the pairs of weight and bias before they are inserted."""

    def wrong(emit: Callable[..., Any], self: Joined, e: Any, dtype: torch.dtype) -> Any:
        x, pairs = emit(self, e, dtype)
        return x, change(e, pairs)

    return instead(Joined, "emit", wrong)


def _weights(change: Callable[..., Any]) -> Plant:
    return _joined(lambda e, pairs: [change(e, *pair) for pair in pairs])


def _halved(
    linear_input: Callable[..., Any], self: Chain, e: Any, *args: Any, **kwargs: Any
) -> Any:
    return e.method("mul", linear_input(self, e, *args, **kwargs), 0.5)


def _program(*steps: Step) -> Callable[[Any], dict[str, Any]]:
    def change(r: Any) -> dict[str, Any]:
        gate = copy.copy(r.gate)
        gate.steps = [*steps]
        return {"gate": gate}

    return change


def _down(**fields: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    return lambda r: {
        "down": dataclasses.replace(r.down, **{k: f(r.down) for k, f in fields.items()})
    }


def _statistic_of_the_gate(replace: Callable[..., None], self: Any) -> None:
    found = tuple(s._replace(of="gate") for s in self.others.statistics)
    self.others = self.others._replace(statistics=found)
    replace(self)


def _few_are_kept(forward: Callable[..., Any], x: Any, b: Any, stats: Any, packed: Any) -> Any:
    """Save the backward's operands only for neurons that exceed the threshold by 0.2."""
    return forward(x, dataclasses.replace(b, zero_threshold=b.zero_threshold + 0.2), stats, packed)


BUGS = (
    # The replacement by the pattern
    Bug("biases of the neurons dropped", _weights(lambda e, w, b: (w, None))),
    Bug("weights of the next neuron", _weights(lambda e, w, b: (e.method("roll", w, 1, 0), b))),
    Bug("gate and up exchanged", _joined(lambda e, pairs: pairs[::-1])),
    Bug("up dropped", _reading(lambda r: {"up": None})),
    Bug("square dropped", _reading(_program(Step("relu"))), program="squared"),
    Bug("another threshold", _reading(_program(Step("threshold", (0.2, 0.0))))),
    Bug("bias of the result dropped", _reading(_down(bias=lambda d: None))),
    Bug("result of the next neuron", _reading(_down(weight=lambda d: lambda e: e.method("roll", d.weight(e), 1, 1)))),
    Bug("input halved", instead(Chain, "linear_input", _halved)),
    Bug("statistic of the gate", instead(BlockMatch, "replace", _statistic_of_the_gate), program="counted"),
    # The operator's forward
    Bug("last row not written", result(aten, "forward", lambda y: torch.cat([y[:-1], y[:1]]))),
    # The operator's backward
    Bug("neurons near zero forgotten", instead(aten, "forward", _few_are_kept), backward=True),
    Bug("gradient of the input doubled", _gradient(0, lambda g: g * 2), backward=True),
    Bug("gradient of the gate dropped", _gradient(1, torch.zeros_like), backward=True),
    Bug("gradient of a neuron's bias dropped", _gradient(2, torch.zeros_like), backward=True),
    Bug("gradient of the next neuron's weights", _gradient(3, lambda g: g.roll(1, 0)), backward=True),
    Bug("gradient of the result's weights dropped", _gradient(5, torch.zeros_like), backward=True),
    Bug(
        "slope of the square forgotten",
        result(aten, "dual_parts", lambda a, slope, flat: (a, (slope != 0).to(slope.dtype), flat)),
        program="squared",
        backward=True,
    ),
)  # fmt: skip
