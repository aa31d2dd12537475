"""Whether the operators can run on a GPU of this machine. If not, programs are not rewritten, and a warning is logged.

On a CPU, the operators use ATen and always run.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from importlib import metadata

import torch

from .facts import facts_of

LEAST_TRITON = (3, 6)  # the Triton of the oldest supported torch
LEAST_CAPABILITY = (8, 0)  # bf16 matrix products


@functools.cache
def unsupported_reason(device: torch.device) -> str:
    """Return what the kernels lack on this device, "" if nothing, as far as is known without importing them."""
    if device.type != "cuda":
        return ""
    if torch.version.hip is not None:
        return "its kernels are made for NVIDIA GPUs"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton is not installed (pip install triton)"
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"triton {version} is older than {least} (pip install -U triton)"
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        return "triton needs a C compiler to start kernels (apt-get install gcc)"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, c)) for c in (capability, LEAST_CAPABILITY))
        return f"this GPU has compute capability {have}, its kernels need {least}"
    return ""


def unimportable(op: str, device: torch.device) -> str:
    """Return why an operator's kernels cannot be imported, "" if they can be, or if none are needed.

    The import takes up to 0.3 s, so call this only for operators that are inserted into a graph.
    """
    kernels = facts_of(op).kernels if device.type == "cuda" else ()
    return _import_problem(("common.replay", *kernels)) if kernels else ""


@functools.cache
def _import_problem(modules: tuple[str, ...]) -> str:
    for name in modules:
        try:
            importlib.import_module(f"{__package__}.kernels.{name}")
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            return f"its kernels cannot be imported ({name}: {type(error).__name__}: {line})"
    return ""
