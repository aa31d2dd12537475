"""An index split over processes gives what one index gives, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sparse_inductor import SparseIndex
from sparse_inductor.index import ShardedIndex

V = 40


def collection(n=90, seed=0):
    g = torch.Generator().manual_seed(seed)
    dense = torch.rand(n, V, generator=g) * (torch.rand(n, V, generator=g) < 0.2)
    return (dense * 4).round() / 4  # so that scores tie across processes


def queries():
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 2, (5, V), generator=g).float()


def _work(rank: int, world: int, folder: str, device: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store, rank=rank, world_size=world
    )
    try:
        where = f"cuda:{rank}" if device == "cuda" else "cpu"
        if device == "cuda":
            torch.cuda.set_device(rank)
        dense, q = collection(), queries()
        mine = dense[:35] if rank == 0 else dense[35:]
        index, one = ShardedIndex(SparseIndex.build(mine, device=where)), SparseIndex.build(dense)

        def same(k: int) -> None:
            got, want = index.search(q.to(where), k), one.search(q, k)
            assert torch.equal(got[1].cpu(), want[1]) and torch.equal(got[0].cpu(), want[0])

        assert len(index) == 90
        same(10)
        same(100)
        assert torch.equal(index.scores(q.to(where)).cpu(), one.scores(q))
        assert index.delete([3, 35, 60, 3]) == one.delete([3, 35, 60, 3]) == 3
        same(10)
        assert index.append(collection(4, 7)) == one.append(collection(4, 7)) == range(90, 94)
        same(94)
        index.save(f"{folder}/saved")
        index = ShardedIndex.load(f"{folder}/saved", device=where)
        same(20)
        bad = q.clone()
        bad[2, 0] = float("nan")
        assert index.search(bad.to(where), 3)[0][2].isnan().all()
        try:
            index.delete([94])
        except IndexError as error:
            assert "no document 94" in str(error)
        else:
            raise AssertionError("an unknown document was deleted")
    finally:
        dist.destroy_process_group()


def _run(device: str, folder: Path) -> None:
    mp.spawn(_work, (2, str(folder), device), nprocs=2)


@pytest.mark.slow
def test_two_processes_on_a_cpu(tmp_path):
    _run("cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there are {torch.cuda.device_count()}")
    _run("cuda", tmp_path)


def test_without_a_group_it_says_so():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardedIndex(SparseIndex(V))
