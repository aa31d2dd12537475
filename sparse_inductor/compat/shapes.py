"""The shape environment of a compile: its knowledge of symbolic sizes, and how to restore an earlier state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any

# These affect no decisions: caches, logs, and recordings or validators of a run.
_NO_STATE = frozenset(
    ("events", "fx_node_cache", "graph", "name_to_node", "tracked_fakes", "validator")
)
# Caches are valid for one value of these counters, so the counters must never return to an earlier value.
_VERSIONS = frozenset(("_version_counter", "_replacements_version_counter"))


def shape_env_of(values: Iterable[Any]) -> Any | None:
    """Return the shape environment of the first fake tensor or symbolic size among `values`."""
    for value in values:
        if (mode := getattr(value, "fake_mode", None)) is not None:
            return mode.shape_env
        if (env := getattr(getattr(value, "node", None), "shape_env", None)) is not None:
            return env
    return None


def discarding_unbacked(env: Any | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose new unbacked symbols (data-dependent sizes) are discarded, because their values are traced
    again later."""
    return contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()


def is_data_dependent(error: BaseException) -> bool:
    """Whether the error is due to a decision that depends on a data-dependent size."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)


class ShapeState:
    """The saved state of a shape environment: guards, ranges, replacements, symbols, deferred assertions."""

    def __init__(self, env: Any | None) -> None:
        self._env = env
        self._held = {
            name: _copied(value)
            for name, value in vars(env or _Nothing()).items()
            if name not in _NO_STATE | _VERSIONS and isinstance(value, _STATE)
        }
        self._counted = [n for n, value in self._held.items() if isinstance(value, _CONTAINERS)]
        self._mark = self._current_mark()

    def changed(self) -> bool:
        """Whether guards, symbols or replacements have been added since."""
        return self._mark != self._current_mark()

    def restore(self) -> None:
        """Restore the saved state."""
        env = self._env
        if env is None:
            return
        for name, was in self._held.items():
            now = getattr(env, name)
            if type(now) is not type(was) or not isinstance(was, _CONTAINERS):
                setattr(env, name, _copied(was))
                continue
            now.clear()
            if isinstance(now, MutableMapping):
                now.update(_copied(was))
            elif isinstance(now, MutableSet):
                for entry in was:
                    now.add(entry)
            else:
                now.extend(was)
        for name in _VERSIONS & vars(env).keys():
            setattr(env, name, getattr(env, name) + 1)
        self._mark = self._current_mark()

    def _current_mark(self) -> tuple[Any, ...]:
        held = vars(self._env or _Nothing())
        return (
            [*map(len, map(held.__getitem__, self._counted))],
            held.get("unbacked_symint_counter"),
            held.get("num_deferred_runtime_asserts"),
        )


class _Nothing:
    """A placeholder for a missing environment."""


_CONTAINERS = (MutableMapping, MutableSequence, MutableSet)
_STATE = (*_CONTAINERS, int, bool, tuple, type(None))


def _copied(value: Any) -> Any:
    """Return a copy of a container, including the lists in a mapping; other values are returned unchanged."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, entry in copied.items():
            if type(entry) is list:
                copied[key] = list(entry)
        return copied
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value
