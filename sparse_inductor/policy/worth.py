"""Policy: which recognised blocks are rewritten at once, and which run as written until measurements show a gain.

The method `worth(match, view)` of a pattern returns when its operator is faster than the operations that it replaces
(`Worth`). The operator of a pattern without that method counts as faster for all data. Under "auto", a match whose
worth depends on the share of active elements runs as written and is watched (`sparse_inductor.policy.profile`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping

from ..pattern import unknown_pattern
from .popular import Apart

POLICY_VARIABLE = "SPARSE_INDUCTOR_POLICY"
CHOICES = ("auto", "always", "never")

Policy = str | Mapping[str, str]
"""One of `CHOICES` for all patterns, or a mapping from pattern names to them; absent names have the default."""


@dataclasses.dataclass(frozen=True)
class Worth:
    """When an operator is faster than the operations that it replaces.

    below: the operator is faster if less than this share of the elements of the match's first `sparse` tensor is
    active; 1 if it is faster for all data, 0 if it never is. reason: the source of the figure, or why there is no gain.
    apart: the cost of popular elements, which the operator computes for all rows; None if the operator cannot do so. A
    match with `apart` has an attribute `popular`, the number of popular elements to use.
    """

    below: float
    reason: str = ""
    apart: Apart | None = None


def policies(policy: Policy | None, known: Iterable[str], default: str) -> dict[str, str]:
    """Return the choice for each pattern name in `known`.

    policy: the caller's argument; None stands for the environment variable SPARSE_INDUCTOR_POLICY, and for `default` if
    that is not set.

    Raises TypeError for a policy that is neither a str nor a mapping, ValueError for an unknown choice or pattern name.
    """
    argument = "policy"
    if policy is None:
        policy, argument = os.environ.get(POLICY_VARIABLE) or default, POLICY_VARIABLE
    names = list(known)
    if isinstance(policy, str):
        return dict.fromkeys(names, _choice(policy, argument))
    if not isinstance(policy, Mapping):
        raise TypeError(
            f"policy takes {_listed(CHOICES)}, or a dict of pattern names to them, got {policy!r}"
        )
    for name in policy:
        if name not in names:
            raise unknown_pattern("policy", name, names)
    chosen = {name: _choice(one, f"policy[{name!r}]") for name, one in policy.items()}
    return {name: chosen.get(name, default) for name in names}


def _choice(value: object, argument: str) -> str:
    if value not in CHOICES:
        raise ValueError(f"{argument} takes {_listed(CHOICES)}, got {value!r}")
    return str(value)


def _listed(values: Iterable[str]) -> str:
    *first, last = map(repr, values)
    return f"{', '.join(first)} or {last}"
