"""Patterns: their interface, and the registry of all known patterns.

A pattern recognises one family of subgraphs and replaces them by an operator. It is any object with
the attributes of `Pattern`. Built-in patterns are files of the `patterns/` folder, each ending in

    PATTERN = MyPattern()

Others come from installed packages (entry-point group `sparse_inductor.patterns`, each entry a
pattern object) or from `sparse_inductor.register(pattern)`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar, runtime_checkable

from torch import fx

from .notices import warn

if TYPE_CHECKING:
    from .graph.view import GraphView

__all__ = ["Example", "Match", "Miss", "Pattern", "Sparse", "register", "registered", "unregister"]

ENTRY_POINTS = "sparse_inductor.patterns"


class Miss(NamedTuple):
    """A subgraph that nearly matches. `reason` is in the user's terms; `node` is where the match failed (default: the
    anchor)."""

    reason: str
    node: fx.Node | None = None


class Sparse(NamedTuple):
    """A tensor of the program as written that is mostly zeros, which the operator skips.

    `explain` counts its elements that are not zero when it runs the program. `what` names its elements
    ("probabilities"); a row extends along `dim`; `result` is the tensor's index if the node has several results. With
    `positive`, elements below 0 count as zeros. `reader` is the product that reads the tensor; autocast may cast the
    tensor to the dtype of that product.
    """

    what: str
    node: fx.Node
    dim: int = -1
    result: int | None = None
    positive: bool = False
    reader: fx.Node | None = None


class Match(Protocol):
    """A subgraph that was recognised and proved replaceable. Nothing has been changed yet.

    Optional attributes that the checks read (`sparse_inductor.graph.checks`):

    - `reads`: tensors that the operator reads further up than the replaced nodes do, each with the node that reads it
      in the program. Required for such an operator: a write in between would be missed otherwise.
    - `at`: the node before which the operator is inserted, instead of the anchor.
    - `ends`: further replaced nodes whose results the operator provides.
    - `open`: replaced nodes that may be read elsewhere, for `without_outside_readers`.
    - `kept`: replaced nodes whose write stays.
    - `settled`: replaced nodes whose gradient, taken together as one function, is known to equal that of the operator,
      so that each of them is not checked.

    Optional attributes for the policy, `explain` and `verify`:

    - `sparse`: a sequence of `Sparse`.
    - `popular`: the number of popular elements to use, if the pattern's `Worth` has `apart`.
    - `top`: true if the results are those of a topk, for which `verify` accepts any choice among equal values.
    - `apart`: the reason why `verify` cannot compare the nodes with the operator, for example because their gradients
      belong to different tensors.
    """

    pattern: str
    op: str
    anchor: fx.Node
    matched_nodes: tuple[fx.Node, ...]
    """The nodes that the op replaces, including the anchor, in graph order."""

    @property
    def inputs(self) -> tuple[fx.Node, ...]: ...
    @property
    def bytes_saved(self) -> int | None:
        """Bytes that autograd no longer keeps for the backward; None if that is not known."""

    @property
    def note(self) -> str: ...

    def replace(self) -> None:
        """Insert the op and redirect the readers. The driver erases dead nodes afterwards."""


@runtime_checkable
class Pattern(Protocol):
    """One family of subgraphs and the operator that replaces it.

    An optional attribute is `signs`: a set of canonical names. A graph with a match or a near miss of the pattern
    contains at least one of them; `match` is not called for other graphs.

    Optional methods:

    - `resolve(matches, view) -> (accepted, misses)`: chooses among matches of this pattern that share nodes in one
      graph, or merges them. Without it, all matches are accepted.
    - `worth(match, view) -> Worth` (`sparse_inductor.policy.worth`): when the operator is faster than the operations
      that it replaces, for the policy "auto". Without it, the operator counts as always faster.
    - `setup() -> Callable[[], None]`: called by `enable()` (not by `options()`, which acts on one compile only) to
      configure Dynamo while the pattern is on, for example to trace another function in place of one. It must have no
      effect that eager code could notice: no flag, no patch, no import hook. `disable()` calls its result, which undoes
      the configuration.
    """

    name: str
    op: str
    summary: str
    """One line: before -> after."""
    anchors: frozenset[str]
    """Canonical names of the nodes for which `match` is called."""
    examples: Sequence[Example]
    near_misses: Sequence[Example]

    def match(self, node: fx.Node, view: GraphView) -> Match | Miss | None:
        """Recognise the subgraph that ends in `node`; None if it does not even nearly belong to this family.

        Must not change the graph. `view` is a `sparse_inductor.graph.view.GraphView`.
        """


class Example(NamedTuple):
    """A program that a pattern rewrites, or (with `reason`) one that it declines.

    `build()` returns the function to compile and its arguments; `reason` is a part of the reported
    reason.
    """

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    training: bool = False
    reason: str = ""


P = TypeVar("P", bound=Pattern)

_lock = threading.RLock()
_patterns: dict[str, Pattern] = {}
_origin: dict[str, str] = {}  # pattern name -> where it came from, for messages
_discovered = False


def register(pattern: P, *, replace: bool = False) -> P:
    """Add a pattern for this process; it takes effect at the next `enable()` or `options()`.

    Returns the pattern. Registering the same object twice does nothing; `replace=True` replaces a
    pattern of the same name (for example when a notebook cell is run again).

    Raises TypeError if `pattern` lacks a required attribute of `Pattern`, ValueError if its name is
    taken.
    """
    registered()
    with _lock:
        _add(
            pattern,
            f"register() of {type(pattern).__module__}.{type(pattern).__qualname__}",
            replace,
        )
    return pattern


def unregister(name: str) -> None:
    """Remove a pattern. Raises KeyError if no pattern has that name."""
    with _lock:
        del _patterns[name]
        del _origin[name]


def registered() -> dict[str, Pattern]:
    """All known patterns by name: built-in, from entry points, from `register`.

    The first call imports them. Raises TypeError or ValueError for a bad or a duplicate pattern. An
    entry point that cannot be imported is left out with a warning, so that another package cannot
    break this one.
    """
    global _discovered
    with _lock:
        if not _discovered:
            _discovered = True  # set first: a pattern's module may call this function
            try:
                _discover()
            except BaseException:
                _discovered = False
                _patterns.clear()
                _origin.clear()
                raise
        return dict(_patterns)


def _discover() -> None:
    from . import patterns

    for info in sorted(pkgutil.iter_modules(patterns.__path__), key=lambda i: i.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{patterns.__name__}.{info.name}")
        found = getattr(module, "PATTERN", None)
        if found is not None:
            _add(found, f"{module.__name__} ({module.__file__})")
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
        except Exception as error:
            warn(
                f"sparse_inductor: pattern {entry.name!r} of entry point {entry.value!r} is left "
                f"out, it cannot be imported: {type(error).__name__}: {error}",
                stacklevel=4,
            )
            continue
        _add(found, f"entry point {entry.name} = {entry.value}")


def _add(pattern: Any, origin: str, replace: bool = False) -> None:
    _validate(pattern, origin)
    old = _patterns.get(pattern.name)
    if old is pattern:
        return
    if old is not None and not replace:
        raise ValueError(
            f"pattern name {pattern.name!r} is taken: it was defined by {_origin[pattern.name]} "
            f"and again by {origin}"
        )
    _patterns[pattern.name] = pattern
    _origin[pattern.name] = origin


def _validate(pattern: Any, origin: str) -> None:
    def fail(what: str) -> NoReturn:
        raise TypeError(f"not a pattern ({origin}): {what}")

    if isinstance(pattern, type):
        fail(f"{pattern.__name__} is a class; an instance of it is wanted")
    for attribute in ("name", "op", "summary"):
        value = getattr(pattern, attribute, None)
        if not isinstance(value, str) or not value:
            fail(f"`{attribute}` must be a non-empty str, got {value!r}")
    if not pattern.name.isidentifier():
        fail(f"`name` must be an identifier, got {pattern.name!r}")
    if "\n" in pattern.summary:
        fail(f"`summary` must be one line, got {pattern.summary!r}")
    for attribute in ("anchors", "signs") if hasattr(pattern, "signs") else ("anchors",):
        value = getattr(pattern, attribute, None)
        if (
            not isinstance(value, (set, frozenset))
            or not value
            or not all(isinstance(name, str) for name in value)
        ):
            fail(
                f"`{attribute}` must be a non-empty frozenset of canonical op names, got {value!r}"
            )
    if not callable(getattr(pattern, "match", None)):
        fail("`match(node, view)` is missing")
    for attribute in ("examples", "near_misses"):
        value = getattr(pattern, attribute, ())
        if isinstance(value, str) or not isinstance(value, Iterable):
            fail(f"`{attribute}` must be a sequence of Example, got {value!r}")
        for example in value:
            if not isinstance(example, Example):
                fail(f"`{attribute}` must hold Example objects, got {example!r}")
    for optional in ("resolve", "setup", "worth"):
        if not callable(getattr(pattern, optional, callable)):
            fail(f"`{optional}` must be callable")
