"""SparseIndex: after any build, append, delete, save and load, results equal those of the dense fp64 product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranking import best, sparse
from sparse_inductor import SparseIndex
from sparse_inductor.index import IndexFileError
from sparse_inductor.index import files as files_module

V = 30


pytestmark = pytest.mark.usefixtures("small_segments")


def collection(n: int, seed: int = 0, negative: bool = False) -> torch.Tensor:
    dense = sparse(n, V, 0.2, seed)
    return dense - 0.1 * (dense > 0) if negative else dense


def queries(b: int = 4) -> torch.Tensor:
    return sparse(b, V, 0.5, 1)


def assert_true_top(index, dense, q, k, deleted=()):
    scores, ids = index.search(q, k)
    left = torch.ones(len(dense), dtype=torch.bool)
    left[list(deleted)] = False
    values, right = best(dense, q, k, left)
    assert torch.equal(ids, right)
    torch.testing.assert_close(scores, values, rtol=2e-7, atol=0)


@settings(max_examples=40)
@given(data=st.data())
def test_any_history_gives_the_dense_result(data, tmp_path_factory):
    """The history has build, append, delete, vacuum, save and load in any order."""
    integers = lambda low, high: data.draw(st.integers(low, high))
    weight = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 1.0, 3.0])
    documents = st.lists(st.dictionaries(st.integers(0, V - 1), weight, max_size=4), max_size=25)

    def as_dense(docs):
        dense = torch.zeros(len(docs), V)
        for n, d in enumerate(docs):
            for t, w in d.items():
                dense[n, t] = w
        return dense

    first = data.draw(documents)
    index, dense, deleted = SparseIndex.build(first, num_terms=V), as_dense(first), set()
    for step in data.draw(
        st.lists(st.sampled_from(["append", "delete", "vacuum", "file"]), max_size=5)
    ):
        if step == "append":
            more = data.draw(documents)
            assert index.append(more) == range(len(dense), len(dense) + len(more))
            dense = torch.cat((dense, as_dense(more)))
        elif step == "delete" and len(dense):
            gone = {integers(0, len(dense) - 1) for _ in range(3)}
            assert index.delete(gone) == len(gone - deleted)
            deleted |= gone
        elif step == "vacuum":
            index.vacuum()
        elif step == "file":
            path = tmp_path_factory.mktemp("index") / "x.index"
            index.save(path)
            index = SparseIndex.load(path)
    q = torch.zeros(2, V)
    for b in range(2):
        for t in data.draw(st.sets(st.integers(0, V - 1), max_size=5)):
            q[b, t] = data.draw(weight)
    assert len(index) == len(dense) and index.num_live == len(dense) - len(deleted)
    assert_true_top(index, dense, q, integers(0, len(dense) + 3), deleted)


def test_a_query_without_terms_finds_the_first_documents_with_score_0():
    scores, ids = SparseIndex.build(collection(40)).search(torch.zeros(V), 3)
    assert scores.tolist() == [0.0, 0.0, 0.0] and ids.tolist() == [0, 1, 2]


def test_a_document_without_terms_scores_0_and_beats_negative_ones():
    index = SparseIndex.build([([2], [-1.0]), ([], []), ([2], [1.0])], num_terms=V)
    q = torch.zeros(V)
    q[2] = 2.0
    scores, ids = index.search(q, 3)
    assert ids.tolist() == [2, 1, 0] and scores.tolist() == [2.0, 0.0, -2.0]


def test_an_empty_index_answers():
    index = SparseIndex(V)
    scores, ids = index.search(queries(), 2)
    assert ids.eq(-1).all() and scores.eq(float("-inf")).all()
    assert index.scores(queries()).shape == (4, 0)


def test_repeated_terms_of_a_document_add_up():
    index = SparseIndex.build([([4, 4, 5], [1.0, 2.0, 1.0]), ([4, 4], [1.0, -1.0])], num_terms=V)
    assert index.num_postings == 2
    q = torch.zeros(V)
    q[4] = 1.0
    assert index.search(q, 2)[0].tolist() == [3.0, 0.0]


@pytest.mark.parametrize("weights", ["float16", "int8"])
@pytest.mark.parametrize("negative", [False, True])
def test_narrow_weights_state_their_error(weights, negative):
    dense, q = collection(60, negative=negative), queries()
    exact, narrow = SparseIndex.build(dense), SparseIndex.build(dense, weights=weights)
    assert 0 < narrow.weight_error < (2e-3 if weights == "float16" else 5e-3)
    assert exact.weight_error == 0
    apart = (narrow.scores(q) - exact.scores(q)).abs().amax(1)
    assert (apart <= narrow.weight_error * q.abs().sum(1) + 1e-6).all()
    # Results are exact for the dequantised collection.
    kept = torch.cat([torch.sparse_csr_tensor(s.offsets, s.term_ids(), s.values(), (s.count, V)).to_dense()
                      for s in narrow._contents.segments])  # fmt: skip
    assert_true_top(narrow, kept, q, 10)
    assert narrow.nbytes["forward"] < exact.nbytes["forward"]


@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_appending_does_not_round_twice(weights):
    """Stored weights stay unchanged, and the stated error is the largest of all parts."""
    index = SparseIndex.build(collection(20), weights=weights)
    before, error = index.scores(queries()), index.weight_error
    index.append(3 * collection(20, seed=9))
    assert torch.equal(index.scores(queries())[:, :20], before)
    assert index.weight_error >= error
    index.append(collection(1, seed=3))
    assert torch.equal(index.scores(queries())[:, :20], before)


def test_the_bits_are_the_same_on_every_run():
    index, q = SparseIndex.build(collection(100)), queries(8)
    first = index.search(q, 20)
    for _ in range(5):
        again = index.search(q, 20)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    alone = torch.stack([index.search(q[b], 20)[1] for b in range(8)])
    assert torch.equal(alone, first[1])


def test_scores_are_all_scores_and_carry_a_gradient():
    dense, q = collection(40), queries().requires_grad_()
    index = SparseIndex.build(dense)
    index.delete([7])
    scores = index.scores(q)
    assert scores[:, 7].eq(float("-inf")).all()
    want = q @ dense.t()
    keep = torch.arange(40) != 7
    torch.testing.assert_close(scores[:, keep], want[:, keep])
    (grad,) = torch.autograd.grad(scores[:, keep].square().sum(), q)
    (right,) = torch.autograd.grad(want[:, keep].square().sum(), q)
    torch.testing.assert_close(grad, right)


def test_it_stands_in_a_compiled_model():
    dense = collection(40)

    class Retriever(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Linear(8, V)
            self.index = SparseIndex.build(dense)

        def forward(self, x):
            return self.index(torch.relu(self.encoder(x)), 5)

    model, x = Retriever().eval(), torch.randn(3, 8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x)[1], model(x)[1])
    assert not any("index" in name for name in model.state_dict())


# Files


@pytest.fixture
def saved(tmp_path):
    index = SparseIndex.build(collection(40), weights="float16")
    index.delete([3])
    path = tmp_path / "collection.index"
    index.save(path)
    return path


def test_a_loaded_index_is_the_same(saved):
    index = SparseIndex.load(saved)
    assert (len(index), index.num_live, index.weights) == (40, 39, "float16")
    q = queries()
    other = SparseIndex.build(collection(40), weights="float16")
    other.delete([3])
    assert torch.equal(index.search(q, 9)[0], other.search(q, 9)[0])
    index.append(collection(3))
    index.delete([0])
    assert SparseIndex.load(saved).num_live == 39, "the file does not change with the index"


def test_other_tools_can_read_the_file(saved):
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(saved, "pt") as file:
        assert file.metadata()["format"] == "sparse_inductor.SparseIndex"
        assert file.get_tensor("deleted").sum() == 1


def test_a_truncated_file_says_so(saved, tmp_path):
    data = saved.read_bytes()
    for size in (0, 4, 8, 100, len(data) - 1):
        cut = tmp_path / "cut"
        cut.write_bytes(data[:size])
        with pytest.raises(
            IndexFileError, match=r"cut is (truncated|not a sparse_inductor.SparseIndex file)"
        ):
            SparseIndex.load(cut)


@settings(max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_changed_bit_is_found(at, bit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    path = folder / "x"
    SparseIndex.build(collection(20)).save(path)
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(IndexFileError):
        SparseIndex.load(path)


def test_a_foreign_file_says_what_it_is(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello " * 1000)
    with pytest.raises(IndexFileError, match="not a sparse_inductor.SparseIndex file"):
        SparseIndex.load(text)
    safetensors = pytest.importorskip("safetensors.numpy")
    weights = tmp_path / "model.safetensors"
    safetensors.save_file({"weight": np.zeros(3, np.float32)}, weights)
    with pytest.raises(IndexFileError, match="safetensors file of something else"):
        SparseIndex.load(weights)
    with pytest.raises(FileNotFoundError):
        SparseIndex.load(tmp_path / "nothing")


def test_a_newer_file_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_VERSION", 9)
    SparseIndex.build(collection(3)).save(tmp_path / "new")
    monkeypatch.setattr(files_module, "_VERSION", 1)
    with pytest.raises(IndexFileError, match="newer version"):
        SparseIndex.load(tmp_path / "new")
