"""Sparse autoencoders: f = act(x @ W_enc + b); f @ W_dec, with 0.1 to 0.3 % of the neurons active.

The contenders run in one process and take turns: the module as users write it ("eager"), compiled ("compile"), compiled
with the patterns enabled ("ours", policy "always"), and compiled under the default policy ("default"), after the calls
at which the policy decides. A training step is forward and backward, with the gradients of all parameters. The rows
give GPU time, wall clock of back-to-back steps (for training also under CUDA graphs, mode "reduce-overhead"), and
memory beyond the gradients. x is N(0, 1). With ReLU, the biases leave 0.3 % of the neurons active.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparse_inductor
from benchmarks import measure
from benchmarks.bench import NONE, Bench, Label, Limits, compiled, rewritten, without_advice
from benchmarks.measure import Work

TOKENS, K = 4096, 32
PATTERNS = "topk_encode,sparse_decode,sparse_product,relu_ffn"
DECIDED = 40  # calls before timing; the policy reads its counters at the 4th and the 32nd

Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((768, 24_576), (2304, 16_384), (4096, 65_536))


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    bench.sections(_GPU if bench.cuda else _CPU)


# --- The programs -----------------------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """An autoencoder with ReLU: its weights, and the reconstruction with its loss."""

    W_enc: nn.Parameter
    returns = False
    """Whether activations and pre-activations are returned."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        D, N = shape
        like = {"device": device, "dtype": dtype}
        torch.manual_seed(0)
        made = {
            "W_enc": torch.randn(D, N, device=device) / D**0.5,
            "W_dec": F.normalize(torch.randn(N, D, device=device), dim=1),
            "b_enc": 0.3 * torch.randn(N, device=device),
            "b_dec": torch.zeros(D),
        }
        for name, t in made.items():
            self.register_parameter(name, nn.Parameter(t.to(**like)))
        if not isinstance(self, TopK):
            self.b_enc.data -= 2.88
        self.threshold = nn.Parameter(torch.full((N,), 0.01, **like))

    def act(self, pre: Tensor) -> Tensor:
        return F.relu(pre)

    def terms(self, f: Tensor) -> tuple[Tensor, ...]:
        """Return the term that is added to the loss, followed by the further results."""
        return (5 * (f * self.W_dec.norm(dim=1)).sum(-1).mean(),)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        pre = (x - self.b_dec) @ self.W_enc + self.b_enc
        f = self.act(pre)
        y = f @ self.W_dec + self.b_dec
        if not torch.is_grad_enabled():
            return y
        loss = (y.float() - x.float()).square().sum(-1).mean()
        more, *beside = self.terms(f)
        return loss + more, *beside, *((f, pre) if self.returns else ())


class Relu(Autoencoder):
    """With L1 weighted by the decoder's norms. Also returns the mean number of active neurons, and a mask of them."""

    def terms(self, f: Tensor) -> tuple[Tensor, ...]:
        return *super().terms(f), (f > 0).sum(-1).float().mean(), (f > 0).any(0)


class JumpRelu(Autoencoder):
    def act(self, pre: Tensor) -> Tensor:
        return pre * (pre > self.threshold)


