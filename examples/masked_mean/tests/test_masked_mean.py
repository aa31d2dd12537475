"""All the tests that the pattern needs, and the tests of its operator."""

import torch
from masked_mean.pattern import PATTERN, pooled

from sparse_inductor.testing import assert_pattern


def test_pattern(clean_dynamo):
    assert_pattern(PATTERN, dtypes=(torch.float32, torch.bfloat16))


def test_it_is_found_without_being_named(clean_dynamo):
    import sparse_inductor

    sparse_inductor.enable()
    hidden, mask = torch.randn(2, 6, 8), torch.ones(2, 6)
    torch.testing.assert_close(torch.compile(pooled)(hidden, mask), pooled(hidden, mask))
    assert [r.pattern for r in sparse_inductor.report().rewrites] == ["masked_mean"]


def test_operator():
    hidden = torch.randn(2, 6, 8, dtype=torch.double, requires_grad=True)
    torch.library.opcheck(torch.ops.masked_mean.pool, (hidden, torch.ones(2, 6), 1e-9))
    assert torch.autograd.gradcheck(
        lambda h: torch.ops.masked_mean.pool(h, torch.ones(2, 6), 1e-9), hidden
    )
