"""The GPU properties that host code plans launches for."""

from __future__ import annotations

import functools

import torch

from ... import layers


def capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability; (0, 0) on a CPU, or if only portable kernels may run."""
    return (0, 0) if layers.current() > layers.Layer.NATIVE else compute_capability(device)


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability, even if only portable kernels may run."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory that one program may use, in bytes: 227 KiB on an H100, 163 on an A100, 99 on an RTX
    4090."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
