"""An index that addresses documents by names of the caller's choice instead of numeric ids."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_inductor.threads import apart, in_a_forked_child

from . import files
from .contents import own_settings
from .sparse_index import SparseIndex
from .storage import IndexFileError

Found = list[tuple[str, float]]


class NamedIndex:
    """A `SparseIndex` whose documents have names: strings, such as the keys of a database.

        index = NamedIndex(num_terms=30522)
        index.put(["a", "b"], documents)                # adds, or replaces documents of these names
        index.search(queries, k=10)                     # [[("b", 3.25), ...], ...]
        index.delete(["a"])
        index.save("collection.index"); index = NamedIndex.load("collection.index")

    The index is thread-safe. A search sees one consistent set of documents, with either the old or the new version of a
    replaced document. Writers wait for each other, and searches with filters wait for a writer.
    """

    def __init__(
        self, num_terms: int, weights: str = "float32", device: torch.device | str = "cpu"
    ) -> None:
        """Create an empty index. Raises the errors of `SparseIndex`."""
        self._begin(SparseIndex(num_terms, weights).to(device), [])

    def _begin(self, index: SparseIndex, names: list[str]) -> None:
        self._writing = threading.Lock()
        _opened.add(self)
        gone = index.operands()[2].tolist()
        numbers = {name: i for i, (name, lost) in enumerate(zip(names, gone)) if not lost}
        self._held = index, names, numbers

    def __getstate__(self) -> tuple[SparseIndex, list[str]]:
        """Return a consistent snapshot of documents and names, which later changes to this index do not affect."""
        with self._writing:
            index, names, _ = self._held
            return copy.copy(index), names[: len(index)]

    def __setstate__(self, state: tuple[SparseIndex, list[str]]) -> None:
        self._begin(*state)

    @property
    def index(self) -> SparseIndex:
        """The underlying index, for reading only. `compact` replaces it by another object."""
        return self._held[0]

    def __len__(self) -> int:
        """The number of live documents."""
        return len(self._held[2])

    def __contains__(self, name: object) -> bool:
        return name in self._held[2]

    @apart
    def put(self, names: Iterable[str], documents: Any) -> int:
        """Add documents, in any form that `SparseIndex.build` takes, and replace existing documents of the same names,
        all in one step. Returns how many were replaced.

        Raises ValueError if the numbers of names and documents differ or a name is given twice, TypeError for a name
        that is not a string, and the errors of `SparseIndex.append`; the index is then unchanged.
        """
        given = strings(names)
        if len({*given}) < len(given):
            raise ValueError("a name is given twice")
        segments = self.index._prepare(documents, 0)
        count = sum(s.count for s in segments)
        if count != len(given):
            raise ValueError(f"there are {len(given)} names and {count} documents")
        with self._writing:
            index, held, numbers = self._held
            old = [numbers[name] for name in given if name in numbers]
            held.extend(given)  # before a search can find them
            try:
                numbers.update(zip(given, index._publish(segments, old)))
            except BaseException:
                del held[len(index) :]
                raise
            return len(old)

    def delete(self, names: Iterable[str]) -> int:
        """Delete documents and return how many of them existed. Raises TypeError for a name that is not a string."""
        given = {*strings(names)}
        with self._writing:
            index, _, numbers = self._held
            there = [name for name in given if name in numbers]
            index.delete([numbers[name] for name in there])
            for name in there:
                del numbers[name]
            return len(there)

    def search(
        self,
        queries: Any,
        k: int,
        *,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        offset: int = 0,
        min_score: float | None = None,
    ) -> list[Found]:
        """Return the names and scores of the k best documents of each query, or of all if there are fewer, in
        descending order of score.

        Takes the arguments and raises the errors of `SparseIndex.search`, except that filters are names; unknown names
        are ignored. Documents of equal score are in the order in which they were put. A query with a NaN or infinite
        weight has no results. A single query without a batch axis returns a list of one element.
        """
        index, held, numbers = self._held
        filters: dict[str, list[int]] = {}
        if allow is not None or deny is not None:
            with self._writing:  # for a consistent snapshot of names and documents
                index, held, numbers = self._held
                index = copy.copy(index)
                for kind, some in (("allow", allow), ("deny", deny)):
                    if some is not None:
                        given = strings(some)
                        filters[kind] = [numbers[name] for name in given if name in numbers]
        scores, ids = index.search(queries, k, offset=offset, min_score=min_score, **filters)
        return [
            [(held[i], s) for s, i in zip(line, found) if i >= 0]
            for line, found in zip(*(torch.atleast_2d(t).tolist() for t in (scores, ids)))
        ]

    @apart
    def compact(self) -> None:
        """Free the memory of deleted and replaced documents. Searches continue meanwhile, writers wait."""
        with self._writing, own_settings():
            index, names, _ = self._held
            contents = index._contents
            kept = itertools.compress(names, (~contents.deleted).tolist())
            made = SparseIndex._of(contents.compacted(), index.weights)
            named = list(kept)
            self._held = made, named, {name: i for i, name in enumerate(named)}

    def save(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Write documents and names to one file, like `SparseIndex.save`. `SparseIndex.load` can read it, too."""
        index, names, _ = self._held
        contents = index._contents
        texts = [name.encode(errors="surrogatepass") for name in names[: contents.count]]
        ends = torch.tensor([len(t) for t in texts], dtype=torch.int64, device="cpu").cumsum(0)
        whole = bytearray(b"".join(texts))
        blob = torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.zeros_like(ends[:0])
        more = {"names": blob.to(torch.uint8), "name_ends": ends}
        files.pending(path, contents, index.weights, progress, more).commit()

    @classmethod
    @apart
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        verify: bool = True,
        progress: bool = False,
    ) -> NamedIndex:
        """Read a file that `save` wrote; see `SparseIndex.load`.

        Raises the errors of `SparseIndex.load`, and IndexFileError for a file without names.
        """
        with own_settings():
            contents, weights, tensors = files.contents(
                path, torch.device(device), verify, progress
            )
        index = cls.__new__(cls)
        index._begin(SparseIndex._of(contents, weights), _names(path, tensors, contents.count))
        return index


def strings(names: Iterable[str], what: str = "names") -> list[str]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"{what} must be a list of strings, got {names!r}")
    given = list(names)
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"{what} must be strings, got {name!r}")
    return given


def _names(path: Any, tensors: dict[str, Tensor], count: int) -> list[str]:
    try:
        whole, ends = tensors["names"].numpy().tobytes(), tensors["name_ends"].tolist()
        edges: Sequence[int] = [0, *ends]
        if len(ends) != count or edges[-1] != len(whole) or sorted(edges) != edges:
            raise ValueError("names of other documents")
        return [
            whole[low:high].decode(errors="surrogatepass")
            for low, high in itertools.pairwise(edges)
        ]
    except (KeyError, ValueError) as error:
        raise IndexFileError(f"{path} has no names of its documents ({error})") from error


_opened: weakref.WeakSet[NamedIndex] = weakref.WeakSet()


@in_a_forked_child
def _in_child() -> None:
    """Restore consistency in a forked child, where a thread that was writing no longer exists: names and numbers are
    derived again from the documents that it had published."""
    for named in _opened:
        if named._writing.locked():
            index, names, _ = named._held
            named._begin(index, names[: len(index)])
