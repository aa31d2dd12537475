"""Sparse scoring on a GPU, end to end: rewritten programs, the index, CUDA graphs, repeatability."""

from __future__ import annotations

import dataclasses
import functools
import threading

import pytest
import torch

from corpus.cases import CASES
from corpus.check import check
from processes import threads
from ranking import sparse
from sparse_inductor import SparseIndex
from sparse_inductor.kernels.common import replay
from sparse_inductor.kernels.sparse_scores import search as kernel
from sparse_inductor.ops import _checked_index as checked
from sparse_inductor.ops import _collections as cached
from sparse_inductor.ops import sparse_scores
from sparse_inductor.ops._direct import site
from support import in_a_graph, index_pays, only

pytestmark = pytest.mark.gpu

V = 300


def collection(n=40000, seed=0):
    return sparse(n, V, 0.05, seed)


def queries(b=16):
    return sparse(b, V, 0.1, 1)


def on_gpu(case):
    """Return the case with its module and tensors on the GPU."""

    def build():
        with torch.device("cpu"):
            fn, inputs = case.build()
        fn = fn.cuda() if isinstance(fn, torch.nn.Module) else fn
        return fn, tuple(t.detach().cuda() for t in inputs)

    return dataclasses.replace(case, build=build)


def rounded(module, inputs):
    module.dvals.copy_(module.dvals.half())
    return module, inputs


REWRITTEN = [
    c
    for c in CASES
    if c.pattern == "sparse_scores" and c.expect == "rewrite" and not (c.training or c.autocast)
]


# These programs cast fp32 to fp16 and back. Inductor drops such pairs of casts, in unrewritten programs, too, so their
# inputs are rounded to fp16 beforehand.
ROUNDING = {"half_values__infer"}


@pytest.mark.parametrize("case", REWRITTEN[::4], ids=lambda c: c.name)
def test_a_rewritten_program_gives_the_same_on_a_gpu(case):
    case = on_gpu(case)
    if case.name in ROUNDING:
        case = dataclasses.replace(case, build=lambda build=case.build: rounded(*build()))
    with torch.device("cuda"), only("sparse_scores"):
        check(case, how="inductor")


def test_the_operator_is_exact_and_repeatable():
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(0, V, (5000, 40), generator=g).cuda()
    values, q = torch.rand(5000, 40, generator=g).cuda(), queries(20).cuda()
    want = (q.double()[:, ids] * values.double()).sum(-1)
    scores = sparse_scores(q, ids, values)
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-5)
    found, which = sparse_scores(q, ids, values, k=10)
    best, right = torch.sort(scores, dim=1, descending=True, stable=True)
    assert torch.equal(found, best[:, :10]) and torch.equal(which, right[:, :10])
    for _ in range(3):
        assert torch.equal(sparse_scores(q, ids, values), scores)


@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
@pytest.mark.parametrize("k", [1, 100, 1000])
def test_the_index_gives_the_cpus_bits(weights, k):
    dense, q = collection(), queries()
    here = SparseIndex.build(dense, weights=weights)
    there = SparseIndex.build(dense, weights=weights, device="cuda")
    for index in (here, there):
        index.append(collection(500, seed=7))
        index.delete(range(10, 90))
    scores, ids = there.search(q.cuda(), k)
    right, places = here.search(q, k)
    assert torch.equal(scores.cpu(), right) and torch.equal(ids.cpu(), places)
    again = there.search(q.cuda(), k)
    assert torch.equal(again[0], scores) and torch.equal(again[1], ids)


def test_filters_give_the_cpus_bits():
    dense, q = collection(), queries()
    here, there = SparseIndex.build(dense), SparseIndex.build(dense, device="cuda")
    masks = torch.rand(len(q), len(dense), generator=torch.Generator().manual_seed(2)) < 0.01
    for allow in (masks[0], masks, masks[0].nonzero().squeeze(1)):
        scores, ids = there.search(q.cuda(), 100, allow=allow.cuda())
        right, places = here.search(q, 100, allow=allow)
        assert torch.equal(scores.cpu(), right) and torch.equal(ids.cpu(), places)


@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
def test_rows_of_all_lengths_by_both_kinds_of_kernels(weights):
    """Rows have 1 to 700 terms: for one lane, for a warp, and for several iterations.

    The portable kernels have the bits of those in CUDA C++.
    """
    g = torch.Generator().manual_seed(4)
    n, V = 12_000, 3000
    share = 0.23 * torch.rand(n, 1, generator=g) ** 3
    dense = torch.rand(n, V, generator=g) * (torch.rand(n, V, generator=g) < share)
    q = torch.rand(40, V, generator=g) * (torch.rand(40, V, generator=g) < 0.02)
    here = SparseIndex.build(dense, weights=weights)
    there = SparseIndex.build(dense, weights=weights, device="cuda")
    for k in (20, 700):
        want = here.search(q, k)
        tensors = q.cuda(), *there.operands(), k
        for shared in (True, False):
            scores, ids = kernel.search(*tensors, shared=shared)
            assert torch.equal(ids.cpu(), want[1]) and torch.equal(scores.cpu(), want[0])


