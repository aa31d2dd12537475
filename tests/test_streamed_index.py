"""Documents in host memory that are searched in parts: results have the bits of `SparseIndex.search`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from processes import threads
from ranking import counts
from sparse_inductor import SparseIndex
from sparse_inductor.index import StreamedIndex, queries

N, V = 100, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


pytestmark = pytest.mark.usefixtures("small_segments")


def collection(n: int, seed: int = 0) -> Tensor:
    return counts(n, V, seed, share=0.4)


def queries_of(b: int = 5) -> Tensor:
    return counts(b, V, seed=1)


def same(streamed: StreamedIndex, q: Tensor, k: int, **options) -> None:
    found, want = streamed.search(q, k, **options), streamed.index.search(q, k, **options)
    assert found[0].device.type == streamed.device.type
    assert torch.equal(found[0].cpu().nan_to_num(-1), want[0].nan_to_num(-1))
    assert torch.equal(found[1].cpu(), want[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("part", [1, 40, 1000])
def test_the_bits_are_those_of_the_index(device, weights, part):
    index = SparseIndex.build(collection(N), weights=weights)
    streamed, q = StreamedIndex(index, device, part_documents=part), queries_of()
    for k in (0, 1, 7, N, N + 3):
        same(streamed, q, k)
    same(streamed, q[0], 5)
    index.append(collection(9, 2))
    index.delete([0, 17, 101])
    odd = torch.arange(N + 9) % 2 == 1
    same(streamed, q, 9, allow=odd, deny=[5, 36], offset=3, min_score=1.0)
    same(streamed, q, N, deny=torch.stack([odd, ~odd, odd, ~odd, odd]))
    index.vacuum()
    same(streamed, q, 9)
    q[2, 1] = float("inf")
    same(streamed, q, 9)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_in_blocks(device, monkeypatch):
    for name in ("_CPU_BYTES", "_GPU_BYTES"):
        monkeypatch.setattr(queries, name, 2 * 4 * V)
    streamed = StreamedIndex(SparseIndex.build(collection(N)), device, part_documents=32)
    q = queries_of()
    found, want = streamed.search(q.to_sparse(), 9), streamed.index.search(q, 9)
    assert torch.equal(found[0].cpu(), want[0]) and torch.equal(found[1].cpu(), want[1])


def test_only_what_changed_is_made_anew():
    index = SparseIndex.build(collection(N))
    streamed = StreamedIndex(index, "cpu", part_documents=32)
    streamed.search(queries_of(), 3)
    before = streamed._parts_of(index._contents)
    size = streamed.nbytes
    index.delete([3])
    assert all(a is b for a, b in zip(streamed._parts_of(index._contents), before))
    index.append(collection(20, 3))
    after = streamed._parts_of(index._contents)
    assert [a is b for a, b in zip(before, after)] == [True] * 3 + [False]
    assert streamed.nbytes > size and len(streamed) == N + 20


def test_an_index_without_documents_and_one_elsewhere():
    same(StreamedIndex(SparseIndex(V), "cpu"), queries_of(), 3)
    with pytest.raises(ValueError, match="must live on the CPU"):
        StreamedIndex(SparseIndex(V).to("meta"), "cpu")
    with pytest.raises(ValueError, match="part_documents"):
        StreamedIndex(SparseIndex(V), "cpu", part_documents=0)


@pytest.mark.parametrize("device", DEVICES)
def test_searches_of_threads_beside_a_writer(device):
    index = SparseIndex.build(collection(N))
    streamed, failed = StreamedIndex(index, device, part_documents=32), []
    want = index.search(queries_of(), 5, allow=range(N))

    def look():
        for _ in range(10):
            found = streamed.search(queries_of(), 5, allow=range(N))
            if not (torch.equal(found[0].cpu(), want[0]) and torch.equal(found[1].cpu(), want[1])):
                failed.append(found)

    with threads(*[look] * 3):
        for at in range(20):
            index.append(collection(3, at))
    assert not failed
