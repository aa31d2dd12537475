"""What stands in a graph for the functions of the entmax package.

The package's autograd Functions have `forward` as a class method, at which Dynamo breaks the graph in training; and
with `k=` they look at values. While patterns that know entmax are enabled, Dynamo traces functions of this module in
their place. Each becomes one node, which the patterns replace; a node that they leave runs the package's own code.
Copies of the package in other repositories keep the class methods: those Dynamo can trace meanwhile.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ... import compat
from ...graph.fakes import same_size

# Each function with how many of its arguments its leaf takes. Those left out are `k`, a hint about speed, and both of
# the last of sparsemax_bisect, which the package ignores. Dynamo cannot trace the losses at all.
_LEAVES = {
    "entmax15": 2,
    "sparsemax": 2,
    "entmax_bisect": 5,
    "sparsemax_bisect": 2,
    "normmax_bisect": 4,
    "budget_bisect": 4,
    "sparsemax_loss": 2,
    "entmax15_loss": 2,
    "sparsemax_bisect_loss": 3,
    "entmax_bisect_loss": 4,
}
# How the names of the package's modules begin, in lower case, that are no entmax.
_OTHERS = {"losses": ("",), "root_finding": ("normmax", "budget")}
# Of empty rows PyTorch refuses to look for the maximum when it runs; these divide by their size when they are traced.
_DIVIDES = ("entmax_bisect", "sparsemax_bisect", "normmax_bisect")


def _leaf(name):
    """A function of this module that calls one of the package."""

    def leaf(*args):
        import entmax

        own = getattr(entmax, name)
        given = dict(zip(inspect.signature(own).parameters, args))
        x, dim = args[0], given.get("dim")
        if name in _DIVIDES and same_size(x.shape[dim], 0):
            return x * x.max(dim, keepdim=True).values * given.get("alpha", 1)
        if dim is not None and "n_iter" in given and compat.asked_for_shapes(x):
            # One step of a bisection tells the result's shape and dtype, and takes a compile less time than all.
            given["n_iter"] = min(given["n_iter"], 1)
        return own(**given)

    leaf.__name__ = leaf.__qualname__ = name
    return leaf


globals().update({name: _leaf(name) for name in _LEAVES})


@torch.compiler.assume_constant_result
def _leafless():
    """Whether a leaf cannot stand where Dynamo traces: where a transform of torch.func goes through it, whose levels
    are entered meanwhile, and where Dynamo has to end the graph."""
    return compat.transforms_active() or not compat.may_join()


def _as_without_us(X):
    """Whether Dynamo traces the package's own function: where no leaf can stand, and of a tensor that may have
    functions of its own."""
    kind = type(X)
    return _leafless() or (
        kind is not torch.Tensor and kind is not torch.nn.Parameter and kind.__name__ != "DTensor"
    )


def _traced(own, leaf, count):
    """What Dynamo traces where the package's function `own` is called: `leaf`, of its first `count` arguments; `own`
    itself where no leaf can stand, or where it refuses the arguments."""
    signature = inspect.signature(own)
    names = tuple(signature.parameters)
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}

    def call(*args, **kwargs):
        passed = {**dict(zip(names, args)), **kwargs}
        given = {**defaults, **passed}
        fits = len(passed) == len(args) + len(kwargs) and len(given) == len(names)
        if not fits or _as_without_us(given[names[0]]):
            return own(*args, **kwargs)
        return leaf(*[given[name] for name in names[:count]])

    traced: Any = call
    traced.__signature__ = signature
    return traced


def compiles_another() -> bool:
    """Whether Dynamo compiles by itself what the package has that is no entmax: its caller's graph ended at the call,
    which was reported there."""
    package = sys.modules.get("entmax")
    return package is not None and compat.current_code() in _others(package)


@functools.cache
def _others(package: types.ModuleType) -> frozenset[types.CodeType]:
    """The code of the losses, of normmax and of budgets, with that of their classes."""
    parts = [
        part
        for module, names in _OTHERS.items()
        for name, part in inspect.getmembers(getattr(package, module, None))
        if name.lower().startswith(names)
        and getattr(part, "__module__", "") == f"{package.__name__}.{module}"
    ]
    methods = [m for part in parts if isinstance(part, type) for m in vars(part).values()]
    functions = [getattr(part, "__func__", part) for part in (*parts, *methods)]
    return frozenset(f.__code__ for f in functions if isinstance(f, types.FunctionType))


_users: set[object] = set()
_undo: list[Callable[[], None]] = []


def show_entmax() -> Callable[[], None]:
    """Make the package's functions nodes of Dynamo's graphs, and class methods of autograd Functions traceable; the
    result puts back what was there.

    Several patterns may ask for it; the last one out turns it off.
    """
    if not _users:
        _install()
    user = object()
    _users.add(user)

    def put_back() -> None:
        _users.discard(user)
        while _undo and not _users:
            _undo.pop()()

    return put_back


def _install() -> None:
    _undo.append(compat.trace_class_methods())
    _undo.append(compat.part_what_fails_joined())
    try:
        import entmax
    except ImportError:
        return
    for name, count in _LEAVES.items():
        function, leaf = getattr(entmax, name, None), globals()[name]
        if isinstance(function, types.FunctionType):
            traced = _traced(_copy(function), leaf, count)
            _undo.append(compat.keep_in_graph(leaf))
            _undo.append(compat.substitute_in_graph(function, traced))


def _copy(function: types.FunctionType) -> Callable[..., Any]:
    """The same function, which Dynamo traces as it would without us."""
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
