"""When an operator is faster than the operations that it replaces.

The method `worth(match, view)` of a pattern returns that (`Worth`). The operator of a pattern without the method counts
as faster for all data. Under the policy "auto", a match whose worth depends on the share of active elements runs as
written and is watched (`sparse_inductor.policy.profile`).
"""

from __future__ import annotations

from typing import NamedTuple

from .popular import Apart


class Worth(NamedTuple):
    """When an operator is faster than the operations that it replaces.

    below: the operator is faster if less than this share of the elements of the match's first `sparse` tensor is
    active; 1 if it is faster for all data, 0 if it never is. reason: the source of the figure, or why there is no gain.
    apart: the cost of popular elements, which the operator computes for all rows; None if the operator cannot do so. A
    match with `apart` has an attribute `popular`, the number of popular elements to use.
    """

    below: float
    reason: str = ""
    apart: Apart | None = None
