"""Reordering, merging and splitting the axes of a tensor that `axes` has followed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from .axes import Atom, Placed, flat
from .emit import Emitter
from .fakes import static_size
from .no_match import NoMatch


def laid_out(
    e: Emitter,
    t: Placed,
    groups: Sequence[Sequence[Atom]],
    full: bool = False,
    sized: Sequence[Placed] = (),
) -> fx.Node:
    """Emit the tensor with one axis for each group of atoms. A group without atoms of the tensor becomes an axis of
    size 1, or with `full` is expanded.

    sized: tensors from which the graph can read the sizes of atoms that are not known.
    """
    if len(t.axes) == len(groups) and all(
        flat(axis) == tuple(group) or not (flat(axis) or full)
        for axis, group in zip(t.axes, groups)
    ):
        return t.tensor  # as it is
    node, have = _split(e, t, sized)
    node = e.permuted(node, [have.index(a) for group in groups for a in group if a in have])
    # A group that has some of its atoms, or must have all, gets the missing ones by expansion.
    whole = [group if full or any(a in have for a in group) else () for group in groups]
    atoms = [atom for group in whole for atom in group]
    missing = [at for at, atom in enumerate(atoms) if atom not in have]
    for at in missing:
        node = e.method("unsqueeze", node, at)
    if missing:
        sizes = [-1 if atom in have else size_of(e, atom, sized) for atom in atoms]
        node = e.method("expand", node, tuple(sizes))
    for i, group in enumerate(whole):
        if not group:
            node = e.method("unsqueeze", node, i)
        elif len(group) > 1:
            node = e.method("flatten", node, i, i + len(group) - 1)
    return node


def _split(e: Emitter, t: Placed, sized: Sequence[Placed]) -> tuple[fx.Node, list[Atom]]:
    """Emit the tensor with one axis for each atom: merged axes are unflattened, axes of size 1 removed."""
    node = t.tensor
    have: list[Atom] = []
    for at in reversed(range(len(t.axes))):
        parts = flat(t.axes[at])
        if not parts:
            node = e.method("squeeze", node, at)
        elif len(parts) > 1:
            node = e.method("unflatten", node, at, _sizes(e, parts, sized))
        have[:0] = parts
    return node, have


def _sizes(e: Emitter, atoms: Sequence[Atom], sized: Sequence[Placed]) -> tuple[Any, ...]:
    known = [static_size(atom.size) for atom in atoms]
    if known.count(None) == 1:
        return tuple(-1 if size is None else size for size in known)
    return tuple(
        size_of(e, atom, sized) if size is None else size for atom, size in zip(atoms, known)
    )


def size_of(e: Emitter, atom: Atom, sized: Sequence[Placed]) -> Any:
    """Return the size of an atom, or a node that reads it from a tensor that has the atom as an axis, or from an input
    of the graph that has this size.

    Raises NoMatch if the size is not known and there is no such tensor.
    """
    known = static_size(atom.size)
    if known is not None:
        return known
    for t in sized:
        for i, axis in enumerate(t.axes):
            if flat(axis) == (atom,):
                return e.method("size", t.tensor, i)
    if (given := e.given_size(atom.size)) is not None:
        return given
    raise NoMatch(f"an operand is broadcast over a size that is not known, {atom.size}")


def at_first(e: Emitter, t: Placed, atoms: Collection[Atom]) -> Placed:
    """Select the first entry along every axis that consists of these atoms. The tensor is constant along them."""
    node, axes = t.tensor, list(t.axes)
    for at in reversed(range(len(axes))):
        if flat(axes[at]) and {*flat(axes[at])} <= {*atoms}:
            node = e.method("select", node, at, 0)
            del axes[at]
    return dataclasses.replace(t, node=node, axes=tuple(axes))
