"""explain counts the zeros that make a pattern profitable, in the call that it runs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import sparse_inductor
from planted import PROGRAMS, program
from sparse_inductor.reporting.findings import Density
from support import heavy


def densities(fn, *args, **options) -> list[Density]:
    return sparse_inductor.explain(fn, *args, **options).report.densities


@pytest.mark.parametrize("verify", [False, True])
def test_terms_of_a_head(verify):
    model, args = program("splade")
    terms = model(*args)
    (found,) = densities(model, *args, verify=verify)
    assert (found.pattern, found.what, found.row) == ("splade_head", "terms", terms.shape[-1])
    assert (found.active, found.total) == (int((terms > 0).sum()), terms.numel())


def test_terms_lie_along_the_vocabulary_wherever_it_is():
    model, (x, m) = program("splade")
    model.pool = lambda z, mask: torch.relu(z).transpose(1, 2).amax(2, keepdim=True)
    (found,) = densities(model, x, m)
    assert found.row == 40
    model.pool = lambda z, mask: torch.relu(z).max(1, keepdim=True).values
    (found,) = densities(model, x, m)
    assert found.row == 40


def test_an_activation_after_the_maximum_counts_what_it_keeps():
    model, (x, m) = program("splade")
    model.pool = lambda z, mask: torch.log1p(torch.relu(z.amax(1)))
    (found,) = densities(model, x, m)
    assert found.active == int((model(x, m) > 0).sum()) < found.total


@pytest.mark.parametrize("name", ["router", "padded"])
def test_probabilities_of_a_row(name):
    fn, args = program(name)
    (found,) = densities(fn, *args)
    assert found.what == "probabilities" and found.row == 6
    if name == "router":
        assert found.active == int((fn(*args) > 0).sum())
    assert 0 < found.active < found.total


def test_nothing_of_the_callers_changes():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = program("splade")[0]
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, m):
            self.calls += 1
            return self.head(x + torch.rand_like(x), m)

    model, (x, m) = Counts(), program("splade")[1]
    before = torch.get_rng_state()
    assert len(densities(model, x, m, verify=True)) == 1
    assert model.calls == 0 and torch.equal(torch.get_rng_state(), before)


def test_it_is_in_the_report_and_on_the_page():
    model, args = program("splade")
    explanation = sparse_inductor.explain(model, *args)
    (found,) = explanation.report.densities
    assert f"active   {found}" in str(explanation) and "terms a row are not zero" in str(found)
    assert f"<dt>active</dt><dd>{found}</dd>" in explanation.to_html()
    assert json.loads(explanation.report.to_json())["densities"][0]["active"] == found.active


def test_the_process_wide_report_counts_nothing():
    model, args = program("splade")
    sparse_inductor.enable(only="splade_head")
    torch.compile(model, backend="aot_eager")(*args)
    assert not sparse_inductor.report().densities


# The first program of each pattern runs in `make test`, because the choice of the counted node depends on the pattern.
FIRST = {known.pattern: name for name, known in reversed(PROGRAMS.items())}


@pytest.mark.parametrize("name", [n if n in FIRST.values() else heavy(n) for n in PROGRAMS])
def test_every_program_has_zeros_to_count(name):
    fn, args = program(name)
    if PROGRAMS[name].pattern == "sparse_scores":
        pytest.skip("its zeros are those that the documents do not store")
    (found,) = densities(fn, *args)
    assert found.pattern == PROGRAMS[name].pattern and 0 < found.active < found.total
