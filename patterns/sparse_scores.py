"""Sparse dot-product scoring: gather, multiply, add up, top-k -> `sparse_scores`.

    scores[b, n] = sum over the terms t of document n of value[n, t] * query[b, t]          [B, N]
    topk(scores, k)                                                                  values, indices [B, k]
        ->  sparse_scores(query, ids, values, rows | offsets), with or without k

The program may keep the documents in any layout: padded rows, coordinates, segments, bags. Where only the top-k is
used, the scores are not written. Sources: GPUSparse, section 4 (document-parallel and scatter-add scoring).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparse_inductor import compat
from sparse_inductor.example import examples_of
from sparse_inductor.graph.axes import flat, fresh
from sparse_inductor.graph.checks import check_device
from sparse_inductor.graph.emit import Emitter, own_operator
from sparse_inductor.graph.fakes import expected, expected_elements, fake, static_size
from sparse_inductor.graph.no_match import NoMatch
from sparse_inductor.graph.recogniser import Recogniser
from sparse_inductor.graph.values import matched_nodes
from sparse_inductor.graph.view import GraphView
from sparse_inductor.graph.vocabulary import REORDERS
from sparse_inductor.match.scoring.accumulate import ANCHORS, SIGNS, scores_of
from sparse_inductor.match.scoring.postings import Postings, postings_of
from sparse_inductor.match.scoring.scored import Scored
from sparse_inductor.match.scoring.topk import Top, top_of
from sparse_inductor.match.scoring.ways import ROWS, OfRows, contributions
from sparse_inductor.pattern import Miss
from sparse_inductor.policy.break_even import look_up
from sparse_inductor.policy.unrest import Unrest, unrest_of
from sparse_inductor.policy.worth import Worth
from sparse_inductor.reporting.records import watch_sparse_breaks

NAME = "sparse_scores"
OP = "sparse_inductor::sparse_scores"

_OTHER_POOLS = {
    "amax": "the largest contribution is no sum",
    "max_dim": "the largest contribution is no sum",
    "mean": "an average over the terms is no inner product",
    "logsumexp": "log-sum-exp over the terms is no inner product",
}


@dataclasses.dataclass
class ScoresMatch:
    """Recognised scoring, ready to be replaced."""

    scores: Scored
    top: Top | None
    matched_nodes: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...] = ()  # nodes that may also be read elsewhere
    held: Unrest | None = None  # how often the documents change, if they can be indexed
    guarded: bool = False  # whether it is faster only with an index
    bytes_saved: int | None = None
    pattern, op = NAME, OP

    @property
    def anchor(self) -> fx.Node:
        return self.scores.node if self.top is None else self.top.node

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        inside = set(self.matched_nodes)
        return tuple(dict.fromkeys(n for n, _ in self.scores.inputs if n not in inside))

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        return self.scores.inputs

    @property
    def kept(self) -> tuple[fx.Node, ...]:
        """The node whose write stays: a part of an accumulator is still added to in place."""
        return () if self.scores.into is None else (self.scores.node,)

    @property
    def open(self) -> tuple[fx.Node, ...]:
        """The nodes that may also be read elsewhere: the result in all its forms."""
        best = () if self.top is None else (*(r for r, _ in self.top.results), *self.top.sliced)
        return (*self.scores.accumulator, *self.shared, *best)

    @property
    def note(self) -> str:
        return self.scores.layout + (
            "" if self.top is None else ", top-k: the scores are not written"
        )

    def replace(self) -> None:
        s = self.scores
        e = Emitter(self.anchor)
        if s.into is not None:
            s.node.replace_all_uses_with(e.method("add_", s.into, s.shaped(e, s.emit(e))))
        elif self.top is None:
            _redirect(s, s.shaped(e, s.emit(e)))
        else:
            self.top.put(e, s.emit(e, self.top.k))
        if self.guarded and self.held is not None:
            _guard(self.held)


def _guard(held: Unrest) -> None:
    """Add a guard that has the code recompiled as written if its documents turn out to change from call to call."""
    code = compat.current_code()
    stays = lambda: not (held.why and compat.may_recompile(code))
    compat.add_guard(stays, "sparse_inductor: documents hold still")


def _redirect(s: Scored, scores: fx.Node) -> None:
    """Redirect the readers of the result, and later readers of the accumulator, to the scores."""
    s.node.replace_all_uses_with(scores)
    after = lambda user: user > scores and user is not s.node
    for name in s.accumulator:
        name.replace_all_uses_with(scores, after)


class SparseScores(Recogniser):
    """The pattern; see the module docstring."""

    name = NAME
    op = OP
    summary = "topk(sum_t values * query[ids]) -> sparse_scores(query, ids, values)"
    anchors = ANCHORS | frozenset(_OTHER_POOLS)
    signs = SIGNS

    def setup(self) -> Callable[[], None]:
        """Have the report explain graph breaks at sparse layouts, which Dynamo never puts into a graph."""
        return watch_sparse_breaks(self.name)

    def _match(self, node: fx.Node, view: GraphView) -> ScoresMatch | Miss | None:
        if view.is_tensor(node) and not view.shape(node):
            return None  # a single number has no axis of documents: a loss, say
        try:
            if (why := _OTHER_POOLS.get(view.name_of(node) or "")) is not None:
                return self._other_pool(node, view, why)
            found = postings_of(view, node) or scores_of(view, node)
            return None if found is None else self._checked(node, view, found)
        except OfRows:
            return None

    def _other_pool(self, node: fx.Node, view: GraphView, why: str) -> Miss | None:
        source = view.call(node).get("input")
        if not view.is_tensor(source):
            return None
        w = contributions(view, source, fresh(view.shape(source)), node)
        family = w is not None and w.has_weights and not w.gather.features
        return Miss(why, node) if family else None

    def _checked(self, node: fx.Node, view: GraphView, s: Scored) -> ScoresMatch:
        check_device(node)
        if not fake(node).dtype.is_floating_point:
            raise NoMatch(f"the scores are {fake(node).dtype}", node)
        top = None if s.into is not None else top_of(view, s)
        if s.w.gather.features and not _documents_first(view, s, top):
            raise NoMatch(ROWS, node)
        anchor = s.node if top is None else top.node
        _check_accumulator(view, s)
        selected = () if top is None else (*top.path, top.node)
        nodes = matched_nodes(view, (*s.matched_nodes, *selected, *s.accumulator))
        gather = s.w.gather
        if gather.gradient and view.needs_grad(gather.source):
            raise NoMatch(gather.gradient, gather.node)
        held = None
        # In a transform, tensors are wrapped and nothing is emitted.
        if anchor not in view.transforms:
            held = self._rehearse(s, anchor, top)
        return ScoresMatch(s, top, nodes, _lists(view, s, anchor), held)

    def worth(self, match: ScoresMatch, view: GraphView) -> Worth:
        s = match.scores
        device = fake(s.node).device
        queries = expected_elements(atom.size for atom in s.w.queries)
        products = queries * expected_elements(atom.size for atom in s.w.entries)
        sizes = {
            "queries": queries,
            "scores": expected_elements(fake(s.node).shape),
            "products": products,
            "entries": products // max(1, queries),
            "documents": expected_elements(fake(s.node).shape) // max(1, queries),
            "best": 0 if match.top is None else expected(match.top.k),
        }
        match.guarded = False
        changing = look_up(NAME, device, **sizes, constant=False)
        if changing.below > 0 or match.held is None:
            return changing
        constant = look_up(NAME, device, **sizes, constant=True)
        if constant.below <= 0:
            return changing
        if match.held.why:
            return changing._replace(reason=f"{changing.reason}; here {match.held.why}")
        match.guarded = True
        return constant

    def _rehearse(self, s: Scored, anchor: fx.Node, top: Top | None) -> Unrest | None:
        """Emit the replacement and remove it again, so that a failure becomes a reported reason instead of an error.

        Returns how often the documents change, if an index may be built of them.
        """
        try:
            with Emitter(anchor) as e:
                s.shaped(e, s.emit(e))
                found = None if top is None else s.emit(e, top.k)
                cached = own_operator("sparse_scores_topk_cached")
                if found is None or found.target is not cached:
                    return None
                query, ids = map(fake, found.args[:2])
                known = None not in map(static_size, (*query.shape, *ids.shape))
                return unrest_of(query.device, query.shape[-1], ids.shape) if known else None
        except IndexError:  # a tensor that all queries share is read at the first query
            raise NoMatch("the batch of queries is empty", anchor) from None
        except (RuntimeError, TypeError, ValueError) as error:
            raise NoMatch(f"the operator does not take it: {error}", anchor) from error

    def resolve(
        self, matches: Sequence[ScoresMatch], view: GraphView
    ) -> tuple[list[ScoresMatch], list[Miss]]:
        """Accept matches whose nodes are not read elsewhere; two matches may share a gather.

        A match that a later accumulation into the same scores already includes is dropped.
        """
        taken = {s.node for m in matches for s in m.scores.earlier}
        return super().resolve([m for m in matches if m.scores.node not in taken], view)


def _check_accumulator(view: GraphView, s: Scored) -> None:
    """Raises NoMatch where the accumulator is a view of another tensor, or is read before the scores are in it."""
    names = s.accumulator  # removed, with the nodes that cleared it
    if names and view.effects.creator(names[0]) is not names[0]:
        raise NoMatch("the accumulator is a view of something else", s.node)
    for other in [user for name in names for user in view.readers(name)]:
        if view.order[other] < view.order[s.node] and other not in (*names, *s.matched_nodes):
            raise NoMatch("the accumulator is read before the scores are in it", other)


def _lists(view: GraphView, s: Scored, anchor: fx.Node) -> tuple[fx.Node, ...]:
    """Return the posting lists as they were looked up. They may also be read elsewhere, as in BM25's saturation."""
    if not isinstance(s, Postings):
        return ()
    found = (n for p in (*s.earlier, s) for n in (p.w.gather.node, p.found.node))
    return tuple(n for n in found if not view.effects.changes(n, n, anchor))


