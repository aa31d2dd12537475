"""What stands in a graph for the functions of the entmax package.

The package's autograd Functions have `forward` as a class method, at which Dynamo breaks the graph in training; and
with `k=` they look at values. While patterns that know entmax are enabled, Dynamo traces the functions below in their
place. Each becomes one node, which the patterns replace; a node that they leave runs the package's own code. Copies of
the package in other repositories keep the class methods: those Dynamo can trace meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import compat

__all__ = ["show_entmax"]


def entmax15(input, dim):
    import entmax

    return entmax.entmax15(input, dim)


def sparsemax(input, dim):
    import entmax

    return entmax.sparsemax(input, dim)


def entmax_bisect(input, alpha, dim, n_iter, ensure_sum_one):
    import entmax

    return entmax.entmax_bisect(input, alpha, dim, n_iter, ensure_sum_one)


def sparsemax_bisect(input, dim):
    import entmax

    return entmax.sparsemax_bisect(input, dim)


def normmax_bisect(input, alpha, dim, n_iter):
    import entmax

    return entmax.normmax_bisect(input, alpha, dim, n_iter)


def budget_bisect(input, budget, dim, n_iter):
    import entmax

    return entmax.budget_bisect(input, budget, dim, n_iter)


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


# What Dynamo traces: the package's signatures. `k` is a hint about speed, and the package's
# sparsemax_bisect ignores both of its last arguments.


def _entmax15(X, dim=-1, k=None):
    return entmax15(X, dim)


def _sparsemax(X, dim=-1, k=None):
    return sparsemax(X, dim)


def _entmax_bisect(X, alpha=1.5, dim=-1, n_iter=50, ensure_sum_one=True):
    return entmax_bisect(X, alpha, dim, n_iter, ensure_sum_one)


def _sparsemax_bisect(X, dim=-1, n_iter=50, ensure_sum_one=True):
    return sparsemax_bisect(X, dim)


def _normmax_bisect(X, alpha=2, dim=-1, n_iter=50):
    return normmax_bisect(X, alpha, dim, n_iter)


def _budget_bisect(X, budget=2, dim=-1, n_iter=50):
    return budget_bisect(X, budget, dim, n_iter)


def _sparsemax_loss(X, target, k=None):
    return sparsemax_loss(X, target)


def _entmax15_loss(X, target, k=None):
    return entmax15_loss(X, target)


def _sparsemax_bisect_loss(X, target, n_iter=50):
    return sparsemax_bisect_loss(X, target, n_iter)


def _entmax_bisect_loss(X, target, alpha=1.5, n_iter=50):
    return entmax_bisect_loss(X, target, alpha, n_iter)


_TRACED: dict[str, Callable[..., Any]] = {
    "entmax15": _entmax15,
    "sparsemax": _sparsemax,
    "entmax_bisect": _entmax_bisect,
    "sparsemax_bisect": _sparsemax_bisect,
    "normmax_bisect": _normmax_bisect,
    "budget_bisect": _budget_bisect,
    "sparsemax_loss": _sparsemax_loss,
    "entmax15_loss": _entmax15_loss,
    "sparsemax_bisect_loss": _sparsemax_bisect_loss,
    "entmax_bisect_loss": _entmax_bisect_loss,
}
_LEAVES = (
    entmax15,
    sparsemax,
    entmax_bisect,
    sparsemax_bisect,
    normmax_bisect,
    budget_bisect,
    sparsemax_loss,
    entmax15_loss,
    sparsemax_bisect_loss,
    entmax_bisect_loss,
)

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
    for leaf in _LEAVES:
        torch.compiler.allow_in_graph(leaf)
    for name, traced in _TRACED.items():
        function = getattr(entmax, name, None)
        if function is not None:
            _undo.append(compat.substitute_in_graph(function, traced))
