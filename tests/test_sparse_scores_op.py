"""The operator `sparse_scores`, called directly: layouts, top-k, gradients, repeatability, errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_inductor.aten import sparse_scores as aten
from sparse_inductor.ops import sparse_scores

B, N, V, L = 3, 25, 17, 6


def documents(dtype=torch.float32, index=torch.int64):
    """Return padded ids and values [N, L], the equivalent dense fp64 matrix, and the mask of real entries."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (N, L), generator=g)
    values = torch.rand(N, L, generator=g).to(dtype)
    lengths = torch.randint(0, L + 1, (N,), generator=g)
    mask = torch.arange(L) < lengths[:, None]
    ids = torch.where(mask, ids, V)
    dense = torch.zeros(N, V + 1, dtype=torch.float64).scatter_add(1, ids, values.double())
    return ids.to(index), values, dense[:, :V], mask


def layouts(ids, values, mask):
    """Return the documents in every layout that the operator accepts."""
    rows = torch.arange(N)[:, None].expand(N, L)[mask]
    order = torch.randperm(rows.numel(), generator=torch.Generator().manual_seed(2))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)])
    flat, weights = ids[mask], values[mask]
    return {
        "padded": ((ids, values), {}),
        "offsets": ((flat, weights), {"offsets": offsets}),
        "rows": ((flat, weights), {"rows": rows, "num_docs": N}),
        "rows_in_any_order": ((flat[order], weights[order]), {"rows": rows[order], "num_docs": N}),
    }


