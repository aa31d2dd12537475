"""Dispatcher guards that every operator here needs."""

from __future__ import annotations

import contextlib
from typing import NoReturn

import torch


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Calls inside skip the Autograd keys: an operator's Autograd kernel uses it to reach the device kernels."""
    return torch._C._AutoDispatchBelowAutograd()


def autocast_on(device_type: str) -> bool:
    """Whether the caller is under autocast; a device that has none (meta) never is."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[None]:
    """An operator's body computes in the dtypes it was given, whatever the caller's autocast says."""
    return torch.amp.autocast(device_type, enabled=False)


def outside_transforms(op: str) -> None:
    """Raises NotImplementedError where a torch.func transform goes through the operator: an Autograd kernel asks."""
    if torch._C._are_functorch_transforms_active():
        _decline(op)


def decline_vmap(lib: torch.library.Library, op: str) -> None:
    """Registers what `outside_transforms` raises for vmap, which is asked before autograd is."""
    lib.impl(op, lambda *args, **kwargs: _decline(op), "FuncTorchBatched")


def _decline(op: str) -> NoReturn:
    raise NotImplementedError(
        f"sparse_inductor::{op} takes no part in torch.func's transforms (grad, vjp, jvp, vmap): call the operations "
        "that it stands for, which torch.compile leaves as they are there"
    )
