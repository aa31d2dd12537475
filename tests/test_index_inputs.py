"""SparseIndex accepts documents and queries in every form and under any global settings, or raises a clear error."""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from scipy import sparse

import ranking
from ranking import best
from sparse_inductor import SparseIndex
from sparse_inductor.index import contents, queries, sources

V = 12


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Makes documents and queries go through several batches."""
    monkeypatch.setattr(sources, "_LISTS", 3)
    monkeypatch.setattr(sources, "_BLOCK", 4)
    monkeypatch.setattr(queries, "_CPU_BYTES", 4 * V * 2)


def collection(n: int = 9) -> torch.Tensor:
    return (ranking.sparse(n, V, 0.4) * 8).round() / 8


def queries_of(b: int = 5) -> torch.Tensor:
    return torch.rand(b, V, generator=torch.Generator().manual_seed(1)).half().float()


def holds(index: SparseIndex, dense: torch.Tensor) -> bool:
    q = queries_of()
    values, ids = best(dense, q, len(dense))
    found = index.search(q, len(dense))
    return torch.equal(found[1], ids) and torch.allclose(found[0], values, rtol=2e-7, atol=0)


def csr(dense):
    return sparse.csr_matrix(dense.numpy())


def unsorted_csr(dense):
    rows = csr(dense)
    for low, high in zip(rows.indptr, rows.indptr[1:]):
        rows.indices[low:high] = rows.indices[low:high][::-1]
        rows.data[low:high] = rows.data[low:high][::-1]
    rows.has_sorted_indices = False
    return rows


def uncoalesced(dense):
    index, values = dense.nonzero().t(), dense[dense != 0]
    order = torch.randperm(2 * values.numel(), generator=torch.Generator().manual_seed(2))
    index, values = torch.cat((index, index), 1), torch.cat((values * 0.25, values * 0.75))
    return torch.sparse_coo_tensor(
        index[:, order], values[order], dense.shape, check_invariants=False
    )


def strided_csr(dense):
    """Return a CSR tensor with strided values (every second element of a buffer) and int32 indices."""
    t = dense.to_sparse_csr()
    values = torch.stack((t.values(), torch.full_like(t.values(), 9.0)), 1)[:, 0]
    parts = t.crow_indices().int(), t.col_indices().int(), values
    return torch.sparse_csr_tensor(*parts, dense.shape, check_invariants=False)


def read_only(array):
    array.flags.writeable = False
    return array


def requiring(t):
    return t.clone().requires_grad_()


DOCUMENTS = {
    "csr": lambda d: d.to_sparse_csr(),
    "coo": lambda d: d.to_sparse(),
    "csc": lambda d: d.to_sparse_csc(),
    "bsr": lambda d: torch.nn.functional.pad(d, (0, 0, 0, 0)).to_sparse_bsr((1, 3)),
    "coo, uncoalesced": uncoalesced,
    "csr, strided values and int32": strided_csr,
    "scipy csr": csr,
    "scipy csr, unsorted": unsorted_csr,
    "scipy coo": lambda d: sparse.coo_matrix(d.numpy()),
    "scipy csc": lambda d: sparse.csc_array(d.numpy()),
    "scipy dia": lambda d: sparse.dia_array(d.numpy()),
    "scipy, int64 indices": lambda d: sparse.csr_matrix(
        (csr(d).data, csr(d).indices.astype(np.int64), csr(d).indptr.astype(np.int64)), d.shape
    ),
    "scipy, big endian": lambda d: sparse.csr_matrix(
        (csr(d).data.astype(">f4"), csr(d).indices, csr(d).indptr), d.shape
    ),
    "numpy": lambda d: d.numpy(),
    "numpy, read-only": lambda d: read_only(d.numpy().copy()),
    "numpy, fp64 in Fortran's order": lambda d: np.asfortranarray(d.numpy().astype(np.float64)),
    "numpy, backwards": lambda d: d.flip(1).numpy()[:, ::-1],
    "fp64": lambda d: d.double(),
    "bf16": lambda d: d.bfloat16(),
    "half csr": lambda d: d.half().to_sparse_csr(),
    "transposed": lambda d: d.t().contiguous().t(),
    "requires grad": requiring,
    "coo that requires grad": lambda d: requiring(d).to_sparse(),
    "rows, sparse": lambda d: [r.to_sparse() for r in d],
    "rows, dense": lambda d: list(d),
    "rows, numpy": lambda d: list(d.numpy()),
    "rows, scipy 1-d": lambda d: [sparse.coo_array(r.numpy()) for r in d],
    "rows, scipy 2-d": lambda d: list(csr(d)),
    "rows that require grad": lambda d: [requiring(r) for r in d],
    "mappings": lambda d: [{int(t): float(r[t]) for t in r.nonzero()} for r in d],
    "array of mappings": lambda d: np.array(
        [{int(t): float(r[t]) for t in r.nonzero()} for r in d], dtype=object
    ),
    "pairs of lists": lambda d: [(r.nonzero()[:, 0].tolist(), r[r != 0].tolist()) for r in d],
    "pairs of numpy": lambda d: [(r.nonzero()[0], r[r != 0]) for r in d.numpy()],
    "pairs of tensors that require grad": lambda d: [
        (r.nonzero()[:, 0], requiring(r[r != 0])) for r in d
    ],
    "pairs of lists of tensors": lambda d: [(list(r.nonzero()[:, 0]), list(r[r != 0])) for r in d],
    "pairs, terms backwards": lambda d: [
        (r.nonzero()[:, 0].flip(0), r[r != 0].flip(0).double()) for r in d
    ],
    "pairs, uint16 ids and half weights": lambda d: [
        (r.nonzero()[0].astype(np.uint16), r[r != 0].astype(np.float16)) for r in d.numpy()
    ],
    "rows, matrices and documents": lambda d: [
        d[0], d[1:3], (d[3].nonzero()[:, 0], d[3][d[3] != 0]), d[4:].to_sparse_csr(),
    ],
}  # fmt: skip


@contextlib.contextmanager
def settings_of_others():
    """Set modes and defaults that the calling program may have set."""
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("form", DOCUMENTS)
def test_documents_in_every_form(form):
    dense = collection()
    index = SparseIndex.build(DOCUMENTS[form](dense), num_terms=V)
    assert (len(index), index.num_postings) == (9, int((dense != 0).sum()))
    assert holds(index, dense)


@pytest.mark.parametrize("form", DOCUMENTS)
def test_documents_under_settings_of_others(form):
    dense = collection()
    with torch.inference_mode():
        given = DOCUMENTS[form](dense)
    with settings_of_others():
        index = SparseIndex.build(given, num_terms=V, device="cpu")
        assert index.append(given) == range(9, 18)
    assert index.append(given) == range(18, 27)
    assert holds(index, torch.cat((dense, dense, dense)))


def test_an_index_made_under_inference_mode_is_an_ordinary_one():
    dense = collection()
    with torch.inference_mode():
        index = SparseIndex.build(dense)
        index.delete([2])
    index.append(dense)
    index.delete([3])
    index.vacuum()
    dense = torch.cat((dense, dense))
    q, live = queries_of().requires_grad_(), [n for n in range(18) if n not in (2, 3)]
    index.scores(q)[:, live].sum().backward()
    torch.testing.assert_close(q.grad[0], dense[live].sum(0))
    assert {2, 3}.isdisjoint(index.search(q, 16)[1].flatten().tolist())


def test_num_terms_may_be_known_from_rows_and_matrices():
    dense = collection()
    for form in ("rows, sparse", "rows, numpy", "rows, scipy 1-d", "rows, matrices and documents"):
        assert holds(SparseIndex.build(iter(DOCUMENTS[form](dense))), dense)
    assert SparseIndex.build(dense, num_terms=np.int64(V)).num_terms == V
    with pytest.raises(ValueError, match="num_terms is needed"):
        SparseIndex.build([])


def test_a_matrix_of_scipy_may_have_room_for_more_entries():
    dense = collection()[:1]
    row = csr(dense)
    row.indices, row.data = (np.append(a, a[:2]) for a in (row.indices, row.data))
    for given in (row, [row]):
        assert holds(SparseIndex.build(given, num_terms=V), dense)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64])
def test_weights_may_be_whole_numbers(dtype):
    dense = (collection() * 8).to(dtype)
    assert holds(SparseIndex.build(dense), dense.float())
    assert holds(SparseIndex.build(dense.to_sparse()), dense.float())


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_may_be_of_dtypes_that_torch_computes_little_in(dtype):
    dense = (collection() * 8).to(dtype)
    assert holds(SparseIndex.build(dense), dense.float())
    assert holds(SparseIndex.build(list(dense)), dense.float())


def refilled(dense, buffer):
    for first in range(0, len(dense), 2):
        buffer.copy_(dense[first : first + 2])
        yield buffer


def refilled_pairs(dense, held):
    terms = np.arange(V)
    for row in dense:
        held[:] = row
        yield terms, held


BUFFERS = {
    "scipy": lambda d: (m := csr(d), [m.data, m.indices, m.indptr]),
    "csr": lambda d: (m := d.to_sparse_csr(), [m.values(), m.col_indices(), m.crow_indices()]),
    "coo": lambda d: (m := d.to_sparse(), [m._values(), m._indices()]),
    "pairs": lambda d: (
        m := [(r.nonzero()[:, 0], r[r != 0]) for r in d],
        [t for p in m for t in p],
    ),
    "rows": lambda d: (list(d), [d]),
    "numpy": lambda d: (m := d.numpy(), [m]),
    "generator": lambda d: (refilled(d.clone(), m := torch.zeros(2, V)), [m]),
    "generator of pairs": lambda d: (refilled_pairs(d.clone(), m := np.zeros(V, np.float32)), [m]),
}


@pytest.mark.parametrize("form", BUFFERS)
@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
def test_the_caller_may_change_what_it_gave(form, weights):
    """It may do so after the call, or during it, in a generator that reuses its buffers."""
    dense = collection(8)
    given, buffers = BUFFERS[form](dense.clone())
    index = SparseIndex.build(given, num_terms=V, weights=weights)
    alone = SparseIndex.build(dense, weights=weights)
    for buffer in buffers:
        buffer[...] = 0
    for a, b in zip(index.search(queries_of(), 8), alone.search(queries_of(), 8)):
        assert torch.equal(a, b)
    assert torch.equal(index.scores(queries_of()), alone.scores(queries_of()))


QUERIES = {
    "numpy": lambda q: q.numpy(),
    "numpy fp64": lambda q: q.double().numpy(),
    "half": lambda q: q.half(),
    "csr": lambda q: q.to_sparse_csr(),
    "coo": lambda q: q.to_sparse(),
    "csc": lambda q: q.to_sparse_csc(),
    "uncoalesced": uncoalesced,
    "numpy, backwards": lambda q: q.flip(1).numpy()[:, ::-1],
    "numpy, big endian": lambda q: q.numpy().astype(">f8"),
    "numpy, read-only": lambda q: read_only(q.numpy().copy()),
    "scipy": csr,
    "scipy dok": lambda q: sparse.dok_matrix(q.numpy()),
    "requires grad": requiring,
    "transposed": lambda q: q.t().contiguous().t(),
    "rows, sparse": lambda q: [r.to_sparse() for r in q],
    "rows, dense": lambda q: list(q),
    "rows, numpy": lambda q: tuple(q.numpy()),
    "rows, scipy 1-d": lambda q: [sparse.coo_array(r.numpy()) for r in q],
    "pairs": lambda q: [(list(range(V)), r.tolist()) for r in q],
    "pairs, some unknown": lambda q: [([*range(V), -1, V], [*r.tolist(), 9.0, 9.0]) for r in q],
    "mappings": lambda q: [dict(enumerate(r.tolist())) for r in q],
    "terms and weights": lambda q: (torch.arange(V).expand(len(q), V), q),
    "terms and weights of numpy": lambda q: (np.arange(V)[None].repeat(len(q), 0), q.numpy()),
    "terms and weights of numpy, backwards": lambda q: (
        np.arange(V)[None].repeat(len(q), 0)[:, ::-1], q.numpy()[:, ::-1],
    ),
    "terms twice": lambda q: (torch.arange(V).repeat(2).expand(len(q), -1), torch.cat((q, q), 1) / 2),
}  # fmt: skip


@pytest.mark.parametrize("form", QUERIES)
def test_queries_in_every_form(form):
    index, q = SparseIndex.build(collection()), queries_of()
    want = index.search(q, 4)
    for batch in (q, q[:2], q[:0]):
        if not len(batch) and form.startswith(("rows", "pairs", "mappings")):
            continue  # an empty list has no terms, but is no error
        scores, ids = index.search(QUERIES[form](batch), np.int64(4))
        assert scores.dtype == torch.float32 and scores.shape == (len(batch), 4)
        assert torch.equal(scores, want[0][: len(batch)])
        assert torch.equal(ids, want[1][: len(batch)])
    torch.testing.assert_close(index.scores(QUERIES[form](q)), index.scores(q))
    with settings_of_others():
        scores, ids = index.search(QUERIES[form](q.cpu()) if form == "pairs" else q, 4)
    assert torch.equal(ids, want[1]) and torch.equal(scores, want[0])


@pytest.mark.parametrize("one", [
    lambda r: r, lambda r: r.to_sparse(), lambda r: r.numpy(), lambda r: sparse.coo_array(r.numpy()),
    lambda r: dict(enumerate(r.tolist())), lambda r: (torch.arange(V), r), lambda r: (list(range(V)), r.tolist()),
    lambda r: (np.arange(V, dtype=">u2"), r.numpy()),
])  # fmt: skip
def test_one_query_in_every_form(one):
    index, q = SparseIndex.build(collection()), queries_of()
    scores, ids = index.search(one(q[0]), 3)
    assert torch.equal(ids, index.search(q, 3)[1][0]) and scores.shape == (3,)
    assert index.scores(one(q[0])).shape == (9,)


def test_many_sparse_queries_are_never_all_dense(monkeypatch):
    index = SparseIndex.build(collection())
    sizes, search = [], torch.ops.sparse_inductor.index_search
    q = queries_of(9)
    monkeypatch.setattr(
        torch.ops.sparse_inductor, "index_search",
        lambda q, *rest: sizes.append(len(q)) or search(q, *rest),
    )  # fmt: skip
    for given in (q.to_sparse_csr(), csr(q), (torch.arange(V).expand(9, V), q)):
        sizes.clear()
        index.search(given, 2)
        assert sizes == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(("k", "error"), [
    (True, ValueError), (1.0, ValueError), ("3", ValueError), (-1, ValueError), (None, ValueError),
    (torch.tensor(1.5), ValueError),
])  # fmt: skip
def test_a_bad_k_is_named(k, error):
    with pytest.raises(error, match="k must be an int"):
        SparseIndex.build(collection()).search(queries_of(), k)


def test_k_may_be_any_whole_number():
    index = SparseIndex.build(collection())
    for k in (np.int32(2), np.uint8(2), torch.tensor(2)):
        assert index.search(queries_of(), k)[1].shape == (5, 2)
    assert index.search(queries_of(), 0)[0].shape == (5, 0)


def unchecked(offsets, terms, rows):
    parts = torch.tensor(offsets), torch.tensor(terms), torch.ones(len(terms))
    return torch.sparse_csr_tensor(*parts, (rows, V), check_invariants=False)


BAD_DOCUMENTS = {
    "complex": (lambda: collection().to(torch.complex64), TypeError, "must be real, got torch.complex64"),
    "strings": (lambda: np.array([["a", "b"]]), TypeError, "an array of <U1"),
    "three axes": (lambda: torch.rand(2, 2, V), ValueError, r"\[N, V\], got shape \(2, 2, 12\)"),
    "one row": (lambda: torch.rand(V), ValueError, r"\[N, V\], got shape \(12,\)"),
    "a sparse row": (lambda: torch.rand(V).to_sparse(), ValueError, r"\[N, V\], got shape \(12,\)"),
    "hybrid": (lambda: torch.rand(3, V).to_sparse(1), ValueError, r"\[N, V\]"),
    "a wide matrix": (lambda: torch.rand(3, V + 1), ValueError, "13 columns, more than num_terms = 12"),
    "a wide row": (lambda: [torch.rand(V), torch.rand(V + 1)], ValueError, "document 1 has 13 columns"),
    "tokens": (lambda: [(["cat", "dog"], [1.0, 2.0])], TypeError, r"document 0: term ids must be integers.*'cat'"),
    "an encoder's output": (lambda: [{"sentence_embedding": torch.rand(V)}], TypeError, "sentence_embedding"),
    "fractional ids": (lambda: [([1.0], [1.0])], TypeError, r"term ids must be integers, got list \[1.0\]"),
    "boolean ids": (lambda: [([True], [1.0])], TypeError, "term ids must be integers"),
    "huge ids": (lambda: [([2**70], [1.0])], TypeError, "1180591620717411303424"),
    "negative ids": (lambda: [([1], [1.0]), ([2, -1], [1.0, 1.0])], ValueError, "document 1: term id -1 is not in"),
    "large ids": (lambda: [([2**40], [1.0])], ValueError, "1099511627776 is not in"),
    "complex weights": (lambda: [([1], [1j])], TypeError, "must be real"),
    "weights in words": (lambda: [([1], ["much"])], TypeError, "weights must be real numbers"),
    "fewer weights": (lambda: [([1, 2], [1.0])], ValueError, "lists of one length"),
    "a text": (lambda: ["cat"], TypeError, "document 0 must be a row .*str 'cat'"),
    "a number": (lambda: [([1], [1.0]), 3], TypeError, "document 1 must be a row .*int 3"),
    "lists of numbers": (lambda: [[0.1, 0.2, 0.3]], TypeError, r"document 0 must be a row \[V\], which is a tensor"),
    "a document alone": (lambda: ([1, 2], [0.5, 0.5]), ValueError, r"a document alone is \[\(terms, weights\)\]"),
    "a mapping": (lambda: {"a": 1}, TypeError, "got dict"),
    "nothing": (lambda: None, TypeError, "got NoneType"),
    "not a number": (lambda: [([1], [1]), ([2], [float("nan")])], ValueError, "document 1: .* term 2 is nan"),
    "infinite": (lambda: [([1], [float("inf")])], ValueError, "document 0: .* term 1 is inf; .*must be finite"),
    "beyond fp32": (lambda: np.array([[0.0, 1e300]]), ValueError, r"is 1e\+300; it does not fit float32"),
    "sums beyond fp32": (lambda: [([3, 3], [3e38, 3e38])], ValueError, "weights of term 3 add up to inf"),
    "falling offsets": (lambda: unchecked([0, 2, 1, 2], [0, 1], 3), ValueError, "offsets must rise"),
    "offsets beyond": (lambda: unchecked([0, 2, 5], [0, 1], 2), ValueError, "offsets must rise"),
    "a column beyond": (lambda: unchecked([0, 1], [V], 1), ValueError, "document 0: term id 12 is not in"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_DOCUMENTS)
def test_bad_documents_are_named_and_change_nothing(case):
    make, error, message = BAD_DOCUMENTS[case]
    index = SparseIndex.build(collection())
    with pytest.raises(error, match=message):
        SparseIndex.build(make(), num_terms=V)
    with pytest.raises(error):
        index.append(make())
    assert holds(index, collection())


def test_a_bad_document_of_a_later_batch_has_its_number():
    bad, index = collection(9), SparseIndex.build(collection(2))
    bad[7, 3] = float("inf")
    for given in (bad, bad.to_sparse_csr(), list(bad), [bad[:2], *bad[2:]]):
        with pytest.raises(ValueError, match="document 7: the weight of term 3 is inf"):
            SparseIndex.build(given, num_terms=V)
        with pytest.raises(ValueError, match="document 9: the weight of term 3 is inf"):
            index.append(given)


@pytest.mark.parametrize(("given", "error", "message"), [
    (lambda: torch.rand(2, V + 1), ValueError, "V = 12, got shape"),
    (lambda: torch.rand(2, 2, V), ValueError, "V = 12, got shape"),
    (lambda: np.zeros((2, V - 1)), ValueError, "V = 12, got shape"),
    (lambda: torch.rand(2, V + 1).to_sparse(), ValueError, "V = 12, got shape"),
    (lambda: [torch.rand(V), torch.rand(V + 1)], ValueError, "one number of columns"),
    (lambda: torch.rand(2, V).to(torch.complex64), TypeError, "must be real"),
    (lambda: csr(queries_of()).astype(np.complex64), TypeError, "must be real"),
    (lambda: (torch.zeros(2, 3), torch.zeros(2, 3)), TypeError, "must be integers"),
    (lambda: (torch.zeros(2, 3).long(), torch.zeros(2, 4)), ValueError, "must both be"),
    (lambda: (torch.zeros(3).long(), torch.zeros(3, dtype=torch.complex64)), TypeError, "must be real"),
    (lambda: "text", TypeError, "got str"),
    (lambda: [("cat", 1.0)], TypeError, "query 0"),
    (lambda: [torch.rand(V), torch.rand(2, V)], ValueError, "query 1 must be one row"),
    (lambda: (r for r in queries_of()), TypeError, "got generator"),
])  # fmt: skip
def test_bad_queries_are_named(given, error, message):
    index = SparseIndex.build(collection())
    for ask in (lambda: index.search(given(), 2), lambda: index.scores(given())):
        with pytest.raises(error, match=message):
            ask()


def test_sparse_queries_that_are_not_finite_have_no_result():
    index, q = SparseIndex.build(collection()), queries_of()
    q[1, 2] = float("nan")
    q[3, 4] = float("inf")
    q[4, 0] = float("-inf")
    for given in (q, q.to_sparse_csr(), csr(q), list(q)):
        scores, ids = index.search(given, 2)
        assert scores.isnan().all(1).tolist() == [False, True, False, True, True]
        assert ids[[1, 3, 4]].eq(-1).all()


@pytest.mark.parametrize("ids", [
    lambda m: m, lambda m: m.numpy(), lambda m: m.tolist(), lambda m: m.nonzero()[:, 0], lambda m: m.nonzero(),
    lambda m: m.nonzero()[:, 0].numpy(), lambda m: m.nonzero()[:, 0].int(), lambda m: range(3, 6), lambda m: {3, 4, 5},
    lambda m: (n for n in (3, 4, 5, 5)), lambda m: [np.int64(3), np.uint8(4), torch.tensor(5)],
    lambda m: {3: "a", 4: "b", 5: "c"}.keys(), lambda m: m.flip(0).numpy()[::-1],
    lambda m: m.nonzero()[:, 0].numpy().astype(">i4")[::-1],
])  # fmt: skip
def test_documents_are_deleted_by_ids_or_by_a_mask(ids):
    mask = torch.zeros(9, dtype=torch.bool)
    mask[3:6] = True
    index, given = SparseIndex.build(collection()), ids(mask)
    with settings_of_others():
        assert index.delete(given) == 3
    assert sorted(index.search(queries_of()[0], 6)[1].tolist()) == [0, 1, 2, 6, 7, 8]
    assert index.delete(ids(mask)) == 0


@pytest.mark.parametrize(("ids", "error", "message"), [
    ([1.7], TypeError, "a document id must be an int, got 1.7"),
    ([True, 3], TypeError, "a document id must be an int, got True"),
    (["a"], TypeError, "got 'a'"),
    ("12", TypeError, "got str '12'"),
    (5, TypeError, "got int 5"),
    (torch.tensor([1.0]), TypeError, "must be integers, got torch.float32"),
    (np.array([1.7]), TypeError, "must be integers, got torch.float64"),
    (np.array(["a"]), TypeError, "a document id must be an int, got .*'a'"),
    (torch.tensor([1], dtype=torch.uint8), TypeError, "is it a mask"),
    (torch.ones(8, dtype=torch.bool), IndexError, r"shape \(9,\).* got \(8,\)"),
    ([True, False], IndexError, r"shape \(9,\)"),
    ([9], IndexError, "no document 9: ids are 0 to 8"),
    ([-1], IndexError, "no document -1"),
    ([2**70], IndexError, "no document 1180591620717411303424"),
])  # fmt: skip
def test_bad_ids_to_delete_are_named_and_change_nothing(ids, error, message):
    index = SparseIndex.build(collection())
    with pytest.raises(error, match=message):
        index.delete(ids)
    assert index.num_live == 9


def test_deleting_nothing():
    index = SparseIndex.build(collection())
    for none in ([], (), torch.tensor([]), np.array([]), set()):
        assert index.delete(none) == 0
    assert SparseIndex(V).delete(torch.zeros(0, dtype=torch.bool)) == 0


@pytest.mark.parametrize("num_terms", [0, -3, 2**31, True, 2.0, "12", None])
def test_a_bad_number_of_terms_is_named(num_terms):
    with pytest.raises(ValueError, match="num_terms must be"):
        SparseIndex(num_terms)
    for weights in ("int4", ["int8"]):
        with pytest.raises(ValueError, match="weights must be one of"):
            SparseIndex(V, weights=weights)


def test_copies_are_of_their_own():
    index = SparseIndex.build(collection())
    before = index.search(queries_of(), 9)
    copies = [copy.deepcopy(index), pickle.loads(pickle.dumps(index)), copy.copy(index)]
    index.delete([0])
    for other in copies:
        assert torch.equal(other.search(queries_of(), 9)[1], before[1])
        other.append(collection(2))
        assert len(other) == 11 and len(index) == 9
    module = torch.nn.Sequential(torch.nn.Linear(2, V), index).double().eval()
    assert copy.deepcopy(module)[1].num_live == 8


def test_tiny_weights_have_an_8_bit_scale():
    dense = collection() * 1e-40
    index = SparseIndex.build(dense, weights="int8")
    assert index.scores(queries_of()).isfinite().all()
    assert index.weight_error <= float(dense.max())


@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
def test_documents_that_come_one_at_a_time_make_few_segments(weights):
    dense = collection(60)
    index = SparseIndex(V, weights)
    for row in dense:
        index.append([row])
    kept = torch.cat([s.rows().weights for s in index._contents.segments])
    assert (kept - dense[dense != 0]).abs().max() <= index.weight_error
    assert len(index._contents.segments) <= 8 + (
        2 * len(set(dense.amax(1).tolist())) if weights == "int8" else 0
    )
    alone = SparseIndex.build(dense, weights=weights)
    assert index.weight_error <= 1.01 * alone.weight_error + 1e-9 or weights == "int8"
    if weights == "float32":
        assert holds(index, dense)


def test_appends_wait_for_no_large_merge(monkeypatch):
    """A merge reads a bounded number of postings, and the number of segments stays small."""
    most = 60
    monkeypatch.setattr(contents, "_MERGED", most)
    merged, join = [], contents.Segment.join
    monkeypatch.setattr(
        contents.Segment, "join", lambda parts: (merged.append(join(parts).nnz), join(parts))[1]
    )
    dense = collection(200)
    index = SparseIndex.build(dense[:100])
    for row in dense[100:]:
        index.append([row])
    assert max(merged[1:]) <= most < index._contents.segments[0].nnz
    nnz = [s.nnz for s in index._contents.segments[1:]]
    assert len(nnz) <= 2 * sum(nnz) / most + 6
    assert holds(index, dense)
    index.delete([0, 150])
    assert index._contents.compacted().counts == [198]


def test_merging_keeps_the_order_and_the_capacity(monkeypatch):
    monkeypatch.setattr(contents.segment, "CAPACITY", 16)
    dense = collection(90)
    index, at = SparseIndex(V), 0
    for n in (1, 30, 2, 9, 16, 17, 5, 5, 5):
        assert index.append(dense[at : at + n]) == range(at, at + n)
        at += n
        assert max(index._contents.counts) <= 16 and sum(index._contents.counts) == at
        assert holds(index, dense[:at])
