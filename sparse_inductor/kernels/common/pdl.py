"""Programmatic dependent launch (PDL): a kernel starts while the preceding one ends. Compute capability 9.

Until all kernels before the preceding one have ended, a kernel may access only memory that an earlier step of the call
has used. Memory sharing in replayed calls relies on this (`recording.lifetimes`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arch import capability

# A feed-forward block of one token takes 14.4 us with PDL and 16.6 us without (H200).
USE_PDL = True


def pdl_options(t: torch.Tensor) -> dict[str, bool]:
    """Return the launch options of a kernel that begins with `wait_for_previous` (compute capability 9)."""
    able = USE_PDL and capability(t.device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """With PDL: let the next kernel start, and wait until the preceding kernel has ended. Every kernel of a sequence
    must wait, so that the end of one implies that all kernels before it have ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With PDL: let the next kernel start. This kernel itself was launched after the preceding ones had ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
