"""Counts the active elements of tensors in a compiled graph, in a sample of rows, at the calls that are due.

At all other calls the operator returns at once: it launches nothing, and Inductor has no kernel to compile for it. The
code that Inductor generates bypasses the dispatcher, which would take ten times as long.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from .. import compat

ROWS = 128
"""Rows of a call that are counted; twice as many where each element of a row has its own counter."""


class _Call(threading.local):
    due = False


call = _Call()
"""`due`: whether the graph that this thread runs next counts its blocks. The graph's guard sets it."""


def counts(
    x: Tensor, dim: int, positive: bool, apart: bool, most: int | None = None
) -> tuple[Tensor, int]:
    """Return the numbers of active elements of x, and how many elements each of them covers.

    A row extends along `dim`. An element is active if it is not 0, with `positive` if it is above 0. apart: one number
    for each of the N elements of a row, first over the even and then over the odd rows: [2 * N]; otherwise one number
    for all elements: [1]. most: count in at most this many rows, evenly spaced.
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
    """Add the result of `counts` for x to counters[:, first : first + number], if this call is due."""
    # Operations that are recorded into a CUDA graph count at every replay.
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
    # Accepts any strides: otherwise Inductor would copy x to the strides that the graph was traced with.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_lib.impl("count_active", count, "CompositeExplicitAutograd")
# Not by register_fake, which looks up the source of its caller and so calls stat for every module of the process.
_lib.impl("count_active", lambda *_: None, "Meta")
operator = torch.ops.sparse_inductor.count_active.default


@functools.cache
def install() -> None:
    """Make Inductor generate direct calls of `count` from now on."""
    made = f"from {__name__} import count", "sparse_inductor_count", "count"
    compat.call_extern_kernels("torch.ops.sparse_inductor.count_active.default", lambda node: made)
