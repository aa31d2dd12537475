"""The compiled search of a SparseIndex has the same bits as the search by ATen operations, and is optional."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from processes import python
from sparse_inductor import SparseIndex
from sparse_inductor.index import segment
from sparse_inductor.kernels.sparse_scores import cpu as native
from sparse_inductor.ops import index_search

V = 20


@pytest.fixture(scope="module", autouse=True)
def compiled():
    if not native.ready(wait=True):
        pytest.skip("there is no C++ compiler")


def search(
    index: SparseIndex, q: Tensor, k: int, by_aten: bool, **filters
) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_search, "_APART", 1 << 40 if by_aten else 0)
        if by_aten:
            patch.setattr(native, "ready", lambda **_: False)
        used = []
        search = native.Segments.search
        patch.setattr(native.Segments, "search", lambda *a: (used.append(1), search(*a))[1])
        found = index.search(q, k, **filters)
        assert bool(used) == (not by_aten and len(index) > 0 and len(q) > 0)
        return found


def alike(index: SparseIndex, q: Tensor, k: int, **filters) -> None:
    mine, theirs = (search(index, q, k, by_aten, **filters) for by_aten in (False, True))
    assert torch.equal(mine[1], theirs[1])
    assert torch.equal(mine[0].nan_to_num(7.0), theirs[0].nan_to_num(7.0))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99), n=st.integers(0, 300), k=st.integers(0, 40), b=st.integers(1, 3),
    steps=st.sampled_from([1, 3, 10**6]), barred=st.sampled_from([0.0, 0.1, 0.75, 0.99, 1.0]),
)  # fmt: skip
def test_the_bits_are_those_of_aten(seed, n, k, b, steps, barred):
    """steps: the number of different weights; with few of them, many scores are equal."""
    g = torch.Generator().manual_seed(seed)
    dense = (torch.rand(n, V, generator=g) * steps).round() / steps - 0.3
    index = SparseIndex.build(dense * (torch.rand(n, V, generator=g) < 0.3), num_terms=V)
    q = torch.randn(b, V, generator=g) * (torch.rand(b, V, generator=g) < 0.5)
    alike(index, q, k, deny=torch.rand(n, generator=g) < barred)


def test_segments_and_chunks(monkeypatch):
    """There are several chunks of 16,384 documents and several segments, searched by one thread or two."""
    monkeypatch.setattr(segment, "CAPACITY", 20_000)
    g = torch.Generator().manual_seed(0)
    dense = torch.rand(50_000, V, generator=g) * (torch.rand(50_000, V, generator=g) < 0.2)
    index = SparseIndex.build(dense)
    assert len(index.operands()[1]) == 3
    deny = (torch.rand(50_000, 2, generator=g) < 0.3).T  # not contiguous
    # No document of the second segment (20,000 to 39,999) is allowed.
    few = torch.tensor([45_001, 16_384, 16_383, 45_000, 45_001])
    for k in (1, 100, 5000):
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            alike(index, torch.rand(2, V, generator=g), k)
            alike(index, torch.rand(2, V, generator=g), k, deny=deny)
            alike(index, torch.rand(2, V, generator=g), k, allow=few)
            alike(index, torch.rand(2, V, generator=g), k, allow=deny & (torch.rand(50_000) < 0.1))


def test_what_is_not_finite():
    dense = torch.tensor([[3e38, 3e38], [-3e38, -3e38], [1.0, -1.0], [0.0, 0.0]])
    index = SparseIndex.build(dense)
    q = torch.tensor([[3e38, 3e38], [1.0, 1.0], [float("nan"), 1.0], [float("inf"), 0.0]])
    alike(index, q, 4)


def test_a_small_collection_is_compiled_for_once_it_has_been_searched_much(monkeypatch):
    asked = []
    monkeypatch.setattr(native, "ready", lambda worth_compiling: asked.append(worth_compiling))
    monkeypatch.setattr(index_search, "_scored", 0)
    monkeypatch.setattr(index_search, "_SCORED", 20)
    index = SparseIndex.build(torch.eye(4))
    for _ in range(3):
        index.search(torch.eye(4)[:2], 1)
    assert asked == [False, False, True]
    monkeypatch.setattr(index_search, "_SCORED", 1 << 40)
    index.search(torch.eye(4), 1)
    monkeypatch.setattr(index_search, "_COMPILED", 4)
    index.search(torch.eye(4), 1)
    assert asked[3:] == [False, True]


def test_what_was_compiled_before_serves_at_once(tmp_path):
    """A new process uses it even for a small collection, for which nothing would be compiled otherwise."""
    code = (
        "import sys, torch\n"
        "from sparse_inductor import SparseIndex\n"
        "from sparse_inductor.kernels.sparse_scores import cpu as native\n"
        "index = SparseIndex.build(torch.eye(4))\n"
        "index.search(torch.eye(4), 1)\n"
        "print(native.ready(wait=True, worth_compiling=False))\n"
        "if sys.argv[1] == 'compile': print(native.ready(wait=True))\n"
    )
    told = []
    for argument in ("compile", ""):
        told.append(python("-c", code, argument, XDG_CACHE_HOME=str(tmp_path)).stdout.split())
    assert told == [["False", "True"], ["True"]]


def test_without_a_compiler_aten_serves(tmp_path):
    code = (
        "import torch\n"
        "from sparse_inductor import SparseIndex\n"
        "from sparse_inductor.kernels.sparse_scores import cpu as native\n"
        "from sparse_inductor.ops import index_search\n"
        "index_search._APART = index_search._COMPILED = 0\n"
        "assert not native.ready(wait=True)\n"
        "index = SparseIndex.build(torch.eye(4))\n"
        "assert index.search(torch.eye(4), 1)[1].flatten().tolist() == [0, 1, 2, 3]\n"
    )
    variables = {"CXX": str(tmp_path / "no-compiler"), "XDG_CACHE_HOME": str(tmp_path)}
    assert python("-W", "error", "-c", code, **variables).stderr == ""
    assert not [*tmp_path.rglob("*.so")]
