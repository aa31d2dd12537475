"""Placement of tensors in one allocation: they share memory only if their lifetimes are disjoint."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sparse_inductor.compat.triton import KernelLaunch
from sparse_inductor.kernels.common.launches import Address
from sparse_inductor.kernels.common.placement import placed
from sparse_inductor.kernels.common.plan import Launch
from sparse_inductor.kernels.common.recording import lifetimes

ALIGNMENT = 16
SPANS = st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda t: (t[0], t[0] + t[1]))
TENSORS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, ALIGNMENT - 1), SPANS), max_size=12
)


def of(tensors: list[tuple[int, int, tuple[int, int]]]) -> tuple[list[int], int]:
    return placed(*([t[n] for t in tensors] for n in range(3)), ALIGNMENT)


@given(TENSORS)
def test_what_is_used_at_the_same_time_shares_nothing(tensors):
    offsets, total = of(tensors)
    for offset, (size, residue, _) in zip(offsets, tensors, strict=True):
        assert offset >= 0 and offset % ALIGNMENT == residue and offset + size <= total
    for (a, (size, _, one)), (b, (other, _, two)) in itertools.combinations(
        zip(offsets, tensors), 2
    ):
        if one[0] <= two[1] and two[0] <= one[1] and size and other:
            assert a + size <= b or b + other <= a
    assert total <= sum(size + ALIGNMENT for size, *_ in tensors)
    assert (offsets, total) == of(tensors)


def test_a_chain_takes_two_places():
    """Each step reads the tensor that the previous step wrote."""
    offsets, total = of([(32, 0, (n, n + 1)) for n in range(8)])
    assert offsets == [0, 32] * 4 and total == 64


def test_the_largest_is_placed_first():
    """A small tensor that is always in use does not prevent two large ones from sharing memory."""
    assert of([(16, 0, (0, 9)), (64, 0, (0, 2)), (64, 0, (5, 9))]) == ([64, 0, 0], 80)


def test_what_a_kernel_that_starts_early_writes_to_is_in_use_during_the_step_before():
    """The chain of `test_a_chain_takes_two_places` then takes three places."""
    for early, places in ((False, 2), (True, 3)):
        kernel = KernelLaunch(None, (1, 1, 1), 32, 0, 1, False, early)
        steps = [Launch(kernel, [Address(n, 0), Address(n + 1, 0)]) for n in range(8)]
        used = [*lifetimes(steps).values()]
        assert used[1:-1] == [(n - early, n + 1) for n in range(7)]
        assert of([(32, 0, span) for span in used])[1] == 32 * places
