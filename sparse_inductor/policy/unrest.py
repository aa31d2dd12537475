"""How often documents change: if they change at every call, an index does not pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch

from .. import compat

RESTLESS = 32
"""Calls with changed documents after which scoring runs as written; every `RESTLESS` searches allow one more."""


@dataclasses.dataclass
class Unrest:
    """How often documents of one shape changed, and how often an index of such documents was searched."""

    changed: int = 0
    searches: int = 0

    @property
    def why(self) -> str:
        """Why an index does not pay; empty if it may."""
        many = self.changed > RESTLESS + self.searches // RESTLESS
        return "documents change from call to call" if many else ""


def unrest_of(device: torch.device, num_terms: int, ids: Sequence[int]) -> Unrest:
    """Return the counts for all documents with ids of this shape, since the last `torch._dynamo.reset()`."""
    key = compat.resets(), device.type, num_terms, tuple(ids)
    return known.setdefault(key, Unrest())


known: dict[Hashable, Unrest] = {}
