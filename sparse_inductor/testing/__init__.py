"""Assertions that a program is rewritten as expected and still computes the same.

    from sparse_inductor.testing import assert_matches_reference, assert_rewrites

    def test_my_head():
        assert_rewrites(model, (ids, mask), {"splade_head": 1})
        assert_matches_reference(model, (ids, mask))

The assertions accept any function or module that `torch.compile` takes. They compile it from scratch with the patterns
of the enabled session, or with all patterns if there is none. The policy is "always", because they test recognition and
not speed; `compile_without_codegen` uses the session's policy. The caller's tensors, modules, random state and report
remain unchanged. Code is generated only on request. A failure shows the nearest miss, the graph, and the changes that
the rewrite made to it.

`sparse_inductor.pytest_plugin` provides matching fixtures and markers.
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
