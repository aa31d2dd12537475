"""Kernels that start while the one in front of them ends: programmatic dependent launch, of compute capability 9."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arch import capability

# On an H200 a feed-forward block of one token takes 14.4 us so, and 16.6 without.
USE_PDL = True


def pdl_options(t: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that begins with `wait_for_previous` (compute capability 9)."""
    able = USE_PDL and capability(t.device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """With PDL, this kernel starts before the one in front of it has ended: wait for that, and let the next one
    start. Every kernel of a row of them has to wait, as the end of one says that those in front of it have ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With PDL, the kernel behind this one may start; this one itself started when all in front of it had ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
