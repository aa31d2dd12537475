"""Mistakes that a rewrite of entmax over rows could have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import entmax as package
import torch
from torch import fx

from planted.bug import Bug, Plant, instead, programs, result
from sparse_inductor.graph.emit import Emitter
from sparse_inductor.match.entmax.transform import Transform
from sparse_inductor.ops import _entmax_aten as aten

PATTERN = "entmax"
N = 6  # for rows and columns, so that a wrong dimension does not show as a wrong shape


def _router(z: torch.Tensor, alpha: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return package.entmax15(z.masked_fill(~keep, -1e4), dim=1)


def _learned_alpha(z: torch.Tensor, alpha: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return package.entmax_bisect(z, alpha, dim=1)


def _build(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    z = (torch.randn(N, N, N, generator=generator) * 2).requires_grad_()
    alpha = torch.linspace(1.2, 1.9, N).reshape(1, 1, N).clone().requires_grad_()
    return fn, (z, alpha, torch.rand(N, N, N, generator=generator) < 0.7)


PROGRAMS = programs(PATTERN, _build, router=_router, learned_alpha=_learned_alpha)


def _found(change: Callable[[Emitter, Any], dict[str, Any]]) -> Plant:
    """Return a plant that changes the match before it is replaced."""

    def wrong(replace: Callable[..., None], self: Any) -> None:
        e = Emitter(self.anchor)
        replace(dataclasses.replace(self, **change(e, self)))

    return instead(Transform, "replace", wrong)


def _unmasked(e: Emitter, found: Any) -> dict[str, Any]:
    return {"source": found.source.args[0]}


def _no_threshold(solve: Callable[..., Any], z: torch.Tensor, *rest: Any) -> torch.Tensor:
    y = solve(z, *rest)
    z.mul_(1.001)
    return y


def _last_is_first(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[..., :-1], y[..., :1]], -1)


def _not_centred(_: Any, g: torch.Tensor, u: torch.Tensor, alpha: Any) -> torch.Tensor:
    return g.mul_(u)


def _next_alpha(e: Any, f: Any) -> dict[str, Any]:
    return {"alpha": e.method("roll", f.alpha, 1, 2)} if isinstance(f.alpha, fx.Node) else {}


BUGS = (
    # The replacement by the pattern
    Bug("alpha of sparsemax", _found(lambda e, f: {"alpha": 2.0}), "router"),
    Bug("the last dimension", _found(lambda e, f: {"dim": 2}), "router"),
    Bug("scores halved", _found(lambda e, f: {"source": e.method("mul", f.source, 0.5)}), "router"),
    Bug("scores of the next row", _found(lambda e, f: {"source": e.method("roll", f.source, 1, 0)}), "router"),
    Bug("mask of the scores dropped", _found(_unmasked), "router"),
    Bug("learned alpha ignored", _found(lambda e, f: {"alpha": 1.5}), "learned_alpha"),
    Bug("alpha of the next column", _found(_next_alpha), "learned_alpha"),
    # The operator's forward
    Bug("rows that sum to more than one", instead(aten, "solve_", _no_threshold), "router"),
    Bug("last column not written", result(aten, "forward", _last_is_first), "router"),
    # The operator's backward
    Bug("gradient not centred", instead(aten, "score_gradient_", _not_centred), "router", backward=True),
    Bug("slopes of sparsemax", result(aten, "slopes", lambda u: u.sign()), "router", backward=True),
    Bug("gradient of alpha dropped", result(aten, "alpha_gradient", lambda g: g * 0), "learned_alpha", backward=True),
)  # fmt: skip
