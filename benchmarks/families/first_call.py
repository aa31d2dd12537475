"""The first call of a compiled program: seconds to its result, with and without the plugin, in new processes.

The longest training step after a change of policy is measured as well: from one step to the next, all neurons become
inactive. The figure is the excess of the longest step from then on over the median.

A process imports torch and makes the model and its inputs before the clock starts. The measured time covers `enable()`,
`torch.compile` and one call (a training step or inference) under the default policy. The two processes of a program run
side by side, first with empty caches of Inductor and Triton, then with the caches that the first run filled. The
bytecode of modules exists from the start, as after an installation with pip. A ratio is enabled over compile, so above
1 is a loss.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench import Bench, part
from benchmarks.measure import ROOT

AGAIN = 3  # runs with filled caches; the median counts
Made = tuple[nn.Module, tuple[Tensor, ...]]
"""A module and the arguments of its call."""


def run(bench: Bench) -> None:
    """Time the first call of every program; each program is a part."""
    with tempfile.TemporaryDirectory() as bytecode:
        bench.sections(part(name, _first_calls, name, Path(bytecode, name)) for name in PROGRAMS)


def _first_calls(bench: Bench, name: str, bytecode: Path) -> None:
    """Measure one program, with two new processes for each lap."""
    says = PROGRAMS[name].says
    if bench.late():
        bench.note(f"Not measured for want of time: {says}.")
        return
    if "entmax" in name and importlib.util.find_spec("entmax") is None:
        bench.note("Not measured: entmax, whose package is not installed here.")
        return
    size = "quick" if bench.quick else "full"
    if not bench.quick:
        _pair(name, bench, bytecode, "quick")  # writes the bytecode of the imported modules
    with tempfile.TemporaryDirectory() as folder:
        cold, *warm = (
            _pair(name, bench, bytecode, size, Path(folder))
            for _ in range(2 if bench.quick else 1 + AGAIN)
        )
    if PROGRAMS[name].changes:
        for caches, pairs in (("empty", [cold]), ("filled", warm)):
            theirs, ours = (statistics.median(p[i]["seconds"] for p in pairs) for i in range(2))
            title = f"{says}, {caches} caches: longest step over a usual one"
            bench.row(title, ours, "s", 1.0, 0.1, note=f"without a change {theirs:.3g} s")
            bench.say(f"{title}: {ours:.3g} s (without a change {theirs:.3g} s)")
        return
    warm.sort(key=lambda pair: pair[1]["seconds"] / pair[0]["seconds"])
    rewritten = bool(cold[1]["rewrites"])
    what = "rewritten at once" if rewritten else "as written"
    laps = (("empty", cold, 1.5 if rewritten else 1.05), ("filled", warm[len(warm) // 2], 1.1))
    for caches, (theirs, ours), floor in laps:
        note = f"{what}: {ours['seconds']:.3g} s / {theirs['seconds']:.3g} s"
        value = ours["seconds"] / theirs["seconds"]
        bench.row(f"{says}, {caches} caches", value, "x", floor, note=note)
        bench.say(f"{says}, {caches} caches: {value:.3f} ({note})")


def _pair(
    name: str, bench: Bench, bytecode: Path, size: str, caches: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run two processes side by side, without the plugin and with it; return their results."""
    folder = caches or bytecode
    processes = []
    for how in ("compile", "enabled"):
        environment = dict(
            os.environ,
            TORCHINDUCTOR_CACHE_DIR=str(folder / how / "inductor"),
            TRITON_CACHE_DIR=str(folder / how / "triton"),
            PYTHONPYCACHEPREFIX=str(bytecode / "python"),
            PYTHONDONTWRITEBYTECODE="",
        )
        command = [sys.executable, "-m", __name__, name, how, bench.device.type, size]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    told = []
    for process in processes:
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{name}: a process ended with status {process.returncode}")
        told.append(json.loads(out.splitlines()[-1]))
    return told[0], told[1]


