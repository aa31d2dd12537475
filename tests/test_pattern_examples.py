"""The patterns' own examples are rewritten with equal results; their near misses are not, with the right reason."""

from __future__ import annotations

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import check_node_safe

import sparse_inductor
from sparse_inductor import compat
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


@pytest.mark.parametrize("name", PATTERNS)
def test_autograds_cache_stores_what_a_pattern_inserts(name):
    """It refuses graphs that call functions with private names, among them F.threshold."""
    found = []

    def backend(gm, inputs):
        before = {*gm.graph.nodes}
        gm = compat.pre_grad_passes(gm, inputs)
        inserted = [node for node in gm.graph.nodes if node not in before]
        for node in inserted:
            check_node_safe(node)
        found.extend(inserted)
        return gm.forward

    sparse_inductor.enable(only=name, policy="always")
    for example in PATTERNS[name].examples:
        fn, args = example.build()
        with torch.set_grad_enabled(example.training):
            torch.compile(fn, backend=backend)(*args)
    assert found