def test_moving_saving_and_loading(tmp_path):
    index, q = SparseIndex.build(collection()), queries()
    want = index.search(q, 50)
    moved = index.to("cuda")
    assert torch.equal(moved.search(q.cuda(), 50)[1].cpu(), want[1])
    moved.save(tmp_path / "x")
    loaded = SparseIndex.load(tmp_path / "x", device="cuda")
    assert torch.equal(loaded.search(q.cuda(), 50)[0].cpu(), want[0])


def test_search_in_a_cuda_graph():
    index = SparseIndex.build(collection(), device="cuda")
    q = queries().cuda()
    want = index.search(q, 100)
    static = torch.zeros_like(q)
    index.search(static, 100)
    graph, (scores, ids) = in_a_graph(lambda: index.search(static, 100))
    static.copy_(q)
    graph.replay()
    assert torch.equal(ids, want[1]) and torch.equal(scores, want[0])


def test_search_under_torch_compile():
    index, q = SparseIndex.build(collection(), device="cuda"), queries().cuda()
    compiled = torch.compile(lambda q: index.search(q * 2, 20), fullgraph=True)
    assert torch.equal(compiled(q)[1], index.search(q * 2, 20)[1])


def unproved(index, q, k):
    """Search, and return the number of queries that were answered by scoring every document, and the results."""
    made, new = [], kernel._Scratch.of
    replay.forget()  # a recorded search would allocate its scratch memory otherwise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernel._Scratch, "of", staticmethod(lambda *sizes: made.append(new(*sizes)) or made[-1])
        )
        found = index.search(q, k)
    # The last one belongs to the search: a first call also runs the function without launches, to compile all kernels.
    return int((made[-1].status == 1).sum()), found


@pytest.mark.parametrize("kind", ["empty", "negative", "one_term", "rare", "ties"])
def test_queries_that_no_threshold_fits(kind):
    """Negative weights, or more ties than can be kept, need scoring of everything; few matches do not."""
    dense = collection()
    dense[:, 1] = 0
    dense[::4000, 1] = 0.5
    if kind == "ties":
        dense[:, 0] = 1.0
    q = torch.zeros(2, V)
    if kind != "empty":
        q[0, int(kind == "rare")] = -1.0 if kind == "negative" else 1.0
    here, there = SparseIndex.build(dense), SparseIndex.build(dense, device="cuda")
    want = here.search(q, 200)
    scored_all, got = unproved(there, q.cuda(), 200)
    assert torch.equal(got[1].cpu(), want[1]) and torch.equal(got[0].cpu(), want[0])
    assert scored_all == {"negative": 1, "ties": 1}.get(kind, 0)


def test_a_wrong_threshold_in_a_cuda_graph(monkeypatch):
    """Queries with a wrong sampled threshold are scored again in the same graph, also more than one group of them."""
    monkeypatch.setattr(kernel, "rank_in_sample", lambda expected, k: 1)
    index = SparseIndex.build(collection(), device="cuda")
    index.delete(range(100, 200))
    q = queries(11).cuda()
    static = torch.zeros_like(q)
    index.search(static, 300)
    graph, (scores, ids) = in_a_graph(lambda: index.search(static, 300))
    here = SparseIndex.build(collection())
    here.delete(range(100, 200))
    want = here.search(q.cpu(), 300)
    assert unproved(index, q, 300)[0] == 11
    for _ in range(2):
        static.copy_(q)
        graph.replay()
        assert torch.equal(ids.cpu(), want[1]) and torch.equal(scores.cpu(), want[0])


