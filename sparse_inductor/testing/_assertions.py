"""What a program is rewritten to."""

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
    """Assert that compiling `fn(*args)` rewrites each named pattern exactly so many times.

    Args:
        fn: a function or module, compiled or not. It is captured in the mode it is in (`train`, `eval`, grad mode). Or
            what `explain` or `assert_matches_reference` returned, to capture nothing again.
        args, kwargs: what it is called with.
        expected: pattern name -> number of rewrites. Patterns that are not named may do as they like; without any
            (`{}` or None) nothing at all may be rewritten.

    Returns the explanation, for further questions. Raises AssertionError, ValueError for an unknown pattern name,
    and whatever `fn` raises.
    """
    expected = dict(expected or {})
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
    """Assert that a pattern (None: any) leaves `fn(*args)` alone, and that the report says why.

    Args:
        fn, args, kwargs: as in `assert_rewrites`.
        reason: a part of the reported reason. None: no near miss has to be reported.
        at: a part of the line that the near miss points to.

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
    """Assert that the graph after rewriting (with `before`: as captured) is this text.

    `expected` is a string literal in the test. With `EXPECTTEST_ACCEPT=1` in the environment it is put there or
    brought up to date by the run. A line a node: name, dtype and shape, call; several graphs are parted by an empty
    line. `skip` is how many functions of yours stand between the literal and this call. Needs `expecttest`.
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
    """Assert what a pattern says of itself: all tests that it needs, from its examples and near misses.

    It has at least one of each. Every example is rewritten by it and by it alone, and computes the same
    (`assert_matches_reference`, with gradients if the example is one of training; `dtypes` as there); every near miss
    is left alone with the reason that it names. A pattern that is not registered is, for as long as this takes.
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
    """The pattern of that name; ValueError if there is none."""
    patterns = registered()
    if name not in patterns:
        raise ValueError(f"there is no pattern {name!r}; known patterns: {', '.join(patterns)}")
    return patterns[name]


def _explained(
    fn: Callable[..., Any] | Explanation, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Explanation:
    return (
        fn
        if isinstance(fn, Explanation)
        else explained(fn, tuple(args), dict(kwargs or {}), policy="always")
    )


def _of(pattern: str | None) -> str:
    return "" if pattern is None else f" of {pattern}"


def _times(number: int) -> str:
    return f"{number} rewrite{'' if number == 1 else 's'}"
