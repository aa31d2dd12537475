"""Entmax attention with masks, short rows and a cache, compared with softmax attention in the same program.

The contenders run in one process and take turns: attention as users write it with the `entmax` package, compiled
("compile"), if its score matrices fit; the same module compiled after `sparse_inductor.enable()` ("ours"); and softmax
attention with the same mask, by each backend of SDPA that supports it, or by FlexAttention if the mask is a window.
Queries and keys are standard normal, and alpha is 1.5. In the case marked P, the query variance is 6, as in the paper.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    rewritten,
)
from benchmarks.measure import Timing, Work

SECONDS = 1.0
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.section(bench.measure_limits)
    if bench.cuda or bench.quick:
        bench.sections(_gpu_sections(bench))


# --- The programs -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention without a mask. `Hkv` heads of keys and values are repeated for the query heads, as in decoders."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        import entmax

        k, v = (_repeated(t, q.shape[1] // t.shape[1]) for t in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return entmax.entmax15(self.masked(scores, *given), dim=-1).to(v.dtype) @ v

    def masked(self, scores: Tensor, *given: Tensor) -> Tensor:
        return scores


def _repeated(t: Tensor, times: int) -> Tensor:
    if times == 1:
        return t
    B, H, L, D = t.shape
    return t[:, :, None].expand(B, H, times, L, D).reshape(B, H * times, L, D)


class Causal(Attention):
    """Attention with a causal mask that the program makes."""

    def masked(self, scores: Tensor, *given: Tensor) -> Tensor:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores.masked_fill(~keep, float("-inf"))


class CausalPadded(Causal):
    """Attention with a padding mask in addition to the program's own causal mask."""

    def masked(self, scores: Tensor, *given: Tensor) -> Tensor:
        return super().masked(scores).masked_fill(~given[0], float("-inf"))


class Masked(Attention):
    """Attention with a boolean tensor of the keys to keep."""

    def masked(self, scores: Tensor, *given: Tensor) -> Tensor:
        return scores.masked_fill(~given[0], float("-inf"))


class Biased(Attention):
    """Attention with a tensor that is added to the scores."""

    def masked(self, scores: Tensor, *given: Tensor) -> Tensor:
        return scores + given[0]


@dataclasses.dataclass
class Case:
    """One program, its tensors, and the arguments with which SDPA applies the same mask."""

    name: str
    program: Attention
    size: tuple[int, int, int, int, int, int]
    """B, H, Hkv, Lq, Lk, D."""
    mask: Tensor | None = None
    causal: bool = False
    """The argument `is_causal` of SDPA."""
    variance: float = 1.0
    width: int = 0
    """The width of the window for FlexAttention; 0 means that the mask is not a window."""
    alone: bool = False
    """Whether the case has no softmax attention to compare with."""

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return queries, keys, values and the output's gradient."""
        torch.manual_seed(0)
        B, H, Hkv, Lq, Lk, D = self.size
        shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D))
        q, k, v, grad = (torch.randn(s, device=device) for s in shapes)
        q, k, v, grad = (t.to(_dtype(device)) for t in (q * self.variance**0.5, k, v, grad))
        for t in (q, k, v):
            t.requires_grad_()
        return q, k, v, grad

    def softmax(
        self, device: torch.device
    ) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """Return softmax attention by every backend that may support this mask."""
        if self.alone:
            return {}
        if self.width:
            return {"flex": _window(self.size[4], self.width, device)}

        def by(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(
                        q, k, v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1]
                    )  # fmt: skip

            return call

        if device.type != "cuda":
            return {"math": by(SDPBackend.MATH)}
        return {name: by(backend) for name, backend in BACKENDS.items() if self._fits(name)}

    def _fits(self, backend: str) -> bool:
        B, H, _, Lq, Lk, _ = self.size
        return backend != "math" or B * H * Lq * Lk <= 2**29


def _window(length: int, width: int, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j > i - width)

    blocks = create_block_mask(seen, None, None, length, length, device=device)
    flex = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: flex(q, k, v, block_mask=blocks)


