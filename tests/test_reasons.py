"""Every near miss of the corpora is reported with its true cause, at the line that is in the way."""

from __future__ import annotations

import importlib

import pytest
import torch

import sparse_inductor
from corpus.case import Case
from true_reasons import NOTHING_OF_IT, TRUE


def cases(corpus: str) -> list[Case]:
    """The corpus's programs that no rewrite exists for."""
    return [c for c in importlib.import_module(corpus).CASES if c.expect == "no_rewrite"]


def program(case: Case) -> str:
    """The name without its mode."""
    return case.name.removesuffix("__infer").removesuffix("__train")


def wrong(corpus: str, case: Case) -> str:
    """What the report should have said of a case and did not; empty where it is right."""
    reason, line = TRUE[corpus][program(case)]
    fn, args = case.build()
    if isinstance(fn, torch.nn.Module):
        fn.train(case.training)
    with torch.set_grad_enabled(case.training):
        found = sparse_inductor.explain(fn, *args).report.near_misses
    if any(
        reason in m.reason and line in m.source and (":" in m.location or not line) for m in found
    ):
        return ""
    said = "; ".join(f"{m.reason} [{m.source}]" for m in found) or "nothing"
    return f"{case.name} ({case.why}): wanted {reason!r} at {line!r}, was told {said}"


@pytest.mark.parametrize("corpus", TRUE)
def test_the_reason_names_the_cause_and_its_line(corpus):
    pytest.importorskip(corpus, exc_type=ImportError)
    silent = NOTHING_OF_IT.get(corpus, {})
    looked_at = [case for case in cases(corpus) if program(case) not in silent]
    complaints = [text for case in looked_at if (text := wrong(corpus, case))]
    share = 1 - len(complaints) / len(looked_at)
    assert not complaints, "\n".join([f"{share:.0%} of {len(looked_at)} are right", *complaints])


@pytest.mark.parametrize("corpus", TRUE)
def test_every_near_miss_of_the_corpus_is_looked_at(corpus):
    pytest.importorskip(corpus, exc_type=ImportError)
    listed = {*TRUE[corpus], *NOTHING_OF_IT.get(corpus, {})}
    assert listed == {program(case) for case in cases(corpus)}


@pytest.mark.parametrize("corpus", NOTHING_OF_IT)
def test_what_has_nothing_of_a_family_is_not_talked_about(corpus):
    """A softmax in every layer is no news."""
    for case in cases(corpus):
        if program(case) in NOTHING_OF_IT[corpus]:
            fn, args = case.build()
            with torch.set_grad_enabled(case.training):
                assert not sparse_inductor.explain(fn, *args).report.near_misses, case.name
