"""All cases of the corpus, a group a family."""

from __future__ import annotations

from corpus import entmax, relu_ffn, sparse_scores, splade_head
from corpus.case import CASES, Case

__all__ = ["CASES", "Case", "named"]

FAMILIES = (splade_head, relu_ffn, entmax, sparse_scores)
"""Importing a family registers its cases."""


def named(group: str) -> dict[str, Case]:
    """The cases of a group by their names."""
    return {case.name: case for case in CASES if case.group == group}
