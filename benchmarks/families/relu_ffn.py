"""ReLU feed-forward block, down(relu(gate(x)) * up(x)), with mostly zero hidden activations.

The contenders run in one process and take turns: the block as users write it, compiled ("compile"), and the same module
compiled after `sparse_inductor.enable()` ("ours"). The data has one of two patterns. In pattern I, the active neurons
of every row are independent. In pattern C, the rows of a 2 048-token sequence draw five sixths of their active neurons
from 512 neurons of that sequence. The number of active neurons differs between rows. Up to 8 192 tokens, both
contenders are replayed as CUDA graphs, so that host time is not measured; one row measures a training step without a
CUDA graph.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench import (
    INFERENCE,
    NONE,
    TRAINING,
    Bench,
    Label,
    Limits,
    Section,
    call,
    compiled,
    graphed,
    ratio,
    rewritten,
)
from benchmarks.measure import Timing, Work

REGULARISED = "forward + backward with an L1 term"
ADAPTED = "inference with adapters"
POOL, SEQUENCE, CODE = 512, 2048, 64
RANK = 16


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    bench.sections(_gpu_sections(bench) if bench.cuda else _cpu_sections(bench))


# --- The work ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """M tokens [M, K] and N neurons. `layers` blocks with separate weights run one after the other."""

    M: int
    K: int = 2048
    N: int = 5632
    gated: bool = True
    layers: int = 1

    def __str__(self) -> str:
        return f"M{self.M} K{self.K} N{self.N}" + ("" if self.gated else " not gated")


class Gated(nn.Module):
    """Llama's block with hidden_act="relu"."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(t) for t in (gate, up, down))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Regularised(Gated):
    """A gated block that also returns the mean absolute hidden activation, which is added to the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return F.linear(h, self.down), h.abs().mean()


class Adapted(nn.Module):
    """A gated block with a low-rank adapter (LoRA) for each projection; the projections are frozen."""

    def __init__(self, block: Gated) -> None:
        super().__init__()
        self.layers = {n: getattr(block, n).detach() for n in ("gate", "up", "down")}
        self.a, self.b = (
            nn.ParameterDict(
                {
                    n: torch.randn(*shape(w), dtype=w.dtype, device=w.device) / 64
                    for n, w in self.layers.items()
                }
            )
            for shape in (lambda w: (RANK, w.shape[1]), lambda w: (w.shape[0], RANK))
        )

    def _layer(self, name: str, x: Tensor) -> Tensor:
        adapted = F.linear(F.linear(x, self.a[name]), self.b[name])
        return F.linear(x, self.layers[name]) + 0.5 * adapted

    def forward(self, x: Tensor) -> Tensor:
        return self._layer("down", F.relu(self._layer("gate", x)) * self._layer("up", x))


class Plain(nn.Module):
    """The block of Vaswani et al., without biases."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.up)), self.down)


