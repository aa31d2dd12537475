"""What a caller of `enable` chooses: patterns by name, and a policy for each, also by environment variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping

POLICY_VARIABLE = "SPARSE_INDUCTOR_POLICY"
CHOICES = ("auto", "always", "never")

Names = str | Iterable[str] | None
Policy = str | Mapping[str, str]
"""One of `CHOICES` for all patterns, or a mapping from pattern names to them; absent names have the default."""


def pattern_names(value: Names, argument: str, known: Iterable[str]) -> frozenset[str]:
    """Return the pattern names in an argument: an iterable of str, or a str with commas.

    Raises TypeError for anything else, ValueError for a name that is not in `known`.
    """
    if value is None:
        return frozenset()
    if not isinstance(value, Iterable):
        raise TypeError(f"{argument} takes pattern names, got {value!r}")
    listed = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"{argument} takes pattern names, got {name!r}")
    names = frozenset(n for n in listed if n)
    for name in sorted(names.difference(known)):
        raise _unknown_pattern(argument, name, known)
    return names


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
            raise _unknown_pattern("policy", name, names)
    chosen = {name: _choice(one, f"policy[{name!r}]") for name, one in policy.items()}
    return {name: chosen.get(name, default) for name in names}


def _choice(value: object, argument: str) -> str:
    if value not in CHOICES:
        raise ValueError(f"{argument} takes {_listed(CHOICES)}, got {value!r}")
    return str(value)


def _listed(values: Iterable[str]) -> str:
    *first, last = map(repr, values)
    return f"{', '.join(first)} or {last}"


def _unknown_pattern(argument: str, name: object, known: Iterable[str]) -> ValueError:
    """Return the error for an argument that names an unknown pattern."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    return ValueError(
        f"{argument}: there is no pattern {name!r}{hint} known patterns: {', '.join(names) or 'none'}"
    )
