"""The selection of the best documents, if nothing else reads the scores: topk, a maximum, a truncated sort, or only the
indices of one of these."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch import fx

from ...graph.axes import Atom, Axis, Placed, above, before, flat, fresh
from ...graph.emit import Emitter
from ...graph.fakes import fake, static_size
from ...graph.layout import laid_out
from ...graph.no_match import NoMatch
from ...graph.parts import part_of
from ...graph.view import GraphView
from ...graph.vocabulary import COPIES, VIEWS
from .scored import Scored

_VIEWS = VIEWS | {"select"}
_BEST = Atom(0)  # the axis of the results


@dataclasses.dataclass(frozen=True)
class Top:
    """The top-k that is the only reader of the scores.

    node: the selection. k: the number of documents. dim: the dimension of the input. results: the nodes of its values
    (0) and of its indices (1). sliced: the nodes that truncate a full sort. reduced: whether it is a maximum without
    the axis in its results. path: the views in between, and further nodes that belong to it. queries: the axes of its
    input that are the queries, in their order. axes: those of the results.
    """

    node: fx.Node
    k: Any
    dim: int
    results: tuple[tuple[fx.Node, int], ...]
    path: tuple[fx.Node, ...] = ()
    reduced: bool = False
    sliced: tuple[fx.Node, ...] = ()
    queries: tuple[Atom, ...] = ()
    axes: tuple[Axis, ...] = ()

    def put(self, e: Emitter, found: fx.Node) -> None:
        """Replace the selection, for all of its readers, by `found`, the operator's (values, indices)."""
        for part, which in self.results:
            t = e.cast(e.call(operator.getitem, found, which), fake(part).dtype)
            has = (self.queries, () if self.reduced else (_BEST,))[2 - fake(t).dim() :]
            t = laid_out(e, Placed(t, self.node, has), [flat(axis) for axis in self.axes])
            for result in [r for r in part.users if r in self.sliced] if self.sliced else [part]:
                result.replace_all_uses_with(e.laid_out(t, fake(result)))


def top_of(view: GraphView, s: Scored) -> Top | None:
    """The selection that is the only reader of the scores, through views; None if there is none."""
    if view.needs_grad(s.node):
        # The gradient needs all documents, and scattering it from the top-k is not worth it.
        return None
    node, path = s.node, []
    while True:
        readers = list(view.readers(node))
        if node is s.node:
            after = [r for name in s.accumulator for r in view.readers(name)]
            readers += [r for r in after if view.order[r] > view.order[node]]
        if len(set(readers)) != 1:
            return None
        reader = readers[0]
        call = view.call(reader)
        if call.inplace or call.get("input") not in (node, *s.accumulator):
            return None
        if call.name not in COPIES | _VIEWS | {"cast"}:
            break
        path.append(reader)
        node = reader
    top = _selection(view, reader)
    if top is None or fake(node).device != fake(s.node).device:
        return None
    own = fresh(view.shape(node))
    docs = own[top.dim]
    axes = own
    try:
        for one in reversed(path):
            call = view.call(one)
            axes = (above if call.name == "select" else before)(view, one, call, axes)
    except NoMatch:
        return None
    # Each axis of the scores, and of a view of them, is either documents or queries.
    place = {a: i for i, a in enumerate((*s.queries, *s.docs))}
    pairs = sorted(
        (place[flat(was)[0]], flat(was), flat(now)) for was, now in zip(s.axes, axes) if flat(was)
    )
    was = tuple(a for _, atoms, _ in pairs for a in atoms)
    queries = tuple(a for _, atoms, now in pairs if atoms[0] in s.queries for a in now)
    if was != (*s.queries, *s.docs) or not flat(docs):
        return None
    if len(queries) > 1 and any(static_size(atom.size) is None for atom in queries):
        return None
    if tuple(a for _, atoms, now in pairs if atoms[0] in s.docs for a in now) != flat(docs):
        return None
    best = [] if top.reduced else [(_BEST,)]
    found = [part for i, axis in enumerate(own) for part in (best if i == top.dim else [axis])]
    more = (*path, *top.path)
    return dataclasses.replace(top, path=more, queries=queries, axes=tuple(found))


def _selection(view: GraphView, node: fx.Node) -> Top | None:
    call = view.call(node)
    n, dim = len(view.shape(call["input"])), call.get("dim", None if call.name == "argmax" else -1)
    if dim is None and n == 1:
        dim = 0
    if not isinstance(dim, int):
        return None
    results: tuple[tuple[fx.Node, int], ...] = ((node, 1),)
    if call.name not in ("argmax", "argsort"):
        if any(u.target is not operator.getitem or u.args[1] not in (0, 1) for u in node.users):
            return None
        results = tuple((u, u.args[1]) for u in node.users)
    top = Top(node, 1, dim % n, results)
    match call.name:
        case "topk" if call.get("largest", True) is True and call.get("sorted", True) is True:
            k = call["k"]
            return dataclasses.replace(top, k=k) if isinstance(k, int) else None
        case "max_dim" | "argmax":
            return dataclasses.replace(top, reduced=not call.get("keepdim", False))
        case "sort" | "argsort" if call.get("descending", False) is True:
            return _cut_sort(view, top)
    return None


def _cut_sort(view: GraphView, sort: Top) -> Top | None:
    """A sort as a top-k, if only its first k results are read."""
    cuts = [reader for part, _ in sort.results for reader in view.readers(part)]
    lengths = set()
    for cut in cuts:
        found = part_of(view, view.call(cut))
        if found is None or found[1] != sort.dim or not isinstance(found[2], slice):
            return None
        if found[2].start or view.read_by_strides(cut):
            return None
        lengths.add(found[2].stop)
    size = view.shape(view.call(sort.node)["input"])[sort.dim]
    k = lengths.pop() if len(lengths) == 1 else None
    if not (isinstance(k, int) and isinstance(size, int) and 0 < k <= size):
        return None
    path = (*(part for part, _ in sort.results), *cuts)
    return dataclasses.replace(sort, k=k, path=path, sliced=tuple(cuts))