class TopK(Autoencoder):
    """With the k largest pre-activations of each row."""

    k = K

    def act(self, pre: Tensor) -> Tensor:
        values, indices = pre.topk(self.k, dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter_(-1, indices, values.relu())

    def terms(self, f: Tensor) -> tuple[Tensor, ...]:
        return (self.b_dec.new_zeros(()),)


class TopKOfMany(TopK):
    k = 64


class Sparsify(TopK):
    """With the encoder and the decoder of the package eai-sparsify, and with weights in the package's layout."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        from sparsify.fused_encoder import fused_encoder
        from sparsify.utils import decoder_impl

        super().__init__(shape, device, dtype)
        self.W_enc = nn.Parameter(self.W_enc.detach().t().contiguous())
        self.encode, self.decode = fused_encoder, decoder_impl

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values, indices, _ = self.encode(x - self.b_dec, self.W_enc, self.b_enc, self.k, "topk")
        y = self.decode(indices, values.to(x.dtype), self.W_dec.mT) + self.b_dec
        return ((y.float() - x.float()).square().sum(-1).mean(),)


class BatchTopK(TopK):
    """With K pre-activations per row on average: the largest of all tokens."""

    def act(self, pre: Tensor) -> Tensor:
        flat = pre.relu().flatten()
        values, indices = flat.topk(self.k * pre.shape[0], sorted=False)
        return torch.zeros_like(flat).scatter(0, indices, values).view(pre.shape)


class ReluReturned(Autoencoder):
    returns = True


class TopKReturned(TopK):
    returns = True


class BatchTopKReturned(BatchTopK):
    returns = True


# --- Comparing --------------------------------------------------------------------------------------------------------


def _work(program: Callable[..., Any], module: nn.Module, x: Tensor, training: bool) -> Work:
    wanted = list(module.parameters())

    def call() -> object:
        if not training:
            with torch.no_grad():
                return program(x)
        out = program(x)
        return torch.autograd.grad(out[0], wanted, allow_unused=True)

    return call


def _compare(
    bench: Bench,
    kind: type[Autoencoder],
    shape: Shape,
    training: bool,
    limits: Limits = NONE,
    dtype: torch.dtype = torch.bfloat16,
    remark: str = "",
) -> None:
    tokens, shape = (64, (32, 512)) if bench.quick else (TOKENS if bench.cuda else 512, shape)
    name = f"{kind.__name__} {'training' if training else 'inference'}, {shape[0]} x {shape[1]}{remark}"
    torch._dynamo.reset()
    module = kind(shape, bench.device, dtype)
    x = torch.randn(tokens, shape[0], device=bench.device, dtype=dtype)
    programs = {"eager": module, "compile": compiled(module), "ours": rewritten(module, PATTERNS)}
    works = {n: _work(p, module, x, training) for n, p in programs.items()}
    for work in works.values():
        work()
    sparse_inductor.report().clear()
    with without_advice(), sparse_inductor.enabled(policy="auto"):
        works["default"] = _work(compiled(module), module, x, training)
        for _ in range(DECIDED):
            works["default"]()
        seconds = 0.1 if bench.quick else 1.2 if bench.cuda else 20.0
        labelled: dict[Label, Work] = {(name, n): work for n, work in works.items()}
        found = bench.race(labelled, seconds)
        steady = measure.steady(works, bench.device, seconds)
    done = bool(sparse_inductor.report().rewrites) and not sparse_inductor.report().pending
    bench.over(found, name, "compile", "ours", limits)
    wall = {n: s.wall_ms for n, s in steady.items()}
    said = f"{wall['compile']:.4g} ms / {wall['ours']:.4g} ms; eager {wall['eager']:.4g} ms"
    floor, goal = (None if n is None else 0.85 * n for n in limits)
    value = wall["compile"] / wall["ours"]
    bench.row(f"{name}: wall clock, compile over ours", value, "x", floor, goal, True, said)
    decided = f"{wall['default']:.4g} ms, {'rewritten' if done else 'as written'}"
    value = wall["compile"] / wall["default"]
    bench.row(f"{name}: wall clock, compile over default", value, "x", 0.97, 0.99, True, decided)
    if training and bench.cuda and kind is not TopKOfMany:
        _compare_graphs(bench, name, module, x, seconds)
    theirs, mine = (bench.found(name, n) for n in ("compile", "ours"))
    if training and theirs and mine and theirs.scratch_bytes and mine.scratch_bytes is not None:
        value = mine.scratch_bytes / theirs.scratch_bytes
        most = NONE if kind.returns or limits == NONE else (0.5, 0.25)
        note = f"{mine.scratch_bytes / 2**20:,.0f} MiB / {theirs.scratch_bytes / 2**20:,.0f} MiB"
        bench.row(f"{name}: memory beyond the gradients, ours", value, "x", *most, note=note)
    del programs, works, labelled, module
    gc.collect()


def _compare_graphs(
    bench: Bench, name: str, module: Autoencoder, x: Tensor, seconds: float
) -> None:
    how = {"mode": "reduce-overhead"}
    programs = {"compile": compiled(module, **how), "ours": rewritten(module, PATTERNS, **how)}
    works = {n: _work(p, module, x, True) for n, p in programs.items()}
    wall = {n: s.wall_ms for n, s in measure.steady(works, bench.device, seconds).items()}
    said = f"{wall['compile']:.4g} ms / {wall['ours']:.4g} ms"
    value = wall["compile"] / wall["ours"]
    label = f"{name}: wall clock under CUDA graphs, compile over ours"
    bench.row(label, value, "x", higher=True, note=said)


def _topk_training(bench: Bench) -> None:
    for shape, limits in zip(SHAPES, ((2.6, 3.6), (2.2, 2.9), (3.0, 4.2))):
        _compare(bench, TopK, shape, True, limits)


def _topk_inference(bench: Bench) -> None:
    for shape, limits in zip(SHAPES, ((2.7, 3.8), (2.0, 2.5), (2.0, 2.5))):
        _compare(bench, TopK, shape, False, limits)


def _relu_training(bench: Bench) -> None:
    for shape, limits in zip(SHAPES, ((1.9, 2.7), (1.8, 2.4))):
        _compare(bench, Relu, shape, True, limits)


def _relu_inference(bench: Bench) -> None:
    for kind in (Relu, JumpRelu):
        for shape, limits in zip(SHAPES, ((1.3, 1.7), (1.4, 1.7))):
            _compare(bench, kind, shape, False, limits)


def _wide(bench: Bench) -> None:
    _compare(bench, TopKOfMany, (1024, 1 << 20), True, (2.5, 4.0), remark=", k = 64")


def _peers(bench: Bench) -> None:
    """Compare TopK training with a published package, as it is and compiled."""
    if importlib.util.find_spec("sparsify") is None:
        bench.note("eai-sparsify is not installed: peers were not measured.")
        return
    for shape, limits in zip(SHAPES, ((2.4, 3.0), (1.9, 3.0), (2.0, 3.0))):
        torch._dynamo.reset()
        module, theirs = (kind(shape, bench.device, torch.bfloat16) for kind in (TopK, Sparsify))
        x = torch.randn(TOKENS, shape[0], device=bench.device, dtype=torch.bfloat16)
        case = f"TopK training and peers, {shape[0]} x {shape[1]}"
        works = {
            (case, "sparsify"): _work(theirs, theirs, x, True),
            (case, "sparsify, compiled"): _work(compiled(theirs), theirs, x, True),
            (case, "compile"): _work(compiled(module), module, x, True),
            (case, "ours"): _work(rewritten(module, PATTERNS), module, x, True),
        }
        found = bench.race(works, 1.2)
        best = min((n for _, n in works if n != "ours"), key=lambda n: found[case, n].ms)
        bench.over(found, case, best, "ours", limits, f"best peer ({best}) over ours")
        del works, module, theirs
        gc.collect()


def _returned(bench: Bench) -> None:
    for kind in (ReluReturned, TopKReturned):
        _compare(bench, kind, SHAPES[1], True, (1.4, 1.8))


def _batch_topk(bench: Bench) -> None:
    if not bench.cuda:
        for training in (True, False):
            _compare(bench, BatchTopK, SHAPES[0], training, dtype=torch.float32, remark=", fp32")
        return
    for shape in SHAPES:
        _compare(bench, BatchTopK, shape, True)
    for shape in SHAPES[:2]:
        _compare(bench, BatchTopKReturned, shape, True)
        _compare(bench, BatchTopK, shape, False)


def _fp32(bench: Bench) -> None:
    for allowed in (False, True) if bench.cuda else (False,):
        with _tf32(allowed):
            remark = f", fp32{', TF32' if allowed else ''}"
            limits = NONE if bench.cuda else (1.5, 2.5)
            _compare(bench, TopK, SHAPES[0], True, limits, torch.float32, remark)
            if bench.cuda:  # on a CPU, those of `_batch_topk` are in fp32
                for training in (True, False):
                    _compare(bench, BatchTopK, SHAPES[0], training, NONE, torch.float32, remark)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_CPU = (_fp32, _batch_topk)
_GPU = (
    _topk_training, _topk_inference, _batch_topk, _relu_training, _relu_inference, _returned, _wide, _peers, _fp32,
)  # fmt: skip
