"""`python -m benchmarks.demo`: train and encode with a SPLADE model, first as torch.compile does it, then rewritten.

Prints the rewrites, the errors of both programs against a reference in higher precision, and time and memory side by
side. The exit status is 0 if the head was rewritten and its errors are within limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .model import Sizes

# The error of the rewritten program may be this factor times that of the unrewritten one, plus an allowance for
# rounding. If two positions nearly tie, rounding decides the maximum and thereby the position that gets the gradient.
_FACTOR = 1.5
_ROUNDING = {
    "cpu": {"value_error": 1e-5, "gradient_error": 2e-3},
    "cuda": {"value_error": 1e-2, "gradient_error": 5e-2},
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is invalid."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="a masked-LM checkpoint (default: random weights)"
    )
    parser.add_argument(
        "--layers", type=int, help="encoder layers (default: 12 on a GPU, 4 on a CPU)"
    )
    parser.add_argument(
        "--batch", type=int, help="pairs of query and document (default: 32 on a large GPU, else 8)"
    )
    parser.add_argument(
        "--seq", type=int, help="tokens a text (default: 256 on a GPU, 64 on a CPU)"
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    parser.add_argument(
        "--hidden", type=int, default=768, help="hidden size (default: 768, as BERT)"
    )
    parser.add_argument(
        "--vocab", type=int, default=30522, help="vocabulary entries (default: 30522, as BERT)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="default: a GPU if there is one",
    )
    asked = parser.parse_args(argv)
    if asked.model is not None and asked.layers is not None:
        parser.error("--layers: the checkpoint given by --model has its own number of layers")
    for option, least, why in (
        ("layers", 1, ""), ("batch", 2, ": the loss contrasts the pairs of a batch"), ("seq", 8, ""),
        ("steps", 2, ": the first step compiles, so a second one is needed for the time"),
        ("hidden", 8, ""), ("vocab", 200, ": the tokenizer needs an alphabet"),
    ):  # fmt: skip
        value = getattr(asked, option)
        if value is not None and value < least:
            parser.error(f"--{option} must be at least {least}{why}; got {value}")
    if asked.hidden > 64 and asked.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64 from 64 on; got {asked.hidden}")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    asked = parse(argv)
    started = time.monotonic()
    print("sparse_inductor demo: loading torch and transformers ...", flush=True)
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda, but torch sees no CUDA GPU here", file=sys.stderr)
        return 2
    on_gpu = asked.device == "cuda" or (asked.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        sizes = _sizes(asked, device, folder)
        print(_introduction(sizes, device), flush=True)
        if asked.model is None:
            _make_tokenizer(sizes)
        plain = _side(sizes, device, False, Path(folder))
        ours = _side(sizes, device, True, Path(folder)) if plain else None
    if plain is None or ours is None:
        return 1
    wrong = _conclude(plain, ours, device)
    verdict = f"FAILED: {'; '.join(wrong)}" if wrong else "All right"
    print(f"\n{verdict} ({time.monotonic() - started:.0f} s)")
    return 1 if wrong else 0


def _sizes(asked: argparse.Namespace, device: torch.device, folder: str) -> Sizes:
    """Return the sizes. The defaults are chosen so that the machine needs a few minutes."""
    import torch

    from .model import Sizes

    layers, batch, seq = 6, 8, 128
    if device.type == "cuda":
        large = torch.cuda.get_device_properties(device).total_memory > 64 * 2**30
        layers, batch, seq = 12, 32 if large else 8, 256
    return Sizes(
        asked.model,
        asked.model or str(Path(folder) / "tokenizer"),
        asked.layers or layers,
        asked.hidden,
        asked.vocab,
        asked.batch or batch,
        asked.seq or seq,
        asked.steps,
    )


def _introduction(sizes: Sizes, device: torch.device) -> str:
    from benchmarks.measure import device_name

    what = sizes.model or (
        f"random weights, {sizes.layers} layers, hidden size {sizes.hidden}, vocabulary {sizes.vocab}"
    )
    kind = "bf16 autocast" if device.type == "cuda" else "fp32"
    return (
        f"encoder: masked LM with SPLADE max pooling, {what}\n"
        f"data:    {sizes.batch} pairs of query and document a step, {sizes.seq} tokens each, {sizes.steps} steps\n"
        f"device:  {device_name(device)}, {kind}"
    )


def _make_tokenizer(sizes: Sizes) -> None:
    """Build the tokenizer once, for both sides."""
    from .model import sentences, train_tokenizer

    tokenizer = train_tokenizer(sentences(), sizes.vocab)
    tokenizer.save_pretrained(sizes.tokenizer)
    print(
        f"tokenizer: {len(tokenizer)} word pieces, built from {len(sentences())} sentences",
        flush=True,
    )


def _side(
    sizes: Sizes, device: torch.device, rewritten: bool, folder: Path
) -> dict[str, Any] | None:
    """Run one side in a separate process; print a message and return None if it fails."""
    from benchmarks.measure import RETURN_MEMORY, ROOT

    name = "rewritten" if rewritten else "unrewritten"
    result = folder / f"{name}.json"
    asked = {
        "sizes": dataclasses.asdict(sizes),
        "device": str(device),
        "rewritten": rewritten,
        "result": str(result),
    }
    # The working directory stays the caller's, because --model may be a relative path.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, **RETURN_MEMORY, "PYTHONPATH": path}
    command = [sys.executable, "-m", "benchmarks.demo.side", json.dumps(asked)]
    status = subprocess.run(command, env=env, check=False).returncode
    if status or not result.exists():
        print(f"FAILED: the {name} side ended with status {status}", flush=True)
        return None
    return json.loads(result.read_text())


def _conclude(plain: dict[str, Any], ours: dict[str, Any], device: torch.device) -> list[str]:
    """Print the report and the tables; return the list of errors."""
    from benchmarks.publish import aligned

    print("\n" + ours["report"] + "\n")
    print(aligned(_table(plain, ours)) + "\n")
    print(f'largest terms of "{ours["sentence"][:70]}"')
    print("  " + ", ".join(f"{word} {value:.2f}" for word, value in ours["terms"]))
    return verdict(plain, ours, device.type)


def verdict(plain: Mapping[str, Any], ours: Mapping[str, Any], device: str) -> list[str]:
    """Return the errors of the rewritten side, if any."""
    wrong = [] if ours["rewrites"] else ["the head was not rewritten"]
    for what, rounding in _ROUNDING[device].items():
        if not ours[what] <= _FACTOR * plain[what] + rounding:  # NaN counts as wrong, too
            name = what.replace("_", " ")
            wrong.append(f"{name} {ours[what]:.2g} against {plain[what]:.2g} unrewritten")
    return wrong


def _table(plain: dict[str, Any], ours: dict[str, Any]) -> list[list[str]]:
    def line(name: str, key: str, unit: str, scale: float, digits: int) -> list[str]:
        a, b = plain[key] / scale, ours[key] / scale
        less = f"{a / b:.2f} x" if b else ""
        return [name, f"{a:,.{digits}f} {unit}", f"{b:,.{digits}f} {unit}", less]

    errors = [
        [name, f"{plain[key]:.2e}", f"{ours[key]:.2e}", ""]
        for name, key in (
            ("relative error of representations", "value_error"),
            ("largest relative error of a gradient", "gradient_error"),
        )
    ]
    losses = [" ".join(f"{loss:.4f}" for loss in side["losses"]) for side in (plain, ours)]
    return [
        ["", "unrewritten", "rewritten", "unrewritten / rewritten"],
        *errors,
        ["loss of each step", *losses, ""],
        line("training step (encoder and head)", "step_ms", "ms", 1, 1),
        line("  its peak memory over the start", "step_peak", "MiB", 2**20, 0),
        line("encoding pass", "encode_ms", "ms", 1, 1),
        line("  its peak memory over the start", "encode_peak", "MiB", 2**20, 0),
        line("first step, with compiling", "first_step_s", "s", 1, 1),
    ]


if __name__ == "__main__":
    sys.exit(main())
