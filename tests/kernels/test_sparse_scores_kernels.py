"""The scoring kernels against fp64: documents, packing, integer scores, search; in the interpreter and on a GPU."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from on_cpu import launch_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import interpreter

from ranking import best, sparse
from sparse_inductor.aten.top import best_of
from sparse_inductor.index.segment import Segment
from sparse_inductor.index.sources import collection_of
from sparse_inductor.kernels.common import recording
from sparse_inductor.kernels.common.cuda import CudaKernel
from sparse_inductor.kernels.sparse_scores import accumulate, documents, merge, search
from sparse_inductor.kernels.sparse_scores import best as best_documents
from sparse_inductor.kernels.sparse_scores import checksum as checksums
from sparse_inductor.kernels.sparse_scores import cpu as native
from support import heavy

CHUNK = 256
V = 60


@pytest.fixture(autouse=True)
def kernels_search(monkeypatch):
    """A search launches its kernels in the interpreter, too; normally a search on the CPU uses ATen."""
    monkeypatch.setattr(search, "launches", lambda query: True)


@pytest.fixture
def small_chunks(monkeypatch, device):
    """Chunks of 256 documents, so that a small collection has several."""
    if device.type == "cuda":
        return  # the shared-memory kernel has an array of fixed size
    monkeypatch.setattr(search, "CHUNK_DOCS", CHUNK)
    monkeypatch.setattr(search, "CHUNK_BITS", CHUNK.bit_length() - 1)


@pytest.fixture(params=["by itself", heavy("behind the scoring of everything")])
def sorting(request, monkeypatch):
    """Where answers are sorted that rescoring did not write: in their own kernel, or in the kernel that scores all.

    In the latter case rescoring writes none of them.
    """
    if request.param != "by itself":
        monkeypatch.setattr(search, "_ranks", lambda filtered, parts, k: True)
        monkeypatch.setattr(search, "sort_kernel", None)


def collection(n, seed=0, share=0.1, negative=False):
    dense = sparse(n, V, share, seed)
    return dense - 0.2 * (dense > 0) if negative else dense


def queries(b=3, share=0.2):
    return sparse(b, V, share, 1)


def segments(dense, precision="float32", device="cpu", size=1000):
    made = [
        Segment.of(r, V, precision) for part in dense.split(size) for r in collection_of(part, V)[1]
    ]
    return [s.to(torch.device(device)) for s in made]


def dense_of(parts):
    rows = [
        torch.zeros(s.count, V).index_put(
            (
                torch.repeat_interleave(torch.arange(s.count), s.offsets.diff().cpu()),
                s.term_ids().cpu(),
            ),
            s.values().cpu(),
        )
        for s in parts
    ]
    return torch.cat(rows)


def run(parts, q, k, deleted, device, **options):
    """Search, and return the results and the number of queries that were answered by scoring all documents."""
    packed = search.pack(parts, V)
    made, new = [], search._Scratch.of
    search._Scratch.of = staticmethod(lambda *sizes: made.append(new(*sizes)) or made[-1])
    try:
        found = search.search(q.to(device), packed, [s.count for s in parts], deleted, k, **options)
    finally:
        search._Scratch.of = new
    return [t.cpu() for t in found], sum(int((s.status == 1).sum()) for s in made)


def searched(parts, q, k, device, deleted=(), **options):
    """Check that a search finds the best documents that are not deleted.

    Return the number of queries that were answered by scoring all documents.
    """
    gone = torch.zeros(sum(s.count for s in parts), dtype=torch.bool, device=device)
    gone[list(deleted)] = True
    (scores, ids), scored_all = run(parts, q, k, gone, device, **options)
    wanted, right = best(dense_of(parts), q, k, ~gone.cpu())
    assert torch.equal(ids, right)
    assert torch.equal(scores, wanted)
    return scored_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_documents_kernels_add_up_rows(batch, dtype, device):
    g = torch.Generator().manual_seed(0)
    ids, values = torch.randint(-V, V, (40, 7), generator=g), torch.rand(40, 7, generator=g)
    q = torch.rand(batch, V, generator=g).to(dtype)
    want = (q[:, ids] * values).sum(-1)
    offsets, rows = torch.arange(0, 281, 7), torch.arange(40).repeat_interleave(7)
    flat = (ids.flatten(), values.flatten())
    back = (ids.flatten().flip(0), values.flatten().flip(0))
    for (i, v), r, o in (
        ((ids, values), None, None),
        (flat, None, offsets),
        (flat, rows, None),
        (back, rows.flip(0), None),
    ):
        given = [None if t is None else t.to(device) for t in (q, i, v, r, o)]
        parts = [s.cpu() for _, s in documents.blocks(*given, 40, dtype)]
        torch.testing.assert_close(torch.cat(parts, 1), want)


def test_out_of_range_terms_count_nothing(device):
    ids = torch.tensor([[0, V, V + 5, -V - 1]], device=device)
    values, q = torch.ones(1, 4, device=device), torch.ones(1, V, device=device)
    ((_, scores),) = documents.blocks(q, ids, values, None, None, 1, torch.float32)
    assert scores.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n, k", [(1, 1), (64, 64), (150, 7)])
def test_the_best_are_the_first_of_a_stable_sort(n, k, dtype, device):
    """The scores have ties, both zeros, infinities and NaN, and are stored by rows or by columns."""
    g = torch.Generator().manual_seed(n)
    scores = (torch.randn(3, n, generator=g) * 4).round().to(dtype)
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan")])
    scores[:, : min(n, 6)] = odd[:n].to(dtype)
    scores = scores[:, torch.randperm(n, generator=g)]
    want, which = best_of([(0, scores)], k)
    by_query, by_document = scores.to(device), scores.t().contiguous().to(device).t()
    cut = n // 3
    for found, ids in (
        best_documents.best(by_query, k),
        best_documents.best(by_document, k),
        best_documents.selected([(0, by_document)], k),
        best_documents.selected(
            [(i, t) for i, t in ((0, by_query[:, :cut]), (cut, by_query[:, cut:])) if t.numel()], k
        ),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float().cpu(), want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ids.cpu(), which)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_best_of_a_few_documents_for_a_few_queries_take_two_launches(batch, monkeypatch):
    """They use no ATen operator, because each would cost a replay as much as a launch."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(grid)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.is_view or func in recording.ALLOCATES, func
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(documents, "_few_kernel", Kernel())
    monkeypatch.setattr(best_documents, "_rank_kernel", Kernel())
    ids, values = torch.randint(V, (256, 16)), torch.rand(256, 16)
    q = torch.rand(batch, V)
    with Watch():
        ((_, scores),) = documents.blocks(q, ids, values, None, None, 256, torch.float32)
        assert scores.stride() == (256, 1)  # as the operator returns them
        assert launched == [(16, batch)]
        launched.clear()
        found, which = best_documents.search(q, ids, values, None, None, 256, 10, torch.float32)
    assert launched == [(16, batch), (4 * batch,)]
    assert found.shape == which.shape == (batch, 10)


