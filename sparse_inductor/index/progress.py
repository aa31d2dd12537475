"""What building and appending show of how far they have come."""

from __future__ import annotations

import sys
from typing import Any

from .segment import CAPACITY
from .sources import Rows

__all__ = ["Progress"]


class Progress:
    """Documents read so far: tqdm where it is installed, else a line now and then."""

    def __init__(self, wanted: bool) -> None:
        self._bar: Any = None
        self._wanted = wanted
        self._seen = self._said = 0

    def __enter__(self) -> Progress:
        if self._wanted:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                pass
            else:
                self._bar = tqdm(unit=" documents", unit_scale=True)
        return self

    def seen(self, rows: Rows) -> Rows:
        """The rows, counted."""
        self._seen += rows.count
        if self._bar is not None:
            self._bar.update(rows.count)
        elif self._wanted and self._seen - self._said >= CAPACITY:
            self._said = self._seen
            print(f"{self._seen:,} documents", file=sys.stderr, flush=True)
        return rows

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._wanted:
            print(f"{self._seen:,} documents indexed", file=sys.stderr, flush=True)