def query(batch=B, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return torch.rand(batch, V, generator=g).to(dtype)


LAYOUTS = ["padded", "offsets", "rows", "rows_in_any_order"]


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_inner_products(layout, batch, index):
    ids, values, dense, mask = documents(index=index)
    args, more = layouts(ids, values, mask)[layout]
    q = query(batch)
    got = sparse_scores(q, *args, **more)
    torch.testing.assert_close(got, (q.double() @ dense.t()).float())
    found, which = sparse_scores(q, *args, **more, k=4)
    best, right = torch.sort(got, dim=1, descending=True, stable=True)
    assert torch.equal(found, best[:, :4]) and torch.equal(which, right[:, :4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_are_wide_and_results_are_as_asked(dtype):
    ids, values, dense, _ = documents(dtype)
    q = query(dtype=dtype)
    got = sparse_scores(q, ids, values)
    assert got.dtype == dtype
    exact = q.double() @ dense.t()
    torch.testing.assert_close(got, exact.to(dtype))
    wide = sparse_scores(q, ids, values, out_dtype=torch.float32)
    torch.testing.assert_close(wide, exact.float(), rtol=1e-6, atol=1e-6)


def test_one_query_has_no_batch_axis():
    ids, values, _, _ = documents()
    q = query()[0]
    assert sparse_scores(q, ids, values).shape == (N,)
    found, which = sparse_scores(q, ids, values, k=3)
    assert found.shape == which.shape == (3,)


def test_negative_ids_count_from_the_end_as_in_indexing():
    ids = torch.tensor([[-1, 0], [1, -2]])
    values, q = torch.ones(2, 2), query(1)
    torch.testing.assert_close(sparse_scores(q, ids, values), q[:, ids].sum(-1))


@settings(max_examples=30)
@given(data=st.data())
def test_top_k_is_a_stable_sort_of_the_scores(data):
    """Ties go to the lowest id, -0.0 equals 0.0, and NaN comes first, for every block size."""
    values = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0, float("nan"), float("inf"), -float("inf")])
    weights = torch.tensor(data.draw(st.lists(values, min_size=1, max_size=30)))
    k = data.draw(st.integers(0, len(weights)))
    ids = torch.zeros(len(weights), 1, dtype=torch.long)
    found, which = sparse_scores(torch.ones(1, 1), ids, weights[:, None], k=k)
    rank = [(not math.isnan(w), 0.0 if math.isnan(w) else -w) for w in weights.tolist()]
    order = sorted(range(len(weights)), key=lambda i: (rank[i], i))[:k]
    assert which[0].tolist() == order
    torch.testing.assert_close(found[0], weights[order], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_lies_as_it_is_declared(dtype):
    """Results are contiguous, whatever the strides of the sorted scores."""
    ids, values, _, _ = documents(dtype)
    best = sparse_scores(query(dtype=dtype), ids, values, k=4)
    assert all(t.is_contiguous() for t in best)


@pytest.mark.parametrize("k", [1, 5, N])
def test_blocks_do_not_change_the_result(k, monkeypatch):
    ids, values, _, _ = documents()
    q = query(12)
    whole = sparse_scores(q, ids, values, k=k)
    original = aten.blocks
    monkeypatch.setattr(aten, "blocks", lambda q, d: original(q, d, 1))
    split = sparse_scores(q, ids, values, k=k)
    assert torch.equal(whole[0], split[0]) and torch.equal(whole[1], split[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [None, 4])
def test_the_gradient_goes_to_the_query(layout, k):
    ids, values, dense, mask = documents(torch.float64)
    args, more = layouts(ids, values, mask)[layout]
    q = query(dtype=torch.float64).requires_grad_()
    out = sparse_scores(q, *args, **more, k=k)
    want = q @ dense.t()
    if k is not None:
        out, want = out[0], want.topk(k).values
    cotangent = torch.rand_like(want)
    (got,) = torch.autograd.grad(out, q, cotangent)
    (right,) = torch.autograd.grad(want, q, cotangent)
    torch.testing.assert_close(got, right)


def test_document_weights_have_no_gradient_and_say_so():
    ids, values, _, _ = documents()
    with pytest.raises(ValueError, match="values must not require a gradient"):
        sparse_scores(query(), ids, values.requires_grad_())
    with torch.no_grad():
        sparse_scores(query(), ids, values)


def test_empty_inputs():
    none = torch.zeros(0, 4, dtype=torch.long)
    assert sparse_scores(query(), none, torch.zeros(0, 4)).shape == (B, 0)
    no_terms = torch.zeros(N, 0, dtype=torch.long)
    assert torch.equal(sparse_scores(query(), no_terms, torch.zeros(N, 0)), torch.zeros(B, N))
    ids, values, _, _ = documents()
    assert sparse_scores(query(0), ids, values).shape == (0, N)
    assert sparse_scores(query(), ids, values, k=0)[1].shape == (B, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": torch.zeros(N, L)}, TypeError, "ids must be one of"),
        ({"ids": torch.zeros(N, L + 1).long()}, ValueError, "values must have shape"),
        (
            {"ids": torch.zeros(N).long(), "values": torch.zeros(N)},
            ValueError,
            "ids must be [N, L]",
        ),
        ({"query": torch.zeros(1, 2, V)}, ValueError, "query must be [V] or [B, V]"),
        ({"query": torch.zeros(1, V).long()}, TypeError, "query must be one of"),
        ({"k": N + 1}, ValueError, "k must be between 0 and the number of documents, 25; got 26"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be one of (torch.float32,"),
        ({"k": -1}, ValueError, "got -1"),
        ({"ids": torch.full((N, L), V + 1)}, IndexError, "ids must be in [-17, 17], got 18"),
        ({"ids": torch.full((N, L), -V - 1)}, IndexError, "got -18"),
        ({"num_docs": 7}, ValueError, "num_docs is 7, but ids have 25 rows"),
    ],
)
def test_bad_input_names_the_value(change, error, message):
    ids, values, _, _ = documents()
    given = {"query": query(), "ids": ids, "values": values, **change}
    with pytest.raises(error) as raised:
        sparse_scores(**given)
    assert message in str(raised.value)


def test_bad_rows_and_offsets_name_the_value():
    flat, w = torch.zeros(3).long(), torch.zeros(3)
    with pytest.raises(ValueError, match="rows need num_docs"):
        sparse_scores(query(), flat, w, rows=flat)
    with pytest.raises(IndexError, match=r"rows must be in \[-2, 1\], got 5"):
        sparse_scores(query(), flat, w, rows=flat + 5, num_docs=2)
    with pytest.raises(
        IndexError, match="stay within the number of entries, 3; they go from 0 to 4"
    ):
        sparse_scores(query(), flat, w, offsets=torch.tensor([0, 4]))
    with pytest.raises(IndexError, match="fall in between"):
        sparse_scores(query(), flat, w, offsets=torch.tensor([0, 2, 1, 3]))
    with pytest.raises(ValueError, match="either rows or offsets"):
        sparse_scores(query(), flat, w, rows=flat, offsets=flat, num_docs=2)


@pytest.mark.parametrize("first, last", [(3, N), (0, 11), (5, 9), (7, 7)])
def test_offsets_of_some_documents_of_a_collection(first, last):
    """Entries before the first document and after the last one do not count and have no gradient."""
    ids, values, dense, mask = documents()
    (flat, weights), more = layouts(ids, values, mask)["offsets"]
    q = query().requires_grad_()
    got = sparse_scores(q, flat, weights, offsets=more["offsets"][first : last + 1])
    torch.testing.assert_close(got, (q.double() @ dense[first:last].t()).float())
    (grad,) = torch.autograd.grad(got.sum(), q)
    torch.testing.assert_close(grad, dense[first:last].sum(0).float().expand_as(grad))


def test_documents_of_postings_count_from_the_end():
    """An index of -1 is the last document, also in lists that are padded with -1."""
    positions, docs = torch.tensor([[0, 1]]), torch.tensor([[0, 2], [1, -1]])
    values, weights = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.ones(1, 2, 1)
    got = torch.ops.sparse_inductor.sparse_scores_postings(
        positions, weights, None, docs, values, 3
    )
    assert got.tolist() == [[1.0, 4.0, 10.0]]


def test_posting_operators_are_well_formed():
    g = torch.Generator().manual_seed(3)
    positions = torch.randint(0, V, (B, 4), generator=g)
    docs, values = torch.randint(0, N, (V, 5), generator=g), torch.rand(V, 5, generator=g)
    weights = torch.rand(B, 4, 1, generator=g)
    mask = torch.rand(B, 4, 5, generator=g) < 0.7
    ops = torch.ops.sparse_inductor
    torch.library.opcheck(ops.sparse_scores_postings, (positions, weights, mask, docs, values, N))
    torch.library.opcheck(
        ops.sparse_scores_postings_topk, (positions, weights, None, docs, values, N, 3)
    )
    got = ops.sparse_scores_postings(positions, weights, mask, docs, values, N)
    want = torch.zeros(B, N).scatter_add(
        1, docs[positions].flatten(1), (values[positions] * weights * mask).flatten(1)
    )
    torch.testing.assert_close(got, want)
