"""What building, saving and loading show of how far they have come."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

_STEP = 1 << 17  # documents after which a line says so


class _Counted(Protocol):
    @property
    def count(self) -> int: ...


C = TypeVar("C", bound=_Counted)


class Progress:
    """What has been done so far, in units: tqdm where it is installed, else a line now and then."""

    def __init__(
        self, wanted: bool, unit: str = "documents", done: str = "indexed", step: int = _STEP
    ) -> None:
        self._bar: Any = None
        self._wanted, self._unit, self._done, self._step = wanted, unit, done, step
        self._seen = self._said = 0

    def __enter__(self) -> Progress:
        if self._wanted:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                pass
            else:
                self._bar = tqdm(unit=f" {self._unit}", unit_scale=True)
        return self

    def add(self, count: int) -> None:
        """So many more units."""
        self._seen += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._wanted and self._seen - self._said >= self._step:
            self._said = self._seen
            print(f"{self._seen:,} {self._unit}", file=sys.stderr, flush=True)

    def each(self, items: Iterable[C]) -> Iterator[C]:
        """Rows or segments, the documents of each counted when the next is asked for."""
        for item in items:
            yield item
            self.add(item.count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._wanted:
            print(f"{self._seen:,} {self._unit} {self._done}", file=sys.stderr, flush=True)
