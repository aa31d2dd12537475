"""Leaf functions that stand in a graph for the functions of the entmax package.

The `forward` of the package's autograd Functions is a class method, at which Dynamo breaks the graph in training, and
with `k=` it depends on values. While patterns for entmax are enabled, Dynamo therefore traces functions of this module
instead. Each becomes one node, which the patterns replace; a node that they leave runs the package's own code. Copies
of the package in other repositories keep their class methods, which Dynamo can trace during that time.
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

# Each function with the number of arguments that its leaf takes. The omitted arguments are `k`, a hint about speed, and
# the last two of sparsemax_bisect, which the package ignores. Dynamo cannot trace the losses at all.
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
# Modules of the package, and prefixes (in lower case) of the names in them that are no entmax.
_OTHERS = {"losses": ("",), "root_finding": ("normmax", "budget")}
# For empty rows, PyTorch raises an error when it runs max(). These functions already divide by the row size when they
# are traced.
_DIVIDES = ("entmax_bisect", "sparsemax_bisect", "normmax_bisect")


def _leaf(name):
    """A function of this module that calls the function of the package with this name."""

    def leaf(*args):
        import entmax

        own = getattr(entmax, name)
        given = dict(zip(inspect.signature(own).parameters, args))
        x, dim = args[0], given.get("dim")
        if name in _DIVIDES and same_size(x.shape[dim], 0):
            return x * x.max(dim, keepdim=True).values * given.get("alpha", 1)
        if dim is not None and "n_iter" in given and compat.asked_for_shapes(x):
            # One bisection step is enough for the shape and dtype of the result, and makes compilation faster.
            given["n_iter"] = min(given["n_iter"], 1)
        return own(**given)

    leaf.__name__ = leaf.__qualname__ = name
    return leaf


globals().update({name: _leaf(name) for name in _LEAVES})


@torch.compiler.assume_constant_result
def _leafless():
    """Whether Dynamo cannot use a leaf here: inside a transform of torch.func, because its levels are active while
    Dynamo traces, and where Dynamo has to end the graph."""
    return compat.transforms_active() or not compat.may_join()


def _as_without_us(X):
    """Whether Dynamo traces the package's own function: if it cannot use a leaf, and for tensor subclasses that may
    override functions."""
    kind = type(X)
    return _leafless() or (
        kind is not torch.Tensor and kind is not torch.nn.Parameter and kind.__name__ != "DTensor"
    )


def _traced(own, leaf, count):
    """The function that Dynamo traces in place of the package's function `own`. It calls `leaf` with the first `count`
    arguments, or `own` itself if a leaf cannot be used or the arguments do not fit its signature."""
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
    """Whether the frame that Dynamo is compiling is a function of the package that is no entmax. The graph of the
    caller then ended at the call, where the reason was reported."""
    package = sys.modules.get("entmax")
    return package is not None and compat.current_code() in _others(package)


@functools.cache
def _others(package: types.ModuleType) -> frozenset[types.CodeType]:
    """The code objects of the losses, of normmax and of budgets, including those of their classes."""
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
    """Make the package's functions nodes of Dynamo's graphs, and class methods of autograd Functions traceable. Returns
    a function that undoes this.

    Several patterns may call it. It is undone when all of them have called the function that they got.
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
    """A copy of a function, which Dynamo traces as it would trace the function without this module."""
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
