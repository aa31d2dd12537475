"""The entmax of rows: calls of the entmax package and written-out versions -> `entmax`.

    p = argmax_{p in simplex} p . z + H_alpha(p)       over one dimension of z
        ->  entmax(z, alpha, dim)

Routers, pooling, attention whose probabilities somebody else reads or drops out: whatever `entmax_attention` cannot
take. Sources: Peters et al. 2019 (entmax); Correia et al. 2019 (the gradient of alpha); Martins & Astudillo 2016.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import torch
from torch import fx

from sparse_inductor.example import examples_of
from sparse_inductor.graph.checks import check_device
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import bytes_of, expected, expected_elements
from sparse_inductor.graph.no_match import NoMatch
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.saved import for_the_caller
from sparse_inductor.graph.values import matched_nodes
from sparse_inductor.graph.view import GraphView, fake
from sparse_inductor.match.chains.terms import widened
from sparse_inductor.match.entmax.form import ENDS, ends_here
from sparse_inductor.match.entmax.leaves import show_entmax
from sparse_inductor.match.entmax.transform import (
    LEAVES,
    NOT_ENTMAX,
    Transform,
    given_alpha,
    transform,
)
from sparse_inductor.pattern import Miss, Sparse
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.worth import Worth

NAME = "entmax"
OP = "sparse_inductor::entmax"

# Calls that sort, the package's and those of its Functions, of which copies have the same.
_SORTED = frozenset("entmax15 sparsemax autograd_function_apply getitem".split())


@dataclasses.dataclass
class RowsMatch:
    """A recognised transformation, ready to be replaced."""

    found: Transform
    view: GraphView
    pattern, op = NAME, OP

    @functools.cached_property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        return matched_nodes(self.view, self.found.nodes)

    @property
    def anchor(self) -> fx.Node:
        return self.found.node

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return self.found.inputs

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        return tuple((t, self.found.reader) for t in self.inputs)

    @property
    def settled(self) -> tuple[fx.Node, ...]:
        return self.found.settled

    @property
    def sparse(self) -> tuple[Sparse, ...]:
        return (self.found.sparse,)

    @property
    def bytes_saved(self) -> int | None:
        """What a training step keeps beside the probabilities: nothing for a call of the package, else the sorted
        scores, their sums and whatever else the formula has; counted as one tensor each."""
        if not self.view.needs_grad(self.found.source):
            return 0
        kept = [bytes_of(n) for n in self.found.nodes[:-1] if self.view.requires_grad(n)]
        return None if None in kept else sum(b for b in kept if b is not None)

    @property
    def note(self) -> str:
        return self.found.described(f"dim {self.found.dim}")

    def replace(self) -> None:
        found, e = self.found, Emitter(self.anchor)
        wanted = fake(self.anchor).dtype
        # A wider alpha, or a cast on the way, makes the program compute in its precision.
        source = e.cast(found.source, torch.promote_types(fake(found.source).dtype, wanted))
        if found.scale != 1:
            source = widened(e, source)
            top = e.method("detach", e.method("amax", source, found.dim, True))
            # less their maximum, so that what is filled in cannot overflow
            source = e.call(operator.mul, e.call(operator.sub, source, top), found.scale)
        alpha, number = given_alpha(e, found.alpha, source)
        given = (source, alpha, number, found.dim)
        given += (found.undefined,) if found.undefined else ()
        p = e.call(own_operator("entmax"), *given)
        p = e.cast(p, wanted)
        if found.written_out:  # entmax's functions save their results themselves
            p = for_the_caller(self.view, e, self.anchor, p)
        self.anchor.replace_all_uses_with(p)


class Entmax(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "entmax15(z), sparsemax(z), entmax_bisect(z, alpha), or the like by hand -> entmax(z, alpha)"
    anchors = LEAVES | NOT_ENTMAX | {"getitem", "autograd_function_apply"} | ENDS

    def setup(self) -> Callable[[], None]:
        return show_entmax()

    def _match(self, node: fx.Node, view: GraphView) -> RowsMatch | Miss | None:
        name = view.name_of(node)
        if view.function_body:
            return None
        if name in ENDS and not ends_here(view, node):
            return None
        found = transform(view, node)
        if found is None:
            return None
        check_device(node)
        if not view.dtype(found.source).is_floating_point:
            raise NoMatch(f"the scores are {view.dtype(found.source)}", node)
        return RowsMatch(found, view)

    def worth(self, match: RowsMatch, view: GraphView) -> Worth:
        source = fake(match.found.source)
        return look_up(
            NAME,
            source.device,
            elements=expected_elements(source.shape),
            columns=expected(source.shape[match.found.dim]),
            sorts=view.name_of(match.found.node) in _SORTED,
            training=int(source.requires_grad),
        )


def sorted_sparsemax(z: torch.Tensor) -> torch.Tensor:
    """Martins & Astudillo, algorithm 1."""
    return sparsemax_and_support(z)[0]


def sparsemax_and_support(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities, and how many of them are not zero."""
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
