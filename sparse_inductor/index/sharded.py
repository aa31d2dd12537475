"""One index over the documents of several processes. Each process searches its own documents, and the results are
merged."""

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

    Documents are numbered consecutively in the order of the processes. Every method is a collective: all processes must
    call it with the same arguments (queries, ids, documents). Results are bitwise equal to those of one index over all
    documents. If `append`, `delete`, `save` or `load` fails on one process, it raises the same error on all of them and
    leaves the index or the folder unchanged.
    """

    def __init__(self, local: SparseIndex, group: dist.ProcessGroup | None = None) -> None:
        """Combine the indexes of all processes. `local` holds this process's documents; `group` defaults to all
        processes.

        Raises RuntimeError if torch.distributed is not initialised, ValueError if the indexes differ in their number of
        terms.
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
        """Exchange the numbers of documents, to set the first id of this process and the total."""
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
        """The number of documents ever added, over all processes."""
        return self._total

    @property
    def device(self) -> torch.device:
        """The device of this process's part."""
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
        """Return the k best documents of all processes; see `SparseIndex.search`."""
        first = as_count(offset, "offset")
        allow, deny = self._own(allow, "allow"), self._own(deny, "deny")
        scores, ids = self.local.search(queries, as_count(k, "k") + first, allow=allow, deny=deny)
        own = torch.atleast_2d(scores)
        mine = keys(own, ids.view_as(own), self.first)
        found, which = merged(self._stacked(mine), own)
        return page(found.view_as(scores), which.view_as(ids), first, min_score)

    def _own(self, documents: Any, argument: str) -> Tensor | None:
        """Restrict a filter of `search` to this process's documents."""
        if documents is None:
            return None
        named = filter_of(documents, self._total, argument)
        if named.dtype == torch.bool:
            return named[..., self.first : self.first + len(self.local)]
        return self._here(named)

    def _here(self, ids: Tensor) -> Tensor:
        """Select the ids of this process's documents and convert them to local ids."""
        ids = ids.to(self.device)
        return ids[(ids >= self.first) & (ids < self.first + len(self.local))] - self.first

    def _stacked(self, t: Tensor) -> Tensor:
        """Gather the tensors of all processes, [world, ...]."""
        if torch.compiler.is_compiling() or dist.get_backend(self.group) != "nccl":
            return torch.stack(self._gather(t))
        out = t.new_empty(dist.get_world_size(self.group), *t.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), t, group=self.group)
        return out

    def scores(self, queries: Any) -> Tensor:
        """Return the scores of all documents of all processes, without gradient. See `SparseIndex.scores`."""
        mine = self.local.scores(queries).detach()
        counts = [
            int(n)
            for n in torch.cat(self._gather(torch.tensor([len(self.local)], device=self.device)))
        ]
        padded = torch.nn.functional.pad(mine, (0, max(counts) - mine.shape[-1]))
        return torch.cat([t[..., :n] for t, n in zip(self._gather(padded), counts)], -1)

    def forward(self, queries: Any, k: int) -> tuple[Tensor, Tensor]:
        """Same as `search`."""
        return self.search(queries, k)

    def append(self, documents: Any) -> range:
        """Add documents, which must be the same on every process. The last process stores them. Returns their ids."""
        before = self._total
        last = dist.get_rank(self.group) == dist.get_world_size(self.group) - 1
        made = self._together(lambda: self.local._prepare(documents, before) if last else [])
        self.local._publish(made)
        self._count()
        return range(before, self._total)

    def delete(self, ids: Iterable[int] | Tensor | np.ndarray) -> int:
        """Delete documents and return how many of them were live. See `SparseIndex.delete`."""

        def mine() -> Tensor:
            return self._here(document_ids(ids, self._total))

        gone = torch.tensor([self.local.delete(self._together(mine))], device=self.device)
        return int(torch.stack(self._gather(gone)).sum())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each process's part to a folder, as part-0-of-2 and so on. No old part is replaced until all new parts
        are complete."""
        path = Path(folder)

        def written() -> PendingFile:
            path.mkdir(parents=True, exist_ok=True)
            return files.pending(path / _part(self.group), self.local._contents, self.local.weights)

        pending: list[PendingFile] = []
        try:
            self._together(lambda: pending.append(written()))
        except BaseException:
            for file in pending:
                file.discard()
            raise
        self._together(pending[0].commit)

    def _together(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on this process. If `work` raises on any process, all processes raise the error
        of the lowest such rank."""
        return _together(work, self.group, self.device)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        verify: bool = True,
    ) -> ShardedIndex:
        """Read a folder that `save` wrote with the same number of processes.

        Raises FileNotFoundError if the number of processes was different.
        """
        path = Path(folder) / _part(group)
        load = lambda: SparseIndex.load(path, device=device, verify=verify)
        return cls(_together(load, group, torch.device(device)), group)


def _part(group: dist.ProcessGroup | None) -> str:
    return f"part-{dist.get_rank(group)}-of-{dist.get_world_size(group)}"


def _together(work: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """See `ShardedIndex._together`."""
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        own = error
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    # The NCCL backend exchanges objects through the current device.
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        dist.all_gather_object(errors, _sendable(own), group=group)
    for rank, failed in enumerate(errors):
        if failed is not None:
            raise own if own is not None and rank == dist.get_rank(group) else failed
    return result


def _sendable(error: Exception | None) -> Exception | None:
    """Return the error, or a RuntimeError with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
