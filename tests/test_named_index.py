"""An index of named documents: it agrees with a brute-force search of a dictionary after any changes."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading

import pytest
import torch

from processes import threads
from sparse_inductor import SparseIndex
from sparse_inductor.index import IndexFileError, NamedIndex
from test_index_service import in_child

V = 10


pytestmark = pytest.mark.usefixtures("small_segments")


def best(documents, query, k):
    scores = {n: sum(w * query[t] for t, w in d.items()) for n, d in documents.items()}
    return sorted(scores.items(), key=lambda item: -item[1])[:k]


def test_any_history_gives_what_a_dictionary_gives(tmp_path):
    draw = random.Random(0)
    index, known = NamedIndex(V), {}
    for step in range(60):
        some = draw.sample(range(40), draw.randrange(1, 6))
        if draw.random() < 0.7:
            new = {
                f"n\u00e4me {i}": {draw.randrange(V): draw.random() for _ in range(3)} for i in some
            }
            assert index.put(new.keys(), list(new.values())) == len(new.keys() & known.keys())
            known.update(new)
        else:
            names = [f"n\u00e4me {i}" for i in some]
            assert index.delete([*names, "nobody"]) == len({*names} & known.keys())
            known = {n: d for n, d in known.items() if n not in names}
        if step % 20 == 15:
            index.compact()
            assert len(index.index) == len(index)
        if step % 20 == 18:
            index.save(tmp_path / "x")
            index = NamedIndex.load(tmp_path / "x")
        assert len(index) == len(known) and all(n in index for n in known)
        query = [draw.random() for _ in range(V)]
        allow = [f"n\u00e4me {i}" for i in range(20)]
        for options, left in (
            ({}, known),
            ({"allow": allow}, {n: d for n, d in known.items() if n in allow}),
            ({"deny": allow}, {n: d for n, d in known.items() if n not in allow}),
        ):
            (found,) = index.search(torch.tensor(query), 7, **options)
            want = best(left, query, 7)
            assert [s for _, s in found] == pytest.approx([s for _, s in want], abs=1e-6)
            assert [n for n, s in found if s] == [n for n, s in want if s]


def test_pages_and_batches():
    index = NamedIndex(V, weights="int8")
    index.put(
        [*"abcd"], torch.diag(torch.tensor([4.0, 3, 2, 1]))[:, [0, 1, 2, 3, *[0] * (V - 4)]].clone()
    )
    q = torch.ones(2, V)
    whole = index.search(q, 9)
    assert len(whole) == 2 and whole[0] == whole[1] and len(whole[0]) == 4
    assert index.search(q, 2, offset=1)[0] == whole[0][1:3]
    assert index.search(q, 9, min_score=whole[0][1][1])[0] == whole[0][:2]
    assert index.search(q, 0) == [[], []] and index.search({0: float("nan")}, 3) == [[]]


@pytest.mark.parametrize(("names", "documents", "error"), [
    (["a", "a"], [{1: 1.0}] * 2, ValueError), (["a"], [{1: 1.0}] * 2, ValueError), ([1], [{1: 1.0}], TypeError),
    (["b"], [{V: 1.0}], ValueError), ("b", [{1: 1.0}], TypeError),
])  # fmt: skip
def test_what_is_refused_changes_nothing(names, documents, error):
    index = NamedIndex(V)
    index.put(["a"], [{1: 1.0}])
    with pytest.raises(error):
        index.put(names, documents)
    assert index.search({1: 1.0}, 9) == [[("a", 1.0)]] and "b" not in index


@pytest.mark.parametrize("names", ["a", [1]])
def test_what_names_no_documents_is_refused(names):
    index = NamedIndex(V)
    index.put(["a"], [{1: 1.0}])
    for call in (index.delete, lambda n: index.search({1: 1.0}, 9, deny=n)):
        with pytest.raises(TypeError, match="names must be"):
            call(names)
    assert len(index) == 1


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda i: pickle.loads(pickle.dumps(i))]
)
def test_copies_are_of_their_own(copied):
    index = NamedIndex(V)
    index.put(["a", "b"], [{1: 1.0}, {1: 2.0}])
    index.delete(["b"])
    other = copied(index)
    index.put(["c"], [{1: 3.0}])
    other.put(["d"], [{1: 4.0}])
    assert index.search({1: 1.0}, 9) == [[("c", 3.0), ("a", 1.0)]]
    assert other.search({1: 1.0}, 9) == [[("d", 4.0), ("a", 1.0)]]


def test_the_file_is_one_of_an_index(tmp_path):
    index = NamedIndex(V)
    index.save(tmp_path / "none")
    assert len(NamedIndex.load(tmp_path / "none")) == 0
    index.put(["\ud800", ""], [{1: 1.0}, {2: 1.0}])
    index.save(tmp_path / "x", progress=True)
    assert len(SparseIndex.load(tmp_path / "x")) == 2
    assert NamedIndex.load(tmp_path / "x").search({2: 1.0}, 1) == [[("", 1.0)]]
    index.index.save(tmp_path / "y")
    with pytest.raises(IndexFileError, match="no names"):
        NamedIndex.load(tmp_path / "y")


def test_searches_beside_replacements_and_compaction():
    """A search always finds each document exactly once, with and without a filter."""
    index, stop, wrong = NamedIndex(V), threading.Event(), []
    index.put(["a", "b"], [{0: 1.0}, {0: 2.0}])

    def look(options):
        while not stop.is_set():
            (found,) = index.search({0: 1.0}, 5, **options)
            if [n for n, _ in found] != ["b", "a"]:
                wrong.append(found)

    with threads(lambda: look({}), lambda: look({"allow": ["a", "b"]})):
        for at in range(150):
            index.put(["a", "b"], [{0: 1.0}, {0: 2.0}])
            if at % 10 == 0:
                index.compact()
        stop.set()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("published", [False, True])
def test_a_fork_while_another_thread_writes(monkeypatch, published):
    """The child finds the document of an unfinished `put` under its name or not at all, and can go on."""
    index, publish = NamedIndex(V), SparseIndex._publish
    index.put(["a"], [{0: 1.0}])
    half, go = threading.Event(), threading.Event()

    def halts(self, *args):
        found = publish(self, *args) if published else None
        half.set()
        go.wait()
        return publish(self, *args) if found is None else found

    monkeypatch.setattr(SparseIndex, "_publish", halts)
    thread = threading.Thread(target=index.put, args=(["a", "b"], [{1: 1.0}, {1: 2.0}]))
    thread.start()
    half.wait()

    def child():
        monkeypatch.undo()
        assert ("b" in index) == published and len(index) == 1 + published
        assert index.put(["c", "a"], [{1: 4.0}, {1: 3.0}]) == 1
        there = [("c", 4.0), ("a", 3.0), *[("b", 2.0)] * published]
        assert index.search([{1: 1.0}], 5, deny=["nobody"]) == [there]

    try:
        assert in_child(child) == 0
    finally:
        go.set()
        thread.join()
    assert index.search([{1: 1.0}], 5) == [[("b", 2.0), ("a", 1.0)]]