class Case:
    """Random data for which a share of the gates is positive.

    A gate is noise, scaled by a factor of the row, minus a threshold. In pattern C, the fit of the neuron to the row's
    sequence is added. Everything is encoded in x and the gate weights: 64 features carry the sequence, and one is
    constant. heavy: (share of the rows that are heavy, share of the neurons that are active in a heavy row).
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        share: float = 30 / 5632,
        pattern: str = "I",
        heavy: tuple[float, float] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.pattern = shape, pattern
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        M, K, N = shape.M, shape.K, shape.N
        like: dict[str, Any] = {"device": device, "dtype": self.dtype}
        noise = K - CODE - 1
        uneven = (1 + 0.2 * torch.randn(M, 1, device=device)).clamp(0.5, 1.5)
        x = torch.randn(M, K, **like)
        x[:, :noise] *= uneven.to(self.dtype)
        sequences = F.normalize(torch.randn(-(-M // SEQUENCE), CODE, device=device), dim=1)
        x[:, noise : noise + CODE] = sequences.repeat_interleave(SEQUENCE, 0)[:M].to(self.dtype)
        x[:, -1] = 1
        self.blocks: list[nn.Module] = []
        for _ in range(shape.layers):
            gate = torch.randn(N, K, **like).mul_(noise**-0.5)
            if pattern == "I":
                gate[:, noise:] = 0
            else:
                gate[:, noise : noise + CODE] *= noise**0.5  # the fit is N(0, 1)
                gate[:, -1] = 0
                gate[:, noise : noise + CODE] *= _coupling(x, gate, noise, share)
            part = x[torch.randperm(M, device=device)[:1024]]
            values = (part @ gate.T).float().flatten().sort().values
            threshold = values[int((1 - share) * (len(values) - 1))].item()
            gate[:, -1] = -threshold
            if heavy is not None:
                rows, much = heavy
                lower = values[int((1 - much) * (len(values) - 1))].item()
                x[torch.randperm(M, device=device)[: int(rows * M)], -1] = lower / threshold
            down = torch.randn(K, N, **like).mul_(0.2)
            if shape.gated:
                up = torch.randn(N, K, **like).mul_(K**-0.5)
                self.blocks.append(Gated(gate, up, down))
            else:
                self.blocks.append(Plain(gate, down))
        self.x = x
        first = self.blocks[0]
        weight = first.gate if isinstance(first, Gated) else first.up
        with torch.no_grad():
            count = (F.linear(x[:8192], weight) > 0).sum(1).float()
        self.active, self.most = count.mean().item(), int(count.max())
        self.grad = torch.randn(M, K, **like)

    @property
    def label(self) -> str:
        """The name in the tables: the shape and the number of active neurons."""
        return f"{self.shape} {self.pattern}, {self.active:.3g} active"

    def contender(self, name: str, kind: str) -> Work:
        """Return one way of running the blocks, which compiles in its first call."""
        make = compiled if name == "compile" else lambda m: rewritten(m, "relu_ffn")
        blocks = self.blocks
        if kind == REGULARISED:
            blocks = [Regularised(b.gate, b.up, b.down) for b in blocks if isinstance(b, Gated)]
        if kind == ADAPTED:
            torch.manual_seed(1)  # the same adapters for every contender
            blocks = [Adapted(b) for b in blocks if isinstance(b, Gated)]
        programs = [make(block) for block in blocks]

        def run(x: Tensor) -> Any:
            for program in programs:
                y = program(x)
            return y

        leaf = self.x.detach().requires_grad_(kind in (TRAINING, REGULARISED))
        grad = self.grad, self.grad.new_ones(())
        how = TRAINING if leaf.requires_grad else INFERENCE
        wanted = (leaf, *blocks[0].parameters())
        return call(run, (leaf,), how, wanted, grad if kind == REGULARISED else grad[0])

    def works(self, kind: str, graphs: bool) -> dict[Label, Work]:
        """Return the works for `Bench.race`."""
        found: dict[Label, Work] = {}
        for name in ("compile", "ours"):
            work = self.contender(name, kind)
            label = f"{self.label}, {kind}" + ", CUDA graph" * graphs
            found[label, name] = graphed(work) if graphs else work
        return found


def _coupling(x: Tensor, gate: Tensor, noise: int, share: float) -> float:
    """Return the factor of the fit at which five sixths of the active neurons are among the POOL that fit best."""
    rows = x[:: max(1, len(x) // 256)][:256].float()
    g = gate.float()
    random = rows[:, :noise] @ g[:, :noise].T
    fit = rows[:, noise:-1] @ g[:, noise:-1].T
    pool = torch.zeros_like(fit, dtype=torch.bool)
    pool.scatter_(1, fit.topk(min(POOL, fit.shape[1]), dim=1).indices, True)
    best, found = 1.0, 2.0
    for step in range(1, 80):
        values = random + 0.05 * step * fit
        ordered = values.flatten().sort().values
        active = values > ordered[int((1 - share) * (len(ordered) - 1))]
        away = abs((active & pool).sum().item() / max(1, active.sum().item()) - 5 / 6)
        if away < found:
            best, found = 0.05 * step, away
    return best


def _compare(
    bench: Bench,
    case: Case,
    kind: str,
    name: str,
    limits: Limits = NONE,
    graphs: bool = False,
) -> dict[Label, Timing]:
    """Race both contenders, and record a row with their ratio."""
    taken = bench.race(case.works(kind, graphs), 0.6 if bench.cuda else 10.0, weigh=False)
    remark = f"; {case.active:.3g} active a row, {case.most} at most"
    name = f"{name}: time, compile over ours"
    bench.compare(name, *taken.values(), limits=limits, higher=True, remark=remark)
    return taken


# --- The tables -------------------------------------------------------------------------------------------------------


def _case(bench: Bench, shape: Shape, **how: Any) -> Case:
    """Return data of this shape, or of a tiny one with `quick`."""
    if bench.quick:
        M, K, N = (min(n, most) for n, most in ((shape.M, 64), (shape.K, 128), (shape.N, 256)))
        shape = dataclasses.replace(shape, M=M, K=K, N=N)
    return Case(shape, bench.device, **how)


def _inference(bench: Bench) -> None:
    """Compare inference of many tokens, for both patterns."""
    limits = {
        (131072, "I"): (1.6, 2.2), (131072, "C"): (1.9, 2.7), (8192, "I"): (1.5, 1.8), (8192, "C"): (1.6, 2.3),
        (2048, "I"): (1.25, 1.5),
    }  # fmt: skip
    for (M, pattern), judged in limits.items():
        case = _case(bench, Shape(M), pattern=pattern)
        name = f"inference, {M} tokens, {pattern}"
        _compare(bench, case, INFERENCE, name, judged, graphs=M <= 8192)
        del case
        gc.collect()


def _decode(bench: Bench) -> None:
    """Compare inference of a few rows through six blocks, in one CUDA graph."""
    for M, limits in ((1, (2.0, 2.8)), (16, (1.25, 1.9))):
        case = _case(bench, Shape(M, layers=6))
        name = f"decode under CUDA graphs, {M} row{'s' * (M > 1)}, six blocks"
        _compare(bench, case, INFERENCE, name, limits, graphs=True)


def _not_gated(bench: Bench) -> None:
    case = _case(bench, Shape(4096, N=8192, gated=False), share=30 / 8192)
    _compare(bench, case, INFERENCE, "not gated, N 8192, 4096 tokens", (1.2, 1.6), graphs=True)


def _training(bench: Bench) -> None:
    """Compare a training step, and the memory that is saved between its forward and backward."""
    case = _case(bench, Shape(8192))
    _compare(bench, case, TRAINING, "training step, 8192 tokens, I", (1.7, 2.4), graphs=True)
    remark = "training step, 8192 tokens, I, not a CUDA graph"
    _compare(bench, case, TRAINING, remark)
    kept = {name: _kept(case, name) for name in ("compile", "ours")}
    note = (
        " / ".join(f"{kept[n] / 2**20:,.1f} MiB" for n in ("ours", "compile"))
        + " beyond the output"
    )
    value = kept["ours"] / max(1, kept["compile"])
    bench.row(
        "training memory saved for backward, ours over compile", value, "x", 0.4, 0.15, note=note
    )


def _adapters(bench: Bench) -> None:
    """Compare blocks with adapters that are not merged into the weights."""
    for share, what in ((30 / 5632, "I"), (0.5, "half the gates active")):
        case = _case(bench, Shape(8192), share=share)
        name = f"inference with adapters of rank {RANK}, 8192 tokens, {what}"
        _compare(bench, case, ADAPTED, name, graphs=True)


def _kept(case: Case, name: str) -> int:
    """Return the bytes that are held between forward and backward, without output and inputs."""
    program = (compiled if name == "compile" else lambda m: rewritten(m, "relu_ffn"))(
        case.blocks[0]
    )
    leaf = case.x.detach().requires_grad_()
    for _ in range(2):
        program(leaf).sum().backward()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = program(leaf)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - y.nbytes


def _half_active(bench: Bench) -> None:
    """Compare untrained blocks, which only `policy="always"` rewrites: the default leaves them as written."""
    sizes = {
        (INFERENCE, 1): (8192, 2560, 2433, 2049, 2048, 1793, 1152),
        (INFERENCE, 6): (16, 1),
        (TRAINING, 1): (8192, 2700, 2049),
        (REGULARISED, 1): (8192, 2700),
    }
    for (kind, layers), M in ((how, M) for how, tokens in sizes.items() for M in tokens):
        case = _case(bench, Shape(M, layers=layers), share=0.5)
        name = f"half the gates active, {M} row{'s' * (M > 1)}, {kind}"
        _compare(bench, case, kind, name, graphs=True)


def _heavy_rows(bench: Bench) -> None:
    """Compare data in which one row in a hundred has 900 active neurons with data without such rows."""
    works: dict[Label, Work] = {}
    for heavy in (None, (0.01, 900 / 5632)):
        case = _case(bench, Shape(8192), heavy=heavy)
        label = f"{case.shape}, {'1 % heavy rows' if heavy else 'no heavy rows'}"
        works[label, "ours"] = graphed(case.contender("ours", INFERENCE))
    without, beside = bench.race(works, weigh=False).values()
    name = "1 % of rows with 900 active, speed over that without them"
    bench.compare(name, without, beside, (0.9, 0.97), higher=True)


def _other_shapes(bench: Bench) -> None:
    """Compare the speedup of other shapes with that of K 2048, N 5632 at the same number of tokens."""
    for M, K, N in ((8191, 768, 3072), (4097, 4096, 14336), (2049, 8192, 28672)):
        ratios = []
        for shape in (Shape(M), Shape(M, K, N)):
            case = _case(bench, shape)
            name = f"other shapes: {M} tokens, K {shape.K}, N {shape.N}"
            ratios.append(ratio(*_compare(bench, case, INFERENCE, name, graphs=True).values()))
            del case
            gc.collect()
        usual, here = ratios
        value = here / usual if here and usual else None
        name = f"other shapes: {M} tokens, K {K}, N {N}, that over K 2048, N 5632's"
        bench.row(name, value, "x", 0.8, 0.95, True)


def _cpu_decode(bench: Bench) -> None:
    case = _case(bench, Shape(1), share=0.01)
    _compare(bench, case, INFERENCE, "CPU fp32 decode of one row, 1 % active", (1.5, 2.5))


def _cpu_half_active(bench: Bench) -> None:
    case = _case(bench, Shape(64), share=0.5)
    _compare(bench, case, INFERENCE, "CPU fp32, 64 rows, half the gates active", (0.9, 0.99))


def _gpu_sections(bench: Bench) -> list[Section]:
    many = [_inference, _decode, _not_gated, _training, _adapters]
    return [*many, _half_active, _heavy_rows, _other_shapes]


def _cpu_sections(bench: Bench) -> list[Section]:
    return [_cpu_decode, _cpu_half_active]
