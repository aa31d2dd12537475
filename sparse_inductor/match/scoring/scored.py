"""The results of the matchers for scoring: the contributions that are summed, and the layout of the documents."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from ... import compat
from ...graph.axes import Atom, Axis, Placed, flat
from ...graph.emit import Emitter, Make, own_operator
from ...graph.fakes import fake
from ...graph.layout import laid_out
from ...graph.names import canonical, name_of
from ...graph.no_match import NoMatch
from ...graph.vocabulary import REGROUPS, REORDERS
from .additions import ADDITIONS
from .contributions import Contributions

_VIEWS = REGROUPS | REORDERS | {"getitem", "narrow", "select", "detach"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """node[b, n] = sum of the contributions of document n to query b.

    axes: those of the result. queries, docs: the atoms that they consist of. reads: further nodes that are read, each
    with its reader. accumulator: the nodes that name the tensor to which they were added in place, if any. into: the
    part of a tensor to which they were added instead. inner: further nodes that belong to the scores. earlier: scores
    that the same accumulator already contains, as in a loop.
    """

    node: fx.Node
    w: Contributions
    axes: tuple[Axis, ...]
    queries: tuple[Atom, ...]
    docs: tuple[Atom, ...]
    reads: tuple[tuple[fx.Node, fx.Node], ...] = ()
    accumulator: tuple[fx.Node, ...] = ()
    into: fx.Node | None = None
    inner: tuple[fx.Node, ...] = ()
    earlier: tuple[Scored, ...] = ()

    @property
    def matched_nodes(self) -> tuple[fx.Node, ...]:
        before = (n for s in self.earlier for n in s.matched_nodes)
        return (*before, *self.w.nodes, *self.inner, self.node)

    @property
    def inputs(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """The nodes that are read, each with its reader."""
        return (*(read for s in self.earlier for read in s.inputs), *self.w.reads, *self.reads)

    @property
    def num_docs(self) -> Any:
        return math.prod(atom.size for atom in self.docs)

    @property
    def layout(self) -> str:
        raise NotImplementedError

    def emit(self, e: Emitter, k: Any = None) -> fx.Node:
        """Call the operator: scores [N] or [B, N], or with `k` (values, ids)."""
        raise NotImplementedError

    def shaped(self, e: Emitter, scores: fx.Node) -> fx.Node:
        """Scores [N] or [B, N] in the shape of the user's result."""
        groups = (self.queries, self.docs)[2 - fake(scores).dim() :]
        want = [flat(axis) for axis in self.axes]
        scores = laid_out(e, Placed(scores, self.node, groups), want, sized=self.w.sized)
        return e.laid_out(scores, fake(self.node)) if _strides_matter(self.node) else scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores(Scored):
    """Scores of documents that are rows, or parts of a list of entries.

    entries: the atoms of such a list, in its order. rows, offsets: build the tensor that assigns its entries to
    documents. rule: the rule by which PyTorch reads the offsets (`aten.sparse_scores`).
    """

    entries: tuple[Atom, ...] | None = None
    rows: Make | None = None
    offsets: Make | None = None
    rule: str = ""

    @property
    def layout(self) -> str:
        return "rows" if self.rows else "segments" if self.offsets else "padded documents"

    def emit(self, e: Emitter, k: Any = None) -> fx.Node:
        dtype = fake(self.node).dtype
        query = self.w.query(e)
        if dtype == torch.float64:  # the sum of narrower products may be computed in float64
            query = e.cast(query, dtype)
        ids, values = self.documents(e, e.size(query, -1))
        rows = None if self.rows is None else self.rows(e)
        offsets = None if self.offsets is None else self.offsets(e)
        num_docs = self.num_docs
        if not isinstance(num_docs, int):  # for padded documents, the operator reads it off the ids
            num_docs = -1 if self.entries is None else self._counted(e, offsets)
        args = (query, ids, values, rows, offsets, num_docs)
        if k is None:
            return e.call(own_operator("sparse_scores"), *args, dtype, self._lookup)
        held = sum(1 << i for i, t in enumerate(args[1:5]) if t is not None and _is_held(t))
        if not held & 3 or compat.current_code() is None:  # computed at each call, or exported
            return e.call(own_operator("sparse_scores_topk"), *args, k, dtype, self._lookup)
        return e.call(
            own_operator("sparse_scores_topk_cached"), *args, k, dtype, self._lookup, held
        )

    def _counted(self, e: Emitter, offsets: fx.Node | None) -> fx.Node:
        """The number of documents, from the size of the offsets or of the accumulator."""
        if offsets is not None:
            return e.call(operator.sub, e.size(offsets, 0), 1)
        call = canonical(self.node)
        axis = next((i for i, a in enumerate(self.axes) if flat(a) == self.docs), None)
        if call is None or call.name not in ADDITIONS or axis is None:
            raise NoMatch("the number of documents is not known", self.node)
        return e.method("size", call["input"], axis)

    @property
    def _lookup(self) -> str:
        """The rules by which PyTorch rejects the ids and the rows or offsets, so that the operator does the same.

        There is no rule for masked ids, because the entries that a mask drops have the padding's id.
        """
        of_ids = "" if self.w.masked else _refusal(self.w.gather.node)
        of_rows = _refusal(self.node) if self.rows else self.rule
        return f"{of_ids} {of_rows}".rstrip()

    def documents(self, e: Emitter, V: Any) -> tuple[fx.Node, fx.Node]:
        """ids and values: [N, L] for rows, else [nnz]; V is the id of entries that do not count."""
        inner = [atom for atom in self.w.entries if atom not in self.docs]
        groups = [self.docs, inner] if self.entries is None else [self.entries]
        ids = self.w.ids(e, groups)
        values, keep = self.w.weights(e, groups)
        if keep is not None:
            ids = e.call(torch.where, keep, ids, V)
            values = e.call(torch.where, keep, values, 0)
        return ids, values


# Operations with results that have a layout independent of the input's.
_OF_THEIR_OWN_LAYOUT = frozenset("topk argmax matmul mm".split())


def _strides_matter(node: fx.Node) -> bool:
    """Whether a reader uses the strides of a result, or derives its own result's strides from them. The strides of
    graph outputs are handled in `layouts`."""
    return any(
        _strides_matter(user)
        if name_of(user) in REORDERS
        else user.op != "output" and name_of(user) not in _OF_THEIR_OWN_LAYOUT
        for user in node.users
    )


def _is_held(node: fx.Node) -> bool:
    """Whether a tensor is an input or attribute of the graph, or a view of one."""
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
    """The rule by which a look-up or a scattered sum rejects an index (`aten.sparse_scores`); empty: not known."""
    name = name_of(node) or ""
    if name == "index_add":  # the error depends on the number of axes
        return "embedding" if fake(node).dim() == 1 else "gather"
    if name == "index_select":
        call = canonical(node)
        inner = call is not None and call["dim"] % fake(node).dim() == 1
        return "gather" if inner else "embedding"
    return _REFUSALS.get(name, "")
