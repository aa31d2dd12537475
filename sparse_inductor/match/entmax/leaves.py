"""What stands in a graph for the functions of the entmax package.

The package's autograd Functions have `forward` as a class method, at which Dynamo breaks the graph in training; and
with `k=` they look at values. While patterns that know entmax are enabled, Dynamo traces the functions below in their
place. Each becomes one node, which the patterns replace; a node that they leave runs the package's own code. Copies of
the package in other repositories keep the class methods: those Dynamo can trace meanwhile.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from ... import compat
from ...graph.fakes import same_size

__all__ = ["show_entmax"]


def _steps(input, n_iter):
    """Steps of a bisection; one of them tells the result's shape and dtype, and takes a compile less time than all."""
    return min(n_iter, 1) if compat.asked_for_shapes(input) else n_iter


def _empty(input, dim):
    """Whether rows are empty: PyTorch refuses to look for their maximum when it runs, the package divides by their size
    when it is traced."""
    return same_size(input.shape[dim], 0)


def _of_no_scores(input, dim):
    return input * input.max(dim, keepdim=True).values


def entmax15(input, dim):
    import entmax

    return entmax.entmax15(input, dim)


def sparsemax(input, dim):
    import entmax

    return entmax.sparsemax(input, dim)


def entmax_bisect(input, alpha, dim, n_iter, ensure_sum_one):
    import entmax

    if _empty(input, dim):
        return _of_no_scores(input, dim) * alpha
    return entmax.entmax_bisect(input, alpha, dim, _steps(input, n_iter), ensure_sum_one)


def sparsemax_bisect(input, dim):
    import entmax

    if _empty(input, dim):
        return _of_no_scores(input, dim)
    return entmax.sparsemax_bisect(input, dim)


def normmax_bisect(input, alpha, dim, n_iter):
    import entmax

    if _empty(input, dim):
        return _of_no_scores(input, dim) * alpha
    return entmax.normmax_bisect(input, alpha, dim, _steps(input, n_iter))


def budget_bisect(input, budget, dim, n_iter):
    import entmax

    return entmax.budget_bisect(input, budget, dim, _steps(input, n_iter))


# The losses stay what they are, but Dynamo cannot trace them at all.


def sparsemax_loss(input, target):
    import entmax

    return entmax.sparsemax_loss(input, target)


def entmax15_loss(input, target):
    import entmax

    return entmax.entmax15_loss(input, target)


def sparsemax_bisect_loss(input, target, n_iter):
    import entmax

    return entmax.sparsemax_bisect_loss(input, target, n_iter)


def entmax_bisect_loss(input, target, alpha, n_iter):
    import entmax

    return entmax.entmax_bisect_loss(input, target, alpha, n_iter)


@torch.compiler.assume_constant_result
def _leafless():
    """Whether a leaf cannot stand where Dynamo traces: where a transform of torch.func goes through it, whose levels
    are entered meanwhile, and in a region that Dynamo closes only if it meets no leaf."""
    return compat.transforms_active() or compat.in_region_with_a_property()


def _as_without_us(X):
    """Whether Dynamo traces the package's own function: where no leaf can stand, and of a tensor that may have
    functions of its own."""
    kind = type(X)
    return _leafless() or (
        kind is not torch.Tensor and kind is not torch.nn.Parameter and kind.__name__ != "DTensor"
    )


def _traced(own, leaf, count):
    """What Dynamo traces where the package's function `own` is called: `leaf`, of its first `count` arguments; `own`
    itself where no leaf can stand."""
    signature = inspect.signature(own)
    names = tuple(signature.parameters)
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}

    def call(*args, **kwargs):
        given = {**defaults, **dict(zip(names, args)), **kwargs}
        if _as_without_us(given[names[0]]):
            return own(*args, **kwargs)
        return leaf(*[given[name] for name in names[:count]])

    traced: Any = call
    traced.__signature__ = signature
    return traced


# Each leaf with how many of the package's arguments it takes. Those left out are `k`, a hint about speed, and both of
# the last of sparsemax_bisect, which the package ignores.
_LEAVES: dict[Callable[..., Any], int] = {
    entmax15: 2,
    sparsemax: 2,
    entmax_bisect: 5,
    sparsemax_bisect: 2,
    normmax_bisect: 4,
    budget_bisect: 4,
    sparsemax_loss: 2,
    entmax15_loss: 2,
    sparsemax_bisect_loss: 3,
    entmax_bisect_loss: 4,
}

_users = 0
_undo: list[Callable[[], None]] = []


def show_entmax() -> Callable[[], None]:
    """Make the package's functions nodes of Dynamo's graphs, and class methods of autograd Functions traceable; the
    result puts back what was there.

    Several patterns may ask for it; the last one out turns it off.
    """
    global _users
    _users += 1
    if _users == 1:
        _install()
    done = False

    def put_back() -> None:
        global _users
        nonlocal done
        if done:
            return
        done = True
        _users -= 1
        if _users == 0:
            while _undo:
                _undo.pop()()

    return put_back


def _install() -> None:
    _undo.append(compat.trace_class_methods())
    try:
        import entmax
    except ImportError:
        return
    for leaf, count in _LEAVES.items():
        function = getattr(entmax, leaf.__name__, None)
        if isinstance(function, types.FunctionType):
            traced = _traced(_copy(function), leaf, count)
            _undo.append(compat.keep_in_graph(leaf))
            _undo.append(compat.substitute_in_graph(function, traced))


def _copy(function: types.FunctionType) -> Callable[..., Any]:
    """The same function, which Dynamo traces as it would without us."""
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
