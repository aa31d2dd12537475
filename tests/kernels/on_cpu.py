"""Runs kernels in CUDA C++ on the CPU: cuda_on_cpu.cpp compiles them, and arrays are their arguments."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparse_inductor.kernels.common import cuda, native

SOURCE = Path(__file__).with_name("cuda_on_cpu.cpp")
# The stride by which the next thread to run is chosen: in order, in reverse, and alternating between warps.
ORDERS = (1, 255, 77)


class OnCpu:
    """A kernel compiled for the CPU with a block size and constants. Skips the test without a C++20 compiler."""

    def __init__(self, kernel: cuda.CudaKernel, num_warps: int = 8, **constants: Any) -> None:
        self._threads = 32 * num_warps
        texts = (path.read_text() for path in (kernel.source, cuda.HEADER))
        folders = (f"-I{path.parent}" for path in (kernel.source, cuda.HEADER))
        options = [
            "-std=c++20",
            "-O1",
            f'-DSOURCE="{kernel.source.name}"',
            *folders,
            *cuda.macros(num_warps, constants),
        ]
        try:
            self._library = native.compiled(SOURCE, *options, depends_on="\0".join(texts))
        except FileNotFoundError as error:
            pytest.skip(str(error))
        self._kernel = ctypes.cast(getattr(self._library, kernel.__name__), ctypes.c_void_p)

    def __call__(
        self, grid: tuple[int, int], *given: Any, order: int = 1, late: tuple[np.ndarray, ...] = (),
    ) -> None:  # fmt: skip
        """Launch the kernel.

        late: arrays that are filled with garbage until the kernel waits for the preceding kernel (griddepcontrol.wait).
        """
        written = [a.copy() for a in late]
        for a, right in zip(late, written):
            a.view(np.uint8)[...] = 0xCD
            self._library.write_late(
                *(ctypes.c_void_p(x.ctypes.data) for x in (a, right)), ctypes.c_size_t(a.nbytes)
            )
        words = [_word(a) for a in given]
        words += [0] * (24 - len(words))
        given_words = (ctypes.c_uint64 * 24)(*words)
        self._library.launch(self._kernel, given_words, *grid, self._threads, order)


def _word(given: Any) -> int:
    if isinstance(given, np.ndarray):
        return given.ctypes.data
    return given.data_ptr() if isinstance(given, torch.Tensor) else given


def launch_on_cpu(
    kernel: cuda.CudaKernel, grid: Any, *args: Any, num_warps: int, **constants: Any
) -> None:
    """Launch a kernel on the CPU, as a replacement of `CudaKernel.launch`."""
    OnCpu(kernel, num_warps, **constants)((*grid, 1)[:2], *args)
