"""One index over the documents of several processes: each searches its own, the best of all are merged."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparse_inductor.ops._merge import keys, merged

from . import files
from .answers import page
from .documents import as_count, document_ids, filter_of
from .sparse_index import SparseIndex
from .storage import PendingFile

T = TypeVar("T")


class ShardedIndex(nn.Module):
    """A `SparseIndex` whose documents are split over the processes of a torch.distributed group.

        index = ShardedIndex(SparseIndex.build(my_documents, num_terms=V, device="cuda"))
        scores, ids = index.search(queries, k)          # the same on every process

    Documents are numbered through: those of the first process first. Every method is a collective: all processes call
    it, with the same arguments (queries, ids, documents). Results equal those of one index over all documents, bit by
    bit. What fails on one process in `append`, `delete`, `save` or `load` raises the same error on all of them, and the
    index, or the folder, is as it was.
    """

    def __init__(self, local: SparseIndex, group: dist.ProcessGroup | None = None) -> None:
        """`local` holds this process's documents; `group` defaults to all processes.

        Raises RuntimeError where torch.distributed is not initialised, ValueError where the processes' indexes differ
        in their number of terms.
        """
        super().__init__()
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised: call init_process_group first"
            )
        self.local = local
        self.group = group
        self._count()

    def _count(self) -> None:
        """How many documents come before this process's."""
        mine = torch.tensor([len(self.local), self.local.num_terms], device=self.local.device)
        all_ = torch.stack(self._gather(mine)).tolist()
        terms = {t for _, t in all_}
        if len(terms) > 1:
            raise ValueError(
                f"the processes' indexes have different numbers of terms: {sorted(terms)}"
            )
        counts = [n for n, _ in all_]
        rank = dist.get_rank(self.group)
        self.first, self._total = sum(counts[:rank]), sum(counts)

    def _gather(self, t: Tensor) -> list[Tensor]:
        out = [torch.empty_like(t) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(out, t.contiguous(), group=self.group)
        return out

    def __len__(self) -> int:
        """Documents ever added, of all processes."""
        return self._total

    @property
    def device(self) -> torch.device:
        """Where this process's part lives."""
        return self.local.device

    def search(
        self,
        queries: Any,
        k: int,
        *,
        allow: Any = None,
        deny: Any = None,
        offset: int = 0,
        min_score: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The k best documents of all processes; see `SparseIndex.search`."""
        first = as_count(offset, "offset")
        allow, deny = self._own(allow, "allow"), self._own(deny, "deny")
        scores, ids = self.local.search(queries, as_count(k, "k") + first, allow=allow, deny=deny)
        own = torch.atleast_2d(scores)
        mine = keys(own, ids.view_as(own), self.first)
        found, which = merged(self._stacked(mine), own)
        return page(found.view_as(scores), which.view_as(ids), first, min_score)

    def _own(self, documents: Any, argument: str) -> Tensor | None:
        """A filter of `search`, of this process's documents."""
        if documents is None:
            return None
        named = filter_of(documents, self._total, argument)
        if named.dtype == torch.bool:
            return named[..., self.first : self.first + len(self.local)]
        return self._here(named)

    def _here(self, ids: Tensor) -> Tensor:
        """Those of ids that are this process's, as it numbers them."""
        ids = ids.to(self.device)
        return ids[(ids >= self.first) & (ids < self.first + len(self.local))] - self.first

    def _stacked(self, t: Tensor) -> Tensor:
        """Everybody's tensor, [world, ...]."""
        if torch.compiler.is_compiling() or dist.get_backend(self.group) != "nccl":
            return torch.stack(self._gather(t))
        out = t.new_empty(dist.get_world_size(self.group), *t.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), t, group=self.group)
        return out

    def scores(self, queries: Any) -> Tensor:
        """All scores, gathered; no gradient. See `SparseIndex.scores`."""
        mine = self.local.scores(queries).detach()
        counts = [
            int(n)
            for n in torch.cat(self._gather(torch.tensor([len(self.local)], device=self.device)))
        ]
        padded = torch.nn.functional.pad(mine, (0, max(counts) - mine.shape[-1]))
        return torch.cat([t[..., :n] for t, n in zip(self._gather(padded), counts)], -1)

    def forward(self, queries: Any, k: int) -> tuple[Tensor, Tensor]:
        """`search`."""
        return self.search(queries, k)

    def append(self, documents: Any) -> range:
        """Add documents, the same on every process; the last process keeps them. Returns their ids."""
        before = self._total
        last = dist.get_rank(self.group) == dist.get_world_size(self.group) - 1
        made = self._together(lambda: self.local._prepare(documents, before) if last else [])
        self.local._publish(made)
        self._count()
        return range(before, self._total)

    def delete(self, ids: Iterable[int] | Tensor | np.ndarray) -> int:
        """Take documents out; returns how many were there. See `SparseIndex.delete`."""

        def mine() -> Tensor:
            return self._here(document_ids(ids, self._total))

        gone = torch.tensor([self.local.delete(self._together(mine))], device=self.device)
        return int(torch.stack(self._gather(gone)).sum())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each process's part into a folder, as part-0-of-2 and so on. No part is replaced before all are
        complete."""
        path = Path(folder)

        def written() -> PendingFile:
            path.mkdir(parents=True, exist_ok=True)
            return files.pending(path / self._part(), self.local._contents, self.local.weights)

        pending: list[PendingFile] = []
        try:
            self._together(lambda: pending.append(written()))
        except BaseException:
            for file in pending:
                file.discard()
            raise
        self._together(pending[0].commit)

    def _together(self, work: Callable[[], T]) -> T:
        """What `work` gives on this process, where it raises nothing on any; else the first process's error on all."""
        return _together(work, self.group, self.device)

    def _part(self) -> str:
        return f"part-{dist.get_rank(self.group)}-of-{dist.get_world_size(self.group)}"

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        verify: bool = True,
    ) -> ShardedIndex:
        """Read what `save` wrote, with as many processes.

        Raises FileNotFoundError where it was written by another number of processes.
        """
        name = f"part-{dist.get_rank(group)}-of-{dist.get_world_size(group)}"
        load = lambda: SparseIndex.load(Path(folder) / name, device=device, verify=verify)
        return cls(_together(load, group, torch.device(device)), group)


def _together(work: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """See `ShardedIndex._together`."""
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        own = error
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    # NCCL sends objects from the current device.
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        dist.all_gather_object(errors, _sendable(own), group=group)
    for rank, failed in enumerate(errors):
        if failed is not None:
            raise own if own is not None and rank == dist.get_rank(group) else failed
    return result


def _sendable(error: Exception | None) -> Exception | None:
    """The error, or one that says the same where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
