"""For an index out of range, the rewritten program raises an error of the same type as PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_inductor.testing import compile_without_codegen
from support import only

B, N, L, V = 2, 20, 4, 30
WEIGHTS = torch.linspace(0.1, 1, N * L).view(N, L)
ROWS = torch.arange(N).repeat_interleave(L)


def looked_up(read):
    def program(q, ids, rows):
        return (read(q, ids) * WEIGHTS).sum(-1)

    return program


def added_up(add):
    def program(q, ids, rows):
        contributions = q[:, ids.flatten()] * WEIGHTS.flatten()
        return add(torch.zeros(q.shape[0], N), rows, contributions)

    return program


def bags(q, ids, rows):
    return F.embedding_bag(ids, q.t(), per_sample_weights=WEIGHTS, mode="sum").t()


LOOKUPS = {
    "indexing": looked_up(lambda q, ids: q[:, ids]),
    "take": looked_up(lambda q, ids: q[0].take(ids)),
    "gather": looked_up(lambda q, ids: q[0].gather(0, ids.flatten()).view(ids.shape)),
    "take_along_dim": looked_up(
        lambda q, ids: torch.take_along_dim(q, ids.view(1, -1), 1).view(q.shape[0], *ids.shape)
    ),
    "index_select": looked_up(
        lambda q, ids: q.index_select(1, ids.flatten()).view(q.shape[0], *ids.shape)
    ),
    "index_select of one query": looked_up(
        lambda q, ids: q[0].index_select(0, ids.flatten()).view(ids.shape)
    ),
    "embedding": looked_up(lambda q, ids: F.embedding(ids, q.t()).permute(2, 0, 1)),
    "embedding_bag": bags,
}
SUMS = {
    "index_add": added_up(lambda out, rows, x: out.index_add(1, rows, x)),
    "index_add of one query": lambda q, ids, rows: torch.zeros(N).index_add(
        0, rows, q[0][ids.flatten()] * WEIGHTS.flatten()
    ),
    "index_put": added_up(
        lambda out, rows, x: torch.zeros(N, B).index_put((rows,), x.t(), accumulate=True)
    ),
    "scatter_add": added_up(lambda out, rows, x: out.scatter_add(1, rows.expand(B, -1), x)),
}


def outcome(program, q, ids, rows):
    try:
        return program(q, ids, rows)
    except Exception as error:
        return type(error)


def check(program, *calls):
    """Compile the program once, and compare its result or error with eager's for each of the calls."""
    expected = [outcome(program, *call) for call in calls]
    with only("sparse_scores") as report:
        compiled = compile_without_codegen(program)
        got = [outcome(compiled, *call) for call in calls]
        assert len(report.rewrites) == 1, str(report)
    for found, right in zip(got, expected):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(found, right)
        else:
            assert found is right


IDS = torch.arange(N * L).view(N, L) % V


def with_one(indices, at, *values):
    """Return copies of indices with another value in one place."""
    for value in values:
        (copy := indices.clone())[at] = value
        yield copy


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LOOKUPS)
def test_ids(name, training):
    q = torch.rand(B, V, requires_grad=training)
    with torch.set_grad_enabled(training):
        check(
            LOOKUPS[name], *((q, ids, ROWS) for ids in with_one(IDS, (3, 1), V, V + 1, -1, -V - 1))
        )


@pytest.mark.parametrize("name", SUMS)
def test_rows(name):
    q = torch.rand(B, V)
    with torch.no_grad():
        check(SUMS[name], *((q, IDS, rows) for rows in with_one(ROWS, 5, N, -1)))


def test_the_best_documents():
    def program(q, ids, rows):
        return LOOKUPS["indexing"](q, ids, rows).topk(3).values

    q = torch.rand(B, V)
    with torch.no_grad():
        check(program, *((q, ids, ROWS) for ids in with_one(IDS, (0, 0), 0, V)))


def test_a_mask_lets_what_it_leaves_out_be_padding():
    def program(q, ids, rows):
        return torch.where(ids < V // 2, q[:, ids] * WEIGHTS, 0.0).sum(-1)

    with torch.no_grad():
        check(program, (torch.rand(B, V), IDS, ROWS))
