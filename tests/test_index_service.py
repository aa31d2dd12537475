"""An index in a service: threads, forks, and compiled programs that search while documents come and go."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch

from processes import threads
from sparse_inductor import SparseIndex
from test_index_inputs import V, collection, queries_of

SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))


# Threads


class Service:
    """One index with its writers and searchers.

    Writers record each state of the live documents before they make the change, so that the documents that a search
    finds identify the state that it saw.
    """

    TERMS = 32

    def __init__(self, seed: int, most: int, weights: str) -> None:
        self.random = random.Random(seed)
        self.most = most
        self.index = SparseIndex(self.TERMS, weights)
        self.writing = threading.Lock()
        self.live: set[int] = set()
        self.moments = {self._key(()): 0}
        self.begun = self.done = 0
        self.searches = 0
        self.wrong: list[str] = []

    @staticmethod
    def _key(ids) -> bytes:
        return torch.tensor(sorted(ids), dtype=torch.int64).numpy().tobytes()

    @staticmethod
    def weight(ids: torch.Tensor) -> torch.Tensor:
        return (1 + ids % 7).float()  # at most 7: with 8-bit weights the scale is 7 / 255

    def write(self) -> None:
        """Append, delete or vacuum once."""
        with self.writing:
            count, choice = len(self.index), self.random.random()
            if choice < 0.6 and count < self.most:
                ids = torch.arange(count, count + self.random.choice((1, 1, 2, 40)))
                self._begin(self.live | set(ids.tolist()))
                given = self.index.append(
                    [([int(n) % self.TERMS], [float(self.weight(n))]) for n in ids]
                )
                if list(given) != ids.tolist():
                    self.wrong.append(f"append gave {given}, not {ids}")
            elif choice < 0.9 and self.live:
                gone = set(self.random.sample(sorted(self.live), min(len(self.live), 7)))
                self._begin(self.live - gone)
                if self.index.delete(gone) != len(gone):
                    self.wrong.append("delete counted other documents")
            else:
                self.index.vacuum()
            self.done = self.begun

    def _begin(self, live: set[int]) -> None:
        self.live, self.begun = live, self.begun + 1
        self.moments[self._key(live)] = self.begun

    def search(self) -> None:
        """Search all documents; they have to be one state, not older than the last finished write."""
        done = self.done
        scores, ids = self.index.search(torch.ones(2, self.TERMS), self.most + 50)
        if not torch.equal(ids[0], ids[1]):
            self.wrong.append("two queries of one search saw two moments")
        found = ids[0][ids[0] >= 0]
        moment = self.moments.get(self._key(found.tolist()))
        if moment is None or not done <= moment <= self.begun:
            self.wrong.append(f"moment {moment}, not from {done} to {self.begun}")
        error = (scores[0][: len(found)] - self.weight(found)).abs().max() if len(found) else 0
        if float(error) > 0.02:
            self.wrong.append(f"a score is off by {float(error)}")
        self.searches += 1

    def run(self, count: int, writers: int, seconds: float) -> None:
        end = time.monotonic() + seconds

        def work(step) -> None:
            try:
                while time.monotonic() < end and not self.wrong:
                    step()
            except BaseException as error:
                self.wrong.append(repr(error))

        steps = [self.write] * writers + [self.search] * (count - writers)
        with threads(*(functools.partial(work, step) for step in steps)):
            pass
        self.done = 0
        self.search()
        assert not self.wrong, self.wrong[:3]
        assert self.searches > 1 and self.begun > 1


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_every_search_sees_one_moment(weights):
    Service(0, 200, weights).run(count=12, writers=3, seconds=0.5)


@pytest.mark.heavy
def test_every_search_of_200_threads_sees_one_moment():
    """The test runs for SOAK_SECONDS, with a new index every 20 seconds."""
    end, searches, writes, seed = time.monotonic() + SECONDS, 0, 0, 0
    while (left := end - time.monotonic()) > 0:
        service = Service(seed, 2000, ("float32", "float16", "int8")[seed % 3])
        service.run(count=200, writers=20, seconds=min(left, 20))
        searches, writes, seed = searches + service.searches, writes + service.begun, seed + 1
    print(
        f"{SECONDS:g} s, 200 threads: {searches} searches, {writes} writes, nothing lost, nothing wrong"
    )


def test_a_search_within_an_append_and_a_delete_from_its_documents():
    """Documents may come from a generator that uses the index itself."""
    index = SparseIndex.build(collection())

    def documents():
        for n in range(3):
            assert len(index) == 9 + n and index.search(queries_of(), 1)[1].shape == (5, 1)
            index.append(collection(1))
            index.delete([n])
            yield collection(1)[0]

    assert index.append(documents()) == range(12, 15)
    assert (len(index), index.num_live) == (15, 12)


# Forks


def in_child(work) -> int:
    """Run `work` in a forked child and return its wait status, 0 on success."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(40)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_goes_on(tmp_path):
    """The parent has Python and OpenMP threads, which the child lacks. OpenMP runs from 32,768 numbers on."""
    docs = (torch.rand(40_000, 2), torch.randint(0, 50, (40_000, 2)))
    matrix = torch.sparse_csr_tensor(
        torch.arange(0, 80_001, 2), docs[1].sort(1).values.reshape(-1), docs[0].reshape(-1), (40_000, 50),
        check_invariants=False,
    )  # fmt: skip
    index, q = SparseIndex.build(matrix), torch.rand(8, 50)
    want = index.search(q, 5)
    assert torch.rand(200_000).exp().sum() > 0

    def search():
        for _ in range(2):
            assert torch.equal(index.search(q, 5)[1], want[1])
        assert torch.equal(index.search(q[0], 5)[1], want[1][0])

    def change():
        assert len(SparseIndex.build(matrix)) == 40_000
        index.append(matrix)
        index.delete(range(100, 40_100))
        index.vacuum()
        index.save(tmp_path / "x")
        assert SparseIndex.load(tmp_path / "x").num_live == 40_000

    assert in_child(search) == 0 and in_child(change) == 0
    assert in_child(lambda: in_child(search) == 0 or os._exit(3)) == 0
    assert torch.equal(index.search(q, 5)[1], want[1]) and len(index) == 40_000


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_while_another_thread_writes():
    index, stop = SparseIndex.build(collection()), threading.Event()

    def write():
        while not stop.is_set():
            index.append(collection(2))
            index.delete([0])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            assert (
                in_child(lambda: (index.append(collection(1)), index.search(queries_of(), 2))) == 0
            )
    finally:
        stop.set()
        thread.join()