# --- Comparing --------------------------------------------------------------------------------------------------------


def _compare(
    bench: Bench,
    case: Case,
    floors: Limits = NONE,
    goals: Limits = NONE,
    unrewritten: bool = False,
    kinds: Sequence[str] = (INFERENCE, TRAINING),
) -> dict[str, Timing]:
    """Compare "ours" with softmax attention and the unrewritten program; return its timings by kind."""
    torch._dynamo.reset()
    *leaves, grad = case.inputs(bench.device)
    given = () if case.mask is None else (case.mask,)
    ours, compile = rewritten(case.program, "entmax_attention"), compiled(case.program)
    softmax = case.softmax(bench.device)
    mine: dict[str, Timing] = {}
    for kind, floor, goal in zip(kinds, floors, goals):
        works: dict[Label, Work] = {}
        name = f"{case.name}, {kind}"
        for label, run in softmax.items():
            work = call(run, leaves, kind, leaves, grad)
            try:
                work()
            except RuntimeError as error:
                bench.left_out(name, label, f"not measured: {str(error).splitlines()[0][:80]}")
            else:
                works[name, label] = work
        peers = [label for _, label in works]
        works[name, "ours"] = call(ours, (*leaves, *given), kind, leaves, grad)
        if unrewritten:
            works[name, "compile"] = call(compile, (*leaves, *given), kind, leaves, grad)
        found = bench.race(works, SECONDS, weigh=False)
        mine[kind] = found[name, "ours"]
        if softmax:
            best = min(peers, key=lambda p: found[name, p].ms, default="none")
            bench.over(found, name, "ours", best, (floor, goal), f"ours over softmax ({best})")
        if unrewritten:
            bench.over(found, name, "compile", "ours", (1.5, 3.0))
    return mine


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def _additive(keep: Tensor) -> Tensor:
    dtype = _dtype(keep.device)
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(
        ~keep, torch.finfo(dtype).min
    )


