"""What Gluon has under names that change, or has not.

Asynchronous copies have these names since Triton 3.8; older ones call each after both its ends.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _named(module: Any, now: str, before: str) -> Any:
    return getattr(module, now, None) or getattr(module, before)


# The bulk copy engine's: (descriptor, place, barrier, shared) and (descriptor, place, shared).
tma_load = _named(tma, "async_load", "async_copy_global_to_shared")
tma_store = _named(tma, "async_store", "async_copy_shared_to_global")


@gluon.jit
def say(TEXT: gl.constexpr):
    """Put an instruction without operands, or a comment, where this stands."""
    text: gl.constexpr = TEXT + " // $0"
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start():
    """`gdc_launch_dependents`, which Gluon has not."""
    say("griddepcontrol.launch_dependents;")
