"""All cases of the corpus, a group a family, and what the published ones are written like."""

from __future__ import annotations

from corpus import entmax, relu_ffn, sparse_scores, splade_head
from corpus.case import CASES, Case
from corpus.published import entmax as published_entmax
from corpus.published import relu_ffn as published_relu_ffn
from corpus.published import sparse_scores as published_sparse_scores
from corpus.published import splade_head as published_splade_head

__all__ = ["CASES", "Case", "named"]

# Importing a family registers its cases.
FAMILIES = (
    splade_head,
    relu_ffn,
    entmax,
    sparse_scores,
    published_splade_head,
    published_relu_ffn,
    published_entmax,
    published_sparse_scores,
)


def named(group: str) -> dict[str, Case]:
    """The cases of a group by their names."""
    return {case.name: case for case in CASES if case.group == group}
