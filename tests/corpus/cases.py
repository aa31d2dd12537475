"""All cases of the corpus; each family is one group."""

from __future__ import annotations

import importlib
import pkgutil

from corpus import entmax, relu_ffn, sparse_scores, splade_head
from corpus.case import CASES, Case

__all__ = ["CASES", "Case", "named"]

for family in (splade_head, relu_ffn, entmax, sparse_scores):
    for module in pkgutil.iter_modules(family.__path__, f"{family.__name__}."):
        importlib.import_module(module.name)  # which registers its cases


def named(group: str) -> dict[str, Case]:
    """Return the cases of a group by their names."""
    return {case.name: case for case in CASES if case.group == group}
