"""The patterns' own examples are rewritten with equal results; their near misses are not, with the right reason."""

from __future__ import annotations

import pytest

from sparse_inductor.pattern import registered
from sparse_inductor.testing import assert_pattern

PATTERNS = registered()


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_does_what_it_says(name):
    assert_pattern(PATTERNS[name])


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_shows_what_it_takes_and_what_it_declines(name):
    assert len(PATTERNS[name].examples) >= 3
    assert len(PATTERNS[name].near_misses) >= 3
