"""torch.export, then an AOTInductor package with the operators inside, run in a process that never saw the model."""

from __future__ import annotations

import pytest
import torch

import sparse_inductor
from processes import ROOT, python
from programs import batch, encoder
from support import compile_without_codegen

SIZES = [(3, 7), (5, 11), (1, 2)]

RUNNER = """
import sys, torch
import sparse_inductor.ops  # defines the operators that the package calls

package, file = sys.argv[1:]
program = torch._inductor.aoti_load_package(package)
for args, wanted in torch.load(file):
    torch.testing.assert_close(program(*args), wanted)
print("programs" in sys.modules, len(torch.load(file)))
"""


def exported(model: torch.nn.Module) -> torch.export.ExportedProgram:
    B, L = torch.export.Dim("B", min=1, max=64), torch.export.Dim("L", min=2, max=512)
    sizes = {0: B, 1: L}
    with torch.no_grad():
        return torch.export.export(model, batch(), dynamic_shapes=(sizes, sizes))


def test_an_exported_program_is_rewritten_when_it_is_compiled():
    model = encoder().eval()
    program = exported(model).module()
    sparse_inductor.enable()
    with torch.no_grad():
        compiled = compile_without_codegen(program)
        torch.testing.assert_close(compiled(*batch()), model(*batch()))
    patterns = {r.pattern for r in sparse_inductor.report().rewrites}
    assert patterns == {"splade_head", "entmax_attention"}


def test_an_exported_program_holds_operators_that_are_called_directly(tmp_path):
    """This includes saving and loading the exported program."""

    class Head(torch.nn.Module):
        def forward(self, hidden, weight, mask):
            return sparse_inductor.ops.splade_head(hidden, weight, mask=mask)

    args = (torch.randn(2, 5, 8), torch.randn(11, 8), torch.ones(2, 5))
    torch.export.save(torch.export.export(Head(), args), tmp_path / "head.pt2")
    again = torch.export.load(tmp_path / "head.pt2")
    called = [str(n.target) for n in again.graph.nodes if n.op == "call_function"]
    assert any("sparse_inductor.splade_head" in name for name in called)
    torch.testing.assert_close(again.module()(*args), Head()(*args))


def test_an_export_is_as_written():
    """Other exporters, such as ONNX's, need the original operators. Rewrites happen when Inductor compiles."""
    sparse_inductor.enable(policy="always")
    program = exported(encoder().eval())
    assert not [n for n in program.graph.nodes if "sparse_inductor" in str(n.target)]


@pytest.mark.heavy
def test_a_backend_that_compiles_by_standalone_compile_is_rewritten():
    """vLLM's backend compiles graphs in this way, piece by piece."""

    def backend(gm, inputs):
        made = torch._inductor.standalone_compile(gm, inputs, dynamic_shapes="from_graph")
        return lambda *args: made(*args)

    model = encoder().eval()
    sparse_inductor.enable(policy="always")
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(*batch()), model(*batch()))
    patterns = {r.pattern for r in sparse_inductor.report().rewrites}
    assert patterns == {"splade_head", "entmax_attention"}


@pytest.mark.heavy
def test_an_aotinductor_package_runs_in_a_fresh_process(tmp_path):
    model = encoder().eval()
    program = exported(model)
    sparse_inductor.enable()
    with pytest.warns(
        UserWarning, match=r"calls sparse_inductor::entmax_attention, .*splade_head"
    ) as warned:
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "encoder.pt2")
        )
    assert any("skip=['entmax_attention', 'splade_head']" in str(w.message) for w in warned)
    patterns = {r.pattern for r in sparse_inductor.report().rewrites}
    assert patterns == {"splade_head", "entmax_attention"}
    with torch.no_grad():
        cases = [(batch(*size), model(*batch(*size))) for size in SIZES]
    torch.save(cases, tmp_path / "cases.pt")
    done = python("-W", "ignore", "-c", RUNNER, package, tmp_path / "cases.pt", path=[ROOT])
    assert done.stdout.split() == ["False", str(len(SIZES))]


@pytest.mark.heavy
def test_a_package_of_a_head_without_factors_runs_in_every_mode(tmp_path):
    head, x = torch.nn.Linear(8, 40).requires_grad_(False), torch.randn(2, 5, 8)

    class Pooled(torch.nn.Module):
        def forward(self, x):
            return head(x).relu().log1p().amax(1)

    with sparse_inductor.enabled(policy="always"), torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            torch.export.export(Pooled(), (x,)), package_path=str(tmp_path / "head.pt2")
        )
    assert [r.pattern for r in sparse_inductor.report().rewrites] == ["splade_head"]
    program = torch._inductor.aoti_load_package(path)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(program(x), Pooled()(x))
