"""Inductor's pass slots: adds a pass beside the user's passes, and removes it again.

From torch 2.13 on, a slot holds a list of passes; in 2.11 it holds one callable, and `Chain` combines several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from . import compat
from .compat.graph_pass import CustomGraphPass


class Chain(CustomGraphPass):
    """Several passes in a slot that takes one (torch 2.11)."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """Return the uuids of all passes; None, which disables caching, if one of them has none."""
        uuids = tuple(
            one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes
        )
        return None if None in uuids else uuids

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(self.passes)


def passes_of(value: Any) -> list[Any]:
    """Return the passes in a slot's value."""
    if value is None:
        return []
    if isinstance(value, Chain):
        return list(value.passes)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def slot_value(passes: list[Any]) -> Any:
    """Return a slot's value for these passes: a list if torch accepts one."""
    if compat.slots_take_lists():
        return passes
    return passes[0] if len(passes) == 1 else Chain(passes)


class Slot:
    """One pass of this package in one of Inductor's slots, with the state needed to remove it."""

    def __init__(self, name: str, ours: Any) -> None:
        self._name = name
        self._ours = ours
        self._saved: compat.SavedSetting | None = None
        self._found: list[Any] = []

    def install(self) -> None:
        """Add the pass; add it again if the slot has been overwritten since."""
        present = passes_of(compat.setting(self._name))
        others = [p for p in present if p is not self._ours]
        if self._saved is None:
            # This pass may be left over in this thread after a disable() in another thread.
            if len(others) < len(present):
                compat.set_setting(self._name, slot_value(others) if others else None)
            self._saved, self._found = compat.save_setting(self._name), others
        elif len(others) < len(present):
            return
        alone = (self._ours,) if compat.slots_take_lists() else self._ours
        compat.set_setting(self._name, slot_value([*others, self._ours]), default=alone)

    def remove(self) -> None:
        if self._saved is None:
            return
        present = passes_of(compat.setting(self._name))
        left = [p for p in present if p is not self._ours]
        untouched = len(left) == len(self._found) and all(
            a is b for a, b in zip(left, self._found, strict=True)
        )
        compat.restore_setting(self._saved, override=untouched)
        if not untouched and len(left) < len(present):
            compat.set_setting(self._name, slot_value(left))
            compat.restore_setting(self._saved, override=False)
        self._saved = None
