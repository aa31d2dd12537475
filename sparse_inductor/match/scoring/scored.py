"""What a recogniser of scoring found: whose contributions are added up, and where the documents are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import compat
from ...graph.effects import same_geometry
from ...graph.emit import Emitter, own_operator
from ...graph.names import Call, canonical, name_of
from ...graph.no_match import NoMatch
from ...graph.view import GraphView, fake, same_size, static_size
from ...graph.vocabulary import COPIES, REGROUPS, REORDERS
from .contributions import Weighted, merged, reshaped

_CLEARS = frozenset(("zero", "fill"))
_PARTS = frozenset("getitem select narrow".split())
_VIEWS = REGROUPS | REORDERS | {"getitem", "narrow", "select", "detach"}
_ALIASES = COPIES | REGROUPS | {"cast", "detach"}
_SUMS = frozenset("index_add index_put scatter_add scatter_reduce".split())

Make = Callable[[Emitter], fx.Node]


@dataclasses.dataclass(frozen=True)
class Scores:
    """node[b, n] = sum of the contributions of document n to query b.

    kept: for a plain sum the axes of the contributions that stay, in the order of the result. rows,
    offsets: how the entries of the other layouts belong to documents. rule: by which PyTorch reads the offsets
    (`aten.sparse_scores`). num_docs: a size, batch: the
    axis of the result that is the batch. accumulator: the tensor they were added to, if any, or into: the part of one.
    """

    node: fx.Node
    w: Weighted
    num_docs: Any
    batch: int | None
    kept: tuple[int, ...] | None = None
    rows: Make | None = None
    offsets: Make | None = None
    rule: str = ""
    reads: tuple[tuple[fx.Node, fx.Node], ...] = ()
    accumulator: fx.Node | None = None
    into: fx.Node | None = None

    @property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        return (*self.w.nodes, self.node)

    @property
    def inputs(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """What is read, and by whom."""
        return (*self.w.reads, *self.reads)

    @property
    def features(self) -> bool:
        """Whether the columns may be features as well as queries."""
        return self.w.gather.features

    @property
    def layout(self) -> str:
        return "rows" if self.rows else "segments" if self.offsets else "padded documents"

    def emit(self, e: Emitter, k: Any = None) -> fx.Node:
        """Call the operator: scores [N] or [B, N], or with `k` (values, ids)."""
        dtype = fake(self.node).dtype
        query = self.w.query(e)
        if dtype == torch.float64:  # a sum may compute in it, of narrower products
            query = e.cast(query, dtype)
        V = fake(query).shape[-1]
        ids, values = self.documents(e, V if isinstance(V, int) else e.method("size", query, -1))
        rows = None if self.rows is None else self.rows(e)
        offsets = None if self.offsets is None else self.offsets(e)
        num_docs = self.num_docs
        if not isinstance(num_docs, int):
            if self.kept is None:
                raise NoMatch("the number of documents is not known", self.node)
            num_docs = -1  # of padded documents the operator sees it itself
        args = (query, ids, values, rows, offsets, num_docs)
        if k is None:
            return e.call(own_operator("sparse_scores"), *args, dtype, self._lookup)
        held = sum(1 << i for i, t in enumerate(args[1:5]) if t is not None and _is_held(t))
        if not held & 3 or compat.current_code() is None:  # made anew at each call, or exported
            return e.call(own_operator("sparse_scores_topk"), *args, k, dtype, self._lookup)
        return e.call(
            own_operator("sparse_scores_topk_cached"), *args, k, dtype, self._lookup, held
        )

    @property
    def _lookup(self) -> str:
        """By which rules PyTorch refuses the ids and the rows or offsets, for the operator to do the same.

        What a mask leaves out has the padding's id by then.
        """
        of_ids = "" if self.w.masked else _refusal(self.w.gather.node)
        of_rows = _refusal(self.node) if self.rows else self.rule
        return f"{of_ids} {of_rows}".rstrip()

    def documents(self, e: Emitter, V: Any) -> tuple[fx.Node, fx.Node]:
        """ids and values: [N, L] for a plain sum, else [nnz]."""
        ids, values = self.w.documents(e, V)
        w = self.w
        if self.kept is None:
            return tuple(reshaped(e, t, (math.prod(w.entries),)) for t in (ids, values))
        axes = [a for a in range(len(w.shape)) if a != w.batch]
        kept = [a for a in self.kept if a != w.batch]
        order = [axes.index(a) for a in [*kept, *(a for a in axes if a not in kept)]]
        sizes = [w.entries[i] for i in order]
        shape = (math.prod(sizes[: len(kept)]), math.prod(sizes[len(kept) :]))
        ids, values = (reshaped(e, e.permuted(t, order), shape) for t in (ids, values))
        return ids, values

    def shaped(self, e: Emitter, scores: fx.Node) -> fx.Node:
        """[N] or [B, N] in the shape of the user's result."""
        want = tuple(fake(self.node).shape)
        if self.batch is None:
            return reshaped(e, scores, want)
        if lead := self.w.lead:
            scores = reshaped(e, scores, merged(want, lead))
            queries = tuple(e.size(self.w.gather.source, a) for a in range(lead + 1))
            return e.method("unflatten", scores, 0, queries)
        docs = [s for a, s in enumerate(want) if a != self.batch]
        scores = reshaped(e, scores, (want[self.batch], *docs))
        if self.batch != 0:
            order = [*range(1, self.batch + 1), 0, *range(self.batch + 1, len(want))]
            scores = e.method("permute", scores, tuple(order))
        return e.laid_out(scores, fake(self.node)) if _strides_matter(self.node) else scores