# Compiled programs


class Counted:
    """A backend that counts what it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("query", ["dense", "pair", "one"])
def test_a_compiled_search_is_compiled_once(weights, query):
    index, count = SparseIndex.build(collection(), weights=weights), Counted()

    @torch.compile(fullgraph=True, backend=count)
    def retrieve(x):
        x = torch.relu(x)
        return index.search((torch.arange(V).expand(len(x), V), x) if query == "pair" else x, 3)

    x = torch.randn(V) if query == "one" else torch.randn(2, V)
    for day in range(12):
        retrieve(x)
        index.append(collection(1 + 3 * day))
        index.delete([day])
        if day % 4 == 3:
            index.vacuum()
        got, want = retrieve(x), index.search(torch.relu(x), 3)
        assert torch.equal(got[1], want[1]) and torch.equal(got[0], want[0])
    assert count.graphs == 1


def test_a_compiled_model_with_several_indexes_is_compiled_once():
    """Dynamo sees the same code for all of them, and they share its compiled graph."""
    count, indexes = Counted(), [SparseIndex.build(collection(n)) for n in (3, 5, 9)]
    search = torch.compile(lambda index, x: index.search(x, 2), fullgraph=True, backend=count)
    x = queries_of()
    for _ in range(2):
        for index in indexes:
            assert torch.equal(search(index, x)[1], index.search(x, 2)[1])
    assert count.graphs == 1


def test_a_constant_query_is_searched_at_every_call():
    """Inductor's constant folding of a frozen program must not keep results of the index at compile time."""
    import torch._inductor.config as config

    index = SparseIndex.build(collection())
    model = torch.nn.Module()
    model.q = torch.nn.Parameter(queries_of(), requires_grad=False)
    model.forward = lambda: index.search(model.q, 9)
    with torch.no_grad(), config.patch(freezing=True):
        compiled = torch.compile(model, fullgraph=True)
        assert torch.equal(compiled()[1], index.search(model.q, 9)[1])
        index.delete([3])
        assert torch.equal(compiled()[1], index.search(model.q, 9)[1])


def test_a_compiled_training_step_searches_within_a_checkpoint():
    index = SparseIndex.build(collection())
    layer = torch.nn.Linear(V, V)

    def step(x):
        def part(x):
            y = torch.relu(layer(x))
            return y.gather(1, index.search(y.detach(), 3)[1] % V).sum()

        return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)

    x = queries_of()
    step(x).backward()
    want = layer.weight.grad.clone()
    layer.zero_grad()
    torch.compile(step, fullgraph=True, backend="aot_eager")(x).backward()
    torch.testing.assert_close(layer.weight.grad, want)


def test_an_exported_search_keeps_its_documents():
    index, q = SparseIndex.build(collection()), queries_of()

    class Retriever(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.index = index

        def forward(self, q):
            return self.index.search(q, 4)

    want = index.search(q, 4)
    for strict in (False, True):
        program = torch.export.export(Retriever(), (q,), strict=strict)
        index.append(collection(1))
        index.delete([int(want[1][0, 0])])
        found = program.module()(q)
        assert torch.equal(found[1], want[1]) and torch.equal(found[0], want[0])
        index = SparseIndex.build(collection())


def test_a_program_whose_index_is_gone_says_so():
    handle = SparseIndex(V)._handle
    with pytest.raises(RuntimeError, match="no longer exists"):
        torch.ops.sparse_inductor.index_search_live(queries_of(), handle, 2)
