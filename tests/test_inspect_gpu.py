"""verify, doctor and the assertions on a GPU, with kernels and with Inductor's code."""

from __future__ import annotations

import pytest
import torch

import sparse_inductor
from planted import bug_named, program
from sparse_inductor import doctor
from sparse_inductor.testing import assert_matches_reference

pytestmark = pytest.mark.gpu


def on_gpu(dtype: torch.dtype):
    model, (hidden, mask) = program("splade")
    hidden = hidden.detach().to("cuda", dtype).requires_grad_()
    return model.to("cuda", dtype), (hidden, mask.cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_verify_agrees(dtype, mode):
    model, args = on_gpu(dtype)
    modes = torch._inductor.list_mode_options(mode) if mode else {}
    options = {**sparse_inductor.options(only="splade_head", verify=True), **modes}
    fn = torch.compile(model, options=options)
    for _ in range(3):
        # Gradients are in a CUDA graph's memory, and the next run overwrites them.
        model.zero_grad(set_to_none=True)
        args[0].grad = None
        fn(*args).sum().backward()
    assert {c.verdict for c in sparse_inductor.report().checks} == {"agrees"}


@pytest.mark.breaks_pattern
def test_verify_catches_a_bug():
    model, args = on_gpu(torch.float32)
    with bug_named("mask inverted").plant():
        fn = torch.compile(model, options=sparse_inductor.options(only="splade_head", verify=True))
        torch.testing.assert_close(fn(*args), model(*args))
    assert [c.verdict for c in sparse_inductor.report().checks] == ["differs"]


def test_the_assertion_takes_generated_code():
    assert_matches_reference(*on_gpu(torch.bfloat16), codegen=True, vary=1)


def test_doctor_runs_every_operator():
    found = [f for f in doctor.diagnose() if f.group == "operators, on cuda"]
    assert found and all(f.status == "ok" for f in found), found
