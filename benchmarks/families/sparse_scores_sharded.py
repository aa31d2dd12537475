"""Sparse scoring on two GPUs and on one: the same collection in a `ShardedIndex` of two processes and a `SparseIndex`.

Times are host times, from the moment at which both processes are ready to the results on the slower one, so
communication between the GPUs is included. The results of both must be bitwise equal.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.bench import Bench
from sparse_inductor import SparseIndex
from sparse_inductor.index import ShardedIndex

from .sparse_scores import FULL, QUERIES, TERMS, Generator

RANKS = 2


def run(bench: Bench) -> None:
    """Measure both on two GPUs, or on a CPU to check that the benchmark runs."""
    if bench.cuda and torch.cuda.device_count() < RANKS:
        bench.note(f"Not measured: it needs {RANKS} GPUs, there is one.")
        return
    bench.section(_compare, bench)


def _compare(bench: Bench) -> None:
    n, B, k, rounds = (2_000, 4, 10, 3) if bench.quick or not bench.cuda else (FULL, 500, 1000, 20)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (folder, bench.device.type, n, B, k, rounds), nprocs=RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    label = f"N {n:,}, B {B}, top-{k}"
    for name in ("one", "two"):
        bench.note(f"{label}: {name} of them {found[name]:.4g} ms")
    bench.row(f"{label}: two processes give one's bits", float(found["same"]), "", 1, 1, True)
    bench.row(
        f"{label}: time, one GPU over two", found["one"] / found["two"], "x", 1.5, 1.9, higher=True,
        note=f"{found['one']:.4g} ms / {found['two']:.4g} ms",
    )  # fmt: skip


def _work(rank: int, folder: str, kind: str, n: int, B: int, k: int, rounds: int) -> None:
    """Run one process, which holds half of the collection. The first process also holds the whole collection."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS,
        **({"device_id": device} if kind == "cuda" else {}),
    )  # fmt: skip
    try:
        queries = Generator(device, seed=0).texts(B, QUERIES).to_dense()
        sharded = ShardedIndex(_index(device, _half(device, rank, n)))
        two = _time(lambda: sharded.search(queries, k), device, rounds, all_ranks=True)
        found = sharded.search(queries, k)
        if rank == 0:
            print(f"two processes: {two:.4g} ms", flush=True)
            index = _index(device, (part for r in range(RANKS) for part in _half(device, r, n)))
            one = _time(lambda: index.search(queries, k), device, rounds)
            same = all(torch.equal(a, b) for a, b in zip(found, index.search(queries, k)))
            text = json.dumps({"one": one, "two": two, "same": same})
            (Path(folder) / "found.json").write_text(text)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _half(device: torch.device, rank: int, n: int) -> Iterator[Tensor]:
    return Generator(device, seed=1 + rank).collection(n // RANKS)


def _index(device: torch.device, documents: Iterator[Tensor]) -> SparseIndex:
    index = SparseIndex(TERMS).to(device)
    index.append(documents)
    return index


def _time(
    work: Callable[[], Any], device: torch.device, rounds: int, all_ranks: bool = False
) -> float:
    """Return the median milliseconds. With `all_ranks`, the slowest process counts in each round."""
    taken = []
    for _ in range(rounds + 2):
        if all_ranks:
            dist.barrier()
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        spent = torch.tensor(time.perf_counter() - start, device=device)
        if all_ranks:
            dist.all_reduce(spent, dist.ReduceOp.MAX)
        taken.append(float(spent) * 1e3)
    return statistics.median(taken[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