def _kept(counts: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Return padding masks [B, 1, 1, length] that keep the given number of keys of each batch element."""
    keep = torch.arange(length, device=device) < torch.tensor(counts, device=device)[:, None]
    return keep[:, None, None]


def _gpu_sections(bench: Bench) -> list[Section]:
    device, tiny = bench.device, bench.quick

    def sized(size: tuple[int, ...]) -> tuple[int, int, int, int, int, int]:
        B, H, Hkv, Lq, Lk, D = (min(n, most) for n, most in zip(size, (2, 4, 2, 64, 64, 16)))
        small = (B, H, min(Hkv, H) if size[1] != size[2] else H, Lq, Lk, D)
        return small if tiny else (size[0], size[1], size[2], size[3], size[4], size[5])

    def masks(bench: Bench) -> None:
        """Measure all ways of writing a mask, at one length."""
        size = sized((2, 16, 16, 8192, 8192, 64))
        L = size[4]
        keep = _causal(L, device)
        half = _kept([L // 2] * size[0], L, device)
        name = f"{size[0]} x {size[1]} x {L} D{size[5]}"
        cases = {
            "none": Case(f"no mask, {name}", Attention(), size),
            "known": Case(f"causal, made by the program, {name}", Causal(), size, causal=True),
            "added": Case(f"causal, added, {name}", Biased(), size, _additive(keep)),
            "bool": Case(f"causal, boolean, {name}", Masked(), size, keep),
            "half": Case(f"half of the keys padded, {name}", Masked(), size, half),
        }
        limits = {"added": ((4.0, 3.0), (2.5, 2.0)), "bool": ((4.0, 3.0), (2.5, 2.0))}
        taken = {
            key: _compare(bench, case, *limits.get(key, (NONE, NONE)))
            for key, case in cases.items()
        }
        for key, peer, floor, goal in (
            ("added", "known", 1.15, 1.03),
            ("bool", "known", 1.15, 1.03),
            ("half", "none", 0.65, 0.55),
        ):
            for kind in (INFERENCE, TRAINING):
                label = f"{cases[key].name}, {kind}: time over {cases[peer].name.partition(',')[0]}"
                if key != "half":
                    label += " made by the program"
                bench.compare(label, taken[key][kind], taken[peer][kind], (floor, goal))

    def wide_heads(bench: Bench) -> None:
        size = sized((8, 16, 16, 2048, 2048, 128))
        keep = _causal(size[4], device)
        name = f"{size[0]} x {size[1]} x {size[4]} D{size[5]}"
        limits: tuple[Limits, Limits] = ((4.0, 2.8), (2.5, 1.8))
        _compare(
            bench, Case(f"causal, added, {name}", Biased(), size, _additive(keep)), *limits, True
        )
        _compare(bench, Case(f"causal, boolean, {name}", Masked(), size, keep), *limits)
        _compare(bench, Case(f"causal, made by the program, {name}", Causal(), size, causal=True))

    def short_rows(bench: Bench) -> None:
        longer = (2.0, 1.3), (1.3, 1.0)
        for L, floors, goals in ((128, (1.5, 1.3), (1.0, 1.0)), (256, *longer), (512, *longer)):
            size = sized((32, 12, 12, L, L, 64))
            name = f"{size[0]} x {size[1]} x {L} D{size[5]}"
            _compare(bench, Case(f"no mask, {name}", Attention(), size), floors, goals, True)
            counts = [L - i * L // (2 * size[0]) for i in range(size[0])]
            keep = _kept(counts, size[4], device)
            _compare(bench, Case(f"padding, {name}", Masked(), size, keep), floors, goals)
            bias = torch.randn(1, size[1], *size[3:5], dtype=_dtype(device), device=device)
            _compare(bench, Case(f"a bias for each head, {name}", Biased(), size, bias))

    def window(bench: Bench) -> None:
        size = sized((1, 16, 16, 16384, 16384, 64))
        width = size[4] // 16
        i, j = torch.arange(size[4], device=device)[:, None], torch.arange(size[4], device=device)
        keep = ((j <= i) & (j > i - width))[None, None]
        name = f"window of {width}, boolean, {size[0]} x {size[1]} x {size[4]} D{size[5]}"
        _compare(bench, Case(name, Masked(), size, keep, width=width), (2.5, None), (1.5, None))

    def decode(bench: Bench) -> None:
        size = sized((8, 32, 8, 1, 8192, 128))
        L = size[4]
        name = f"decode, {size[0]} x {size[1]} heads, {size[2]} of keys, {L} keys D{size[5]}"
        kinds = (INFERENCE,)
        _compare(bench, Case(name, Attention(), size), (2.0, None), (1.2, None), True, kinds)
        keep = _kept([L - i * L // (2 * size[0]) for i in range(size[0])], L, device)
        padded = Case(f"{name}, padded", Masked(), size, keep)
        _compare(bench, padded, (2.0, None), (1.2, None), True, kinds)

    def long(bench: Bench) -> None:
        size = sized((2, 16, 16, 16384, 16384, 64))
        L = size[4]
        name = f"{size[0]} x {size[1]} x {L} D{size[5]} P"
        keep = _kept([L - L // 3] * size[0], L, device)
        plain = Case(
            f"causal, made by the program, {name}", Causal(), size, causal=True, variance=6.0
        )
        _compare(bench, plain, (None, 1.0), (None, 0.67))
        both_masks = Case(
            f"causal, a third of the keys padded, {name}",
            CausalPadded(),
            size,
            keep,
            variance=6.0,
            alone=True,
        )
        # SDPA applies only one of the two masks: as causal attention, it reads the padded keys too.
        mine = _compare(bench, both_masks, kinds=(TRAINING,))
        theirs = bench.found(f"{plain.name}, {TRAINING}", "flash")
        if theirs and theirs.ms:
            value = mine[TRAINING].ms / theirs.ms
            note = f"{mine[TRAINING].ms:.4g} ms / {theirs.ms:.4g} ms"
            label = f"{both_masks.name}, {TRAINING}: time, ours over causal softmax (flash)"
            bench.row(label, value, "x", 1.0, 0.67, note=note)

    return [masks, wide_heads, short_rows, window, decode, long]
