"""torch.compile without the plugin and with it, under the default policy, over sizes and densities.

A cell is one program of a family as users write it, compiled without the plugin ("compile") and with it ("enabled").
Both run in one process and take turns. Timing starts after the calls that the policy observes, so a cell shows its
decision, and the cost of the plugin if it decided against a rewrite. Wall clock and host time are per call, for
back-to-back calls; GPU time is for a call with cold caches. Ratios of wall clock and GPU time are compile over enabled,
so below 1 is a loss.

Data: neurons differ in how often they are active (a neuron's threshold is normal, with a standard deviation of 0.8 of
that of a gate; in one column all thresholds are equal), and a block gets 16 inputs in turn. Logits and scores are about
N(0, 1). The terms of documents have a heavy-tailed distribution. Masks are tensors, as tokenizers return them.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparse_inductor
from benchmarks import measure
from benchmarks.bench import INFERENCE, TRAINING, Bench, call, compiled, part, without_advice
from benchmarks.measure import Work
from benchmarks.publish import Cell

from . import entmax, entmax_masks, relu_ffn, splade_head

DECIDED = 40  # calls before timing; the policy reads its counters at the 4th and the 32nd
LOSS = 0.97  # a cell below this is measured again, and the second result counts
INPUTS = 16  # the number of inputs that a feed-forward block gets in turn
SPREAD = 0.8  # standard deviation of a neuron's threshold, over that of a gate

Program = tuple[str, str, nn.Module, Callable[[Callable[..., object]], Work]]
"""Row and column of the map, the program, and a function that makes one call of the compiled program."""


def run(bench: Bench) -> None:
    """Measure the map of every family."""
    bench.sections(SECTIONS)


def _map(bench: Bench, name: str, programs: Iterator[Program], of: str = "") -> None:
    """Measure every program, and judge the map by its least cell. of: a name if the programs are a part of the map."""
    cells = []
    for row, column, module, work in programs:
        if bench.late():
            bench.note(f"Not measured for want of time: {name}, {row}, {column}.")
            continue
        cells.append(_cell(bench, (name, row, column), module, work))
        bench.cell(cells[-1])
        gc.collect()
    walls = [c.wall for c in cells]
    if not walls:
        return
    name += of and f", {of}"
    least = cells[walls.index(min(walls))]
    note = (
        f"{least.row}, {least.column}; {sum(w < LOSS for w in walls)} of {len(walls)} below {LOSS}, "
        f"{sum(c.rewritten for c in cells)} rewritten"
    )
    bench.row(f"{name}: least, wall clock", min(walls), "x", LOSS, 0.99, True, note)
    if gained := [c.wall for c in cells if c.rewritten]:
        median = statistics.median(gained)
        bench.row(f"{name}: median of what is rewritten, wall clock", median, "x", higher=True)


def _cell(
    bench: Bench,
    place: tuple[str, str, str],
    module: nn.Module,
    work: Callable[[Callable[..., object]], Work],
) -> Cell:
    seconds = 0.05 if bench.quick else 0.5
    cell = _measured(bench, place, module, work, seconds)
    if cell.wall < LOSS:  # recompile and measure again, in case other load disturbed it
        cell = _measured(bench, place, module, work, 4 * seconds)
    return cell


def _measured(
    bench: Bench,
    place: tuple[str, str, str],
    module: nn.Module,
    work: Callable[[Callable[..., object]], Work],
    seconds: float,
) -> Cell:
    torch._dynamo.reset()
    sparse_inductor.report().clear()
    works = {"compile": work(compiled(module))}
    for _ in range(3):
        works["compile"]()
    with without_advice(), sparse_inductor.enabled(policy="auto"):
        works["enabled"] = work(compiled(module))
        for _ in range(DECIDED):
            works["enabled"]()
        _built_by_now(works["enabled"])
        steady = measure.steady(works, bench.device, seconds)
        alone = measure.race(works, bench.device, seconds, (2, 12)) if bench.cuda else None
    theirs, ours = (steady[name] for name in ("compile", "enabled"))
    return Cell(
        *place,
        theirs.wall_ms / ours.wall_ms,
        alone["compile"].ms / alone["enabled"].ms if alone else None,
        ours.host_ms / theirs.host_ms if bench.cuda else None,
        bool(sparse_inductor.report().rewrites) and not sparse_inductor.report().pending,
        f"{theirs.wall_ms:.4g} ms / {ours.wall_ms:.4g} ms",
    )


def _in_turn(
    works: Iterable[Callable[[Callable[..., object]], Work]],
) -> Callable[[Callable[..., object]], Work]:
    """Cycle through calls of the works, like a program that gets a different input each time."""

    def make(program: Callable[..., object]) -> Work:
        calls = itertools.cycle([work(program) for work in works])
        return lambda: next(calls)()

    return make


def _built_by_now(program: Callable[[], object]) -> None:
    """Wait for the index that is built in the background, and run calls that may use it."""
    for thread in threading.enumerate():
        if thread.name == "sparse_index_build":
            thread.join()
    for _ in range(4):
        program()


def _inference(*args: Tensor) -> Callable[[Callable[..., object]], Work]:
    return lambda program: call(program, args, INFERENCE)


def _training(module: nn.Module, *args: Tensor) -> Callable[[Callable[..., object]], Work]:
    """Return forward and backward, with gradients of the parameters and of the floating-point arguments."""
    leaves = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    wanted = [*(a for a in leaves if a.requires_grad), *module.parameters()]
    return lambda program: call(program, leaves, TRAINING, wanted)


# --- Feed-forward blocks ----------------------------------------------------------------------------------------------


def _neurons(
    bench: Bench, K: int, N: int, gated: bool, share: float, spread: float = SPREAD
) -> nn.Module:
    """Return a block in which `share` of the neurons are active, for inputs with a first feature of 1."""
    like = {"device": bench.device, "dtype": torch.bfloat16 if bench.cuda else torch.float32}
    torch.manual_seed(0)
    gate, up = (torch.randn(N, K, **like) * K**-0.5 for _ in range(2))
    side = torch.erfinv(torch.tensor(2 * share - 1, dtype=torch.float64)).item()
    middle = math.sqrt(2 * (1 + spread**2)) * side
    gate[:, 0] = (middle + spread * torch.randn(N, device=bench.device)).to(gate.dtype)
    down = torch.randn(K, N, **like) * N**-0.5
    return relu_ffn.Gated(gate, up, down) if gated else relu_ffn.Plain(gate, down)


def _rows(bench: Bench, rows: int, K: int) -> Tensor:
    x = torch.randn(rows, K, device=bench.device)
    x[:, 0] = 1.0
    return x.bfloat16() if bench.cuda else x


SHAPES = (
    ("gated", 2048, 5632),
    ("gated", 4096, 11008),
    ("plain", 768, 3072),
    ("plain", 2048, 8192),
    ("plain", 4096, 16384),
)
"""Shapes of blocks. The second is from Llama 7B, the third from T5, the last from OPT 6.7B."""


def _blocks(bench: Bench, name: str, K: int, N: int, training: bool) -> Iterator[Program]:
    rows = [2048, 8192, 32768] if training else [1, 16, 64, 512, 1024, 2048, 4096, 8192, 32768]
    shares = [0.003, 0.01, 0.03, 0.5] if training else [0.003, 0.01, 0.03, 0.1, 0.3, 0.5]
    columns = [(f"{share:.1%} active", share, SPREAD) for share in shares]
    columns.insert(2, ("1.0% active, all alike", 0.01, 0.0))
    if bench.quick:  # all shapes get these sizes, so the large ones are skipped
        K, N, rows, columns = 32, 64, [16] if K <= 2048 else [], columns[1:2]
    elif not bench.cuda:
        rows = [2048, 8192]
    for M in rows:
        inputs = [_rows(bench, M, K) for _ in range(INPUTS)]
        for column, share, spread in columns:
            block = _neurons(bench, K, N, name == "gated", share, spread)
            works = [_training(block, x) if training else _inference(x) for x in inputs]
            yield f"{name} {K} x {N}, {M:,} rows", column, block, _in_turn(works)


def _feed_forward(bench: Bench, name: str, K: int, N: int, training: bool) -> None:
    """Map inference, or a training step, of one block."""
    kind = "training" if training else "inference"
    programs = _blocks(bench, name, K, N, training)
    _map(bench, f"feed-forward block, {kind}", programs, f"{name} {K} x {N}")


class _Residual(nn.Module):
    """Llama's layer, with or without attention. The feed-forward block adds 0 to the first feature of the stream."""

    def __init__(self, bench: Bench, K: int, N: int, share: float, heads: int = 0) -> None:
        super().__init__()
        block = _neurons(bench, K, N, True, share)
        like = {"device": bench.device, "dtype": next(block.parameters()).dtype}
        self.norms = nn.ModuleList(nn.RMSNorm(K, **like) for _ in range(2 if heads else 1))
        self.block, self.heads = block, heads
        if heads:
            self.qkv, self.out = (nn.Linear(K, n * K, bias=False, **like) for n in (3, 1))
        with torch.no_grad():
            block.down[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.heads:
            qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.block(self.norms[-1](x))


def _stacks(bench: Bench) -> Iterator[Program]:
    K, N, layers = (32, 64, 2) if bench.quick else (2048, 5632, 8)
    for rows in [16] if bench.quick else [2048, 8192]:
        x = _rows(bench, rows, K)
        for share, column in ((0.5, "untrained"), (1e-15, "no neuron active")):
            stack = nn.Sequential(*(_Residual(bench, K, N, share) for _ in range(layers)))
            yield f"{rows:,} rows", column, stack, _training(stack, x)
    x = _rows(bench, x.shape[0], K).unflatten(0, (4, -1))
    model = nn.Sequential(*(_Residual(bench, K, N, 0.5, max(1, K // 64)) for _ in range(4)))
    row = f"{x.shape[0]} x {x.shape[1]:,}, 4 layers with attention"
    yield row, "untrained", model, _training(model, x)


def _stack(bench: Bench) -> None:
    """Map a training step of eight blocks with norms and residuals, and of four layers of a Llama."""
    _map(bench, "stack of feed-forward blocks, training", _stacks(bench))


# --- SPLADE -----------------------------------------------------------------------------------------------------------


def _heads(bench: Bench) -> Iterator[Program]:
    vocabularies = [(16, 100)] if bench.quick else [(768, 30522), (2048, 151936)]
    sizes = [(2, 8)] if bench.quick else [(1, 32), (2, 128), (4, 128), (8, 128), (32, 256)]
    if not bench.cuda and not bench.quick:
        vocabularies, sizes = vocabularies[:1], sizes[:3]
    for D, V in vocabularies:
        for B, S in sizes:
            case = splade_head.Case(splade_head.Shape(B, S, D, V), bench.device, padding="random")
            args = case.hidden.detach(), case.mask
            row = f"{B} x {S} tokens, D {D}, V {V}"
            yield row, "inference", case.module, _inference(*args)
            yield row, "training", case.module, _training(case.module, *args)


def _splade(bench: Bench) -> None:
    """Map the head of naver/splade, with padded texts."""
    _map(bench, "SPLADE head", _heads(bench))


# --- Entmax -----------------------------------------------------------------------------------------------------------


def _attentions(bench: Bench) -> Iterator[Program]:
    sizes = [(32, 12, 128, 64), (32, 12, 512, 64), (8, 16, 2048, 128)]
    if bench.quick or not bench.cuda:
        sizes = [(1, 2, 16, 8)] if bench.quick else [(4, 4, 64, 64), (4, 8, 256, 64)]
    for B, H, L, D in sizes:
        q, k, v = torch.randn(3, B, H, L, D, device=bench.device)
        if bench.cuda:
            q, k, v = (t.bfloat16() for t in (q, k, v))
        lengths = torch.randint(L // 2, L + 1, (B, 1, 1, 1), device=bench.device)
        place = torch.arange(L, device=bench.device)
        masks = {
            "no mask": (),
            "padding": (place < lengths,),
            "causal": ((place[:, None] >= place).expand(B, 1, L, L).contiguous(),),
        }
        for name, mask in masks.items():
            row = f"{B} x {H} x {L}, D {D}, {name}"
            module = entmax_masks.Masked() if mask else entmax_masks.Attention()
            yield row, "inference", module, _inference(q, k, v, *mask)
            yield row, "training", module, _training(module, q, k, v, *mask)


def _routers(bench: Bench) -> Iterator[Program]:
    for rows, width in [(8, 4)] if bench.quick else [(4096, 4), (4096, 64), (8192, 2048)]:
        scores = torch.randn(rows, width, device=bench.device)
        module = entmax.Rows(1.5)
        yield f"{rows} rows of {width}", "inference", module, _inference(scores)
        yield f"{rows} rows of {width}", "training", module, _training(module, scores)


def _entmax(bench: Bench) -> None:
    """Map attention and rows, with the functions of the entmax package."""
    if importlib.util.find_spec("entmax") is None:
        bench.note("Not measured: entmax, whose package is not installed here.")
        return
    _map(bench, "entmax attention", _attentions(bench))
    _map(bench, "entmax of rows", _routers(bench))


# --- Scores -----------------------------------------------------------------------------------------------------------


class _Documents(nn.Module):
    """Top-k scores of documents that are arguments: padded rows of terms and weights."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, query: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return (query[:, ids] * weights).sum(-1).topk(self.k)


def _collections(bench: Bench) -> Iterator[Program]:
    terms, length = (50, 8) if bench.quick else (30522, 128)
    sizes = [
        (1000, 1, 10),
        (10_000, 1, 10),
        (10_000, 32, 100),
        (100_000, 1, 10),
        (100_000, 32, 100),
        (100_000, 256, 1000),
        (1_000_000, 8, 100),
    ]
    if bench.quick or not bench.cuda:
        sizes = [(20, 2, 3)] if bench.quick else sizes[:3]
    for documents, queries, k in sizes:
        ids = (terms * torch.rand(documents, length, device=bench.device) ** 3).long()
        weights = torch.rand(documents, length, device=bench.device)
        query = torch.rand(queries, terms, device=bench.device)
        query *= torch.rand_like(query) < 45 / terms
        row = f"{documents:,} documents, {queries} queries, k {k}"
        work = _inference(query, ids, weights)
        yield row, "changing", _Documents(k), _changing(work, weights)
        yield row, "constant", _Documents(k), work


def _changing(
    work: Callable[[Callable[..., object]], Work], written: Tensor
) -> Callable[[Callable[..., object]], Work]:
    """Return the same work, but mark a tensor as modified before each call, without a cost on the device."""

    def make(program: Callable[..., object]) -> Work:
        def call(*args: object) -> object:
            torch.autograd.graph.increment_version(written)
            return program(*args)

        return work(call)

    return make


def _scoring(bench: Bench) -> None:
    """Map documents that change from call to call, and documents that stay the same."""
    _map(bench, "sparse scores", _collections(bench))


SECTIONS = (
    *(
        part(f"{name}_{K}" + "_training" * training, _feed_forward, name, K, N, training)
        for training in (False, True)
        for name, K, N in SHAPES
    ),
    _stack,
    _splade,
    _entmax,
    _scoring,
)
