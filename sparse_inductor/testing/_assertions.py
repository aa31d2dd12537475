"""Assertions about the rewrites of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..explanation.explain import Explanation, explained
from ..pattern import Pattern, register, registered, unregister
from ._messages import failure, nearest, shown_rewrites


def assert_rewrites(
    fn: Callable[..., Any] | Explanation,
    args: Sequence[Any] = (),
    expected: Mapping[str, int] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """Assert that compiling `fn(*args)` rewrites each named pattern the expected number of times.

    Args:
        fn: a function or module, compiled or not, which is captured in its current mode (`train`, `eval`, grad mode);
            or the result of `explain` or `assert_matches_reference`, to avoid a second capture.
        args, kwargs: the arguments of the call.
        expected: pattern name -> number of rewrites. Other patterns may rewrite any number of times. If it is empty
            (`{}` or None), no pattern may rewrite anything.

    Returns the explanation, for further checks. Raises AssertionError, ValueError for an unknown pattern name, and any
    error of `fn`.
    """
    expected = {} if expected is None else expected
    if not isinstance(expected, Mapping):
        raise TypeError(f"expected must be a dict of pattern names to numbers, got {expected!r}")
    for name in expected:
        known(name)
    explanation = _explained(fn, args, kwargs)
    found = Counter(r.pattern for r in explanation.report.rewrites)
    wrong = {name: n for name, n in expected.items() if found[name] != n}
    if not expected and found:
        raise AssertionError(
            failure("expected no rewrite", [shown_rewrites(explanation, list(found))], explanation)
        )
    if wrong:
        wanted = ", ".join(f"{_times(n)} of {name}, got {found[name]}" for name, n in wrong.items())
        details = []
        for name, n in wrong.items():
            if found[name]:
                details.append(shown_rewrites(explanation, [name]))
            if found[name] < n:
                details.append(nearest(explanation, known(name)))
        raise AssertionError(failure(f"expected {wanted}", details, explanation))
    return explanation


def assert_not_rewritten(
    fn: Callable[..., Any] | Explanation,
    args: Sequence[Any] = (),
    pattern: str | None = None,
    *,
    reason: str | None = None,
    at: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """Assert that a pattern (None: any pattern) does not rewrite `fn(*args)`, and that the report gives the reason.

    Args:
        fn, args, kwargs: as in `assert_rewrites`.
        reason: a substring of the reported reason. If `reason` and `at` are None, no near miss is required.
        at: a substring of the source line to which the near miss refers.

    Returns the explanation. Raises AssertionError, and ValueError for an unknown pattern name.
    """
    names = [known(pattern).name] if pattern is not None else list(registered())
    explanation = _explained(fn, args, kwargs)
    if any(r.pattern in names for r in explanation.report.rewrites):
        shown = shown_rewrites(explanation, names)
        raise AssertionError(failure(f"expected no rewrite{_of(pattern)}", [shown], explanation))
    if reason is None and at is None:
        return explanation
    misses = [m for m in explanation.report.near_misses if m.pattern in names]
    if not any((reason or "") in m.reason and (at or "") in m.source for m in misses):
        wanted = " ".join(
            text
            for text in (
                f"because {reason!r}" if reason is not None else "",
                f"at a line with {at!r}" if at is not None else "",
            )
            if text
        )
        raise AssertionError(
            failure(
                f"expected a near miss{_of(pattern)} {wanted}",
                [nearest(explanation, known(name)) for name in names],
                explanation,
            )
        )
    return explanation


def assert_graph(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    expected: str = "",
    *,
    before: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    skip: int = 0,
) -> None:
    """Assert that the graph after rewriting (with `before`: as captured) has this text.

    `expected` is a string literal in the test. With `EXPECTTEST_ACCEPT=1` in the environment, the run inserts or
    updates it. The text has one line per node with its name, dtype and shape, and call; an empty line separates graphs.
    `skip` is the number of your own functions between the literal and this call. Requires `expecttest`.
    """
    try:
        from expecttest import assert_expected_inline
    except ImportError as error:
        raise ImportError(
            'assert_graph needs expecttest: pip install "sparse_inductor[testing]"'
        ) from error
    explanation = _explained(fn, args, kwargs)
    graphs = [g.nodes_before if before else g.nodes_after for g in explanation.graphs]
    actual = "\n\n".join("\n".join(map(str, nodes)) for nodes in graphs)
    assert_expected_inline(f"\n{actual}\n", expected, skip=skip + 1)


def assert_pattern(pattern: Pattern, dtypes: Sequence[torch.dtype] | None = None) -> None:
    """Test a pattern completely, from its examples and near misses.

    The pattern must have at least one of each. It must rewrite every example, as the only pattern, and the result must
    be the same (see `assert_matches_reference`, also for `dtypes`; with gradients for examples of training). It must
    decline every near miss for the reason that the near miss names. An unregistered pattern is registered during the
    test.
    """
    from ._reference import assert_matches_reference

    if not pattern.examples or not pattern.near_misses:
        raise AssertionError(f"pattern {pattern.name} needs an example and a near miss")
    added = registered().get(pattern.name) is not pattern
    if added:
        register(pattern)
    try:
        for example in pattern.examples:
            fn, args = example.build()
            explanation = assert_matches_reference(fn, args, grads=example.training, dtypes=dtypes)
            assert_rewrites(explanation, expected={pattern.name: 1})
            others = [r.pattern for r in explanation.report.rewrites if r.pattern != pattern.name]
            if others:
                raise AssertionError(f"example {example.name} is rewritten by {others}, too")
        for example in pattern.near_misses:
            if not example.reason:
                raise AssertionError(
                    f"near miss {example.name} has no reason=: say what it is to be declined with"
                )
            fn, args = example.build()
            with torch.set_grad_enabled(example.training):
                assert_not_rewritten(fn, args, pattern.name, reason=example.reason)
    finally:
        if added:
            unregister(pattern.name)


def known(name: str) -> Pattern:
    """Return the pattern of this name. Raises ValueError if there is none."""
    patterns = registered()
    if name not in patterns:
        raise ValueError(f"there is no pattern {name!r}; known patterns: {', '.join(patterns)}")
    return patterns[name]


def as_arguments(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a call as a tuple. Raises TypeError for an argument alone, such as a tensor."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of arguments, got {type(args).__name__}")
    return tuple(args)


def _explained(
    fn: Callable[..., Any] | Explanation, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Explanation:
    return (
        fn
        if isinstance(fn, Explanation)
        else explained(fn, as_arguments(args), dict(kwargs or {}), policy="always")
    )


def _of(pattern: str | None) -> str:
    return "" if pattern is None else f" of {pattern}"


def _times(number: int) -> str:
    return f"{number} rewrite{'' if number == 1 else 's'}"