def test_packing_keeps_every_posting(small_chunks, device):
    dense = collection(700)
    parts = segments(dense, device=device, size=300)
    p = search.Packed.of([t.cpu() for t in search.pack(parts, V)])
    got = torch.zeros_like(dense)
    step = search.CHUNK_DOCS
    largest = float(dense.max())
    for c in range(p.chunks.count):
        for t in range(V):
            low, high = p.chunks.offsets[c, t], p.chunks.offsets[c, t + 1]
            x = p.chunks.post[
                int(p.chunks.bases[c]) + int(low) : int(p.chunks.bases[c]) + int(high)
            ]
            weights = (x >> search.CHUNK_BITS).float() * (largest / accumulate.WEIGHT_STEPS)
            got[p.chunks.docs[c] + (x & (step - 1)).long(), t] = weights
    torch.testing.assert_close(got, dense, rtol=0, atol=largest / accumulate.WEIGHT_STEPS)


@pytest.mark.parametrize("larger", [False, True])
def test_packing_more_is_packing_all(larger, small_chunks, device):
    """Appending keeps the existing chunks, unless a larger weight changes the scale of the integer weights."""
    dense = collection(1500)
    if larger:
        dense[1400] *= 3
    whole = segments(dense, device=device, size=600)
    before = segments(dense[:900], device=device, size=600)
    grown = search.pack([before[0], *whole[1:]], V, 1, search.pack(before, V))
    for got, want in zip(grown, search.pack(whole, V), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("negative", [heavy(False), True])
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_search_is_exact(precision, negative, device):
    """Chunks have their size on a GPU, some documents are deleted, and weights have every precision and sign."""
    parts = segments(collection(20000, negative=negative), precision, device, size=9000)
    shared = None if device.type == "cuda" else False
    scored_all = searched(parts, queries(), 20, device, range(5, 50), shared=shared)
    assert scored_all == 0, "the threshold held for every query"


@pytest.mark.heavy
def test_a_query_whose_threshold_is_wrong_is_answered_by_scoring_everything(
    device, monkeypatch, sorting
):
    monkeypatch.setattr(search, "rank_in_sample", lambda expected, k: 1)
    assert searched(segments(collection(8400), device=device), queries(), 50, device) == 3


def test_queries_without_enough_matches_ties_and_no_terms(device, sorting):
    """One query has thousands of equal scores, one has fewer matches than results, one is empty, one has a NaN."""
    dense = torch.zeros(8400, V)
    dense[:, 0] = 1.0
    dense[::1000, 1] = 1.0
    parts = segments(dense, device=device, size=9000)
    deleted = torch.zeros(8400, dtype=torch.bool, device=device)
    q = torch.zeros(4, V)
    q[0, 0], q[1, 1], q[3, 2] = 1.0, 1.0, float("nan")
    (scores, ids), _ = run(parts, q, 12, deleted, device)
    wanted, right = best(dense, q[:3], 12)
    assert torch.equal(ids[:3], right) and torch.equal(scores[:3], wanted)
    assert ids[3].eq(-1).all() and scores[3].isnan().all()


def test_a_collection_ordered_by_topic_is_sampled_fairly(device):
    """Documents of one topic are adjacent, and a query asks for one topic."""
    g = torch.Generator().manual_seed(5)
    topic = torch.arange(20000) // 2000
    dense = torch.rand(20000, V, generator=g) * (torch.rand(20000, V, generator=g) < 0.05)
    for t in range(10):
        dense[topic == t, 6 * t : 6 * t + 3] += torch.rand(2000, 3, generator=g)
    q = torch.zeros(2, V)
    q[0, 0:3] = torch.rand(3, generator=g)
    q[1, 54:57] = torch.rand(3, generator=g)
    assert searched(segments(dense, device=device, size=9000), q, 30, device) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("k", [1, 300])
def test_any_number_of_results(k, device):
    parts = segments(collection(20000, share=0.3), device=device, size=20000)
    searched(parts, queries(2, share=0.5), k, device)


def test_a_small_collection_and_too_many_results(device):
    dense = collection(40)
    parts = segments(dense, device=device)
    deleted = torch.zeros(40, dtype=torch.bool, device=device)
    (scores, ids), _ = run(parts, queries(), 45, deleted, device)
    wanted, right = best(dense, queries(), 45)
    assert torch.equal(ids, right) and torch.equal(scores, wanted)


@pytest.mark.parametrize("world", [1, 3])
def test_lists_of_several_processes_are_merged(world, device):
    """Lists have equal scores across processes, some are not full, and one query is not finite."""
    g = torch.Generator().manual_seed(2)
    B, k, there = 4, 37, 30
    scores = torch.randint(-3, 4, (world, B, there), generator=g).float() / 2
    scores, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    ids = order.clone()
    scores[:, 3, :], ids[:, 3, :] = float("nan"), -1
    if world == 1:
        k = there
    else:  # the second process has fewer than k documents
        scores[1, :3, 12:], ids[1, :3, 12:] = float("-inf"), -1
        scores = torch.nn.functional.pad(scores, (0, k - there), value=float("-inf"))
        ids = torch.nn.functional.pad(ids, (0, k - there), value=-1)
        scores[:, 3] = float("nan")
    offered = [
        (-s, 100 * r + i)
        for r in range(world)
        for s, i in zip(scores[r, 0].tolist(), ids[r, 0].tolist())
        if i >= 0
    ]
    lists = [merge.keys(scores[r].to(device), ids[r].to(device), 100 * r) for r in range(world)]
    found, which = merge.merged(torch.stack(lists), scores[0].to(device))
    want = sorted(offered)[:k]
    assert [(-s, i) for s, i in zip(found[0].tolist(), which[0].tolist())][: len(want)] == want
    assert which[0, len(want) :].eq(-1).all() and which[3].eq(-1).all() and found[3].isnan().all()
    assert found[:3, len(want) :].eq(float("-inf")).all()


@pytest.mark.parametrize("sizes", [(5000, 300), (7, 0), (1024, 2048)])
def test_checksums_are_those_of_the_c_code(device, sizes):
    """The kernel and the C++ code compute the same checksums, and one changed bit changes them."""
    if not native.ready(wait=True):
        pytest.skip("no C++ compiler")
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**31), 2**31, (2, 1024, 2), generator=g, dtype=torch.int32)
    ids = torch.randint(-(2**62), 2**62, sizes[:1], generator=g)
    values = torch.randn(2 * sizes[1], generator=g)
    query = torch.tensor([[1.0, float("nan"), float("-inf"), 0.0]])
    totals, result = checksums.buffers(device)
    for _ in range(2):  # the kernel resets the totals after use
        ids[-1] ^= 1
        given = [t.to(device) for t in (ids, values)]
        checksums.checksum(query.to(device), *given, None, None, totals, result, keys.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        *sums, lost = (s % 2**64 for s in result.tolist())
        assert lost == 2 and sums[4:] == [0] * 4
        assert sums[:4] == [*native.checksum(ids, keys), *native.checksum(values, keys)]
    odd = torch.zeros(7, dtype=torch.half, device=device)  # not a multiple of 64 bits
    assert checksums._words(odd).dtype == torch.int16


@pytest.mark.parametrize(
    "precision, k, b", [("float32", 10, 3), ("float16", 300, 2), ("int8", 10, 2)]
)
def test_search_by_kernels_in_cuda(monkeypatch, precision, k, b):
    """A search launches the kernels for an NVIDIA GPU: Triton's in the interpreter, CUDA C++ compiled for the CPU."""
    monkeypatch.setattr(CudaKernel, "launch", launch_on_cpu)
    n = search.CHUNK_DOCS + 900
    parts = segments(collection(n, share=0.2), precision, size=4000)
    assert searched(parts, queries(b), k, torch.device("cpu"), range(5, 300), shared=True) == 0


def run_program(kernel, program, programs, args, constants):
    """Run one of several programs of a kernel in the interpreter."""
    builder, kind = interpreter.interpreter_builder, type(interpreter.interpreter_builder)
    builder.set_grid_dim = lambda *_: kind.set_grid_dim(builder, programs, 1, 1)
    builder.set_grid_idx = lambda *_: kind.set_grid_idx(builder, program, 0, 0)
    kernel[(1,)](*args, **constants)


@pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("at_once", [heavy(1), 2])
def test_programs_that_score_everything_wait_for_none_that_has_not_begun(at_once):
    """Of three programs, at most one or two run at once.

    The queries are: unproved, proved but not sorted, not finite, unproved.
    """
    g, n, k, programs, room = torch.Generator().manual_seed(at_once), 200, 20, 3, 64
    docs = sparse(n, V, 0.1, at_once)
    packed = search.Packed.of(search.pack(segments(docs), V))
    status = torch.tensor([1, 0, 2, 1], dtype=torch.int32)
    B = len(status)
    q = (torch.rand(B, V, generator=g) < 0.3) * torch.randint(1, 4, (B, V), generator=g).float()
    deleted = torch.rand(n, generator=g) < 0.1
    wanted, right = best(dense_of(segments(docs)), q, k, ~deleted)
    keys = torch.full((B, room), -5)
    keys[1, :k] = merge.keys(wanted[1:2], right[1:2], 0)[0][torch.randperm(k, generator=g)]
    ints = lambda *shape, dtype=torch.int32: torch.full(shape, 91, dtype=dtype)
    scores, ids = torch.zeros(B, k), torch.zeros(B, k, dtype=torch.int64)
    args = [
        q, packed.offsets, packed.terms, packed.weights, packed.scales, packed.chunks.docs, packed.chunks.count,
        deleted, status, keys, torch.tensor([0, k, 0, 0], dtype=torch.int32), torch.zeros(V, 4), ints(4, n),
        ints(32, 4), ints(programs, 2), torch.tensor([0, 0, B, 0], dtype=torch.int32), torch.ones(B),
        ints(B, search.COUNTERS_APART), ints(B, room), ints(B, room), ints(B, room, dtype=torch.int64), scores, ids,
    ]  # fmt: skip
    for a in args:
        if isinstance(a, torch.Tensor):
            a.share_memory_()
    constants = {
        "BYTES": False, "UNSIGNED16": True, "ROOM": room, "GROUP": 4, "DOCS": 16, "WIDTH": 32, "READ": 64, "DEPTH": 2,
        "SORTED": True, "SMALL": 32, "PDL": False,
    }  # fmt: skip
    args += [V, n, B, k]
    context, kernel = multiprocessing.get_context("fork"), search.everything_kernel
    waiting = [
        context.Process(target=run_program, args=(kernel, p, programs, args, constants))
        for p in range(programs)
    ]
    while waiting:
        running, waiting = waiting[:at_once], waiting[at_once:]
        for process in running:
            process.start()
        for process in running:
            process.join(100)
            assert process.exitcode == 0
    assert scores[2].isnan().all() and ids[2].eq(-1).all()
    for b in (0, 1, 3):
        assert torch.equal(ids[b], right[b]) and torch.equal(scores[b], wanted[b])
