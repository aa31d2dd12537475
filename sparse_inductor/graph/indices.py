"""Items of an index, as `x[...]` takes it, and of arguments that may be one item or several."""

from __future__ import annotations

from typing import Any


def listed(x: Any) -> list[Any]:
    """The items of a tuple or list; anything else is the only item."""
    return list(x) if isinstance(x, (tuple, list)) else [x]


def sole(x: Any) -> Any:
    """The item of a tuple or list of one; anything else as it is."""
    return x[0] if isinstance(x, (tuple, list)) and len(x) == 1 else x


def items_of(index: Any) -> tuple[Any, ...]:
    """The items of an index, which may be a single one."""
    return index if isinstance(index, tuple) else (index,)


def expanded_index(index: Any, ndim: int) -> list[Any] | None:
    """An index as one item for each of `ndim` axes (and None for new ones); None where it has too many."""
    items = list(items_of(index))
    missing = ndim - sum(i is not None and i is not Ellipsis for i in items)
    if missing < 0:
        return None
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    return items[:at] + [slice(None)] * missing + items[at + 1 :]


def is_full(item: Any) -> bool:
    """Whether an item leaves its axis whole, or is none of an axis."""
    return item is None or item is Ellipsis or (isinstance(item, slice) and item == slice(None))


def only_new_axes(index: Any) -> bool:
    """Whether an index takes everything."""
    return all(map(is_full, items_of(index)))


def only_slices(index: Any) -> bool:
    """Whether an index takes elements in their order."""
    return all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in items_of(index))
