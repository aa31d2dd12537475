"""The index: pages of results, lowest scores, scores of candidates, and documents that replace others."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from sparse_inductor import SparseIndex

N, V, B = 40, 12, 3
INF = float("inf")


pytestmark = pytest.mark.usefixtures("small_segments")


def collection(weights: str = "float32") -> SparseIndex:
    torch.manual_seed(0)
    dense = torch.rand(N, V) * (torch.rand(N, V) < 0.4)
    dense[::7] = 0
    index = SparseIndex.build(dense[:25], weights=weights)
    index.append(dense[25:])
    index.delete([4, 30])
    return index


def queries_of(b: int = B) -> Tensor:
    return torch.rand(b, V, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("query", [queries_of(), queries_of()[0]])
def test_pages_are_parts_of_one_result(query):
    index = collection()
    whole = index.search(query, N + 5)
    for first in range(0, N + 5, 9):
        found = index.search(query, 9, offset=first)
        for got, want in zip(found, whole):
            assert torch.equal(
                got[..., : want[..., first:].shape[-1]], want[..., first : first + 9]
            )
    past = index.search(query, 3, offset=10**4)
    assert (past[0] == -INF).all() and (past[1] == -1).all()


@pytest.mark.parametrize("lowest", [0.0, 1, 1.5, -1.0, 100.0, np.float32(1.5), torch.tensor(1.0)])
def test_what_scores_less_is_no_result(lowest):
    index, q = collection(), queries_of()
    scores, ids = index.search(q, N, min_score=lowest)
    want, which = index.search(q, N)
    kept = want >= lowest
    assert torch.equal(scores, want.where(kept, -INF)) and torch.equal(ids, which.where(kept, -1))
    q[1, 0] = float("nan")
    scores, ids = index.search(q, 2, min_score=lowest)
    assert scores[1].isnan().all() and (ids[1] == -1).all()


@pytest.mark.parametrize(("options", "error"), [
    ({"offset": -1}, ValueError), ({"offset": 1.5}, ValueError), ({"min_score": float("nan")}, ValueError),
    ({"offset": True}, ValueError), ({"min_score": np.float32("nan")}, ValueError), ({"min_score": "1"}, ValueError),
    ({"min_score": torch.zeros(3)}, ValueError),
])  # fmt: skip
def test_bad_pages_are_refused(options, error):
    with pytest.raises(error, match="offset|min_score"):
        collection().search(queries_of(), 3, **options)


def test_a_page_in_a_compiled_program():
    index, q = collection(), queries_of()
    search = torch.compile(
        lambda x: index.search(x, 4, offset=2, min_score=1.0), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        found, want = search(q), index.search(q, 4, offset=2, min_score=1.0)
        assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
        index.append(torch.rand(9, V))


def test_ten_thousand_results():
    dense = torch.randint(5, (12_000, V)).float()
    q = torch.randint(3, (2, V)).float()  # many ties
    scores, ids = SparseIndex.build(dense).search(q, 10_000)
    want, which = torch.sort(q @ dense.T, dim=1, descending=True, stable=True)
    assert torch.equal(scores, want[:, :10_000]) and torch.equal(ids, which[:, :10_000])


FORMS = {
    "tensor": lambda ids: ids,
    "int32": lambda ids: ids.int(),
    "array": lambda ids: ids.numpy(),
    "list": lambda ids: ids.tolist(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_candidates_have_their_scores(form, weights):
    index, q = collection(weights), queries_of()
    every = index.scores(q)
    for ids in (torch.tensor([39, 0, 17, 4, 17, 16, 15]), torch.tensor([], dtype=torch.int64)):
        assert torch.equal(index.scores(q, FORMS[form](ids)), every[:, ids])
        assert torch.equal(index.scores(q[0], FORMS[form](ids)), every[0, ids])
    scores, ids = index.search(q, N)
    assert torch.equal(index.scores(q, FORMS[form](ids)), scores), "-1 scores -inf"
    assert torch.equal(index.scores(q[0], FORMS[form](ids[0])), scores[0])
    assert index.scores(q[:0], FORMS[form](ids[:0])).shape[0] == 0 or form == "list"


def test_candidates_carry_a_gradient():
    index, q = collection(), queries_of().requires_grad_()
    ids = torch.tensor([[5, 6], [17, 4], [38, 0]])
    picked = index.scores(q).gather(1, ids)
    weight = torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]])
    (want,) = torch.autograd.grad((picked.where(picked > -INF, 0) * weight).sum(), q)
    found = index.scores(q, ids)
    (got,) = torch.autograd.grad((found.where(found > -INF, 0) * weight).sum(), q)
    torch.testing.assert_close(got, want)


def test_an_empty_index_has_no_candidates():
    assert SparseIndex(V).scores(queries_of(), []).shape == (B, 0)
    assert SparseIndex(V).scores(queries_of(), [-1]).eq(-INF).all()


@pytest.mark.parametrize(("ids", "error"), [
    ([N], IndexError), ([-2], IndexError), ([[1, 2]], ValueError), ([[[1]]], ValueError), ([0.5], TypeError),
    (np.ones(N, bool), TypeError), ([True, 2], TypeError), (["a"], TypeError), ([1 << 70], IndexError),
])  # fmt: skip
def test_bad_candidates_are_refused(ids, error):
    with pytest.raises(error, match="document|candidates"):
        collection().scores(queries_of(), ids)


def test_documents_replace_others():
    index = collection()
    live = index.num_live
    assert index.append([([1], [50.0]), ([1], [60.0])], replacing=[3, 5]) == range(N, N + 2)
    assert index.num_live == live
    assert index.search(([1], [1.0]), N)[1][:2].tolist() == [N + 1, N]
    assert not torch.isin(index.search(queries_of(), N)[1], torch.tensor([3, 5])).any()
    for bad, error in (([N + 2], IndexError), ([0.5], TypeError), ("x", TypeError)):
        with pytest.raises(error):
            index.append([([1], [1.0])], replacing=bad)
        assert (len(index), index.num_live) == (N + 2, live)
    with pytest.raises(ValueError, match="term id"):
        index.append([([V], [1.0])], replacing=[7])
    assert index.num_live == live


def test_copies_of_an_index_grow_and_lose_documents_apart():
    """At first they share the memory of their deletion marks."""
    one = SparseIndex.build(torch.eye(V))
    one.append(torch.eye(V)[:1])  # now the index has spare capacity
    two = copy.deepcopy(one)
    one.append(torch.eye(V)[:3])
    one.delete([V + 2])
    two.append(torch.eye(V)[:5])
    assert (len(one), one.num_live, len(two), two.num_live) == (V + 4, V + 3, V + 6, V + 6)
    one.append(torch.eye(V)[:9])
    assert one.num_live == V + 12 and pickle.loads(pickle.dumps(two)).num_live == V + 6
