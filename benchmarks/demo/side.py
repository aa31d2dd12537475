"""One side of the demo, unrewritten or rewritten, in a separate process so that its memory is measured separately."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from torch import Tensor, nn

import sparse_inductor
from benchmarks.measure import PeakMeter

from .model import Batch, Sizes, Splade, batches, load, load_tokenizer, loss_of, top_terms

# Gradients with less than this share of the largest norm are rounding noise. For example, the gradient of a key's bias
# is zero in exact arithmetic.
_NOISE = 1e-4


@dataclasses.dataclass
class Found:
    """The results of one side. Times are in ms unless named otherwise, memory in bytes over the start of the step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    first_step_s: float = 0.0
    step_ms: float = 0.0
    step_peak: int = 0
    encode_ms: float = 0.0
    encode_peak: int = 0
    value_error: float = 0.0
    gradient_error: float = 0.0
    worst_gradient: str = ""
    report: str = ""
    rewrites: int = 0
    sentence: str = ""
    terms: list[tuple[str, float]] = dataclasses.field(default_factory=list)


class Side:
    """One side: its model is built, trained, used for encoding and compared with a reference."""

    def __init__(self, sizes: Sizes, device: torch.device, rewritten: bool) -> None:
        self.sizes = sizes
        self.device = device
        self.rewritten = rewritten
        self.name = "rewritten" if rewritten else "unrewritten"
        self.found = Found()

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"  {self.name}: {text}", flush=True)

    def run(self) -> Found:
        """Run everything, in the order that disturbs the memory measurements least."""
        self.say("building the encoder")
        model, tokenizer = load(self.sizes), load_tokenizer(self.sizes)
        data = [batch.to(self.device) for batch in batches(tokenizer, self.sizes)]
        model = model.to(self.device).train()
        with (
            sparse_inductor.enabled(policy="always") if self.rewritten else contextlib.nullcontext()
        ):
            compiled = torch.compile(model)
            values, gradients = self._train(compiled, model, data)
            encoded = self._encode(compiled, model, data[0])
        if self.rewritten:
            report = sparse_inductor.report()
            self.found.report = str(report)
            self.found.rewrites = sum(r.pattern == "splade_head" for r in report.rewrites)
        self.found.sentence = tokenizer.decode(data[0].input_ids[0], skip_special_tokens=True)
        self.found.terms = top_terms(encoded[0], tokenizer, 8)
        del compiled, model, encoded
        self._compare(values, gradients, data[0])
        return self.found

    # On CUDA the encoder runs in bf16 autocast, as is usual in training.
    def _autocast(self) -> Any:
        return (
            torch.autocast("cuda", torch.bfloat16)
            if self.device.type == "cuda"
            else contextlib.nullcontext()
        )

    def _train(
        self, compiled: Callable[..., Tensor], model: Splade, data: list[Batch]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all steps. Returns representations and gradients of the first, when both sides have the same weights."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
        values, gradients = torch.empty(0), []
        times: list[float] = []
        for at, batch in enumerate(data):
            if at == 0:
                self.say(
                    f"training step 1 of {len(data)} (it compiles; a minute or two on a small CPU)"
                )
            meter = PeakMeter(self.device)
            with meter, self._clock(times):
                with self._autocast():
                    out = compiled(batch.input_ids, batch.attention_mask)
                loss = loss_of(out)
                loss.backward()
                if at == 0:
                    values, gradients = out.detach().clone(), _gradients(model)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.found.losses.append(loss.item())
            self.found.step_peak = meter.peak
            self.say(
                f"training step {at + 1} of {len(data)}: {times[-1]:.2f} s, loss {self.found.losses[-1]:.4f}"
            )
            del out, loss
        self.found.first_step_s = times[0]
        self.found.step_ms = statistics.median(times[1:]) * 1e3
        return values, gradients

    def _encode(self, compiled: Callable[..., Tensor], model: Splade, batch: Batch) -> Tensor:
        """Return the representations of one batch, without gradients. The second pass is measured."""
        model.eval()
        self.say("encoding (it compiles)")
        times: list[float] = []
        with torch.no_grad(), self._autocast():
            compiled(batch.input_ids, batch.attention_mask)
            with PeakMeter(self.device) as meter, self._clock(times):
                encoded = compiled(batch.input_ids, batch.attention_mask)
        self.found.encode_ms, self.found.encode_peak = times[0] * 1e3, meter.peak
        self.say(f"encoding: {times[0]:.2f} s")
        return encoded

    @contextlib.contextmanager
    def _clock(self, times: list[float]) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        times.append(time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _compare(self, values: Tensor, gradients: list[Tensor], batch: Batch) -> None:
        """Compute the errors of the first step against the same step, unrewritten, eager and in higher precision."""
        precise = torch.float32 if self.device.type == "cuda" else torch.float64
        self.say(f"comparing with the eager program in {str(precise).removeprefix('torch.')}")
        gc.collect()
        reference = load(self.sizes).to(self.device, precise).train()
        out = reference(batch.input_ids, batch.attention_mask)
        loss_of(out).backward()
        self.found.value_error = _error(values, out.detach())
        truth = _gradients(reference, copy=False)
        names = [name for name, p in reference.named_parameters() if p.grad is not None]
        least = _NOISE * max(t.norm().item() for t in truth)
        errors = [
            (_error(mine, exact), name)
            for mine, exact, name in zip(gradients, truth, names, strict=True)
            if exact.norm().item() >= least
        ]
        self.found.gradient_error, self.found.worst_gradient = max(errors)


def _gradients(model: nn.Module, copy: bool = True) -> list[Tensor]:
    """Return the gradients in the order of the parameters."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.clone() for g in found] if copy else found


def _error(value: Tensor, exact: Tensor) -> float:
    """Return ‖value - exact‖ / ‖exact‖, or infinity if that is not finite."""
    error = ((value.to(exact.dtype) - exact).norm() / exact.norm()).item()
    return error if error < float("inf") else float("inf")


def main() -> int:
    """`python -m benchmarks.demo.side JSON`: run one side and write its results to the caller's file."""
    asked = json.loads(sys.argv[1])
    side = Side(Sizes(**asked["sizes"]), torch.device(asked["device"]), asked["rewritten"])
    try:
        found = side.run()
    except (OSError, ValueError) as error:  # the model does not exist or is not a masked LM
        where = f"--model {side.sizes.model}: " if side.sizes.model is not None else ""
        print(f"error: {where}{' '.join(str(error).split())[:600]}", file=sys.stderr)
        return 2
    Path(asked["result"]).write_text(json.dumps(dataclasses.asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
