"""Gluon's asynchronous copies by the names they have had since Triton 3.8; older ones call each after both its ends."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["load_box", "load_rows", "store_box"]


def _named(module: Any, now: str, before: str) -> Any:
    return getattr(module, now, None) or getattr(module, before)


# Global to shared memory, by addresses: (shared, addresses).
load_rows = _named(async_copy, "async_load", "async_copy_global_to_shared")
# The bulk copy engine's: (descriptor, place, barrier, shared) and (descriptor, place, shared).
load_box = _named(tma, "async_load", "async_copy_global_to_shared")
store_box = _named(tma, "async_store", "async_copy_shared_to_global")
