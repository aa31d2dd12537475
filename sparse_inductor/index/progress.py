"""Progress display of building, saving and loading."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

_STEP = 1 << 17  # documents per progress line


class _Counted(Protocol):
    @property
    def count(self) -> int: ...


C = TypeVar("C", bound=_Counted)


class Progress:
    """A progress display in units of work: tqdm if it is installed, else occasional lines on stderr."""

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
        """Add `count` completed units."""
        self._seen += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._wanted and self._seen - self._said >= self._step:
            self._said = self._seen
            print(f"{self._seen:,} {self._unit}", file=sys.stderr, flush=True)

    def each(self, items: Iterable[C]) -> Iterator[C]:
        """Yield rows or segments. The documents of each are added when the next one is requested."""
        for item in items:
            yield item
            self.add(item.count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._wanted:
            print(f"{self._seen:,} {self._unit} {self._done}", file=sys.stderr, flush=True)
