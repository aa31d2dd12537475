"""Planted mistakes in rewrites are caught by comparison with the reference, by verify, and by the fuzzer."""

from __future__ import annotations

import collections

import pytest
import torch

from fuzz.compare import run
from planted import BUGS, PROGRAMS, Bug, program
from planted.overlooked import OVERLOOKED, Overlooked
from planted.table import by_fuzz, by_tests, by_verify, caught
from sparse_inductor.testing import assert_matches_reference, assert_rewrites
from support import heavy, one_in


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_bug_nothing_is_caught(name):
    assert_rewrites(
        assert_matches_reference(*program(name), aot=False), expected={PROGRAMS[name].pattern: 1}
    )


# In `make test`, every third bug runs in `test_verify` and the others here.
@pytest.mark.parametrize(
    "bug", [bug if i % 3 else heavy(bug) for i, bug in enumerate(BUGS)], ids=lambda bug: bug.name
)
def test_a_planted_bug_is_caught_by_comparing_with_the_reference(bug: Bug):
    how = {"grads": bug.backward, "inference": not bug.backward}
    with bug.plant(), pytest.raises(AssertionError, match="computes something else") as caught:
        assert_matches_reference(*program(bug.program), aot=False, **how)
    message = str(caught.value)
    assert ("training" if bug.backward else "inference") in message.splitlines()[0]
    assert ("gradient of" if bug.backward else "output ") in message


def test_there_are_enough_of_them_in_every_family():
    count = collections.Counter(PROGRAMS[bug.program].pattern for bug in BUGS)
    assert len(count) >= 5 and min(count.values()) >= 10
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def _skip_where_torch_does_not_run(mistake: Overlooked) -> None:
    if torch.__version__ < (2, 13) and ("island" in mistake.name or "cast of" in mistake.name):
        # An "island" is a linear layer under inference_mode; this torch fails to compile it and leaves the mode on.
        pytest.skip("this torch drops casts that narrow itself, and does not compile islands")
    if run(mistake.program, mistake.program.function(), 0).error is not None:
        pytest.skip(
            "this torch does not run the program"
        )  # torch 2.11 allows no writes in a branch


@pytest.mark.parametrize("mistake", OVERLOOKED, ids=lambda m: m.name)
def test_what_is_overlooked_is_caught(mistake: Overlooked):
    _skip_where_torch_does_not_run(mistake)
    assert by_tests(mistake)


@pytest.mark.parametrize("mistake", one_in(3, OVERLOOKED), ids=lambda m: m.name)
def test_verify_catches_what_is_overlooked_or_is_known_not_to(mistake: Overlooked):
    _skip_where_torch_does_not_run(mistake)
    assert by_verify(mistake) == mistake.by_verify


# The mistakes that verify does not catch, and one more in each family. `make planted` runs all.
IN_EACH_FAMILY = {m.family: m for m in OVERLOOKED}.values()
HERE = [m for m in OVERLOOKED if not m.by_verify or m in IN_EACH_FAMILY]


@pytest.mark.sample(2)
@pytest.mark.parametrize("mistake", HERE, ids=lambda m: m.name)
def test_the_fuzzer_catches_what_is_overlooked(mistake: Overlooked):
    assert by_fuzz(mistake) is not None


@pytest.mark.heavy
@pytest.mark.breaks_pattern  # in other programs the mistake produces arguments that the operator refuses
@pytest.mark.parametrize("mistake", [*BUGS, *OVERLOOKED], ids=lambda m: m.name)
def test_every_mistake_is_caught_by_two_of_three(mistake):
    if isinstance(mistake, Overlooked):
        _skip_where_torch_does_not_run(mistake)
    assert caught(mistake).by >= 2
