"""The entmax of rows: calls of the entmax package and written-out versions -> `entmax`.

    p = argmax_{p in simplex} p . z + H_alpha(p)       over one dimension of z
        ->  entmax(z, alpha, dim)

It covers routers, pooling, and attention whose probabilities are also read elsewhere or pass through dropout: all that
`entmax_attention` cannot take.
Sources: Peters et al. 2019 (entmax); Correia et al. 2019 (the gradient of alpha); Martins & Astudillo 2016.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from sparse_inductor.example import examples_of
from sparse_inductor.graph.checks import check_device
from sparse_inductor.graph.fakes import expected, expected_elements, fake
from sparse_inductor.graph.no_match import NoMatch
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.view import GraphView
from sparse_inductor.match.entmax.form import ENDS, ends_here
from sparse_inductor.match.entmax.leaves import show_entmax
from sparse_inductor.match.entmax.transform import LEAVES, NOT_ENTMAX, SIGNS, Transform, transform
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME, OP = Transform.pattern, Transform.op

# Calls that sort: functions of the entmax package, and the nodes of its autograd Functions or of copies of these.
_SORTS = frozenset("sort topk entmax15 sparsemax autograd_function_apply".split())


class Entmax(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "entmax15(z), sparsemax(z), entmax_bisect(z, alpha), or the like by hand -> entmax(z, alpha)"
    anchors = LEAVES | NOT_ENTMAX | {"getitem", "autograd_function_apply"} | ENDS
    signs = SIGNS

    def setup(self) -> Callable[[], None]:
        return show_entmax()

    def _match(self, node: fx.Node, view: GraphView) -> Transform | None:
        if view.function_body or (view.name_of(node) in ENDS and not ends_here(view, node)):
            return None
        found = transform(view, node)
        if found is None:
            return None
        check_device(node)
        if not view.dtype(found.source).is_floating_point:
            raise NoMatch(f"the scores are {view.dtype(found.source)}", node)
        return found

    def worth(self, match: Transform, view: GraphView) -> Worth:
        source = fake(match.source)
        return look_up(
            NAME,
            source.device,
            elements=expected_elements(source.shape),
            columns=expected(source.shape[match.dim]),
            sorts=any(view.name_of(node) in _SORTS for node in match.nodes),
            training=view.needs_grad(match.source),
        )


def sorted_sparsemax(z: torch.Tensor) -> torch.Tensor:
    """Martins & Astudillo, algorithm 1."""
    return sparsemax_and_support(z)[0]


def sparsemax_and_support(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities, and the number of nonzero ones in each row."""
    s, _ = torch.sort(z, dim=-1, descending=True)
    n = torch.arange(1, z.size(-1) + 1, dtype=z.dtype, device=z.device)
    c = s.cumsum(-1) - 1
    size = (n * s > c).sum(-1, keepdim=True)
    return torch.clamp(z - c.gather(-1, size - 1) / size, min=0), size


def sorted_entmax15(z: torch.Tensor) -> torch.Tensor:
    """Peters et al., algorithm 2."""
    z = z / 2
    s, _ = torch.sort(z, dim=-1, descending=True)
    n = torch.arange(1, z.size(-1) + 1, dtype=z.dtype, device=z.device)
    mean = s.cumsum(-1) / n
    spread = (s**2).cumsum(-1) / n - mean**2
    tau = mean - ((1 - n * spread) / n).clamp(min=0).sqrt()
    size = (tau <= s).sum(-1, keepdim=True)
    return torch.clamp(z - tau.gather(-1, size - 1), min=0) ** 2


def bisected(z: torch.Tensor, alpha: float, steps: int) -> torch.Tensor:
    """Bisection for any alpha."""
    z = (alpha - 1) * z
    low = z.amax(-1, keepdim=True) - 1
    step = torch.ones_like(low)
    for _ in range(steps):
        step = step / 2
        p = torch.relu(z - low - step) ** (1 / (alpha - 1))
        low = torch.where(p.sum(-1, keepdim=True) >= 1, low + step, low)
    p = torch.relu(z - low) ** (1 / (alpha - 1))
    return p / p.sum(-1, keepdim=True)


_examples = examples_of(
    lambda transform, training: (
        transform,
        ((torch.randn(3, 4, 9) * 2).requires_grad_(training),),
    )
)

Entmax.examples = (
    *_examples(True, sorted_sparsemax=sorted_sparsemax),
    *_examples(sorted_entmax15=sorted_entmax15, bisection=lambda z: bisected(z, 1.25, 30)),
)
Entmax.near_misses = (
    *_examples(reason="differs from entmax", few_steps=lambda z: bisected(z, 1.5, 6)),
    *_examples(
        True,
        "its gradient is not entmax's",
        gradient_of_a_bisection=lambda z: bisected(z, 1.5, 30),
    ),
    *_examples(reason="also returned", support_returned=sparsemax_and_support),
)

PATTERN = Entmax()
