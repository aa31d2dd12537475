"""Two dispatcher guards that every operator here needs."""

from __future__ import annotations

import contextlib

import torch


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Calls inside skip the Autograd keys: an operator's Autograd kernel uses it to reach the device kernels."""
    return torch._C._AutoDispatchBelowAutograd()


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[None]:
    """An operator's body computes in the dtypes it was given, whatever the caller's autocast says."""
    return torch.amp.autocast(device_type, enabled=False)
