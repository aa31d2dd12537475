"""What the host does for a call of a compiled graph with a rewritten operator beyond one of the unrewritten graph.

At sizes at which the GPU is never waited for. Both graphs are in one process; the difference is what the rewrite adds
(less than nothing where the unrewritten graph launches many kernels). Under CUDA graphs neither does anything a call.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.bench import Bench, compiled, rewritten
from benchmarks.measure import Work

from . import entmax, entmax_attention, relu_ffn, splade_head


def run(bench: Bench) -> None:
    """Measure every operator."""
    if not bench.cuda:
        bench.note("Not measured: on a CPU the host is what computes.")
        return
    bench.sections(SECTIONS)


def _splade(bench: Bench) -> None:
    case = splade_head.Case(splade_head.Shape(4, 32, 64, 1000), bench.device)
    for kind in (splade_head.INFERENCE, splade_head.TRAINING):
        ours, theirs = (case.work(kind, case.contender(name)) for name in ("ours", "compile"))
        _added(bench, f"splade_head, {kind}", ours, theirs)


def _attention(bench: Bench) -> None:
    case = entmax_attention.Case(entmax_attention.Shape(1, 2, 256), bench.device)
    for kind in (entmax_attention.INFERENCE, entmax_attention.TRAINING):
        ours, theirs = (case.work(kind, case.contender(name)) for name in ("ours", "compile"))
        _added(bench, f"entmax_attention, {kind}", ours, theirs)


def _rows(bench: Bench) -> None:
    if importlib.util.find_spec("entmax") is None:
        return
    case = entmax.Case((64, 64), bench.device, 1.5)
    for kind in (entmax.INFERENCE, entmax.TRAINING):
        pair = rewritten(case.rows, "entmax"), compiled(case.rows)
        _added(bench, f"entmax, {kind}", *(case.work(kind, program) for program in pair))


def _ffn(bench: Bench) -> None:
    # Of the last, rows are packed: of fewer gates the operator is ATen's dense products.
    for tokens, neurons in ((1, 1024), (16, 1024), (512, 1024), (8192, 2048)):
        case = relu_ffn.Case(relu_ffn.Shape(tokens, 256, neurons), bench.device, 0.02)
        kinds = [relu_ffn.INFERENCE, relu_ffn.TRAINING][: 1 + (tokens >= 512)]
        for kind in kinds:
            ours, theirs = (case.contender(name, kind) for name in ("ours", "compile"))
            limits = (None, None) if tokens == 8192 else (5, 0)
            _added(bench, f"relu_ffn of {tokens} tokens, {kind}", ours, theirs, limits)


class Scores(nn.Module):
    """Documents as padded rows of terms and weights, the best ten for each query."""

    def __init__(self, documents: int, terms: int, length: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("ids", torch.randint(terms, (documents, length), device=device))
        self.register_buffer("values", torch.rand(documents, length, device=device))

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return (query[:, self.ids] * self.values).sum(-1).topk(10)


def _scores(bench: Bench) -> None:
    module = Scores(256, 500, 16, bench.device)
    query = torch.rand(4, 500, device=bench.device)
    pair = rewritten(module, "sparse_scores"), compiled(module)
    _added(bench, "sparse_scores, top 10", *(_inference(program, query) for program in pair))


def _inference(program: Callable[..., object], *args: Tensor) -> Work:
    @functools.wraps(program)
    def work() -> object:
        with torch.no_grad():
            return program(*args)

    return work


def _graphs(bench: Bench) -> None:
    """A replayed CUDA graph is one launch, whatever is in it."""
    case = splade_head.Case(splade_head.Shape(4, 32, 64, 1000), bench.device)
    head, args = case.head, (case.hidden.detach(), case.mask)
    ours = rewritten(head, "splade_head", mode="reduce-overhead")
    theirs = compiled(head, mode="reduce-overhead")
    pair = (_inference(program, *args) for program in (ours, theirs))
    _added(bench, "splade_head, inference, CUDA graph", *pair)


def _added(
    bench: Bench,
    name: str,
    ours: Work,
    theirs: Work,
    limits: tuple[float | None, float | None] = (5, 0),
) -> None:
    much = (2, 2) if bench.quick else (120, 10)
    mine, other = measure.host_us((ours, theirs), *much)
    floor, goal = limits
    note = f"{mine:.3g} us; unrewritten {other:.3g} us"
    bench.row(
        f"{name}: host time that the rewrite adds", mine - other, "us", floor, goal, note=note
    )
    bench.say(f"{name}: {mine - other:+.3g} us ({note})")


SECTIONS = (_splade, _attention, _rows, _ffn, _scores, _graphs)
