"""Assertions about what a program is rewritten to, and that it still computes the same.

    from sparse_inductor.testing import assert_matches_reference, assert_rewrites

    def test_my_head():
        assert_rewrites(model, (ids, mask), {"splade_head": 1})
        assert_matches_reference(model, (ids, mask))

They work on any function or module that `torch.compile` takes, compile it afresh with the patterns of the enabled
session (without one: with all) and the policy "always", since they are about what is recognised and not about what is
faster (`compile_without_codegen` has the session's policy), and leave the caller's tensors, modules, random state and
report as they were. Code is only generated on request. A failure shows the nearest miss, the graph and what the
rewrite changed in it.

`sparse_inductor.pytest_plugin` has fixtures and markers to go with them.
"""

from ._assertions import assert_graph, assert_not_rewritten, assert_pattern, assert_rewrites
from ._compiled import Compiled, compile_without_codegen
from ._reference import assert_matches_reference

__all__ = [
    "Compiled",
    "assert_graph",
    "assert_matches_reference",
    "assert_not_rewritten",
    "assert_pattern",
    "assert_rewrites",
    "compile_without_codegen",
]