# --- The measured process ---------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """A pre-norm encoder layer with PyTorch's attention and a ReLU feed-forward block."""

    def __init__(self, width: int, neurons: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, neurons), nn.Linear(neurons, width)

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:2], 3, x.shape[-1] // 64 or 1, -1)
        q, k, v = self.qkv(self.norms[0](x)).view(size).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class _Encoder(nn.Module):
    """A SPLADE encoder without its embedding."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(_Block(width, 4 * width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(self.body(x))
        return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)


class _Attention(nn.Module):
    """Self-attention with entmax-1.5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        import entmax

        size = (*x.shape[:2], 3, x.shape[-1] // 64 or 1, -1)
        q, k, v = self.qkv(x).view(size).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return entmax.entmax15(scores, dim=-1).to(v.dtype) @ v


class Scores(nn.Module):
    """Top-k scores of documents that are buffers: padded rows of terms and weights."""

    def __init__(self, documents: int, terms: int, length: int, best: int) -> None:
        super().__init__()
        self.best = best
        self.register_buffer("ids", torch.randint(terms, (documents, length)))
        self.register_buffer("weights", torch.rand(documents, length))

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return (query[:, self.ids] * self.weights).sum(-1).topk(self.best)


def _blocks(full: bool) -> Made:
    layers, width, tokens = (4, 2048, 2048) if full else (1, 32, 8)
    body = nn.Sequential(*(_Block(width, 4 * width) for _ in range(layers)))
    return body, (torch.randn(4, tokens, width),)


def _splade(full: bool) -> Made:
    layers, width, vocabulary, tokens = (12, 768, 30522, 128) if full else (1, 32, 50, 8)
    x, lengths = torch.randn(16, tokens, width), torch.randint(tokens // 2, tokens + 1, (16, 1))
    mask = (torch.arange(tokens) < lengths).long()
    return _Encoder(layers, width, vocabulary), (x, mask)


def _entmax(full: bool) -> Made:
    width, tokens = (768, 2048) if full else (32, 8)
    return _Attention(width), (torch.randn(4, tokens, width),)


def _scoring(full: bool) -> Made:
    documents, terms, length = (100_000, 30522, 128) if full else (20, 50, 4)
    return Scores(documents, terms, length, 3), (torch.rand(8, terms),)


class Program(NamedTuple):
    """A program: its description, a function that makes it in full or small size, and two properties.

    train: whether a backward follows. changes: whether the policy changes its decision later.
    """

    says: str
    make: Callable[[bool], Made]
    train: bool
    changes: bool = False


_BLOCKS = "4 blocks of 2,048 x 8,192, 8,192 tokens"
_ENCODER = "SPLADE encoder, 12 layers, 16 x 128 tokens"
PROGRAMS = {
    "blocks": Program(f"{_BLOCKS}, inference", _blocks, False),
    "blocks_training": Program(f"{_BLOCKS}, training", _blocks, True),
    "splade": Program(f"{_ENCODER}, inference", _splade, False),
    "splade_training": Program(f"{_ENCODER}, training", _splade, True),
    "entmax_training": Program("entmax attention, 4 x 12 x 2,048, training", _entmax, True),
    "scores": Program("sparse scores of 100,000 documents", _scoring, False),
    "change": Program(f"{_BLOCKS}, training, a change of policy", _blocks, True, changes=True),
}


def _child(name: str, how: str, device: str, size: str) -> dict[str, Any]:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    module, given = program.make(size == "full")
    cuda = device == "cuda"
    half = torch.bfloat16 if cuda and "scores" not in name else None
    module = module.to(device, half)
    inputs = [x.to(device, half if x.is_floating_point() else None) for x in given]
    synchronize = torch.cuda.synchronize if cuda else lambda: None

    import sparse_inductor

    synchronize()
    start = time.perf_counter()
    if how == "enabled":
        sparse_inductor.enable()
    compiled = torch.compile(module)

    def call() -> float:
        """Run one call; return the time at which it ends."""
        if program.train:
            compiled(*inputs).float().square().mean().backward()
        else:
            with torch.no_grad():
                compiled(*inputs)
        synchronize()
        return time.perf_counter()

    seconds = call() - start
    if program.changes:
        seconds = _longest_step(module, call)
    return {"seconds": seconds, "rewrites": len(sparse_inductor.report().rewrites)}


def _longest_step(module: nn.Module, call: Callable[[], float]) -> float:
    """Make all neurons inactive, and return the seconds by which the longest step exceeds the median after that."""
    from sparse_inductor.policy.profile import LOOKS

    first, second = LOOKS[:2]
    for _ in range(1, first):
        call()
    with torch.no_grad():
        for block in module.modules():
            if isinstance(block, _Block):
                block.up.bias.fill_(-100.0)
    ends = [call() for _ in range(second)]
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return max(steps) - statistics.median(steps)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = _child(*sys.argv[1:])
    print(json.dumps(found))
