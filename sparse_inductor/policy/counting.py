"""Counts the active elements of what a compiled graph computes, in a sample of rows, at the calls that are due.

At all others the operator returns at once: nothing is launched, and Inductor has no kernel to compile for it. The code
that Inductor generates calls it past the dispatcher, which would take ten times as long.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from .. import compat

ROWS = 128
"""Rows of a call that are counted; twice as many where each element of a row is counted for itself."""


class _Call(threading.local):
    due = False


call = _Call()
"""Whether the blocks of the graph whose guard was asked last in this thread, which it runs next, are counted."""


def counts(
    x: Tensor, dim: int, positive: bool, apart: bool, most: int | None = None
) -> tuple[Tensor, int]:
    """The number of active elements of x, and of how many each is the number.

    Rows lie along `dim`; with `positive` elements below 0 are not active. apart: a number for each element of a row, of
    every other row and of those between them: [2 * N]; else one of all elements: [1]. most: of so many rows, evenly
    spaced.
    """
    rows = x.movedim(dim, -1).flatten(0, -2) if x.dim() > 1 else x.view(1, -1)
    rows = rows[:: max(1, len(rows) // most)][:most] if most else rows
    if apart:
        rows = rows.expand(2, -1) if len(rows) == 1 else rows[: len(rows) // 2 * 2]
    active = rows > 0 if positive else rows != 0
    if not apart:
        return active.sum().view(1), active.numel()
    halves = active.unflatten(0, (len(active) // 2, 2))
    return halves.sum(0).flatten(), len(halves)


def count(x: Tensor, counters: Tensor, first: int, number: int, dim: int, positive: bool) -> None:
    """Add what `counts` says of x to counters[:, first : first + number], if that is due."""
    # What a CUDA graph records is counted whenever that runs.
    if not call.due and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    apart = number > 1
    active, total = counts(x, dim, positive, apart, 2 * ROWS if apart else ROWS)
    own = counters.narrow(1, first, number)
    own[0] += active
    own[1] += total


_lib = torch.library.Library("sparse_inductor", "FRAGMENT")
_lib.define(
    "count_active(Tensor x, Tensor(a!) counters, int first, int number, int dim, bool positive) -> ()",
    # Of any strides: Inductor would copy x for those that the graph was traced with.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_lib.impl("count_active", count, "CompositeExplicitAutograd")
# Not by register_fake, which asks for the source of its caller: a stat of every module of the process.
_lib.impl("count_active", lambda *_: None, "Meta")
operator = torch.ops.sparse_inductor.count_active.default


@functools.cache
def install() -> None:
    """Have Inductor generate calls of `count` from now on."""
    made = f"from {__name__} import count", "sparse_inductor_count", "count"
    compat.call_extern_kernels("torch.ops.sparse_inductor.count_active.default", lambda node: made)
