"""Operators that rewrites insert; each can also be called directly as `sparse_inductor.ops.<name>`."""

from . import index_search, sparse_scores_cached, sparse_scores_postings  # noqa: F401
from .batch_topk import batch_topk_decode, batch_topk_encode
from .entmax import entmax
from .entmax_attention import entmax_attention
from .relu_ffn import relu_ffn
from .sparse_products import sparse_gradient_linear, sparse_product
from .sparse_rows import sparse_decode, topk_encode
from .sparse_scores import sparse_scores
from .splade_head import splade_head

__all__ = [
    "batch_topk_decode",
    "batch_topk_encode",
    "entmax",
    "entmax_attention",
    "relu_ffn",
    "sparse_decode",
    "sparse_gradient_linear",
    "sparse_product",
    "sparse_scores",
    "splade_head",
    "topk_encode",
]
