"""Mistakes that a rewrite of sparse scoring could have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planted import bug
from planted.bug import Plant, instead, programs, result
from sparse_inductor.aten import sparse_scores as aten
from sparse_inductor.match.scoring.scored import Scores

PATTERN = "sparse_scores"
N, L, V, B = 12, 5, 30, 3


def _padded(q: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> Any:
    """Score documents stored as padded rows."""
    return (q[:, ids] * values).sum(-1)


def _accumulated(
    q: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, rows: torch.Tensor
) -> Any:
    """Score one query against documents stored as coordinates."""
    return torch.zeros(N).index_add(0, rows, q[0][ids.flatten()] * values.flatten())


def _best(q: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> Any:
    """Return the best scores; without gradients, the full scores exist inside the operator only."""
    return (q[:, ids] * values).sum(-1).topk(4, dim=1)


def _build(score: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(V, generator=generator)[:L] for _ in range(N)])
    values = torch.rand(N, L, generator=generator) + 0.1
    query = torch.rand(B, V, generator=generator).requires_grad_()
    return score, (query, ids, values, torch.arange(N).repeat_interleave(L))


PROGRAMS = programs(
    PATTERN, _build, padded_documents=_padded, coordinates=_accumulated, best_documents=_best
)
Bug = functools.partial(bug.Bug, program="padded_documents")


def _documents(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Plant:
    """Return a plant that changes the ids and values that are passed to the operator."""
    return instead(Scores, "documents", lambda f, self, e, V: change(e, *f(self, e, V)))


def _rows(change: Callable[[Any, Any], Any]) -> Plant:
    def wrong(emit: Callable[..., Any], self: Scores, e: Any, k: Any = None) -> Any:
        rows = self.rows
        object.__setattr__(self, "rows", lambda e: change(e, rows(e)))
        return emit(self, e, k)

    return instead(Scores, "emit", wrong)


def _emitted(change: Callable[[Any, Any], Any]) -> Plant:
    return instead(Scores, "emit", lambda f, self, e, k=None: change(e, f(self, e, k)))


def _blocks(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def wrong(blocks: Callable[..., Any], *args: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for first, scores in blocks(*args):
            yield first, change(scores)

    return instead(aten, "blocks", wrong)


def _without_the_best(scores: torch.Tensor) -> torch.Tensor:
    return scores.scatter(1, scores.argmax(1, keepdim=True), 0.0)


def _transposed(change: Callable[[aten.Documents], aten.Documents]) -> Plant:
    return result(aten, "transposed", change)


def _values(docs: aten.Documents, change: Callable[[torch.Tensor], torch.Tensor]) -> aten.Documents:
    return aten.Documents(docs.offsets, docs.terms, change(docs.values))


BUGS = (
    # The replacement by the pattern
    Bug("weights of the next document", _documents(lambda e, i, v: (i, e.method("roll", v, 1, 0)))),
    Bug("terms of the next document", _documents(lambda e, i, v: (e.method("roll", i, 1, 0), v))),
    Bug("weights of the next term", _documents(lambda e, i, v: (i, e.method("roll", v, 1, 1)))),
    Bug("weights dropped", _documents(lambda e, i, v: (i, e.call(torch.ones_like, v)))),
    Bug("weights halved", _documents(lambda e, i, v: (i, e.method("mul", v, 0.5)))),
    Bug("scores of the next query", _emitted(lambda e, s: e.method("roll", s, 1, 0))),
    Bug("scores of the next document", _emitted(lambda e, s: e.method("roll", s, 1, 1))),
    Bug("entries counted for the next document", _rows(lambda e, r: e.method("roll", r, 1, 0)), program="coordinates"),
    Bug("entries counted for the first document", _rows(lambda e, r: e.method("mul", r, 0)), program="coordinates"),
    # The operator's forward
    Bug("last document not written", _blocks(lambda s: torch.cat([s[:, :-1], s[:, :1]], 1))),
    Bug("the smallest in place of the largest", _blocks(lambda s: -s), program="best_documents"),
    Bug("a best document missed", _blocks(_without_the_best), program="best_documents"),
    # The operator's backward
    Bug("gradient without the weights", _transposed(lambda d: _values(d, torch.ones_like)), backward=True),
    Bug("gradient of the next term", _transposed(lambda d: _values(d, lambda v: v.roll(1))), backward=True),
    Bug("gradient doubled for scores", _transposed(lambda d: _values(d, lambda v: v * 2)), backward=True),
)  # fmt: skip