def _documents_first(view: GraphView, s: Scored, top: Top | None) -> bool:
    """Whether scores [N, B] are transposed to [B, N] afterwards, or searched along N, so that columns are queries."""
    if not s.queries or flat(s.axes[0]) == s.queries:
        return False
    if top is not None:
        return True
    readers = list(view.readers(s.node))
    return bool(readers) and all(view.name_of(r) in REORDERS for r in readers)


class _Collection(nn.Module):
    def __init__(self, score: Callable[..., Any]):
        super().__init__()
        self.register_buffer("ids", torch.randint(0, 30, (20, 6)))
        self.register_buffer("values", torch.rand(20, 6))
        self.register_buffer("rows", torch.arange(20).repeat_interleave(6))
        self.learnt = nn.Parameter(torch.rand(20, 6))
        self.score = score

    def forward(self, q: torch.Tensor) -> Any:
        return self.score(self, q)


_examples = examples_of(
    lambda score, training: (_Collection(score), (torch.rand(3, 30, requires_grad=training),))
)
_of_one_query = examples_of(lambda score, training: (_Collection(score), (torch.rand(30),)))

SparseScores.examples = (
    *_examples(
        padded=lambda c, q: (q[:, c.ids] * c.values).sum(-1).topk(5),
        einsum=lambda c, q: torch.einsum("bnl,nl->bn", q[:, c.ids], c.values),
        embedding_bag=lambda c, q: F.embedding_bag(
            c.ids, q.t(), mode="sum", per_sample_weights=c.values
        ).t(),
    ),
    *_examples(True, padded_train=lambda c, q: (q[:, c.ids] * c.values).sum(-1)),
    *_of_one_query(
        row_ids=lambda c, q: (
            q.new_zeros(20).index_add(0, c.rows, q[c.ids.flatten()] * c.values.flatten()).topk(5)
        )
    ),
)
SparseScores.near_misses = (
    *_examples(reason="no sum", best_term=lambda c, q: (q[:, c.ids] * c.values).amax(-1)),
    *_of_one_query(
        reason="does not start at zero",
        prior=lambda c, q: q.new_ones(20).index_add(
            0, c.rows, q[c.ids.flatten()] * c.values.flatten()
        ),
    ),
    *_examples(True, "are learnt", learnt=lambda c, q: (q[:, c.ids] * c.learnt).sum(-1)),
    *_examples(
        reason="rows of features",
        message_passing=lambda c, x: (x[c.ids % 3] * c.values[..., None]).sum(1),
    ),
)

PATTERN = SparseScores()
