"""The host time per call that a rewrite adds to a compiled graph.

Sizes are so small that the host never waits for the GPU. Both graphs run in one process, and the figure is the
difference of their host times (negative if the unrewritten graph launches many kernels). Under CUDA graphs, neither
graph runs host code for its operators at a call.
"""

from __future__ import annotations

import importlib.util

import torch

from benchmarks import measure
from benchmarks.bench import (
    INFERENCE,
    NONE,
    TRAINING,
    Bench,
    Case,
    Limits,
    call,
    compiled,
    rewritten,
)
from benchmarks.measure import Work

from . import entmax, entmax_attention, first_call, relu_ffn, splade_head


def run(bench: Bench) -> None:
    """Measure every operator."""
    if not bench.cuda:
        bench.note("Not measured: on a CPU the host is what computes.")
        return
    bench.sections(SECTIONS)


def _splade(bench: Bench) -> None:
    case = splade_head.Case(splade_head.Shape(4, 32, 64, 1000), bench.device)
    _of_case(bench, "splade_head", case)


def _attention(bench: Bench) -> None:
    case = entmax_attention.Case(entmax_attention.Shape(1, 2, 256), bench.device)
    _of_case(bench, "entmax_attention", case)


def _rows(bench: Bench) -> None:
    if importlib.util.find_spec("entmax") is not None:
        _of_case(bench, "entmax", entmax.Case((64, 64), bench.device, 1.5))


def _of_case(bench: Bench, name: str, case: Case) -> None:
    for kind in (INFERENCE, TRAINING):
        ours, theirs = (case.work(kind, case.contender(which)) for which in ("ours", "compile"))
        _added(bench, f"{name}, {kind}", ours, theirs)


def _ffn(bench: Bench) -> None:
    # Only the last case packs rows: with fewer gates, the operator runs ATen's dense products.
    for tokens, neurons in ((1, 1024), (16, 1024), (512, 1024), (8192, 2048)):
        case = relu_ffn.Case(relu_ffn.Shape(tokens, 256, neurons), bench.device, 0.02)
        for kind in (INFERENCE, TRAINING)[: 1 + (tokens >= 512)]:
            ours, theirs = (case.contender(name, kind) for name in ("ours", "compile"))
            limits = NONE if tokens == 8192 else (5, 0)
            _added(bench, f"relu_ffn of {tokens} tokens, {kind}", ours, theirs, limits)


def _scores(bench: Bench) -> None:
    module = first_call.Scores(256, 500, 16, 10).to(bench.device)
    query = torch.rand(4, 500, device=bench.device)
    pair = rewritten(module, "sparse_scores"), compiled(module)
    _added(
        bench, "sparse_scores, top 10", *(call(program, (query,), INFERENCE) for program in pair)
    )


def _graphs(bench: Bench) -> None:
    """Measure a replayed CUDA graph, which is one launch whatever it contains."""
    case = splade_head.Case(splade_head.Shape(4, 32, 64, 1000), bench.device)
    ours = rewritten(case.module, "splade_head", mode="reduce-overhead")
    theirs = compiled(case.module, mode="reduce-overhead")
    pair = (
        call(program, (case.hidden.detach(), case.mask), INFERENCE) for program in (ours, theirs)
    )
    _added(bench, "splade_head, inference, CUDA graph", *pair)


def _added(
    bench: Bench,
    name: str,
    ours: Work,
    theirs: Work,
    limits: Limits = (5, 0),
) -> None:
    much = (2, 2) if bench.quick else (120, 10)
    mine, other = measure.host_us((ours, theirs), *much)
    note = f"{mine:.3g} us; unrewritten {other:.3g} us"
    bench.row(f"{name}: host time that the rewrite adds", mine - other, "us", *limits, note=note)
    bench.say(f"{name}: {mine - other:+.3g} us ({note})")


SECTIONS = (_splade, _attention, _rows, _ffn, _scores, _graphs)
