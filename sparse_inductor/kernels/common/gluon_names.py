"""Names of Gluon that differ between versions of Triton, and an instruction that Gluon lacks.

Asynchronous copies have the shorter names since Triton 3.8.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _named(module: Any, now: str, before: str) -> Any:
    return getattr(module, now, None) or getattr(module, before)


# TMA copies: load(descriptor, coordinates, mbarrier, shared) and store(descriptor, coordinates, shared).
tma_load = _named(tma, "async_load", "async_copy_global_to_shared")
tma_store = _named(tma, "async_store", "async_copy_shared_to_global")


@gluon.jit
def say(TEXT: gl.constexpr):
    """Insert an instruction without operands, or a comment, into the PTX."""
    text: gl.constexpr = TEXT + " // $0"
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start():
    """`gdc_launch_dependents`, which Gluon lacks."""
    say("griddepcontrol.launch_dependents;")
