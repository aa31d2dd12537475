"""The selection of the best documents that alone reads the scores: topk, a maximum, a sort that is cut."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch import fx

from ...graph.emit import Emitter
from ...graph.indices import expanded_index, only_slices
from ...graph.shapes import order_of
from ...graph.view import GraphView, fake, same_size
from ...graph.vocabulary import COPIES, REGROUPS, REORDERS
from .contributions import merged
from .postings import Postings
from .scored import Scores, names_of

_VIEWS = REGROUPS | {"getitem", "select"}


@dataclasses.dataclass(frozen=True)
class Top:
    """The top-k that alone reads the scores.

    node: the selection; k: how many; dim: of its input; path: the views in between; batch: the axis of its input that
    is the batch, if any; reduced: a maximum, whose results lack the axis; sliced: the nodes that cut a full sort.
    """

    node: fx.Node
    k: Any
    dim: int
    path: tuple[fx.Node, ...]
    batch: int | None
    reduced: bool = False
    sliced: tuple[fx.Node, ...] = ()

    def put(self, e: Emitter, found: fx.Node) -> None:
        """Have every reader of the selection read `found`, the operator's (values, indices), instead."""
        parts: list[fx.Node] = []
        for i in (0, 1):
            t = e.call(operator.getitem, found, i)
            if self.batch is not None and self.batch > self.dim:  # [k, B] as the user has it
                t = e.method("t", t)
            if self.reduced:
                t = e.method("squeeze", t, min(self.dim, fake(t).dim() - 1))
            want = fake(self._result(i))
            if want is not None:
                if tuple(want.shape) != tuple(fake(t).shape):
                    t = e.method("reshape", t, tuple(want.shape))
                t = e.laid_out(t, want)
            parts.append(t)
        for user in list(self.node.users):
            if user.target is operator.getitem and user.args[1] in (0, 1):
                for reader in list(user.users):
                    if reader in self.sliced:
                        reader.replace_all_uses_with(parts[user.args[1]])
                if not self.sliced:
                    user.replace_all_uses_with(parts[user.args[1]])

    def _result(self, i: int) -> fx.Node | None:
        """A node that holds the values (0) or indices (1) as the user reads them."""
        for user in self.node.users:
            if user.target is operator.getitem and user.args[1] == i:
                if not self.sliced:
                    return user
                return next((r for r in user.users if r in self.sliced), None)
        return None


def top_of(view: GraphView, s: Scores | Postings) -> Top | None:
    """The selection that alone reads the scores, through views."""
    shape = view.shape(s.node)
    if s.w.lead:
        if not all(isinstance(size, int) for size in shape):
            return None
        shape = merged(shape, s.w.lead)
    wide = [a for a in range(len(shape)) if a != s.batch and not same_size(shape[a], 1)]
    if len(wide) != 1 and len(shape) - (s.batch is not None) != 1:
        return None
    doc = wide[0] if wide else next(a for a in range(len(shape)) if a != s.batch)
    axes = ["b" if a == s.batch else "n" if a == doc else "1" for a in range(len(shape))]
    axes = ["b"] * s.w.lead + axes
    if view.needs_grad(s.node):
        return None  # the gradient needs the scores' documents; scatter them from the top-k is not worth it
    node, path = s.node, []
    written = [] if s.accumulator is None else names_of(view, s.accumulator, node)
    while True:
        readers = list(view.readers(node))
        if node is s.node:
            after = [r for name in written for r in view.readers(name)]
            readers += [r for r in after if view.order[r] > view.order[node]]
            readers = list(dict.fromkeys(readers))
        if len(readers) != 1:
            return None
        reader = readers[0]
        call = view.call(reader)
        if call is None or call.inplace or call.args.get("input") not in (node, *written):
            return None
        if s.w.lead and call.name not in COPIES and call.name in REORDERS | _VIEWS:
            return None
        if call.name in COPIES | REORDERS | _VIEWS:
            moved = _moved(view, axes, call, reader)
            if moved is None:
                return None
            axes = moved
            path.append(reader)
            node = reader
            continue
        return _selection(view, axes, reader, path)


def _moved(view: GraphView, axes: list[str], call: Any, node: fx.Node) -> list[str] | None:
    """The axes after a view. A view of all elements keeps them in their order, and may drop or add axes of size 1,
    the batch axis of a single query among them."""
    if call.name in COPIES:
        return axes
    if (order := order_of(call, len(axes))) is not None:
        return [axes[d] for d in order]
    if call.name == "getitem" and not only_slices(call["index"]):
        return None
    before, after = view.shape(call["input"]), view.shape(node)
    wide = [(s, a) for s, a in zip(before, axes) if not same_size(s, 1)]
    kept = [s for s in after if not same_size(s, 1)]
    if len(kept) != len(wide) or not all(same_size(s, k) for (s, _), k in zip(wide, kept)):
        return None
    names = iter(a for _, a in wide)
    return ["1" if same_size(s, 1) else next(names) for s in after]


def _selection(view: GraphView, axes: list[str], node: fx.Node, path: list[fx.Node]) -> Top | None:
    call = view.call(node)
    if call is None or "n" not in axes:
        return None
    n, dim = len(axes), call.get("dim", -1)
    if not isinstance(dim, int) or axes[dim % n] != "n":
        return None
    dim %= n
    batch = axes.index("b") if "b" in axes else None
    if any(u.target is not operator.getitem or u.args[1] not in (0, 1) for u in node.users):
        return None
    match call.name:
        case "topk" if call.get("largest", True) is True and call.get("sorted", True) is True:
            k = call["k"]
            return Top(node, k, dim, tuple(path), batch) if isinstance(k, int) else None
        case "max_dim":
            return Top(node, 1, dim, tuple(path), batch, reduced=not call.get("keepdim", False))
        case "sort" if call.get("descending", False) is True:
            return _cut_sort(view, node, dim, n, path, batch)
    return None


def _cut_sort(
    view: GraphView, node: fx.Node, dim: int, n: int, path: list[fx.Node], batch: int | None
) -> Top | None:
    """A sort of which only the first k are read."""
    cuts: list[fx.Node] = []
    k: int | None = None
    for part in node.users:
        for reader in view.readers(part):
            call = view.call(reader)
            if call is None or call.name != "getitem":
                return None
            items = expanded_index(call["index"], n)
            if items is None or any(i != slice(None) for a, i in enumerate(items) if a != dim):
                return None
            cut = items[dim]
            if (
                not isinstance(cut, slice)
                or cut.start not in (None, 0)
                or cut.step not in (None, 1)
            ):
                return None
            if not isinstance(cut.stop, int) or cut.stop <= 0 or k not in (None, cut.stop):
                return None
            if view.read_by_strides(reader):
                return None
            k = cut.stop
            cuts.append(reader)
    size = view.shape(node.args[0])[dim] if isinstance(node.args[0], fx.Node) else None
    if k is None or not isinstance(size, int) or k > size:
        return None
    return Top(node, k, dim, (*path, *node.users, *cuts), batch, sliced=tuple(cuts))