# What lays out its result without regard to its input.
_OF_THEIR_OWN_LAYOUT = frozenset("topk argmax matmul mm".split())


def _strides_matter(node: fx.Node) -> bool:
    """Whether somebody asks for a result's strides or has his own from them; what the graph returns is seen to in
    `layouts`."""
    return any(
        _strides_matter(user)
        if name_of(user) in REORDERS
        else user.op != "output" and name_of(user) not in _OF_THEIR_OWN_LAYOUT
        for user in node.users
    )


def _is_held(node: fx.Node) -> bool:
    """Whether a tensor is one that the program hands to the graph, or a view of it."""
    while node.op not in ("placeholder", "get_attr"):
        call = canonical(node)
        if call is None or call.name not in _VIEWS or not isinstance(call.get("input"), fx.Node):
            return False
        node = call["input"]
    return True


_REFUSALS = {
    **dict.fromkeys("getitem index take index_put".split(), "index"),
    **dict.fromkeys("gather embedding_bag scatter_add scatter_reduce".split(), "gather"),
    "embedding": "embedding",
}


def _refusal(node: fx.Node) -> str:
    """By whose rules a look-up or a scattered sum refuses an index (`aten.sparse_scores`); empty: not known."""
    name = name_of(node) or ""
    if (
        name == "index_add"
    ):  # what PyTorch raises depends on how many axes there are, and which one it is
        return "embedding" if fake(node).dim() == 1 else "gather"
    if name == "index_select":
        call = canonical(node)
        inner = call is not None and call["dim"] % fake(node).dim() == 1
        return "gather" if inner else "embedding"
    return _REFUSALS.get(name, "")


@dataclasses.dataclass(frozen=True)
class Addition:
    """What a node adds to an accumulator: `source` times `scale`, to the places `rows` along `axis`, of two axes to
    those of `queries` along the other. how: "sum", or how else what meets in one place is reduced."""

    rows: fx.Node
    source: fx.Node
    axis: int
    how: str | None = "sum"
    scale: Any = 1
    queries: Any = None


