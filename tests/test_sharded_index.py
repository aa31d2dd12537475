"""An index that is split over processes has the bits of a single index."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ranking import sparse
from sparse_inductor import SparseIndex
from sparse_inductor.index import ShardedIndex, files

V = 40


def collection(n=90, seed=0):
    return (sparse(n, V, 0.2, seed) * 4).round() / 4  # so that scores tie across processes


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

        def same(k: int, **options) -> None:
            got, want = index.search(q.to(where), k, **options), one.search(q, k, **options)
            assert torch.equal(got[1].cpu(), want[1]) and torch.equal(got[0].cpu(), want[0])

        assert len(index) == 90
        same(10)
        same(100)
        assert torch.equal(index.scores(q.to(where)).cpu(), one.scores(q))
        assert index.delete([3, 35, 60, 3]) == one.delete([3, 35, 60, 3]) == 3
        same(10)
        assert index.append(collection(4, 7)) == one.append(collection(4, 7)) == range(90, 94)
        same(94)
        odd = torch.arange(94) % 2 == 1
        same(9, allow=odd, deny=[5, 36, 91], offset=3, min_score=0.5)
        same(9, deny=torch.stack([odd] * len(q)), offset=30)
        same(9, allow=odd[:50].tolist(), deny=torch.tensor([]))
        same(0)
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


def _fail(rank: int, world: int, folder: str) -> None:
    """An error on one process is raised on both, and the index and the files stay unchanged."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    try:
        dense, q, path = collection(), queries(), Path(folder) / "saved"
        index = ShardedIndex(SparseIndex.build(dense[:35] if rank == 0 else dense[35:]))
        index.save(path)
        before = index.search(q, 90)

        def fails(kind: type[Exception], message: str, call) -> None:
            with pytest.raises(kind, match=message):
                call()
            assert len(index) == 90
            assert all(torch.equal(a, b) for a, b in zip(index.search(q, 90), before))

        bad = [([1], [1.0]), ([V], [1.0])]
        fails(ValueError, "document 91: term id 40", lambda: index.append(bad))
        fails(TypeError, "got 1.5", lambda: index.delete([1.5]))
        fails(IndexError, r"shape \(90,\)", lambda: index.delete(torch.ones(3, dtype=torch.bool)))
        index.delete(torch.arange(90) == 40)
        before = index.search(q, 90)
        write = files.pending
        if rank == 1:

            def full(*_):
                raise OSError(28, "No space left on device")

            files.pending = full
        fails(OSError, "No space left", lambda: index.save(path))
        files.pending = write
        dist.barrier()
        assert sorted(p.name for p in path.iterdir()) == ["part-0-of-2", "part-1-of-2"]
        assert ShardedIndex.load(path).search(q, 90)[1][0].tolist().count(-1) == 0, "the old one"
        if rank == 0:
            (path / "part-0-of-2").unlink()
        dist.barrier()
        fails(FileNotFoundError, "part-0-of-2", lambda: ShardedIndex.load(path))
    finally:
        dist.destroy_process_group()


@pytest.mark.heavy
def test_what_fails_on_one_process_fails_on_all(tmp_path):
    mp.spawn(_fail, (2, str(tmp_path)), nprocs=2)


def _run(device: str, folder: Path) -> None:
    mp.spawn(_work, (2, str(folder), device), nprocs=2)


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
