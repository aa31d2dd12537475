"""How often documents change: where they do at every call, no index of them pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch

from .. import compat

RESTLESS = 32
"""Calls with changed documents after which scoring goes back to as written, and one more for so many searches."""


@dataclasses.dataclass
class Unrest:
    """How often documents of one shape were found changed, and how often an index of such served."""

    changed: int = 0
    searches: int = 0

    @property
    def why(self) -> str:
        """Why an index does not pay; empty where it may."""
        many = self.changed > RESTLESS + self.searches // RESTLESS
        return "documents change from call to call" if many else ""


def unrest_of(device: torch.device, num_terms: int, ids: Sequence[int]) -> Unrest:
    """That of all documents with ids of this shape, since the last `torch._dynamo.reset()`."""
    key = compat.resets(), device.type, num_terms, tuple(ids)
    return known.setdefault(key, Unrest())


known: dict[Hashable, Unrest] = {}
