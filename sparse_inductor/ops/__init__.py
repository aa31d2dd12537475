"""Operators the rewrites put in; each is callable directly as `sparse_inductor.ops.<name>`."""

from .splade_head import splade_head

__all__ = ["splade_head"]