def test_answers_that_rescoring_leaves_in_a_large_batch():
    """Rescoring writes the answers of most queries itself.

    It leaves those with more ties than it can rank, with an unproved threshold, with fewer than k matches, or with NaN.
    """
    dense, q = collection(), queries(300)
    dense[:, :3], q[:, :3], q[:5] = 0, 0, 0
    dense[::27, 0], dense[:, 1], dense[::401, 2] = 1.0, 0.5, 1.0
    q[0, 0], q[1, 1], q[2, 2], q[4, 9] = 1.0, 1.0, 1.0, float("nan")
    here, there = SparseIndex.build(dense), SparseIndex.build(dense, device="cuda")
    assert unproved(there, q.cuda(), 1000)[0] == 1
    want = here.search(q, 1000)
    for _ in range(3):  # the third call is replayed
        scores, ids = there.search(q.cuda(), 1000)
        torch.testing.assert_close(scores.cpu(), want[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ids.cpu(), want[1])


def test_a_search_never_waits_for_the_gpu():
    index, q = SparseIndex.build(collection(), device="cuda"), queries().cuda()
    index.search(q, 100)
    torch.cuda.set_sync_debug_mode("error")
    try:
        index.search(q, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("terms", [300, 5000])
def test_queries_of_many_terms_and_large_vocabularies(terms):
    """Queries have more terms than fit a query's map in shared memory, or than integer scoring supports."""
    g = torch.Generator().manual_seed(3)
    V = 40_000
    ids = torch.randint(0, V, (10_000, 60), generator=g)
    documents = (torch.arange(0, 600_001, 60), ids.flatten(), torch.rand(600_000, generator=g))
    matrix = torch.sparse_csr_tensor(*documents, (10_000, V), check_invariants=False)
    q = torch.zeros(2, V)
    q[0, torch.randperm(V, generator=g)[:terms]] = torch.rand(terms, generator=g)
    q[1, :20] = 1.0
    here, there = SparseIndex.build(matrix), SparseIndex.build(matrix, device="cuda")
    want, got = here.search(q, 50), there.search(q.cuda(), 50)
    assert torch.equal(got[1].cpu(), want[1]) and torch.equal(got[0].cpu(), want[0])


class Constant:
    """Constant documents, searched through a call site as in generated code."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, V, (40000, 16), generator=g).cuda()
        self.values, self.q = torch.rand(40000, 16, generator=g).cuda(), queries().cuda()
        self.call = site("sparse_scores_topk_cached", "cuda", True)

    def search(self, rows=None):
        args = self.ids, self.values, None, None, 40000, 50, torch.float32, "index", 3
        return self.call(self.q[:rows], *args)

    def agree(self, found):
        exact = (self.q.double()[:, self.ids] * self.values.double()).sum(-1).topk(50).values
        torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-5)

    @property
    def known(self):
        (known,) = cached.collections()
        return known


@pytest.fixture
def constant(monkeypatch):
    monkeypatch.setattr(cached, "ON_THE_SPOT", 1 << 40)
    index_pays(monkeypatch)
    cached.forget()
    yield Constant()
    cached.forget()


def test_documents_that_stay_the_same_are_searched(constant):
    """An index searches them, on any stream, until a write. A CUDA graph captures the operator itself."""
    ids, values, q, search = constant.ids, constant.values, constant.q, constant.search
    for write in (None, lambda: values.data.mul_(2), lambda: ids.data[7, 3].fill_(5)):
        if write is not None:
            write()
            before = constant.known.searches
            constant.agree(search())
            assert constant.known.searches == before, "scored, for the documents have changed"
        for _ in range(40):
            found = search()
        constant.agree(found)
        assert constant.known.searches > 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        constant.agree(search())
    side.synchronize()
    before = constant.known.searches
    graph, found = in_a_graph(search)
    values.data.mul_(0.5)
    graph.replay()
    constant.agree(found)
    assert constant.known.searches == before
    q[2, 1] = float("inf")
    assert search()[0][2].isinf().any() and constant.known.searches == before


def test_queries_of_many_sizes_on_several_streams(constant, monkeypatch):
    """Launches are kept for a few sizes, and planned again for the others. Calls run on several streams at once."""
    monkeypatch.setattr(checked, "MOST_SIZES", 2)
    for _ in range(cached.PATIENCE + 1):
        expected, _ = constant.search()
    for _ in range(3):  # planned, recorded, replayed
        for rows in range(1, 5):
            constant.call = site("sparse_scores_topk_cached", "cuda", True)
            assert torch.equal(constant.search(rows)[0], expected[:rows])
    assert constant.known.searches == 13 and 0 < len(constant.known._built._searches) <= 2
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    wrong = []

    def call(stream):
        with torch.cuda.stream(stream):
            found = [constant.search()[0] for _ in range(20)]
            wrong.extend(f for f in found if not torch.equal(f, expected))

    constant.call = site("sparse_scores_topk_cached", "cuda", True)
    with threads(*(functools.partial(call, stream) for stream in streams)):
        pass
    assert not wrong and constant.known.searches > 60


@pytest.mark.multigpu
def test_documents_on_another_gpu_than_the_current_one(constant):
    for name in ("ids", "values", "q"):
        setattr(constant, name, getattr(constant, name).to("cuda:1"))
    for _ in range(cached.PATIENCE + 4):
        constant.agree(constant.search())
    assert constant.known.searches == 4
    constant.values.data.mul_(2)
    constant.agree(constant.search())
    assert constant.known.searches == 4 and torch.cuda.current_device() == 0


def test_an_index_is_built_beside_the_capture_of_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(cached, "ON_THE_SPOT", 0)
    index_pays(monkeypatch)
    cached.forget()
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (200_000, 32), generator=g).cuda()
    values, q = torch.rand(200_000, 32, generator=g).cuda(), queries().cuda()
    op = torch.ops.sparse_inductor.sparse_scores_topk_cached

    def search():
        return op(q, ids, values, None, None, 200_000, 50, torch.float32, "index", 3)

    for _ in range(cached.PATIENCE + 1):
        expected = search()
    building = [t for t in threading.enumerate() if t.name == "sparse_index_build"]
    graphs = 0
    while graphs < 3 or any(t.is_alive() for t in building):
        graph, found = in_a_graph(search)
        graph.replay()
        assert torch.equal(found[0], expected[0])
        graphs += 1
    assert cached.collections()[0].nbytes > 0, cached.collections()[0].note
    cached.forget()
