"""What is known about each operator without importing it."""

from __future__ import annotations

from typing import NamedTuple

NAMESPACE = "sparse_inductor"


class Facts(NamedTuple):
    """Facts about an operator.

    kernels: the modules of `sparse_inductor.kernels` that it imports. saves_result: whether autograd saves its result.
    saves_integers: whether it saves integer tensors, whereas the operations as written save floating-point tensors.
    returns_list: whether it returns a list in training. joins: whether it replaces a call at which Dynamo would break
    the graph.
    """

    kernels: tuple[str, ...] = ()
    saves_result: bool = False
    saves_integers: bool = False
    returns_list: bool = False
    joins: bool = False


OPERATORS = {
    "batch_topk_decode": Facts(("sparse_rows.sums",)),
    "batch_topk_encode": Facts(("sparse_rows.batch", "sparse_rows.sums")),
    "entmax": Facts(("entmax.rows",), saves_result=True, joins=True),
    "entmax_attention": Facts(
        ("entmax_attention.attention",),
        saves_result=True, saves_integers=True, returns_list=True, joins=True,
    ),
    "relu_ffn": Facts(("relu_ffn.forward", "relu_ffn.backward"), saves_integers=True),
    "sparse_decode": Facts(("sparse_rows.sums",)),
    "sparse_gradient_linear": Facts(("sparse_rows.products",)),
    "sparse_product": Facts(("sparse_rows.products",), saves_integers=True),
    "sparse_scores": Facts(("sparse_scores.best", "sparse_scores.documents")),
    "splade_head": Facts(("splade_head.forward", "splade_head.backward"), saves_integers=True),
    "topk_encode": Facts(("sparse_rows.topk", "sparse_rows.sums")),
}  # fmt: skip
JOINING = tuple(name for name, facts in OPERATORS.items() if facts.joins)


def facts_of(op: str) -> Facts:
    """Return the facts about an operator, named as in "sparse_inductor::entmax"; none for operators of others."""
    namespace, _, name = op.partition("::")
    return OPERATORS.get(name, Facts()) if namespace == NAMESPACE else Facts()
