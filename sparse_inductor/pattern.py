"""What a pattern is, and where patterns come from.

A pattern recognises one family of subgraphs and puts an operator in its place. It is any object
with the attributes of `Pattern`; built-in ones are the files of the `patterns/` folder, each ending
in

    PATTERN = MyPattern()

Others come from installed packages (entry-point group `sparse_inductor.patterns`, each entry a
pattern object) or from `sparse_inductor.register(pattern)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import pkgutil
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

from torch import fx

from .notices import warn

__all__ = ["Example", "Match", "Miss", "Pattern", "Sparse", "register", "registered", "unregister"]

ENTRY_POINTS = "sparse_inductor.patterns"


@dataclasses.dataclass(frozen=True)
class Miss:
    """Nearly a match. `reason` is in the user's terms; `node` is where it failed (default: the
    anchor)."""

    reason: str
    node: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class Sparse:
    """A tensor of the program as written that is mostly zeros, whose zeros the operator skips.

    `explain` counts in it when it runs the program. `what` names its elements ("probabilities"), `dim` is the dimension
    that a row lies along, `result` which of the node's results it is. With `positive` elements below 0 count as zeros.
    `reader` is the product that it is an operand of, in whose dtype autocast may have it.
    """

    what: str
    node: fx.Node
    dim: int = -1
    result: int | None = None
    positive: bool = False
    reader: fx.Node | None = None


class Match(Protocol):
    """A subgraph that was recognised and proved replaceable. Nothing has been changed yet.

    A match may have `sparse`, a sequence of `Sparse`; and `top`, true where its results are those of a topk, of
    which `verify` accepts any choice among equal values; and `apart`, why `verify` cannot compare its nodes with the
    operator: gradients that go to other tensors, say.
    """

    pattern: str
    op: str
    anchor: fx.Node
    matched_nodes: tuple[fx.Node, ...]
    """The nodes that the op replaces, in graph order, the anchor among them."""

    @property
    def inputs(self) -> tuple[fx.Node, ...]: ...
    @property
    def bytes_saved(self) -> int | None:
        """Bytes that autograd no longer keeps for the backward; None where that is not known."""

    @property
    def note(self) -> str: ...

    def replace(self) -> None:
        """Insert the op and redirect the readers. The driver erases what is dead afterwards."""


@runtime_checkable
class Pattern(Protocol):
    """One family of subgraphs and the operator that replaces it.

    An optional attribute, `signs`: canonical names of which a graph has at least one where the pattern has anything to
    say of it, be it a near miss. It is asked nothing about other graphs.

    Optional methods:

    - `resolve(matches, view) -> (accepted, misses)`: chooses among matches of this pattern in one
      graph that share
      nodes, or merges them. Without it all are accepted.
    - `worth(match, view) -> Worth` (`sparse_inductor.policy.worth`): when the operator is faster than what it replaces,
      for the policy "auto". Without it always.
    - `setup() -> Callable[[], None]`: called by `enable()` (not by `options()`, which acts on one
      compile only) for what Dynamo has to know while the pattern is on, such as a function to trace
      in another's place. Nothing that eager code could notice: no flag, no patch, no import hook.
      The result puts everything back and is called by `disable()`.
    """

    name: str
    op: str
    summary: str
    """One line: before -> after."""
    anchors: frozenset[str]
    """Canonical names of the nodes that `match` is asked about."""
    examples: Sequence[Example]
    near_misses: Sequence[Example]

    def match(self, node: fx.Node, view: Any) -> Match | Miss | None:
        """Recognise the subgraph that ends in `node`; None when it is not of this family, not even
        nearly.

        Must not change the graph. `view` is a `sparse_inductor.graph.view.GraphView`.
        """


@dataclasses.dataclass(frozen=True)
class Example:
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
    """Add a pattern for this process; it takes part from the next `enable()` or `options()` on.

    Returns the pattern. Registering the same object twice does nothing; `replace=True` lets a new
    object take the place of an older one of the same name (a notebook cell that is run again).

    Raises TypeError when `pattern` lacks something that `Pattern` asks for, ValueError when its
    name is taken.
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
    """Take a pattern out again. Raises KeyError when there is none of that name."""
    with _lock:
        del _patterns[name]
        del _origin[name]


def registered() -> dict[str, Pattern]:
    """All known patterns by name: built-in, from entry points, from `register`.

    The first call imports them. Raises TypeError or ValueError for a bad or a duplicate pattern. An
    entry point that cannot be imported is left out with a warning: somebody else's package must not
    take this one down.
    """
    global _discovered
    with _lock:
        if not _discovered:
            _discovered = True  # first: a pattern's module may itself ask for the registry
            try:
                _discover()
            except BaseException:
                _discovered = False
                _patterns.clear()
                _origin.clear()
                raise
        return dict(_patterns)


def unknown_pattern(argument: str, name: object, known: Iterable[str]) -> ValueError:
    """The error of an argument that names a pattern which does not exist."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    return ValueError(
        f"{argument}: there is no pattern {name!r}{hint} known patterns: {', '.join(names) or 'none'}"
    )


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
