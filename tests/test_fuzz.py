"""The fuzzer: its programs are rewritten, a failing one gets small, and some dozens of programs are right."""

from __future__ import annotations

import collections
import io

import pytest
import torch

from fuzz.campaign import Drawing, _as_it_was, campaign, examine
from fuzz.generate import FAMILIES, generate
from fuzz.program import Program
from fuzz.shrink import shrunk


def test_a_seed_is_a_program():
    assert generate(7) == generate(7) and generate(7) != generate(8)
    assert generate(7).text() == generate(7).text()


def test_every_program_can_be_printed_and_read():
    for seed in range(300):
        program = generate(seed)
        assert callable(program.function()), program.text()
        assert all(i.name in program.source() for i in program.inputs)


def test_every_family_and_hazard_is_drawn():
    made = collections.Counter(f for seed in range(300) for f in generate(seed).families)
    assert min(made[f] for f in FAMILIES) >= 60
    assert len({h for seed in range(300) for h in generate(seed).hazards}) >= 15


def test_what_fails_gets_small():
    def fails(program: Program) -> bool:
        return any("relu" in s.text for s in program.steps)

    program = next(p for p in map(generate, range(100)) if fails(p) and len(p.steps) > 8)
    small = shrunk(program, fails)
    assert fails(small) and len(small.steps) <= 3
    assert callable(small.function())


def test_a_process_whose_modes_are_left_on_runs_no_further_program():
    assert _as_it_was()
    for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert not _as_it_was()


@pytest.mark.heavy
def test_a_campaign_counts_and_logs():
    log = io.StringIO()
    tally = campaign(2, 0, 1, log, Drawing(shares={}), shrink=0.0)
    text = log.getvalue()
    assert (
        tally.programs == 2 and "rewritten" in text and "seeds 0 to 1" in text and "seconds" in text
    )
    assert tally.rewritten and sum(tally.by_family.values()) >= tally.rewritten


@pytest.mark.sample(4)
@pytest.mark.parametrize("seeds", [range(at, 24, 8) for at in range(8)], ids=lambda s: f"{s[0]}")
def test_random_programs(seeds):
    for seed in seeds:
        _, failure = examine(generate(seed))
        assert failure is None, "\n".join([*failure.findings, failure.text])


def test_most_of_what_is_drawn_is_rewritten():
    outcomes = [examine(generate(seed))[0] for seed in range(100, 108)]
    assert sum(bool(o.rewritten) for o in outcomes) >= 6
    assert set().union(*(o.rewritten for o in outcomes)) == set(FAMILIES)
