"""Entmax attention: scores, entmax over the keys, values -> `entmax_attention`.

    p = entmax_alpha(where(mask, scale * (q @ k^T) + bias, fill), dim=-1)      [B, H, Lq, Lk]
    p @ v                                                                      [B, H, Lq, Dv]
        ->  entmax_attention(q, k, v, alpha, scale, mask, bias, causal, fill, added)

The probabilities are never materialised, so nothing else may read them. Where something does, or where dropout acts on
them, the pattern `entmax` replaces the transformation alone.
Sources: AdaSplash (Goncalves et al. 2025); Peters et al. 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sparse_inductor.patterns.entmax import sorted_sparsemax as sparsemax
from torch import fx

from sparse_inductor.example import examples_of
from sparse_inductor.graph.checks import check_device
from sparse_inductor.graph.contraction import PRODUCTS
from sparse_inductor.graph.emit import Emitter
from sparse_inductor.graph.fakes import expected_elements, fake
from sparse_inductor.graph.no_match import NoMatch
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.view import GraphView
from sparse_inductor.match.chains.family import split_block
from sparse_inductor.match.entmax.attention import (
    are_probabilities,
    normalises,
    read_attention,
    relu_attention,
)
from sparse_inductor.match.entmax.leaves import show_entmax
from sparse_inductor.match.entmax.replacement import Attention
from sparse_inductor.match.entmax.transform import SIGNS
from sparse_inductor.pattern import Miss
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME, OP = Attention.pattern, Attention.op


class EntmaxAttention(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "entmax(q @ k^T + bias) @ v -> entmax_attention(q, k, v, alpha, mask, bias)"
    anchors = PRODUCTS | {"sum", "output"}
    signs = SIGNS

    def setup(self) -> Callable[[], None]:
        return show_entmax()

    def _match(self, node: fx.Node, view: GraphView) -> Attention | Miss | None:
        if view.function_body or normalises(view, node):
            return None
        if node.op == "output":
            return split_block(
                view, node, "the probabilities", lambda n: are_probabilities(view, n)
            )
        found = read_attention(view, node)
        if found is None:
            reason = relu_attention(view, node)
            return None if reason is None else Miss(reason, node)
        check_device(node)
        inputs = (found.q.node, found.k.node, found.v.node)
        if not all(view.dtype(t).is_floating_point for t in inputs):
            raise NoMatch("queries, keys or values are no floating-point numbers", node)
        if not all(isinstance(s, int) for t in inputs for s in view.shape(t)):
            _rehearse(found)
        return found

    def worth(self, match: Attention, view: GraphView) -> Worth:
        probabilities = fake(match.found.node)
        return look_up(NAME, probabilities.device, scores=expected_elements(probabilities.shape))

    def called(self, match: Attention, node: fx.Node) -> str:
        if node is match.found.node or node in match.path:
            return "the probabilities are"
        if node in match.scores.nodes:
            return "the scores are"
        return super().called(match, node)


def _rehearse(found: Attention) -> None:
    """Emit the replacement and remove it again: with symbolic sizes, a reshape may turn out to be impossible.

    Raises NoMatch.
    """
    try:
        with Emitter(found.anchor) as e:
            found.emit(e)
    except Exception as error:
        raise NoMatch(f"its layout cannot be followed ({error})", found.anchor) from None


def _inputs(attend: Callable[..., Any], training: bool) -> tuple[Any, tuple[Any, ...]]:
    q, k, v = (torch.randn(2, 2, 6, 8).requires_grad_(training) for _ in "qkv")
    mask = torch.arange(6)[None, None, None] < torch.tensor([6, 4])[:, None, None, None]
    return attend, (q, k, v, mask)


_examples = examples_of(_inputs)

EntmaxAttention.examples = (
    *_examples(
        True,
        plain=lambda q, k, v, m: sparsemax(q @ k.mT / 8**0.5) @ v,
        padding=lambda q, k, v, m: sparsemax((q @ k.mT * 0.35).masked_fill(~m, -1e9)) @ v,
    ),
    *_examples(
        causal=lambda q, k, v, m: sparsemax(q @ k.mT + torch.full((6, 6), -torch.inf).triu(1)) @ v,
        einsum=lambda q, k, v, m: torch.einsum(
            "bhij,bhjd->bihd", sparsemax(torch.einsum("bhid,bhjd->bhij", q, k)), v
        ),
    ),
)
EntmaxAttention.near_misses = (
    *_examples(
        reason="the probabilities are also returned",
        probabilities_returned=lambda q, k, v, m: ((p := sparsemax(q @ k.mT)) @ v, p),
    ),
    *_examples(
        True,
        "dropout is active",
        dropout=lambda q, k, v, m: torch.dropout(sparsemax(q @ k.mT), 0.1, True) @ v,
    ),
    *_examples(
        reason="changes the probabilities before they weigh the values",
        mask_afterwards=lambda q, k, v, m: (sparsemax(q @ k.mT) * m) @ v,
    ),
    *_examples(
        reason="normalised over another axis",
        over_the_queries=lambda q, k, v, m: sparsemax((q @ k.mT).mT).mT @ v,
    ),
)

PATTERN = EntmaxAttention()
