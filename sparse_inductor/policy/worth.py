"""Policy: which recognised blocks are rewritten at once, and which run as written until it is known that they gain.

A pattern says by `worth(match, view)` when its operator is faster than what it replaces (`Worth`); a pattern without
that method is faster whatever the tensors hold. Under "auto" a match whose worth depends on how many elements are
active is left as written and watched (`sparse_inductor.policy.profile`).
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
"""One of `CHOICES` for all patterns, or one for each pattern name; a name that is absent has the default."""


@dataclasses.dataclass(frozen=True)
class Worth:
    """When an operator is faster than the operations that it replaces.

    below: it is where less than this share of the elements of the match's first `sparse` tensor is active; 1 where it
    is whatever they hold, 0 where it never is. reason: where the figure comes from, or why there is no gain. apart:
    what popular elements of a row cost, which the operator takes for all rows; None where it takes none. Such a match
    has an attribute `popular`, how many there are to be.
    """

    below: float
    reason: str = ""
    apart: Apart | None = None


def policies(policy: Policy | None, known: Iterable[str], default: str) -> dict[str, str]:
    """The choice for each pattern name in `known`.

    policy: what the caller asked for; None is the environment variable SPARSE_INDUCTOR_POLICY, and `default` where that
    is not set.

    Raises TypeError for something that is neither text nor a mapping, ValueError for an unknown choice or pattern name.
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