def addition(view: GraphView, node: fx.Node, call: Call) -> Addition | None:
    """The scatter, index_add or accumulating index_put that a node is; None for anything else."""
    ndim, axis, how = len(view.shape(node)), call.get("dim"), "sum"
    queries = None
    match call.name:
        case "index_add":
            rows, source = call["index"], call["source"]
        case "scatter_add" | "scatter" | "scatter_reduce":
            rows, source, how = call["index"], call["src"], call.get("reduce")
            how = "sum" if call.name == "scatter_add" or how == "add" else how
        case "put" if call.get("accumulate") and ndim == 1:
            rows, source, axis = call["index"], call["source"], 0
        case "index_put" if call.get("accumulate") and isinstance(call["indices"], (tuple, list)):
            at = [a for a, i in enumerate(call["indices"]) if i is not None]
            if len(at) != 1 and not at == [0, 1] == [*range(ndim)]:
                return None
            rows, source, axis = call["indices"][at[-1]], call["values"], at[-1]
            queries = call["indices"][0] if len(at) > 1 else None
        case _:
            return None
    if axis is None or not (view.is_tensor(rows) and view.is_tensor(source)):
        return None
    return Addition(rows, source, axis % ndim, how, call.get("alpha", 1), queries)


def check_rows(rows: Any, queries: Any, node: fx.Node) -> None:
    """Raises NoMatch unless the accumulator that `node` adds to has one row for each query."""
    if same_size(rows, queries):
        return
    if static_size(rows) is None or static_size(queries) is None:
        raise NoMatch(
            "nothing says that the accumulator has as many rows as there are queries", node
        )
    raise NoMatch("the accumulator has rows that belong to no query", node)


def check_zero(view: GraphView, accumulator: Any, node: fx.Node) -> None:
    """Raises NoMatch unless `node` accumulates into zeros, and into none that outlive the program."""
    seen = view.value(accumulator, node) if isinstance(accumulator, fx.Node) else None
    call = view.call(seen)
    filled = call is not None and call.inplace and call.name in _CLEARS
    filler = call.get("value", 0) if call is not None and filled else accumulator
    added = view.call(node)
    if added is not None and part_of(view, added) is not None:
        return  # what it holds stays in it: the scores are added
    made = view.effects.creator(accumulator) if isinstance(accumulator, fx.Node) else None
    if view.const(filler, seen if filled else node) != 0:
        if call is not None and call.name in _SUMS:
            raise NoMatch("the accumulator holds other sums already: add all up at once", node)
        raise NoMatch("the accumulator does not start at zero", node)
    if made is None or added is None or not added.inplace:
        return
    if made.op in ("placeholder", "get_attr"):  # a buffer, say: zeroed here, read anywhere
        raise NoMatch("the accumulator is the caller's, who keeps the scores in it", node)


def part_of(view: GraphView, call: Call) -> fx.Node | None:
    """The part of a tensor made of zeros that an accumulation in place writes, as in `scores[i].index_add_(...)`."""
    if not call.inplace or view.name_of(call["input"]) not in _PARTS:
        return None
    made = view.effects.creator(call["input"])
    return call["input"] if made is not None and view.const(made) == 0 else None


def accumulator_of(view: GraphView, call: Call) -> fx.Node | None:
    """What an accumulation in place writes, if it is all of a tensor: that before it was cleared, as in
    `empty(N).zero_()`, or became itself, as in `zeros(N).to(device)`."""
    if not call.inplace or part_of(view, call) is not None:
        return None
    node: fx.Node = call["input"]
    while (made := view.call(node)) is not None and (
        (made.inplace and made.name in _CLEARS) or _is_alias(view, node, made)
    ):
        node = made["input"]
    return node


def _is_alias(view: GraphView, node: fx.Node, call: Call) -> bool:
    """Whether a node is all of its input under another name: of the same shape, or the only one who reads it."""
    x = call.get("input")
    if call.inplace or call.name not in _ALIASES or not view.is_tensor(x):
        return False
    if view.effects.creator(node) is not view.effects.creator(x):
        return False  # a copy
    alone = len(x.users) == 1 and same_size(fake(node).numel(), fake(x).numel())
    return alone or same_geometry(node, x)


def names_of(view: GraphView, accumulator: fx.Node, before: fx.Node) -> list[fx.Node]:
    """The nodes that are the accumulator: itself, what clearing it returned, and its other names."""
    names = [accumulator]
    for name in names:
        for user in name.users:
            call = view.call(user)
            if call is None or view.order[user] >= view.order[before]:
                continue
            if call.name in _CLEARS or _is_alias(view, user, call):
                names.append(user)
    return names
