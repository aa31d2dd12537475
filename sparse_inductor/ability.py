"""Whether the operators can run on a GPU here: where they cannot, a program is left as it is, with one clear line.

On a CPU they are ATen and always run.
"""

from __future__ import annotations

import functools
import os
import shutil
from importlib import metadata

import torch

__all__ = ["LEAST_CAPABILITY", "LEAST_TRITON", "missing"]

LEAST_TRITON = (3, 4)  # device-side tensor descriptors
LEAST_CAPABILITY = (8, 0)  # bf16 matrix products


@functools.cache
def missing(device: torch.device) -> str:
    """What the kernels lack on this device, "" where they lack nothing."""
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
    capability = _capability(device)
    if capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, c)) for c in (capability, LEAST_CAPABILITY))
        return f"this GPU has compute capability {have}, its kernels need {least}"
    return ""


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
