"""A filtered search has the results of a search in an index of the allowed documents alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ranking import best, counts
from sparse_inductor import SparseIndex
from sparse_inductor.index import queries

N, V, B = 40, 12, 3


def collection(n: int = N) -> Tensor:
    return counts(n, V, share=0.4)


def queries_of(b: int = B) -> Tensor:
    return counts(b, V, seed=1)


def agrees(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])


@settings(max_examples=60)
@given(
    allow=st.none() | st.sets(st.integers(0, N - 1)),
    deny=st.none() | st.sets(st.integers(0, N - 1)),
    gone=st.sets(st.integers(0, N - 1)),
    k=st.integers(0, N + 2),
)
def test_a_filter_leaves_what_it_names(allow, deny, gone, k):
    dense, q = collection(), queries_of()
    index = SparseIndex.build(dense[:25])
    index.append(dense[25:])
    index.delete(sorted(gone))
    left = torch.tensor(
        [
            i not in gone and (allow is None or i in allow) and (deny is None or i not in deny)
            for i in range(N)
        ]
    )
    agrees(index.search(q, k, allow=allow, deny=deny), best(dense, q, k, left))


FORMS = {
    "ids": lambda mask: mask.nonzero().squeeze(1),
    "int32": lambda mask: mask.nonzero().squeeze(1).int(),
    "list": lambda mask: mask.nonzero().squeeze(1).tolist(),
    "column": lambda mask: mask.nonzero(),
    "mask": lambda mask: mask,
    "numpy": lambda mask: mask.numpy(),
    "numpy, backwards": lambda mask: mask.flip(0).numpy()[::-1],
    "sparse": lambda mask: mask.to_sparse(),
    "booleans": lambda mask: mask.tolist(),
    "for each": lambda mask: mask.expand(B, N),
    "lists for each": lambda mask: mask.expand(B, N).tolist(),
    "arrays for each": lambda mask: [*mask.expand(B, N).numpy()],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_filter(form):
    mask = torch.rand(N, generator=torch.Generator().manual_seed(2)) < 0.3
    index, q = SparseIndex.build(collection()), queries_of()
    agrees(index.search(q, 7, allow=FORMS[form](mask)), best(collection(), q, 7, mask))
    agrees(index.search(q, 7, deny=FORMS[form](mask)), best(collection(), q, 7, ~mask))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_each_query_may_have_its_own_mask(monkeypatch, sparse):
    monkeypatch.setattr(queries, "_CPU_BYTES", 4 * V * 2)  # two queries per block
    masks = torch.rand(B, N, generator=torch.Generator().manual_seed(3)) < 0.2
    masks[1] = False
    index, q = SparseIndex.build(collection()), queries_of()
    asked = q.to_sparse_csr() if sparse else q
    agrees(index.search(asked, 5, allow=masks), best(collection(), q, 5, masks))
    scores, ids = index.search(q[0], 5, deny=~masks[0])
    agrees((scores[None], ids[None]), best(collection(), q[:1], 5, masks[0]))


@pytest.mark.parametrize("mask", [torch.ones(30, dtype=torch.bool), [True] * 30])
def test_documents_that_came_after_a_mask_are_not_marked_in_it(mask):
    index, q = SparseIndex.build(collection()[:30]), queries_of()
    index.append(collection()[30:])
    first = torch.arange(N) < 30
    agrees(index.search(q, 9, allow=mask), best(collection(), q, 9, first))
    agrees(index.search(q, 9, deny=mask), best(collection(), q, 9, ~first))


@pytest.mark.parametrize("each", [False, True], ids=["for all", "for each"])
def test_a_compiled_search_takes_filters(each):
    index, q = SparseIndex.build(collection()[:30]), queries_of()
    program = torch.compile(
        lambda q, allow: index.search(q, 6, allow=allow), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        for n in (30, N):
            masks = torch.rand(B, n, generator=torch.Generator().manual_seed(n)) < 0.3
            mask = masks if each else masks[0]
            agrees(program(q, mask), best(collection()[:n], q, 6, mask))
            index.append(collection()[n:])


@pytest.mark.parametrize("none", [(), {*()}, torch.tensor([]), np.array([]), [False] * N])
def test_a_filter_may_name_nothing(none):
    index, q = SparseIndex.build(collection()), queries_of()
    program = torch.compile(
        lambda q: (index.search(q, 6, allow=none), index.search(q, 6, deny=none)),
        fullgraph=True,
        backend="aot_eager",
    )
    for allowed, denied in (
        program(q),
        (index.search(q, 6, allow=none), index.search(q, 6, deny=none)),
    ):
        agrees(allowed, best(collection(), q, 6, torch.zeros(N, dtype=torch.bool)))
        agrees(denied, best(collection(), q, 6, torch.ones(N, dtype=torch.bool)))


@pytest.mark.parametrize("marks", [None, torch.rand(B, N) < 0.5], ids=["all", "for each"])
def test_the_operators_take_marks_or_none(marks):
    index, ops = SparseIndex.build(collection()), torch.ops.sparse_inductor
    postings, counts, barred = index.operands(deny=marks)
    assert torch.equal(barred, torch.zeros(N, dtype=torch.bool) if marks is None else marks)
    torch.library.opcheck(ops.index_search, (queries_of(), list(postings), counts, barred, 4))
    torch.library.opcheck(ops.index_search_live, (queries_of(), index._handle, 4, None, marks))


@pytest.mark.parametrize(
    ("filters", "error", "said"),
    [
        ({"allow": [N]}, IndexError, f"there is no document {N}"),
        ({"allow": [0, 1 << 70]}, IndexError, f"there is no document {1 << 70}"),
        ({"deny": torch.tensor([-1])}, IndexError, "there is no document -1"),
        ({"allow": torch.ones(N + 1, dtype=torch.bool)}, IndexError, "allow: a mask of documents"),
        ({"deny": np.ones((1, 1, N), dtype=bool)}, IndexError, "deny: a mask of documents"),
        ({"allow": torch.ones(B + 1, N, dtype=torch.bool)}, IndexError, "4 rows for 3 queries"),
        ({"allow": torch.ones(N)}, TypeError, "must be integers"),
        ({"allow": torch.ones(B, 2).long()}, ValueError, "allow: ids are for all queries"),
        ({"deny": [[1, 2], [3, 4]]}, ValueError, "deny: ids are for all queries"),
        ({"allow": [[1, 2], [3]]}, TypeError, "must be an int, got \\[1, 2\\]"),
        ({"deny": "all"}, TypeError, "deny must be document ids.*got str 'all'"),
    ],
)
def test_what_is_no_filter(filters, error, said):
    with pytest.raises(error, match=said):
        SparseIndex.build(collection()).search(queries_of(), 3, **filters)
